//! The matrix product of prefill on Hopper: bf16 rows of activations times a bf16 copy of the weights, by whole warpgroups.
//!
//! A block makes a tile of the result, 64 rows to a warpgroup. Tiles of both operands, 64 values deep, go round a ring in
//! shared memory: while one step is multiplied, its successors are on their way, copied asynchronously by the threads
//! that multiply. Products are asynchronous too: a step is started before its predecessor has ended, so that the tensor
//! cores do not wait for barriers.
//!
//! Every output is summed along K sixteen values at a time, in order, whatever the tile: what the tensor core makes of
//! sixteen products and a sum depends on them alone. So a row's result does not depend on the rows beside it, on the
//! size of its chunk, nor on which tile was chosen.
//!
//! With `geglu` the matrix holds the gates' rows, then those of the values they gate, and a tile takes as many of each:
//! a thread holds both, and stores `gelu(gate) * value`.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, ElementType, Instance, InstanceError};

use crate::arch::Arch;
use crate::kernels::gelu::gelu_by_exp;
use crate::kernels::matvec::TUNED_MULTIPROCESSORS;

/// Values of K in a step: a row of a tile is 128 bytes, as far as the swizzle goes.
const STEP: u32 = 64;
/// Rows of tiles that run together: neighbours in the grid share either weights or activations, so that a wave of blocks
/// reads little more than it needs from L2.
const TILES_TOGETHER: u32 = 16;

/// Starts to copy a step's operands to a place in the ring. A thread copies the same 16 bytes of every so many rows.
#[device]
pub fn copy_step<const COLUMNS: u32, const WARPGROUPS: u32>(
    x_tile: Shared<BF16>,
    w_tile: Shared<BF16>,
    x: Input<BF16>,
    weights: Weights<BF16>,
    x_from: &Regs<u32>,
    w_from: &Regs<u32>,
    start: u32,
) {
    // Piece p of row r lies where piece p ^ r % 8 would: eight rows of a column of pieces lie in different banks.
    let row = thread_idx() / 8;
    let place = row * 64 + (thread_idx() % 8 ^ row % 8) * 8;
    #[unroll]
    for i in 0u32..4 {
        cp_async16(x_tile, place + i * WARPGROUPS * 1024, x, x_from[i] + start);
    }
    #[unroll]
    for i in 0..COLUMNS / (16 * WARPGROUPS) {
        cp_async16(w_tile, place + i * WARPGROUPS * 1024, weights, w_from[i] + start);
    }
}

/// `out = x · Wᵀ`, both bf16. Block `[m, n, g]` makes rows from `(16 g + m) * 64 * WARPGROUPS` and COLUMNS columns from `n *
/// COLUMNS`; half as many where GEGLU gates them. `k` is a multiple of 64, `outputs` is even.
#[kernel(block = WARPGROUPS * 128, min_blocks = 1, dynamic_shared, slots(epilogue(value: f32, at: u32) -> f32))]
pub fn product_wide<const WARPGROUPS: u32, const COLUMNS: u32, const STAGES: u32, const GEGLU: bool, O: Float>(
    weights: Weights<BF16>,
    x: Input<BF16>,
    state: Input<u32>,
    out: Output<O>,
    outputs: u32,
    k: u32,
) {
    require!(COLUMNS % 32 == 0 && COLUMNS <= 256 && COLUMNS % (16 * WARPGROUPS) == 0);
    require!(STAGES >= 3 && STAGES <= 7);
    let x_ring = shared::<BF16>(STAGES * WARPGROUPS * 4096);
    let w_ring = shared::<BF16>(STAGES * COLUMNS * 64);
    let x_stage = WARPGROUPS * 4096;
    let w_stage = COLUMNS * 64;
    let columns = if GEGLU { COLUMNS / 2 } else { COLUMNS };

    let rows = state[1u32];
    let first_row = (block_idx_z() * 16 + block_idx()) * WARPGROUPS * 64;
    let first_column = block_idx_y() * columns;
    // The whole block leaves: there are no such rows.
    if first_row >= rows {
        return;
    }

    // Where this thread copies from. Rows and columns past the end repeat the last one.
    let mut x_from = regs(0u32, 4);
    #[unroll]
    for i in 0u32..4 {
        let row = first_row + thread_idx() / 8 + i * WARPGROUPS * 16;
        x_from[i] = row.min(rows - 1) * k + thread_idx() % 8 * 8;
    }
    let mut w_from = regs(0u32, COLUMNS / (16 * WARPGROUPS));
    #[unroll]
    for i in 0..COLUMNS / (16 * WARPGROUPS) {
        let place = thread_idx() / 8 + i * WARPGROUPS * 16;
        let column = (first_column + place % columns).min(outputs - 1) + place / columns * outputs;
        w_from[i] = column * k + thread_idx() % 8 * 8;
    }

    let steps = k / 64;
    #[unroll]
    for step in 0..STAGES - 2 {
        if step < steps {
            let x_to = x_ring.offset(step * x_stage);
            let w_to = w_ring.offset(step * w_stage);
            copy_step(x_to, w_to, x, weights, &x_from, &w_from, step * 64);
        }
        cp_async_commit();
    }

    let mut sums = regs(0.0f32, COLUMNS / 2);
    let mut stage = 0u32;
    let mut stage_ahead = STAGES - 2;
    for step in 0..steps {
        // Everybody's copies of this step have landed, and everybody's products of the last step but one are done.
        cp_async_wait(STAGES - 3);
        fence_proxy_async();
        barrier();
        let x_tile = x_ring.offset(stage * x_stage + warp_id() / 4 * 4096);
        let w_tile = w_ring.offset(stage * w_stage);
        wgmma_fence(&mut sums);
        #[unroll]
        for i in 0u32..4 {
            wgmma_bf16(&mut sums, x_tile.offset(i * 16), w_tile.offset(i * 16));
        }
        wgmma_commit();
        if step + (STAGES - 2) < steps {
            let x_to = x_ring.offset(stage_ahead * x_stage);
            let w_to = w_ring.offset(stage_ahead * w_stage);
            copy_step(x_to, w_to, x, weights, &x_from, &w_from, (step + (STAGES - 2)) * 64);
        }
        cp_async_commit();
        stage = if stage + 1 == STAGES { 0 } else { stage + 1 };
        stage_ahead = if stage_ahead + 1 == STAGES { 0 } else { stage_ahead + 1 };
        wgmma_wait(1, &mut sums);
    }
    wgmma_wait(0, &mut sums);

    let row = first_row + warp_id() * 16 + lane_id() / 4;
    #[unroll]
    for i in (0u32..columns / 2).by(2) {
        let column = first_column + i / 4 * 8 + lane_id() % 4 * 2;
        let at = (row + i % 4 * 4) * outputs + column;
        let mut pair = f32x2(sums[i], sums[i + 1]);
        if GEGLU {
            let gated = f32x2(sums[i + COLUMNS / 4], sums[i + COLUMNS / 4 + 1]);
            pair = f32x2(gelu_by_exp(pair.x) * gated.x, gelu_by_exp(pair.y) * gated.y);
        }
        if row + i % 4 * 4 < rows && column < outputs {
            store_floats2(out, at, f32x2(epilogue(pair.x, at), epilogue(pair.y, at + 1)));
        }
    }
}

/// A block's part of the result. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WideTile {
    /// 64 rows each.
    pub warpgroups: u32,
    pub columns: u32,
}

impl WideTile {
    /// From the least work a block to the most.
    pub const ALL: [Self; 6] = [
        Self { warpgroups: 1, columns: 128 },
        Self { warpgroups: 1, columns: 256 },
        Self { warpgroups: 2, columns: 96 },
        Self { warpgroups: 2, columns: 128 },
        Self { warpgroups: 2, columns: 160 },
        Self { warpgroups: 2, columns: 256 },
    ];

    pub fn rows(&self) -> u32 {
        self.warpgroups * 64
    }

    /// Bytes of both operands of a step.
    fn step_bytes(&self) -> u32 {
        (self.rows() + self.columns) * STEP * 2
    }

    /// Steps in the ring: as many as there is room for, and no more than help.
    fn stages(&self) -> u32 {
        (Arch::Sm90a.max_shared_bytes_per_block() / self.step_bytes()).min(6)
    }

    /// Clocks of a step, about: those of the tensor cores or those of shared memory, whichever are more. Each warpgroup reads
    /// all weights of the tile, and both operands are written once.
    fn step_clocks(&self) -> u32 {
        let products = self.rows() * self.columns * STEP / 2048;
        let read = self.warpgroups * (64 + self.columns) * STEP * 2;
        products.max((read + self.step_bytes()) / 128)
    }
}

/// A product with a bf16 copy of the weights: everything that decides its instance but the tile. Outputs and the values of a
/// row are launch parameters.
#[derive(Clone, Debug)]
pub struct Wide {
    /// What the result is stored as.
    pub out: ElementType,
    /// The matrix holds gates, then what they gate.
    pub geglu: bool,
    /// Applied in order to each value of the result, which is counted over all rows.
    pub epilogue: Vec<&'static DeviceDef>,
}

impl Wide {
    /// The tile for `rows` rows, if the kernel can make that product: the one whose waves of blocks take the fewest clocks.
    /// `outputs` are those that are stored.
    pub fn choose(&self, rows: u32, outputs: u32, k: u32, arch: Arch) -> Option<WideTile> {
        let fits = arch.has_wgmma() && rows > 0 && outputs > 0 && outputs.is_multiple_of(2) && k > 0;
        let clocks = |tile: &WideTile| {
            let blocks: u32 = self.grid(*tile, rows, outputs).iter().product();
            blocks.div_ceil(TUNED_MULTIPROCESSORS) * tile.step_clocks()
        };
        let tiles = WideTile::ALL.into_iter().rev();
        if fits && k.is_multiple_of(STEP) { tiles.min_by_key(clocks) } else { None }
    }

    /// Rows of the matrix.
    pub fn matrix_rows(&self, outputs: u32) -> u32 {
        if self.geglu { 2 * outputs } else { outputs }
    }

    /// Columns of the result in a block's part.
    fn columns(&self, tile: WideTile) -> u32 {
        if self.geglu { tile.columns / 2 } else { tile.columns }
    }

    /// Blocks for `rows` rows. Those that share weights come one after the other.
    pub fn grid(&self, tile: WideTile, rows: u32, outputs: u32) -> [u32; 3] {
        let down = rows.div_ceil(tile.rows());
        [down.min(TILES_TOGETHER), outputs.div_ceil(self.columns(tile)), down.div_ceil(TILES_TOGETHER)]
    }

    pub fn instance(&self, tile: WideTile) -> Result<Instance, InstanceError> {
        Instance::of(product_wide::DEF)
            .constant("WARPGROUPS", tile.warpgroups)
            .constant("COLUMNS", tile.columns)
            .constant("STAGES", tile.stages())
            .constant("GEGLU", self.geglu)
            .element("O", self.out)
            .slot("epilogue", &self.epilogue)
            .build()
    }
}

/// Every tile, for each kind of result.
pub fn instances() -> Vec<(String, Instance)> {
    let kinds = [
        ("f32", Wide { out: ElementType::F32, geglu: false, epilogue: Vec::new() }),
        ("bf16", Wide { out: ElementType::BF16, geglu: false, epilogue: Vec::new() }),
        ("gated bf16", Wide { out: ElementType::BF16, geglu: true, epilogue: Vec::new() }),
    ];
    let mut named = Vec::new();
    for (kind, wide) in kinds {
        for tile in WideTile::ALL {
            let instance = wide.instance(tile).expect("tiles fit the kernel");
            named.push((format!("{} x {} to {kind}", tile.rows(), tile.columns), instance));
        }
    }
    named
}
