//! One graph a case, built with an obstacle to the pass it is for, or without.

use gemma4c_blocks::DType::{F32, Q4_0, Q8_0};
use gemma4c_graph::{Builder, Cache, Part, Value, WeightId};

/// Builds the case, with the obstacle or without, and returns its output.
type Build = fn(&mut Builder, bool) -> Value;

/// The pass, the obstacle, and the graph.
pub const CASES: [(&str, &str, Build); 22] = [
    ("fold-constants", "a factor before the tied table's rows are used", |g, obstacle| {
        let (table, tokens) = (g.weight("embd", Q8_0, &[32, 100]), g.tokens());
        let rows = g.gather(table, tokens);
        let x = named(g, "scaled", |g| g.scale(rows, if obstacle { 16.0 } else { 1.0 }));
        named(g, "logits", |g| g.matmul(table, x))
    }),
    ("fold-constants", "a factor for rows of a table that nothing else reads", |g, obstacle| {
        let x = rows(g, 8);
        named(g, "scaled", |g| g.scale(x, if obstacle { 16.0 } else { 1.0 }))
    }),
    ("scale-gathers", "rows that are also read as they are", |g, obstacle| {
        let x = rows(g, 8);
        let scaled = named(g, "scaled", |g| g.scale(x, 16.0));
        let other = if obstacle { x } else { scaled };
        g.add(scaled, other)
    }),
    ("per-layer-inputs", "a norm without a weight", |g, obstacle| per_layer_inputs(g, !obstacle, [false; 2])),
    ("per-layer-inputs", "a sum's operand that is read twice", |g, obstacle| {
        per_layer_inputs(g, true, [obstacle, false])
    }),
    ("per-layer-inputs", "a table's row that is read unscaled too", |g, obstacle| {
        per_layer_inputs(g, true, [false, obstacle])
    }),
    ("geglu", "gate and up of different types", |g, obstacle| {
        let (x, gate) = (rows(g, 32), g.weight("gate", Q8_0, &[32, 64]));
        let up = g.weight("up", if obstacle { Q4_0 } else { Q8_0 }, &[32, 64]);
        gated(g, gate, up, x, x, false)
    }),
    ("geglu", "an up that is read twice", |g, obstacle| {
        let (x, gate, up) = (rows(g, 32), g.weight("gate", Q8_0, &[32, 64]), g.weight("up", Q8_0, &[32, 64]));
        gated(g, gate, up, x, x, obstacle)
    }),
    ("geglu", "gate and up of different rows", |g, obstacle| {
        let (x, gate, up) = (rows(g, 32), g.weight("gate", Q8_0, &[32, 64]), g.weight("up", Q8_0, &[32, 64]));
        let other = if obstacle { g.softcap(x, 30.0) } else { x };
        gated(g, gate, up, x, other, false)
    }),
    ("geglu", "experts whose halves overlap", |g, obstacle| {
        let (x, routing) = (rows(g, 32), routing(g));
        let both = g.weight("gate_up", Q8_0, &[32, 128, 4]);
        let gate = g.expert_matmul(both, Part { first: 0, len: 64 }, x, routing);
        let up = g.expert_matmul(both, Part { first: if obstacle { 32 } else { 64 }, len: 64 }, x, routing);
        named(g, "product", |g| {
            let activated = g.gelu(gate);
            g.mul(activated, up)
        })
    }),
    ("per-layer-gate", "a gate that is read twice", |g, obstacle| {
        let (x, slices, gate) = (rows(g, 32), rows(g, 192), g.weight("gate", Q8_0, &[32, 64]));
        let raw = g.matmul(gate, x);
        let product = named(g, "product", |g| {
            let activated = g.gelu(raw);
            let own = g.columns(slices, 64, 64);
            g.mul(activated, own)
        });
        also(g, obstacle, product, raw)
    }),
    ("join-products", "queries and keys of different types", |g, obstacle| {
        let (x, q) = (rows(g, 32), g.weight("q", Q8_0, &[32, 64]));
        let k = g.weight("k", if obstacle { Q4_0 } else { Q8_0 }, &[32, 64]);
        let (q, k) = (named(g, "q", |g| g.matmul(q, x)), named(g, "k", |g| g.matmul(k, x)));
        g.add(q, k)
    }),
    ("patches", "queries that are not rotated", |g, obstacle| {
        let (x, norm) = (g.patches(8), g.weight("head_norm", F32, &[8]));
        let [q, k, v] = ["q", "k", "v"].map(|name| g.weight(name, F32, &[8, 8]));
        let (raw_q, raw_k, raw_v) = (g.matmul(q, x), g.matmul(k, x), g.matmul(v, x));
        let (normed_q, normed_k) = (g.group_norm(raw_q, Some(norm), 8, 1e-6), g.group_norm(raw_k, Some(norm), 8, 1e-6));
        let q = if obstacle { normed_q } else { g.grid_rope(normed_q, 8, 100.0) };
        let (k, v) = (g.grid_rope(normed_k, 8, 100.0), g.group_norm(raw_v, None, 8, 1e-6));
        let mixed = named(g, "mixed", |g| g.full_attention(q, k, v, 1));
        g.grid_mean(mixed, 1)
    }),
    ("clips", "a gate that is read twice", |g, obstacle| {
        let (x, gate, up) = (rows(g, 32), g.weight("gate", Q8_0, &[32, 64]), g.weight("up", Q8_0, &[32, 64]));
        let (gate, up, low) = (g.matmul(gate, x), g.matmul(up, x), g.weight("low", F32, &[1]));
        let product = named(g, "product", |g| {
            let bounded = g.at_least(gate, low);
            let activated = g.gelu(bounded);
            g.mul(activated, up)
        });
        also(g, obstacle, product, gate)
    }),
    ("epilogues", "an operand that may come later", |g, obstacle| {
        let (x, w) = (rows(g, 32), g.weight("w", Q8_0, &[32, 32]));
        let product = named(g, "product", |g| g.matmul(w, x));
        named(g, "after", |g| if obstacle { g.add(product, x) } else { g.softcap(product, 30.0) })
    }),
    ("heads", "queries and keys that are rotated differently", |g, obstacle| {
        heads(g, obstacle.then_some(Oddity::OtherBase))
    }),
    ("heads", "keys whose norm is read twice", |g, obstacle| heads(g, obstacle.then_some(Oddity::NormReadTwice))),
    ("heads", "values whose norm has a weight", |g, obstacle| heads(g, obstacle.then_some(Oddity::WeightedValues))),
    ("router", "logits that are read by others", |g, obstacle| {
        let (x, scale, w) = (rows(g, 8), g.weight("scale", F32, &[8]), g.weight("w", F32, &[8, 4]));
        let experts = g.weight("experts", F32, &[8, 4, 4]);
        let normed = g.rms_norm(x, None, 1e-6);
        let weighted = g.mul_weight(normed, scale);
        let scaled = g.scale(weighted, 0.5);
        let logits = g.matmul(w, scaled);
        let routing = named(g, "routing", |g| g.route(logits, 2));
        let down = g.expert_matmul(experts, Part { first: 0, len: 4 }, x, routing);
        let sum = g.expert_sum(down, routing, None);
        also(g, obstacle, sum, logits)
    }),
    ("expert-sums", "a part of the experts' rows", |g, obstacle| {
        let (x, routing, w) = (rows(g, 8), routing(g), g.weight("w", F32, &[8, 6, 4]));
        let down = g.expert_matmul(w, Part { first: 0, len: if obstacle { 4 } else { 6 } }, x, routing);
        named(g, "sum", |g| g.expert_sum(down, routing, None))
    }),
    ("norms", "an update whose norm has no weight", |g, obstacle| {
        let (before, update, weight) = (rows(g, 8), rows(g, 8), g.weight("post", F32, &[8]));
        let update = g.rms_norm(update, (!obstacle).then_some(weight), 1e-6);
        named(g, "sum", |g| g.add(before, update))
    }),
    ("norms", "an update that is read twice", |g, obstacle| {
        let (before, update, weight) = (rows(g, 8), rows(g, 8), g.weight("post", F32, &[8]));
        let update = g.rms_norm(update, Some(weight), 1e-6);
        let sum = named(g, "sum", |g| g.add(before, update));
        also(g, obstacle, sum, update)
    }),
];

/// Names a node as `#[dataflow]` would.
pub fn named(g: &mut Builder, name: &str, build: impl FnOnce(&mut Builder) -> Value) -> Value {
    let mark = g.mark();
    let value = build(g);
    g.bind(mark, name, 0);
    value
}

/// f32 rows of a width, one a token.
pub fn rows(g: &mut Builder, width: u64) -> Value {
    let table = g.weight(&format!("table{width}"), F32, &[width, 100]);
    named(g, "rows", |g| {
        let tokens = g.tokens();
        g.gather(table, tokens)
    })
}

/// A routing of every row to 2 of 4 experts.
fn routing(g: &mut Builder) -> Value {
    let logits = rows(g, 4);
    g.route(logits, 2)
}

/// The result, which reads `value` as well where there is an obstacle.
fn also(g: &mut Builder, obstacle: bool, result: Value, value: Value) -> Value {
    if !obstacle {
        return result;
    }
    let capped = g.softcap(value, 30.0);
    let width = g.width(result);
    let w = g.weight("also", F32, &[g.width(capped) as u64, width as u64]);
    let other = g.matmul(w, capped);
    g.mul(result, other)
}

/// Two layers' inputs: a projection's norm and a table's row, added and scaled. What is `also_read`: the sum's operand,
/// the row.
fn per_layer_inputs(g: &mut Builder, weighted: bool, also_read: [bool; 2]) -> Value {
    let (x, project) = (rows(g, 32), g.weight("project", F32, &[32, 64]));
    let (norm, table, tokens) = (g.weight("norm", F32, &[32]), g.weight("table", F32, &[64, 100]), g.tokens());
    let projected = g.matmul(project, x);
    let scaled = g.scale(projected, 0.5);
    let normed = named(g, "normed", |g| g.group_norm(scaled, weighted.then_some(norm), 32, 1e-6));
    let row = g.gather(table, tokens);
    let operand = g.scale(row, 8.0);
    let sum = g.add(normed, operand);
    let out = g.scale(sum, 0.7);
    let out = also(g, also_read[0], out, operand);
    also(g, also_read[1], out, row)
}

/// `gelu(gate x) * (up y)`.
fn gated(g: &mut Builder, gate: WeightId, up: WeightId, x: Value, y: Value, up_is_read_twice: bool) -> Value {
    let (gate, up) = (g.matmul(gate, x), g.matmul(up, y));
    let product = named(g, "product", |g| {
        let activated = g.gelu(gate);
        g.mul(activated, up)
    });
    also(g, up_is_read_twice, product, up)
}

/// What is odd about an attention's heads.
#[derive(Clone, Copy, PartialEq)]
enum Oddity {
    OtherBase,
    NormReadTwice,
    WeightedValues,
}

/// Queries, keys and values of 2 heads of 4, and their attention.
fn heads(g: &mut Builder, oddity: Option<Oddity>) -> Value {
    let (x, norm) = (rows(g, 8), g.weight("norm", F32, &[4]));
    let cache = g.cache(Cache { layer: 0, kv_heads: 2, head_dim: 4, window: Some(16) });
    let is = |what: Oddity| oddity == Some(what);
    let q = named(g, "q", |g| {
        let normed = g.group_norm(x, Some(norm), 4, 1e-6);
        g.rope(normed, 4, if is(Oddity::OtherBase) { 1e6 } else { 1e4 }, None)
    });
    let k_normed = g.group_norm(x, Some(norm), 4, 1e-6);
    let k = g.rope(k_normed, 4, 1e4, None);
    let v = g.group_norm(x, is(Oddity::WeightedValues).then_some(norm), 4, 1e-6);
    let kv = g.kv_append(cache, k, v);
    let mixed = named(g, "mixed", |g| g.attention(q, kv, 2));
    also(g, is(Oddity::NormReadTwice), mixed, k_normed)
}
