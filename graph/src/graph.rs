//! The graph itself: three vectors and an output.

use gemma4c_blocks::DType;
use gemma4c_ops::{Cache, CacheId, Declared, Op, Tensor, Type, WeightId};

/// A node, and its output value: its place in the graph's vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

impl NodeId {
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A stored tensor, by the name it has in the model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    pub name: String,
    pub dtype: DType,
    /// Fastest first, as GGUF writes them: a matrix is `[inputs, outputs]`, stacked experts `[inputs, outputs,
    /// experts]`.
    pub dims: Vec<u64>,
}

impl Weight {
    /// Dimension `i`; 1 beyond the last.
    pub fn dim(&self, i: usize) -> u64 {
        self.dims.get(i).copied().unwrap_or(1)
    }

    /// Bytes in the file, blocks and all.
    pub fn bytes(&self) -> Option<u64> {
        let rows = self.dims.iter().skip(1).try_fold(1u64, |n, d| n.checked_mul(*d))?;
        self.dtype.row_bytes(self.dim(0))?.checked_mul(rows)
    }
}

/// One operation with its place in the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<NodeId>,
    pub ty: Type,
    /// The layer it belongs to; `None` before the first and after the last.
    pub layer: Option<u32>,
    /// Where it stands in the model's source, e.g. `attention.q`; empty for an anonymous node.
    pub name: String,
    /// Line of that binding, for a reader who wants to look it up. Not part of any stable text.
    pub line: u32,
}

/// A forward pass: nodes in an order in which they can run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    pub weights: Vec<Weight>,
    pub caches: Vec<Cache>,
    pub nodes: Vec<Node>,
    /// The logits.
    pub output: Option<NodeId>,
    /// Values besides them that are read after the pass.
    pub kept: Vec<NodeId>,
}

impl Graph {
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    pub fn weight(&self, id: WeightId) -> &Weight {
        &self.weights[id.index()]
    }

    pub fn cache(&self, id: CacheId) -> &Cache {
        &self.caches[id.index()]
    }

    /// The same graph over another table, in which each weight stands at `place`.
    pub fn with_weights(mut self, table: &[Weight], place: Vec<WeightId>) -> Graph {
        for node in &mut self.nodes {
            node.op = node.op.with_weight_at(|weight| place[weight.index()]);
        }
        self.weights = table.to_vec();
        self
    }

    /// What somebody reads after the pass.
    pub fn results(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.output.into_iter().chain(self.kept.iter().copied())
    }

    /// Whether somebody reads a node's value after the pass.
    pub fn is_result(&self, id: NodeId) -> bool {
        self.results().any(|result| result == id)
    }

    /// The same results, of nodes that have new numbers.
    pub(crate) fn renumber_results(&mut self, now: &[NodeId]) {
        for id in self.output.iter_mut().chain(&mut self.kept) {
            *id = now[id.index()];
        }
    }

    /// The nodes with their ids, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Node)> + ExactSizeIterator {
        self.nodes.iter().enumerate().map(|(i, n)| (NodeId(i as u32), n))
    }

    /// The name shown in texts and errors: `blk.3.attention.q`, or `%17` for an anonymous node.
    pub fn full_name(&self, id: NodeId) -> String {
        let node = self.node(id);
        match (node.layer, node.name.is_empty()) {
            (_, true) => format!("%{}", id.0),
            (Some(layer), false) => format!("blk.{layer}.{}", node.name),
            (None, false) => node.name.clone(),
        }
    }
}

impl Declared for Graph {
    fn weight(&self, id: WeightId) -> Tensor<'_> {
        let Weight { name, dims, .. } = &self.weights[id.index()];
        Tensor { name, dims }
    }

    fn cache(&self, id: CacheId) -> Cache {
        self.caches[id.index()]
    }
}
