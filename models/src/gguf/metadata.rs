//! The key-value part of a GGUF file, looked up by key and read with the type the caller wants.
//!
//! Keys are copied (they are few and short), values stay in the mapped file.

use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::cursor::Cursor;
use super::error::{GgufError, quoted};
use super::limits::MAX_ENTRIES;
use super::map::Mapping;
use super::value::{Array, FromValue, Value, ValueType};

/// Where a value lies in its file.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub key: Box<str>,
    pub ty: ValueType,
    pub value: Range<usize>,
}

pub struct Metadata {
    file: Arc<Mapping>,
    /// In the file's order.
    entries: Vec<Entry>,
    /// Indices of `entries`, sorted by key.
    by_key: Vec<u32>,
}

impl Metadata {
    pub(super) fn new(file: Arc<Mapping>, entries: Vec<Entry>, by_key: Vec<u32>) -> Metadata {
        Metadata { file, entries, by_key }
    }

    /// A hash of all of it, where it is in no file; else 0.
    pub(super) fn hash_in_memory(&self) -> u64 {
        match &*self.file {
            Mapping::Header(bytes) => xxh3_64(bytes),
            Mapping::File(_) => 0,
        }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let found = self.by_key.binary_search_by(|&i| self.entries[i as usize].key.as_ref().cmp(key)).ok()?;
        self.value(&self.entries[self.by_key[found] as usize])
    }

    /// All keys and values, in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|entry| Some((entry.key.as_ref(), self.value(entry)?)))
    }

    fn value(&self, entry: &Entry) -> Option<Value<'_>> {
        let mut cursor = Cursor::new(self.file.get(entry.value.clone())?);
        Value::read(&mut cursor, entry.ty, false).ok()
    }

    /// The value of `key`, `None` where the file does not have it, an error where it is of another type.
    pub fn optional<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        T::from_value(value).map(Some).ok_or_else(|| wrong(key, T::EXPECTED, value))
    }

    /// The value of `key`, which must be there.
    pub fn required<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.optional(key)?.ok_or_else(|| GgufError::MissingKey { key: key.into() })
    }

    /// Any integer type that holds a u32.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.required(key)
    }

    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.required(key)
    }

    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        self.required(key)
    }

    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.required(key)
    }

    pub fn array(&self, key: &str) -> Result<Array<'_>, GgufError> {
        self.required(key)
    }

    /// A key that is one number where all layers agree, and an array of one number a layer where they do not.
    pub fn per_layer_u32(&self, key: &str, layers: u32) -> Result<Vec<u32>, GgufError> {
        self.per_layer(key, layers)
    }

    /// The same for flags.
    pub fn per_layer_bool(&self, key: &str, layers: u32) -> Result<Vec<bool>, GgufError> {
        self.per_layer(key, layers)
    }

    fn per_layer<'a, T: FromValue<'a> + Clone>(&'a self, key: &str, layers: u32) -> Result<Vec<T>, GgufError> {
        let value = self.get(key).ok_or_else(|| GgufError::MissingKey { key: key.into() })?;
        // The layer count is the file's own claim, and it is about to size an allocation.
        if u64::from(layers) > MAX_ENTRIES {
            return Err(wrong(key, &format!("a value for each of {layers} layers (at most {MAX_ENTRIES})"), value));
        }
        let expected = || format!("{}, or an array of {layers} such", T::EXPECTED);
        match value {
            Value::Array(array) if array.len() == layers as usize => {
                let values: Option<Vec<T>> = array.iter().map(T::from_value).collect();
                values.filter(|v| v.len() == layers as usize).ok_or_else(|| wrong(key, &expected(), value))
            }
            Value::Array(_) => Err(wrong(key, &expected(), value)),
            one => {
                let one = T::from_value(one).ok_or_else(|| wrong(key, &expected(), value))?;
                Ok(vec![one; layers as usize])
            }
        }
    }
}

fn wrong(key: &str, expected: &str, found: Value<'_>) -> GgufError {
    GgufError::WrongValue { key: key.into(), expected: expected.into(), found: found.to_string() }
}

impl std::fmt::Debug for Metadata {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = self.iter().map(|(key, value)| (quoted(key), value.to_string()));
        f.debug_map().entries(shown).finish()
    }
}
