//! How a product by [tiles](super::tiles) is spread over a GPU: a rule, by what the kernel moves and computes ([`Cycles`]). The order of sums is that of any shape, so nothing here changes a bit of
//! any result.

use super::formats::TensorFormat;
use super::product::Product;
use crate::target::Target;

/// Stretches of a row of weights, each summed by itself.
pub const STRETCHES: u32 = 4;
/// Bytes of a panel of joined results that are rounded: those of [`held_panel`](super::rounded::held_panel).
const HELD_PANEL_BYTES: u32 = 8 * 36 * 4;
/// Rows of weights of a warp's tile.
const WARP_ROWS: u32 = 16;

/// Blocks of 32 values of a stretch: whole turns of as many as it has sums. The last stretches of a row may be shorter, or empty.
pub const fn stretch(k: u32, classes: u32) -> u32 {
    (k / 32).div_ceil(STRETCHES * classes) * classes
}

/// The compile-time parameters of a [`rows_tiles`](super::tiles::rows_tiles), and its grid along x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Warps that have the stretches of a tile: one in turn, or four at once.
    pub own: u32,
    /// Blocks that a stage holds for each of them.
    pub step: u32,
    /// Tiles of 16 rows of weights of a block.
    pub groups: u32,
    /// Tiles of activations of a block.
    pub splits: u32,
    /// Panels of eight rows of activations of a warp's tile.
    pub eights: u32,
    /// Warps that do nothing but copy, where there are mbarriers; else 0, and all copy.
    pub copiers: u32,
    pub stages: u32,
    /// The activations stay in shared memory.
    pub resident: bool,
    /// They arrive in panels of eight rows, else row by row.
    pub panels: bool,
    pub blocks: u32,
}

/// Warps that copy: one for each scheduler.
const COPYING_WARPS: u32 = 4;
/// Stages: more bytes on their way than that many have do not help, and with fewer the copies are waited for.
const STAGES: [u32; 6] = [8, 6, 5, 4, 3, 2];
/// Where all warps copy, `cp.async` counts to that many stages.
const MOST_GROUPS_OF_COPIES: u32 = 6;
/// Registers of an SM, and those of a lane beside its sums and what it multiplies.
const REGISTERS: (u32, u32) = (65536, 64);
/// Registers that the bytes of nibbles take.
const NIBBLES: u32 = 24;

/// Cycles of an SM: the constants of the rule.
struct Cycles {
    /// A byte of weights from memory, and any byte from L2.
    memory: f64,
    l2: f64,
    /// What a block of 32 values takes to have ready for a warp, and its product with eight rows.
    block: f64,
    eight: f64,
    /// What else a stage takes, whatever it waits for, and its products.
    stage: f64,
    step: f64,
    /// The end of a tile of one warp, and of four.
    end: [f64; 2],
}

/// Set by hand after some 190 shapes of five products of E4B Q8_0 and 12B Q4_0 on an H200, to rank them as they were measured; they are no fit.
const CYCLES: Cycles =
    Cycles { memory: 0.06, l2: 0.06, block: 5.0, eight: 5.2, stage: 100.0, step: 150.0, end: [1200.0, 700.0] };

impl Tiles {
    /// Warps that multiply.
    pub const fn warps(&self) -> u32 {
        self.own * self.groups * self.splits
    }

    /// Rows of activations of a block.
    pub const fn tile(&self) -> u32 {
        self.splits * self.eights * 8
    }

    /// Outputs of a block's tile.
    const fn outputs(&self, paired: bool) -> u32 {
        self.groups * if paired { WARP_ROWS / 2 } else { WARP_ROWS }
    }

    /// The fastest by the rule of [`CYCLES`]; `None` where tensor cores cannot do it, or no shape fits the GPU.
    pub fn choose(product: &Product, target: &Target) -> Option<Tiles> {
        let weights = TensorFormat::of(product.one.dtype)?;
        if product.is_fine() {
            return None;
        }
        let copiers = if target.arch.has_tma() { COPYING_WARPS } else { 0 };
        let eights_and_splits = match product.rows {
            0..=8 => &[(1, 1)][..],
            9..=16 => &[(2, 1), (1, 2)],
            17..=32 => &[(4, 1), (2, 2)],
            _ => &[(4, 1), (4, 2), (2, 2), (2, 4)],
        };
        let shapes = eights_and_splits.iter().flat_map(|shape| [1, 2, 3, 4, 6, 8].map(|groups| (*shape, groups)));
        let shapes = shapes.flat_map(|(shape, groups)| [1, STRETCHES].map(|own| (shape, groups, own)));
        let all = shapes.flat_map(|(shape, groups, own)| [4, 8, 16].map(|step| (shape, groups, own, step)));
        let timed = all.filter_map(|((eights, splits), groups, own, step)| {
            // Where four warps have a stretch each, a stage has the steps of all four.
            if own > 1 && step > 8 {
                return None;
            }
            // Four tiles have whole groups of joined outputs.
            if product.leaves_panels && groups % 4 != 0 {
                return None;
            }
            let shape = Tiles {
                own,
                step,
                groups,
                splits,
                eights,
                copiers,
                stages: 0,
                resident: false,
                panels: product.takes_panels(),
                blocks: 0,
            };
            let shape = shape.fitted(product, &weights, target)?;
            Some((shape.cycles(product, target), shape))
        });
        timed.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, shape)| shape)
    }

    /// With as many stages and blocks as the GPU has room for; `None` if it has none.
    fn fitted(self, product: &Product, weights: &TensorFormat, target: &Target) -> Option<Tiles> {
        // A lane's sums of the classes, and of stretches that have ended.
        let of_result = weights.classes + if self.own == 1 { 1 } else { 0 };
        let (sums, lanes) = (of_result * self.eights * 4, (self.warps() + self.copiers) * 32);
        // A scheduler has a quarter of the registers for its warps.
        let registers = (REGISTERS.0 / (lanes.div_ceil(128) * 128)).min(255);
        let needed = REGISTERS.1 + sums + self.eights * 6 + if weights.parts == 1 { NIBBLES } else { 0 };
        let copying = if self.copiers > 0 { self.copiers } else { self.warps() } * 32;
        let pieces = self.own * self.step * weights.parts;
        let shares_out = copying.is_multiple_of(pieces) && (self.groups * WARP_ROWS * pieces).is_multiple_of(copying);
        if !self.step.is_multiple_of(weights.classes)
            || lanes > 1024
            || self.warps() < 4
            || registers < needed
            || !shares_out
        {
            return None;
        }
        let all = product.one.outputs.div_ceil(self.outputs(product.one.geglu));
        let row_tiles = product.rows.div_ceil(self.tile());
        let blocks = all.min((target.multiprocessors / row_tiles).max(1));
        let fits = |shape: &Tiles| {
            (shape.copiers > 0 || shape.stages <= MOST_GROUPS_OF_COPIES)
                && shape.shared_bytes(product, weights) <= target.shared_bytes_per_block
        };
        let mut shapes = [true, false]
            .into_iter()
            .flat_map(|resident| STAGES.map(|stages| Tiles { stages, resident, blocks, ..self }));
        shapes.find(|shape| fits(shape) && (shape.stages > 2 || !shape.resident))
    }

    /// By the rule of [`CYCLES`]; without an end where tensor cores cannot do it.
    pub fn cycles(&self, product: &Product, target: &Target) -> f64 {
        let Some(weights) = TensorFormat::of(product.one.dtype) else { return f64::INFINITY };
        let steps = f64::from(stretch(product.one.k, weights.classes).div_ceil(self.step) * (STRETCHES / self.own));
        let row_tiles = product.rows.div_ceil(self.tile());
        let all = product.one.outputs.div_ceil(self.outputs(product.one.geglu));
        let rounds = f64::from(all.div_ceil(self.blocks));
        // Fewer SMs have more of the memory's rate each, up to twice as much.
        let busy = f64::from(self.blocks * row_tiles) / f64::from(target.multiprocessors.max(1));
        let share = busy.clamp(0.5, 1.0);
        let blocks = f64::from(self.own * self.step);
        let of_piece = f64::from(if weights.bytes.thin { 8 } else { 16 } + 4 * weights.side_words());
        let bytes = blocks * f64::from(weights.parts * self.groups * WARP_ROWS) * of_piece;
        let moved = if self.resident { 0.0 } else { blocks * f64::from(self.tile() * 36) };
        // Blocks of other rows find the weights in L2.
        let moving = (bytes * CYCLES.memory / f64::from(row_tiles)).max((bytes + moved) * CYCLES.l2) * share;
        let of_block = CYCLES.block * f64::from(3 - weights.parts) + f64::from(self.eights) * CYCLES.eight;
        let computing = blocks * f64::from(self.groups * self.splits) * of_block + CYCLES.step;
        let end = CYCLES.end[usize::from(self.own > 1)];
        // With two stages, copies are waited for.
        let waiting = if self.stages < 3 { 1.3 } else { 1.0 };
        rounds * (steps * (moving.max(computing) * waiting + CYCLES.stage) + end) * busy.max(1.0)
    }

    /// Bytes of shared memory, as the kernel declares it.
    fn shared_bytes(&self, product: &Product, weights: &TensorFormat) -> u32 {
        let k = product.one.k;
        let pieces = self.own * self.step * weights.parts;
        let slots = pieces / weights.sharing(k / 32 * weights.parts);
        let rows = self.groups * WARP_ROWS;
        let ring = self.stages * (rows * (pieces + 1) * 16 + slots * (rows + 2) * weights.side_words() * 4);
        let places =
            if self.resident { STRETCHES * stretch(k, weights.classes) } else { self.stages * self.own * self.step };
        let activations = places * self.tile() * (32 + if weights.sums() { 8 } else { 4 });
        let sums = if self.own == 1 { 16 } else { self.warps() * self.eights * 32 * 16 };
        let held = if product.leaves_panels {
            self.groups / 4 * self.splits * (self.eights * HELD_PANEL_BYTES + 16)
        } else {
            0
        };
        // Each of the arrays is aligned; barriers of the stages and tiles.
        let beside = self.warps() * 256 + self.stages * 16 + self.groups * self.splits * 16 + 1024;
        held + ring + activations + sums + beside + weights.bytes.table_bytes()
    }

    /// `tiles of 32 rows by 32 of weights …`.
    pub fn describe(&self) -> String {
        format!(
            "tensor cores, tiles of {} rows by {} of weights, {} a tile, {} blocks for each a stage, {} stages, activations {}, \
             {} blocks of {} warps{}",
            self.tile(),
            self.groups * WARP_ROWS,
            if self.own == 1 { "a warp" } else { "four warps" },
            self.step,
            self.stages,
            if self.resident { "resident" } else { "streamed" },
            self.blocks,
            self.warps(),
            if self.copiers > 0 { format!(" and {} that copy", self.copiers) } else { String::new() }
        )
    }
}
