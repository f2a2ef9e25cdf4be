//! The closed set of operations. Each has exactly one output and a meaning a CPU can run on its own.

use crate::ids::{CacheId, WeightId};

/// A range of every expert's output rows, for tensors that hold two matrices stacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    pub first: u32,
    pub len: u32,
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    // -- Sources -------------------------------------------------------------------------------------------------------
    /// The chunk's token ids.
    Tokens,

    // -- Choosing rows -------------------------------------------------------------------------------------------------
    /// Row `token` of a table, decoded. Inputs: tokens.
    Gather { table: WeightId },
    /// Only the rows whose logits are asked for. Inputs: x.
    TakeAsked,
    /// Columns `first .. first + len` of every row. Inputs: x.
    Columns { first: u32, len: u32 },

    // -- Products ------------------------------------------------------------------------------------------------------
    /// `W x` for every row. Inputs: x.
    MatMul { weight: WeightId },
    /// `W_e x` for every row and each of its experts `e`. `x` is one row for all experts, or one a slot. Inputs: x, routing.
    ExpertMatMul { weight: WeightId, part: Part },

    // -- Reductions ----------------------------------------------------------------------------------------------------
    /// `x * (mean(x²) + eps)^-½ [* w]` over each `group` consecutive values (a whole row, or an attention head). Inputs: x.
    RmsNorm { weight: Option<WeightId>, group: u32, eps: f32 },
    /// The `top_k` largest logits with the softmax over just these. Inputs: logits.
    Route { top_k: u32 },
    /// `Σ_j w_j * scale[e_j] * x_j` over the row's experts. Inputs: x (one row a slot), routing.
    ExpertSum { scale: Option<WeightId> },

    // -- Element-wise --------------------------------------------------------------------------------------------------
    /// Inputs: a, b.
    Add,
    /// Inputs: a, b.
    Mul,
    /// By a constant. Inputs: x.
    Scale { factor: f32 },
    /// By a weight vector as wide as the row, or of one element. Inputs: x.
    MulWeight { weight: WeightId },
    /// The tanh form of GELU. Inputs: x.
    Gelu,
    /// `cap * tanh(x / cap)`. Inputs: x.
    Softcap { cap: f32 },

    // -- Attention -----------------------------------------------------------------------------------------------------
    /// Rotates the pairs (i, i + head_dim/2) of each head by `position * base^(-2i/head_dim) / factors[i]`. Inputs: x.
    Rope { head_dim: u32, base: f32, factors: Option<WeightId> },
    /// Appends the chunk's keys and values. Inputs: k, v.
    KvAppend { cache: CacheId },
    /// `softmax(q kᵀ) v`, causal, unscaled, within the cache's window. Inputs: q, kv.
    Attention { heads: u32 },
}

impl Op {
    /// The operation's name in texts, plans and errors.
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
        }
    }

    /// How many values it reads.
    pub const fn arity(&self) -> usize {
        match self {
            Op::Tokens => 0,
            Op::Add
            | Op::Mul
            | Op::KvAppend { .. }
            | Op::Attention { .. }
            | Op::ExpertMatMul { .. }
            | Op::ExpertSum { .. } => 2,
            _ => 1,
        }
    }

    /// The weight it reads, if any.
    pub const fn weight(&self) -> Option<WeightId> {
        match *self {
            Op::Gather { table: w } | Op::MatMul { weight: w } | Op::ExpertMatMul { weight: w, .. } => Some(w),
            Op::MulWeight { weight: w } => Some(w),
            Op::RmsNorm { weight, .. } => weight,
            Op::ExpertSum { scale } => scale,
            Op::Rope { factors, .. } => factors,
            _ => None,
        }
    }

    /// Whether each output element depends on the same element of each input alone.
    pub const fn is_elementwise(&self) -> bool {
        matches!(self, Op::Add | Op::Mul | Op::Scale { .. } | Op::MulWeight { .. } | Op::Gelu | Op::Softcap { .. })
    }
}
