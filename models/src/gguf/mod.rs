//! GGUF files: a reader over the mapped file, and a writer.
//!
//! The reader treats the file as hostile. Everything that later code relies on is checked once, in [`Gguf::open`]:
//! counts against the bytes present, names, types, shapes, alignment, and that every tensor lies inside its file. What
//! it holds afterwards is small (names and ranges); metadata and weights are read where they lie.
//!
//! A model split over several files (`NAME-00001-of-0000N.gguf`) opens as one, from any of its parts.
//!
//! What opens as a [`Gguf`] need not be one: other formats are presented as if they were ([`Gguf::presented`]), with
//! tensors that are made of pieces of files ([`TensorInfo::pieces`]).
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

use std::borrow::Cow;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::{Fault as RecipeFault, Input};
use gemma4c_plan::fingerprint::{FileBytes, fingerprint};
use gemma4c_plan::{Piece, Span};
use rayon::prelude::*;

pub(crate) use error::supported_types;
pub use error::{Fault, GgufError};
pub use limits::{MAX_DIMS, MAX_ENTRIES};
pub use metadata::Metadata;
pub use types::{stored_bytes, type_name};
pub use value::{Array, FromValue, Value, ValueType};
pub use writer::{Body, Element, WriteError, Writer};

pub(crate) use map::Mapping;

/// The number of the type of 32-bit integers in a file.
const GGML_I32: u32 = 26;

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq)]
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
    /// What its rows are made of, in order; none where its data is in its file as it is. File and offset are 0 then.
    pub pieces: Vec<Piece>,
    /// Where the number in a file does not say it.
    presented: Option<DType>,
}

impl TensorInfo {
    /// The shape, fastest dimension (the columns of a row) first; never empty.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..self.rank as usize]
    }

    pub fn dtype(&self) -> Result<DType, GgufError> {
        self.presented
            .or_else(|| DType::from_ggml_id(self.ggml_type))
            .ok_or_else(|| GgufError::UnsupportedType { tensor: self.name.to_string(), id: self.ggml_type })
    }
}

impl TensorInfo {
    /// A tensor of a presented model, whose data is in a file as it is.
    pub(crate) fn stored(name: String, dims: &[u64], dtype: DType, span: Span) -> TensorInfo {
        let tensor = TensorInfo::made(name, dims, dtype, Vec::new());
        TensorInfo { file: span.file as usize, offset: span.offset, len: span.bytes, ..tensor }
    }

    /// A tensor of a presented model, made of pieces. `dims` are one to four, and rows are whole blocks.
    pub(crate) fn made(name: String, dims: &[u64], dtype: DType, pieces: Vec<Piece>) -> TensorInfo {
        let mut all = [1; MAX_DIMS];
        all[..dims.len()].copy_from_slice(dims);
        let rows: u64 = dims[1..].iter().product();
        let len = dtype.row_bytes(dims[0]).map_or(0, |bytes| bytes * rows);
        let rank = dims.len() as u32;
        let (ggml_type, presented) = (NOT_OF_A_FILE, Some(dtype));
        TensorInfo { name: name.into(), dims: all, rank, ggml_type, file: 0, offset: 0, len, pieces, presented }
    }

    /// The same under another name.
    pub(crate) fn renamed(&self, name: &str) -> TensorInfo {
        TensorInfo { name: name.into(), ..self.clone() }
    }

    /// All bytes of files that its data depends on.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        let itself = Span { file: self.file as u32, offset: self.offset, bytes: self.len };
        let whole = self.pieces.is_empty().then_some(itself);
        whole.into_iter().chain(self.pieces.iter().flat_map(|piece| piece.inputs.iter().copied()))
    }
}

/// The number of the type of a tensor that no GGUF file has.
const NOT_OF_A_FILE: u32 = u32::MAX;

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
    /// What the files call a tensor, where that is another name.
    aliases: Option<fn(&str) -> String>,
}

/// An open model: one file, or all parts of a split one.
pub struct Gguf {
    files: Vec<FileInfo>,
    maps: Vec<Arc<Mapping>>,
    header: Header,
    /// What of the files is not used, for people.
    notes: Vec<String>,
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

    /// A tensor's name for messages: with the name that the files have for it, where that is another.
    pub fn called(&self, name: &str) -> String {
        self.aliases.map_or_else(|| name.to_owned(), |alias| format!("{} ({name})", alias(name)))
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
    /// A model of another format, as if it were of this one: files with their mapped bytes, metadata, and tensors with
    /// distinct names whose spans lie in these files. `aliases` turns a tensor's name into the one in the files.
    pub(crate) fn presented(
        files: Vec<(FileInfo, Arc<Mapping>)>,
        metadata: Header,
        tensors: Vec<TensorInfo>,
        aliases: fn(&str) -> String,
        notes: Vec<String>,
    ) -> Gguf {
        let (files, maps) = files.into_iter().unzip();
        let by_name = header::sorted(&tensors, |t| &t.name).unwrap_or_default();
        let header = Header { tensors, by_name, aliases: Some(aliases), ..metadata };
        Gguf { files, maps, header, notes }
    }

    /// The same files with these tensors in place of their own: with distinct names, and spans in the files.
    pub(crate) fn with_tensors(self, tensors: Vec<TensorInfo>) -> Gguf {
        let by_name = header::sorted(&tensors, |t| &t.name).unwrap_or_default();
        let header = Header { tensors, by_name, ..self.header };
        Gguf { header, ..self }
    }

    /// The same model with another's files behind its own.
    pub(crate) fn with_files_of(mut self, other: &Gguf) -> Gguf {
        self.files.extend(other.files.iter().cloned());
        self.maps.extend(other.maps.iter().cloned());
        self
    }

    /// The same model with these tensors in place of those of their names.
    pub(crate) fn with_replaced(mut self, new: Vec<TensorInfo>) -> Gguf {
        for tensor in new {
            if let Some(old) = self.header.tensors.iter_mut().find(|old| old.name == tensor.name) {
                *old = tensor;
            }
        }
        self
    }

    /// The same model with some tensors replaced by others of the same name.
    pub(crate) fn with_changed(
        mut self,
        change: impl Fn(&Header, &TensorInfo) -> Result<Option<TensorInfo>, GgufError>,
    ) -> Result<Gguf, GgufError> {
        let changed = self.tensors().iter().map(|tensor| change(&self, tensor)).collect::<Result<Vec<_>, _>>()?;
        for (tensor, new) in self.header.tensors.iter_mut().zip(changed) {
            if let Some(new) = new {
                *tensor = new;
            }
        }
        Ok(self)
    }

    /// What of the files is not used, in sentences for people.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The bytes of a tensor of this model, as a plan wants them: those of a file, or made of its pieces.
    ///
    /// # Panics
    /// Where `tensor` is another model's and lies outside this one's files.
    pub fn bytes(&self, tensor: &TensorInfo) -> Result<Cow<'_, [u8]>, GgufError> {
        if tensor.pieces.is_empty() {
            return Ok(Cow::Borrowed(self.data(tensor)));
        }
        let dtype = tensor.dtype()?;
        let columns = tensor.dims()[0];
        let row_bytes = dtype.row_bytes(columns).unwrap_or(0) as usize;
        let mut bytes = vec![0; tensor.len as usize];
        let some = ROWS_AT_A_TIME * row_bytes.max(1);
        let (mut rest, mut parts, mut first) = (bytes.as_mut_slice(), Vec::new(), 0);
        for piece in &tensor.pieces {
            let (own, after) = rest.split_at_mut(piece.rows as usize * row_bytes);
            rest = after;
            parts.extend(own.chunks_mut(some).enumerate().map(|(at, out)| (piece, first, at * ROWS_AT_A_TIME, out)));
            first += piece.rows as usize;
        }
        parts.into_par_iter().try_for_each(|(piece, first, row, out)| {
            let shapes = piece.recipe.inputs(dtype, columns).unwrap_or_default();
            let rows = out.len() / row_bytes.max(1);
            let at = |(shape, span): (&Input, &Span)| {
                let (start, bytes) = shape.of_rows(row as u64, rows as u64)?;
                self.maps.get(span.file as usize)?.get((span.offset + start) as usize..)?.get(..bytes as usize)
            };
            let inputs: Option<Vec<&[u8]>> = shapes.iter().zip(&piece.inputs).map(at).collect();
            let made = match inputs {
                Some(inputs) => piece.recipe.make(dtype, columns as usize, row as u64, &inputs, out),
                None => Err(RecipeFault::Misfit),
            };
            made.map_err(|fault| unmade(tensor, first + row, fault))
        })?;
        Ok(Cow::Owned(bytes))
    }

    /// The bytes of a tensor of this model that is in a file as it is.
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

    /// A number that changes with the metadata of a presented model, which are in none of its files; 0 for others.
    pub fn metadata_hash(&self) -> u64 {
        self.header.metadata.hash_in_memory()
    }

    /// A number that changes when the model does, taken from headers, sizes and the edges of the given tensors:
    /// milliseconds, whatever the size. See [`gemma4c_plan::fingerprint`].
    ///
    /// # Panics
    /// Where a tensor is another model's and lies outside this one's files.
    pub fn fingerprint<'a>(&self, tensors: impl IntoIterator<Item = &'a TensorInfo>) -> u64 {
        Gguf::fingerprint_of(&[self], tensors.into_iter().map(|tensor| (0, tensor)))
    }

    /// The same of several models as one: the files of one after those of another, and of each tensor which of the
    /// models has it.
    ///
    /// # Panics
    /// Where a tensor lies outside the files of its model.
    pub fn fingerprint_of<'a>(models: &[&Gguf], tensors: impl IntoIterator<Item = (usize, &'a TensorInfo)>) -> u64 {
        let maps: Vec<Arc<Mapping>> = models.iter().flat_map(|model| model.maps.iter().cloned()).collect();
        let infos = models.iter().flat_map(|model| &model.files);
        let files: Vec<FileBytes<'_>> = std::iter::zip(&maps, infos)
            .map(|(map, file)| FileBytes { bytes: map, header_len: file.header_len })
            .collect();
        let first_file = |model: usize| models[..model].iter().map(|model| model.files.len()).sum::<usize>();
        let tensors = tensors.into_iter().flat_map(|(model, tensor)| {
            let first = first_file(model);
            tensor.spans().map(move |span| (first + span.file as usize, span.offset, span.bytes))
        });
        Mapping::scattered(&maps, || fingerprint(&files, tensors))
            .expect("every range was checked against its file when it was opened")
    }
}

/// Rows of a tensor that a core makes at a time.
const ROWS_AT_A_TIME: usize = 256;

/// Why the rows from `first` on were not made.
fn unmade(tensor: &TensorInfo, first: usize, fault: RecipeFault) -> GgufError {
    let tensor = tensor.name.to_string();
    match fault {
        RecipeFault::BadScale(bad) => {
            GgufError::BadScale { tensor, row: first + bad.row, column: bad.column, scale: bad.scale }
        }
        RecipeFault::Misfit => GgufError::Unmade { tensor },
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
