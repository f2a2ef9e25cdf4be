//! GGUF files: a reader over the mapped file, and a writer.
//!
//! The reader treats the file as hostile. Everything that later code relies on is checked once, in [`Gguf::open`]:
//! counts against the bytes present, names, types, shapes, alignment, and that every tensor lies inside its file. What
//! it holds afterwards is small (names and ranges); metadata and weights are read where they lie.
//!
//! A model split over several files (`NAME-00001-of-0000N.gguf`) opens as one, from any of its parts.
//!
//! What this module does not do: know any model. Which keys and tensors Gemma 4 needs is the config's business, so a
//! tensor of a type unknown here is listed and only refused once its [`TensorInfo::dtype`] is asked for.

mod cursor;
mod error;
mod header;
mod limits;
mod map;
mod metadata;
mod split;
mod types;
mod value;
mod writer;

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

use gemma4c_blocks::DType;
use gemma4c_plan::fingerprint::{FileBytes, fingerprint};

pub(crate) use error::supported_types;
pub use error::{Fault, GgufError};
pub use limits::{MAX_DIMS, MAX_ENTRIES};
pub use metadata::Metadata;
pub use types::{stored_bytes, type_name};
pub use value::{Array, FromValue, Value, ValueType};
pub use writer::{Body, Element, WriteError, Writer};

use map::Mapping;

/// The number of the type of 32-bit integers in a file.
const GGML_I32: u32 = 26;

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: Box<str>,
    dims: [u64; MAX_DIMS],
    rank: u32,
    /// The type's number in the file, which [`TensorInfo::dtype`] may not know.
    pub ggml_type: u32,
    /// Index in [`Gguf::files`].
    pub file: usize,
    /// From the start of that file.
    pub offset: u64,
    /// Bytes of data; 0 where the type is unknown.
    pub len: u64,
}

impl TensorInfo {
    /// The shape, fastest dimension (the columns of a row) first; never empty.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..self.rank as usize]
    }

    pub fn dtype(&self) -> Result<DType, GgufError> {
        DType::from_ggml_id(self.ggml_type)
            .ok_or_else(|| GgufError::UnsupportedType { tensor: self.name.to_string(), id: self.ggml_type })
    }
}

/// One file of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    pub path: PathBuf,
    /// Bytes.
    pub len: u64,
    /// Bytes up to the end of the tensor table.
    pub header_len: u64,
}

/// What a model's files say of it: metadata and the table of tensors, without the tensors' data. A model that is only
/// described ([`Writer::describe`]) has no more than this.
pub struct Header {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Indices of `tensors`, sorted by name.
    by_name: Vec<u32>,
}

/// An open model: one file, or all parts of a split one.
pub struct Gguf {
    files: Vec<FileInfo>,
    maps: Vec<Arc<Mapping>>,
    header: Header,
}

impl Header {
    /// The metadata; of a split model, that of its first part.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in the files' order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let found = self.by_name.binary_search_by(|&i| self.tensors[i as usize].name.as_ref().cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found] as usize])
    }
}

/// Whoever needs a header alone can be given a model.
impl Deref for Gguf {
    type Target = Header;

    fn deref(&self) -> &Header {
        &self.header
    }
}

impl Gguf {
    /// The bytes of a tensor of this model.
    ///
    /// # Panics
    /// Where `tensor` is another model's and lies outside this one's files.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        &self.maps[tensor.file][tensor.offset as usize..][..tensor.len as usize]
    }

    /// The values of a tensor of 32-bit integers.
    pub fn integers(&self, name: &str) -> Result<Vec<i32>, GgufError> {
        let tensor = self.tensor(name).ok_or_else(|| GgufError::MissingTensor { tensor: name.into() })?;
        if tensor.ggml_type != GGML_I32 {
            return Err(GgufError::NotIntegers { tensor: name.into(), id: tensor.ggml_type });
        }
        // Not a type of weights, so its size was not checked when the file was opened.
        let bytes = tensor.dims().iter().try_fold(4u64, |bytes, dim| bytes.checked_mul(*dim));
        let (map, file) = (&self.maps[tensor.file], &self.files[tensor.file]);
        let end = bytes.and_then(|bytes| tensor.offset.checked_add(bytes)).filter(|end| *end <= file.len);
        let Some(end) = end else {
            let (start, bytes) = (tensor.offset.into(), bytes.unwrap_or(u64::MAX));
            let fault = Fault::CutTensor { tensor: name.into(), start, bytes, len: file.len };
            return Err(GgufError::Malformed { path: file.path.clone(), fault });
        };
        let values = map[tensor.offset as usize..end as usize].chunks_exact(4);
        Ok(values.map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    pub fn files(&self) -> &[FileInfo] {
        &self.files
    }

    /// A number that changes when the model does, taken from headers, sizes and the edges of the given tensors:
    /// milliseconds, whatever the size. See [`gemma4c_plan::fingerprint`].
    ///
    /// # Panics
    /// Where a tensor is another model's and lies outside this one's files.
    pub fn fingerprint<'a>(&self, tensors: impl IntoIterator<Item = &'a TensorInfo>) -> u64 {
        Gguf::fingerprint_of(&[(self, tensors.into_iter().collect())])
    }

    /// The same of several models as one: files and tensors of one after those of another.
    ///
    /// # Panics
    /// Where a tensor lies outside the files of its model.
    pub fn fingerprint_of(models: &[(&Gguf, Vec<&TensorInfo>)]) -> u64 {
        let maps: Vec<Arc<Mapping>> = models.iter().flat_map(|(model, _)| model.maps.iter().cloned()).collect();
        let infos = models.iter().flat_map(|(model, _)| &model.files);
        let files: Vec<FileBytes<'_>> = std::iter::zip(&maps, infos)
            .map(|(map, file)| FileBytes { bytes: map, header_len: file.header_len })
            .collect();
        let mut first_file = 0;
        let tensors = models.iter().flat_map(|(model, tensors)| {
            let first = first_file;
            first_file += model.files.len();
            tensors.iter().map(move |t| (first + t.file, t.offset, t.len))
        });
        Mapping::scattered(&maps, || fingerprint(&files, tensors))
            .expect("every range was checked against its file when it was opened")
    }
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf")
            .field("files", &self.files)
            .field("tensors", &self.header.tensors.len())
            .finish_non_exhaustive()
    }
}
