//! `config.json` and `generation_config.json`, as the metadata that a GGUF file of the same model has.
//!
//! What those files say and no key exists for is either checked here, because the forward pass knows no other way
//! (activation, kinds of rotation, biases), or of no consequence.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::error::{Fault, shown};
use crate::gguf::{WriteError, Writer};

/// `config.json`. Texts alone have their numbers at the top, models with towers one level below.
#[derive(Deserialize)]
pub struct Root {
    model_type: Option<String>,
    text_config: Option<Text>,
    pub quantization_config: Option<Quantisation>,
    pub vision_config: Option<serde::de::IgnoredAny>,
    pub audio_config: Option<serde::de::IgnoredAny>,
}

/// The text model.
#[derive(Deserialize)]
pub struct Text {
    model_type: Option<String>,
    hidden_size: u32,
    num_hidden_layers: u32,
    num_attention_heads: u32,
    num_key_value_heads: u32,
    num_global_key_value_heads: Option<u32>,
    head_dim: u32,
    global_head_dim: Option<u32>,
    intermediate_size: u32,
    layer_types: Vec<String>,
    sliding_window: u32,
    max_position_embeddings: u32,
    rms_norm_eps: f64,
    final_logit_softcapping: Option<f64>,
    hidden_size_per_layer_input: Option<u32>,
    num_kv_shared_layers: Option<u32>,
    use_double_wide_mlp: Option<bool>,
    enable_moe_block: Option<bool>,
    num_experts: Option<u32>,
    top_k_experts: Option<u32>,
    moe_intermediate_size: Option<u32>,
    vocab_size: u32,
    tie_word_embeddings: Option<bool>,
    rope_parameters: Rope,
    #[serde(default)]
    per_layer_config: Option<BTreeMap<String, Override>>,
    hidden_activation: Option<String>,
    attention_bias: Option<bool>,
    pub quantization_config: Option<Quantisation>,
}

/// Where a layer differs from the others.
#[derive(Deserialize)]
struct Override {
    head_dim: Option<u32>,
    num_key_value_heads: Option<u32>,
    intermediate_size: Option<u32>,
}

#[derive(Deserialize)]
struct Rope {
    full_attention: Rotation,
    sliding_attention: Rotation,
}

#[derive(Deserialize)]
struct Rotation {
    rope_theta: f64,
    rope_type: Option<String>,
    partial_rotary_factor: Option<f64>,
}

/// How weights were quantised, as far as their tensors do not tell.
#[derive(Default, Deserialize)]
pub struct Quantisation {
    pub quant_method: Option<String>,
    #[serde(default)]
    config_groups: BTreeMap<String, Group>,
    transform_config: Option<Presence>,
    weight_block_size: Option<[u32; 2]>,
}

#[derive(Deserialize)]
struct Group {
    weights: Option<Scheme>,
}

#[derive(Deserialize)]
struct Scheme {
    block_structure: Option<[u32; 2]>,
}

/// Whether an object says anything.
#[derive(Deserialize)]
struct Presence {
    config_groups: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

/// `generation_config.json`: the authors' advice.
#[derive(Default, Deserialize)]
pub struct Generation {
    temperature: Option<f64>,
    top_k: Option<u32>,
    top_p: Option<f64>,
    #[serde(default)]
    suppress_tokens: Option<Vec<u32>>,
}

/// What of the configuration tensors are read by.
pub struct Shape {
    pub layers: u32,
    pub experts: u32,
    pub is_tied: bool,
    /// Values of a divisor of rotation frequencies, and how many of them rotate; `None` without a global layer.
    pub rope_factors: Option<(u32, u32)>,
    /// Rows and columns that have one scale together, where that is said.
    pub block: [u32; 2],
}

const MODEL_TYPES: [&str; 2] = ["gemma4_text", "gemma4_unified_text"];
const METHODS: [&str; 3] = ["compressed-tensors", "modelopt", "fp8"];
/// More layers than any model has.
const MOST_LAYERS: u32 = 1024;
/// Rows and columns of a block with one scale, where nobody says otherwise.
const USUAL_BLOCK: [u32; 2] = [128, 128];

impl Root {
    /// Whether its numbers are those of a text model with towers around.
    pub fn has_text(&self) -> bool {
        self.text_config.is_some()
    }

    /// The text model; `top` is the same file read as one.
    pub fn text(self, top: Option<Text>) -> Result<(Text, Quantisation), Fault> {
        let own = self.quantization_config;
        let mut text = match (self.text_config, top) {
            (Some(text), _) => text,
            (None, Some(text)) => text,
            (None, None) => return Err(Fault::MissingKey("text_config")),
        };
        let found = text.model_type.as_deref().or(self.model_type.as_deref()).unwrap_or("");
        if !MODEL_TYPES.contains(&found) {
            let why = "a checkpoint of `gemma4_text` or `gemma4_unified_text` is expected";
            return Err(Fault::unsupported(format!("model_type `{}`", shown(found)), why));
        }
        let quantisation = own.or(text.quantization_config.take()).unwrap_or_default();
        quantisation.check()?;
        Ok((text, quantisation))
    }
}

impl Quantisation {
    fn check(&self) -> Result<(), Fault> {
        if let Some(method) = self.quant_method.as_deref().filter(|method| !METHODS.contains(method)) {
            let why = "compressed-tensors, ModelOpt and FP8 checkpoints are read";
            return Err(Fault::unsupported(format!("quant_method `{}`", shown(method)), why));
        }
        let transforms = self.transform_config.as_ref().and_then(|config| config.config_groups.as_ref());
        if transforms.is_some_and(|groups| !groups.is_empty()) {
            let why = "weights that were rotated before they were quantised need activations rotated, too";
            return Err(Fault::unsupported("transform_config", why));
        }
        Ok(())
    }

    fn block(&self) -> [u32; 2] {
        let schemes = self.config_groups.values().filter_map(|group| group.weights.as_ref());
        let said = schemes.filter_map(|scheme| scheme.block_structure).next();
        said.or(self.weight_block_size).unwrap_or(USUAL_BLOCK)
    }
}

impl Text {
    pub fn shape(&self, quantisation: &Quantisation) -> Shape {
        let rotated = (self.rope_parameters.full_attention.partial_rotary_factor.unwrap_or(1.0).clamp(0.0, 1.0)
            * f64::from(self.global_dim())) as u32
            / 2;
        let has_global = self.layer_types.iter().any(|kind| kind == "full_attention");
        Shape {
            layers: self.num_hidden_layers,
            experts: if self.enable_moe_block == Some(true) { self.num_experts.unwrap_or(0) } else { 0 },
            is_tied: self.tie_word_embeddings.unwrap_or(true),
            rope_factors: has_global.then_some((self.global_dim() / 2, rotated)),
            block: quantisation.block(),
        }
    }

    /// The settings of a layer that differs from the others.
    fn override_of(&self, layer: usize) -> Option<&Override> {
        self.per_layer_config.as_ref()?.get(&layer.to_string())
    }

    fn is_sliding(&self, layer: usize) -> bool {
        self.layer_types.get(layer).is_some_and(|kind| kind == "sliding_attention")
    }

    /// The width of a head in global layers: of one of them, since a layer's tensors are compared with it.
    fn global_dim(&self) -> u32 {
        let global = (0..self.layer_types.len()).find(|layer| !self.is_sliding(*layer));
        let own = global.and_then(|layer| self.override_of(layer)?.head_dim);
        own.or(self.global_head_dim).unwrap_or(self.head_dim)
    }

    fn kv_heads(&self, layer: usize) -> u32 {
        let global = self.num_global_key_value_heads.filter(|_| !self.is_sliding(layer));
        let own = self.override_of(layer).and_then(|layer| layer.num_key_value_heads);
        own.or(global).unwrap_or(self.num_key_value_heads)
    }

    fn ffn(&self, layer: usize) -> u32 {
        let own = self.override_of(layer).and_then(|layer| layer.intermediate_size);
        let first_shared = self.num_hidden_layers.saturating_sub(self.num_kv_shared_layers.unwrap_or(0)) as usize;
        let times = if self.use_double_wide_mlp == Some(true) && layer >= first_shared { 2 } else { 1 };
        own.unwrap_or(self.intermediate_size.saturating_mul(times))
    }

    /// What the forward pass takes for granted.
    fn check(&self) -> Result<(), Fault> {
        if !(1..=MOST_LAYERS).contains(&self.num_hidden_layers) {
            return Err(Fault::key("num_hidden_layers", self.num_hidden_layers, format!("1 to {MOST_LAYERS}")));
        }
        if self.layer_types.len() != self.num_hidden_layers as usize {
            let found = format!("a list of {}", self.layer_types.len());
            return Err(Fault::key("layer_types", found, format!("one for each of {} layers", self.num_hidden_layers)));
        }
        let is_known = |kind: &&String| !["sliding_attention", "full_attention"].contains(&kind.as_str());
        if let Some(kind) = self.layer_types.iter().find(is_known) {
            return Err(Fault::unsupported(format!("a layer of type `{}`", shown(kind)), "layers slide or are full"));
        }
        if let Some(other) = self.hidden_activation.as_deref().filter(|name| *name != "gelu_pytorch_tanh") {
            return Err(Fault::unsupported(
                format!("hidden_activation `{}`", shown(other)),
                "Gemma 4 has the tanh GELU",
            ));
        }
        if self.attention_bias == Some(true) {
            return Err(Fault::unsupported("attention_bias", "Gemma 4 has no biases"));
        }
        let Rope { full_attention, sliding_attention } = &self.rope_parameters;
        for (rotation, usual) in [(full_attention, "proportional"), (sliding_attention, "default")] {
            let kind = rotation.rope_type.as_deref().unwrap_or("default");
            if kind != usual && kind != "default" {
                return Err(Fault::unsupported(format!("rope_type `{}`", shown(kind)), "Gemma 4 scales no positions"));
            }
        }
        if sliding_attention.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            return Err(Fault::unsupported("partial_rotary_factor of sliding layers", "all their pairs rotate"));
        }
        Ok(())
    }

    /// As the metadata of a GGUF file.
    pub fn write(&self, writer: &mut Writer) -> Result<(), Fault> {
        self.check()?;
        let layers = 0..self.num_hidden_layers as usize;
        let mut put = |key: &str, value: u32| writer.set(&format!("gemma4.{key}"), value);
        let mut numbers = || -> Result<(), WriteError> {
            put("block_count", self.num_hidden_layers)?;
            put("context_length", self.max_position_embeddings)?;
            put("embedding_length", self.hidden_size)?;
            put("attention.head_count", self.num_attention_heads)?;
            put("attention.sliding_window", self.sliding_window)?;
            put("attention.shared_kv_layers", self.num_kv_shared_layers.unwrap_or(0))?;
            put("embedding_length_per_layer_input", self.hidden_size_per_layer_input.unwrap_or(0))?;
            for (end, dim) in [("", self.global_dim()), ("_swa", self.head_dim)] {
                for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
                    put(&format!("{key}{end}"), dim)?;
                }
            }
            if self.enable_moe_block == Some(true) {
                put("expert_count", self.num_experts.unwrap_or(0))?;
                put("expert_used_count", self.top_k_experts.unwrap_or(0))?;
                put("expert_feed_forward_length", self.moe_intermediate_size.unwrap_or(0))?;
            }
            Ok(())
        };
        numbers().map_err(written)?;
        let rope = &self.rope_parameters;
        let floats = [
            ("gemma4.rope.freq_base", rope.full_attention.rope_theta),
            ("gemma4.rope.freq_base_swa", rope.sliding_attention.rope_theta),
            ("gemma4.attention.layer_norm_rms_epsilon", self.rms_norm_eps),
            ("gemma4.final_logit_softcapping", self.final_logit_softcapping.unwrap_or(0.0)),
        ];
        floats.iter().try_for_each(|(key, value)| writer.set(key, *value as f32)).map_err(written)?;
        let ffn = layers.clone().map(|layer| self.ffn(layer));
        writer.set_array("gemma4.feed_forward_length", ffn).map_err(written)?;
        let kv_heads = layers.clone().map(|layer| self.kv_heads(layer));
        writer.set_array("gemma4.attention.head_count_kv", kv_heads).map_err(written)?;
        let sliding = layers.map(|layer| self.is_sliding(layer));
        writer.set_array("gemma4.attention.sliding_window_pattern", sliding).map_err(written)
    }

    /// Rows of the embedding table.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }
}

impl Generation {
    pub fn write(&self, writer: &mut Writer) -> Result<(), Fault> {
        let floats = [("general.sampling.temp", self.temperature), ("general.sampling.top_p", self.top_p)];
        for (key, value) in floats {
            value.map_or(Ok(()), |value| writer.set(key, value as f32)).map_err(written)?;
        }
        self.top_k.map_or(Ok(()), |value| writer.set("general.sampling.top_k", value)).map_err(written)?;
        let suppressed = self.suppress_tokens.as_ref();
        let written_ids =
            suppressed.map_or(Ok(()), |ids| writer.set_array("tokenizer.ggml.suppress_tokens", ids.iter().copied()));
        written_ids.map_err(written)
    }
}

/// Two keys of one name are a fault of this module; it is told like one of the file.
pub fn written(error: WriteError) -> Fault {
    Fault::Json { what: "metadata", why: error.to_string() }
}
