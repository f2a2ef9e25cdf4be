//! The products of a run as the kernel is told of them: their list, which block has which outputs, and the instance that they take.

use gemma4c_blocks::DType;
use gemma4c_dsl::{Instance, InstanceError};

use super::exchange::COPIES;
use super::product_run;
use crate::kernels::matvec::formats::format;

/// Words of a product in the list.
pub const OP_WORDS: u32 = 16;
/// Most products of a run.
pub const MOST_OPS: u32 = 8;
/// Words of a run's counters.
pub const COUNTER_WORDS: u32 = MOST_OPS * COPIES;
/// Warps that multiply, and those that share a stage.
const WARPS: u32 = 16;
const TEAM: u32 = 4;
/// Bytes of a stage, unless a row takes more, and bytes that are under way to an SM: measured (BENCHMARKS.md).
const STAGE_BYTES: u32 = 22 << 10;
const UNDER_WAY: u32 = 40 << 10;
/// Bytes of weights that a block should have at least: small models do not fill a GPU.
const LEAST_BYTES: u64 = 64 << 10;

/// How the activations of a product arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrives {
    /// As int8 in memory: those of the first product.
    Int8,
    /// As int8 from the product before.
    Codes,
    /// The norm of the residual, which takes the product before. Offsets of the norms' weights, in bytes.
    Norm { post: u64, next: u64, scale: Option<u64> },
    /// The residual itself, with fine codes.
    Residual { post: u64, scale: Option<u64> },
    /// As floats from the product before.
    Floats,
}

/// What becomes of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// Floats in memory: those of the last product.
    Memory,
    /// Floats for the next product.
    Floats,
    /// `gelu(gate) * up` as int8 for the next product. Rows of gates come first.
    Codes,
    /// `gelu(value)` times the layer's input.
    Gated,
}

/// A product of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    pub arrives: Arrives,
    pub leaves: Leaves,
    pub k: u32,
    pub outputs: u32,
    /// Offsets of the planes, in bytes.
    pub codes: u64,
    pub scales: u64,
    /// The residual is left in memory.
    pub leaves_residual: bool,
}

impl Op {
    fn halves(&self) -> u32 {
        if self.leaves == Leaves::Codes { 2 } else { 1 }
    }

    /// Words of the exchange that its results take.
    fn exchanged(&self) -> u32 {
        match self.leaves {
            Leaves::Memory => 0,
            Leaves::Floats | Leaves::Gated => self.outputs * 2,
            Leaves::Codes => self.outputs / 32 * 16,
        }
    }
}

/// Products behind each other, of one type.
#[derive(Clone, Debug)]
pub struct Run {
    pub dtype: DType,
    /// Values of the residual.
    pub width: u32,
    pub epsilon: f32,
    pub ops: Vec<Op>,
    pub multiprocessors: u32,
    pub shared_bytes: u32,
}

/// How a run is spread over a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    pub blocks: u32,
    pub stages: u32,
    pub stage_words: u32,
    pub ahead: u32,
}

/// Units of a type to a word beside its codes; `None` where the kernel does not read the type.
pub fn per_word(dtype: DType) -> Option<u32> {
    match dtype {
        DType::Q8_0 => Some(4),
        DType::Q4_0 | DType::IQ4NL => Some(2),
        DType::Q4_1 => Some(1),
        _ => None,
    }
}

impl Run {
    fn unit(&self) -> u32 {
        format(self.dtype).unit
    }

    fn per_word(&self) -> u32 {
        per_word(self.dtype).unwrap_or(1)
    }

    /// Words of the ring that so many outputs of a product take.
    fn stage_words(&self, op: &Op, outputs: u32) -> u32 {
        let units = op.k / self.unit() * outputs;
        let sides = (units + 8 * self.per_word()).div_ceil(4 * self.per_word()) * 4;
        op.halves() * (units * 4 + sides)
    }

    fn bytes(&self) -> u64 {
        let of_op = |op: &Op| u64::from(op.outputs) * u64::from(self.stage_words(op, 1)) * 4;
        self.ops.iter().map(of_op).sum()
    }

    fn has_fine(&self) -> bool {
        self.ops.iter().any(|op| matches!(op.arrives, Arrives::Residual { .. }))
    }

    fn most_k(&self) -> u32 {
        self.ops.iter().map(|op| op.k).max().unwrap_or(0).max(self.width)
    }

    /// Most outputs of a block that are joined.
    fn share(&self, blocks: u32) -> u32 {
        let joined = self.ops.iter().filter(|op| op.leaves == Leaves::Codes);
        joined.map(|op| (op.outputs / 32).div_ceil(blocks) * 32).max().unwrap_or(0).max(32)
    }

    /// Bytes of shared memory beside the ring and its barriers.
    fn other_bytes(&self, blocks: u32) -> u32 {
        let (k, most_k) = (self.width, self.most_k());
        let words = if self.has_fine() { most_k.max(3 * k) } else { most_k };
        let sums = if self.has_fine() { k / 8 } else { 4 };
        words + most_k / 4 + sums + 8 * k + 2 * k.div_ceil(512) * 16 + self.share(blocks) * 4 + MOST_OPS * 72
    }

    /// The shape for its GPU, or `None` where a stage of its widest product leaves room for none to a team.
    pub fn shape(&self) -> Option<RunShape> {
        let blocks = (self.bytes() / LEAST_BYTES).clamp(1, u64::from(self.multiprocessors)) as u32;
        let widest = self.ops.iter().map(|op| self.stage_words(op, 1)).max()?;
        let stage_words = widest.max(STAGE_BYTES / 4).next_multiple_of(32);
        // Barriers, and what lies between the arrays.
        let left = self.shared_bytes.checked_sub(self.other_bytes(blocks) + 1024)?;
        let stages = (left / (stage_words * 4 + 16)).min(32) / (WARPS / TEAM) * (WARPS / TEAM);
        let ahead = UNDER_WAY.div_ceil(stage_words * 4).max(1).min(stages);
        (stages > 0).then_some(RunShape { blocks, stages, stage_words, ahead })
    }

    pub fn instance(&self, shape: RunShape) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        product_run::Chosen {
            K: self.width,
            MOST_K: self.most_k(),
            UNIT: format.unit,
            INTEGER: true,
            PER_WORD: self.per_word(),
            JOINED: format.joined,
            FINE: self.has_fine(),
            WARPS,
            TEAM,
            PIECES: (self.width / 4).div_ceil(WARPS * 32),
            STAGES: shape.stages,
            STAGE_WORDS: shape.stage_words,
            AHEAD: shape.ahead,
            SHARE: self.share(shape.blocks),
            EPSILON: self.epsilon,
            dot: format.lane_dot,
            lone_dot: format.dot,
        }
        .build()
    }

    /// Words of the exchange that all its products take.
    pub fn exchange_words(&self) -> u32 {
        self.ops.iter().map(|op| op.exchanged().next_multiple_of(4)).sum()
    }

    /// The list: the products, then the first output of each block, and the end, for each of them.
    pub fn list(&self, shape: RunShape) -> Vec<u32> {
        let pieces = |offset: u64| (offset / 16) as u32;
        let (mut words, mut at, mut before) = (Vec::new(), 0, 0);
        for op in &self.ops {
            let (arrives, post, next, scale) = match op.arrives {
                Arrives::Int8 => (0, 0, 0, None),
                Arrives::Codes => (1, 0, 0, None),
                Arrives::Norm { post, next, scale } => (2, post, next, scale),
                Arrives::Residual { post, scale } => (3, post, 0, scale),
                Arrives::Floats => (4, 0, 0, None),
            };
            let leaves = match op.leaves {
                Leaves::Memory => 0,
                Leaves::Floats => 1,
                Leaves::Codes => 2,
                Leaves::Gated => 3,
            };
            let each = (1..=op.outputs).rev().find(|each| self.stage_words(op, *each) <= shape.stage_words);
            // All teams have some of a small product.
            let share = op.outputs.div_ceil(shape.blocks).div_ceil(WARPS / TEAM);
            let each = each.unwrap_or(1).min(share);
            let each = if each > TEAM { each / TEAM * TEAM } else { each };
            words.extend([arrives, leaves, op.k, op.outputs]);
            words.extend([pieces(op.codes), pieces(op.scales), pieces(post), pieces(next)]);
            words.extend([scale.map_or(u32::MAX, pieces), each, before, at]);
            words.extend([0, 0, op.leaves_residual.into(), 0]);
            before = at;
            at += op.exchanged().next_multiple_of(4);
        }
        for op in &self.ops {
            let whole = if op.leaves == Leaves::Codes { 32 } else { 1 };
            let parts = u64::from(op.outputs / whole);
            let first = |block: u32| (u64::from(block) * parts / u64::from(shape.blocks)) as u32 * whole;
            words.extend((0..=shape.blocks).map(first));
        }
        words
    }
}
