//! What a router that begins the mixture leaves behind besides its choice: the residual, and the inputs of both halves. They have one norm, with weights for each of them.

use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::parts::{chunk_slots, inverse_rms_of_chunks, is_place};
use crate::kernels::matvec::slots::weighted;
use crate::kernels::outputs::leave4;

/// Leaves rows as their residual, and as the inputs of both halves of the mixture: of each of these what the block is to.
#[device]
pub fn leave_rows<
    const WIDTH: u32,
    const PIECES: u32,
    const WARPS: u32,
    const TOGETHER: u32,
    const FLOATS: bool,
    const ROUNDED: bool,
    const QUANTISED: bool,
    const EPSILON: f32,
>(
    held: &Regs<F32x4>,
    dense_norms: &Regs<F32x4>,
    expert_norms: &Regs<F32x4>,
    of_rows: Shared<f32>,
    start: u32,
    first_row: u32,
    end: u32,
    leaves_residual: bool,
    leaves_dense: bool,
    leaves_expert: bool,
    residual: Output<f32>,
    dense_out: Output<f32>,
    dense_rounded: Output<BF16>,
    dense_xq: Output<i8>,
    dense_xscale: Output<f32>,
    dense_xsum: Output<i32>,
    expert_out: Output<f32>,
    expert_rounded: Output<BF16>,
    expert_xq: Output<i8>,
    expert_xscale: Output<f32>,
    expert_xsum: Output<i32>,
) {
    #[unroll]
    for t in 0..TOGETHER {
        let row = (start + t).min(end - 1);
        let after = inverse_rms_of_chunks(of_rows.offset((row - first_row) * chunk_slots(WIDTH)), WIDTH);
        #[unroll]
        for p in 0..PIECES {
            let place = thread_idx() + p * WARPS * 32;
            let inside = is_place(place, WIDTH / 4) && start + t < end;
            let at = row * WIDTH + place * 4;
            if leaves_residual && inside {
                store(residual, at, held[t * PIECES + p]);
            }
            if leaves_dense {
                let four = weighted(held[t * PIECES + p], dense_norms[p], after);
                leave4(four, at, inside, dense_out, dense_rounded, dense_xq, dense_xscale, dense_xsum);
            }
            if leaves_expert {
                let four = weighted(held[t * PIECES + p], expert_norms[p], after);
                leave4(four, at, inside, expert_out, expert_rounded, expert_xq, expert_xscale, expert_xsum);
            }
        }
    }
}
