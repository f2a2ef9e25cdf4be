//! Lowers a graph to the steps of a CPU plan: one step a node, in the graph's order, values placed by their lifetimes.
//!
//! Nothing is fused and nothing is chosen here. The CPU backend is what every other lowering is compared with, so the way
//! from the declared graph to its steps should be too short to hide a mistake in.

use gemma4c_graph::memory::{self, Lifetime};
use gemma4c_graph::{Elem, Graph, Node, NodeId, WeightId};
use gemma4c_plan as plan;
use gemma4c_plan::cuda::KvType;

/// How long a sequence may get and how much of it one pass takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub context: u32,
    pub chunk: u32,
    /// Most rows one pass gives logits for: at 262144 floats each they are what would otherwise fill the arena.
    pub asked: u32,
    /// The type of keys and values on a GPU: a CPU rounds to it where it has 8 bits.
    pub kv: KvType,
}

/// Why a graph cannot be lowered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    #[error("the graph has no output")]
    NoOutput,
    #[error("the memory plan puts {a} and {b} in the same place")]
    Overlap { a: String, b: String },
}

/// The program of a CPU plan. Weight indices are those of the graph's weights.
pub fn lower(graph: &Graph, limits: Limits) -> Result<plan::Program, LowerError> {
    lower_beside(graph, limits, &|weight| weight.0, &[])
}

/// The same of a graph beside the text's: a tower's, whose chunk is its patches and whose asked rows are its soft tokens, or a drafter's. `place` is
/// where a weight stands in the plan. The values `kept` are there until the end of a pass, as the output is.
pub fn lower_beside(
    graph: &Graph,
    limits: Limits,
    place: &dyn Fn(WeightId) -> u32,
    kept: &[NodeId],
) -> Result<plan::Program, LowerError> {
    let output = graph.output.ok_or(LowerError::NoOutput)?;
    let mut last_read: Vec<usize> = (0..graph.nodes.len()).collect();
    for (id, node) in graph.iter() {
        node.inputs.iter().for_each(|i| last_read[i.index()] = id.index());
    }
    for id in kept.iter().chain([&output]) {
        last_read[id.index()] = graph.nodes.len();
    }
    let lifetimes: Vec<Lifetime> = graph
        .iter()
        .map(|(id, node)| {
            let rows = node.ty.rows.most(limits.chunk, limits.asked) as u64;
            let bytes = if node.ty.elem == Elem::F32 { rows * node.ty.width as u64 * 4 } else { 0 };
            Lifetime { first: id.index(), last: last_read[id.index()], bytes }
        })
        .collect();
    let arena = memory::place(&lifetimes);
    if let Some((a, b)) = memory::overlap(&lifetimes, &arena) {
        let name = |i: usize| graph.full_name(NodeId(i as u32));
        return Err(LowerError::Overlap { a: name(a), b: name(b) });
    }
    let value = |(id, node): (NodeId, &Node)| plan::Value {
        name: graph.full_name(id),
        kind: match node.ty.elem {
            Elem::Token => plan::Kind::Tokens,
            Elem::F32 => plan::Kind::Floats { offset: arena.offsets[id.index()] },
            Elem::Routing { experts } => plan::Kind::Routing { experts },
            Elem::Kv(cache) => plan::Kind::Kv { cache },
        },
        rows: node.ty.rows,
        width: node.ty.width,
    };
    let step = |(id, node): (NodeId, &Node)| plan::Step {
        op: node.op.with_weight_at(|weight| WeightId(place(weight))),
        inputs: node.inputs.iter().map(|i| i.0).collect(),
        output: id.0,
    };
    let cache = |c: &gemma4c_graph::Cache| plan::Cache {
        layer: c.layer,
        kv_heads: c.kv_heads,
        head_dim: c.head_dim,
        window: c.window,
        // A ring must hold what the first row of a chunk still sees while the last row is being written.
        capacity: c.window.map_or(limits.context, |w| w.saturating_add(limits.chunk)).min(limits.context),
    };
    Ok(plan::Program {
        context: limits.context,
        chunk: limits.chunk,
        asked: limits.asked,
        arena_bytes: arena.bytes,
        kv: limits.kv.on_cpu(),
        caches: graph.caches.iter().map(cache).collect(),
        values: graph.iter().map(value).collect(),
        steps: graph.iter().map(step).collect(),
        output: output.0,
    })
}
