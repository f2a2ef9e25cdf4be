//! Kernels whose blocks wait for each other. The tests of the simulator run them, NVRTC's compile them.

use gemma4c_dsl::prelude::*;

/// Every block writes a piece, waits for all others, and reads the next one's.
#[kernel(block = 64)]
pub fn exchange(counter: InOut<u32>, pieces: InOut<u32>, out: Output<u32>) {
    let i = block_idx() * 64 + thread_idx();
    pieces[i] = 3 * i;
    barrier();
    if thread_idx() == 0 {
        atomic_add_release(counter, 0u32, 1);
        atomic_wait_acquire(counter, 0u32, grid_dim());
    }
    barrier();
    out[i] = pieces[(i + 64) % (grid_dim() * 64)];
}

/// Every thread leaves a word with a flag for the next block's, in one access, and polls for its own.
#[kernel(block = 32)]
pub fn mailboxes(slots: InOut<u32>, wide: InOut<U32x4>, out: Output<u32>) {
    let i = block_idx() * 32 + thread_idx();
    let from = (i + 32) % (grid_dim() * 32);
    prefetch_l2(slots, i * 2);
    atomic_store_relaxed(slots, i * 2, u32x2(i + 100, 7));
    atomic_store_relaxed(wide, i, u32x4(i, 1, 2, 7));
    let mut pair = atomic_load_relaxed::<U32x2>(slots, from * 2);
    while pair.y != 7 {
        pair = atomic_load_relaxed::<U32x2>(slots, from * 2);
    }
    let mut four = atomic_load_relaxed::<U32x4>(wide, from);
    while four.w != 7 {
        four = atomic_load_relaxed::<U32x4>(wide, from);
    }
    out[i] = pair.x + 1000 * four.x;
}
