//! The content of a buffer: bytes with an element type, and how two of them are compared.

use crate::elements::{BF16, ElementType, F16, Float};
use crate::{F32x2, F32x4, I32x4, U32x2, U32x4};
use std::fmt;
use std::ops::Range;

/// Elements of one type, as little-endian bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Data {
    ty: ElementType,
    bytes: Vec<u8>,
}

/// How close a result must come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// The same bits.
    Exact,
    /// `|found - expected| <= absolute + relative * |expected|`.
    Within { absolute: f32, relative: f32 },
}

/// The worst element of a result that is out of bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    pub element: usize,
    pub expected: String,
    pub found: String,
    /// Elements out of bounds.
    pub count: usize,
    pub len: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { element, expected, found, count, len } = self;
        write!(f, "element {element} is {found}, expected {expected} ({count} of {len} differ; this one the most)")
    }
}

impl Data {
    pub fn new(ty: ElementType, bytes: Vec<u8>) -> Self {
        Self { ty, bytes }
    }

    pub fn ty(&self) -> ElementType {
        self.ty
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn len(&self) -> usize {
        self.bytes.len() / self.ty.size()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Floats of f32, F16 or BF16 data (a vector's elements one by one); `None` for integers.
    pub fn floats(&self) -> Option<Vec<f32>> {
        let halves = || self.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        Some(match self.ty {
            ElementType::F32 | ElementType::F32x2 | ElementType::F32x4 => {
                self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            ElementType::F16 => halves().map(|bits| F16::from_bits(bits).to_f32()).collect(),
            ElementType::BF16 => halves().map(|bits| BF16::from_bits(bits).to_f32()).collect(),
            _ => return None,
        })
    }

    /// Integers of any integer type; `None` for floats.
    pub fn integers(&self) -> Option<Vec<i128>> {
        fn read<const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> i128) -> Vec<i128> {
            bytes.chunks_exact(N).map(|b| from(std::array::from_fn(|i| b[i]))).collect()
        }
        Some(match self.ty {
            ElementType::U8 => read(&self.bytes, |b: [u8; 1]| b[0].into()),
            ElementType::I8 => read(&self.bytes, |b: [u8; 1]| (b[0] as i8).into()),
            ElementType::U16 => read(&self.bytes, |b| u16::from_le_bytes(b).into()),
            ElementType::I16 => read(&self.bytes, |b| i16::from_le_bytes(b).into()),
            ElementType::U32 | ElementType::U32x2 | ElementType::U32x4 => {
                read(&self.bytes, |b| u32::from_le_bytes(b).into())
            }
            ElementType::I32 | ElementType::I32x4 => read(&self.bytes, |b| i32::from_le_bytes(b).into()),
            ElementType::U64 => read(&self.bytes, |b| u64::from_le_bytes(b).into()),
            ElementType::I64 => read(&self.bytes, |b| i64::from_le_bytes(b).into()),
            _ => return None,
        })
    }

    /// As many elements with all bits set: NaN, -1, the largest unsigned.
    pub fn poisoned(&self) -> Self {
        Self { ty: self.ty, bytes: vec![0xff; self.bytes.len()] }
    }

    /// The worst element of `found` that is out of bounds, if there is one. `skip` counts elements of [`Data::ty`].
    pub fn compare(&self, found: &Self, bound: Bound, skip: &[Range<usize>]) -> Option<Mismatch> {
        if (self.ty, self.bytes.len()) != (found.ty, found.bytes.len()) {
            let describe = |data: &Self| format!("{} of {}", data.len(), data.ty.name());
            let (expected, found) = (describe(self), describe(found));
            return Some(Mismatch { element: 0, expected, found, count: 1, len: 1 });
        }
        let tolerance = |expected: f64| match bound {
            Bound::Exact => 0.0,
            Bound::Within { absolute, relative } => f64::from(absolute) + f64::from(relative) * expected.abs(),
        };
        let exact = bound == Bound::Exact;
        match (self.floats(), found.floats()) {
            (Some(expected), Some(found)) => worst(&expected, &found, self.len(), skip, |&e, &f| {
                let same = if exact { e.to_bits() == f.to_bits() } else { e == f || (e.is_nan() && f.is_nan()) };
                let error = (f64::from(e) - f64::from(f)).abs();
                match same {
                    true => 0.0,
                    false if error.is_nan() || error.is_infinite() || exact => {
                        if error.is_nan() {
                            f64::MAX
                        } else {
                            error.clamp(f64::MIN_POSITIVE, f64::MAX)
                        }
                    }
                    false => error - tolerance(e.into()),
                }
            }),
            _ => worst(&self.integers()?, &found.integers()?, self.len(), skip, |&e, &f| {
                (e - f).unsigned_abs() as f64 - tolerance(e as f64)
            }),
        }
    }
}

fn worst<T: fmt::Debug>(
    expected: &[T],
    found: &[T],
    len: usize,
    skip: &[Range<usize>],
    excess: impl Fn(&T, &T) -> f64,
) -> Option<Mismatch> {
    let lanes = expected.len() / len.max(1);
    let mut count = 0;
    let mut worst: Option<(f64, usize)> = None;
    for (index, (e, f)) in expected.iter().zip(found).enumerate() {
        let element = index / lanes.max(1);
        if skip.iter().any(|range| range.contains(&element)) {
            continue;
        }
        let excess = excess(e, f);
        if excess > 0.0 {
            count += 1;
            if worst.is_none_or(|(most, _)| excess > most) {
                worst = Some((excess, index));
            }
        }
    }
    worst.map(|(_, index)| Mismatch {
        element: index / lanes.max(1),
        expected: format!("{:?}", expected[index]),
        found: format!("{:?}", found[index]),
        count,
        len: expected.len(),
    })
}

macro_rules! data_from {
    ($($ty:ident $name:ident ($value:ident) $bytes:expr;)*) => { $(
        impl From<Vec<$ty>> for Data {
            fn from(values: Vec<$ty>) -> Self {
                Self { ty: ElementType::$name, bytes: values.into_iter().flat_map(|$value| $bytes).collect() }
            }
        }

        impl From<&[$ty]> for Data {
            fn from(values: &[$ty]) -> Self {
                values.to_vec().into()
            }
        }
    )* };
}
data_from! {
    u8 U8 (v) [v];
    i8 I8 (v) v.to_le_bytes();
    u16 U16 (v) v.to_le_bytes();
    i16 I16 (v) v.to_le_bytes();
    u32 U32 (v) v.to_le_bytes();
    i32 I32 (v) v.to_le_bytes();
    u64 U64 (v) v.to_le_bytes();
    i64 I64 (v) v.to_le_bytes();
    f32 F32 (v) v.to_le_bytes();
    F16 F16 (v) v.to_bits().to_le_bytes();
    BF16 BF16 (v) v.to_bits().to_le_bytes();
    U32x2 U32x2 (v) [v.x, v.y].into_iter().flat_map(u32::to_le_bytes);
    U32x4 U32x4 (v) [v.x, v.y, v.z, v.w].into_iter().flat_map(u32::to_le_bytes);
    I32x4 I32x4 (v) [v.x, v.y, v.z, v.w].into_iter().flat_map(i32::to_le_bytes);
    F32x2 F32x2 (v) [v.x, v.y].into_iter().flat_map(f32::to_le_bytes);
    F32x4 F32x4 (v) [v.x, v.y, v.z, v.w].into_iter().flat_map(f32::to_le_bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_element_out_of_bounds_is_named() {
        let expected = Data::from(vec![1.0f32, 2.0, 3.0]);
        let found = Data::from(vec![1.0f32, 2.1, 3.5]);
        let mismatch = expected.compare(&found, Bound::Within { absolute: 0.05, relative: 0.0 }, &[]).unwrap();
        assert_eq!((mismatch.element, mismatch.count, mismatch.len), (2, 2, 3));
        assert_eq!(expected.compare(&found, Bound::Within { absolute: 0.6, relative: 0.0 }, &[]), None);
        assert!(expected.compare(&found, Bound::Exact, std::slice::from_ref(&(1..3))).is_none());
    }

    #[test]
    fn a_nan_is_never_close() {
        let bound = Bound::Within { absolute: 1e30, relative: 1.0 };
        let (one, nan) = (Data::from(vec![1.0f32]), Data::from(vec![f32::NAN]));
        assert!(one.compare(&nan, bound, &[]).is_some());
        assert!(nan.compare(&one, bound, &[]).is_some());
        assert!(nan.compare(&nan, bound, &[]).is_none());
    }

    #[test]
    fn signed_zeros_differ_only_when_the_bits_must_agree() {
        let (plus, minus) = (Data::from(vec![0.0f32]), Data::from(vec![-0.0f32]));
        assert!(plus.compare(&minus, Bound::Exact, &[]).is_some());
        assert!(plus.compare(&minus, Bound::Within { absolute: 0.0, relative: 0.0 }, &[]).is_none());
    }
}
