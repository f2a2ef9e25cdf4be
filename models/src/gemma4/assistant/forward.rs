//! One step of a drafter as equations: `h` is its residual, one row for each sequence.

use gemma4c_dsl::dataflow;
use gemma4c_graph::{Builder, Cache, NodeId, Value};

use super::super::config::{Attention, Config, Keys, Reach};
use super::super::forward::{Place, Sees, layer, tokens};
use super::config::DrafterConfig;
use super::weights::Weights;

/// Declares the step, whose output is logits, and returns the hidden state for the next one.
pub(super) fn forward(g: &mut Builder, config: &DrafterConfig, target: &Config, w: &Weights) -> NodeId {
    let tokens = tokens(g);
    for layer in &config.body.layers {
        let Attention { keys, kv_heads, head_dim, reach, .. } = layer.attention;
        let Keys::SharedWith { donor } = keys else { unreachable!("a drafter's layers share keys") };
        let window = match reach {
            Reach::Sliding { window } => Some(window),
            Reach::Global => None,
        };
        if g.kv_of(donor).is_none() {
            borrowed(g, Cache { layer: donor, kv_heads, head_dim, window });
        }
    }
    let mut h = input(g, target, w, tokens);
    for (index, weights) in (0..).zip(&w.body.layers) {
        g.set_layer(Some(index));
        h = layer(g, &config.body, &w.body, Place { index, sees: Sees::Before }, weights, h, None);
    }
    g.set_layer(None);
    let normed = output_norm(g, config, w, h);
    let logits = head(g, config, w, normed);
    g.output(logits);
    next(g, w, normed)
}

#[dataflow]
fn borrowed(g: &mut Builder, cache: Cache) -> Value {
    g.borrow_kv(cache)
}

/// The embedding of the token, scaled as in the model, and beside it the hidden state.
#[dataflow]
fn input(g: &mut Builder, target: &Config, w: &Weights, tokens: Value) -> Value {
    let rows = g.gather(w.embedding, tokens);
    let embedded = g.scale(rows, (target.hidden as f32).sqrt());
    let hidden = g.hidden(target.hidden);
    let both = g.concat(embedded, hidden);
    g.matmul(w.pre_projection, both)
}

#[dataflow]
fn output_norm(g: &mut Builder, config: &DrafterConfig, w: &Weights, h: Value) -> Value {
    g.rms_norm(h, Some(w.body.output_norm), config.body.rms_eps)
}

/// Logits of all tokens, or only of those near the centroids that are closest.
#[dataflow]
fn head(g: &mut Builder, config: &DrafterConfig, w: &Weights, normed: Value) -> Value {
    match (config.centroids, w.centroids) {
        (Some(centroids), Some(matrix)) => {
            let vocab_size = config.body.vocab_size;
            let scores = g.matmul(matrix, normed);
            let closest = g.route(scores, centroids.top_k);
            let candidates = g.candidates(closest, vocab_size / centroids.count);
            let scored = g.token_matmul(w.body.head, normed, candidates);
            g.spread_tokens(scored, candidates, vocab_size)
        }
        _ => g.matmul(w.body.head, normed),
    }
}

/// Back in the model's width. It is not normed.
#[dataflow]
fn next(g: &mut Builder, w: &Weights, normed: Value) -> Value {
    g.matmul(w.post_projection, normed)
}
