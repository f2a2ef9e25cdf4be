//! The forms in which row kernels leave their results: f32 for whoever computes with them, bf16 for prefill's products, int8
//! for the integer products. One kernel may leave several, so that nobody reads a row only to convert it.
//!
//! An output that an instance does not have is an empty buffer: no compiled instance of it touches it.

use gemma4c_dsl::prelude::*;

use super::quantise::{quantise4, quantise8};

/// Stores eight values as int8, four lanes to a group; `at` is the first one's place. A collective of the warp, in which
/// the lanes that are not `inside` store nothing.
#[device]
pub fn store_int8(
    low: F32x4,
    high: F32x4,
    at: u32,
    inside: bool,
    xq: Output<i8>,
    xscale: Output<f32>,
    xsum: Output<i32>,
) {
    let codes = quantise8(low, high);
    if inside {
        store(xq, at, u32x2(codes.x, codes.y));
        if at % 32 == 0 {
            xscale[at / 32] = f32::from_bits(codes.z);
            xsum[at / 32] = codes.w as i32;
        }
    }
}

/// Eight values rounded to bf16.
#[device]
pub fn bf16x8(low: F32x4, high: F32x4) -> U32x4 {
    u32x4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y), pack_bf16(high.z, high.w))
}

/// Stores eight values in every form that the instance has; `at` is the first one's place. A collective of the warp, in
/// which the lanes that are not `inside` store nothing.
#[device]
pub fn leave8<const FLOATS: bool, const ROUNDED: bool, const QUANTISED: bool>(
    low: F32x4,
    high: F32x4,
    at: u32,
    inside: bool,
    out: Output<f32>,
    rounded: Output<BF16>,
    xq: Output<i8>,
    xscale: Output<f32>,
    xsum: Output<i32>,
) {
    if FLOATS && inside {
        store(out, at, low);
        store(out, at + 4, high);
    }
    if ROUNDED && inside {
        store(rounded, at, bf16x8(low, high));
    }
    if QUANTISED {
        store_int8(low, high, at, inside, xq, xscale, xsum);
    }
}

/// Four values of [`leave8`]'s, eight lanes to a group. A collective of the warp, as that is.
#[device]
pub fn leave4<const FLOATS: bool, const ROUNDED: bool, const QUANTISED: bool>(
    four: F32x4,
    at: u32,
    inside: bool,
    out: Output<f32>,
    rounded: Output<BF16>,
    xq: Output<i8>,
    xscale: Output<f32>,
    xsum: Output<i32>,
) {
    if FLOATS && inside {
        store(out, at, four);
    }
    if ROUNDED && inside {
        store(rounded, at, u32x2(pack_bf16(four.x, four.y), pack_bf16(four.z, four.w)));
    }
    if QUANTISED {
        let codes = quantise4(four);
        if inside {
            store(xq, at, codes.x);
            if at % 32 == 0 {
                xscale[at / 32] = f32::from_bits(codes.y);
                xsum[at / 32] = codes.z as i32;
            }
        }
    }
}

/// Which forms an instance leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outputs {
    /// `out`
    pub floats: bool,
    /// `rounded`
    pub bf16: bool,
    /// `xq`, `xscale`, `xsum`
    pub int8: bool,
}

impl Outputs {
    pub const NONE: Self = Self { floats: false, bf16: false, int8: false };
    pub const FLOATS: Self = Self { floats: true, ..Self::NONE };
    pub const BF16: Self = Self { bf16: true, ..Self::NONE };
    pub const INT8: Self = Self { int8: true, ..Self::NONE };

    /// The forms of both.
    pub const fn and(self, other: Self) -> Self {
        Self { floats: self.floats || other.floats, bf16: self.bf16 || other.bf16, int8: self.int8 || other.int8 }
    }
}

/// The forms by name: `bf16 and floats`.
impl std::fmt::Display for Outputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [(self.bf16, "bf16"), (self.int8, "int8"), (self.floats, "floats")];
        let there: Vec<&str> = all.into_iter().filter_map(|(there, name)| there.then_some(name)).collect();
        f.write_str(if there.is_empty() { "nothing" } else { "" })?;
        f.write_str(&there.join(" and "))
    }
}
