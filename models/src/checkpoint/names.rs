//! What tensors are called: in a checkpoint by their place among modules, in GGUF files by their use.

/// How a tensor is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A norm's weights, a scale: f32, whatever the file has.
    Vector,
    /// A product's weights or a table, in any form.
    Matrix,
    /// The router's, which choose: f32.
    Router,
}

/// A tensor's name without the layer in both, and how it is read.
pub struct Name {
    pub gguf: &'static str,
    pub module: &'static str,
    pub kind: Kind,
}

const fn name(gguf: &'static str, module: &'static str, kind: Kind) -> Name {
    Name { gguf, module, kind }
}

/// Of a whole model, behind the prefix.
pub const OF_MODEL: [Name; 6] = [
    name("token_embd.weight", "embed_tokens.weight", Kind::Matrix),
    name("per_layer_token_embd.weight", "embed_tokens_per_layer.weight", Kind::Matrix),
    name("per_layer_model_proj.weight", "per_layer_model_projection.weight", Kind::Matrix),
    name("per_layer_proj_norm.weight", "per_layer_projection_norm.weight", Kind::Vector),
    name("output_norm.weight", "norm.weight", Kind::Vector),
    name("output.weight", "lm_head.weight", Kind::Matrix),
];

/// Of a layer: behind `blk.N.`, and behind the prefix and `layers.N.`
pub const OF_LAYER: [Name; 25] = [
    name("attn_norm.weight", "input_layernorm.weight", Kind::Vector),
    name("attn_q.weight", "self_attn.q_proj.weight", Kind::Matrix),
    name("attn_k.weight", "self_attn.k_proj.weight", Kind::Matrix),
    name("attn_v.weight", "self_attn.v_proj.weight", Kind::Matrix),
    name("attn_output.weight", "self_attn.o_proj.weight", Kind::Matrix),
    name("attn_q_norm.weight", "self_attn.q_norm.weight", Kind::Vector),
    name("attn_k_norm.weight", "self_attn.k_norm.weight", Kind::Vector),
    name("post_attention_norm.weight", "post_attention_layernorm.weight", Kind::Vector),
    name("ffn_norm.weight", "pre_feedforward_layernorm.weight", Kind::Vector),
    name("ffn_gate.weight", "mlp.gate_proj.weight", Kind::Matrix),
    name("ffn_up.weight", "mlp.up_proj.weight", Kind::Matrix),
    name("ffn_down.weight", "mlp.down_proj.weight", Kind::Matrix),
    name("post_ffw_norm.weight", "post_feedforward_layernorm.weight", Kind::Vector),
    name("layer_output_scale.weight", "layer_scalar", Kind::Vector),
    name("inp_gate.weight", "per_layer_input_gate.weight", Kind::Matrix),
    name("proj.weight", "per_layer_projection.weight", Kind::Matrix),
    name("post_norm.weight", "post_per_layer_input_norm.weight", Kind::Vector),
    name("ffn_gate_inp.weight", "router.proj.weight", Kind::Router),
    name("ffn_gate_inp.scale", "router.scale", Kind::Vector),
    name("ffn_down_exps.scale", "router.per_expert_scale", Kind::Vector),
    name("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", Kind::Vector),
    name("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", Kind::Vector),
    name("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", Kind::Vector),
    name("ffn_gate_up_exps.weight", "experts.gate_up_proj", Kind::Matrix),
    name("ffn_down_exps.weight", "experts.down_proj", Kind::Matrix),
];

/// What stands before the names of a text model, alone or beside towers.
pub const PREFIXES: [&str; 4] = ["model.language_model.", "model.", "language_model.model.", ""];

/// The head, which is outside of the text model's modules.
pub const HEADS: [&str; 3] = ["lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"];

/// A tensor's name in a checkpoint by that in a GGUF file, without a prefix.
pub fn in_checkpoint(gguf: &str) -> String {
    let of_layer = gguf.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let (layer, names) = match of_layer {
        Some((layer, rest)) => (Some(layer), OF_LAYER.iter().find(|name| name.gguf == rest)),
        None => (None, OF_MODEL.iter().find(|name| name.gguf == gguf)),
    };
    match (layer, names) {
        (Some(layer), Some(name)) => format!("layers.{layer}.{}", name.module),
        (None, Some(name)) => name.module.into(),
        _ => gguf.into(),
    }
}
