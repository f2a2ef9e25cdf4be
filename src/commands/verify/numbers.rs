//! Values as a device keeps them, to floats and back.

use gemma4c_blocks::narrow;
use gemma4c_plan::cuda::KvType;
use half::{bf16, f16};

/// Values that share a scale.
const GROUP: usize = 32;

/// What a value's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    F32,
    BF16,
    F16,
    /// One code for each value; then the scales of the quantisation blocks; then the sums of their codes.
    Int8,
    /// The same of all but the last `loose` values, and behind it these as f32.
    Mixed {
        loose: u32,
    },
    /// Keys or values in 8 bits, heads of so many values: codes, and after them the scales of q8_0.
    Narrow {
        kv: KvType,
        head_dim: u32,
    },
}

/// Values out of device memory.
#[derive(Debug, PartialEq)]
pub struct Decoded {
    pub values: Vec<f32>,
    /// For int8 and q8_0, the scale of each quantisation block: twice the largest rounding error of a value.
    scales: Vec<f32>,
    pub fault: Option<Fault>,
}

/// What no rounding explains.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The value at this index was not written: it still has the bits that memory was filled with.
    NotWritten(usize),
    /// The stored sum of a quantisation block's codes is wrong.
    Sum { group: usize, expected: i32, found: i32 },
}

impl Decoded {
    /// What rounding may have done to a value, whatever its size.
    pub fn grain(&self, index: usize) -> f32 {
        self.scales.get(index / GROUP).copied().unwrap_or(0.0)
    }
}

impl Numbers {
    pub const fn name(self) -> &'static str {
        match self {
            Numbers::F32 => "f32",
            Numbers::BF16 => "bf16",
            Numbers::F16 => "f16",
            Numbers::Int8 => "int8",
            Numbers::Mixed { .. } => "int8 and f32",
            Numbers::Narrow { kv, .. } => kv.name(),
        }
    }

    /// The numbers of a cache's rows.
    pub const fn of_cache(kv: KvType, head_dim: u32) -> Numbers {
        match kv {
            KvType::F16 => Numbers::F16,
            KvType::BF16 => Numbers::BF16,
            KvType::F32 => Numbers::F32,
            KvType::Q8_0 | KvType::Fp8 => Numbers::Narrow { kv, head_dim },
        }
    }

    /// Bytes of a value; in 8 bits, of its code.
    pub const fn bytes(self) -> u64 {
        match self {
            Numbers::F32 => 4,
            Numbers::BF16 | Numbers::F16 => 2,
            Numbers::Int8 | Numbers::Mixed { .. } | Numbers::Narrow { .. } => 1,
        }
    }

    /// The values of bytes that were all ones before they were written.
    pub fn decode(self, bytes: &[u8]) -> Decoded {
        let two = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        let values: Vec<f32> = match self {
            Numbers::F32 => words(bytes).map(f32::from_bits).collect(),
            Numbers::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_bits(two(b)).to_f32()).collect(),
            Numbers::F16 => bytes.chunks_exact(2).map(|b| f16::from_bits(two(b)).to_f32()).collect(),
            Numbers::Int8 => return decode_int8(bytes),
            Numbers::Mixed { loose } => return decode_mixed(loose as usize, bytes),
            Numbers::Narrow { kv, head_dim } => return decode_narrow(kv, head_dim, bytes),
        };
        let width = self.bytes() as usize;
        let untouched = bytes.chunks_exact(width).position(|value| value.iter().all(|byte| *byte == 0xff));
        Decoded { values, scales: Vec::new(), fault: untouched.map(Fault::NotWritten) }
    }

    /// The bytes of values, rounded as kernels round them.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Numbers::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Numbers::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            Numbers::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            Numbers::Int8 => encode_int8(values),
            Numbers::Mixed { loose } => {
                let (whole, loose) = values.split_at(values.len() - loose as usize);
                [encode_int8(whole), Numbers::F32.encode(loose)].concat()
            }
            Numbers::Narrow { kv, head_dim } => {
                values.chunks_exact(head_dim as usize).flat_map(|head| kv.narrow_head(head)).flatten().collect()
            }
        }
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

fn decode_int8(bytes: &[u8]) -> Decoded {
    let groups = bytes.len() / (GROUP + 8);
    let (codes, rest) = bytes.split_at(groups * GROUP);
    let (scales, sums) = rest.split_at(groups * 4);
    let scales: Vec<f32> = words(scales).map(f32::from_bits).collect();
    let mut values = Vec::with_capacity(codes.len());
    let mut fault = None;
    for (group, ((codes, scale), sum)) in codes.chunks_exact(GROUP).zip(&scales).zip(words(sums)).enumerate() {
        values.extend(codes.iter().map(|code| *code as i8 as f32 * scale));
        let added: i32 = codes.iter().map(|code| *code as i8 as i32).sum();
        if scale.to_bits() == u32::MAX {
            fault = fault.or(Some(Fault::NotWritten(group * GROUP)));
        } else if added != sum as i32 {
            fault = fault.or(Some(Fault::Sum { group, expected: added, found: sum as i32 }));
        }
    }
    Decoded { values, scales, fault }
}

fn decode_mixed(loose: usize, bytes: &[u8]) -> Decoded {
    let (whole, loose) = bytes.split_at(bytes.len() - loose * 4);
    let (mut decoded, loose) = (decode_int8(whole), Numbers::F32.decode(loose));
    let behind = |fault| match fault {
        Fault::NotWritten(index) => Fault::NotWritten(decoded.values.len() + index),
        sum => sum,
    };
    decoded.fault = decoded.fault.clone().or(loose.fault.map(behind));
    decoded.values.extend(loose.values);
    decoded
}

/// Codes of all ones are a number of int8 and none of e4m3; scales of all ones are none.
fn decode_narrow(kv: KvType, head_dim: u32, bytes: &[u8]) -> Decoded {
    let dim = head_dim as usize;
    let (mut values, mut scales, mut fault) = (Vec::new(), Vec::new(), None);
    for head in bytes.chunks_exact(kv.head_bytes(head_dim) as usize) {
        let (codes, rest) = head.split_at(dim);
        for (group, codes) in codes.chunks(GROUP).enumerate() {
            let scale = rest.get(2 * group..2 * group + 2).map_or([0; 2], |b| [b[0], b[1]]);
            let is_written = match kv {
                KvType::Q8_0 => scale != [0xff; 2],
                _ => !codes.contains(&0xff),
            };
            if !is_written {
                fault = fault.or(Some(Fault::NotWritten(values.len())));
            }
            let scale = narrow::scale_from(scale);
            match kv {
                KvType::Q8_0 => {
                    scales.push(scale.to_f32());
                    values.extend(codes.iter().map(|code| narrow::q8_0_to_f32(*code, scale)));
                }
                _ => values.extend(codes.iter().map(|code| narrow::fp8_to_f32(*code))),
            }
        }
    }
    Decoded { values, scales, fault }
}

fn encode_int8(values: &[f32]) -> Vec<u8> {
    let (mut codes, mut scales, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks_exact(GROUP) {
        let largest = group.iter().fold(0.0f32, |largest, v| largest.max(v.abs()));
        let scale = largest / 127.0;
        let per_unit = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let code = |v: &f32| (v * per_unit).round_ties_even().clamp(-127.0, 127.0) as i8;
        let of_group: Vec<i8> = group.iter().map(code).collect();
        scales.extend(scale.to_le_bytes());
        sums.extend(of_group.iter().map(|code| *code as i32).sum::<i32>().to_le_bytes());
        codes.extend(of_group.iter().map(|code| *code as u8));
    }
    [codes, scales, sums].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some_values() -> Vec<f32> {
        (0..96).map(|i| ((i * 37 % 97) as f32 - 48.0) * if i < 32 { 1e-3 } else { 0.25 }).collect()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let values = some_values();
        for (numbers, tolerance) in [
            (Numbers::F32, 0.0),
            (Numbers::BF16, 1.0 / 256.0),
            (Numbers::F16, 1.0 / 2048.0),
            (Numbers::Int8, 0.0),
            (Numbers::Mixed { loose: 32 }, 0.0),
            (Numbers::of_cache(KvType::Q8_0, 32), 1.0 / 2048.0),
            (Numbers::of_cache(KvType::Fp8, 32), 1.0 / 16.0),
        ] {
            let decoded = numbers.decode(&numbers.encode(&values));
            assert_eq!((decoded.fault.as_ref(), decoded.values.len()), (None, values.len()), "{numbers:?}");
            for (index, (found, expected)) in decoded.values.iter().zip(&values).enumerate() {
                // The least that e4m3 tells apart is 2^-9.
                let fine = if numbers.name() == "fp8" { 1.0 / 1024.0 } else { 0.0 };
                let allowed = tolerance * expected.abs() + decoded.grain(index) * 0.501 + fine;
                assert!((found - expected).abs() <= allowed, "{numbers:?} {index}: {found}, expected {expected}");
            }
        }
    }

    #[test]
    fn what_was_not_written_is_seen() {
        for numbers in [Numbers::F32, Numbers::BF16, Numbers::F16] {
            let mut bytes = numbers.encode(&some_values());
            let width = numbers.bytes() as usize;
            bytes[7 * width..8 * width].fill(0xff);
            assert_eq!(numbers.decode(&bytes).fault, Some(Fault::NotWritten(7)), "{numbers:?}");
        }
        let untouched = vec![0xff; 3 * 40];
        assert_eq!(Numbers::Int8.decode(&untouched).fault, Some(Fault::NotWritten(0)));
        let mixed = Numbers::Mixed { loose: 32 };
        let mut bytes = mixed.encode(&some_values());
        bytes[2 * 40 + 5 * 4..2 * 40 + 6 * 4].fill(0xff);
        assert_eq!(mixed.decode(&bytes).fault, Some(Fault::NotWritten(64 + 5)));
        for kv in [KvType::Q8_0, KvType::Fp8] {
            let numbers = Numbers::of_cache(kv, 32);
            let mut bytes = numbers.encode(&some_values());
            let head = kv.head_bytes(32) as usize;
            bytes[head..2 * head].fill(0xff);
            assert_eq!(numbers.decode(&bytes).fault, Some(Fault::NotWritten(32)), "{kv:?}");
        }
    }

    #[test]
    fn sums_must_be_those_of_the_codes() {
        let mut bytes = Numbers::Int8.encode(&some_values());
        let sums = bytes.len() - 12;
        let right = i32::from_le_bytes([bytes[sums + 4], bytes[sums + 5], bytes[sums + 6], bytes[sums + 7]]);
        bytes[sums + 4..sums + 8].copy_from_slice(&(right + 1).to_le_bytes());
        let fault = Some(Fault::Sum { group: 1, expected: right, found: right + 1 });
        assert_eq!(Numbers::Int8.decode(&bytes).fault, fault);
    }
}
