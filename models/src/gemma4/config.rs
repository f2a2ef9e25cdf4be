//! What a file says about its model: from metadata and the list of tensors alone, nothing known per size.
//!
//! Two facts have no key of their own. The vocabulary is as large as the embedding table (or, in a file without
//! tensors, as the token list); and a global layer that owns keys but has no `attn_v` takes its values from the key
//! projection.

use crate::gguf::{GgufError, Header};

/// How far a layer's queries see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The last `window` positions, the query's own included.
    Sliding {
        window: u32,
    },
    Global,
}

/// Where a layer's keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Two projections of its own.
    Projected,
    /// One projection: the values are the raw keys.
    ValuesFromKeys,
    /// The cache of an earlier layer.
    SharedWith { donor: u32 },
}

/// The attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    pub reach: Reach,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub rope_base: f32,
    pub keys: Keys,
}

/// One layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    pub attention: Attention,
    /// Width of the dense MLP.
    pub ffn: u32,
}

/// The experts beside each layer's dense MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    pub experts: u32,
    pub used: u32,
    pub ffn: u32,
}

/// A Gemma 4 text model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub name: Option<String>,
    pub hidden: u32,
    pub vocab_size: u32,
    /// Positions it was trained for.
    pub context: u32,
    pub rms_eps: f32,
    pub softcap: Option<f32>,
    /// Width of a layer's slice of the per-layer embeddings, where the model has them.
    pub per_layer_width: Option<u32>,
    pub mixture: Option<Mixture>,
    pub layers: Vec<Layer>,
}

/// Why a file's configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("general.architecture is `{found}`, expected `gemma4`{}", what_it_is(found))]
    Architecture { found: String },
    #[error("GGUF key {key}: {why}")]
    Unusable { key: &'static str, why: String },
}

/// Of files that belong to a model, what they are and how they are given.
fn what_it_is(architecture: &str) -> &'static str {
    match architecture {
        "clip" => ": this is a projector for pictures and sound, which goes beside a model (--mmproj)",
        "gemma4-assistant" => ": this is a drafter, which goes beside a model (--draft)",
        _ => "",
    }
}

/// No number of a config and no width made of several is larger; products of two then fit in 64 bits with room to
/// spare.
const MOST: u32 = 1 << 24;
/// More layers than any model has, and few enough that listing what all of them lack takes little room.
pub(super) const MOST_LAYERS: u32 = 1024;

impl Config {
    /// Whether soft tokens of a picture see each other in sliding layers. The text's file has no key for it: models
    /// with per-layer embeddings read pictures like text, the others do not.
    pub const fn sees_ahead(&self) -> bool {
        self.per_layer_width.is_none()
    }

    pub fn read(file: &Header) -> Result<Config, ConfigError> {
        let meta = file.metadata();
        let found = meta.str("general.architecture")?;
        if found != "gemma4" {
            return Err(ConfigError::Architecture { found: found.chars().take(40).collect() });
        }
        let number = |key: &'static str| in_range(key, meta.u32(key)?);
        let optional = |key: &'static str| meta.optional::<u32>(key).map(|n| n.filter(|n| *n > 0));
        let count = number("gemma4.block_count")?;
        if count > MOST_LAYERS {
            let why = format!("is {count}, expected 1 to {MOST_LAYERS}");
            return Err(ConfigError::Unusable { key: "gemma4.block_count", why });
        }
        let list = |key: &'static str| meta.per_layer_u32(key, count);
        let heads = list("gemma4.attention.head_count")?;
        let kv_heads = list("gemma4.attention.head_count_kv")?;
        let ffn = list("gemma4.feed_forward_length")?;
        let sliding = meta.per_layer_bool("gemma4.attention.sliding_window_pattern", count)?;
        let window = number("gemma4.attention.sliding_window")?;
        let head_dim = |key, value_key: &'static str, rope_key: &'static str| {
            let dim = number(key)?;
            for other in [value_key, rope_key] {
                if let Some(n) = optional(other)?.filter(|n| *n != dim) {
                    let why = format!("is {n}, expected {dim} as in {key}");
                    return Err(ConfigError::Unusable { key: other, why });
                }
            }
            Ok(dim)
        };
        let global_dim =
            head_dim("gemma4.attention.key_length", "gemma4.attention.value_length", "gemma4.rope.dimension_count")?;
        let sliding_dim = head_dim(
            "gemma4.attention.key_length_swa",
            "gemma4.attention.value_length_swa",
            "gemma4.rope.dimension_count_swa",
        )?;
        let positive = |key: &'static str| positive(key, meta.f32(key)?);
        let bases = (positive("gemma4.rope.freq_base")?, positive("gemma4.rope.freq_base_swa")?);
        let shared = optional("gemma4.attention.shared_kv_layers")?.unwrap_or(0);
        let first_shared = count.checked_sub(shared).ok_or_else(|| ConfigError::Unusable {
            key: "gemma4.attention.shared_kv_layers",
            why: format!("is {shared} of {count} layers"),
        })?;
        // A model has values of their own in all its global layers or in none; where only some lack them, they are
        // missing.
        let has_values = |i: usize| !sliding[i] && file.tensor(&format!("blk.{i}.attn_v.weight")).is_some();
        let values_from_keys = !(0..first_shared as usize).any(has_values);
        let mut layers = Vec::with_capacity(count as usize);
        for i in 0..count as usize {
            let keys = match i as u32 >= first_shared {
                true => Keys::SharedWith { donor: donor(&sliding, first_shared, i)? },
                false if !sliding[i] && values_from_keys => Keys::ValuesFromKeys,
                false => Keys::Projected,
            };
            let attention = Attention {
                reach: if sliding[i] { Reach::Sliding { window } } else { Reach::Global },
                heads: in_range("gemma4.attention.head_count", heads[i])?,
                kv_heads: in_range("gemma4.attention.head_count_kv", kv_heads[i])?,
                head_dim: if sliding[i] { sliding_dim } else { global_dim },
                rope_base: if sliding[i] { bases.1 } else { bases.0 },
                keys,
            };
            if attention.heads.saturating_mul(attention.head_dim) > MOST {
                let why = format!("layer {i} has {} heads of {}", attention.heads, attention.head_dim);
                return Err(ConfigError::Unusable { key: "gemma4.attention.head_count", why });
            }
            if !attention.heads.is_multiple_of(attention.kv_heads) {
                let why = format!("layer {i} has {} heads over {} kv heads", attention.heads, attention.kv_heads);
                return Err(ConfigError::Unusable { key: "gemma4.attention.head_count_kv", why });
            }
            layers.push(Layer { attention, ffn: in_range("gemma4.feed_forward_length", ffn[i])? });
        }
        Ok(Config {
            name: meta.optional::<&str>("general.name")?.map(str::to_string),
            hidden: number("gemma4.embedding_length")?,
            vocab_size: vocab_size(file)?,
            context: number("gemma4.context_length")?,
            rms_eps: positive("gemma4.attention.layer_norm_rms_epsilon")?,
            softcap: match meta.optional::<f32>("gemma4.final_logit_softcapping")? {
                None | Some(0.0) => None,
                Some(_) => Some(positive("gemma4.final_logit_softcapping")?),
            },
            per_layer_width: per_layer_width(file, count)?,
            mixture: mixture(file)?,
            layers,
        })
    }
}

pub(super) fn in_range(key: &'static str, n: u32) -> Result<u32, ConfigError> {
    match n {
        1..=MOST => Ok(n),
        _ => Err(ConfigError::Unusable { key, why: format!("is {n}, expected 1 to {MOST}") }),
    }
}

pub(super) fn positive(key: &'static str, x: f32) -> Result<f32, ConfigError> {
    match x.is_finite() && x > 0.0 {
        true => Ok(x),
        false => Err(ConfigError::Unusable { key, why: format!("is {x}, expected a positive number") }),
    }
}

/// A shared layer reads the last layer of its own kind that owns keys.
fn donor(sliding: &[bool], first_shared: u32, layer: usize) -> Result<u32, ConfigError> {
    let owner = (0..first_shared as usize).rev().find(|&i| sliding[i] == sliding[layer]);
    owner.map(|i| i as u32).ok_or_else(|| ConfigError::Unusable {
        key: "gemma4.attention.shared_kv_layers",
        why: format!("layer {layer} has no earlier layer of its kind to share keys with"),
    })
}

fn vocab_size(file: &Header) -> Result<u32, ConfigError> {
    let size = match file.tensor("token_embd.weight") {
        Some(table) => table.dims().get(1).copied().unwrap_or(0),
        None => file.metadata().array("tokenizer.ggml.tokens")?.len() as u64,
    };
    match u32::try_from(size) {
        Ok(n @ 1..=MOST) => Ok(n),
        _ => Err(ConfigError::Unusable { key: "token_embd.weight", why: format!("has {size} rows") }),
    }
}

fn per_layer_width(file: &Header, layers: u32) -> Result<Option<u32>, ConfigError> {
    let key = "gemma4.embedding_length_per_layer_input";
    let Some(width) = file.metadata().optional::<u32>(key)?.filter(|n| *n > 0) else { return Ok(None) };
    in_range(key, width.saturating_mul(layers))?;
    Ok(Some(width))
}

fn mixture(file: &Header) -> Result<Option<Mixture>, ConfigError> {
    let meta = file.metadata();
    let Some(experts) = meta.optional::<u32>("gemma4.expert_count")?.filter(|n| *n > 0) else { return Ok(None) };
    let experts = in_range("gemma4.expert_count", experts)?;
    let used = in_range("gemma4.expert_used_count", meta.u32("gemma4.expert_used_count")?)?;
    let ffn = in_range("gemma4.expert_feed_forward_length", meta.u32("gemma4.expert_feed_forward_length")?)?;
    if used > experts {
        return Err(ConfigError::Unusable { key: "gemma4.expert_used_count", why: format!("is {used} of {experts}") });
    }
    Ok(Some(Mixture { experts, used, ffn }))
}
