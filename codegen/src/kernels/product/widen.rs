//! Repacked weights to bf16, once, when a model has been loaded: what the product by warpgroups multiplies with.
//!
//! Made on the device from the planes that decode reads anyway, so that no file holds such a copy and nothing is read twice. Values
//! are those of the blocks, rounded once, to the nearest, ties to even.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::decode::decode;
use crate::kernels::matvec::formats::format;

/// `out = values` of whole rows, from the first of the planes that are given; a thread takes a unit at a time.
#[kernel(block = 256, slots(
    side(unit: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4
))]
pub fn widen<const UNIT: u32>(codes: Weights<U32x4>, out: Output<BF16>, units: u32) {
    for unit in (block_idx() * 256 + thread_idx()..units).by(grid_dim() * 256) {
        let own = load::<U32x4>(codes, unit);
        let beside = side(unit);
        let at = unit as u64 * UNIT as u64;
        if UNIT == 4 {
            let four = decode(own, beside, unit, 0);
            store(out, at, u32x2(four.x, four.y));
        } else {
            #[unroll]
            for part in 0..UNIT / 8 {
                store(out, at + (part * 8) as u64, decode(own, beside, unit, part));
            }
        }
    }
}

/// The widening of matrices of that type, on any grid. Its launch parameters: the planes, `out`, and `units` of [`units`].
pub fn instance(dtype: DType) -> Result<Instance, InstanceError> {
    let format = format(dtype);
    widen::Chosen { UNIT: format.unit, side: format.side, decode: vec![decode(dtype)] }.build()
}

/// Units of a matrix; `None` where they are more than a launch can count.
pub fn units(dtype: DType, rows: u64, k: u64) -> Option<u32> {
    u32::try_from(rows.checked_mul(k)? / u64::from(format(dtype).unit)).ok().filter(|units| *units <= i32::MAX as u32)
}

/// Blocks for that many units: a thread for each, up to as many as a GPU runs at once several times over.
pub fn grid(units: u32) -> [u32; 3] {
    [units.div_ceil(256).clamp(1, 8192), 1, 1]
}
