//! `adapter_config.json`: ranks, alphas, and whether the folder has something that pairs of matrices cannot say.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::{AdapterError, Fault};
use super::pattern::Pattern;
use crate::checkpoint::folder::read_json;
use crate::checkpoint::shown;

pub const NAME: &str = "adapter_config.json";

/// Starts of training that change the model's own weights: the pairs belong to these, not to the model.
const CHANGING: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];
/// No alpha is larger, and no rank.
pub const MOST_ALPHA: f64 = 1e9;
const MOST_RANK: f64 = 16_777_216.0;

/// The settings that count. What only training needs is not read.
#[derive(Debug, Deserialize)]
pub struct AdapterConfig {
    peft_type: Option<String>,
    pub base_model_name_or_path: Option<String>,
    r: Option<f64>,
    pub lora_alpha: Option<f64>,
    #[serde(default)]
    rank_pattern: Pattern,
    #[serde(default)]
    alpha_pattern: Pattern,
    #[serde(default)]
    use_rslora: Setting,
    #[serde(default)]
    bias: Setting,
    #[serde(default)]
    init_lora_weights: Setting,
    #[serde(default)]
    use_dora: Setting,
    #[serde(default)]
    modules_to_save: Setting,
    #[serde(default)]
    lora_bias: Setting,
    #[serde(default)]
    fan_in_fan_out: Setting,
    #[serde(default)]
    use_qalora: Setting,
    #[serde(default)]
    use_bdlora: Setting,
    #[serde(default)]
    alora_invocation_tokens: Setting,
    #[serde(default)]
    layer_replication: Setting,
    #[serde(default)]
    trainable_token_indices: Setting,
    #[serde(default)]
    arrow_config: Setting,
    #[serde(default)]
    kasa_config: Setting,
}

impl AdapterConfig {
    /// The settings of a folder.
    pub fn read(folder: &Path) -> Result<AdapterConfig, AdapterError> {
        let config: AdapterConfig = read_json(folder, NAME)?;
        config.check().map_err(AdapterError::within(&folder.join(NAME)))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Fault> {
        match self.peft_type.as_deref() {
            Some("LORA") => {}
            None => return Err(Fault::setting("peft_type", "is missing, expected `LORA`")),
            Some(other) => {
                return Err(Fault::setting("peft_type", format!("is `{}`, expected `LORA`", shown(other))));
            }
        }
        if let Some((name, _, why)) = self.beyond_pairs().into_iter().find(|(_, setting, _)| setting.is_set()) {
            return Err(Fault::setting(name, why));
        }
        match &self.bias {
            Setting::Word(word) if word != "none" => {
                let why = format!("is `{}`, expected `none`: Gemma 4 has no biases", shown(word));
                return Err(Fault::setting("bias", why));
            }
            Setting::Set => return Err(Fault::setting("bias", "is set, expected `none`: Gemma 4 has no biases")),
            _ => {}
        }
        match &self.init_lora_weights {
            Setting::Word(init) if CHANGING.iter().any(|kind| init.starts_with(kind)) => {
                let why = format!("is `{}`, which changes the model's own weights, too", shown(init));
                return Err(Fault::setting("init_lora_weights", format!("{why}: convert the adapter with PEFT")));
            }
            _ => {}
        }
        match self.lora_alpha {
            Some(alpha) if alpha.abs() <= MOST_ALPHA => {}
            Some(alpha) => return Err(Fault::setting("lora_alpha", format!("is {alpha}, expected at most 1e9"))),
            None => return Err(Fault::setting("lora_alpha", "is missing")),
        }
        match self.r {
            Some(r) if r >= 1.0 && r.fract() == 0.0 && r <= MOST_RANK => {}
            Some(r) => return Err(Fault::setting("r", format!("is {r}, expected a whole number from 1 on"))),
            None => return Err(Fault::setting("r", "is missing")),
        }
        self.rank_pattern.check("rank_pattern")?;
        self.alpha_pattern.check("alpha_pattern")
    }

    /// What pairs of matrices cannot say: each setting's name, itself, and why it is refused.
    fn beyond_pairs(&self) -> [(&'static str, &Setting, &'static str); 11] {
        let activated = "is set: an adapter that begins behind certain tokens is not supported";
        [
            ("use_dora", &self.use_dora, "is set: DoRA sets the lengths of columns, too, which pairs cannot"),
            ("modules_to_save", &self.modules_to_save, "names modules that are saved whole: only pairs are applied"),
            ("lora_bias", &self.lora_bias, "is set: Gemma 4 has no biases"),
            ("fan_in_fan_out", &self.fan_in_fan_out, "is set: Gemma 4 has no such modules"),
            ("use_qalora", &self.use_qalora, "is set: QA-LoRA is not supported"),
            ("use_bdlora", &self.use_bdlora, "is set: block-diagonal matrices are not supported"),
            ("alora_invocation_tokens", &self.alora_invocation_tokens, activated),
            ("layer_replication", &self.layer_replication, "is set: a model of other layers is not supported"),
            ("trainable_token_indices", &self.trainable_token_indices, "is set: trained embeddings are not supported"),
            ("arrow_config", &self.arrow_config, "is set: a choice among adapters for each token is not supported"),
            ("kasa_config", &self.kasa_config, "is set, which changes the model's own weights, too"),
        ]
    }

    /// The rank that a module's pair has.
    pub fn rank(&self, module: &str) -> f64 {
        self.rank_pattern.of(module).or(self.r).unwrap_or_default()
    }

    /// What a module's product is multiplied by.
    pub fn factor(&self, module: &str, rank: u64) -> f32 {
        let alpha = self.alpha_pattern.of(module).or(self.lora_alpha).unwrap_or_default();
        let rank = rank as f64;
        (alpha / if self.use_rslora.is_set() { rank.sqrt() } else { rank }) as f32
    }
}

/// A setting of which only matters whether it is there, and which word it is.
#[derive(Debug, Default)]
enum Setting {
    /// Absent, null, false, or an empty list.
    #[default]
    Unset,
    Word(String),
    Set,
}

impl Setting {
    fn is_set(&self) -> bool {
        !matches!(self, Setting::Unset)
    }

    fn of(is_set: bool) -> Setting {
        if is_set { Setting::Set } else { Setting::Unset }
    }
}

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Setting, D::Error> {
        deserializer.deserialize_any(AnySetting)
    }
}

struct AnySetting;

impl<'de> Visitor<'de> for AnySetting {
    type Value = Setting;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a setting")
    }

    fn visit_unit<E: Error>(self) -> Result<Setting, E> {
        Ok(Setting::Unset)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Setting, E> {
        Ok(Setting::of(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Setting, E> {
        Ok(Setting::of(value != 0))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Setting, E> {
        Ok(Setting::of(value != 0))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Setting, E> {
        Ok(Setting::of(value != 0.0))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Setting, E> {
        Ok(Setting::Word(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Setting, A::Error> {
        let mut is_set = false;
        while list.next_element::<IgnoredAny>()?.is_some() {
            is_set = true;
        }
        Ok(Setting::of(is_set))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Setting, A::Error> {
        let mut is_set = false;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            is_set = true;
        }
        Ok(Setting::of(is_set))
    }
}
