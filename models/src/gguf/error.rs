//! What can be wrong with a GGUF file, said so that a person knows which file, which key or which tensor.
//!
//! Names come from the file and may be anything: they are escaped and cut before they reach a terminal.

use std::path::PathBuf;

use gemma4c_blocks::DType;
use thiserror::Error;

use super::types::type_name;

/// An error of the reader.
#[derive(Debug, Error)]
pub enum GgufError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("{}: {fault}", path.display())]
    Malformed { path: PathBuf, fault: Fault },
    #[error("{} is missing: part {part} of {count} of a split model", path.display())]
    MissingPart { path: PathBuf, part: u64, count: u64 },
    #[error("GGUF key {} is missing", quoted(key))]
    MissingKey { key: String },
    #[error("GGUF key {}: expected {expected}, found {found}", quoted(key))]
    WrongValue { key: String, expected: String, found: String },
    #[error("tensor {} is {}, which is not supported (supported: {})", quoted(tensor), type_name(*id), supported_types())]
    UnsupportedType { tensor: String, id: u32 },
    #[error("tensor {} is missing", quoted(tensor))]
    MissingTensor { tensor: String },
    #[error(
        "tensor {}: the scale of row {row} from column {column} on is {scale}; a trained weight has a positive number",
        quoted(tensor)
    )]
    BadScale { tensor: String, row: usize, column: usize, scale: f32 },
    #[error("tensor {} has the shape {dims:?}, expected a factor in f32, or one for each expert", quoted(tensor))]
    Factors { tensor: String, dims: Vec<u64> },
    #[error("internal: tensor {} cannot be made of its pieces", quoted(tensor))]
    Unmade { tensor: String },
    #[error("tensor {} is {}, expected 32-bit integers", quoted(tensor), type_name(*id))]
    NotIntegers { tensor: String, id: u32 },
}

/// A fault in the bytes of one file.
#[derive(Debug, Error)]
pub enum Fault {
    #[error("not a GGUF file: it starts with {}, expected 47 47 55 46 (\"GGUF\")", hex(.0))]
    Magic(Vec<u8>),
    #[error("GGUF version {0}, expected 2 or 3")]
    Version(u32),
    #[error("a big-endian GGUF file; only little-endian ones are supported")]
    BigEndian,
    #[error("the file ends inside {place} (at byte {at} of {len}): it is cut, or its header lies")]
    Cut { place: String, at: usize, len: usize },
    #[error("the header claims {claimed} {what}; at most {limit} are accepted in a file of {len} bytes")]
    Count { what: &'static str, claimed: u64, limit: u64, len: usize },
    #[error("{place} is not valid UTF-8")]
    NotUtf8 { place: String },
    #[error("{place} is {len} bytes long; at most {limit} are allowed")]
    LongName { place: String, len: u64, limit: u64 },
    #[error("{place} has value type {id}, which GGUF does not define")]
    ValueType { place: String, id: u32 },
    #[error("{place} is an array of arrays, which is not supported")]
    NestedArray { place: String },
    #[error("metadata key {} appears twice", quoted(.0))]
    DuplicateKey(String),
    #[error("tensor {} appears twice", quoted(.0))]
    DuplicateTensor(String),
    #[error("general.alignment is {0}, expected a power of two")]
    Alignment(String),
    #[error("tensor {} has {found} dimensions, expected at most {limit}", quoted(tensor))]
    Dimensions { tensor: String, found: u32, limit: usize },
    #[error("tensor {} has the shape {dims:?}, {problem}", quoted(tensor))]
    Shape { tensor: String, dims: Vec<u64>, problem: &'static str },
    #[error("tensor {} has rows of {row} values, which do not divide into {dtype} blocks of {block}", quoted(tensor))]
    PartialBlock { tensor: String, row: u64, dtype: DType, block: usize },
    #[error(
        "tensor {} starts at data offset {offset}, which is not a multiple of the alignment {alignment}",
        quoted(tensor)
    )]
    Misaligned { tensor: String, offset: u64, alignment: u64 },
    #[error("tensor {} needs {bytes} bytes from byte {start}, but the file has only {len}: it is cut", quoted(tensor))]
    CutTensor { tensor: String, start: u128, bytes: u64, len: u64 },
    #[error("it is part of a split model (split.count = {count}), so its name must end in -0000X-of-{count:05}.gguf")]
    SplitName { count: u64 },
    #[error("{key} is {found}, expected {expected}")]
    Split { key: &'static str, found: String, expected: u64 },
}

/// A name from a file, fit to be shown: escaped, in backticks, at most 80 characters of it.
pub(super) fn quoted(name: &str) -> String {
    const SHOWN: usize = 80;
    let shown: String = name.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    let dots = if name.chars().nth(SHOWN).is_some() { "…" } else { "" };
    format!("`{shown}{dots}`")
}

fn hex(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing (it is empty)".into();
    }
    bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ")
}

/// The types that are read, for whoever refuses another.
pub(crate) fn supported_types() -> String {
    DType::of_files().map(DType::name).collect::<Vec<_>>().join(", ")
}
