//! What a router that begins a mixture does besides its choice: it adds attention's output to the residual, and writes
//! the residual and the inputs of both halves. These have one norm, with weights for each of them.
//!
//! All blocks of a row have all of its values, so each of the three results is written by another block, where there
//! are as many.

use gemma4c_dsl::prelude::*;

use super::routing::{BlockRows, MixtureInputs, RouterNorms, RouterShape, RouterTile, inverse_rms_of_row};
use crate::kernels::matvec::parts::{chunk_slots, is_place, leave_chunks};
use crate::kernels::matvec::slots::{weighted, with_update};
use crate::kernels::outputs::{OutputForms, write4};

/// The results that a block writes.
#[registers]
pub struct WriterRoles {
    pub residual: bool,
    pub dense: bool,
    pub expert: bool,
}

#[device]
pub fn writer_roles<const BEGINS_MIXTURE: bool>() -> WriterRoles {
    let last = grid_dim_y() - 1;
    // Others than the first block, which may have to choose.
    WriterRoles {
        residual: BEGINS_MIXTURE && block_idx_y() == last.min(3),
        dense: BEGINS_MIXTURE && block_idx_y() == last.min(1),
        expert: BEGINS_MIXTURE && block_idx_y() == last.min(2),
    }
}

/// Loads the norms' weights of the halves whose inputs the block writes.
#[device]
pub fn load_input_norms<const S: RouterShape, const T: RouterTile>(
    roles: WriterRoles,
    norms: RouterNorms,
    dense_norms: &mut Regs<F32x4>,
    expert_norms: &mut Regs<F32x4>,
) {
    #[unroll]
    for p in 0u32..T.PIECES {
        let from = (thread_idx() + p * T.WARPS * 32).min(S.WIDTH / 4 - 1) * 4;
        if roles.dense {
            dense_norms[p] = load::<F32x4>(norms.dense, from);
        }
        if roles.expert {
            expert_norms[p] = load::<F32x4>(norms.expert, from);
        }
    }
}

/// Adds attention's normed output to the rows in registers. A collective of the block.
#[device]
pub fn add_update<const S: RouterShape, const T: RouterTile>(
    held: &mut Regs<F32x4>,
    updates: &Regs<F32x4>,
    posts: &Regs<F32x4>,
    update_squares: Shared<f32>,
) {
    #[unroll]
    for t in 0u32..T.NORMED_ROWS {
        let mut own = regs(F32x4::ZERO, T.PIECES);
        #[unroll]
        for p in 0u32..T.PIECES {
            own[p] = updates[t * T.PIECES + p];
        }
        leave_chunks(&own, S.WIDTH / 4, update_squares.offset(t * chunk_slots(S.WIDTH)));
    }
    barrier();
    #[unroll]
    for t in 0u32..T.NORMED_ROWS {
        let factor = inverse_rms_of_row(update_squares, t);
        #[unroll]
        for p in 0u32..T.PIECES {
            let of = t * T.PIECES + p;
            held[of] = with_update(held[of], weighted(updates[of], posts[p], 1.0), factor, 1.0);
        }
    }
}

/// Writes the rows from `start` on as their residual, and as the inputs of both halves of the mixture: of each of these
/// what the block is to write.
#[device]
pub fn write_mixture_inputs<const S: RouterShape, const T: RouterTile, const FORMS: OutputForms>(
    held: &Regs<F32x4>,
    dense_norms: &Regs<F32x4>,
    expert_norms: &Regs<F32x4>,
    roles: WriterRoles,
    start: u32,
    rows: BlockRows,
    row_squares: Shared<f32>,
    out: MixtureInputs,
) {
    #[unroll]
    for t in 0u32..T.NORMED_ROWS {
        let row = (start + t).min(rows.end - 1);
        let factor = inverse_rms_of_row(row_squares, row - rows.first);
        #[unroll]
        for p in 0u32..T.PIECES {
            let place = thread_idx() + p * T.WARPS * 32;
            let inside = is_place(place, S.WIDTH / 4) && start + t < rows.end;
            let at = row * S.WIDTH + place * 4;
            if roles.residual && inside {
                store(out.residual, at, held[t * T.PIECES + p]);
            }
            if roles.dense {
                write4(weighted(held[t * T.PIECES + p], dense_norms[p], factor), at, inside, out.dense);
            }
            if roles.expert {
                write4(weighted(held[t * T.PIECES + p], expert_norms[p], factor), at, inside, out.expert);
            }
        }
    }
}

/// Stores the rows in registers for the same thread.
#[device]
pub fn keep_rows_of_thread<const T: RouterTile>(held: &Regs<F32x4>, kept_rows: Shared<f32>) {
    #[unroll]
    for of in 0u32..T.NORMED_ROWS * T.PIECES {
        store(kept_rows, (of * T.WARPS * 32 + thread_idx()) * 4, held[of]);
    }
}

/// Loads what [`keep_rows_of_thread`] stored.
#[device]
pub fn load_kept_rows<const T: RouterTile>(kept: &mut Regs<F32x4>, kept_rows: Shared<f32>) {
    #[unroll]
    for of in 0u32..T.NORMED_ROWS * T.PIECES {
        kept[of] = load::<F32x4>(kept_rows, (of * T.WARPS * 32 + thread_idx()) * 4);
    }
}
