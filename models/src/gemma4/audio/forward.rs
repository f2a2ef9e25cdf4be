//! The tower for sound as equations: `h` is the residual, one row for each soft token, once frames were halved twice.

use std::f32::consts::LN_2;

use gemma4c_dsl::dataflow;
use gemma4c_graph::{Builder, NodeId, Value};

use super::config::{AudioConfig, AudioKind};
use super::weights::{Conformer, Convolution, FeedForward, LayerWeights, Weights};

/// Rows that one sees, with itself.
const REACH: u32 = 12;
/// Of the scores of attention.
const CAP: f32 = 50.0;
/// Keys are multiplied by `ln(1 + e) / ln 2`.
const KEY_SCALE: f32 = 1.313_261_7 / LN_2;

/// Declares the tower and returns its stages by name.
pub(super) fn forward(g: &mut Builder, config: &AudioConfig, w: &Weights) -> Vec<(String, NodeId)> {
    let mut stages = Vec::new();
    let rows = match (config.kind, &w.conformer) {
        (AudioKind::Conformer { bins, width, heads, .. }, Some(conformer)) => {
            let sizes = Sizes { head_dim: width / heads, heads, eps: config.eps };
            encoded(g, sizes, bins, conformer, &mut stages)
        }
        (AudioKind::Conformer { .. }, None) => unreachable!("weights are declared by the config"),
        (AudioKind::Samples { frame }, _) => raw_frames(g, frame),
    };
    let projected = project(g, config, w, rows);
    stages.push(("projected".into(), projected));
    g.output(projected);
    stages
}

#[derive(Clone, Copy)]
struct Sizes {
    head_dim: u32,
    heads: u32,
    eps: f32,
}

fn encoded(g: &mut Builder, s: Sizes, bins: u32, w: &Conformer, stages: &mut Vec<(String, NodeId)>) -> Value {
    let features = frames(g, bins);
    let [first, second] = &w.convolutions;
    let halved = convolved(g, s, first, features);
    let quartered = convolved(g, s, second, halved);
    let mut h = subsampled(g, w, quartered);
    stages.extend([("features".into(), features), ("conv.1".into(), quartered), ("subsampled".into(), h)]);
    for (index, weights) in (0..).zip(&w.layers) {
        g.set_layer(Some(index));
        let after_ffn = feed_forward(g, s, &weights.first, h);
        let attended = attention(g, s, weights, after_ffn);
        let after_attention = attention_update(g, s, weights, after_ffn, attended);
        let after_conv = convolution(g, s, weights, after_attention);
        let after_second = feed_forward(g, s, &weights.second, after_conv);
        h = closing_norm(g, s, weights, after_second);
        for (stage, node) in [("ffn1", after_ffn), ("attn", attended), ("conv", after_conv)] {
            stages.push((format!("{index}.{stage}"), node));
        }
        stages.push((format!("hidden.{index}"), h));
    }
    g.set_layer(None);
    let tower = out(g, w, h);
    stages.push(("tower".into(), tower));
    tower
}

#[dataflow]
fn frames(g: &mut Builder, bins: u32) -> Value {
    g.patches(bins)
}

/// Half as many frames and bins, then a norm over the channels without their mean, then no negative value.
#[dataflow]
fn convolved(g: &mut Builder, s: Sizes, w: &Convolution, x: Value) -> Value {
    let product = g.halving_conv(w.weight, x, w.inputs);
    let centred = g.sub_group_mean(product, w.outputs);
    let normed = g.group_norm(centred, Some(w.norm), w.outputs, s.eps);
    g.relu(normed)
}

#[dataflow]
fn subsampled(g: &mut Builder, w: &Conformer, x: Value) -> Value {
    g.matmul(w.input_projection, x)
}

/// Half a step: the update counts for one half.
#[dataflow]
fn feed_forward(g: &mut Builder, s: Sizes, w: &FeedForward, h: Value) -> Value {
    let normed = g.rms_norm(h, Some(w.norm), s.eps);
    let up = w.up.product(g, normed);
    let activated = silu(g, up);
    let down = w.down.product(g, activated);
    let post = g.rms_norm(down, Some(w.post_norm), s.eps);
    let update = g.scale(post, 0.5);
    g.add(h, update)
}

#[dataflow]
fn attention(g: &mut Builder, s: Sizes, w: &LayerWeights, h: Value) -> Value {
    let normed = g.rms_norm(h, Some(w.attn_pre_norm), s.eps);
    let q_raw = w.q.product(g, normed);
    // The file's factors went through softplus already.
    let q_scaled = g.scale(q_raw, 1.0 / ((s.head_dim as f32).sqrt() * LN_2));
    let q = g.mul_weight(q_scaled, w.per_dim_scale);
    let k_raw = w.k.product(g, normed);
    let k = g.scale(k_raw, KEY_SCALE);
    let v = w.v.product(g, normed);
    let mixed = g.near_attention([q, k, v], s.heads, REACH, CAP, w.distances);
    w.out.product(g, mixed)
}

#[dataflow]
fn attention_update(g: &mut Builder, s: Sizes, w: &LayerWeights, h: Value, attended: Value) -> Value {
    let update = g.rms_norm(attended, Some(w.attn_post_norm), s.eps);
    g.add(h, update)
}

#[dataflow]
fn convolution(g: &mut Builder, s: Sizes, w: &LayerWeights, h: Value) -> Value {
    let width = g.width(h);
    let normed = g.rms_norm(h, Some(w.conv_norm), s.eps);
    let both = w.conv_in.product(g, normed);
    let values = g.columns(both, 0, width);
    let gate = g.columns(both, width, width);
    let open = g.sigmoid(gate);
    let gated = g.mul(values, open);
    let along_time = g.causal_conv(w.depthwise, gated);
    let conv_normed = g.rms_norm(along_time, Some(w.norm_conv), s.eps);
    let activated = silu(g, conv_normed);
    let update = w.conv_out.product(g, activated);
    g.add(h, update)
}

/// Its result takes the residual's place.
#[dataflow]
fn closing_norm(g: &mut Builder, s: Sizes, w: &LayerWeights, h: Value) -> Value {
    g.rms_norm(h, Some(w.ln2), s.eps)
}

#[dataflow]
fn out(g: &mut Builder, w: &Conformer, h: Value) -> Value {
    let product = g.matmul(w.out, h);
    g.add_weight(product, w.out_bias)
}

/// `x * sigmoid(x)`. Its nodes are named by whoever calls it.
fn silu(g: &mut Builder, x: Value) -> Value {
    let open = g.sigmoid(x);
    g.mul(x, open)
}

/// Each frame is a soft token.
#[dataflow]
fn raw_frames(g: &mut Builder, frame: u32) -> Value {
    let samples = g.patches(frame);
    g.grid_mean(samples, 1)
}

#[dataflow]
fn project(g: &mut Builder, config: &AudioConfig, w: &Weights, rows: Value) -> Value {
    let normed = g.rms_norm(rows, None, config.eps);
    g.matmul(w.projection, normed)
}
