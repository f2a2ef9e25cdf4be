//! The two pictures of a graph that people read: the folded text and the drawing. The model here is made up to have
//! every feature of the text in few lines; the real models' texts are snapshots of the whole program's tests.

use gemma4c_blocks::DType::{F32, Q8_0};
use gemma4c_graph::{Builder, Cache, Graph, Value, to_dot, to_text};

fn named(g: &mut Builder, name: &str, build: impl FnOnce(&mut Builder) -> Value) -> Value {
    let mark = g.mark();
    let value = build(g);
    g.bind(mark, name, 0);
    value
}

/// Six layers: 0, 1, 2 and 4 alike, 3 wider inside, 5 with the keys of layer 3. Each takes its slice of a value made
/// before.
fn model() -> Graph {
    let mut g = Builder::new();
    let table = g.weight("token_embd.weight", Q8_0, &[32, 100]);
    let slices = g.weight("slices.weight", F32, &[32 * 6, 100]);
    let tokens = named(&mut g, "tokens", Builder::tokens);
    let mut h = named(&mut g, "embedding", |g| g.gather(table, tokens));
    let all_slices = named(&mut g, "slices", |g| g.gather(slices, tokens));
    for layer in 0..6 {
        g.set_layer(Some(layer));
        let heads = if layer == 3 || layer == 5 { 4 } else { 2 };
        let name = |suffix: &str| format!("blk.{layer}.{suffix}.weight");
        let norm = g.weight(&name("norm"), F32, &[32]);
        let q = g.weight(&name("q"), Q8_0, &[32, heads * 16]);
        let normed = named(&mut g, "normed", |g| g.rms_norm(h, Some(norm), 1e-6));
        let q = named(&mut g, "q", |g| g.matmul(q, normed));
        let kv = match g.kv_of(3).filter(|_| layer == 5) {
            Some(kv) => kv,
            None => {
                let cache = g.cache(Cache { layer, kv_heads: 1, head_dim: 16, window: (layer != 3).then_some(64) });
                let k = g.weight(&name("k"), Q8_0, &[32, 16]);
                let k = named(&mut g, "k", |g| g.matmul(k, normed));
                named(&mut g, "kv", |g| g.kv_append(cache, k, k))
            }
        };
        let mixed = named(&mut g, "mixed", |g| g.attention(q, kv, heads as u32));
        let o = g.weight(&name("o"), Q8_0, &[heads * 16, 32]);
        let update = named(&mut g, "update", |g| g.matmul(o, mixed));
        let own = named(&mut g, "own", |g| g.columns(all_slices, layer * 32, 32));
        // The inner sum stays without a name of its own.
        h = named(&mut g, "out", |g| {
            let sum = g.add(h, update);
            g.add(sum, own)
        });
    }
    g.set_layer(None);
    let asked = g.take_asked(h);
    let logits = named(&mut g, "logits", |g| g.matmul(table, asked));
    g.output(logits);
    g.finish().unwrap()
}

fn assert_snapshot(name: &str, text: &str) {
    insta::with_settings!({
        snapshot_path => "../../../snapshots/graphs",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!(name, text) });
}

#[test]
fn equal_layers_are_printed_once() {
    let text = to_text(&model());
    assert!(text.contains("\nlayers 0-2, 4:\n"), "{text}");
    assert_eq!(text.matches("\nlayer").count(), 3, "{text}");
    assert_snapshot("made-up-text", &text);
}

/// A single changed number in one layer is enough to print it apart.
#[test]
fn a_layer_that_differs_is_not_folded() {
    let mut graph = model();
    let fourth = graph.nodes.iter().position(|n| n.layer == Some(4) && n.name == "normed").unwrap();
    let gemma4c_graph::Op::RmsNorm { eps, .. } = &mut graph.nodes[fourth].op else { panic!("a norm") };
    *eps = 1e-5;
    let text = to_text(&graph);
    assert!(text.contains("\nlayers 0-2:\n"), "{text}");
    assert!(text.contains("\nlayer 4:\n") && text.contains("eps=1e-5"), "{text}");
}

#[test]
fn a_drawing_has_the_layer_and_what_it_touches() {
    let dot = to_dot(&model(), |layer| layer == 5);
    assert_snapshot("made-up-layer-5-dot", &dot);
}

#[test]
fn texts_are_the_same_from_build_to_build() {
    assert_eq!(to_text(&model()), to_text(&model()));
    assert_eq!(to_dot(&model(), |_| true), to_dot(&model(), |_| true));
}
