//! The stages of a router from its weights to the logits of a block's rows. All of it is in f32.

use gemma4c_dsl::prelude::*;

use super::routing::{
    BlockRows, RouterNorms, RouterRows, RouterShape, RouterShared, RouterSplit, RouterTile, first_expert_of_warp,
    inverse_rms_of_row,
};
use crate::kernels::matvec::parts::{chunk_slots, is_place, leave_chunks};
use crate::kernels::matvec::slots::weighted;

/// `sum` plus four products.
#[device]
pub fn four_products(a: F32x4, b: F32x4, sum: f32) -> f32 {
    a.w.mul_add(b.w, a.z.mul_add(b.z, a.y.mul_add(b.y, a.x.mul_add(b.x, sum))))
}

/// Issues the loads of vectors `from..to` of the DEPTH that a lane has in flight, of the warp's first experts.
#[device]
pub fn prefetch_router<const S: RouterShape, const T: RouterTile>(
    router: Weights<f32>,
    from: u32,
    to: u32,
    ahead: &mut Regs<F32x4>,
) {
    #[unroll]
    for d in from..to {
        let at = (lane_id() + d * 32).min(S.WIDTH / 4 - 1);
        #[unroll]
        for e in 0u32..T.WARP_EXPERTS {
            let expert = (first_expert_of_warp() + e).min(S.EXPERTS - 1);
            ahead[d * T.WARP_EXPERTS + e] = load::<F32x4>(router, expert * S.WIDTH + at * 4);
        }
    }
}

/// Loads the weights of the norms before the router, those of the update where there is one.
#[device]
pub fn load_router_norms<const S: RouterShape, const T: RouterTile, const BEGINS_MIXTURE: bool>(
    norms: RouterNorms,
    scales: &mut Regs<F32x4>,
    posts: &mut Regs<F32x4>,
) {
    #[unroll]
    for p in 0u32..T.PIECES {
        let place = thread_idx() + p * T.WARPS * 32;
        if is_place(place, S.WIDTH / 4) {
            scales[p] = load::<F32x4>(norms.scale, place * 4);
            if BEGINS_MIXTURE {
                posts[p] = load::<F32x4>(norms.post, place * 4);
            }
        }
    }
}

/// Loads NORMED_ROWS rows from `start` on, with their updates. Rows past the end are clamped to the last one; vectors
/// past a row's end stay zero.
#[device]
pub fn load_router_rows<const S: RouterShape, const T: RouterTile, const BEGINS_MIXTURE: bool>(
    rows: RouterRows,
    start: u32,
    end: u32,
    held: &mut Regs<F32x4>,
    updates: &mut Regs<F32x4>,
) {
    #[unroll]
    for t in 0u32..T.NORMED_ROWS {
        let row = (start + t).min(end - 1);
        #[unroll]
        for p in 0u32..T.PIECES {
            let place = thread_idx() + p * T.WARPS * 32;
            if is_place(place, S.WIDTH / 4) {
                held[t * T.PIECES + p] = load::<F32x4>(rows.x, row * S.WIDTH + place * 4);
                if BEGINS_MIXTURE {
                    updates[t * T.PIECES + p] = load::<F32x4>(rows.update, row * S.WIDTH + place * 4);
                }
            }
        }
    }
}

/// Stores the rows from `start` on, times the norm's weights, and the sums of their squares: those of the values
/// themselves, whatever cancelled in them. A barrier must follow.
#[device]
pub fn stage_rows_of_router<const S: RouterShape, const T: RouterTile>(
    held: &Regs<F32x4>,
    scales: &Regs<F32x4>,
    start: u32,
    rows: BlockRows,
    memory: RouterShared,
) {
    #[unroll]
    for t in 0u32..T.NORMED_ROWS {
        let row = (start + t).min(rows.end - 1) - rows.first;
        let mut own = regs(F32x4::ZERO, T.PIECES);
        #[unroll]
        for p in 0u32..T.PIECES {
            let place = thread_idx() + p * T.WARPS * 32;
            own[p] = held[t * T.PIECES + p];
            if is_place(place, S.WIDTH / 4) {
                store(memory.weighted_rows, row * S.WIDTH + place * 4, weighted(own[p], scales[p], 1.0));
            }
        }
        leave_chunks(&own, S.WIDTH / 4, memory.row_squares.offset(row * chunk_slots(S.WIDTH)));
    }
}

/// The logits of the block's rows and experts, to `logits` and, for a cluster, to shared memory. `ahead` holds the
/// first DEPTH vectors of the warp's first experts; in a cluster a warp has no others.
#[device]
pub fn multiply_rows<const S: RouterShape, const T: RouterTile, const B: RouterSplit>(
    router: Weights<f32>,
    ahead: &mut Regs<F32x4>,
    rows: BlockRows,
    memory: RouterShared,
    logits: InOut<f32>,
) {
    let vectors = S.WIDTH / 4;
    let stride = grid_dim_y() * T.WARPS * T.WARP_EXPERTS;
    // Rows past the end are clamped to the last one; nobody reads their sums.
    let last = rows.end - rows.first - 1;
    let mut factors = regs(0.0f32, T.ROWS);
    #[unroll]
    for r in 0u32..T.ROWS {
        factors[r] = inverse_rms_of_row(memory.row_squares, r.min(last)) * S.FACTOR;
    }
    for expert in (first_expert_of_warp()..S.EXPERTS).by(stride) {
        let mut sums = regs(0.0f32, T.ROWS * T.WARP_EXPERTS);
        for start in (0u32..vectors).by(T.DEPTH * 32) {
            #[unroll]
            for d in 0u32..T.DEPTH {
                let at = start + lane_id() + d * 32;
                if at < vectors {
                    #[unroll]
                    for r in 0u32..T.ROWS {
                        let four = load::<F32x4>(memory.weighted_rows, r.min(last) * S.WIDTH + at * 4);
                        #[unroll]
                        for e in 0u32..T.WARP_EXPERTS {
                            let sum = sums[r * T.WARP_EXPERTS + e];
                            sums[r * T.WARP_EXPERTS + e] = four_products(ahead[d * T.WARP_EXPERTS + e], four, sum);
                        }
                    }
                }
                let row_ends = start + T.DEPTH * 32 >= vectors;
                let next_expert = if row_ends { expert + stride } else { expert };
                let next = if row_ends { lane_id() + d * 32 } else { at + T.DEPTH * 32 };
                if B.CLUSTER_SIZE == 1 && next_expert < S.EXPERTS {
                    #[unroll]
                    for e in 0u32..T.WARP_EXPERTS {
                        let row = (next_expert + e).min(S.EXPERTS - 1);
                        ahead[d * T.WARP_EXPERTS + e] =
                            load::<F32x4>(router, row * S.WIDTH + next.min(vectors - 1) * 4);
                    }
                }
            }
        }
        #[unroll]
        for r in 0u32..T.ROWS {
            #[unroll]
            for e in 0u32..T.WARP_EXPERTS {
                let sum = warp_sum(sums[r * T.WARP_EXPERTS + e]);
                if lane_id() == 0 && rows.first + r < rows.end && expert + e < S.EXPERTS {
                    logits[(rows.first + r) * S.EXPERTS + expert + e] = sum * factors[r];
                    if B.CLUSTER_SIZE > 1 {
                        memory.logits[r * S.EXPERTS + expert + e] = sum * factors[r];
                    }
                }
            }
        }
    }
}
