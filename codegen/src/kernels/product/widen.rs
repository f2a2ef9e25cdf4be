//! Weights as they lie in the file to bf16, once, at load: what the product by warpgroups multiplies with.
//!
//! A chunk of whole rows a launch. Values are those of the blocks, rounded once, to the nearest, ties to even.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::values::value;

/// Groups of eight values that a block takes at a time.
pub const BLOCK_THREADS: u32 = 256;

/// `out = values` from the first of the tensor that is given, eight to a group; a thread takes a group at a time.
#[kernel(block = 256, slots(value(at: u64) -> f32))]
pub fn widen(out: Output<BF16>, groups: u32) {
    for group in (block_idx() * 256 + thread_idx()..groups).by(grid_dim() * 256) {
        let at = group as u64 * 8;
        let mut words = regs(0u32, 4);
        #[unroll]
        for i in 0u32..4 {
            words[i] = pack_bf16(value(at + (2 * i) as u64), value(at + (2 * i + 1) as u64));
        }
        store(out, at, u32x4(words[0], words[1], words[2], words[3]));
    }
}

/// The widening of tensors of that type, on any grid. Its launch parameters: `out`, `groups` of eight values, `value_tensor`.
pub fn instance(dtype: DType) -> Result<Instance, InstanceError> {
    Instance::of(widen::DEF).slot("value", &[value(dtype)]).build()
}

/// Blocks for that many groups: one each, up to as many as a GPU runs at once several times over.
pub fn grid(groups: u32) -> [u32; 3] {
    [groups.div_ceil(256).clamp(1, 8192), 1, 1]
}

/// One instance a type.
pub fn instances() -> Vec<(String, Instance)> {
    let named = |dtype: DType| instance(dtype).map(|instance| (dtype.name().to_owned(), instance));
    DType::ALL.into_iter().map(named).collect::<Result<_, _>>().expect("every type has its function")
}
