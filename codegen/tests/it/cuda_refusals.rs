//! What a GPU does not compute is refused by name, and not computed wrong.

use gemma4c_blocks::DType::F32;
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_codegen::cuda::{self, LowerError, Options, SoftTokens};
use gemma4c_codegen::target::Target;
use gemma4c_graph::{Builder, Cache, Value};
use gemma4c_plan::cuda::KvType;

/// A layer of attention between an embedding and logits, with one operation more somewhere.
fn lowered(
    ahead: bool,
    embed: fn(&mut Builder, Value) -> Value,
    change: fn(&mut Builder, Value) -> Value,
) -> LowerError {
    let mut g = Builder::new();
    let (table, square) = (g.weight("token_embd.weight", F32, &[64, 100]), g.weight("square.weight", F32, &[64, 64]));
    let tokens = g.tokens();
    let embedded = embed(&mut g, tokens);
    let x = change(&mut g, embedded);
    g.set_layer(Some(0));
    let cache = g.cache(Cache { layer: 0, kv_heads: 1, head_dim: 64, window: Some(16) });
    let k = g.matmul(square, x);
    let kv = g.kv_append(cache, k, k);
    let mixed = if ahead { g.attention_ahead(x, kv, 1) } else { g.attention(x, kv, 1) };
    g.set_layer(None);
    let asked = g.take_asked(mixed);
    let logits = g.matmul(table, asked);
    g.output(logits);
    let graph = g.finish().unwrap();
    let program = cpu::lower(&graph, Limits { context: 64, chunk: 8, asked: 1, kv: KvType::F16 }).unwrap();
    let options = Options {
        verified: 1,
        context: 64,
        chunk: 8,
        kv: KvType::F16,
        sequences: 1,
        snapshots: Some(0),
        target: Target::find("h200").unwrap().clone(),
        vram: None,
        disabled: vec![],
    };
    match cuda::lower(
        cuda::Model {
            graph: &graph,
            meaning: &program,
            weights: &graph.weights,
            soft: SoftTokens::NONE,
            drafter: None,
        },
        &options,
        &|_| Ok(vec![1.0; 64]),
    ) {
        Ok(_) => panic!("a program for a GPU"),
        Err(error) => error,
    }
}

#[test]
fn operations_of_towers_have_no_kernels_in_a_text_without_a_tower() {
    let gather = |g: &mut Builder, tokens: Value| {
        let table = g.weight("token_embd.weight", F32, &[64, 100]);
        g.gather(table, tokens)
    };
    let gather_text = |g: &mut Builder, tokens: Value| {
        let table = g.weight("token_embd.weight", F32, &[64, 100]);
        g.gather_text(table, 0, tokens)
    };
    let cases = [
        ("attention_ahead", lowered(true, gather, |_, x| x)),
        ("gather_text", lowered(false, gather_text, |_, x| x)),
        ("place_soft", lowered(false, gather, |g, x| g.place_soft(x))),
    ];
    for (name, error) in cases {
        match error {
            LowerError::OnCpuAlone { op, .. } => assert_eq!(op, name),
            other => panic!("{name}: {other}"),
        }
    }
}
