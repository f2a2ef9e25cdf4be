//! Parses the header of one file: counts, metadata, tensor table. Nothing is believed before it is checked, and no
//! allocation is sized by a number that the bytes present do not back.

use gemma4c_blocks::DType;

use super::TensorInfo;
use super::cursor::Cursor;
use super::error::{Fault, quoted};
use super::limits::{MAX_DIMS, MAX_ENTRIES};
use super::metadata::Entry;
use super::value::{BadValue, FromValue, Value, ValueType};

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
pub(super) const VERSION: u32 = 3;
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
/// The format's limit on the bytes of a key; tensor names get the same.
const MAX_NAME: u64 = 65_535;

/// The least bytes of a metadata entry (empty key, type, one byte) and of a tensor's (empty name, no dimensions).
const LEAST_ENTRY: u64 = 8 + 4 + 1;
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// A file's header, parsed.
pub(super) struct Parsed {
    pub entries: Vec<Entry>,
    /// Indices of `entries`, sorted by key.
    pub by_key: Vec<u32>,
    /// In the file's order, with offsets from the start of the file.
    pub tensors: Vec<TensorInfo>,
    /// Where the tensor table ends.
    pub len: usize,
}

/// Parses the header at the start of `bytes`; its tensors are said to lie in file number `file`, which has `file_len`
/// bytes.
pub(super) fn parse(bytes: &[u8], file: usize, file_len: u64) -> Result<Parsed, Fault> {
    let mut cursor = Cursor::new(bytes);
    let cut = |cursor: &Cursor<'_>, place: String| Fault::Cut { place, at: cursor.position(), len: bytes.len() };
    let in_header = |cursor: &Cursor<'_>| cut(cursor, "its fixed header of 24 bytes".into());

    if cursor.take(4) != Ok(&MAGIC[..]) {
        return Err(Fault::Magic(bytes[..bytes.len().min(4)].to_vec()));
    }
    let version = cursor.u32().map_err(|_| in_header(&cursor))?;
    match version {
        // Version 2 has the same layout; version 1 had 32-bit counts.
        2 | VERSION => {}
        _ if (1..=VERSION).contains(&version.swap_bytes()) => return Err(Fault::BigEndian),
        _ => return Err(Fault::Version(version)),
    }
    let tensor_count = cursor.u64().map_err(|_| in_header(&cursor))?;
    let entry_count = cursor.u64().map_err(|_| in_header(&cursor))?;
    let count = |what, claimed: u64, least: u64| {
        let limit = (bytes.len() as u64 / least).min(MAX_ENTRIES);
        if claimed <= limit { Ok(claimed) } else { Err(Fault::Count { what, claimed, limit, len: bytes.len() }) }
    };
    count("tensors", tensor_count, LEAST_TENSOR)?;
    count("metadata keys", entry_count, LEAST_ENTRY)?;

    let mut entries = Vec::with_capacity(entry_count as usize);
    for i in 0..entry_count {
        let key = name(&mut cursor, || format!("metadata key {i}"), bytes.len())?;
        let place = || format!("the value of metadata key {}", quoted(key));
        let id = cursor.u32().map_err(|_| cut(&cursor, place()))?;
        let ty = ValueType::from_id(id).ok_or_else(|| Fault::ValueType { place: place(), id })?;
        let start = cursor.position();
        Value::read(&mut cursor, ty, true).map_err(|bad| match bad {
            BadValue::Ended => cut(&cursor, place()),
            BadValue::NotUtf8 => Fault::NotUtf8 { place: place() },
            BadValue::NestedArray => Fault::NestedArray { place: place() },
            BadValue::UnknownType(id) => Fault::ValueType { place: format!("an element of {}", place()), id },
        })?;
        entries.push(Entry { key: key.into(), ty, value: start..cursor.position() });
    }
    let by_key = sorted(&entries, |e| &e.key).map_err(|e| Fault::DuplicateKey(e.key.to_string()))?;

    let mut tensors = Vec::with_capacity(tensor_count as usize);
    for i in 0..tensor_count {
        let name = name(&mut cursor, || format!("the name of tensor {i}"), bytes.len())?;
        let raw = raw_tensor(&mut cursor, name).map_err(|bad| match bad {
            BadTensor::Ended => cut(&cursor, format!("the table entry of tensor {}", quoted(name))),
            BadTensor::Dimensions(found) => Fault::Dimensions { tensor: name.into(), found, limit: MAX_DIMS },
        })?;
        tensors.push(TensorInfo { file, ..raw });
    }
    let len = cursor.position();

    let alignment = alignment(&entries, bytes)?;
    // Not past u64 as `len` is a position in memory; whether it lies in the file, each tensor's range tells.
    let data_start = (len as u64).next_multiple_of(alignment);
    for tensor in &mut tensors {
        place_tensor(tensor, data_start, alignment, file_len)?;
    }
    Ok(Parsed { entries, by_key, tensors, len })
}

/// Indices of `items` in the order of their names; the item whose name appears twice, where there is one.
pub(super) fn sorted<T>(items: &[T], name: impl Fn(&T) -> &str) -> Result<Vec<u32>, &T> {
    let mut order: Vec<u32> = (0..items.len() as u32).collect();
    order.sort_unstable_by(|&a, &b| name(&items[a as usize]).cmp(name(&items[b as usize])));
    let twice = order.windows(2).find(|pair| name(&items[pair[0] as usize]) == name(&items[pair[1] as usize]));
    match twice {
        Some(pair) => Err(&items[pair[0].max(pair[1]) as usize]),
        None => Ok(order),
    }
}

fn name<'a>(cursor: &mut Cursor<'a>, place: impl Fn() -> String, len: usize) -> Result<&'a str, Fault> {
    let cut = |at| Fault::Cut { place: place(), at, len };
    let start = cursor.position();
    let bytes = cursor.u64().map_err(|_| cut(start))?;
    if bytes > MAX_NAME {
        return Err(Fault::LongName { place: place(), len: bytes, limit: MAX_NAME });
    }
    let text = cursor.take(bytes).map_err(|_| cut(start))?;
    std::str::from_utf8(text).map_err(|_| Fault::NotUtf8 { place: place() })
}

enum BadTensor {
    Ended,
    Dimensions(u32),
}

impl From<super::cursor::Ended> for BadTensor {
    fn from(_: super::cursor::Ended) -> BadTensor {
        BadTensor::Ended
    }
}

/// A table entry as it stands: the offset still counts from the start of the data, the length is not known yet.
fn raw_tensor(cursor: &mut Cursor<'_>, name: &str) -> Result<TensorInfo, BadTensor> {
    let rank = cursor.u32()?;
    if rank as usize > MAX_DIMS {
        return Err(BadTensor::Dimensions(rank));
    }
    let mut dims = [1; MAX_DIMS];
    for dim in &mut dims[..rank as usize] {
        *dim = cursor.u64()?;
    }
    let ggml_type = cursor.u32()?;
    let offset = cursor.u64()?;
    // A tensor with no dimensions is a scalar, which is to say one value.
    let (rank, pieces, presented) = (rank.max(1), Vec::new(), None);
    Ok(TensorInfo { name: name.into(), dims, rank, ggml_type, file: 0, offset, len: 0, pieces, presented })
}

fn alignment(entries: &[Entry], bytes: &[u8]) -> Result<u64, Fault> {
    let Some(value) = value(entries, bytes, ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    match u32::from_value(value) {
        Some(number) if number.is_power_of_two() => Ok(number.into()),
        _ => Err(Fault::Alignment(value.to_string())),
    }
}

/// The value of `key` among `entries` of the file `bytes`.
pub(super) fn value<'a>(entries: &[Entry], bytes: &'a [u8], key: &str) -> Option<Value<'a>> {
    let entry = entries.iter().find(|e| &*e.key == key)?;
    Value::read(&mut Cursor::new(bytes.get(entry.value.clone())?), entry.ty, false).ok()
}

/// Sizes a tensor by its shape and type and moves its offset to the start of the file.
fn place_tensor(tensor: &mut TensorInfo, data_start: u64, alignment: u64, file_len: u64) -> Result<(), Fault> {
    let name = || tensor.name.to_string();
    let shape = |problem| Fault::Shape { tensor: name(), dims: tensor.dims().to_vec(), problem };
    if tensor.dims.contains(&0) {
        return Err(shape("which holds no values"));
    }
    let rows = tensor.dims[1..].iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let bytes = match DType::from_ggml_id(tensor.ggml_type) {
        Some(dtype) => {
            let row = tensor.dims[0];
            let block = dtype.layout().len;
            if !row.is_multiple_of(block as u64) {
                return Err(Fault::PartialBlock { tensor: name(), row, dtype, block });
            }
            let bytes = dtype.file_row_bytes(row).zip(rows).and_then(|(bytes, rows)| bytes.checked_mul(rows));
            bytes.ok_or_else(|| shape("whose size overflows 64 bits"))?
        }
        // A type this project does not know: an error once somebody asks for the tensor, no sooner.
        None => 0,
    };
    if !tensor.offset.is_multiple_of(alignment) {
        return Err(Fault::Misaligned { tensor: name(), offset: tensor.offset, alignment });
    }
    let start = u128::from(data_start) + u128::from(tensor.offset);
    if start + u128::from(bytes) > u128::from(file_len) {
        return Err(Fault::CutTensor { tensor: name(), start, bytes, len: file_len });
    }
    tensor.offset += data_start;
    tensor.len = bytes;
    Ok(())
}
