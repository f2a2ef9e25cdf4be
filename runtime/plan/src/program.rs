//! The CPU program of a plan: values with their offsets in the arena, and steps in order.
//!
//! The plain twin of the compiler's graph: indices instead of references, and nothing a reader of an old plan would have to
//! guess. One step is one node of the unfused graph.

use serde::{Deserialize, Serialize};

use crate::kv::KvType;
use crate::list::at_most;

/// Index into [`Program::values`].
pub type ValueIndex = u32;
/// Index into [`crate::Plan::weights`].
pub type WeightIndex = u32;
/// Index into [`Program::caches`].
pub type CacheIndex = u32;

/// How many rows a value has when the plan runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowCount {
    /// One row for every token of the chunk.
    Chunk,
    /// One row for every token whose logits are asked for.
    Asked,
    /// Of a tower: one row for every patch of the picture, or for every frame of the sound.
    Patches,
    /// Of a tower: one row for every soft token that it makes.
    Soft,
    /// Of a tower: one row for every two frames of the sound.
    Halves,
}

/// What a value's rows hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Tokens,
    /// f32 rows in the arena, from byte `offset`, rows back to back.
    Floats {
        offset: u64,
    },
    /// Which of `experts` a row goes to, and their weights; kept beside the arena.
    Routing {
        experts: u32,
    },
    /// A cache after its append.
    Kv {
        cache: CacheIndex,
    },
}

/// One value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    pub name: String,
    pub kind: Kind,
    pub rows: RowCount,
    pub width: u32,
}

/// Keys and values of one layer: `capacity` rows of `kv_heads * head_dim` f32 each. With a window it is a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    pub layer: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub window: Option<u32>,
    pub capacity: u32,
}

impl Cache {
    /// Bytes of its keys and values; `None` on overflow.
    pub fn bytes(&self) -> Option<u64> {
        let row = (self.kv_heads as u64).checked_mul(self.head_dim as u64)?.checked_mul(2 * 4)?;
        row.checked_mul(self.capacity as u64)
    }
}

/// One operation; the meanings are those of the compiler's graph.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    Tokens,
    Gather { table: WeightIndex },
    TakeAsked,
    Columns { first: u32, len: u32 },
    MatMul { weight: WeightIndex },
    ExpertMatMul { weight: WeightIndex, first: u32, len: u32 },
    RmsNorm { weight: Option<WeightIndex>, group: u32, eps: f32 },
    Route { top_k: u32 },
    ExpertSum { scale: Option<WeightIndex> },
    Add,
    Mul,
    Scale { factor: f32 },
    MulWeight { weight: WeightIndex },
    Gelu,
    Softcap { cap: f32 },
    Rope { head_dim: u32, base: f32, factors: Option<WeightIndex> },
    KvAppend { cache: CacheIndex },
    Attention { heads: u32 },
    AttentionAhead { heads: u32 },
    Patches { width: u32 },
    GatherText { table: WeightIndex, pad: u32 },
    PlaceSoft,
    AxisRows { table: WeightIndex, axis: u32 },
    SubMean { group: u32 },
    GridMean { side: u32 },
    AddConstant { term: f32 },
    AddWeight { weight: WeightIndex },
    AtLeast { weight: WeightIndex },
    AtMost { weight: WeightIndex },
    GridRope { head_dim: u32, base: f32 },
    FullAttention { heads: u32 },
    Hidden { width: u32 },
    BorrowKv { cache: CacheIndex },
    Concat,
    Candidates { each: u32 },
    SpreadTokens,
    TokenMatMul { weight: WeightIndex },
    AttentionBefore { heads: u32 },
    HalvingConv { weight: WeightIndex, channels: u32 },
    CausalConv { weight: WeightIndex },
    NearAttention { heads: u32, reach: u32, cap: f32, weight: WeightIndex },
    Sigmoid,
    Relu,
}

impl Op {
    /// The name the compiler's graph has for it.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Tokens => "tokens",
            Op::Gather { .. } => "gather",
            Op::TakeAsked => "take_asked",
            Op::Columns { .. } => "columns",
            Op::MatMul { .. } => "matmul",
            Op::ExpertMatMul { .. } => "expert_matmul",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Route { .. } => "route",
            Op::ExpertSum { .. } => "expert_sum",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Scale { .. } => "scale",
            Op::MulWeight { .. } => "mul_weight",
            Op::Gelu => "gelu",
            Op::Softcap { .. } => "softcap",
            Op::Rope { .. } => "rope",
            Op::KvAppend { .. } => "kv_append",
            Op::Attention { .. } => "attention",
            Op::AttentionAhead { .. } => "attention_ahead",
            Op::Patches { .. } => "patches",
            Op::GatherText { .. } => "gather_text",
            Op::PlaceSoft => "place_soft",
            Op::AxisRows { .. } => "axis_rows",
            Op::SubMean { .. } => "sub_mean",
            Op::GridMean { .. } => "grid_mean",
            Op::AddConstant { .. } => "add_constant",
            Op::AddWeight { .. } => "add_weight",
            Op::AtLeast { .. } => "at_least",
            Op::AtMost { .. } => "at_most",
            Op::GridRope { .. } => "grid_rope",
            Op::FullAttention { .. } => "full_attention",
            Op::Hidden { .. } => "hidden",
            Op::BorrowKv { .. } => "borrow_kv",
            Op::Concat => "concat",
            Op::Candidates { .. } => "candidates",
            Op::SpreadTokens => "spread_tokens",
            Op::TokenMatMul { .. } => "token_matmul",
            Op::AttentionBefore { .. } => "attention_before",
            Op::HalvingConv { .. } => "halving_conv",
            Op::CausalConv { .. } => "causal_conv",
            Op::NearAttention { .. } => "near_attention",
            Op::Sigmoid => "sigmoid",
            Op::Relu => "relu",
        }
    }

    /// How many values it reads.
    pub const fn arity(&self) -> usize {
        match self {
            Op::Tokens | Op::Patches { .. } | Op::AxisRows { .. } | Op::Hidden { .. } | Op::BorrowKv { .. } => 0,
            Op::Add
            | Op::Mul
            | Op::Concat
            | Op::SpreadTokens
            | Op::TokenMatMul { .. }
            | Op::AttentionBefore { .. }
            | Op::KvAppend { .. }
            | Op::Attention { .. }
            | Op::AttentionAhead { .. }
            | Op::ExpertMatMul { .. }
            | Op::ExpertSum { .. } => 2,
            Op::FullAttention { .. } | Op::NearAttention { .. } => 3,
            _ => 1,
        }
    }
}

/// One step: `values[output] = op(values[inputs])`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    pub op: Op,
    #[serde(deserialize_with = "at_most::<4, _, _>")]
    pub inputs: Vec<ValueIndex>,
    pub output: ValueIndex,
}

/// The steps of a CPU plan, of one of its towers, whose rows are patches and soft tokens in place of tokens, or of its drafter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Positions a sequence may have.
    pub context: u32,
    /// Rows of one pass, at most.
    pub chunk: u32,
    /// Rows of one pass with logits, at most.
    pub asked: u32,
    pub arena_bytes: u64,
    /// What keys and values are rounded to when they are appended: an 8-bit type, or F32 for not at all. Caches are f32 either way.
    pub kv: KvType,
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub caches: Vec<Cache>,
    #[serde(deserialize_with = "at_most::<65536, _, _>")]
    pub values: Vec<Value>,
    #[serde(deserialize_with = "at_most::<65536, _, _>")]
    pub steps: Vec<Step>,
    /// The logits.
    pub output: ValueIndex,
}

impl Program {
    /// Most rows a value can have.
    pub const fn max_rows(&self, rows: RowCount) -> u32 {
        match rows {
            RowCount::Chunk | RowCount::Patches => self.chunk,
            RowCount::Halves => self.chunk.div_ceil(2),
            RowCount::Asked | RowCount::Soft => self.asked,
        }
    }

    /// Whether soft tokens of a picture see each other, so that one pass must have all of them.
    pub fn sees_ahead(&self) -> bool {
        self.steps.iter().any(|step| matches!(step.op, Op::AttentionAhead { .. }))
    }

    /// Bytes of all keys and values at full context; `None` on overflow.
    pub fn cache_bytes(&self) -> Option<u64> {
        self.caches.iter().try_fold(0u64, |sum, cache| sum.checked_add(cache.bytes()?))
    }
}
