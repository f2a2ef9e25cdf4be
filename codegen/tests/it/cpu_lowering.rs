//! A graph as the steps of a CPU plan: a small one as a snapshot, and the properties every one must have.

use std::fmt::Write;

use gemma4c_blocks::DType::{F32, Q8_0};
use gemma4c_codegen::cpu::{Limits, LowerError, lower};
use gemma4c_graph::{Builder, Cache, Graph, Part, Value};
use gemma4c_plan::cuda::KvType;
use gemma4c_plan::{Kind, Program, RowCount};

const LIMITS: Limits = Limits { context: 100, chunk: 8, asked: 2, kv: KvType::F16 };

fn named(g: &mut Builder, name: &str, build: impl FnOnce(&mut Builder) -> Value) -> Value {
    let mark = g.mark();
    let value = build(g);
    g.bind(mark, name, 0);
    value
}

/// A sliding and a global layer, the second with experts, and a head.
fn model() -> Graph {
    let mut g = Builder::new();
    let table = g.weight("token_embd.weight", Q8_0, &[32, 50]);
    let mut h = named(&mut g, "embedding", |g| {
        let tokens = g.tokens();
        g.gather(table, tokens)
    });
    for layer in 0..2 {
        g.set_layer(Some(layer));
        let cache = g.cache(Cache { layer, kv_heads: 1, head_dim: 16, window: (layer == 0).then_some(20) });
        let q = g.weight(&format!("blk.{layer}.q.weight"), Q8_0, &[32, 32]);
        let k = g.weight(&format!("blk.{layer}.k.weight"), Q8_0, &[32, 16]);
        let q = named(&mut g, "q", |g| g.matmul(q, h));
        let k = named(&mut g, "k", |g| g.matmul(k, h));
        let q = named(&mut g, "q_rotated", |g| g.rope(q, 16, 1e4, None));
        let v = named(&mut g, "v", |g| g.group_norm(k, None, 16, 1e-6));
        let kv = named(&mut g, "kv", |g| g.kv_append(cache, k, v));
        let mixed = named(&mut g, "mixed", |g| g.attention(q, kv, 2));
        h = named(&mut g, "sum", |g| g.add(h, mixed));
    }
    let (router, up) = (g.weight("router.weight", F32, &[32, 4]), g.weight("experts.weight", Q8_0, &[32, 64, 4]));
    let routing = named(&mut g, "routing", |g| {
        let logits = g.matmul(router, h);
        g.route(logits, 2)
    });
    let experts = named(&mut g, "experts", |g| g.expert_matmul(up, Part { first: 32, len: 32 }, h, routing));
    h = named(&mut g, "mixture", |g| g.expert_sum(experts, routing, None));
    g.set_layer(None);
    let logits = named(&mut g, "logits", |g| {
        let asked = g.take_asked(h);
        let raw = g.matmul(table, asked);
        g.softcap(raw, 30.0)
    });
    g.output(logits);
    g.finish().unwrap()
}

fn text(program: &Program) -> String {
    let Program { context, chunk, asked, arena_bytes, .. } = program;
    let mut out = format!("context {context}, chunk {chunk}, asked {asked}, arena {arena_bytes} bytes\n\n");
    for c in &program.caches {
        let window = c.window.map_or("all".into(), |w| format!("a window of {w}"));
        let (heads, dim) = (c.kv_heads, c.head_dim);
        writeln!(out, "cache of layer {}: {} rows of {heads}x{dim}, {window}", c.layer, c.capacity).unwrap();
    }
    out.push('\n');
    for step in &program.steps {
        let value = &program.values[step.output as usize];
        let inputs: Vec<&str> = step.inputs.iter().map(|i| program.values[*i as usize].name.as_str()).collect();
        let place = match value.kind {
            Kind::Floats { offset } => format!("{offset:>6}+{:<5}", program.max_rows(value.rows) * value.width * 4),
            _ => " ".repeat(12),
        };
        writeln!(out, "{place} {} = {:?}({})", value.name, step.op, inputs.join(", ")).unwrap();
    }
    out
}

#[test]
fn a_small_graph_step_by_step() {
    let program = lower(&model(), LIMITS).unwrap();
    insta::with_settings!({
        snapshot_path => "../../../snapshots/plans",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!("cpu-steps", text(&program)) });
}

/// Checked with arithmetic of its own: nobody writes into a value that is still to be read.
#[test]
fn no_step_writes_over_what_is_still_needed() {
    let graph = model();
    let least = Limits { context: 1, chunk: 1, asked: 1, ..LIMITS };
    for limits in [LIMITS, least, Limits { context: 9000, chunk: 300, asked: 40, ..LIMITS }] {
        let program = lower(&graph, limits).unwrap();
        let place = |i: u32| match program.values[i as usize].kind {
            Kind::Floats { offset } => {
                let value = &program.values[i as usize];
                offset..offset + 4 * program.max_rows(value.rows) as u64 * value.width as u64
            }
            _ => 0..0,
        };
        for (now, step) in program.steps.iter().enumerate() {
            let written = place(step.output);
            assert!(written.end <= program.arena_bytes);
            let later = program.steps[now..].iter().flat_map(|s| &s.inputs).chain([&program.output]);
            for &read in later.filter(|i| **i != step.output) {
                let is_made_before = program.steps[..now].iter().any(|s| s.output == read);
                let apart = written.end <= place(read).start || place(read).end <= written.start;
                assert!(apart || !is_made_before, "step {now} of {limits:?}");
            }
        }
    }
}

#[test]
fn rings_hold_a_window_and_a_chunk_but_no_more_than_the_context() {
    let capacities = |limits| {
        let program = lower(&model(), limits).unwrap();
        program.caches.iter().map(|c| c.capacity).collect::<Vec<_>>()
    };
    assert_eq!(capacities(LIMITS), [28, 100]);
    assert_eq!(capacities(Limits { context: 25, ..LIMITS }), [25, 25]);
    assert_eq!(capacities(Limits { chunk: u32::MAX, ..LIMITS }), [100, 100]);
}

#[test]
fn only_the_head_is_asked_for() {
    let program = lower(&model(), LIMITS).unwrap();
    let asked = program.values.iter().filter(|v| v.rows == RowCount::Asked).map(|v| v.name.as_str());
    assert_eq!(asked.collect::<Vec<_>>(), ["logits.take_asked", "logits.matmul", "logits"]);
}

#[test]
fn a_graph_without_an_output_is_refused() {
    let mut graph = model();
    graph.output = None;
    assert_eq!(lower(&graph, LIMITS), Err(LowerError::NoOutput));
}
