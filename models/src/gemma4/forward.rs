//! The forward pass of Gemma 4, declared once. Every other form of it (CPU steps, CUDA kernels) is derived from this.
//!
//! Read it as the equations: `h` is the residual, one row for each token. Bindings become the names of the nodes.

use gemma4c_dsl::dataflow;
use gemma4c_graph::{Builder, Cache, Graph, Part, Value, VerifyError};
use gemma4c_plan::Seats;

use super::config::{Attention, Config, ConfigError, Keys, Layer, Mixture, Reach};
use super::weights::{self, ExpertWeights, GateUp, LayerWeights, PerLayer, PerLayerGate, Weights, WeightsError};
use crate::adapter::{self, Adapter, AdapterError, Model};
use crate::gguf::{Gguf, Header};

/// Why a file does not give a forward pass.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error("the declared graph is not well-formed: {0}")]
    Graph(#[from] VerifyError),
}

/// What a forward pass has beside the model's own tensors.
#[derive(Clone, Copy, Default)]
pub struct Beside<'a> {
    /// Adapters that are always on, and how strong each is.
    pub adapters: &'a [(&'a Adapter, f32)],
    /// Room for adapters that come and go.
    pub seats: Option<Seats>,
    /// Of a model whose towers make soft tokens, which stand among the tokens of a text: the token whose rows of the
    /// per-layer embeddings they take, which have none for them.
    pub pad: Option<u32>,
}

/// The forward pass of the model in `file`, from token ids to logits.
pub fn graph(file: &Header, config: &Config) -> Result<Graph, ModelError> {
    graph_with(file, config, Beside::default())
}

/// The model in `file` with an adapter merged into its weights, so many times as strong as its file says.
pub fn merged(file: Gguf, config: &Config, adapter: (&Adapter, f32)) -> Result<Gguf, ModelError> {
    let mut g = Builder::new();
    weights::declare(&file, config, &mut g)?;
    Ok(adapter::merge(file, adapter, config, &g)?)
}

/// The same with what goes beside a model. The weights of adapters follow the model's own, one adapter after another,
/// and behind them are those that are reserved for seats.
pub fn graph_with(file: &Header, config: &Config, beside: Beside<'_>) -> Result<Graph, ModelError> {
    let mut g = Builder::new();
    let weights = weights::declare(file, config, &mut g)?;
    adapter::declare(beside.adapters, Model::Text(config), &mut g)?;
    if let Some(seats) = beside.seats {
        adapter::reserve(seats, config.layers.len(), &mut g);
    }
    forward(&mut g, config, &weights, beside.pad);
    let graph = g.finish()?;
    adapter::check(beside.adapters, Model::Text(config), &graph)?;
    Ok(graph)
}

fn forward(g: &mut Builder, config: &Config, w: &Weights, soft: Option<u32>) {
    let tokens = tokens(g);
    let mut h = embedding(g, config, w, tokens, soft.is_some());
    let per_layer = w.per_layer.as_ref().map(|p| per_layer_inputs(g, config, p, tokens, h, soft));
    for (index, weights) in w.layers.iter().enumerate() {
        g.set_layer(Some(index as u32));
        let sees = if soft.is_some() { Sees::Pictures } else { Sees::Text };
        let place = Place { index: index as u32, sees };
        h = layer(g, config, w, place, weights, h, per_layer);
    }
    g.set_layer(None);
    let logits = head(g, config, w, h);
    g.output(logits);
}

#[dataflow]
pub(super) fn tokens(g: &mut Builder) -> Value {
    g.tokens()
}

/// The factor is exact here. The bf16 reference rounds it (39.25 for 39.19), which the following norms nearly cancel.
/// Soft tokens are not scaled.
#[dataflow]
fn embedding(g: &mut Builder, config: &Config, w: &Weights, tokens: Value, has_soft: bool) -> Value {
    let rows = g.gather(w.token_embd, tokens);
    let factor = (config.hidden as f32).sqrt();
    match has_soft {
        false => g.scale(rows, factor),
        true => {
            let scaled = g.scale(rows, factor);
            g.place_soft(scaled)
        }
    }
}

/// The per-layer inputs: for each token a row of the per-layer table plus a projection of the embedding, normalised per
/// layer. They depend on the embedding alone, so all layers' slices are computed at once, before the first layer.
#[dataflow]
fn per_layer_inputs(
    g: &mut Builder,
    config: &Config,
    p: &PerLayer,
    tokens: Value,
    embedding: Value,
    soft: Option<u32>,
) -> Value {
    let layers = config.layers.len() as u32;
    let raw = g.matmul(p.model_proj, embedding);
    let width = g.width(raw) / layers;
    let scaled = g.scale(raw, (config.hidden as f32).powf(-0.5));
    let context_part = g.group_norm(scaled, Some(p.proj_norm), width, config.rms_eps);
    let rows = match soft {
        None => g.gather(p.token_embd, tokens),
        Some(pad) => g.gather_text(p.token_embd, pad, tokens),
    };
    let token_part = g.scale(rows, (width as f32).sqrt());
    let sum = g.add(context_part, token_part);
    g.scale(sum, 0.5f32.sqrt())
}

/// Where a layer stands.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub index: u32,
    pub sees: Sees,
}

/// What a layer's rows are among.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sees {
    Text,
    /// Tokens, some of which are soft tokens of pictures.
    Pictures,
    /// Only what lies before them, in keys and values of another graph.
    Before,
}

#[dataflow]
pub(super) fn layer(
    g: &mut Builder,
    config: &Config,
    model: &Weights,
    place: Place,
    w: &LayerWeights,
    h: Value,
    per_layer: Option<Value>,
) -> Value {
    let Layer { attention: geometry, .. } = config.layers[place.index as usize];
    let h = attention(g, config, model, place, &geometry, w, h);
    let h = match (&w.experts, config.mixture) {
        (Some(experts), Some(mixture)) => mixture_of_experts(g, config, mixture, w, experts, h),
        _ => mlp(g, config, w, h),
    };
    let h = match (&w.per_layer, per_layer) {
        (Some(gate), Some(inputs)) => per_layer_gate(g, config, gate, place.index, inputs, h),
        _ => h,
    };
    // The whole residual is scaled, not what this layer added to it.
    g.mul_weight(h, w.output_scale)
}

#[dataflow]
fn attention(
    g: &mut Builder,
    config: &Config,
    model: &Weights,
    place: Place,
    geometry: &Attention,
    w: &LayerWeights,
    h: Value,
) -> Value {
    let Attention { heads, kv_heads, head_dim, rope_base, .. } = *geometry;
    let (window, factors) = match geometry.reach {
        Reach::Sliding { window } => (Some(window), None),
        Reach::Global => (None, model.rope_freqs),
    };
    let normed = g.rms_norm(h, Some(w.attn_norm), config.rms_eps);
    let q_raw = g.matmul(w.q, normed);
    let q_normed = g.group_norm(q_raw, Some(w.q_norm), head_dim, config.rms_eps);
    let q = g.rope(q_normed, head_dim, rope_base, factors);
    let kv = match (w.k, geometry.keys) {
        (Some(wk), _) => {
            let cache = g.cache(Cache { layer: place.index, kv_heads, head_dim, window });
            let k_raw = g.matmul(wk, normed);
            let k_normed = g.group_norm(k_raw, w.k_norm, head_dim, config.rms_eps);
            let k = g.rope(k_normed, head_dim, rope_base, factors);
            // Values are normalised without a weight and never rotated, also when they are the raw keys.
            let v_raw = w.v.map_or(k_raw, |wv| g.matmul(wv, normed));
            let v = g.group_norm(v_raw, None, head_dim, config.rms_eps);
            g.kv_append(cache, k, v)
        }
        (None, Keys::SharedWith { donor }) => {
            g.kv_of(donor).expect("a donor stands before the layers that share with it")
        }
        (None, _) => unreachable!("only layers that share keys have no key projection"),
    };
    let mixed = match place.sees {
        Sees::Before => g.attention_before(q, kv, heads),
        Sees::Pictures if config.sees_ahead() && window.is_some() => g.attention_ahead(q, kv, heads),
        Sees::Pictures | Sees::Text => g.attention(q, kv, heads),
    };
    let projected = g.matmul(w.attn_output, mixed);
    let update = g.rms_norm(projected, Some(w.post_attention_norm), config.rms_eps);
    g.add(h, update)
}

#[dataflow]
fn mlp(g: &mut Builder, config: &Config, w: &LayerWeights, h: Value) -> Value {
    let normed = g.rms_norm(h, Some(w.ffn_norm), config.rms_eps);
    let down = gated(g, w, normed);
    let update = g.rms_norm(down, Some(w.post_ffw_norm), config.rms_eps);
    g.add(h, update)
}

/// `down(gelu(gate x) * up x)`.
#[dataflow]
fn gated(g: &mut Builder, w: &LayerWeights, x: Value) -> Value {
    let gate = g.matmul(w.gate, x);
    let up = g.matmul(w.up, x);
    let activated = g.gelu(gate);
    let product = g.mul(activated, up);
    g.matmul(w.down, product)
}

/// The dense MLP and the experts side by side; each branch has norms of its own and reads the same residual, as does
/// the router.
#[dataflow]
fn mixture_of_experts(
    g: &mut Builder,
    config: &Config,
    mixture: Mixture,
    w: &LayerWeights,
    e: &ExpertWeights,
    h: Value,
) -> Value {
    let eps = config.rms_eps;
    let normed = g.rms_norm(h, Some(w.ffn_norm), eps);
    let dense = gated(g, w, normed);
    let dense_normed = g.rms_norm(dense, Some(e.dense_post_norm), eps);
    let routing = router(g, config, mixture, e, h);
    let expert_input = g.rms_norm(h, Some(e.pre_norm), eps);
    let mixed = experts(g, mixture, e, expert_input, routing);
    let mixed_normed = g.rms_norm(mixed, Some(e.post_norm), eps);
    let sum = g.add(dense_normed, mixed_normed);
    let update = g.rms_norm(sum, Some(w.post_ffw_norm), eps);
    g.add(h, update)
}

#[dataflow]
fn router(g: &mut Builder, config: &Config, mixture: Mixture, e: &ExpertWeights, h: Value) -> Value {
    let normed = g.rms_norm(h, None, config.rms_eps);
    let weighted = g.mul_weight(normed, e.router_scale);
    let scaled = g.scale(weighted, (config.hidden as f32).powf(-0.5));
    let logits = g.matmul(e.router, scaled);
    g.route(logits, mixture.used)
}

#[dataflow]
fn experts(g: &mut Builder, mixture: Mixture, e: &ExpertWeights, x: Value, routing: Value) -> Value {
    let (ffn, hidden) = (mixture.ffn, g.width(x));
    let all = Part { first: 0, len: ffn };
    let (gate_w, gate_part, up_w, up_part) = match e.gate_up {
        GateUp::Stacked(w) => (w, all, w, Part { first: ffn, len: ffn }),
        GateUp::Apart { gate, up } => (gate, all, up, all),
    };
    let gate = g.expert_matmul(gate_w, gate_part, x, routing);
    let up = g.expert_matmul(up_w, up_part, x, routing);
    let activated = g.gelu(gate);
    let product = g.mul(activated, up);
    let down = g.expert_matmul(e.down, Part { first: 0, len: hidden }, product, routing);
    g.expert_sum(down, routing, Some(e.down_scale))
}

#[dataflow]
fn per_layer_gate(g: &mut Builder, config: &Config, w: &PerLayerGate, layer: u32, inputs: Value, h: Value) -> Value {
    let gate = g.matmul(w.gate, h);
    let activated = g.gelu(gate);
    let width = g.width(gate);
    let own = g.columns(inputs, layer * width, width);
    let product = g.mul(activated, own);
    let projected = g.matmul(w.proj, product);
    let update = g.rms_norm(projected, Some(w.post_norm), config.rms_eps);
    g.add(h, update)
}

#[dataflow]
fn head(g: &mut Builder, config: &Config, w: &Weights, h: Value) -> Value {
    let asked = g.take_asked(h);
    let normed = g.rms_norm(asked, Some(w.output_norm), config.rms_eps);
    let raw = g.matmul(w.head, normed);
    match config.softcap {
        Some(cap) => g.softcap(raw, cap),
        None => raw,
    }
}
