//! Lowers a graph to the steps of a CPU plan: one step a node, in the graph's order, values placed by their lifetimes.
//!
//! Nothing is fused and nothing is chosen here. The CPU backend is what every other lowering is compared with, so the way
//! from the declared graph to its steps should be too short to hide a mistake in.

use gemma4c_graph::memory::{self, Lifetime};
use gemma4c_graph::{Elem, Graph, Node, NodeId, Op, Rows, WeightId};
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
    let rows = |rows: Rows| match rows {
        Rows::Chunk | Rows::Patches => limits.chunk as u64,
        Rows::Halves => limits.chunk.div_ceil(2) as u64,
        Rows::Asked | Rows::Soft => limits.asked as u64,
    };
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
            let bytes = if node.ty.elem == Elem::F32 { rows(node.ty.rows) * node.ty.width as u64 * 4 } else { 0 };
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
            Elem::Kv(cache) => plan::Kind::Kv { cache: cache.0 },
        },
        rows: match node.ty.rows {
            Rows::Chunk => plan::RowCount::Chunk,
            Rows::Asked => plan::RowCount::Asked,
            Rows::Patches => plan::RowCount::Patches,
            Rows::Halves => plan::RowCount::Halves,
            Rows::Soft => plan::RowCount::Soft,
        },
        width: node.ty.width,
    };
    let step = |(id, node): (NodeId, &Node)| plan::Step {
        op: operation(&node.op, place),
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

fn operation(op: &Op, at: &dyn Fn(WeightId) -> u32) -> plan::Op {
    match *op {
        Op::Tokens => plan::Op::Tokens,
        Op::Gather { table } => plan::Op::Gather { table: at(table) },
        Op::TakeAsked => plan::Op::TakeAsked,
        Op::Columns { first, len } => plan::Op::Columns { first, len },
        Op::MatMul { weight } => plan::Op::MatMul { weight: at(weight) },
        Op::ExpertMatMul { weight, part } => {
            plan::Op::ExpertMatMul { weight: at(weight), first: part.first, len: part.len }
        }
        Op::RmsNorm { weight, group, eps } => plan::Op::RmsNorm { weight: weight.map(at), group, eps },
        Op::Route { top_k } => plan::Op::Route { top_k },
        Op::ExpertSum { scale } => plan::Op::ExpertSum { scale: scale.map(at) },
        Op::Add => plan::Op::Add,
        Op::Mul => plan::Op::Mul,
        Op::Scale { factor } => plan::Op::Scale { factor },
        Op::MulWeight { weight } => plan::Op::MulWeight { weight: at(weight) },
        Op::Gelu => plan::Op::Gelu,
        Op::Softcap { cap } => plan::Op::Softcap { cap },
        Op::Rope { head_dim, base, factors } => plan::Op::Rope { head_dim, base, factors: factors.map(at) },
        Op::KvAppend { cache } => plan::Op::KvAppend { cache: cache.0 },
        Op::Attention { heads } => plan::Op::Attention { heads },
        Op::AttentionAhead { heads } => plan::Op::AttentionAhead { heads },
        Op::Patches { width } => plan::Op::Patches { width },
        Op::GatherText { table, pad } => plan::Op::GatherText { table: at(table), pad },
        Op::PlaceSoft => plan::Op::PlaceSoft,
        Op::AxisRows { table, axis } => plan::Op::AxisRows { table: at(table), axis },
        Op::SubMean { group } => plan::Op::SubMean { group },
        Op::GridMean { side } => plan::Op::GridMean { side },
        Op::AddConstant { term } => plan::Op::AddConstant { term },
        Op::AddWeight { weight } => plan::Op::AddWeight { weight: at(weight) },
        Op::AtLeast { weight } => plan::Op::AtLeast { weight: at(weight) },
        Op::AtMost { weight } => plan::Op::AtMost { weight: at(weight) },
        Op::GridRope { head_dim, base } => plan::Op::GridRope { head_dim, base },
        Op::FullAttention { heads } => plan::Op::FullAttention { heads },
        Op::NearAttention { heads, reach, cap, weight } => {
            plan::Op::NearAttention { heads, reach, cap, weight: at(weight) }
        }
        Op::HalvingConv { weight, channels } => plan::Op::HalvingConv { weight: at(weight), channels },
        Op::CausalConv { weight } => plan::Op::CausalConv { weight: at(weight) },
        Op::Sigmoid => plan::Op::Sigmoid,
        Op::Relu => plan::Op::Relu,
        Op::Hidden { width } => plan::Op::Hidden { width },
        Op::BorrowKv { cache } => plan::Op::BorrowKv { cache: cache.0 },
        Op::Concat => plan::Op::Concat,
        Op::Candidates { each } => plan::Op::Candidates { each },
        Op::SpreadTokens { .. } => plan::Op::SpreadTokens,
        Op::TokenMatMul { weight } => plan::Op::TokenMatMul { weight: at(weight) },
        Op::AttentionBefore { heads } => plan::Op::AttentionBefore { heads },
    }
}
