//! What comes before a product: the residual that takes a layer's part, and the norms, over activations that a block's threads hold.
//!
//! A thread holds fours of one row of activations, PIECES of them, WARPS * 32 places apart. The products of one row and the kernel
//! that prepares many rows call the same functions. Squares are summed by chunks of 128 values, so that the bits of a row do not depend on how
//! many warps share it.

use gemma4c_dsl::prelude::*;

use super::parts::{chunk_slots, four_at, inverse_rms_of_chunks, is_place, leave_chunks};
use super::slots::{weighted, with_update};
use crate::kernels::norm::sum4;

/// Starts the weights of the norms on their way to shared memory: each thread copies what it will need itself. Those of the branches lie
/// behind those of the post-norm.
#[device]
pub fn copy_norms<
    const K: u32,
    const PIECES: u32,
    const WARPS: u32,
    const RESIDUAL: bool,
    const BRANCHED: bool,
    const NORMED: bool,
>(
    posts: Shared<f32>,
    nexts: Shared<f32>,
    update_norm: Weights<f32>,
    branch_norm: Weights<f32>,
    post_norm: Weights<f32>,
    next_norm: Weights<f32>,
) {
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * (WARPS * 32);
        if RESIDUAL && is_place(place, K / 4) {
            cp_async16(posts, place * 4, post_norm, place * 4);
        }
        if BRANCHED && is_place(place, K / 4) {
            cp_async16(posts, K + place * 4, update_norm, place * 4);
            cp_async16(posts, 2 * K + place * 4, branch_norm, place * 4);
        }
        if NORMED && is_place(place, K / 4) {
            cp_async16(nexts, place * 4, next_norm, place * 4);
        }
    }
    cp_async_commit();
}

/// The update as the sum of two halves of a mixture, each normed by itself. A collective of the block.
#[device(slots(branch(at: u32) -> F32x4))]
pub fn add_branch<const K: u32, const PIECES: u32, const WARPS: u32, const EPSILON: f32>(
    updates: &mut Regs<F32x4>,
    branch_from: u32,
    posts: Shared<f32>,
    of_branches: Shared<f32>,
) {
    let threads = WARPS * 32;
    let places = K / 4;
    let mut branches = regs(F32x4::ZERO, PIECES);
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * threads;
        if is_place(place, places) {
            branches[p] = branch(branch_from + place * 4);
        }
    }
    let of_second = of_branches.offset(chunk_slots(K));
    leave_chunks(updates, places, of_branches);
    leave_chunks(&branches, places, of_second);
    barrier();
    cp_async_wait(0);
    let first = inverse_rms_of_chunks(of_branches, K);
    let second = inverse_rms_of_chunks(of_second, K);
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * threads;
        let part = weighted(updates[p], four_at(posts.offset(K), place, places), first);
        let other = weighted(branches[p], four_at(posts.offset(2 * K), place, places), second);
        updates[p] = sum4(part, other);
    }
}

/// Loads what a layer made, of a mixture the sum of its two branches, and gives the factor of the norm over it. `updates` are zeros before, and stay so where there is no place. Rows of the update and of the other branch start
/// at `update_from` and `branch_from`. All copies to shared memory that a thread has started are there behind it. A collective of the block.
#[device(slots(
    update(at: u32) -> F32x4,
    branch(at: u32) -> F32x4
))]
pub fn load_update<const K: u32, const PIECES: u32, const WARPS: u32, const BRANCHED: bool, const EPSILON: f32>(
    updates: &mut Regs<F32x4>,
    update_from: u32,
    branch_from: u32,
    posts: Shared<f32>,
    of_branches: Shared<f32>,
    of_updates: Shared<f32>,
) -> f32 {
    let threads = WARPS * 32;
    let places = K / 4;
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * threads;
        if is_place(place, places) {
            updates[p] = update(update_from + place * 4);
        }
    }
    if BRANCHED {
        add_branch(branch, updates, branch_from, posts, of_branches);
    }
    leave_chunks(updates, places, of_updates);
    barrier();
    cp_async_wait(0);
    inverse_rms_of_chunks(of_updates, K)
}

/// Adds a layer's normed part to the residual that the threads hold, and leaves it at `to` where this block is to; `by` is the layer's scale.
#[device(slots(residual(value: F32x4, at: u32) -> F32x4))]
pub fn take_update<const K: u32, const PIECES: u32, const WARPS: u32>(
    held: &mut Regs<F32x4>,
    updates: &Regs<F32x4>,
    factor: f32,
    by: f32,
    to: u32,
    leaves: bool,
    posts: Shared<f32>,
) {
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * (WARPS * 32);
        let part = weighted(updates[p], four_at(posts, place, K / 4), 1.0);
        held[p] = with_update(held[p], part, factor, by);
        if leaves && is_place(place, K / 4) {
            residual(held[p], to + place * 4);
        }
    }
}

/// Leaves the squares of what the threads hold, and multiplies it by the norm's weights. The squares are those of the values
/// themselves, whatever cancelled in them. A norm's factor is the same for all values, so the results take it, and no barrier
/// waits for it here.
#[device]
pub fn weigh<const K: u32, const PIECES: u32, const WARPS: u32>(
    held: &mut Regs<F32x4>,
    nexts: Shared<f32>,
    of_residual: Shared<f32>,
) {
    cp_async_wait(0);
    leave_chunks(held, K / 4, of_residual);
    #[unroll]
    for p in 0..PIECES {
        held[p] = weighted(held[p], four_at(nexts, thread_idx() + p * (WARPS * 32), K / 4), 1.0);
    }
}
