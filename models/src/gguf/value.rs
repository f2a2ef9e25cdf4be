//! Metadata values: scalars by value, strings and arrays as views into the mapped file.
//!
//! An [`Array`] is never expanded. Its elements were walked once when the file was opened, so that its length is true
//! and its strings are text; iterating checks again and ends early if somebody changed the file since.

use std::fmt;

use super::cursor::{Cursor, Ended};
use super::error::quoted;

/// The type tag of a metadata value; the discriminants are those of the file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    pub const ALL: [ValueType; 13] = {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64]
    };

    pub fn from_id(id: u32) -> Option<ValueType> {
        Self::ALL.get(id as usize).copied()
    }

    pub fn id(self) -> u32 {
        self as u32
    }

    pub fn name(self) -> &'static str {
        ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"][self as usize]
    }

    /// The least number of bytes a value takes; exact for all but strings and arrays.
    pub(super) fn least_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::Str => 8,
            ValueType::Array => 12,
        }
    }
}

/// One metadata value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of one element type, as it lies in the file.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

/// Why a value could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadValue {
    Ended,
    NotUtf8,
    NestedArray,
    UnknownType(u32),
}

impl From<Ended> for BadValue {
    fn from(Ended: Ended) -> BadValue {
        BadValue::Ended
    }
}

impl<'a> Value<'a> {
    /// Reads the value at the cursor. With `check`, the elements of an array of strings are walked, so that the cursor
    /// lands behind it and every one is known to be text; without, the array takes all the bytes that are left.
    pub(super) fn read(cursor: &mut Cursor<'a>, ty: ValueType, check: bool) -> Result<Value<'a>, BadValue> {
        Ok(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array()?)),
            ValueType::U32 => Value::U32(cursor.u32()?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array()?)),
            ValueType::Bool => Value::Bool(cursor.array::<1>()? != [0]),
            ValueType::Str => Value::Str(std::str::from_utf8(cursor.string()?).map_err(|_| BadValue::NotUtf8)?),
            ValueType::Array => Value::Array(Array::read(cursor, check)?),
            ValueType::U64 => Value::U64(cursor.u64()?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array()?)),
        })
    }

    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::Str,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// Any of the integer types, widened.
    pub fn as_int(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}

impl<'a> Array<'a> {
    fn read(cursor: &mut Cursor<'a>, check: bool) -> Result<Array<'a>, BadValue> {
        let id = cursor.u32()?;
        let element = ValueType::from_id(id).ok_or(BadValue::UnknownType(id))?;
        let count = cursor.u64()?;
        if element == ValueType::Array {
            return Err(BadValue::NestedArray);
        }
        let least = count.checked_mul(element.least_bytes()).ok_or(BadValue::Ended)?;
        if least > cursor.remaining() as u64 {
            return Err(BadValue::Ended);
        }
        let bytes = match element {
            ValueType::Str if check => {
                let mut walk = *cursor;
                for _ in 0..count {
                    std::str::from_utf8(walk.string()?).map_err(|_| BadValue::NotUtf8)?;
                }
                cursor.take((walk.position() - cursor.position()) as u64)?
            }
            ValueType::Str => cursor.take(cursor.remaining() as u64)?,
            _ => cursor.take(least)?,
        };
        Ok(Array { element, len: count as usize, bytes })
    }

    pub fn element_type(&self) -> ValueType {
        self.element
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as the file spells them.
    pub(super) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (element, mut cursor) = (self.element, Cursor::new(self.bytes));
        (0..self.len).map_while(move |_| Value::read(&mut cursor, element, false).ok())
    }

    /// The elements of an array of strings.
    pub fn strings(&self) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        let mut cursor = Cursor::new(self.bytes);
        let next = move |_| cursor.string().ok().and_then(|s| std::str::from_utf8(s).ok());
        (self.element == ValueType::Str).then(|| (0..self.len).map_while(next))
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Type and value on one short line, as errors and `inspect` show it.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ty = self.value_type().name();
        match self {
            Value::F32(v) => write!(f, "{ty} {v}"),
            Value::F64(v) => write!(f, "{ty} {v}"),
            Value::Bool(v) => write!(f, "{ty} {v}"),
            Value::Str(v) => write!(f, "{ty} {}", quoted(v)),
            Value::Array(v) => write!(f, "{ty} of {} {}", v.len, v.element.name()),
            other => write!(f, "{ty} {}", other.as_int().unwrap_or_default()),
        }
    }
}

/// What a metadata value can be read as.
pub trait FromValue<'a>: Sized {
    /// Completes "expected …".
    const EXPECTED: &'static str;

    fn from_value(value: Value<'a>) -> Option<Self>;
}

impl FromValue<'_> for u32 {
    const EXPECTED: &'static str = "an integer from 0 to 4294967295";

    fn from_value(value: Value<'_>) -> Option<u32> {
        value.as_int()?.try_into().ok()
    }
}

impl FromValue<'_> for u64 {
    const EXPECTED: &'static str = "an integer that is not negative";

    fn from_value(value: Value<'_>) -> Option<u64> {
        value.as_int()?.try_into().ok()
    }
}

impl FromValue<'_> for i32 {
    const EXPECTED: &'static str = "an integer of 32 bits";

    fn from_value(value: Value<'_>) -> Option<i32> {
        value.as_int()?.try_into().ok()
    }
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a floating-point number";

    fn from_value(value: Value<'_>) -> Option<f32> {
        match value {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";

    fn from_value(value: Value<'_>) -> Option<bool> {
        match value {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";

    fn from_value(value: Value<'a>) -> Option<&'a str> {
        match value {
            Value::Str(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for Array<'a> {
    const EXPECTED: &'static str = "an array";

    fn from_value(value: Value<'a>) -> Option<Array<'a>> {
        match value {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }
}
