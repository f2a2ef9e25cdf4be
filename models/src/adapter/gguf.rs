//! Adapters as llama.cpp writes them: a GGUF file with `.lora_a` and `.lora_b` beside the names of the model's tensors,
//! and one alpha for all of them, which is divided by each pair's own rank.

use std::path::{Path, PathBuf};

use super::config::MOST_ALPHA;
use super::error::{AdapterError, Fault};
use super::shape;
use super::summary::Summary;
use super::types::{Adapter, Half, Pair};
use crate::checkpoint::shown;
use crate::gguf::{Gguf, TensorInfo};

/// The two endings, A's first.
const ENDINGS: [&str; 2] = [".lora_a", ".lora_b"];

/// A GGUF adapter.
pub struct FromGguf {
    path: PathBuf,
    file: Gguf,
    alpha: f32,
    /// With the rank of each.
    pairs: Vec<(Pair, u64)>,
}

impl FromGguf {
    pub fn read(path: &Path) -> Result<FromGguf, AdapterError> {
        let file = Gguf::open(path)?;
        let within = AdapterError::within(path);
        let meta = file.metadata();
        let text = |key: &str| meta.optional::<&str>(key);
        match text("general.type")? {
            Some("adapter") => {}
            None => return Err(within(Fault::NotAdapter("general.type is missing, expected `adapter`".into()))),
            Some(other) => {
                let why = format!("general.type is `{}`, expected `adapter`", shown(other));
                return Err(within(Fault::NotAdapter(why)));
            }
        }
        let architecture = meta.str("general.architecture")?;
        if architecture != "gemma4" {
            let why = format!("is `{}`: the adapter is for another architecture than gemma4", shown(architecture));
            return Err(within(Fault::setting("general.architecture", why)));
        }
        let kind = meta.str("adapter.type")?;
        if kind != "lora" {
            return Err(within(Fault::setting("adapter.type", format!("is `{}`, expected `lora`", shown(kind)))));
        }
        let activated = "adapter.alora.invocation_tokens";
        if meta.get(activated).is_some() {
            let why = "is there: an adapter that begins behind certain tokens is not supported";
            return Err(within(Fault::setting(activated, why)));
        }
        let alpha = meta.f32("adapter.lora.alpha")?;
        if alpha.is_nan() || f64::from(alpha.abs()) > MOST_ALPHA {
            let why = format!("is {alpha}, expected a number up to {MOST_ALPHA}");
            return Err(within(Fault::setting("adapter.lora.alpha", why)));
        }
        let pairs = pairs(&file, alpha).map_err(within)?;
        Ok(FromGguf { path: path.into(), file, alpha, pairs })
    }

    pub fn adapter(self) -> Adapter {
        let pairs = self.pairs.into_iter().map(|(pair, _)| pair).collect();
        Adapter { path: self.path, file: self.file, pairs }
    }

    pub fn summary(&self) -> Summary {
        let meta = self.file.metadata();
        let text = |key: &str| meta.str(key).ok().map(shown);
        let base = ["general.base_model.0.name", "general.base_model.0.repo_url"].into_iter().find_map(text);
        let targets = self.pairs.iter().map(|(pair, rank)| (pair.target.as_str(), *rank));
        Summary::of("GGUF", text("general.name"), base, self.alpha.into(), targets)
    }
}

fn pairs(file: &Gguf, alpha: f32) -> Result<Vec<(Pair, u64)>, Fault> {
    let mut pairs = Vec::new();
    for tensor in file.tensors() {
        let name = tensor.name.as_ref();
        let half = ENDINGS.iter().position(|ending| name.ends_with(ending));
        let Some(half) = half else {
            return Err(Fault::tensor(
                name,
                "is no half of a pair (.lora_a, .lora_b): it cannot be added to a product",
            ));
        };
        let target = &name[..name.len() - ENDINGS[half].len()];
        let other = format!("{target}{}", ENDINGS[1 - half]);
        let Some(other) = file.tensor(&other) else {
            let missing = ["A", "B"][1 - half];
            return Err(Fault::tensor(name, format!("has no {missing} beside it: {} is missing", shown(&other))));
        };
        if half == 0 {
            pairs.push(pair(target, tensor, other, alpha)?);
        }
    }
    if pairs.is_empty() { Err(Fault::Empty) } else { Ok(pairs) }
}

fn pair(target: &str, a: &TensorInfo, b: &TensorInfo, alpha: f32) -> Result<(Pair, u64), Fault> {
    let half = |tensor: &TensorInfo| {
        if let Err(error) = tensor.dtype() {
            return Err(Fault::NotAdapter(error.to_string()));
        }
        Ok(Half { tensor: tensor.name.to_string(), called: tensor.name.to_string() })
    };
    let (of_a, of_b) = (half(a)?, half(b)?);
    let dims = |tensor: &TensorInfo| shape::matrix(&tensor.name, tensor.dims());
    let rank = shape::rank((&a.name, dims(a)?), (&b.name, dims(b)?))?;
    // llama.cpp's rule: without an alpha there is nothing to divide.
    let factor = if alpha == 0.0 { 1.0 } else { alpha / rank as f32 };
    Ok((Pair { target: target.into(), a: of_a, b: of_b, factor }, rank))
}
