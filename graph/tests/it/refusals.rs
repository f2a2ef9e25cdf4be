//! What inference and the verifier refuse: at least one case a rule, and the words a person reads, as one snapshot.

use std::fmt::Write;

use gemma4c_blocks::DType::F32;
use gemma4c_graph::{
    Builder, Cache, CacheId, Delta, Elem, Graph, NodeId, Op, Part, RowCount, Type, Value, VerifyError, WeightId, verify,
};

/// Names a node as `#[dataflow]` would.
fn named(g: &mut Builder, name: &str, build: impl FnOnce(&mut Builder) -> Value) -> Value {
    let mark = g.mark();
    let value = build(g);
    g.bind(mark, name, 0);
    value
}

/// f32 rows of a width, one a token.
fn rows(g: &mut Builder, width: u64) -> Value {
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

/// A cache of one layer: 2 heads of 4.
fn cache(g: &mut Builder) -> CacheId {
    g.cache(Cache { layer: 0, kv_heads: 2, head_dim: 4, window: Some(16) })
}

fn kv(g: &mut Builder) -> Value {
    let (cache, x) = (cache(g), rows(g, 8));
    g.kv_append(cache, x, x)
}

/// A product of rows 8 wide to rows 6 wide, and a pair that changes it.
fn adapted(g: &mut Builder, a: &[u64], b: &[u64], factor: f32) -> Value {
    let (w, a, b, x) = (g.weight("w", F32, &[8, 6]), g.weight("a", F32, a), g.weight("b", F32, b), rows(g, 8));
    g.adapt(w, Delta { a, b, factor, first: 0 });
    g.matmul(w, x)
}

type Build = fn(&mut Builder) -> Value;

/// Each builds one operation whose inputs do not fit.
const MISFITS: [(&str, Build); 69] = [
    ("a hidden state of nothing", |g| g.hidden(0)),
    ("parts of other rows", |g| {
        let x = rows(g, 8);
        let asked = g.take_asked(x);
        g.concat(x, asked)
    }),
    ("parts that are no floats", |g| {
        let (x, tokens) = (rows(g, 8), g.tokens());
        g.concat(x, tokens)
    }),
    ("candidates without a routing", |g| {
        let x = rows(g, 8);
        g.candidates(x, 2)
    }),
    ("candidates of empty groups", |g| {
        let routing = routing(g);
        g.candidates(routing, 0)
    }),
    ("a product of tokens that are floats", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 100]), rows(g, 8));
        g.token_matmul(w, x, x)
    }),
    ("values of other tokens spread", |g| {
        let (x, routing) = (rows(g, 8), routing(g));
        let tokens = g.candidates(routing, 3);
        g.spread_tokens(x, tokens, 100)
    }),
    ("attention before the only position", |g| {
        let q = rows(g, 8);
        let kv = g.borrow_kv(Cache { layer: 0, kv_heads: 2, head_dim: 4, window: Some(1) });
        g.attention_before(q, kv, 2)
    }),
    ("gather from a vector", |g| {
        let (table, tokens) = (g.weight("w", F32, &[8]), g.tokens());
        g.gather(table, tokens)
    }),
    ("gather by floats", |g| {
        let (table, x) = (g.weight("w", F32, &[8, 100]), rows(g, 8));
        g.gather(table, x)
    }),
    ("gather rows too wide to be one", |g| {
        let (table, tokens) = (g.weight("w", F32, &[1 << 32, 2]), g.tokens());
        g.gather(table, tokens)
    }),
    ("arithmetic on tokens", |g| {
        let tokens = g.tokens();
        g.gelu(tokens)
    }),
    ("take_asked twice", |g| {
        let x = rows(g, 8);
        let asked = g.take_asked(x);
        g.take_asked(asked)
    }),
    ("columns beyond the row", |g| {
        let x = rows(g, 8);
        g.columns(x, 5, 4)
    }),
    ("no columns", |g| {
        let x = rows(g, 8);
        g.columns(x, 5, 0)
    }),
    ("columns whose end overflows", |g| {
        let x = rows(g, 8);
        g.columns(x, u32::MAX, 2)
    }),
    ("matmul of another width", |g| {
        let (w, x) = (g.weight("w", F32, &[9, 4]), rows(g, 8));
        g.matmul(w, x)
    }),
    ("matmul with stacked experts", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 4, 2]), rows(g, 8));
        g.matmul(w, x)
    }),
    ("an adapter of other inputs", |g| adapted(g, &[9, 4], &[4, 6], 1.0)),
    ("an adapter of other outputs", |g| adapted(g, &[8, 4], &[4, 7], 1.0)),
    ("an adapter of two ranks", |g| adapted(g, &[8, 4], &[5, 6], 1.0)),
    ("an adapter that is no matrix", |g| adapted(g, &[8], &[4, 6], 1.0)),
    ("an adapter of no strength at all", |g| adapted(g, &[8, 4, 3], &[4, 6, 3], f32::NAN)),
    ("expert_matmul without a routing", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 6, 4]), rows(g, 8));
        g.expert_matmul(w, Part { first: 0, len: 6 }, x, x)
    }),
    ("expert_matmul with the routing of other rows", |g| {
        let (w, x, routing) = (g.weight("w", F32, &[8, 6, 4]), rows(g, 8), routing(g));
        let asked = g.take_asked(x);
        g.expert_matmul(w, Part { first: 0, len: 6 }, asked, routing)
    }),
    ("expert_matmul of another number of experts", |g| {
        let (w, x, routing) = (g.weight("w", F32, &[8, 6, 5]), rows(g, 8), routing(g));
        g.expert_matmul(w, Part { first: 0, len: 6 }, x, routing)
    }),
    ("expert_matmul of another width", |g| {
        let (w, x, routing) = (g.weight("w", F32, &[8, 6, 4]), rows(g, 24), routing(g));
        g.expert_matmul(w, Part { first: 0, len: 6 }, x, routing)
    }),
    ("expert_matmul of rows the experts do not have", |g| {
        let (w, x, routing) = (g.weight("w", F32, &[8, 6, 4]), rows(g, 8), routing(g));
        g.expert_matmul(w, Part { first: 3, len: 4 }, x, routing)
    }),
    ("expert_matmul of no rows", |g| {
        let (w, x, routing) = (g.weight("w", F32, &[8, 6, 4]), rows(g, 8), routing(g));
        g.expert_matmul(w, Part { first: 3, len: 0 }, x, routing)
    }),
    ("norm of groups that do not divide", |g| {
        let x = rows(g, 8);
        g.group_norm(x, None, 3, 1e-6)
    }),
    ("norm of empty groups", |g| {
        let x = rows(g, 8);
        g.group_norm(x, None, 0, 1e-6)
    }),
    ("norm with a weight of another width", |g| {
        let (w, x) = (g.weight("w", F32, &[8]), rows(g, 8));
        g.group_norm(x, Some(w), 4, 1e-6)
    }),
    ("route to more experts than there are", |g| {
        let x = rows(g, 4);
        g.route(x, 5)
    }),
    ("expert_sum of rows that are not whole slots", |g| {
        let (x, routing) = (rows(g, 7), routing(g));
        g.expert_sum(x, routing, None)
    }),
    ("expert_sum with another number of scales", |g| {
        let (w, x, routing) = (g.weight("w", F32, &[3]), rows(g, 8), routing(g));
        g.expert_sum(x, routing, Some(w))
    }),
    ("add of different widths", |g| {
        let (a, b) = (rows(g, 8), rows(g, 4));
        g.add(a, b)
    }),
    ("mul of all rows and the asked ones", |g| {
        let x = rows(g, 8);
        let asked = g.take_asked(x);
        g.mul(x, asked)
    }),
    ("mul_weight of another width", |g| {
        let (w, x) = (g.weight("w", F32, &[3]), rows(g, 8));
        g.mul_weight(x, w)
    }),
    ("rope of an odd head", |g| {
        let x = rows(g, 9);
        g.rope(x, 3, 1e4, None)
    }),
    ("rope with another number of factors", |g| {
        let (w, x) = (g.weight("w", F32, &[4]), rows(g, 8));
        g.rope(x, 4, 1e4, Some(w))
    }),
    ("kv_append of another width", |g| {
        let (cache, x) = (cache(g), rows(g, 4));
        g.kv_append(cache, x, x)
    }),
    ("attention without a cache", |g| {
        let x = rows(g, 8);
        g.attention(x, x, 2)
    }),
    ("attention of heads that do not share evenly", |g| {
        let (kv, q) = (kv(g), rows(g, 12));
        g.attention(q, kv, 3)
    }),
    ("patches without pixels", |g| g.patches(0)),
    ("take_asked of patches", |g| {
        let x = g.patches(8);
        g.take_asked(x)
    }),
    ("gather_text by floats", |g| {
        let (table, x) = (g.weight("w", F32, &[8, 100]), rows(g, 8));
        g.gather_text(table, 0, x)
    }),
    ("gather_text of a pad that the table does not have", |g| {
        let (table, tokens) = (g.weight("w", F32, &[8, 100]), g.tokens());
        g.gather_text(table, 100, tokens)
    }),
    ("place_soft among the asked rows", |g| {
        let x = rows(g, 8);
        let asked = g.take_asked(x);
        g.place_soft(asked)
    }),
    ("axis_rows of a table for one axis", |g| {
        let table = g.weight("w", F32, &[8, 20]);
        g.axis_rows(table, 0)
    }),
    ("axis_rows of an axis there is not", |g| {
        let table = g.weight("w", F32, &[8, 20, 2]);
        g.axis_rows(table, 2)
    }),
    ("grid_mean of tokens", |g| {
        let x = rows(g, 8);
        g.grid_mean(x, 3)
    }),
    ("grid_mean of no patches", |g| {
        let x = g.patches(8);
        g.grid_mean(x, 0)
    }),
    ("add_weight of another width", |g| {
        let (w, x) = (g.weight("w", F32, &[4]), rows(g, 8));
        g.add_weight(x, w)
    }),
    ("at_least of a matrix", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 1]), rows(g, 8));
        g.at_least(x, w)
    }),
    ("rope of patches", |g| {
        let x = g.patches(8);
        g.rope(x, 4, 1e4, None)
    }),
    ("grid_rope of a head without quarters", |g| {
        let x = g.patches(12);
        g.grid_rope(x, 6, 100.0)
    }),
    ("grid_rope of tokens", |g| {
        let x = rows(g, 8);
        g.grid_rope(x, 4, 100.0)
    }),
    ("full_attention of heads that do not divide", |g| {
        let x = g.patches(8);
        g.full_attention(x, x, x, 3)
    }),
    ("full_attention of different rows", |g| {
        let x = g.patches(8);
        let soft = g.grid_mean(x, 2);
        g.full_attention(x, soft, soft, 2)
    }),
    ("sub_mean of groups that do not divide", |g| {
        let x = rows(g, 8);
        g.sub_group_mean(x, 3)
    }),
    ("halving_conv of other channels", |g| {
        let (w, x) = (g.weight("w", F32, &[9, 4]), g.patches(8));
        g.halving_conv(w, x, 2)
    }),
    ("halving_conv of rows that are no columns", |g| {
        let (w, x) = (g.weight("w", F32, &[27, 4]), g.patches(8));
        g.halving_conv(w, x, 3)
    }),
    ("halving_conv of tokens", |g| {
        let (w, x) = (g.weight("w", F32, &[9, 4]), rows(g, 8));
        g.halving_conv(w, x, 1)
    }),
    ("causal_conv of another width", |g| {
        let (w, x) = (g.weight("w", F32, &[5, 4]), g.patches(8));
        let soft = g.grid_mean(x, 1);
        g.causal_conv(w, soft)
    }),
    ("causal_conv of patches", |g| {
        let (w, x) = (g.weight("w", F32, &[5, 8]), g.patches(8));
        g.causal_conv(w, x)
    }),
    ("near_attention of patches", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 8]), g.patches(8));
        g.near_attention([x, x, x], 2, 12, 50.0, w)
    }),
    ("near_attention that sees nothing", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 8]), g.patches(8));
        let soft = g.grid_mean(x, 1);
        g.near_attention([soft, soft, soft], 2, 0, 50.0, w)
    }),
    ("near_attention of heads that do not divide", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 8]), g.patches(8));
        let soft = g.grid_mean(x, 1);
        g.near_attention([soft, soft, soft], 3, 12, 50.0, w)
    }),
    ("near_attention with distances of another width", |g| {
        let (w, x) = (g.weight("w", F32, &[8, 4]), g.patches(8));
        let soft = g.grid_mean(x, 1);
        g.near_attention([soft, soft, soft], 2, 12, 50.0, w)
    }),
];

/// Attention over a cache, and an LM head: all that the rules about order, state and output need.
fn model() -> Graph {
    let mut g = Builder::new();
    let x = rows(&mut g, 8);
    g.set_layer(Some(0));
    let cache = cache(&mut g);
    let kv = named(&mut g, "kv", |g| g.kv_append(cache, x, x));
    let mixed = named(&mut g, "mixed", |g| g.attention(x, kv, 2));
    g.set_layer(None);
    let head = g.weight("head", F32, &[8, 100]);
    let logits = named(&mut g, "logits", |g| {
        let asked = g.take_asked(mixed);
        g.matmul(head, asked)
    });
    g.output(logits);
    g.finish().unwrap()
}

type Break = fn(&mut Graph);
type IsExpected = fn(&VerifyError) -> bool;

/// Each breaks one rule of the specification in the model above, and says which error it must be.
const BREAKS: [(&str, Break, IsExpected); 15] = [
    ("a weight that does not exist", |g| op_of(g, "logits", Op::MatMul { weight: WeightId(7) }), is_dangling),
    ("an adapter that does not exist", |g| op_of(g, "mixed", Op::Widen { weight: WeightId(9) }), is_dangling),
    ("a cache that does not exist", |g| op_of(g, "kv", Op::KvAppend { cache: CacheId(1) }), is_dangling),
    ("an input that does not exist", |g| g.nodes[3].inputs[1] = NodeId(99), is_dangling),
    ("an input that stands later", |g| g.nodes[2].inputs[0] = NodeId(4), |e| matches!(e, VerifyError::Order { .. })),
    ("a node that reads itself", |g| g.nodes[3].inputs[0] = NodeId(3), |e| matches!(e, VerifyError::Order { .. })),
    (
        "inputs that do not fit",
        |g| op_of(g, "mixed", Op::Attention { heads: 3 }),
        |e| matches!(e, VerifyError::Type { .. }),
    ),
    (
        "a type that is not the node's",
        |g| g.nodes[1].ty = Type::f32(RowCount::Chunk, 9),
        |e| matches!(e, VerifyError::WrongType { .. }),
    ),
    (
        "arithmetic on a cache",
        |g| {
            let ty = g.nodes[2].ty;
            (g.nodes[3].op, g.nodes[3].inputs, g.nodes[3].ty) = (Op::Gelu, vec![NodeId(2)], ty);
        },
        |e| matches!(e, VerifyError::CacheRead { .. }),
    ),
    (
        "attention before, over a cache that is appended to",
        |g| op_of(g, "mixed", Op::AttentionBefore { heads: 2 }),
        |e| matches!(e, VerifyError::CacheRead { .. }),
    ),
    (
        "a borrowed cache with a key at the row's own position",
        |g| {
            (g.nodes[2].op, g.nodes[2].inputs) = (Op::BorrowKv { cache: CacheId(0) }, vec![]);
        },
        |e| matches!(e, VerifyError::CacheRead { .. }),
    ),
    (
        "a cache nobody appends to",
        |g| g.caches.push(Cache { layer: 1, kv_heads: 2, head_dim: 4, window: None }),
        |e| matches!(e, VerifyError::Appends { times: 0, .. }),
    ),
    (
        "a cache appended to twice",
        |g| {
            let mut again = g.nodes[2].clone();
            again.name = "again".into();
            g.nodes.push(again);
        },
        |e| matches!(e, VerifyError::Appends { times: 2, .. }),
    ),
    ("no output", |g| g.output = None, |e| *e == VerifyError::Output),
    ("two nodes of one name", |g| g.nodes[3].name = "kv".into(), |e| matches!(e, VerifyError::Name { .. })),
];

fn is_dangling(error: &VerifyError) -> bool {
    matches!(error, VerifyError::Dangling { .. })
}

fn op_of(g: &mut Graph, name: &str, op: Op) {
    g.nodes.iter_mut().find(|n| n.name == name).unwrap().op = op;
}

#[test]
fn each_refusal_has_its_words() {
    let mut texts = String::from("-- inference\n");
    for (name, build) in MISFITS {
        let mut g = Builder::new();
        let value = named(&mut g, "it", build);
        g.output(value);
        let error = g.finish().expect_err(name);
        assert!(matches!(error, VerifyError::Type { .. }), "{name}: {error}");
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    texts.push_str("\n-- the verifier\n");
    for (name, break_it, is_expected) in BREAKS {
        let mut graph = model();
        break_it(&mut graph);
        let error = verify(&graph).expect_err(name);
        assert!(is_expected(&error), "{name}: {error}");
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    insta::with_settings!({
        snapshot_path => "../../../snapshots/errors",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!("graph", texts) });
}

#[test]
fn an_output_must_be_rows_of_floats() {
    let mut graph = model();
    graph.output = Some(NodeId(2));
    assert!(matches!(graph.nodes[2].ty.elem, Elem::Kv(_)));
    assert_eq!(verify(&graph), Err(VerifyError::Output));
    graph.output = Some(NodeId(99));
    assert_eq!(verify(&graph), Err(VerifyError::Output));
}

/// After a mistake building goes on; the error names the first binding that was wrong, not what followed from it.
#[test]
fn the_first_mistake_is_the_one_reported() {
    let mut g = Builder::new();
    let x = rows(&mut g, 8);
    let w = g.weight("narrow", F32, &[4, 4]);
    g.set_layer(Some(3));
    let first = named(&mut g, "first", |g| g.matmul(w, x));
    let second = named(&mut g, "second", |g| g.columns(first, 100, 100));
    g.output(second);
    let error = g.finish().unwrap_err().to_string();
    assert!(error.starts_with("node blk.3.first: matmul:"), "{error}");
}
