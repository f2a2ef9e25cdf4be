//! Groups of nodes, the patterns that they form, and which node plays which part in them.
//!
//! Some are found in the graph alone, others are made for a GPU whose kernels compute them in one launch, and helpers
//! compute no node. None of them says which kernel that is.

use gemma4c_ops::{CacheId, WeightId};

use crate::graph::NodeId;

/// Nodes that are computed together.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub kind: Kind,
    /// The nodes it owns, in the graph's order; a helper has none.
    pub nodes: Vec<NodeId>,
    /// Nodes of another group that this one computes for itself too, in the graph's order.
    pub recomputes: Vec<NodeId>,
}

impl Group {
    pub fn new(kind: Kind, nodes: Vec<NodeId>) -> Group {
        Group { kind, nodes, recomputes: Vec::new() }
    }

    /// Whether its kernel computes the node, as its owner or once more.
    pub fn computes(&self, id: NodeId) -> bool {
        self.nodes.contains(&id) || self.recomputes.contains(&id)
    }

    /// The last node it owns: its result, for most patterns.
    pub fn last(&self) -> Option<NodeId> {
        self.nodes.last().copied()
    }

    /// The node whose rows and layer are the group's own: its first one, or that which a helper is for.
    pub fn anchor(&self) -> NodeId {
        match (self.kind.helps(), self.nodes.first()) {
            (Some(node), _) | (None, Some(&node)) => node,
            (None, None) => unreachable!("a group without nodes is a helper"),
        }
    }
}

/// Which pattern the nodes of a group form.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    // -- From the graph alone
    // ------------------------------------------------------------------------------------------
    /// One operation on its own.
    Single,
    /// A row of a table, times a factor.
    Embed { table: WeightId, tokens: NodeId, factor: f32 },
    /// The per-layer inputs of all layers, from a token's embedding and the per-layer table.
    PerLayerInputs(PerLayerInputs),
    /// Matrix products that share their input, as one.
    Product(Product),
    /// Residual, norms and layer scale between two products.
    Norm(Norm),
    /// Norms and RoPE of attention heads, and the store into the KV cache.
    Heads(Heads),
    /// A mixture's router: from the residual to the experts chosen for a row.
    Router(Router),
    /// `gelu(gate) * up` of the chosen experts, and of a dense half beside them.
    ExpertGateUp { weight: WeightId, input: NodeId, routing: NodeId, out: NodeId, dense: Option<DenseHalf> },
    /// The chosen experts' last product with their weighted sum, and that of a dense half beside them.
    ExpertDown {
        weight: WeightId,
        scale: Option<WeightId>,
        input: NodeId,
        routing: NodeId,
        out: NodeId,
        dense: Option<DenseHalf>,
    },

    // -- For a GPU whose kernels can
    // ------------------------------------------------------------------------------------
    /// Heads, and the attention that alone reads them.
    AttentionStep { heads: Heads, attention: NodeId },
    /// Attention from the parts that a helper leaves.
    AttentionMerge { attention: NodeId },
    /// A per-layer gate with the residual before it, and the projection that alone reads it.
    PerLayerStep { gate: Product, slice: NodeId, residual: Residual, projection: NodeId },
    /// The residual before a mixture, the norms of both halves, and the router.
    MixtureEntry { norm: Norm, expert_norm: (NodeId, WeightId), router: Router },
    /// Products of rows sorted by expert. With `geglu` the result is `gelu(gate) * up`.
    ExpertProduct { weight: WeightId, input: NodeId, routing: NodeId, matmuls: Vec<NodeId>, geglu: bool, height: u32 },
    /// `gelu(gate) * up` of values in memory.
    Geglu { gate: NodeId, up: NodeId },
    /// A value that lies where another does: nothing is launched.
    View,

    // -- Of towers
    // -----------------------------------------------------------------------------------------------------
    /// A norm between clipped products.
    ClippedNorm(ClippedNorm),
    /// `gelu(gate) * up` between clipped products.
    ClippedGeglu(ClippedGeglu),
    /// Norms and rotation of the heads of patches.
    PatchHeads(PatchHeads),
    /// Attention of all patches to all, within the bounds of the product that reads it.
    PatchAttention { attention: NodeId, clip: Clip },

    // -- Helpers
    // -------------------------------------------------------------------------------------------------------
    /// A value in another form.
    Convert { value: NodeId, form: Form },
    /// The pairs of a row and an expert, sorted by expert and cut into groups of `height` rows.
    SortPairs { routing: NodeId, height: u32 },
    /// Attention over parts of the keys: split-KV.
    AttentionParts { attention: NodeId },
    /// What a product does before it multiplies (norm, residual, rounding), for several rows: `of` is its first matrix.
    RowsPrologue { of: NodeId },
    /// What lies between the halves of the pairs that a product of decoded rows takes: `of` is its first matrix.
    NarrowRows { of: NodeId },
    /// The weights of a product of many rows as bf16, for the product alone: `of` is its first matrix.
    WidenWeights { of: NodeId },
    /// The last rows of a chunk into the ring of a sliding layer, once all rows of the chunk have looked at what the
    /// ring held.
    KeepRows { append: NodeId },
}

impl Kind {
    /// The pattern's name in reports.
    pub const fn name(&self) -> &'static str {
        match self {
            Kind::Single => "single",
            Kind::Embed { .. } => "embed",
            Kind::PerLayerInputs(_) => "per_layer_inputs",
            Kind::Product(_) => "product",
            Kind::Norm(_) => "norm",
            Kind::Heads(_) => "heads",
            Kind::Router(_) => "router",
            Kind::ExpertGateUp { .. } => "expert_gate_up",
            Kind::ExpertDown { .. } => "expert_down",
            Kind::AttentionStep { .. } => "attention_step",
            Kind::AttentionMerge { .. } => "attention_merge",
            Kind::PerLayerStep { .. } => "per_layer_step",
            Kind::MixtureEntry { .. } => "mixture_entry",
            Kind::ExpertProduct { .. } => "expert_product",
            Kind::Geglu { .. } => "geglu",
            Kind::View => "view",
            Kind::ClippedNorm(_) => "clipped_norm",
            Kind::ClippedGeglu(_) => "clipped_geglu",
            Kind::PatchHeads(_) => "patch_heads",
            Kind::PatchAttention { .. } => "patch_attention",
            Kind::Convert { .. } => "convert",
            Kind::SortPairs { .. } => "sort_pairs",
            Kind::AttentionParts { .. } => "attention_parts",
            Kind::RowsPrologue { .. } => "rows_prologue",
            Kind::NarrowRows { .. } => "narrow_rows",
            Kind::WidenWeights { .. } => "widen_weights",
            Kind::KeepRows { .. } => "keep_rows",
        }
    }

    /// The node that a helper is for; `None` for a group that computes nodes.
    pub const fn helps(&self) -> Option<NodeId> {
        match self {
            Kind::Convert { value: node, .. }
            | Kind::SortPairs { routing: node, .. }
            | Kind::AttentionParts { attention: node }
            | Kind::RowsPrologue { of: node }
            | Kind::NarrowRows { of: node }
            | Kind::WidenWeights { of: node }
            | Kind::KeepRows { append: node } => Some(*node),
            _ => None,
        }
    }
}

/// How a value lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Form {
    /// f32, row behind row.
    F32,
    BF16,
    F16,
    /// int8 codes with a scale for each 32.
    Int8,
}

/// `(norm(projected * projected_scale) * norm + table[token] * row_scale) * out_scale`, a norm for each `width` values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerInputs {
    pub projected: NodeId,
    pub tokens: NodeId,
    pub table: WeightId,
    pub norm: WeightId,
    pub width: u32,
    pub eps: f32,
    pub projected_scale: f32,
    pub row_scale: f32,
    pub out_scale: f32,
}

/// One or several products of the same rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    pub input: NodeId,
    /// `input` is computed on the way in, by every block.
    pub norm: Option<Norm>,
    /// What the second matrix and those after it read, where that is not `input` too: the same value within other
    /// bounds.
    pub others: Vec<NodeId>,
    /// One a matrix, all of one type. With `geglu`: gate, then up.
    pub matmuls: Vec<NodeId>,
    /// The result is `gelu(gate) * up`.
    pub geglu: bool,
    /// Element-wise operations on the result, in order.
    pub epilogue: Vec<Epilogue>,
    /// What an adapter adds to each matrix's product; empty where none adds anything.
    pub adapted: Vec<Option<Pair>>,
}

/// The two halves of what an adapter adds to a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    pub narrow: NodeId,
    /// The product with its change.
    pub widen: NodeId,
}

impl Product {
    /// Products of `input` by plain matrices, and nothing else.
    pub fn new(input: NodeId, matmuls: Vec<NodeId>) -> Product {
        let (others, epilogue, adapted) = (Vec::new(), Vec::new(), Vec::new());
        Product { input, norm: None, others, matmuls, geglu: false, epilogue, adapted }
    }

    /// The results of its matrices, with what adapters add to them.
    pub fn results(&self) -> Vec<NodeId> {
        let pair = |at: usize| self.adapted.get(at).copied().flatten();
        self.matmuls.iter().enumerate().map(|(at, id)| pair(at).map_or(*id, |pair| pair.widen)).collect()
    }

    /// Everything that is multiplied.
    pub fn inputs(&self) -> impl Iterator<Item = NodeId> {
        std::iter::once(self.input).chain(self.others.iter().copied())
    }

    /// Each matrix has a result of its own.
    pub fn is_plain(&self) -> bool {
        !self.geglu && self.epilogue.is_empty()
    }
}

/// A mixture's dense half, where its product comes along with that of the experts.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseHalf {
    pub product: Product,
    pub out: NodeId,
}

/// An element-wise operation after a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epilogue {
    pub node: NodeId,
    /// Its other operand, of two.
    pub operand: Option<NodeId>,
}

/// `normed = norm(sum) * next`, `sum = (before + norm(input) * post) * scale`; without the residual, `sum` is `input`.
/// `before` is the residual before the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub input: NodeId,
    pub residual: Option<Residual>,
    /// The norm at the end, with its weight.
    pub next: Option<(NodeId, Option<WeightId>)>,
    pub eps: f32,
}

/// The first half of a [`Norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    pub before: NodeId,
    pub post: WeightId,
    /// `input` is the norm of `Norm::input` plus the norm of another value, each with its weight.
    pub branch: Option<Branch>,
    pub scale: Option<WeightId>,
    /// The residual after the update.
    pub sum: NodeId,
}

/// A value within bounds, each a weight of one element where there is one: `out`, which is the value itself where there
/// is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clip {
    pub low: Option<WeightId>,
    pub high: Option<WeightId>,
    pub out: NodeId,
}

/// A [`Norm`] whose input and whose result are kept within bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct ClippedNorm {
    /// Its input is what `entry` bounds.
    pub norm: Norm,
    pub entry: Clip,
    /// The norm at the end within the bounds of each product that reads it.
    pub exits: Vec<Clip>,
}

/// `gelu(gate) * up` of values that are kept within bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClippedGeglu {
    /// As their products leave them.
    pub gate: NodeId,
    pub up: NodeId,
    pub gate_clip: Clip,
    pub up_clip: Clip,
    pub exit: Clip,
}

/// Queries, keys and values of patches between their product and attention: within bounds, normed, and rotated by the
/// patch's column and row. Values are not rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PatchHeads {
    pub dim: u32,
    pub base: f32,
    pub eps: f32,
    /// As their products leave them: queries, keys, values.
    pub raw: [NodeId; 3],
    pub clips: [Clip; 3],
    pub q_weight: WeightId,
    pub k_weight: WeightId,
    /// What attention reads.
    pub out: [NodeId; 3],
}

/// Two branches that meet before a residual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    pub weight: WeightId,
    pub other: NodeId,
    pub other_weight: WeightId,
}

/// Queries, keys and values between their product and attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub dim: u32,
    pub base: f32,
    pub factors: Option<WeightId>,
    pub eps: f32,
    pub q: Option<QueryHeads>,
    pub kv: Option<KeyValueHeads>,
}

/// Raw queries, their norm's weight, and the normed and rotated result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryHeads {
    pub raw: NodeId,
    pub weight: WeightId,
    pub out: NodeId,
}

/// Raw keys and values before their store into a cache. They may be the same node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueHeads {
    pub k: NodeId,
    pub k_weight: WeightId,
    pub v: NodeId,
    pub cache: CacheId,
    pub out: NodeId,
}

/// A router: norm, scale, product, choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    pub input: NodeId,
    pub scale: WeightId,
    pub weight: WeightId,
    pub factor: f32,
    pub top_k: u32,
    pub eps: f32,
}
