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

#[cfg(test)]
mod tests {
    use gemma4c_blocks::DType::F32;
    use gemma4c_graph::{Builder, Cache};

    use super::*;

    /// Norms of four values with weights as large as `largest`, and attention over them.
    fn bounded(largest: f32) -> [bool; 4] {
        let mut g = Builder::new();
        let (table, weight) = (g.weight("token_embd.weight", F32, &[4, 9]), g.weight("norm.weight", F32, &[4]));
        let tokens = g.tokens();
        let embedded = g.gather(table, tokens);
        let (weighted, plain) = (g.rms_norm(embedded, Some(weight), 1e-6), g.rms_norm(embedded, None, 1e-6));
        g.set_layer(Some(0));
        let cache = |g: &mut Builder| g.cache(Cache { layer: 0, kv_heads: 1, head_dim: 4, window: None });
        let (of_norms, of_embedding) = (cache(&mut g), cache(&mut g));
        let normed = g.kv_append(of_norms, embedded, weighted);
        let raw = g.kv_append(of_embedding, plain, embedded);
        let (over_norms, over_embedding) = (g.attention(plain, normed, 1), g.attention(plain, raw, 1));
        let both = g.add(over_norms, over_embedding);
        let logits = g.matmul(table, both);
        g.output(logits);
        let graph = g.finish().expect("a graph");
        let found = of(&graph, &|_| Ok(vec![0.5, -largest, 0.0, 1.0])).expect("weights that can be read");
        let is = |kind: fn(&Op) -> bool, at: usize| {
            let all = graph.nodes.iter().enumerate().filter(|(_, node)| kind(&node.op));
            found.contains(&NodeId(all.map(|(at, _)| at as u32).nth(at).expect("the node is there")))
        };
        let norm: fn(&Op) -> bool = |op| matches!(op, Op::RmsNorm { .. });
        let attention: fn(&Op) -> bool = |op| matches!(op, Op::Attention { .. });
        [is(norm, 0), is(norm, 1), is(attention, 0), is(attention, 1)]
    }

    #[test]
    fn norms_are_bounded_by_their_weights_and_attention_by_its_values() {
        assert_eq!(bounded(16383.0), [true, true, true, false]);
        // Twice that is no less than the limit.
        assert_eq!(bounded(16384.0), [false, true, false, false]);
        assert_eq!(bounded(f32::INFINITY), [false, true, false, false]);
    }
}
