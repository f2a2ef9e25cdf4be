//! Which values are bounded, whatever a model is given: those that an RMS norm or attention leaves. Their readers may
//! take them in f16, which has three bits more than bf16 and a far smaller range.
//!
//! After a norm over n values no one is larger than the root of n times the largest weight. Attention is a mean of
//! values, so it is bounded as they are.

use std::collections::HashSet;

use gemma4c_graph::{Graph, NodeId, Op};

use super::error::LowerError;
use super::model::ReadFloats;

/// What a value may reach, at most: half of the largest f16, so that rounding does not come near that.
const LARGEST: f32 = 32768.0;

/// The values of a graph that stay below it.
pub fn of(graph: &Graph, read: &ReadFloats<'_>) -> Result<HashSet<NodeId>, LowerError> {
    let mut bounded = HashSet::new();
    for (id, node) in graph.nodes.iter().enumerate().map(|(at, node)| (NodeId(at as u32), node)) {
        let is_bounded = match node.op {
            Op::RmsNorm { weight, group, .. } => {
                let weights = weight.map_or_else(|| Ok(vec![1.0]), read)?;
                let largest = weights.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
                (group as f32).sqrt() * largest < LARGEST
            }
            Op::Attention { .. } | Op::AttentionAhead { .. } | Op::AttentionBefore { .. } => {
                // The cache is what was appended to it last: keys, then values.
                graph.node(node.inputs[1]).inputs.get(1).is_some_and(|values| bounded.contains(values))
            }
            _ => false,
        };
        if is_bounded {
            bounded.insert(id);
        }
    }
    Ok(bounded)
}
