//! What this GPU's memory gives at best: the yardstick of every kernel whose time is the weights it streams.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

/// Reads `count` groups of four words once, and writes the exclusive or of what each thread has read. It does as little
/// as a kernel can that must really load everything; AHEAD loads of a thread are in flight at once.
#[kernel(block = THREADS)]
pub fn read_all<const THREADS: u32, const AHEAD: u32>(words: Weights<u32>, folded: Output<u32>, count: u32) {
    let me = block_idx() * THREADS + thread_idx();
    let stride = grid_dim() * THREADS;
    let mut fold = 0u32;
    for first in (me..count).by(stride * AHEAD) {
        let mut loaded = regs(U32x4::ZERO, AHEAD);
        #[unroll]
        for i in 0..AHEAD {
            let group = first + i * stride;
            if group < count {
                loaded[i] = load_streamed::<U32x4>(words, group * 4);
            }
        }
        #[unroll]
        for i in 0..AHEAD {
            let four = loaded[i];
            fold = fold ^ four.x ^ four.y ^ four.z ^ four.w;
        }
    }
    folded[me] = fold;
}

/// The probe with that many loads in flight.
pub fn instance(threads: u32, ahead: u32) -> Result<Instance, InstanceError> {
    read_all::Chosen { THREADS: threads, AHEAD: ahead }.build()
}

/// The probes that are tried: which one reaches the ceiling differs between GPUs.
pub fn tried() -> Result<Vec<Instance>, InstanceError> {
    [2, 4, 8].into_iter().map(|ahead| instance(512, ahead)).collect()
}
