//! The forms in which row kernels write their results: f32 for kernels that compute with them, bf16 for prefill's
//! products, f16 for products of values that are known to be bounded, int8 for the integer products. One kernel may
//! write several forms, so that no launch only converts a row.
//!
//! A kernel takes the forms as a config ([`OutputForms`]) and their buffers as a view ([`OutputRows`]). The buffer of a
//! form that an instance does not write is empty: the compiled instance never touches it.

use gemma4c_dsl::prelude::*;

use super::quantise::{quantise4, quantise8};

/// Which forms an instance writes.
#[config]
pub struct OutputForms {
    pub FLOATS: bool,
    pub ROUNDED: bool,
    pub HALVED: bool,
    pub QUANTISED: bool,
}

/// The same rows in every form; those in int8 are codes with a scale and a sum for each 32.
#[view]
pub struct OutputRows {
    pub floats: Output<f32>,
    pub rounded: Output<BF16>,
    pub halves: Output<F16>,
    pub codes: Output<i8>,
    pub scales: Output<f32>,
    pub sums: Output<i32>,
}

/// Stores eight values as int8, four lanes to a group; `at` is the first one's place. A collective of the warp, in
/// which the lanes that are not `inside` store nothing.
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

/// Eight values rounded to f16.
#[device]
pub fn f16x8(low: F32x4, high: F32x4) -> U32x4 {
    u32x4(pack_f16(low.x, low.y), pack_f16(low.z, low.w), pack_f16(high.x, high.y), pack_f16(high.z, high.w))
}

/// Writes eight values in every form that the instance has, to `at` and behind. A collective of the warp, in which the
/// lanes that are not `inside` store nothing.
#[device]
pub fn write8<const FORMS: OutputForms>(low: F32x4, high: F32x4, at: u32, inside: bool, out: OutputRows) {
    if FORMS.FLOATS && inside {
        store(out.floats, at, low);
        store(out.floats, at + 4, high);
    }
    if FORMS.ROUNDED && inside {
        store(out.rounded, at, bf16x8(low, high));
    }
    if FORMS.HALVED && inside {
        store(out.halves, at, f16x8(low, high));
    }
    if FORMS.QUANTISED {
        store_int8(low, high, at, inside, out.codes, out.scales, out.sums);
    }
}

/// Writes four values, as [`write8`] does; eight lanes have a group of int8.
#[device]
pub fn write4<const FORMS: OutputForms>(four: F32x4, at: u32, inside: bool, out: OutputRows) {
    if FORMS.FLOATS && inside {
        store(out.floats, at, four);
    }
    if FORMS.ROUNDED && inside {
        store(out.rounded, at, u32x2(pack_bf16(four.x, four.y), pack_bf16(four.z, four.w)));
    }
    if FORMS.HALVED && inside {
        store(out.halves, at, u32x2(pack_f16(four.x, four.y), pack_f16(four.z, four.w)));
    }
    if FORMS.QUANTISED {
        let codes = quantise4(four);
        if inside {
            store(out.codes, at, codes.x);
            if at % 32 == 0 {
                out.scales[at / 32] = f32::from_bits(codes.y);
                out.sums[at / 32] = codes.z as i32;
            }
        }
    }
}

/// Which forms a value has, or is wanted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outputs {
    pub floats: bool,
    pub bf16: bool,
    pub f16: bool,
    pub int8: bool,
}

impl Outputs {
    pub const NONE: Self = Self { floats: false, bf16: false, f16: false, int8: false };
    pub const FLOATS: Self = Self { floats: true, ..Self::NONE };
    pub const BF16: Self = Self { bf16: true, ..Self::NONE };
    pub const F16: Self = Self { f16: true, ..Self::NONE };
    pub const INT8: Self = Self { int8: true, ..Self::NONE };

    /// What a kernel takes for them.
    pub const fn config(self) -> OutputForms {
        OutputForms { FLOATS: self.floats, ROUNDED: self.bf16, HALVED: self.f16, QUANTISED: self.int8 }
    }

    /// The forms of both.
    pub const fn and(self, other: Self) -> Self {
        Self {
            floats: self.floats || other.floats,
            bf16: self.bf16 || other.bf16,
            f16: self.f16 || other.f16,
            int8: self.int8 || other.int8,
        }
    }
}

/// The forms by name: `bf16 and floats`.
impl std::fmt::Display for Outputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [(self.bf16, "bf16"), (self.f16, "f16"), (self.int8, "int8"), (self.floats, "floats")];
        let there: Vec<&str> = all.into_iter().filter_map(|(there, name)| there.then_some(name)).collect();
        f.write_str(if there.is_empty() { "nothing" } else { "" })?;
        f.write_str(&there.join(" and "))
    }
}
