//! The vision tower as equations: `h` is the residual, one row for each patch, until patches are pooled into soft
//! tokens.

use gemma4c_dsl::dataflow;
use gemma4c_graph::{Builder, NodeId, Value, WeightId};

use super::config::{Encoder, VisionConfig};
use super::weights::{Body, LayerNorm, LayerWeights, Standardisation, Weights};

/// Of the rotation by a patch's column and row.
const ROPE_BASE: f32 = 100.0;

/// Of norms that take the mean off; the file's is of the others.
const LAYER_NORM_EPS: f32 = 1e-5;

/// Declares the tower and returns its stages by name.
pub(super) fn forward(g: &mut Builder, config: &VisionConfig, w: &Weights) -> Vec<(String, NodeId)> {
    let (soft, mut stages) = match (&w.body, config.encoder) {
        (Body::Encoder { layers, standardisation }, Some(encoder)) => {
            encoded(g, config, encoder, w, layers, standardisation.as_ref())
        }
        (Body::Encoder { .. }, None) => unreachable!("weights are declared by the config"),
        (Body::Norms { patch, patch_bias, dense, position }, _) => {
            let dense_rows = dense_patches(g, config, w, *patch, *patch_bias);
            let normed = layer_norm(g, dense_rows, *dense);
            let placed = with_positions(g, w, normed, *position);
            let stages = vec![("dense".to_string(), dense_rows), ("ln2".into(), normed), ("pos_norm".into(), placed)];
            (soft_rows(g, placed), stages)
        }
    };
    let projected = project(g, config, w, soft);
    stages.push(("projected".into(), projected));
    g.output(projected);
    stages
}

/// Through the layers, up to the pooled rows.
fn encoded(
    g: &mut Builder,
    config: &VisionConfig,
    encoder: Encoder,
    w: &Weights,
    layers: &[LayerWeights],
    standardisation: Option<&Standardisation>,
) -> (Value, Vec<(String, NodeId)>) {
    let mut h = patch_embed(g, config, w);
    let mut stages = vec![("patch_embed".to_string(), h)];
    for (index, weights) in (0..).zip(layers) {
        g.set_layer(Some(index));
        h = layer(g, config, encoder, weights, h);
        stages.push((format!("hidden.{index}"), h));
    }
    g.set_layer(None);
    let mut pooled = pool(g, config, h);
    stages.push(("pooled".into(), pooled));
    if let Some(by) = standardisation {
        pooled = standardise(g, by, pooled);
        stages.push(("standardized".into(), pooled));
    }
    (pooled, stages)
}

/// Pixels come as numbers from 0 to 1.
#[dataflow]
fn patch_embed(g: &mut Builder, config: &VisionConfig, w: &Weights) -> Value {
    let pixels = g.patches(config.patch_width());
    let doubled = g.scale(pixels, 2.0);
    let centred = g.add_constant(doubled, -1.0);
    let embedded = g.matmul(w.patch_embd, centred);
    let columns = g.axis_rows(w.position_embd, 0);
    let rows = g.axis_rows(w.position_embd, 1);
    let positions = g.add(columns, rows);
    g.add(embedded, positions)
}

#[dataflow]
fn layer(g: &mut Builder, config: &VisionConfig, encoder: Encoder, w: &LayerWeights, h: Value) -> Value {
    let h = attention(g, config, encoder, w, h);
    mlp(g, config, w, h)
}

#[dataflow]
fn attention(g: &mut Builder, config: &VisionConfig, encoder: Encoder, w: &LayerWeights, h: Value) -> Value {
    let (eps, head_dim) = (config.eps, encoder.head_dim);
    let normed = g.rms_norm(h, Some(w.ln1), eps);
    let q_raw = w.q.product(g, normed);
    let q_normed = g.group_norm(q_raw, Some(w.q_norm), head_dim, eps);
    let q = g.grid_rope(q_normed, head_dim, ROPE_BASE);
    let k_raw = w.k.product(g, normed);
    let k_normed = g.group_norm(k_raw, Some(w.k_norm), head_dim, eps);
    let k = g.grid_rope(k_normed, head_dim, ROPE_BASE);
    let v_raw = w.v.product(g, normed);
    // Values are normalised without a weight and never rotated.
    let v = g.group_norm(v_raw, None, head_dim, eps);
    let mixed = g.full_attention(q, k, v, encoder.heads);
    let projected = w.out.product(g, mixed);
    let update = g.rms_norm(projected, Some(w.attn_post_norm), eps);
    g.add(h, update)
}

#[dataflow]
fn mlp(g: &mut Builder, config: &VisionConfig, w: &LayerWeights, h: Value) -> Value {
    let normed = g.rms_norm(h, Some(w.ln2), config.eps);
    let gate = w.gate.product(g, normed);
    let up = w.up.product(g, normed);
    let activated = g.gelu(gate);
    let product = g.mul(activated, up);
    let down = w.down.product(g, product);
    let update = g.rms_norm(down, Some(w.ffn_post_norm), config.eps);
    g.add(h, update)
}

#[dataflow]
fn pool(g: &mut Builder, config: &VisionConfig, h: Value) -> Value {
    let mean = g.grid_mean(h, config.pool);
    g.scale(mean, (config.width as f32).sqrt())
}

#[dataflow]
fn standardise(g: &mut Builder, by: &Standardisation, pooled: Value) -> Value {
    // What is stored is to be subtracted: negated, added to, negated again, without another rounding.
    let negated = g.scale(pooled, -1.0);
    let sum = g.add_weight(negated, by.bias);
    let difference = g.scale(sum, -1.0);
    g.mul_weight(difference, by.scale)
}

#[dataflow]
fn project(g: &mut Builder, config: &VisionConfig, w: &Weights, pooled: Value) -> Value {
    let normed = g.rms_norm(pooled, None, config.eps);
    g.matmul(w.projection, normed)
}

/// Without an encoder the pixels are normed as they are, from 0 to 1.
#[dataflow]
fn dense_patches(g: &mut Builder, config: &VisionConfig, w: &Weights, norm: LayerNorm, bias: WeightId) -> Value {
    let pixels = g.patches(config.patch_width());
    let normed = layer_norm(g, pixels, norm);
    let product = g.matmul(w.patch_embd, normed);
    g.add_weight(product, bias)
}

#[dataflow]
fn with_positions(g: &mut Builder, w: &Weights, h: Value, norm: LayerNorm) -> Value {
    let columns = g.axis_rows(w.position_embd, 0);
    let rows = g.axis_rows(w.position_embd, 1);
    let positions = g.add(columns, rows);
    let sum = g.add(h, positions);
    layer_norm(g, sum, norm)
}

/// `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`: an RMS norm of what is left without the mean.
#[dataflow]
fn layer_norm(g: &mut Builder, x: Value, norm: LayerNorm) -> Value {
    let centred = g.sub_mean(x);
    let normed = g.rms_norm(centred, Some(norm.weight), LAYER_NORM_EPS);
    g.add_weight(normed, norm.bias)
}

/// Each patch is a soft token.
#[dataflow]
fn soft_rows(g: &mut Builder, h: Value) -> Value {
    g.grid_mean(h, 1)
}
