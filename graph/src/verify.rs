//! The specification of a well-formed graph, checked.
//!
//! 1. Every id in a node (input, weight, cache) exists.
//! 2. A node reads only nodes that stand before it: the vector is an order in which the graph can run.
//! 3. Every node's type is what [`infer`] gives for it.
//! 4. Each cache is appended to exactly once, or borrowed and never appended to. A cache's value is read only by
//!    attention: a borrowed one by attention to what lies before a row, another by the other kinds.
//! 5. There is an output: f32 rows. What is kept besides exists.
//! 6. A named node's full name is its own.

use std::collections::{HashMap, HashSet};

use gemma4c_ops::{CacheId, Elem, Op, Type, TypeError, infer};

use crate::graph::{Graph, NodeId};

/// The first rule a graph breaks, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    #[error("node {node} refers to {what}, which does not exist")]
    Dangling { node: String, what: String },
    #[error("node {node} reads {input}, which does not stand before it")]
    Order { node: String, input: String },
    #[error("node {node}: {source}")]
    Type { node: String, source: TypeError },
    #[error("node {node} is declared as {found}, but its operation gives {expected}")]
    WrongType { node: String, expected: Type, found: Type },
    #[error(
        "node {node} reads the cache of layer {layer}, which only attention may, and a borrowed one only attention to what lies before"
    )]
    CacheRead { node: String, layer: u32 },
    #[error("the cache of layer {layer} is appended to or borrowed {times} times in one pass, not once")]
    Appends { layer: u32, times: usize },
    #[error("the graph has no output of f32 rows")]
    Output,
    #[error("two nodes are called {name}")]
    Name { name: String },
}

/// Whether `reader` may read the cache that `cache` gives it.
fn may_read(cache: Op, reader: Op) -> bool {
    match reader {
        Op::Attention { .. } | Op::AttentionAhead { .. } => !matches!(cache, Op::BorrowKv { .. }),
        Op::AttentionBefore { .. } => matches!(cache, Op::BorrowKv { .. }),
        _ => false,
    }
}

/// Checks the whole specification.
pub fn verify(graph: &Graph) -> Result<(), VerifyError> {
    let mut appends: HashMap<CacheId, usize> = HashMap::new();
    let mut names = HashSet::new();
    for (id, node) in graph.iter() {
        let name = graph.full_name(id);
        let dangling = |what: String| Err(VerifyError::Dangling { node: name.clone(), what });
        if let Some(w) = node.op.weight().filter(|w| w.index() >= graph.weights.len()) {
            return dangling(format!("weight {}", w.0));
        }
        for &input in &node.inputs {
            if input.index() >= graph.nodes.len() {
                return dangling(format!("node {}", input.0));
            }
            if input >= id {
                return Err(VerifyError::Order { node: name, input: graph.full_name(input) });
            }
            if let Elem::Kv(cache) = graph.node(input).ty.elem
                && !may_read(graph.node(input).op, node.op)
            {
                return Err(VerifyError::CacheRead { node: name, layer: graph.cache(cache).layer });
            }
        }
        if let Some(cache) = node.op.cache() {
            if cache.index() >= graph.caches.len() {
                return dangling(format!("cache {}", cache.0));
            }
            *appends.entry(cache).or_default() += 1;
        }
        let inputs: Vec<Type> = node.inputs.iter().map(|&i| graph.node(i).ty).collect();
        let expected =
            infer(graph, &node.op, &inputs).map_err(|source| VerifyError::Type { node: name.clone(), source })?;
        if expected != node.ty {
            return Err(VerifyError::WrongType { node: name, expected, found: node.ty });
        }
        if !names.insert(name.clone()) {
            return Err(VerifyError::Name { name });
        }
    }
    for (i, cache) in graph.caches.iter().enumerate() {
        let times = appends.get(&CacheId(i as u32)).copied().unwrap_or(0);
        if times != 1 {
            return Err(VerifyError::Appends { layer: cache.layer, times });
        }
    }
    if let Some(id) = graph.kept.iter().find(|id| id.index() >= graph.nodes.len()) {
        return Err(VerifyError::Dangling { node: "the list of kept values".into(), what: format!("node {}", id.0) });
    }
    let is_rows_of_f32 = |id: NodeId| graph.nodes.get(id.index()).is_some_and(|n| n.ty.elem == Elem::F32);
    if graph.output.is_some_and(is_rows_of_f32) { Ok(()) } else { Err(VerifyError::Output) }
}
