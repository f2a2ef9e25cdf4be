//! Writes a GGUF file: the header at once, then tensor data by position, from as many threads as the caller has. Or the
//! header alone, in memory, for whoever asks what such a file would say.
//!
//! The file grows under a temporary name beside its final one and is renamed when it is complete. Nobody ever opens
//! half a model, and a process that has the old file mapped keeps reading the old bytes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gemma4c_blocks::DType;
use thiserror::Error;

use super::error::{Fault, GgufError, quoted};
use super::header::{self, ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, Parsed, VERSION, sorted};
use super::map::Mapping;
use super::metadata::Metadata;
use super::value::{Value, ValueType};
use super::{Header, MAX_DIMS, NOT_OF_A_FILE};

/// An error of the writer.
#[derive(Debug, Error)]
pub enum WriteError {
    #[error("cannot write {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{what} {} is given twice", quoted(name))]
    Duplicate { what: &'static str, name: String },
    #[error("tensor {} of shape {dims:?} cannot be stored as {dtype}: {problem}", quoted(name))]
    Shape { name: String, dims: Vec<u64>, dtype: DType, problem: &'static str },
    #[error("alignment {0} is not a power of two")]
    Alignment(u32),
    #[error("tensor {}: bytes {start}..{end} are outside its {len}", quoted(name))]
    OutOfRange { name: String, start: u64, end: u64, len: u64 },
}

/// A tensor to be written, and where its data goes.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    dims: Vec<u64>,
    /// What its type is in the file.
    ggml_id: u32,
    /// The type, where files do not have it: such a tensor can be described, and not written.
    described: Option<DType>,
    /// From the start of the data.
    offset: u64,
    len: u64,
}

/// What ggml calls 32-bit integers.
const GGML_I32: u32 = 26;

/// Collects metadata and tensors; [`Writer::create`] turns it into a file.
pub struct Writer {
    /// The key-value part, already encoded.
    metadata: Vec<u8>,
    keys: BTreeSet<String>,
    tensors: Vec<Tensor>,
    names: BTreeSet<String>,
    alignment: u64,
    data_len: u64,
}

impl Default for Writer {
    fn default() -> Self {
        Writer {
            metadata: Vec::new(),
            keys: BTreeSet::new(),
            tensors: Vec::new(),
            names: BTreeSet::new(),
            alignment: DEFAULT_ALIGNMENT,
            data_len: 0,
        }
    }
}

impl Writer {
    pub fn new() -> Writer {
        Writer::default()
    }

    /// A writer whose tensors start at multiples of `alignment` bytes instead of 32, and that says so in the metadata.
    pub fn with_alignment(alignment: u32) -> Result<Writer, WriteError> {
        if !alignment.is_power_of_two() {
            return Err(WriteError::Alignment(alignment));
        }
        let mut writer = Writer { alignment: alignment.into(), ..Writer::default() };
        writer.set(ALIGNMENT_KEY, alignment)?;
        Ok(writer)
    }

    /// Adds a key with one value, or with an array read from another file.
    pub fn set<'v>(&mut self, key: &str, value: impl Into<Value<'v>>) -> Result<(), WriteError> {
        let value = value.into();
        self.key(key)?;
        self.metadata.extend(value.value_type().id().to_le_bytes());
        encode(value, &mut self.metadata);
        Ok(())
    }

    /// Adds a key with an array.
    pub fn set_array<'v, T: Element<'v>>(
        &mut self,
        key: &str,
        values: impl IntoIterator<Item = T>,
    ) -> Result<(), WriteError> {
        self.key(key)?;
        self.metadata.extend(ValueType::Array.id().to_le_bytes());
        self.metadata.extend(T::TYPE.id().to_le_bytes());
        let count_at = self.metadata.len();
        self.metadata.extend([0; 8]);
        let mut count = 0u64;
        for value in values {
            encode(value.into(), &mut self.metadata);
            count += 1;
        }
        self.metadata[count_at..count_at + 8].copy_from_slice(&count.to_le_bytes());
        Ok(())
    }

    fn key(&mut self, key: &str) -> Result<(), WriteError> {
        if !self.keys.insert(key.into()) {
            return Err(WriteError::Duplicate { what: "metadata key", name: key.into() });
        }
        encode(Value::Str(key), &mut self.metadata);
        Ok(())
    }

    /// Adds a tensor, fastest dimension first, and returns its index.
    pub fn tensor(&mut self, name: &str, dims: &[u64], dtype: DType) -> Result<usize, WriteError> {
        let bad = |problem| WriteError::Shape { name: name.into(), dims: dims.into(), dtype, problem };
        let (row, rest) = dims.split_first().ok_or_else(|| bad("it has no dimensions"))?;
        if dims.len() > MAX_DIMS {
            return Err(bad("it has more than four dimensions"));
        }
        let row_bytes = dtype.file_row_bytes(*row).ok_or_else(|| bad("a row is not a whole number of blocks"))?;
        let len = rest.iter().try_fold(row_bytes, |bytes, &dim| bytes.checked_mul(dim));
        let len = len.filter(|&len| len > 0).ok_or_else(|| bad("its size is 0 or overflows"))?;
        let offset = self.data_len.next_multiple_of(self.alignment);
        self.data_len = offset.checked_add(len).ok_or_else(|| bad("the file's size overflows"))?;
        if !self.names.insert(name.into()) {
            return Err(WriteError::Duplicate { what: "tensor", name: name.into() });
        }
        let (ggml_id, described) = dtype.layout().ggml_id.map_or((NOT_OF_A_FILE, Some(dtype)), |id| (id, None));
        self.tensors.push(Tensor { name: name.into(), dims: dims.into(), ggml_id, described, offset, len });
        Ok(self.tensors.len() - 1)
    }

    /// Adds a tensor of 32-bit integers, which are as long as floats.
    pub fn integers(&mut self, name: &str, dims: &[u64]) -> Result<usize, WriteError> {
        let index = self.tensor(name, dims, DType::F32)?;
        self.tensors[index].ggml_id = GGML_I32;
        Ok(index)
    }

    /// Writes the header and makes room for the data, which is zeros until it is written.
    pub fn create(self, path: impl AsRef<Path>) -> Result<Body, WriteError> {
        if let Some((tensor, dtype)) = self.tensors.iter().find_map(|t| Some((t, t.described?))) {
            let (name, dims, problem) = (tensor.name.clone(), tensor.dims.clone(), "no GGUF file has the type");
            return Err(WriteError::Shape { name, dims, dtype, problem });
        }
        let path = path.as_ref().to_path_buf();
        let mut partial = path.clone().into_os_string();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let failed = |source| WriteError::Io { path: partial.clone(), source };

        let (header, data_start, file_len) = self.encode_header();
        let file = File::create(&partial).map_err(failed)?;
        // From here on a failure removes the file again.
        let body = Body { file, partial: partial.clone(), path, tensors: self.tensors, data_start, file_len };
        (&body.file).write_all(&header).map_err(failed)?;
        body.file.set_len(file_len).map_err(failed)?;
        Ok(body)
    }

    /// What the file would say, without a file: read back as any other header is.
    pub fn describe(self) -> Result<Header, GgufError> {
        let described: Vec<Option<DType>> = self.tensors.iter().map(|tensor| tensor.described).collect();
        let (header, _, file_len) = self.encode_header();
        let malformed = |fault| GgufError::Malformed { path: "a model that is only described".into(), fault };
        let Parsed { entries, by_key, mut tensors, .. } = header::parse(&header, 0, file_len).map_err(malformed)?;
        for (tensor, dtype) in tensors.iter_mut().zip(described) {
            tensor.presented = dtype;
        }
        let by_name = sorted(&tensors, |t| &t.name);
        let by_name = by_name.map_err(|t| malformed(Fault::DuplicateTensor(t.name.to_string())))?;
        let metadata = Metadata::new(Arc::new(Mapping::Header(header)), entries, by_key);
        Ok(Header { metadata, tensors, by_name, aliases: None })
    }

    /// The header's bytes, where the data starts behind it, and the bytes of the whole file.
    fn encode_header(&self) -> (Vec<u8>, u64, u64) {
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.keys.len() as u64).to_le_bytes());
        header.extend(&self.metadata);
        for tensor in &self.tensors {
            encode(Value::Str(&tensor.name), &mut header);
            header.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| header.extend(dim.to_le_bytes()));
            header.extend(tensor.ggml_id.to_le_bytes());
            header.extend(tensor.offset.to_le_bytes());
        }
        let data_start = (header.len() as u64).next_multiple_of(self.alignment);
        let file_len = data_start + self.data_len.next_multiple_of(self.alignment);
        (header, data_start, file_len)
    }
}

/// A file whose header is written and whose tensors are being filled. Dropped before [`Body::finish`], it leaves
/// nothing.
#[derive(Debug)]
pub struct Body {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    tensors: Vec<Tensor>,
    data_start: u64,
    file_len: u64,
}

impl Body {
    /// Writes `bytes` at `offset` within the data of tensor number `tensor`; any thread, any order.
    pub fn write_at(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<(), WriteError> {
        let Tensor { name, offset: start, len, .. } = &self.tensors[tensor];
        let end = offset.saturating_add(bytes.len() as u64);
        if end > *len {
            return Err(WriteError::OutOfRange { name: name.clone(), start: offset, end, len: *len });
        }
        let at = self.data_start + start + offset;
        self.file.write_all_at(bytes, at).map_err(|source| WriteError::Io { path: self.partial.clone(), source })
    }

    /// Bytes of data of tensor number `tensor`.
    pub fn tensor_len(&self, tensor: usize) -> u64 {
        self.tensors[tensor].len
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Gives the file its name.
    pub fn finish(mut self) -> Result<(), WriteError> {
        let partial = std::mem::take(&mut self.partial);
        std::fs::rename(&partial, &self.path).map_err(|source| {
            self.partial = partial;
            WriteError::Io { path: self.path.clone(), source }
        })
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if !self.partial.as_os_str().is_empty() {
            // Best effort: whatever stopped the writing is the error worth telling.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

fn encode(value: Value<'_>, out: &mut Vec<u8>) {
    match value {
        Value::U8(v) => out.push(v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(v.into()),
        Value::Str(v) => {
            out.extend((v.len() as u64).to_le_bytes());
            out.extend(v.as_bytes());
        }
        Value::Array(v) => {
            out.extend(v.element_type().id().to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            out.extend(v.bytes());
        }
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

/// What an array can be made of.
pub trait Element<'v>: Into<Value<'v>> {
    const TYPE: ValueType;
}

macro_rules! elements {
    ($($rust:ty => $variant:ident),* $(,)?) => {$(
        impl<'v> From<$rust> for Value<'v> {
            fn from(value: $rust) -> Value<'v> {
                Value::$variant(value)
            }
        }

        impl<'v> Element<'v> for $rust {
            const TYPE: ValueType = ValueType::$variant;
        }
    )*};
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool, &'v str => Str,
    u64 => U64, i64 => I64, f64 => F64,
}
