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
    /// A picture's patches, as their pixels, or a sound's frames.
    Patches { width: u32 },
    /// Of a drafter: for each row what the LM head read when the row's token was chosen, or what the drafter made for its next step.
    Hidden { width: u32 },
    /// Of a drafter: the keys and values that the model's own graph has appended, up to a row's position and without it.
    BorrowKv { cache: CacheId },

    // -- Choosing rows -------------------------------------------------------------------------------------------------
    /// Row `token` of a table, decoded. Inputs: tokens.
    Gather { table: WeightId },
    /// The same, but row `pad` where a soft token stands in the token's place. Inputs: tokens.
    GatherText { table: WeightId, pad: u32 },
    /// The soft tokens that towers made, in place of the rows of their placeholders. Inputs: x.
    PlaceSoft,
    /// Row `coordinate` of slice `axis` of a table: where each patch lies along one axis of the grid (0: its column, 1: its row).
    AxisRows { table: WeightId, axis: u32 },
    /// Only the rows whose logits are asked for. Inputs: x.
    TakeAsked,
    /// Columns `first .. first + len` of every row. Inputs: x.
    Columns { first: u32, len: u32 },
    /// A row of a, then the same row of b. Inputs: a, b.
    Concat,
    /// The tokens of the groups that a row was routed to, group after group. Tokens are in groups of `each`, by an order that comes with the
    /// graph. Inputs: routing.
    Candidates { each: u32 },
    /// A row as wide as the vocabulary: each token's value, and for tokens that have none the least of these less 1. Inputs: x, tokens.
    SpreadTokens { width: u32 },

    // -- Products ------------------------------------------------------------------------------------------------------
    /// `W x` for every row. Inputs: x.
    MatMul { weight: WeightId },
    /// `W_e x` for every row and each of its experts `e`. `x` is one row for all experts, or one a slot. Inputs: x, routing.
    ExpertMatMul { weight: WeightId, part: Part },
    /// The rows of W that the row's tokens name, times x. Inputs: x, tokens.
    TokenMatMul { weight: WeightId },

    /// A convolution of 3 by 3 over rows and columns, with stride 2 along both and zeros around. A row is its columns, each of `channels` values;
    /// half as many rows and columns come out, rounded up. A row of the weight has the taps of one output: input channel, row, column. Inputs: x.
    HalvingConv { weight: WeightId, channels: u32 },
    /// `Σ_j w[j] x[t - taps + 1 + j]` for every value of a row by itself, with zeros before the first row. Inputs: x.
    CausalConv { weight: WeightId },

    // -- Reductions ----------------------------------------------------------------------------------------------------
    /// `x * (mean(x²) + eps)^-½ [* w]` over each `group` consecutive values (a whole row, or an attention head). Inputs: x.
    RmsNorm { weight: Option<WeightId>, group: u32, eps: f32 },
    /// `x - mean(x)` over each `group` consecutive values. Inputs: x.
    SubMean { group: u32 },
    /// The `top_k` largest logits with the softmax over just these. Inputs: logits.
    Route { top_k: u32 },
    /// `Σ_j w_j * scale[e_j] * x_j` over the row's experts. Inputs: x (one row a slot), routing.
    ExpertSum { scale: Option<WeightId> },
    /// The mean of each square of `side` by `side` patches, as a soft token. Inputs: x.
    GridMean { side: u32 },

    // -- Element-wise --------------------------------------------------------------------------------------------------
    /// Inputs: a, b.
    Add,
    /// Inputs: a, b.
    Mul,
    /// By a constant. Inputs: x.
    Scale { factor: f32 },
    /// By a weight vector whose length divides the row's; it is repeated (once, for every head, or one element for all). Inputs: x.
    MulWeight { weight: WeightId },
    /// Inputs: x.
    AddConstant { term: f32 },
    /// A weight vector as wide as the row, or of one element. Inputs: x.
    AddWeight { weight: WeightId },
    /// The larger of `x` and a weight, which is a vector as wide as the row, or one element. Inputs: x.
    AtLeast { weight: WeightId },
    /// The smaller of the two. Inputs: x.
    AtMost { weight: WeightId },
    /// The tanh form of GELU. Inputs: x.
    Gelu,
    /// `1 / (1 + e^-x)`. Inputs: x.
    Sigmoid,
    /// The larger of `x` and 0. Inputs: x.
    Relu,
    /// `cap * tanh(x / cap)`. Inputs: x.
    Softcap { cap: f32 },

    // -- Attention -----------------------------------------------------------------------------------------------------
    /// Rotates the pairs (i, i + head_dim/2) of each head by `position * base^(-2i/head_dim) / factors[i]`. Inputs: x.
    Rope { head_dim: u32, base: f32, factors: Option<WeightId> },
    /// Appends the chunk's keys and values. Inputs: k, v.
    KvAppend { cache: CacheId },
    /// `softmax(q kᵀ) v`, causal, unscaled, within the cache's window. Inputs: q, kv.
    Attention { heads: u32 },
    /// The same, but soft tokens of one picture also see those of it that come after them. Inputs: q, kv.
    AttentionAhead { heads: u32 },
    /// The same without the row's own position: only what was appended before it. Inputs: q, kv.
    AttentionBefore { heads: u32 },
    /// Rotates the first half of each head by the patch's column, the second by its row: the pairs (i, i + head_dim/4) of a half by
    /// `coordinate * base^(-4i/head_dim)`. Inputs: x.
    GridRope { head_dim: u32, base: f32 },
    /// `softmax(q kᵀ) v` over all rows of the pass, unscaled, without a cache. Inputs: q, k, v.
    FullAttention { heads: u32 },
    /// `softmax(cap * tanh(s / cap)) v` over a row and the `reach - 1` rows before it. The score of a row `d` rows back is `s = q·k + q·(W t_d)`, where `t_d` is
    /// the sines, then the cosines, of `d * 10000^(-i / (n - 1))`, i < n, n half the row's width. Inputs: q, k, v.
    NearAttention { heads: u32, reach: u32, cap: f32, weight: WeightId },
}

impl Op {
    /// The operation's name in texts, plans and errors.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Tokens => "tokens",
            Op::Patches { .. } => "patches",
            Op::Hidden { .. } => "hidden",
            Op::BorrowKv { .. } => "borrow_kv",
            Op::Gather { .. } => "gather",
            Op::GatherText { .. } => "gather_text",
            Op::PlaceSoft => "place_soft",
            Op::AxisRows { .. } => "axis_rows",
            Op::TakeAsked => "take_asked",
            Op::Columns { .. } => "columns",
            Op::Concat => "concat",
            Op::Candidates { .. } => "candidates",
            Op::SpreadTokens { .. } => "spread_tokens",
            Op::MatMul { .. } => "matmul",
            Op::ExpertMatMul { .. } => "expert_matmul",
            Op::TokenMatMul { .. } => "token_matmul",
            Op::RmsNorm { .. } => "rms_norm",
            Op::SubMean { .. } => "sub_mean",
            Op::Route { .. } => "route",
            Op::ExpertSum { .. } => "expert_sum",
            Op::GridMean { .. } => "grid_mean",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Scale { .. } => "scale",
            Op::MulWeight { .. } => "mul_weight",
            Op::AddConstant { .. } => "add_constant",
            Op::AddWeight { .. } => "add_weight",
            Op::AtLeast { .. } => "at_least",
            Op::AtMost { .. } => "at_most",
            Op::Gelu => "gelu",
            Op::Softcap { .. } => "softcap",
            Op::Rope { .. } => "rope",
            Op::KvAppend { .. } => "kv_append",
            Op::Attention { .. } => "attention",
            Op::AttentionAhead { .. } => "attention_ahead",
            Op::AttentionBefore { .. } => "attention_before",
            Op::GridRope { .. } => "grid_rope",
            Op::FullAttention { .. } => "full_attention",
            Op::NearAttention { .. } => "near_attention",
            Op::HalvingConv { .. } => "halving_conv",
            Op::CausalConv { .. } => "causal_conv",
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
            | Op::SpreadTokens { .. }
            | Op::TokenMatMul { .. }
            | Op::KvAppend { .. }
            | Op::Attention { .. }
            | Op::AttentionAhead { .. }
            | Op::AttentionBefore { .. }
            | Op::ExpertMatMul { .. }
            | Op::ExpertSum { .. } => 2,
            Op::FullAttention { .. } | Op::NearAttention { .. } => 3,
            _ => 1,
        }
    }

    /// The weight it reads, if any.
    pub const fn weight(&self) -> Option<WeightId> {
        match *self {
            Op::Gather { table: w } | Op::MatMul { weight: w } | Op::ExpertMatMul { weight: w, .. } => Some(w),
            Op::GatherText { table: w, .. } | Op::AxisRows { table: w, .. } => Some(w),
            Op::MulWeight { weight: w } | Op::AddWeight { weight: w } | Op::TokenMatMul { weight: w } => Some(w),
            Op::AtLeast { weight: w } | Op::AtMost { weight: w } => Some(w),
            Op::HalvingConv { weight: w, .. } | Op::CausalConv { weight: w } => Some(w),
            Op::NearAttention { weight: w, .. } => Some(w),
            Op::RmsNorm { weight, .. } => weight,
            Op::ExpertSum { scale } => scale,
            Op::Rope { factors, .. } => factors,
            _ => None,
        }
    }

    /// Changes the weight it reads, if any.
    pub(crate) fn change_weight(&mut self, change: impl FnOnce(&mut WeightId)) {
        match self {
            Op::Gather { table: w } | Op::MatMul { weight: w } | Op::ExpertMatMul { weight: w, .. } => change(w),
            Op::GatherText { table: w, .. } | Op::AxisRows { table: w, .. } => change(w),
            Op::MulWeight { weight: w } | Op::AddWeight { weight: w } | Op::TokenMatMul { weight: w } => change(w),
            Op::AtLeast { weight: w } | Op::AtMost { weight: w } => change(w),
            Op::HalvingConv { weight: w, .. } | Op::CausalConv { weight: w } => change(w),
            Op::NearAttention { weight: w, .. } => change(w),
            Op::RmsNorm { weight: Some(w), .. } | Op::ExpertSum { scale: Some(w) } => change(w),
            Op::Rope { factors: Some(w), .. } => change(w),
            _ => {}
        }
    }

    /// Whether each output element depends on the same element of each input alone.
    pub const fn is_elementwise(&self) -> bool {
        matches!(
            self,
            Op::Add
                | Op::Mul
                | Op::Scale { .. }
                | Op::MulWeight { .. }
                | Op::AddConstant { .. }
                | Op::AddWeight { .. }
                | Op::AtLeast { .. }
                | Op::AtMost { .. }
                | Op::Gelu
                | Op::Sigmoid
                | Op::Relu
                | Op::Softcap { .. }
        )
    }
}
