//! When to use threads: forking and joining costs microseconds, more than most element-wise ops.

use rayon::prelude::*;

/// Values that one thread should have before a second one is worth waking.
const WORTH_A_THREAD: usize = 1 << 15;

/// Calls `f(first_row, rows)` on consecutive pieces of `out`, whole rows of `width` each.
pub fn rows_in_parallel(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if width == 0 || out.len() <= WORTH_A_THREAD {
        return f(0, out);
    }
    let rows = WORTH_A_THREAD.div_ceil(width);
    out.par_chunks_mut(rows * width).enumerate().for_each(|(i, piece)| f(i * rows, piece));
}
