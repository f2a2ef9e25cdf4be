//! What the passes work on: the groups of a phase with what was decided of them, the GPU's abilities, and questions
//! about groups that several passes ask.

use std::collections::{HashMap, HashSet};

use gemma4c_graph::passes::Log;
use gemma4c_graph::{CacheId, Elem, Fused, Graph, Group, Kind, NodeId, Op, Product, RowCount};
use gemma4c_plan::cuda::KvType;

use crate::kernels::attention::Attention;
use crate::kernels::outputs::Outputs;
use crate::kernels::product::warpgroups::Source;
use crate::kernels::rows::SumOrder;
use crate::target::Target;

/// A pass for a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    pub name: &'static str,
    pub about: &'static str,
    /// Whether there is no program without it.
    pub required: bool,
    /// Whether it is switched off unless somebody asks for it: its result is right, and so far slower or expensive.
    pub asked_for: bool,
    pub(super) run: fn(&mut Schedule, &Abilities, &mut Log),
}

/// Positions that the pages of a window hold besides it, at least.
const SPARE_ROWS: u32 = 256;

/// What the kernels of a target can do, and what the caller wants of them.
#[derive(Clone, Debug)]
pub struct Abilities {
    /// No rounding of activations anywhere: the reference.
    pub exact: bool,
    /// RowCount that are decoded together may be of one sequence: a row must find the keys and values of those before it.
    pub verifies: bool,
    pub kv: KvType,
    pub context: u32,
    /// Most rows of a pass.
    pub chunk: u32,
    /// The GPU that launches are shaped for.
    pub target: Target,
    /// A row's per-layer gate and projection may be one launch: the pass that merges them is on.
    pub per_layer_step: bool,
    /// Blocks of the largest cluster there; 1 where there are none, or where they are switched off.
    pub cluster: u32,
    /// Values that are so small, whatever a model is given, that none is lost in f16.
    pub bounded: HashSet<NodeId>,
    /// Prefill may have bf16 copies of the weights; or why not.
    pub copies: Result<(), &'static str>,
    /// Of the experts too, which are many times larger; or why not.
    pub copies_of_experts: Result<(), &'static str>,
    /// A phase may dequantise weights to bf16 ahead of one product after another; or why not.
    pub dequantises: Result<(), &'static str>,
}

impl Abilities {
    /// Positions that a cache holds at once, at least: a window, and some rows besides, so that a sequence can go back a
    /// little.
    pub fn capacity(&self, cache: &gemma4c_graph::Cache) -> u32 {
        cache.window.map_or(self.context, |window| window.saturating_add(SPARE_ROWS)).min(self.context)
    }

    /// Whether a chunk would overwrite what its first rows still see: its keys and values then go through a stage.
    pub fn is_staged(&self, cache: &gemma4c_graph::Cache) -> bool {
        cache.window.is_some() && self.capacity(cache) < self.context
    }

    /// The attention of `heads` queries over a cache, whose parts may be merged in clusters of so many blocks.
    pub fn attention(&self, graph: &Graph, cache: CacheId, heads: u32, cluster: u32) -> Attention {
        let c = graph.cache(cache);
        Attention {
            head_dim: c.head_dim,
            kv_heads: c.kv_heads,
            group: heads / c.kv_heads,
            window: c.window,
            capacity: self.capacity(c),
            kv: self.kv,
            shared_bytes: self.target.shared_bytes_per_block as usize,
            cluster,
            multiprocessors: self.target.multiprocessors,
        }
    }
}

/// The groups of one phase, and what the passes have decided of them.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub fused: Fused,
    /// RowCount of a chunk, or sequences that decode together.
    pub rows: u32,
    /// Whether the rows are decoded tokens, one a sequence, and not a prompt's.
    pub decodes: bool,
    /// Of a tower: soft tokens of a picture, at most.
    pub soft_rows: Option<u32>,
    /// Products of decoded rows have 16-bit operands.
    pub(super) in_16_bits: bool,
    /// The forms in which values are written, where that is not f32 alone.
    pub(super) forms: HashMap<NodeId, Outputs>,
    /// What products by warpgroups read their weights from, by their first matrix.
    pub(super) sources: HashMap<NodeId, Source>,
    /// Attention of many rows that is computed by warpgroups.
    pub(super) by_warpgroups: HashSet<NodeId>,
    /// Blocks that may merge parts of an attention in a cluster.
    pub(super) clusters: HashMap<NodeId, u32>,
    /// Products of several rows that one row has in another kernel than its own, by their first matrix: in which order
    /// that adds.
    pub(super) orders: HashMap<NodeId, SumOrder>,
    /// Gate and up of several decoded rows that are written as int8 in tiles of eight rows.
    pub(super) in_tiles: HashSet<NodeId>,
    /// Groups of a tower that are one launch, by their anchor.
    pub(super) tower_launches: HashSet<NodeId>,
    /// Why a group is not part of a larger one, by its last node.
    pub(super) notes: HashMap<NodeId, String>,
}

/// The rows of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PhaseRows {
    /// Decoded tokens.
    Decode(u32),
    /// Tokens of a chunk.
    Prefill(u32),
    /// Patches of a picture, and the soft tokens that they become.
    Tower { patches: u32, soft: u32 },
}

impl Schedule {
    /// A phase's groups, of which nothing is decided yet.
    pub(super) fn new(fused: Fused, of: PhaseRows) -> Schedule {
        let (rows, decodes, soft_rows) = match of {
            PhaseRows::Decode(rows) => (rows, true, None),
            PhaseRows::Prefill(rows) => (rows, false, None),
            PhaseRows::Tower { patches, soft } => (patches, false, Some(soft)),
        };
        Schedule {
            fused,
            rows,
            decodes,
            soft_rows,
            in_16_bits: false,
            forms: HashMap::new(),
            sources: HashMap::new(),
            by_warpgroups: HashSet::new(),
            clusters: HashMap::new(),
            orders: HashMap::new(),
            in_tiles: HashSet::new(),
            tower_launches: HashSet::new(),
            notes: HashMap::new(),
        }
    }

    pub fn graph(&self) -> &Graph {
        &self.fused.graph
    }

    /// Whether a group works on the asked rows alone.
    pub fn is_asked(&self, group: &Group) -> bool {
        self.graph().node(group.anchor()).ty.rows == RowCount::Asked
    }

    /// Whether a group computes rows one by one, each as if it were alone: decoded rows, or the asked row of a prompt.
    /// Its kernels are those of one row.
    pub fn is_one_row(&self, group: &Group) -> bool {
        self.decodes || self.is_asked(group)
    }

    /// Whether a group computes rows one by one with int8 activations, by the kernels of one row.
    pub fn is_int8_row(&self, group: &Group) -> bool {
        self.is_one_row(group) && !self.in_16_bits
    }

    /// Whether a group's products are those of decoded rows with bf16 operands.
    pub fn is_gemm(&self, group: &Group) -> bool {
        self.is_one_row(group) && self.in_16_bits
    }

    /// RowCount of a group's values, at most. All decoded rows are asked for.
    pub fn rows_of(&self, group: &Group) -> u32 {
        match (self.graph().node(group.anchor()).ty.rows, self.soft_rows) {
            (RowCount::Asked, _) if !self.decodes => 1,
            (RowCount::Soft, Some(soft)) => soft,
            (RowCount::Halves, Some(_)) => self.rows.div_ceil(2),
            _ => self.rows,
        }
    }

    /// The groups in the order they are launched: those for all rows of a chunk, then those for the asked one.
    pub fn ordered(&self) -> Vec<Group> {
        let mut groups = self.fused.ordered();
        // Nothing for all rows depends on the asked row.
        groups.sort_by_key(|group| self.is_asked(group));
        // A stage is free once its last rows are kept: right after whoever reads it last.
        let (kept, mut groups): (Vec<Group>, Vec<Group>) =
            groups.into_iter().partition(|group| matches!(group.kind, Kind::KeepRows { .. }));
        for keep in kept {
            let needed = self.fused.inputs(&keep);
            let reads = |group: &Group| needed.iter().any(|node| group.nodes.contains(node));
            let behind = groups.iter().rposition(reads).map_or(0, |last| last + 1);
            groups.insert(behind, keep);
        }
        groups
    }

    /// The forms in which a value is written to memory.
    pub fn forms(&self, node: NodeId) -> Outputs {
        self.forms.get(&node).copied().unwrap_or(Outputs::FLOATS)
    }

    /// What a product reads its weights from, if it is one by warpgroups.
    pub fn source(&self, first_matrix: NodeId) -> Option<Source> {
        self.sources.get(&first_matrix).copied()
    }

    /// Whether an attention of many rows is computed by warpgroups.
    pub fn is_by_warpgroups(&self, attention: NodeId) -> bool {
        self.by_warpgroups.contains(&attention)
    }

    /// Whether a value is in tiles of eight rows of int8.
    pub fn is_in_tiles(&self, value: NodeId) -> bool {
        self.in_tiles.contains(&value)
    }

    /// Whether a tower's group is one launch.
    pub(super) fn is_tower_launch(&self, group: &Group) -> bool {
        self.tower_launches.contains(&group.anchor())
    }

    /// The order in which a product of several rows adds: that of the kernel that one row has.
    pub fn sum_order(&self, first_matrix: NodeId) -> SumOrder {
        self.orders.get(&first_matrix).copied().unwrap_or(SumOrder::Matvec)
    }

    /// Whether a group works on several decoded rows.
    pub fn is_decoded_together(&self, group: &Group) -> bool {
        self.decodes && self.rows_of(group) > 1
    }

    /// Blocks of a cluster that may merge the parts of an attention.
    pub fn cluster_of(&self, attention: NodeId) -> u32 {
        self.clusters.get(&attention).copied().unwrap_or(1)
    }

    /// Why a group is not part of a larger one.
    pub fn note(&self, group: &Group) -> Option<&str> {
        self.notes.get(&group.last()?).map(String::as_str)
    }

    pub(super) fn names(&self, nodes: &[NodeId]) -> Vec<String> {
        nodes.iter().map(|node| self.graph().full_name(*node)).collect()
    }

    /// Records in the log and for the group why a pass does not change it.
    pub(super) fn refuse(&mut self, log: &mut Log, group: &Group, why: impl Into<String>) {
        let why = why.into();
        log.refuse_group(self.names(&group.nodes), why.clone());
        self.notes.extend(group.last().map(|last| (last, why)));
    }

    /// Counts a group that a pass marks and does not merge.
    pub(super) fn mark(&self, log: &mut Log, nodes: &[NodeId]) {
        log.mark(self.names(nodes));
    }
}

/// What a group multiplies, if it is a product of rows by matrices: fused or not.
pub fn product_of(graph: &Graph, group: &Group) -> Option<Product> {
    match &group.kind {
        Kind::Product(product) => Some(product.clone()),
        Kind::Single => {
            let id = group.nodes[0];
            let node = graph.node(id);
            matches!(node.op, Op::MatMul { .. }).then(|| Product::new(node.inputs[0], vec![id]))
        }
        _ => None,
    }
}

/// Whether a product of many rows is computed in f32: where nothing may be rounded, and where its rows are no whole
/// groups of 32, which warps take, and no warpgroups compute it.
pub fn multiplies_exactly(schedule: &Schedule, can: &Abilities, product: &Product) -> bool {
    let (graph, first) = (schedule.graph(), product.matmuls[0]);
    let is_ragged = |weight| !graph.weight(weight).dim(0).is_multiple_of(32);
    can.exact || schedule.source(first).is_none() && graph.node(first).op.weight().is_some_and(is_ragged)
}

/// The cache and the query heads of an attention.
pub fn cache_of(graph: &Graph, attention: NodeId) -> Option<(CacheId, u32)> {
    let node = graph.node(attention);
    match (node.op, graph.node(*node.inputs.get(1)?).ty.elem) {
        (Op::Attention { heads } | Op::AttentionAhead { heads } | Op::AttentionBefore { heads }, Elem::Kv(cache)) => {
            Some((cache, heads))
        }
        _ => None,
    }
}

/// How many experts there are, and how many a row goes to.
pub fn experts_of(graph: &Graph, routing: NodeId) -> (u32, u32) {
    let ty = graph.node(routing).ty;
    match ty.elem {
        Elem::Routing { experts } => (experts, ty.width),
        _ => (0, 0),
    }
}
