//! Repacked weights to bf16, once, when a model has been loaded, or before each product that reads them: what the product by warpgroups multiplies with.
//!
//! Made on the device from the planes that decode reads anyway, so that no file holds such a copy and nothing is read twice. Values
//! are those of the blocks, rounded once, to the nearest, ties to even.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::decode::decode;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::parts::{Unit, fetch};

/// `out = values` of whole rows, from the first of the planes that are given. A thread takes eight values at a time, all that a unit of four has: a warp stores whole lines, whatever
/// the units. Four loads are on their way before the first is stored.
#[kernel(block = 256, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4
))]
pub fn widen<const UNIT: u32>(codes: Weights<U32x4>, out: Output<BF16>, units: u32) {
    let parts = if UNIT < 8 { 1u32 } else { UNIT / 8 };
    let pieces = units * parts;
    for first in (block_idx() * 1024 + thread_idx()..pieces).by(grid_dim() * 1024) {
        let mut ahead = regs(Unit::ZERO, 4);
        #[unroll]
        for i in 0u32..4 {
            ahead[i] = fetch(side, codes, (first + i * 256).min(pieces - 1) / parts);
        }
        #[unroll]
        for i in 0u32..4 {
            let piece = first + i * 256;
            if piece < pieces {
                let values = decode(ahead[i].codes, ahead[i].side, piece / parts, piece % parts);
                if UNIT == 4 {
                    store(out, piece as u64 * 4, u32x2(values.x, values.y));
                } else {
                    store(out, piece as u64 * 8, values);
                }
            }
        }
    }
}

/// The widening of matrices of that type, on any grid. Its launch parameters: the planes, `out`, and `units` of [`units`].
pub fn instance(dtype: DType) -> Result<Instance, InstanceError> {
    let format = format(dtype);
    widen::Chosen { UNIT: format.unit, side: format.side, decode: vec![decode(dtype)] }.build()
}

/// Units of a matrix; `None` where they are more than a launch can count in eights.
pub fn units(dtype: DType, rows: u64, k: u64) -> Option<u32> {
    let (values, unit) = (rows.checked_mul(k)?, u64::from(format(dtype).unit));
    let is_counted = values / unit.min(8) <= i32::MAX as u64;
    u32::try_from(values / unit).ok().filter(|_| is_counted)
}

/// Blocks for that many units of a type: four times eight values to a thread, up to as many blocks as a GPU runs at once several times over.
pub fn grid(dtype: DType, units: u32) -> [u32; 3] {
    let pieces = units * (format(dtype).unit / 8).max(1);
    [pieces.div_ceil(1024).clamp(1, 8192), 1, 1]
}

/// Blocks of a launch that runs beside others: one an SM. With more, the blocks of a product find no room beside them and start late.
pub fn grid_beside(dtype: DType, units: u32, multiprocessors: u32) -> [u32; 3] {
    let [blocks, ..] = grid(dtype, units);
    [blocks.min(multiprocessors), 1, 1]
}
