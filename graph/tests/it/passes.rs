//! Every pass on a graph made for it: what it fuses, what it leaves alone, and the reason a person is given.
//!
//! A case is one graph in two versions, with and without an obstacle, because a pass that never applies would pass
//! every test of what it refuses. The passes on whole models are a test of the program's.

mod cases;

use std::fmt::Write;

use cases::{CASES, named, rows};
use gemma4c_blocks::DType::F32;
use gemma4c_graph::passes::{Goal, Log, PASSES, fuse};
use gemma4c_graph::{
    Builder, Cache, Delta, Epilogue, Fused, Graph, GroupError, Kind, Product, RowCount, Value, fused_text, verify,
    verify_groups,
};

fn build(declare: impl FnOnce(&mut Builder) -> Value) -> Graph {
    let mut g = Builder::new();
    let output = declare(&mut g);
    g.output(output);
    g.finish().unwrap()
}

/// What one pass makes of a graph, all others switched off.
fn alone(pass: &str, graph: &Graph, goal: Goal) -> (Fused, Log) {
    let others: Vec<String> = PASSES.iter().map(|p| p.name.to_owned()).filter(|name| name != pass).collect();
    let (fused, reports) = fuse(graph, goal, &others);
    assert_eq!(reports.iter().filter(|report| report.enabled).count(), 1, "there is a pass {pass}");
    (fused, reports.into_iter().find(|report| report.enabled).unwrap().log)
}

/// Graph and groups are well-formed.
fn check(fused: &Fused) {
    verify(&fused.graph).unwrap();
    verify_groups(fused).unwrap();
}

#[test]
fn each_refusal_has_its_words() {
    let mut texts = String::new();
    for (pass, obstacle, declare) in CASES {
        let (free, hindered) = (build(|g| declare(g, false)), build(|g| declare(g, true)));
        let (fused, log) = alone(pass, &free, Goal::Decode);
        assert!(log.applied > 0, "{pass} without {obstacle}\n{}", fused_text(&fused, None));
        assert_eq!(log.refused, [], "{pass} without {obstacle}");
        check(&fused);

        let (fused, log) = alone(pass, &hindered, Goal::Decode);
        assert_eq!(log.refused.len(), 1, "{pass}, {obstacle}: {log:?}");
        assert!(fused.ordered().iter().all(|group| group.nodes.len() == 1), "{pass}, {obstacle}");
        check(&fused);
        writeln!(texts, "{pass}: {obstacle}\n    {}: {}", log.refused[0].0, log.refused[0].1).unwrap();

        // Nor do the others put together what this one must not.
        for goal in [Goal::Decode, Goal::Prefill] {
            check(&fuse(&free, goal, &[]).0);
            check(&fuse(&hindered, goal, &[]).0);
        }
    }
    let untested = PASSES.iter().filter(|pass| !CASES.iter().any(|(name, ..)| *name == pass.name));
    let untested: Vec<&str> = untested.map(|pass| pass.name).collect();
    assert_eq!(untested, ["dead-rows", "adapters"], "which have tests of their own");
    insta::with_settings!({
        snapshot_path => "../../../snapshots/passes",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!("refusals", texts) });
}

/// A product with the adapters that are given it.
fn adapted(g: &mut Builder, name: &str, x: Value, adapters: usize) -> Value {
    let w = g.weight(name, F32, &[8, 8]);
    for number in 0..adapters {
        let half = |g: &mut Builder, half: &str, dims| g.weight(&format!("{name}{number}.{half}"), F32, dims);
        let (a, b) = (half(g, "a", &[8, 4]), half(g, "b", &[4, 8]));
        g.adapt(w, Delta { a, b, factor: 1.0, first: 0 });
    }
    named(g, name, |g| g.matmul(w, x))
}

/// What an adapter adds is a part of its product; a second one is added to the result. Products with adapters and without
/// are joined, and the result of each is the one that has the change.
#[test]
fn an_adapter_is_a_part_of_its_product() {
    let graph = build(|g| {
        let x = rows(g, 8);
        let [q, k, v] = [("q", 1), ("k", 0), ("v", 2)].map(|(name, adapters)| adapted(g, name, x, adapters));
        let sum = g.mul(q, k);
        g.mul(sum, v)
    });
    let (fused, log) = alone("adapters", &graph, Goal::Decode);
    check(&fused);
    assert_eq!((log.applied, log.refused.len()), (2, 1), "{log:?}");
    assert!(log.refused[0].1.contains("another adapter"), "{log:?}");

    let (fused, _) = fuse(&graph, Goal::Decode, &[]);
    check(&fused);
    let products = fused.ordered().into_iter().filter_map(|group| match group.kind {
        Kind::Product(product) => Some(product),
        _ => None,
    });
    let products: Vec<Product> = products.collect();
    let [product] = &products[..] else { panic!("they are one: {products:?}") };
    assert_eq!(product.adapted.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
    let results = product.results();
    assert!(results[0] != product.matmuls[0] && results[1] == product.matmuls[1], "{product:?}");
}

/// Two layers of attention, the second over the first's keys, and an LM head.
fn shared_keys(g: &mut Builder) -> Value {
    let mut h = rows(g, 8);
    let (norm, head_norm) = (g.weight("norm", F32, &[8]), g.weight("head_norm", F32, &[4]));
    for layer in 0..2 {
        g.set_layer(Some(layer));
        let wq = g.weight(&format!("q{layer}"), F32, &[8, 8]);
        let q = named(g, "q", |g| {
            let raw = g.matmul(wq, h);
            let normed = g.group_norm(raw, Some(head_norm), 4, 1e-6);
            g.rope(normed, 4, 1e4, None)
        });
        let kv = g.kv_of(0).unwrap_or_else(|| {
            let cache = g.cache(Cache { layer, kv_heads: 1, head_dim: 4, window: None });
            let wk = g.weight("k", F32, &[8, 4]);
            let raw = named(g, "k_raw", |g| g.matmul(wk, h));
            let k = named(g, "k", |g| {
                let normed = g.group_norm(raw, Some(head_norm), 4, 1e-6);
                g.rope(normed, 4, 1e4, None)
            });
            let v = named(g, "v", |g| g.group_norm(raw, None, 4, 1e-6));
            named(g, "kv", |g| g.kv_append(cache, k, v))
        });
        let mixed = named(g, "mixed", |g| g.attention(q, kv, 2));
        h = named(g, "out", |g| {
            let update = g.rms_norm(mixed, Some(norm), 1e-6);
            g.add(h, update)
        });
    }
    g.set_layer(None);
    let asked = named(g, "asked", |g| g.take_asked(h));
    let head = g.weight("head", F32, &[8, 100]);
    named(g, "logits", |g| g.matmul(head, asked))
}

/// Only what a cache depends on is computed for all rows, and the asked row is taken once, where it is first needed.
#[test]
fn rows_that_nobody_needs_are_not_computed() {
    let graph = build(shared_keys);
    let (fused, log) = alone("dead-rows", &graph, Goal::Prefill);
    check(&fused);
    assert!(log.applied > 10 && log.refused.is_empty(), "{log:?}");
    let rows_of = |rows: RowCount| -> Vec<String> {
        let is_value = |node: &gemma4c_graph::Node| node.ty.rows == rows && !node.name.is_empty();
        let ids = fused.graph.iter().filter(|(_, node)| is_value(node)).map(|(id, _)| id);
        ids.map(|id| fused.graph.full_name(id)).collect()
    };
    let for_all = ["rows.tokens", "rows", "blk.0.k_raw", "blk.0.k.rms_norm", "blk.0.k", "blk.0.v", "blk.0.kv"];
    assert_eq!(rows_of(RowCount::Chunk), for_all);
    let asked = rows_of(RowCount::Asked);
    assert_eq!(asked[0], "rows.asked", "taken from the rows themselves: {asked:?}");
    assert!(asked.contains(&"blk.0.q".into()) && asked.contains(&"blk.1.mixed".into()), "{asked:?}");
    assert_eq!(fused.graph.nodes.iter().filter(|n| n.op == gemma4c_graph::Op::TakeAsked).count(), 1, "{asked:?}");
}

#[test]
fn the_row_of_decode_is_not_dead() {
    let graph = build(shared_keys);
    let (fused, log) = alone("dead-rows", &graph, Goal::Decode);
    check(&fused);
    assert_eq!(fused.graph.nodes.len(), graph.nodes.len() - 1, "nothing is left out but the taking");
    insta::assert_snapshot!(log.refused[0].1, @"the one row of decode is asked for");
}

/// Queries of one row and keys of many cannot be one launch; each half still is.
#[test]
fn heads_of_different_rows_are_fused_apart() {
    let graph = build(shared_keys);
    let others = |pass: &&gemma4c_graph::passes::Pass| !["dead-rows", "heads"].contains(&pass.name);
    let disabled: Vec<String> = PASSES.iter().filter(others).map(|pass| pass.name.to_owned()).collect();
    for (goal, in_layer_0, refused) in [(Goal::Decode, 1, None), (Goal::Prefill, 2, Some("blk.0.q"))] {
        let (fused, reports) = fuse(&graph, goal, &disabled);
        check(&fused);
        let of_layer_0 = |group: &&gemma4c_graph::Group| fused.graph.node(group.nodes[0]).layer == Some(0);
        let heads = |group: &&gemma4c_graph::Group| matches!(group.kind, Kind::Heads(_));
        assert_eq!(fused.ordered().iter().filter(of_layer_0).filter(heads).count(), in_layer_0, "{goal:?}");
        let log = &reports.iter().find(|report| report.name == "heads").unwrap().log;
        assert_eq!(log.refused.first().map(|(node, _)| node.as_str()), refused);
        if let Some((_, reason)) = log.refused.first() {
            assert_eq!(reason, "queries are needed for fewer rows than keys");
        }
    }
}

/// A merge that would create a cycle between groups is refused.
#[test]
fn what_would_run_before_and_after_itself_is_not_merged() {
    let graph = build(|g| {
        let x = rows(g, 8);
        let a = named(g, "a", |g| g.gelu(x));
        let between = named(g, "between", |g| g.softcap(a, 30.0));
        named(g, "b", |g| g.add(a, between))
    });
    let id = |name: &str| graph.iter().find(|(_, node)| node.name == name).unwrap().0;
    let mut fused = Fused::new(graph.clone());
    let refused = fused.merge(Kind::Single, &[id("a"), id("b")]).unwrap_err();
    assert_eq!(refused, "between needs a part of it and is needed by another");
    assert_eq!(fused.ordered(), Fused::new(graph.clone()).ordered(), "nothing was changed");
    fused.merge(Kind::Single, &[id("a"), id("between"), id("b")]).unwrap();
    verify_groups(&fused).unwrap();
}

/// Groups made earlier count too: here the cycle leads through one that starts before both nodes and reads the first.
#[test]
fn a_cycle_through_a_group_that_starts_earlier_is_seen() {
    let graph = build(|g| {
        let x = rows(g, 8);
        let early = named(g, "early", |g| g.gelu(x));
        let between = named(g, "between", |g| g.softcap(early, 30.0));
        let a = named(g, "a", |g| g.gelu(x));
        let late = named(g, "late", |g| g.add(early, a));
        let b = named(g, "b", |g| g.add(a, between));
        g.add(late, b)
    });
    let id = |name: &str| graph.iter().find(|(_, node)| node.name == name).unwrap().0;
    let mut fused = Fused::new(graph.clone());
    fused.merge(Kind::Single, &[id("early"), id("late")]).unwrap();
    let refused = fused.merge(Kind::Single, &[id("a"), id("b")]).unwrap_err();
    assert_eq!(refused, "late needs a part of it and is needed by another");
    // `early` and `late` depend on `a`, which comes after their first node.
    let order: Vec<Vec<String>> =
        (fused.ordered().iter()).map(|group| group.nodes.iter().map(|id| graph.full_name(*id)).collect()).collect();
    assert_eq!(order[2..5], [vec!["a"], vec!["early", "late"], vec!["between"]]);
}

/// `verify_groups` finds a pattern that hides a value which another group reads.
#[test]
fn a_group_that_hides_what_others_read_is_found() {
    let graph = build(|g| {
        let (x, w) = (rows(g, 8), g.weight("w", F32, &[8, 8]));
        let product = named(g, "product", |g| g.matmul(w, x));
        let capped = named(g, "capped", |g| g.softcap(product, 30.0));
        g.add(capped, product)
    });
    let id = |name: &str| graph.iter().find(|(_, node)| node.name == name).unwrap().0;
    let epilogue = vec![Epilogue { node: id("capped"), operand: None }];
    let product = Product { epilogue, ..Product::new(id("rows"), vec![id("product")]) };
    let mut fused = Fused::new(graph.clone());
    fused.merge(Kind::Product(product), &[id("product"), id("capped")]).unwrap();
    assert_eq!(verify_groups(&fused), Err(GroupError::Hidden { node: "product".into(), kind: "product" }));
}
