//! The closed set of operations, one row of a table for each. Each has exactly one output and a meaning a CPU can run
//! on its own.
//!
//! A row is what texts, plans and errors call the operation, the values it reads, and its variant with its attributes.
//! Their order is that of the numbers in a plan: a change of a row is a change of the plan's format.

use serde::{Deserialize, Serialize};

use crate::ids::{CacheId, WeightId};

/// Makes [`Op`] of the table: the enum, and what is the same code for every operation.
macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident($($input:ident),*) => $variant:ident $({ $($attribute:ident: $kind:ty),* })?;)*) => {
        /// One operation.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        pub enum Op {
            $(
                $(#[$doc])*
                #[doc = concat!("Written `", stringify!($name($($input),*)), "`.")]
                $variant $({ $($attribute: $kind),* })?,
            )*
        }

        impl Op {
            /// The operation's name in texts, plans and errors.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Op::$variant { .. } => stringify!($name),)*
                }
            }

            /// How many values it reads.
            pub const fn arity(&self) -> usize {
                let inputs: &[&str] = match self {
                    $(Op::$variant { .. } => &[$(stringify!($input)),*],)*
                };
                inputs.len()
            }

            /// Its attributes by name, in order.
            pub fn each_attribute(&mut self, mut see: impl FnMut(&'static str, Attribute<'_>)) {
                match self {
                    $(Op::$variant $({ $($attribute),* })? => { $($(see(stringify!($attribute), $attribute.into());)*)? })*
                }
            }
        }
    };
}

operations! {
    // -- Sources
    // -------------------------------------------------------------------------------------------------------
    /// The chunk's token ids.
    tokens() => Tokens;
    /// A picture's patches, as their pixels, or a sound's frames.
    patches() => Patches { width: u32 };
    /// Of a drafter: for each row what the LM head read when the row's token was chosen, or what the drafter made for
    /// its next step.
    hidden() => Hidden { width: u32 };
    /// Of a drafter: the keys and values that the model's own graph has appended, up to a row's position and without
    /// it.
    borrow_kv() => BorrowKv { cache: CacheId };

    // -- Choosing rows
    // -------------------------------------------------------------------------------------------------
    /// Row `token` of a table, decoded.
    gather(tokens) => Gather { table: WeightId };
    /// The same, but row `pad` where a soft token stands in the token's place.
    gather_text(tokens) => GatherText { table: WeightId, pad: u32 };
    /// The soft tokens that towers made, in place of the rows of their placeholders.
    place_soft(x) => PlaceSoft;
    /// Row `coordinate` of slice `axis` of a table: where each patch lies along one axis of the grid (0: its column, 1:
    /// its row).
    axis_rows() => AxisRows { table: WeightId, axis: u32 };
    /// Only the rows whose logits are asked for.
    take_asked(x) => TakeAsked;
    /// Columns `first .. first + len` of every row.
    columns(x) => Columns { first: u32, len: u32 };
    /// A row of a, then the same row of b.
    concat(a, b) => Concat;
    /// The tokens of the groups that a row was routed to, group after group. Tokens are in groups of `each`, by an
    /// order that comes with the graph.
    candidates(routing) => Candidates { each: u32 };
    /// A row as wide as the vocabulary: each token's value, and for tokens that have none the least of these less 1.
    spread_tokens(x, tokens) => SpreadTokens { width: u32 };

    // -- Products
    // ------------------------------------------------------------------------------------------------------
    /// `W x` for every row.
    matmul(x) => MatMul { weight: WeightId };
    /// `W_e x` for every row and each of its experts `e`, where `W_e` is output rows `first .. first + len` of the
    /// expert: tensors may hold two matrices stacked. `x` is one row for all experts, or one a slot.
    expert_matmul(x, routing) => ExpertMatMul { weight: WeightId, first: u32, len: u32 };
    /// `factor * A x` for every row: the narrow half of an adapter's pair. Where A is `[inputs, rank, seats]`, a row takes
    /// the matrix of its sequence's seat, and the factor its sequence says; zeros where it has no seat.
    narrow(x) => Narrow { weight: WeightId, factor: f32 };
    /// `y + B x` for every row: the wide half, added to the product that the pair changes. Where B is
    /// `[rank, outputs, seats]`, a row takes the matrix of its sequence's seat; `y` where it has none.
    widen(y, x) => Widen { weight: WeightId };
    /// The rows of W that the row's tokens name, times x.
    token_matmul(x, tokens) => TokenMatMul { weight: WeightId };
    /// A convolution of 3 by 3 over rows and columns, with stride 2 along both and zeros around. A row is its columns,
    /// each of `channels` values; half as many rows and columns come out, rounded up. A row of the weight has the taps
    /// of one output: input channel, row, column.
    halving_conv(x) => HalvingConv { weight: WeightId, channels: u32 };
    /// `Σ_j w[j] x[t - taps + 1 + j]` for every value of a row by itself, with zeros before the first row.
    causal_conv(x) => CausalConv { weight: WeightId };

    // -- Reductions
    // ----------------------------------------------------------------------------------------------------
    /// `x * (mean(x²) + eps)^-½ [* w]` over each `group` consecutive values (a whole row, or an attention head).
    rms_norm(x) => RmsNorm { weight: Option<WeightId>, group: u32, eps: f32 };
    /// `x - mean(x)` over each `group` consecutive values.
    sub_mean(x) => SubMean { group: u32 };
    /// The `top_k` largest logits with the softmax over just these.
    route(logits) => Route { top_k: u32 };
    /// `Σ_j w_j * scale[e_j] * x_j` over the row's experts.
    expert_sum(x, routing) => ExpertSum { scale: Option<WeightId> };
    /// The mean of each square of `side` by `side` patches, as a soft token.
    grid_mean(x) => GridMean { side: u32 };

    // -- Element-wise
    // --------------------------------------------------------------------------------------------------
    add(a, b) => Add;
    mul(a, b) => Mul;
    /// By a constant.
    scale(x) => Scale { factor: f32 };
    /// By a weight vector whose length divides the row's; it is repeated (once, for every head, or one element for
    /// all).
    mul_weight(x) => MulWeight { weight: WeightId };
    add_constant(x) => AddConstant { term: f32 };
    /// A weight vector as wide as the row, or of one element.
    add_weight(x) => AddWeight { weight: WeightId };
    /// The larger of `x` and a weight, which is a vector as wide as the row, or one element.
    at_least(x) => AtLeast { weight: WeightId };
    /// The smaller of the two.
    at_most(x) => AtMost { weight: WeightId };
    /// The tanh form of GELU.
    gelu(x) => Gelu;
    /// `1 / (1 + e^-x)`.
    sigmoid(x) => Sigmoid;
    /// The larger of `x` and 0.
    relu(x) => Relu;
    /// `cap * tanh(x / cap)`.
    softcap(x) => Softcap { cap: f32 };

    // -- Attention
    // -----------------------------------------------------------------------------------------------------
    /// Rotates the pairs (i, i + head_dim/2) of each head by `position * base^(-2i/head_dim) / factors[i]`.
    rope(x) => Rope { head_dim: u32, base: f32, factors: Option<WeightId> };
    /// Appends the chunk's keys and values.
    kv_append(k, v) => KvAppend { cache: CacheId };
    /// `softmax(q kᵀ) v`, causal, unscaled, within the cache's window.
    attention(q, kv) => Attention { heads: u32 };
    /// The same, but soft tokens of one picture also see those of it that come after them.
    attention_ahead(q, kv) => AttentionAhead { heads: u32 };
    /// The same without the row's own position: only what was appended before it.
    attention_before(q, kv) => AttentionBefore { heads: u32 };
    /// Rotates the first half of each head by the patch's column, the second by its row: the pairs (i, i + head_dim/4)
    /// of a half by `coordinate * base^(-4i/head_dim)`.
    grid_rope(x) => GridRope { head_dim: u32, base: f32 };
    /// `softmax(q kᵀ) v` over all rows of the pass, unscaled, without a cache.
    full_attention(q, k, v) => FullAttention { heads: u32 };
    /// `softmax(cap * tanh(s / cap)) v` over a row and the `reach - 1` rows before it. The score of a row `d` rows back
    /// is `s = q·k + q·(W t_d)`, where `t_d` is the sines, then the cosines, of `d * 10000^(-i / (n - 1))`, i < n, n
    /// half the row's width.
    near_attention(q, k, v) => NearAttention { heads: u32, reach: u32, cap: f32, weight: WeightId };
}

/// Something of an operation that is known when the graph is built.
#[derive(Debug)]
pub enum Attribute<'a> {
    Number(&'a mut u32),
    Real(&'a mut f32),
    Weight(&'a mut WeightId),
    OptionalWeight(&'a mut Option<WeightId>),
    Cache(&'a mut CacheId),
}

macro_rules! attribute {
    ($($kind:ty => $variant:ident,)*) => {
        $(impl<'a> From<&'a mut $kind> for Attribute<'a> {
            fn from(value: &'a mut $kind) -> Attribute<'a> {
                Attribute::$variant(value)
            }
        })*
    };
}

attribute! {
    u32 => Number,
    f32 => Real,
    WeightId => Weight,
    Option<WeightId> => OptionalWeight,
    CacheId => Cache,
}

impl Op {
    /// The weight it reads, if any.
    pub fn weight(mut self) -> Option<WeightId> {
        let mut found = None;
        self.each_attribute(|_, attribute| match attribute {
            Attribute::Weight(weight) => found = Some(*weight),
            Attribute::OptionalWeight(weight) => found = *weight,
            _ => {}
        });
        found
    }

    /// The cache it appends to or lends, if any.
    pub fn cache(mut self) -> Option<CacheId> {
        let mut found = None;
        self.each_attribute(|_, attribute| {
            if let Attribute::Cache(cache) = attribute {
                found = Some(*cache);
            }
        });
        found
    }

    /// The same over another table, in which each weight is at `place`.
    pub fn with_weight_at(mut self, place: impl Fn(WeightId) -> WeightId) -> Op {
        self.each_attribute(|_, attribute| match attribute {
            Attribute::Weight(weight) | Attribute::OptionalWeight(Some(weight)) => *weight = place(*weight),
            _ => {}
        });
        self
    }
}
