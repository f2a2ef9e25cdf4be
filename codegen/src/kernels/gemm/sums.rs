//! What becomes of a block's sums: slices are added in order, the epilogue is applied, results are stored.

use gemma4c_dsl::prelude::*;

use crate::kernels::gelu::gelu_by_exp;

/// Where a tile's results go: rows from `first_row` to `end`, whose place, of sorted pairs, `order` tells. Rows of what
/// an epilogue takes are `by_stride` apart.
#[view]
pub struct GemmOut<O: Float> {
    pub out: Output<O>,
    pub order: Input<u32>,
    pub first_row: u32,
    pub end: u32,
    pub outputs: u32,
    pub by_stride: u32,
}

/// Stores the sums of a block, whose first output is `first_output`; those of several slices meet in `memory`, which
/// nobody reads any more once all warps have come here. A collective of the cluster.
#[device(slots(change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4, epilogue(value: f32, at: u32) -> f32))]
pub fn store_sums<
    const ROWS: u32,
    const ACROSS: u32,
    const SLICES: u32,
    const HELD: u32,
    const GEGLU: bool,
    const PAIRS: u32,
    H: Float,
    O: Float,
>(
    memory: Shared<H>,
    sums: &Regs<F32x4>,
    to: GemmOut<O>,
    first_output: u32,
) {
    let of_tile = if GEGLU { 8u32 } else { 16u32 };
    // A warp behind those that multiply has no sums.
    let warps = ACROSS * HELD;
    if SLICES == 1 && warp_id() < warps {
        #[unroll]
        for n in 0..ROWS / 8 {
            store_fragment(change, epilogue, to, sums[n], first_output + warp_id() % ACROSS * of_tile, n * 8);
        }
    }
    if SLICES > 1 {
        // All fragments of the block's slices, then each warp of the cluster adds up its share of them.
        cp_async_wait(0);
        barrier();
        if warp_id() < warps {
            #[unroll]
            for n in 0..ROWS / 8 {
                store(memory, ((warp_id() * (ROWS / 8) + n) * 32 + lane_id()) * 8, sums[n]);
            }
        }
        let cluster = SLICES / HELD;
        if cluster > 1 {
            cluster_barrier();
        } else {
            barrier();
        }
        let all = ACROSS * (ROWS / 8);
        let rank = if cluster > 1 { cluster_rank() } else { 0 };
        if warp_id() < warps {
            for number in (rank * warps + warp_id()..all).by(cluster * warps) {
                let sum = sum_of_slices(memory, number);
                let output = first_output + number / (ROWS / 8) * of_tile;
                store_fragment(change, epilogue, to, sum, output, number % (ROWS / 8) * 8);
            }
        }
        if cluster > 1 {
            cluster_barrier();
        }
    }
}

/// Adds up this lane's part of a fragment, slice by slice.
#[device]
pub fn sum_of_slices<const ROWS: u32, const ACROSS: u32, const SLICES: u32, const HELD: u32, H: Float>(
    memory: Shared<H>,
    number: u32,
) -> F32x4 {
    let all = ACROSS * (ROWS / 8);
    let mut total = F32x4::ZERO;
    #[unroll]
    for slice in 0..SLICES {
        let at = ((slice % HELD * all + number) * 32 + lane_id()) * 8;
        let mut part = load::<F32x4>(memory, at);
        if SLICES > HELD {
            part = load_peer::<F32x4>(memory, at, slice / HELD);
        }
        total = if slice == 0 {
            part
        } else {
            f32x4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w)
        };
    }
    total
}

/// Stores a value of the result: with GEGLU that of a gate, with what it gates.
#[device(slots(epilogue(value: f32, at: u32) -> f32))]
pub fn store_output<const GEGLU: bool, const PAIRS: u32, O: Float>(
    to: GemmOut<O>,
    value: f32,
    gated: f32,
    output: u32,
    row: u32,
) {
    if row < to.end && output < to.outputs {
        let mut place = row;
        if PAIRS > 0 {
            place = to.order[row];
        }
        let result = if GEGLU { gelu_by_exp(value) * gated } else { value };
        to.out[place * to.outputs + output] = O::from_f32(epilogue(result, place * to.by_stride + output));
    }
}

/// Stores a fragment, of which a lane has outputs g and g + 8, or a gate and what it gates, of two rows. What changes
/// them knows places behind the last ones as the last ones; sorted pairs have nothing that does.
#[device(slots(
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn store_fragment<const ROWS: u32, const GEGLU: bool, const PAIRS: u32, O: Float>(
    to: GemmOut<O>,
    sum: F32x4,
    output: u32,
    row: u32,
) {
    let column = output + lane_id() / 4;
    let own = to.first_row + row + lane_id() % 4 * 2;
    let last = to.outputs - 1;
    let second = if GEGLU { column.min(last) + to.outputs } else { (column + 8).min(last) };
    let rows = u32x2(own.min(to.end - 1), (own + 1).min(to.end - 1));
    let four = change(sum, u32x2(column.min(last), second), rows);
    store_output(epilogue, to, four.x, four.z, column, own);
    store_output(epilogue, to, four.y, four.w, column, own + 1);
    if !GEGLU {
        store_output(epilogue, to, four.z, 0.0, column + 8, own);
        store_output(epilogue, to, four.w, 0.0, column + 8, own + 1);
    }
}
