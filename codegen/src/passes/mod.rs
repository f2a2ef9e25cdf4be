//! The passes that ask what a GPU's kernels can do. They follow the graph's own passes in one list; after them a group is a launch.
//!
//! ```text
//! graph passes (no GPU) ──► mixtures ──► absorb-norms ──► per-layer-step ──► attention-step ──► clusters ──► int8 ──► warpgroups
//!                           ──► attention-warpgroups ──► bf16-copies ──► cut ──► forms ──► rows ──► widened-weights ──► persistent
//! ```
//!
//! All but three merge groups or mark them, and can be switched off. `cut` takes apart what no kernel computes in one launch,
//! `forms` decides how every value lies in memory, and `rows` gives products of several decoded rows a launch before them: without these
//! there is no program. No pass launches anything, allocates anything or knows an address.

mod absorb_norms;
mod attention_step;
mod attention_warpgroups;
pub mod copies;
mod cut;
pub mod forms;
mod int8;
mod mixtures;
pub mod panels;
pub mod per_layer_step;
pub mod persistent;
pub mod rows;
pub mod tower;
pub mod warpgroups;
pub mod widened;

use std::collections::{HashMap, HashSet};

use gemma4c_graph::passes::{self, Log, Report};
use gemma4c_graph::{CacheId, Elem, Fused, Graph, Group, Kind, NodeId, Op, Product, Rows};
use gemma4c_plan::cuda::KvType;

use crate::kernels::attention::Attention;
use crate::kernels::attention::address::BLOCK_ROWS;
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
    /// Whether it is switched off unless somebody asks for it: what it makes is right, and slower so far or dear.
    pub asked_for: bool,
    run: fn(&mut Schedule, &Abilities, &mut Log),
}

/// In the order they run, behind [`gemma4c_graph::passes::PASSES`].
pub static PASSES: &[Pass] = &[
    mixtures::PASS,
    absorb_norms::PASS,
    per_layer_step::PASS,
    attention_step::PASS,
    attention_step::CLUSTERS,
    int8::PASS,
    warpgroups::PASS,
    attention_warpgroups::PASS,
    copies::PASS,
    cut::PASS,
    forms::PASS,
    rows::PASS,
    widened::PASS,
    persistent::PASS,
];

/// The names of all passes that can be switched off, the graph's own first.
pub fn optional() -> impl Iterator<Item = &'static str> {
    let of_target = PASSES.iter().filter(|pass| !pass.required).map(|pass| pass.name);
    passes::PASSES.iter().map(|pass| pass.name).chain(of_target)
}

/// The passes to switch off where these are asked for and those are not wanted: of the ones that must be asked for, all others.
pub fn switched_off(unwanted: &[String], asked_for: &[String]) -> Vec<String> {
    let silent = PASSES.iter().filter(|pass| pass.asked_for && !asked_for.iter().any(|name| name == pass.name));
    let mut all = unwanted.to_vec();
    all.extend(silent.map(|pass| pass.name.to_owned()).filter(|name| !unwanted.contains(name)));
    all
}

/// What the kernels of a target can do, and what the caller wants of them.
#[derive(Clone, Debug)]
pub struct Abilities {
    /// No rounding of activations anywhere: the reference.
    pub exact: bool,
    /// Rows that are decoded together may be of one sequence: a row must find the keys and values of those before it.
    pub verifies: bool,
    pub kv: KvType,
    pub context: u32,
    /// Most rows of a pass.
    pub chunk: u32,
    /// The GPU that launches are shaped for.
    pub target: Target,
    /// A row's per-layer gate and projection may be one launch: the pass that makes them so is on.
    pub per_layer_step: bool,
    /// Blocks of the largest cluster there; 1 where there are none, or where they are switched off.
    pub cluster: u32,
    /// Prefill may have bf16 copies of the weights; or why not.
    pub copies: Result<(), &'static str>,
    /// Of the experts too, which are many times larger; or why not.
    pub copies_of_experts: Result<(), &'static str>,
    /// A phase may widen weights to bf16 for one product after another; or why not.
    pub widens: Result<(), &'static str>,
}

impl Abilities {
    /// Rows of a cache: a ring holds the window and a block's worth of rows besides, so that a sequence can go back a little.
    pub fn capacity(&self, cache: &gemma4c_graph::Cache) -> u32 {
        cache.window.map_or(self.context, |window| window.saturating_add(BLOCK_ROWS)).min(self.context)
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
    /// Rows of a chunk, or sequences that decode together.
    pub rows: u32,
    /// Whether the rows are decoded tokens, one a sequence, and not a prompt's.
    pub decodes: bool,
    /// Of a tower: soft tokens of a picture, at most.
    pub soft_rows: Option<u32>,
    /// The forms in which values are left, where that is not f32 alone.
    forms: HashMap<NodeId, Outputs>,
    /// What products by warpgroups read their weights from, by their first matrix.
    sources: HashMap<NodeId, Source>,
    /// Attention of many rows that is made by warpgroups.
    by_warpgroups: HashSet<NodeId>,
    /// Blocks that may merge parts of an attention in a cluster.
    clusters: HashMap<NodeId, u32>,
    /// Products of several rows that one row has in another kernel than its own, by their first matrix: in which order that adds.
    orders: HashMap<NodeId, SumOrder>,
    /// Why a group is not part of a larger one, by its last node.
    notes: HashMap<NodeId, String>,
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

/// Runs the target's passes on a phase's groups.
pub fn schedule(fused: Fused, of: PhaseRows, can: &Abilities, disabled: &[String]) -> (Schedule, Vec<Report>) {
    let (forms, sources, clusters) = (HashMap::new(), HashMap::new(), HashMap::new());
    let (orders, notes, by_warpgroups) = (HashMap::new(), HashMap::new(), HashSet::new());
    let (rows, decodes, soft_rows) = match of {
        PhaseRows::Decode(rows) => (rows, true, None),
        PhaseRows::Prefill(rows) => (rows, false, None),
        PhaseRows::Tower { patches, soft } => (patches, false, Some(soft)),
    };
    let mut schedule =
        Schedule { fused, rows, decodes, soft_rows, forms, sources, by_warpgroups, clusters, orders, notes };
    let mut reports = Vec::new();
    for pass in PASSES {
        let enabled = pass.required || !disabled.iter().any(|name| name == pass.name);
        let mut log = Log::default();
        if enabled {
            (pass.run)(&mut schedule, can, &mut log);
        }
        let groups = || gemma4c_graph::verify_groups(&schedule.fused);
        debug_assert!(groups().is_ok(), "after {}: {:?}", pass.name, groups());
        reports.push(Report { name: pass.name, about: pass.about, enabled, log });
    }
    (schedule, reports)
}

impl Schedule {
    pub fn graph(&self) -> &Graph {
        &self.fused.graph
    }

    /// Whether a group works on the asked rows alone.
    pub fn is_asked(&self, group: &Group) -> bool {
        self.graph().node(group.anchor()).ty.rows == Rows::Asked
    }

    /// Whether a group computes rows one by one, each as if it were alone: decoded rows, or the asked row of a prompt. Its kernels are
    /// those of one row.
    pub fn is_one_row(&self, group: &Group) -> bool {
        self.decodes || self.is_asked(group)
    }

    /// Rows of a group's values, at most. All decoded rows are asked for.
    pub fn rows_of(&self, group: &Group) -> u32 {
        match (self.graph().node(group.anchor()).ty.rows, self.soft_rows) {
            (Rows::Asked, _) if !self.decodes => 1,
            (Rows::Soft, Some(soft)) => soft,
            (Rows::Halves, Some(_)) => self.rows.div_ceil(2),
            _ => self.rows,
        }
    }

    /// The groups in the order they are launched: those for all rows of a chunk, then those for the asked one.
    pub fn ordered(&self) -> Vec<Group> {
        let mut groups = self.fused.ordered();
        // Nothing for all rows depends on the asked row.
        groups.sort_by_key(|group| self.is_asked(group));
        // A stage is free once its last rows are kept: at once behind whoever reads it last.
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

    /// The forms in which a value is left in memory.
    pub fn forms(&self, node: NodeId) -> Outputs {
        self.forms.get(&node).copied().unwrap_or(Outputs::FLOATS)
    }

    /// What a product reads its weights from, if it is one by warpgroups.
    pub fn source(&self, first_matrix: NodeId) -> Option<Source> {
        self.sources.get(&first_matrix).copied()
    }

    /// Whether an attention of many rows is made by warpgroups.
    pub fn is_by_warpgroups(&self, attention: NodeId) -> bool {
        self.by_warpgroups.contains(&attention)
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

    fn names(&self, nodes: &[NodeId]) -> Vec<String> {
        nodes.iter().map(|node| self.graph().full_name(*node)).collect()
    }

    /// Says in the log and beside the group why a pass leaves it as it is.
    fn refuse(&mut self, log: &mut Log, group: &Group, why: impl Into<String>) {
        let why = why.into();
        log.refuse_group(self.names(&group.nodes), why.clone());
        self.notes.extend(group.last().map(|last| (last, why)));
    }

    /// Counts a group that a pass marks and does not merge.
    fn mark(&self, log: &mut Log, nodes: &[NodeId]) {
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

/// Whether a product of many rows is made in f32: where nothing may be rounded, and where its rows are no whole groups of 32, which warps take, and no warpgroups make it.
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
