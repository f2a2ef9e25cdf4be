//! Fuses what lies between the QKV product and attention: head norms, RoPE and the store into the KV cache.
//!
//! A layer that shares another's keys has queries only; the others have queries, keys and values, where the values may
//! be the raw keys.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Heads, KeyValueHeads, Kind, QueryHeads};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "heads",
    about: "head norms of queries, keys and values, their rotation, and the store into the cache",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let attentions: Vec<NodeId> =
        fused.graph.iter().filter(|(_, node)| is_attention(&node.op)).map(|(id, _)| id).collect();
    for attention in attentions {
        let (q, kv) = (fused.graph.node(attention).inputs[0], fused.graph.node(attention).inputs[1]);
        let queries = queries(fused, q);
        // Shared keys are fused in the layer that computes them.
        let own = fused.graph.node(kv).layer == fused.graph.node(attention).layer;
        let keys = if own { keys(fused, kv) } else { None };
        match (queries, keys) {
            (Some((mut heads, mut nodes)), Some((other, of_keys))) => {
                let together = fused.graph.node(q).ty.rows == fused.graph.node(kv).ty.rows;
                if !together {
                    log.refuse(fused.graph.full_name(q), "queries are needed for fewer rows than keys");
                    log.merge(fused, Kind::Heads(heads), &nodes);
                    log.merge(fused, Kind::Heads(other), &of_keys);
                } else if (heads.dim, heads.base, heads.factors, heads.eps)
                    != (other.dim, other.base, other.factors, other.eps)
                {
                    log.refuse(fused.graph.full_name(q), "queries and keys are rotated differently");
                } else {
                    heads.kv = other.kv;
                    nodes.extend(of_keys);
                    log.merge(fused, Kind::Heads(heads), &nodes);
                }
            }
            (Some((heads, nodes)), None) if !own => _ = log.merge(fused, Kind::Heads(heads), &nodes),
            _ => log.refuse(fused.graph.full_name(attention), "its queries or keys are not normed and rotated heads"),
        }
    }
}

fn is_attention(op: &Op) -> bool {
    matches!(op, Op::Attention { .. } | Op::AttentionAhead { .. } | Op::AttentionBefore { .. })
}

/// `rope(norm(raw))` of heads, where no other node reads the intermediate values.
fn queries(fused: &Fused, q: NodeId) -> Option<(Heads, Vec<NodeId>)> {
    let (heads, norm, raw, weight) = rotated(fused, q)?;
    Some((Heads { q: Some(QueryHeads { raw, weight, out: q }), ..heads }, vec![norm, q]))
}

fn keys(fused: &Fused, kv: NodeId) -> Option<(Heads, Vec<NodeId>)> {
    let graph = &fused.graph;
    let Op::KvAppend { cache } = graph.node(kv).op else { return None };
    let (k, v) = (graph.node(kv).inputs[0], graph.node(kv).inputs[1]);
    let (heads, k_norm, k_raw, k_weight) = rotated(fused, k)?;
    let Op::RmsNorm { weight: None, group, eps } = graph.node(v).op else { return None };
    if group != heads.dim || eps != heads.eps || fused.sole_user(v) != Some(kv) {
        return None;
    }
    let v_raw = graph.node(v).inputs[0];
    let of = KeyValueHeads { k: k_raw, k_weight, v: v_raw, cache, out: kv };
    Some((Heads { kv: Some(of), ..heads }, vec![k_norm, k, v, kv]))
}

/// The heads' common part, the norm, the raw value, and the norm's weight.
fn rotated(fused: &Fused, out: NodeId) -> Option<(Heads, NodeId, NodeId, crate::WeightId)> {
    let graph = &fused.graph;
    let Op::Rope { head_dim, base, factors } = graph.node(out).op else { return None };
    let norm = graph.node(out).inputs[0];
    let Op::RmsNorm { weight: Some(weight), group, eps } = graph.node(norm).op else { return None };
    if group != head_dim || fused.sole_user(norm) != Some(out) || fused.users(out).len() != 1 {
        return None;
    }
    let heads = Heads { dim: head_dim, base, factors, eps, q: None, kv: None };
    Some((heads, norm, graph.node(norm).inputs[0], weight))
}
