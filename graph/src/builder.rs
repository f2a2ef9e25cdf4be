//! Builds a graph, one call an operation, types inferred on the way.
//!
//! The calls return plain values so that a model reads like its equations; the first mistake (shapes that do not fit)
//! is returned by [`Builder::finish`], with the name of the binding it happened in. After a mistake the graph under
//! construction is meaningless, but building goes on without panicking.

use std::collections::{HashMap, HashSet};

use gemma4c_blocks::DType;
use gemma4c_ops::{Cache, CacheId, Op, RowCount, Type, TypeError, WeightId, infer};

use crate::graph::{Graph, Node, NodeId, Weight};
use crate::verify::{VerifyError, verify};

/// A node's output, as input of the next operation.
pub type Value = NodeId;

/// A range of every expert's output rows, for tensors that hold two matrices stacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub first: u32,
    pub len: u32,
}

/// What an adapter adds to the products by a weight: `factor * B (A x)`. Of experts, each has an A and a B of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta {
    pub a: WeightId,
    pub b: WeightId,
    pub factor: f32,
    /// The row of every expert's B that belongs to the weight's first: B may be that of several matrices, stacked.
    pub first: u32,
}

/// A place in the order of construction: see [`Builder::bind`].
#[derive(Clone, Copy, Debug)]
pub struct Mark(usize);

/// A graph under construction.
#[derive(Debug, Default)]
pub struct Builder {
    graph: Graph,
    weights: HashMap<String, WeightId>,
    caches: HashMap<u32, Value>,
    /// What adapters add to products, by the weight.
    deltas: HashMap<WeightId, Vec<Delta>>,
    /// `factor * A x` that is there, by A and x: matrices that are stacked share theirs.
    narrowed: HashMap<(WeightId, Value), Value>,
    layer: Option<u32>,
    /// Which nodes' names carry the name of their function already, in step with the nodes.
    scoped: Vec<bool>,
    /// The first operation that did not type-check: its node and the reason.
    error: Option<(NodeId, TypeError)>,
}

impl Builder {
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Declares a stored tensor; the same name twice is the same weight.
    pub fn weight(&mut self, name: &str, dtype: DType, dims: &[u64]) -> WeightId {
        *self.weights.entry(name.to_string()).or_insert_with(|| {
            self.graph.weights.push(Weight { name: name.to_string(), dtype, dims: dims.to_vec() });
            WeightId(self.graph.weights.len() as u32 - 1)
        })
    }

    /// A tensor that was declared under that name.
    pub fn find_weight(&self, name: &str) -> Option<(WeightId, &Weight)> {
        let id = *self.weights.get(name)?;
        Some((id, self.graph.weight(id)))
    }

    pub fn weight_of(&self, id: WeightId) -> &Weight {
        self.graph.weight(id)
    }

    /// How many tensors were declared.
    pub fn weight_count(&self) -> usize {
        self.graph.weights.len()
    }

    /// From here on, every product by this weight has this added to it, in the order in which they are given.
    pub fn adapt(&mut self, weight: WeightId, delta: Delta) {
        self.deltas.entry(weight).or_default().push(delta);
    }

    /// From here on, every product by this weight has added to it what the adapter in its row's seat adds: of A and B there
    /// is one matrix for each seat.
    pub fn adapt_by_seat(&mut self, weight: WeightId, a: WeightId, b: WeightId) {
        self.adapt(weight, Delta { a, b, factor: 1.0, first: 0 });
    }

    /// Declares the keys and values of a layer.
    pub fn cache(&mut self, cache: Cache) -> CacheId {
        self.graph.caches.push(cache);
        CacheId(self.graph.caches.len() as u32 - 1)
    }

    /// What follows belongs to this layer, or to none.
    pub fn set_layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// The width of a value's rows.
    pub fn width(&self, value: Value) -> u32 {
        self.graph.node(value).ty.width
    }

    pub fn tokens(&mut self) -> Value {
        self.push(Op::Tokens, &[])
    }

    pub fn gather(&mut self, table: WeightId, tokens: Value) -> Value {
        self.push(Op::Gather { table }, &[tokens])
    }

    /// A picture's patches or a sound's frames, `width` numbers each.
    pub fn patches(&mut self, width: u32) -> Value {
        self.push(Op::Patches { width }, &[])
    }

    /// What the model's LM head read, `width` numbers a row.
    pub fn hidden(&mut self, width: u32) -> Value {
        self.push(Op::Hidden { width }, &[])
    }

    /// Keys and values that another graph appends; layers find them with [`Builder::kv_of`].
    pub fn borrow_kv(&mut self, cache: Cache) -> Value {
        let layer = cache.layer;
        let cache = self.cache(cache);
        let kv = self.push(Op::BorrowKv { cache }, &[]);
        self.caches.insert(layer, kv);
        kv
    }

    pub fn gather_text(&mut self, table: WeightId, pad: u32, tokens: Value) -> Value {
        self.push(Op::GatherText { table, pad }, &[tokens])
    }

    pub fn place_soft(&mut self, x: Value) -> Value {
        self.push(Op::PlaceSoft, &[x])
    }

    pub fn axis_rows(&mut self, table: WeightId, axis: u32) -> Value {
        self.push(Op::AxisRows { table, axis }, &[])
    }

    pub fn take_asked(&mut self, x: Value) -> Value {
        self.push(Op::TakeAsked, &[x])
    }

    pub fn columns(&mut self, x: Value, first: u32, len: u32) -> Value {
        self.push(Op::Columns { first, len }, &[x])
    }

    pub fn concat(&mut self, a: Value, b: Value) -> Value {
        self.push(Op::Concat, &[a, b])
    }

    pub fn candidates(&mut self, routing: Value, each: u32) -> Value {
        self.push(Op::Candidates { each }, &[routing])
    }

    pub fn spread_tokens(&mut self, x: Value, tokens: Value, width: u32) -> Value {
        self.push(Op::SpreadTokens { width }, &[x, tokens])
    }

    pub fn token_matmul(&mut self, weight: WeightId, x: Value, tokens: Value) -> Value {
        self.push(Op::TokenMatMul { weight }, &[x, tokens])
    }

    /// `W x`, and what adapters add to it.
    pub fn matmul(&mut self, weight: WeightId, x: Value) -> Value {
        let mut sum = self.push(Op::MatMul { weight }, &[x]);
        for Delta { a, b, factor, .. } in self.deltas_of(weight) {
            let narrow = self.push(Op::Narrow { weight: a, factor }, &[x]);
            sum = self.push(Op::Widen { weight: b }, &[sum, narrow]);
        }
        sum
    }

    /// `W_e x` of each expert, and what adapters add to it.
    pub fn expert_matmul(&mut self, weight: WeightId, part: Part, x: Value, routing: Value) -> Value {
        let Part { first, len } = part;
        let mut sum = self.push(Op::ExpertMatMul { weight, first, len }, &[x, routing]);
        for delta in self.deltas_of(weight) {
            let rank = self.graph.weight(delta.a).dim(1) as u32;
            let of_a = Op::ExpertMatMul { weight: delta.a, first: 0, len: rank };
            let narrow = self.narrow(delta, x, |g| g.push(of_a, &[x, routing]));
            let of_b = Op::ExpertMatMul { weight: delta.b, first: first + delta.first, len };
            let change = self.push(of_b, &[narrow, routing]);
            sum = self.add(sum, change);
        }
        sum
    }

    fn deltas_of(&self, weight: WeightId) -> Vec<Delta> {
        self.deltas.get(&weight).cloned().unwrap_or_default()
    }

    /// `factor * A x`, which is as wide as the adapter's rank.
    fn narrow(&mut self, delta: Delta, x: Value, product: impl FnOnce(&mut Builder) -> Value) -> Value {
        if let Some(known) = self.narrowed.get(&(delta.a, x)) {
            return *known;
        }
        let product = product(self);
        let narrow = if delta.factor == 1.0 { product } else { self.scale(product, delta.factor) };
        self.narrowed.insert((delta.a, x), narrow);
        narrow
    }

    /// RMS norm over the whole row.
    pub fn rms_norm(&mut self, x: Value, weight: Option<WeightId>, eps: f32) -> Value {
        let group = self.width(x);
        self.group_norm(x, weight, group, eps)
    }

    /// RMS norm over each `group` consecutive values of a row: attention heads, or a layer's slice of the per-layer
    /// inputs.
    pub fn group_norm(&mut self, x: Value, weight: Option<WeightId>, group: u32, eps: f32) -> Value {
        self.push(Op::RmsNorm { weight, group, eps }, &[x])
    }

    /// A row less its mean.
    pub fn sub_mean(&mut self, x: Value) -> Value {
        let group = self.width(x);
        self.sub_group_mean(x, group)
    }

    /// Each `group` consecutive values less their mean.
    pub fn sub_group_mean(&mut self, x: Value, group: u32) -> Value {
        self.push(Op::SubMean { group }, &[x])
    }

    pub fn route(&mut self, logits: Value, top_k: u32) -> Value {
        self.push(Op::Route { top_k }, &[logits])
    }

    pub fn expert_sum(&mut self, x: Value, routing: Value, scale: Option<WeightId>) -> Value {
        self.push(Op::ExpertSum { scale }, &[x, routing])
    }

    pub fn grid_mean(&mut self, x: Value, side: u32) -> Value {
        self.push(Op::GridMean { side }, &[x])
    }

    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.push(Op::Add, &[a, b])
    }

    pub fn mul(&mut self, a: Value, b: Value) -> Value {
        self.push(Op::Mul, &[a, b])
    }

    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        self.push(Op::Scale { factor }, &[x])
    }

    pub fn mul_weight(&mut self, x: Value, weight: WeightId) -> Value {
        self.push(Op::MulWeight { weight }, &[x])
    }

    pub fn add_constant(&mut self, x: Value, term: f32) -> Value {
        self.push(Op::AddConstant { term }, &[x])
    }

    pub fn add_weight(&mut self, x: Value, weight: WeightId) -> Value {
        self.push(Op::AddWeight { weight }, &[x])
    }

    pub fn at_least(&mut self, x: Value, weight: WeightId) -> Value {
        self.push(Op::AtLeast { weight }, &[x])
    }

    pub fn at_most(&mut self, x: Value, weight: WeightId) -> Value {
        self.push(Op::AtMost { weight }, &[x])
    }

    pub fn gelu(&mut self, x: Value) -> Value {
        self.push(Op::Gelu, &[x])
    }

    pub fn sigmoid(&mut self, x: Value) -> Value {
        self.push(Op::Sigmoid, &[x])
    }

    pub fn relu(&mut self, x: Value) -> Value {
        self.push(Op::Relu, &[x])
    }

    pub fn halving_conv(&mut self, weight: WeightId, x: Value, channels: u32) -> Value {
        self.push(Op::HalvingConv { weight, channels }, &[x])
    }

    pub fn causal_conv(&mut self, weight: WeightId, x: Value) -> Value {
        self.push(Op::CausalConv { weight }, &[x])
    }

    pub fn softcap(&mut self, x: Value, cap: f32) -> Value {
        self.push(Op::Softcap { cap }, &[x])
    }

    pub fn rope(&mut self, x: Value, head_dim: u32, base: f32, factors: Option<WeightId>) -> Value {
        self.push(Op::Rope { head_dim, base, factors }, &[x])
    }

    /// Appends to a layer's cache; later layers find the result with [`Builder::kv_of`].
    pub fn kv_append(&mut self, cache: CacheId, k: Value, v: Value) -> Value {
        let kv = self.push(Op::KvAppend { cache }, &[k, v]);
        self.caches.insert(self.graph.cache(cache).layer, kv);
        kv
    }

    /// The cache another layer has written, if it has.
    pub fn kv_of(&self, layer: u32) -> Option<Value> {
        self.caches.get(&layer).copied()
    }

    pub fn attention(&mut self, q: Value, kv: Value, heads: u32) -> Value {
        self.push(Op::Attention { heads }, &[q, kv])
    }

    pub fn attention_ahead(&mut self, q: Value, kv: Value, heads: u32) -> Value {
        self.push(Op::AttentionAhead { heads }, &[q, kv])
    }

    pub fn attention_before(&mut self, q: Value, kv: Value, heads: u32) -> Value {
        self.push(Op::AttentionBefore { heads }, &[q, kv])
    }

    pub fn grid_rope(&mut self, x: Value, head_dim: u32, base: f32) -> Value {
        self.push(Op::GridRope { head_dim, base }, &[x])
    }

    pub fn full_attention(&mut self, q: Value, k: Value, v: Value, heads: u32) -> Value {
        self.push(Op::FullAttention { heads }, &[q, k, v])
    }

    /// Attention over a row and those before it, `reach` in all, whose scores know the distance through `weight`.
    pub fn near_attention(
        &mut self,
        [q, k, v]: [Value; 3],
        heads: u32,
        reach: u32,
        cap: f32,
        weight: WeightId,
    ) -> Value {
        self.push(Op::NearAttention { heads, reach, cap, weight }, &[q, k, v])
    }

    /// Declares the graph's result.
    pub fn output(&mut self, value: Value) {
        self.graph.output = Some(value);
    }

    /// Where construction stands.
    pub fn mark(&self) -> Mark {
        Mark(self.graph.nodes.len())
    }

    /// Names what was built since `mark`: the last unnamed node gets the binding's name, the ones before it the
    /// binding's name and their operation's. `#[dataflow]` writes these calls.
    pub fn bind(&mut self, mark: Mark, name: &str, line: u32) {
        let mut unnamed = self.graph.nodes[mark.0..].iter_mut().filter(|n| n.name.is_empty()).rev();
        if let Some(last) = unnamed.next() {
            (last.name, last.line) = (name.to_string(), line);
        }
        for node in unnamed {
            (node.name, node.line) = (format!("{name}.{}", node.op.name()), line);
        }
    }

    /// Puts `scope.` before the names given since `mark`, unless an inner function has put its own.
    pub fn scope(&mut self, mark: Mark, scope: &str) {
        for (node, scoped) in self.graph.nodes.iter_mut().zip(&mut self.scoped).skip(mark.0) {
            if !node.name.is_empty() && !std::mem::replace(scoped, true) {
                node.name = format!("{scope}.{}", node.name);
            }
        }
    }

    /// The finished graph, checked.
    pub fn finish(mut self) -> Result<Graph, VerifyError> {
        let mut taken: HashSet<(Option<u32>, String)> = HashSet::new();
        for node in self.graph.nodes.iter_mut().filter(|n| !n.name.is_empty()) {
            let (base, mut n) = (node.name.clone(), 1);
            while !taken.insert((node.layer, node.name.clone())) {
                n += 1;
                node.name = format!("{base}.{n}");
            }
        }
        if let Some((id, source)) = self.error {
            return Err(VerifyError::Type { node: self.graph.full_name(id), source });
        }
        verify(&self.graph)?;
        Ok(self.graph)
    }

    fn push(&mut self, op: Op, inputs: &[Value]) -> Value {
        let types: Vec<Type> = inputs.iter().map(|&i| self.graph.node(i).ty).collect();
        let id = NodeId(self.graph.nodes.len() as u32);
        let ty = infer(&self.graph, &op, &types).unwrap_or_else(|error| {
            self.error.get_or_insert((id, error));
            types.first().copied().unwrap_or(Type::f32(RowCount::Chunk, 1))
        });
        let (layer, name) = (self.layer, String::new());
        self.scoped.push(false);
        self.graph.nodes.push(Node { op, inputs: inputs.to_vec(), ty, layer, name, line: 0 });
        id
    }
}
