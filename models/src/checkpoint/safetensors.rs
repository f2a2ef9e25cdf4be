//! The header of a safetensors file: a length, JSON, then the tensors' bytes. Nothing is believed before it is checked,
//! and memory is bounded by the bytes that are there.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::{Fault, shown};

/// The format's own limit on a header.
const MOST_HEADER: u64 = 100_000_000;
/// Tensors of a file: more than twice what the largest published checkpoint has in all its files.
pub(super) const MOST_TENSORS: usize = 1 << 17;
/// The format's limit is higher; no model uses more.
const MOST_DIMS: usize = 8;
/// Bytes of a tensor's name.
const MOST_NAME: usize = 1024;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    F16,
    BF16,
    /// 8-bit floats of 4 bits of exponent.
    E4M3,
    I64,
    I32,
    I8,
    U8,
    /// One that no tensor of a language model has here, of so many bits; 0 where even that is not known.
    Other(u32),
}

impl Element {
    fn of(name: &str) -> Element {
        match name {
            "F32" => Element::F32,
            "F16" => Element::F16,
            "BF16" => Element::BF16,
            "F8_E4M3" => Element::E4M3,
            "I64" => Element::I64,
            "I32" => Element::I32,
            "I8" => Element::I8,
            "U8" => Element::U8,
            "F64" | "U64" => Element::Other(64),
            "U32" => Element::Other(32),
            "I16" | "U16" => Element::Other(16),
            "BOOL" | "F8_E5M2" | "F8_E8M0" => Element::Other(8),
            _ => Element::Other(0),
        }
    }

    fn bits(self) -> u32 {
        match self {
            Element::I64 => 64,
            Element::F32 | Element::I32 => 32,
            Element::F16 | Element::BF16 => 16,
            Element::E4M3 | Element::I8 | Element::U8 => 8,
            Element::Other(bits) => bits,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Element::F32 => "F32",
            Element::F16 => "F16",
            Element::BF16 => "BF16",
            Element::E4M3 => "F8_E4M3",
            Element::I64 => "I64",
            Element::I32 => "I32",
            Element::I8 => "I8",
            Element::U8 => "U8",
            Element::Other(_) => "of a type that no weight has",
        })
    }
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct Stored {
    pub name: Box<str>,
    pub element: Element,
    shape: [u64; MOST_DIMS],
    rank: u32,
    /// From the start of the file.
    pub offset: u64,
    pub bytes: u64,
}

impl Stored {
    /// Slowest dimension first; empty for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.shape[..self.rank as usize]
    }
}

/// A file's header.
pub struct Parsed {
    /// In the order of their names.
    pub tensors: Vec<Stored>,
    /// Bytes before the tensors' data.
    pub len: u64,
}

pub fn parse(bytes: &[u8]) -> Result<Parsed, Fault> {
    let file = bytes.len() as u64;
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(Fault::HeaderLength { header: 8, file });
    };
    let header = u64::from_le_bytes(*length);
    if header > MOST_HEADER || header > rest.len() as u64 {
        return Err(Fault::HeaderLength { header, file });
    }
    let json = |error: serde_json::Error| Fault::Json { what: "its header", why: shown(&error.to_string()) };
    let Table(mut tensors) = serde_json::from_slice(&rest[..header as usize]).map_err(json)?;
    let (start, data) = (8 + header, rest.len() as u64 - header);
    for tensor in &mut tensors {
        place(tensor, start, data)?;
    }
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Fault::tensor(&pair[0].name, "appears twice"));
    }
    no_overlap(&tensors)?;
    Ok(Parsed { tensors, len: start })
}

/// Checks a tensor's range, which counts from the start of the data so far: `bytes` is its end.
fn place(tensor: &mut Stored, start: u64, data: u64) -> Result<(), Fault> {
    let (from, to) = (tensor.offset, tensor.bytes);
    let wrong = |problem: String| Fault::tensor(&tensor.name, problem);
    if from > to || to > data {
        return Err(wrong(format!("has bytes {from} to {to} of {data}")));
    }
    let values = tensor.shape().iter().try_fold(1u64, |values, dim| values.checked_mul(*dim));
    let bits = u64::from(tensor.element.bits());
    let bytes = values.and_then(|values| values.checked_mul(bits)).map(|bits| bits.div_ceil(8));
    if bits > 0 && bytes != Some(to - from) {
        let (element, shape) = (tensor.element, tensor.shape());
        return Err(wrong(format!("is {element} {shape:?}, but has {} bytes", to - from)));
    }
    (tensor.offset, tensor.bytes) = (start + from, to - from);
    Ok(())
}

fn no_overlap(tensors: &[Stored]) -> Result<(), Fault> {
    let mut order: Vec<&Stored> = tensors.iter().filter(|tensor| tensor.bytes > 0).collect();
    order.sort_unstable_by_key(|tensor| tensor.offset);
    match order.windows(2).find(|pair| pair[0].offset + pair[0].bytes > pair[1].offset) {
        Some(pair) => Err(Fault::tensor(&pair[1].name, format!("overlaps {}", shown(&pair[0].name)))),
        None => Ok(()),
    }
}

/// The JSON object, read entry by entry.
struct Table(Vec<Stored>);

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Table, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Table;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if tensors.len() == MOST_TENSORS || name.len() > MOST_NAME {
                        let limits = format!("at most {MOST_TENSORS} tensors with names of {MOST_NAME} bytes");
                        return Err(A::Error::custom(limits));
                    }
                    let Entry { dtype, shape, data_offsets: [offset, bytes] } = map.next_value()?;
                    let (name, element) = (name.into_owned().into_boxed_str(), dtype.0);
                    tensors.push(Stored { name, element, shape: shape.dims, rank: shape.rank, offset, bytes });
                }
                Ok(Table(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[derive(Deserialize)]
struct Entry {
    dtype: ElementName,
    shape: Shape,
    data_offsets: [u64; 2],
}

struct ElementName(Element);

impl<'de> Deserialize<'de> for ElementName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ElementName, D::Error> {
        Ok(ElementName(Element::of(&Cow::<str>::deserialize(deserializer)?)))
    }
}

/// Dimensions, however many a file claims.
struct Shape {
    dims: [u64; MOST_DIMS],
    rank: u32,
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MOST_DIMS} numbers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut shape = Shape { dims: [1; MOST_DIMS], rank: 0 };
                while let Some(dim) = list.next_element()? {
                    let place = shape.dims.get_mut(shape.rank as usize);
                    *place.ok_or_else(|| A::Error::custom(format!("more than {MOST_DIMS} dimensions")))? = dim;
                    shape.rank += 1;
                }
                Ok(shape)
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}
