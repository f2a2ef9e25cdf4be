//! Checkpoints: folders of safetensors as models are published and trained, presented as if they were GGUF files.
//!
//! A folder has tensors in one file or in shards, and beside them `config.json`, `tokenizer.json`,
//! `generation_config.json` and `chat_template.jinja`. Here they become what a GGUF file of the same model has: metadata
//! under its keys, tensors under its names and in its order of dimensions. So config, graph, tokenizer and chat know
//! one kind of file. Weights stay where they are: a tensor that is stored otherwise than a plan wants it says what its
//! rows are made of ([`crate::gguf::TensorInfo::pieces`]).
//!
//! Files are not trusted. Headers are bounded and every range is checked, JSON is read into types of bounded size, and
//! what a checkpoint says that the forward pass does otherwise is refused by name.
//!
//! What it does not do: read weights. Scales of single rows are looked at where rows are made; those of whole tensors
//! here.

mod config;
mod error;
pub(crate) mod folder;
mod forms;
mod json;
pub(crate) mod names;
pub(crate) mod safetensors;
mod tensors;
mod vocab;

use std::path::Path;

use crate::gguf::{Gguf, Writer};

use config::{Generation, Root, Text, written};
use folder::{Folder, read_json, read_optional};
use vocab::{Special, Tokenizer};

pub(crate) use error::shown;
pub use error::{CheckpointError, Fault};
pub use folder::is_checkpoint;
pub use names::in_checkpoint as stored_name;

/// A chat template is a few kilobytes.
const MOST_TEMPLATE: u64 = 4 << 20;

/// Opens the text model of a checkpoint: a folder, or one of its files.
pub fn open(path: &Path) -> Result<Gguf, CheckpointError> {
    let given = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let given = if given.as_os_str().is_empty() { Path::new(".") } else { given };
    let within = CheckpointError::within(given);
    if !given.join("config.json").is_file() {
        return Err(within(Fault::Lacks("config.json")));
    }
    let in_config = CheckpointError::within(given.join("config.json"));
    let root: Root = read_json(given, "config.json")?;
    let has_towers = root.vision_config.is_some() || root.audio_config.is_some();
    let top: Option<Text> = if root.has_text() { None } else { Some(read_json(given, "config.json")?) };
    let (text, quantisation) = root.text(top).map_err(&in_config)?;
    let folder = Folder::open(path)?;
    let shape = text.shape(&quantisation);

    let mut writer = Writer::new();
    writer.set("general.architecture", "gemma4").map_err(written).map_err(&within)?;
    let name = given.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    if let Some(name) = name {
        writer.set("general.name", name.as_str()).map_err(written).map_err(&within)?;
    }
    text.write(&mut writer).map_err(&in_config)?;
    let generation: Option<Generation> = read_optional(given, "generation_config.json")?;
    generation.unwrap_or_default().write(&mut writer).map_err(&within)?;
    let special: Special = read_optional(given, "tokenizer_config.json")?.unwrap_or_default();
    let tokenizer: Option<Tokenizer> = read_optional(given, "tokenizer.json")?;
    if let Some(tokenizer) = tokenizer {
        let in_tokenizer = CheckpointError::within(given.join("tokenizer.json"));
        tokenizer.write(&special, text.vocab_size(), &mut writer).map_err(in_tokenizer)?;
    }
    if let Some(template) = chat_template(given, special)? {
        writer.set("tokenizer.chat_template", template.as_str()).map_err(written).map_err(&within)?;
    }
    let tensors = tensors::of_text(&folder, &shape)?;
    let notes = notes(&folder, has_towers);
    let header = writer.describe()?;
    Ok(Gguf::presented(folder.files, header, tensors, names::in_checkpoint, notes))
}

/// The template in a file of its own, or in the tokenizer's settings.
fn chat_template(folder: &Path, special: Special) -> Result<Option<String>, CheckpointError> {
    let path = folder.join("chat_template.jinja");
    if !path.exists() {
        return Ok(special.chat_template.and_then(vocab::Templates::usual));
    }
    let failed = |source| CheckpointError::Io { path: path.clone(), source };
    let len = std::fs::metadata(&path).map_err(failed)?.len();
    if len > MOST_TEMPLATE {
        let fault = Fault::key("its length", format!("{len} bytes"), format!("at most {MOST_TEMPLATE}"));
        return Err(CheckpointError::within(&path)(fault));
    }
    std::fs::read_to_string(&path).map(Some).map_err(failed)
}

/// What of a checkpoint is not used, each kind in one sentence.
fn notes(folder: &Folder, has_towers: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let ignored = folder.names().filter(|name| forms::IGNORED.iter().any(|end| name.ends_with(end))).count();
    if ignored > 0 {
        notes.push(format!(
            "{ignored} scales of activations, keys and values are not used: they are for engines that quantise these"
        ));
    }
    let is_tower = |name: &&str| ["vision", "audio"].iter().any(|word| name.contains(word));
    let of_towers = folder.names().filter(is_tower).count();
    if has_towers && of_towers > 0 {
        notes.push(format!(
            "{of_towers} tensors of towers for pictures and sound are not used: --mmproj takes a GGUF file of them"
        ));
    }
    notes
}
