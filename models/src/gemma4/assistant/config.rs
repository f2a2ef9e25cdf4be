//! What a drafter's file says about it, and whether it belongs to a model.

use super::super::config::{Attention, Config, ConfigError, Keys, Layer, MOST_LAYERS, Reach, in_range, positive};
use super::error::{DrafterError, ORDERING};
use crate::gguf::{Array, Header};

/// Groups that a step scores, where the file has centroids and does not say.
const USUAL_TOP_K: u32 = 32;

/// A drafter that belongs to a model.
#[derive(Clone, Debug, PartialEq)]
pub struct DrafterConfig {
    /// Its layers, in its own width. Each shares the keys and values of a layer of the model.
    pub body: Config,
    pub centroids: Option<Centroids>,
}

/// A head that scores only tokens near a few centroids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Centroids {
    pub count: u32,
    /// How many of them a step looks at.
    pub top_k: u32,
}

impl DrafterConfig {
    /// Reads the drafter in `file` and compares it with the model in `target_file`. All that does not fit is told at
    /// once.
    pub fn read(file: &Header, target_file: &Header, target: &Config) -> Result<DrafterConfig, DrafterError> {
        let found = file.metadata().str("general.architecture").map_err(ConfigError::from)?;
        if found != "gemma4-assistant" {
            return Err(DrafterError::NotADrafter { found: found.chars().take(40).collect() });
        }
        let stated = Stated::read(file)?;
        let mut problems = Vec::new();
        if stated.target_width != target.hidden {
            let (theirs, ours) = (stated.target_width, target.hidden);
            problems.push(format!("the drafter is for a model {theirs} wide, this one is {ours} wide"));
        }
        if stated.vocab_size != target.vocab_size {
            let (theirs, ours) = (stated.vocab_size, target.vocab_size);
            problems.push(format!("the drafter knows {theirs} tokens, the model {ours}"));
        } else {
            problems.extend(other_token(file, target_file)?);
        }
        let mut layers = Vec::new();
        for index in 0..stated.heads.len() {
            match stated.layer(index, target) {
                Ok(layer) => layers.push(layer),
                // Layers of a kind have the same faults.
                Err(found) => {
                    for problem in found {
                        if !problems.contains(&problem) {
                            problems.push(problem);
                        }
                    }
                }
            }
        }
        let name = file.metadata().optional::<&str>("general.name").map_err(ConfigError::from)?.map(str::to_string);
        if !problems.is_empty() {
            return Err(DrafterError::OtherModel { drafter: name, model: target.name.clone(), problems });
        }
        let body = Config {
            name,
            hidden: stated.width,
            vocab_size: stated.vocab_size,
            context: target.context,
            rms_eps: stated.rms_eps,
            softcap: None,
            per_layer_width: None,
            mixture: None,
            layers,
        };
        Ok(DrafterConfig { body, centroids: centroids(file, stated.vocab_size)? })
    }
}

/// The numbers of a drafter's file.
struct Stated {
    width: u32,
    target_width: u32,
    vocab_size: u32,
    rms_eps: f32,
    window: u32,
    /// For each layer.
    heads: Vec<u32>,
    kv_heads: Vec<u32>,
    ffn: Vec<u32>,
    sliding: Vec<bool>,
    /// Of sliding layers, and of global ones.
    head_dims: [u32; 2],
    rope_bases: [f32; 2],
}

impl Stated {
    fn read(file: &Header) -> Result<Stated, ConfigError> {
        let meta = file.metadata();
        let number = |key: &'static str| in_range(key, meta.u32(key)?);
        let unusable = |key: &'static str, why: String| Err(ConfigError::Unusable { key, why });
        let layers = number("gemma4-assistant.block_count")?;
        if layers > MOST_LAYERS {
            return unusable("gemma4-assistant.block_count", format!("is {layers}, expected 1 to {MOST_LAYERS}"));
        }
        let shared = meta.optional("gemma4-assistant.attention.shared_kv_layers")?.unwrap_or(layers);
        if shared != layers {
            let why = format!("is {shared} of {layers} layers: a drafter has no keys and values of its own");
            return unusable("gemma4-assistant.attention.shared_kv_layers", why);
        }
        let per_layer: u32 = meta.optional("gemma4-assistant.embedding_length_per_layer_input")?.unwrap_or(0);
        if per_layer != 0 {
            let why = format!("is {per_layer}: a drafter with per-layer embeddings is not known");
            return unusable("gemma4-assistant.embedding_length_per_layer_input", why);
        }
        let each = |key: &'static str| {
            meta.per_layer_u32(key, layers)?.into_iter().map(|n| in_range(key, n)).collect::<Result<Vec<u32>, _>>()
        };
        let heads = each("gemma4-assistant.attention.head_count")?;
        let head_dims =
            [number("gemma4-assistant.attention.key_length_swa")?, number("gemma4-assistant.attention.key_length")?];
        for heads in &heads {
            let longest = head_dims[0].max(head_dims[1]);
            if in_range("", heads.saturating_mul(longest)).is_err() {
                let why = format!("is {heads}, of heads as long as {longest}");
                return unusable("gemma4-assistant.attention.head_count", why);
            }
        }
        let base = |key: &'static str| positive(key, meta.f32(key)?);
        let vocab_size = file.tensor("token_embd.weight").and_then(|table| table.dims().get(1).copied()).unwrap_or(0);
        Ok(Stated {
            width: number("gemma4-assistant.embedding_length")?,
            target_width: number("gemma4-assistant.embedding_length_out")?,
            vocab_size: in_range("token_embd.weight", u32::try_from(vocab_size).unwrap_or(0))?,
            rms_eps: base("gemma4-assistant.attention.layer_norm_rms_epsilon")?,
            window: number("gemma4-assistant.attention.sliding_window")?,
            heads,
            kv_heads: each("gemma4-assistant.attention.head_count_kv")?,
            ffn: each("gemma4-assistant.feed_forward_length")?,
            sliding: meta.per_layer_bool("gemma4-assistant.attention.sliding_window_pattern", layers)?,
            head_dims,
            rope_bases: [base("gemma4-assistant.rope.freq_base_swa")?, base("gemma4-assistant.rope.freq_base")?],
        })
    }

    /// A layer that reads the model's last layer of its kind that owns keys; or what of that layer does not fit.
    fn layer(&self, index: usize, target: &Config) -> Result<Layer, Vec<String>> {
        let (kind, at) = if self.sliding[index] { ("sliding", 0) } else { ("global", 1) };
        let is_owner = |layer: &Layer| {
            let is_sliding = matches!(layer.attention.reach, Reach::Sliding { .. });
            is_sliding == self.sliding[index] && !matches!(layer.attention.keys, Keys::SharedWith { .. })
        };
        let Some(donor) = target.layers.iter().rposition(is_owner) else {
            return Err(vec![format!("the drafter reads keys of a {kind} layer, of which the model has none")]);
        };
        let of = target.layers[donor].attention;
        let mut problems = Vec::new();
        let mut compare = |what: &str, drafters: String, models: String| {
            if drafters != models {
                problems.push(format!(
                    "{what} of {kind} layers: the drafter has {drafters}, the model's layer {donor} has {models}"
                ));
            }
        };
        compare("kv heads", self.kv_heads[index].to_string(), of.kv_heads.to_string());
        compare("the head size", self.head_dims[at].to_string(), of.head_dim.to_string());
        compare("the base of rotation", self.rope_bases[at].to_string(), of.rope_base.to_string());
        if let Reach::Sliding { window } = of.reach {
            compare("the window", self.window.to_string(), window.to_string());
        }
        if !self.heads[index].is_multiple_of(of.kv_heads) {
            let heads = self.heads[index];
            problems.push(format!("the drafter's {heads} heads do not share {} kv heads of the model", of.kv_heads));
        }
        if problems.is_empty() {
            let attention =
                Attention { heads: self.heads[index], keys: Keys::SharedWith { donor: donor as u32 }, ..of };
            return Ok(Layer { attention, ffn: self.ffn[index] });
        }
        Err(problems)
    }
}

/// The first token whose text differs, where both files have texts.
fn other_token(file: &Header, target: &Header) -> Result<Option<String>, ConfigError> {
    let tokens = |file| -> Result<Option<Array<'_>>, ConfigError> {
        let file: &Header = file;
        Ok(file.metadata().optional("tokenizer.ggml.tokens")?)
    };
    let (Some(theirs), Some(ours)) = (tokens(file)?, tokens(target)?) else { return Ok(None) };
    let differs = std::iter::zip(theirs.iter(), ours.iter()).enumerate().find(|(_, (a, b))| a != b);
    Ok(differs.map(|(id, (a, b))| format!("token {id} is {a} in the drafter, {b} in the model")))
}

/// The centroids, where the file has some.
fn centroids(file: &Header, vocab_size: u32) -> Result<Option<Centroids>, ConfigError> {
    const COUNT: &str = "gemma4-assistant.masked_embedding.centroid_count";
    const TOP_K: &str = "gemma4-assistant.masked_embedding.top_k";
    let unusable = |key: &'static str, why: String| Err(ConfigError::Unusable { key, why });
    let (centroids, ordering) = (file.tensor("masked_embd_centroids.weight"), file.tensor(ORDERING));
    let centroids = match (centroids, ordering) {
        (None, None) => return Ok(None),
        (Some(centroids), Some(_)) => centroids,
        (Some(_), None) => return unusable(ORDERING, "is missing, and there are centroids".into()),
        (None, Some(_)) => return unusable("masked_embd_centroids.weight", format!("is missing beside {ORDERING}")),
    };
    let rows = u32::try_from(centroids.dims().get(1).copied().unwrap_or(0)).unwrap_or(0);
    let count = in_range(COUNT, file.metadata().optional(COUNT)?.unwrap_or(rows))?;
    let top_k = in_range(TOP_K, file.metadata().optional(TOP_K)?.unwrap_or(USUAL_TOP_K.min(count)))?;
    if count != rows || !vocab_size.is_multiple_of(count) {
        return unusable(COUNT, format!("is {count}: there are {rows} centroids for {vocab_size} tokens"));
    }
    if top_k > count {
        return unusable(TOP_K, format!("is {top_k} of {count}"));
    }
    Ok(Some(Centroids { count, top_k }))
}
