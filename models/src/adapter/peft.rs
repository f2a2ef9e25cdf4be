//! Adapters as PEFT saves them: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Tensors are named by modules, each with `lora_A` `[rank, inputs]` and `lora_B` `[outputs, rank]`, which is how a
//! GGUF file has them. Experts are stacked otherwise: an A holds the experts' rows behind each other, and the columns
//! of a B take turns, one of each expert. Whether such a pair changes gate and up or down is told by its shape: the
//! modules' names do not say it.

use std::path::{Path, PathBuf};

use gemma4c_blocks::recipe::{Float, Recipe};
use gemma4c_plan::{Piece, Span};

use super::config::{self, AdapterConfig};
use super::error::{AdapterError, Fault};
use super::part;
use super::shape;
use super::summary::Summary;
use super::types::{Adapter, Half, Pair};
use crate::checkpoint::folder::Folder;
use crate::checkpoint::names::{OF_LAYER, OF_MODEL, PREFIXES};
use crate::checkpoint::safetensors::{Element, Stored};
use crate::checkpoint::shown;
use crate::gemma4::{Config, Mixture};
use crate::gguf::{Gguf, TensorInfo, Writer};

const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT puts before the names of a model's modules.
const WRAPPED: &str = "base_model.model.";
/// The two halves by the word in their names, A's first.
const HALVES: [&str; 2] = [".lora_A.", ".lora_B."];

/// Whether a path names a folder of PEFT: the folder, or one of its files.
pub fn is_peft(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    path.is_dir() || name == config::NAME || name.ends_with(".safetensors")
}

/// Whether there is an adapter at a path, and not another folder or file of safetensors.
pub fn is_there(path: &Path) -> bool {
    is_peft(path) && files(path).first().is_some_and(|config| config.is_file())
}

/// The files of an adapter that is at a path.
pub fn files(path: &Path) -> Vec<PathBuf> {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    match is_peft(path) {
        true => [config::NAME, WEIGHTS].map(|name| folder.join(name)).to_vec(),
        false => vec![path.to_path_buf()],
    }
}

/// A folder of PEFT.
pub struct FromPeft {
    path: PathBuf,
    config: AdapterConfig,
    folder: Folder,
    modules: Vec<Module>,
}

/// A pair as it is stored.
struct Module {
    /// Without what PEFT puts before it.
    name: String,
    target: Target,
    /// The tensors' names.
    halves: [String; 2],
    /// Their dimensions, fastest first.
    dims: [[u64; 3]; 2],
}

/// What a module is in a GGUF file.
#[derive(Clone, Debug)]
enum Target {
    Tensor(String),
    /// The experts' gate and up, or down, of a layer.
    Experts {
        layer: u32,
    },
}

impl FromPeft {
    pub fn read(path: &Path) -> Result<FromPeft, AdapterError> {
        let given = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        let given = if given.as_os_str().is_empty() { Path::new(".") } else { given };
        let within = AdapterError::within(given);
        for name in [config::NAME, WEIGHTS] {
            if !given.join(name).is_file() {
                return Err(within(Fault::NotAdapter(format!("the folder has no {name}"))));
            }
        }
        let config = AdapterConfig::read(given)?;
        let folder = Folder::open(&given.join(WEIGHTS))?;
        let modules = modules(&folder).map_err(AdapterError::within(&given.join(WEIGHTS)))?;
        Ok(FromPeft { path: given.into(), config, folder, modules })
    }

    /// As pairs for a model's tensors. Without a model, experts are refused: how many there are, it says alone.
    pub fn adapter(self, model: Option<&Config>) -> Result<Adapter, AdapterError> {
        let within = AdapterError::within(&self.path.join(WEIGHTS));
        let (mut pairs, mut tensors): (Vec<Pair>, Vec<TensorInfo>) = (Vec::new(), Vec::new());
        for module in &self.modules {
            let (pair, of_pair) = match &module.target {
                Target::Tensor(target) => self.plain(module, target),
                Target::Experts { layer } => self.experts(module, *layer, model),
            }
            .map_err(&within)?;
            if let Some(known) = pairs.iter().find(|known| known.target == pair.target) {
                let why = format!("changes the same matrix as {}", shown(&known.a.called));
                return Err(within(Fault::tensor(&pair.a.called, why)));
            }
            pairs.push(pair);
            tensors.extend(of_pair);
        }
        let mut writer = Writer::new();
        // The settings that count are in no tensor: a plan that is kept must not be found again with others.
        let factors = pairs.iter().map(|pair| pair.factor);
        let settled = writer.set("general.type", "adapter").and_then(|()| writer.set_array("adapter.factors", factors));
        settled.map_err(|error| within(Fault::NotAdapter(error.to_string())))?;
        let file = Gguf::presented(self.folder.files, writer.describe()?, tensors, str::to_owned, Vec::new());
        Ok(Adapter { path: self.path, file, pairs })
    }

    fn plain(&self, module: &Module, target: &str) -> Result<(Pair, [TensorInfo; 2]), Fault> {
        let rank = self.rank(module, &module.name)?;
        let tensor = |half: usize| {
            let [columns, rows, _] = module.dims[half];
            let (span, float) = self.span(&module.halves[half])?;
            Ok(TensorInfo::stored(called(target, half), &[columns, rows], float.dtype(), span))
        };
        let pair = self.pair(module, target, &module.name, rank);
        Ok((pair, [tensor(0)?, tensor(1)?]))
    }

    fn experts(&self, module: &Module, layer: u32, model: Option<&Config>) -> Result<(Pair, [TensorInfo; 2]), Fault> {
        let [a_name, b_name] = &module.halves;
        let Some(model) = model else {
            return Err(Fault::tensor(
                a_name,
                "is for experts, which no seat holds: compile the adapter in with --lora",
            ));
        };
        let Some(Mixture { experts, ffn, .. }) = model.mixture else {
            return Err(Fault::tensor(a_name, "is for experts, and the model has none"));
        };
        let (experts, ffn, hidden) = (u64::from(experts), u64::from(ffn), u64::from(model.hidden));
        let ([inputs, rows, _], [columns, outputs, _]) = (module.dims[0], module.dims[1]);
        let (target, parameter) = match (inputs, outputs) {
            (i, o) if i == hidden && o == 2 * ffn => ("ffn_gate_up_exps.weight", "gate_up_proj"),
            (i, o) if i == ffn && o == hidden => ("ffn_down_exps.weight", "down_proj"),
            _ => {
                let why = format!("and its B turn {inputs} values to {outputs}: the experts' matrices do not");
                return Err(Fault::tensor(a_name, why));
            }
        };
        if rows == 0 || !rows.is_multiple_of(experts) || rows != columns {
            let why = format!("has {rows} rows, and its B {columns} columns: not the same rank for {experts} experts");
            return Err(Fault::tensor(a_name, why));
        }
        let rank = rows / experts;
        let name = module.name.split(".base_layer").next().unwrap_or_default();
        let name = format!("{name}.{parameter}");
        self.check_rank(module, &name, rank)?;
        let target = format!("blk.{layer}.{target}");
        let (of_a, float_a) = self.span(a_name)?;
        let a = TensorInfo::stored(called(&target, 0), &[inputs, rank, experts], float_a.dtype(), of_a);
        let (of_b, from) = self.span(b_name)?;
        let turns = |of: u64| {
            let recipe = Recipe::Interleaved { from, of: of as u32, step: experts as u32, columns: rank as u32 };
            Piece { rows: outputs, recipe, inputs: vec![of_b] }
        };
        let pieces = (0..experts).map(turns).collect();
        let b = TensorInfo::made(called(&target, 1), &[rank, outputs, experts], from.dtype(), pieces);
        Ok((self.pair(module, &target, &name, rank), [a, b]))
    }

    fn pair(&self, module: &Module, target: &str, name: &str, rank: u64) -> Pair {
        let half = |half: usize| Half { tensor: called(target, half), called: module.halves[half].clone() };
        Pair { target: target.into(), a: half(0), b: half(1), factor: self.config.factor(name, rank) }
    }

    /// The rank that the tensors have, which the settings say as well.
    fn rank(&self, module: &Module, name: &str) -> Result<u64, Fault> {
        let [a, b] = [0, 1].map(|half| (module.halves[half].as_str(), module.dims[half]));
        let rank = shape::rank(a, b)?;
        self.check_rank(module, name, rank)?;
        Ok(rank)
    }

    fn check_rank(&self, module: &Module, name: &str, rank: u64) -> Result<(), Fault> {
        let said = self.config.rank(name);
        match said == rank as f64 {
            true => Ok(()),
            false => {
                let why = format!("has rank {rank}, and {} says {said}", config::NAME);
                Err(Fault::tensor(&module.halves[0], why))
            }
        }
    }

    /// Where a tensor's bytes are, and the type of its values.
    fn span(&self, name: &str) -> Result<(Span, Float), Fault> {
        let (file, tensor) = self.folder.tensor(name).ok_or_else(|| Fault::tensor(name, "is missing"))?;
        let float = float(tensor)?;
        Ok((Span { file, offset: tensor.offset, bytes: tensor.bytes }, float))
    }

    pub fn summary(&self) -> Summary {
        let base = self.config.base_model_name_or_path.as_deref().map(shown);
        let targets = self.modules.iter().map(|module| {
            let [_, rows, _] = module.dims[0];
            match &module.target {
                Target::Tensor(target) => (target.clone(), rows),
                // The model says how many experts share the rows.
                Target::Experts { layer } => (format!("blk.{layer}.experts"), self.config.rank(&module.name) as u64),
            }
        });
        let targets: Vec<(String, u64)> = targets.collect();
        let name = self.path.file_name().and_then(|name| name.to_str()).map(shown);
        let each = targets.iter().map(|(target, rank)| (target.as_str(), *rank));
        Summary::of("PEFT", name, base, self.config.lora_alpha.unwrap_or_default(), each)
    }
}

/// The name of a half in [`Adapter::file`].
fn called(target: &str, half: usize) -> String {
    format!("{target}{}", [".lora_a", ".lora_b"][half])
}

fn float(tensor: &Stored) -> Result<Float, Fault> {
    match tensor.element {
        Element::F32 => Ok(Float::F32),
        Element::F16 => Ok(Float::F16),
        Element::BF16 => Ok(Float::BF16),
        other => Err(Fault::tensor(&tensor.name, format!("is {other}, expected BF16, F16 or F32"))),
    }
}

/// All pairs of a file, in the order of their names.
fn modules(folder: &Folder) -> Result<Vec<Module>, Fault> {
    let mut modules = Vec::new();
    for name in folder.names() {
        let (module, half, other) = half_of(name)?;
        if !folder.has(&other) {
            let missing = ["A", "B"][1 - half];
            return Err(Fault::tensor(name, format!("has no {missing} beside it: {} is missing", shown(&other))));
        }
        if half == 1 {
            continue;
        }
        let target = target(name, module)?;
        let dims = |name: &str| -> Result<[u64; 3], Fault> {
            let Some((_, tensor)) = folder.tensor(name) else { return Err(Fault::tensor(name, "is missing")) };
            float(tensor)?;
            match *tensor.shape() {
                [rows, columns] if rows > 0 && columns > 0 => Ok([columns, rows, 1]),
                _ => Err(Fault::tensor(name, format!("is {:?}, expected a matrix", tensor.shape()))),
            }
        };
        let dims = [dims(name)?, dims(&other)?];
        modules.push(Module { name: module.into(), target, halves: [name.into(), other], dims });
    }
    if modules.is_empty() { Err(Fault::Empty) } else { Ok(modules) }
}

/// A tensor's module, which half of its pair it is, and the name of the other one.
fn half_of(name: &str) -> Result<(&str, usize, String), Fault> {
    for (half, word) in HALVES.iter().enumerate() {
        let Some((module, rest)) = name.split_once(word) else { continue };
        if rest != "weight" && rest != "default.weight" {
            return Err(Fault::tensor(name, "is no matrix of a pair: Gemma 4 has no biases"));
        }
        let module = module.strip_prefix(WRAPPED).unwrap_or(module);
        return Ok((module, half, name.replacen(word, HALVES[1 - half], 1)));
    }
    let why = match name {
        _ if name.contains("lora_magnitude_vector") => "is of DoRA, which sets the lengths of columns, too",
        _ if name.contains("lora_embedding_") => "changes a table of embeddings, which is not supported",
        _ => "is no half of a pair (lora_A, lora_B): a tensor that is saved whole cannot be added to a product",
    };
    Err(Fault::tensor(name, why))
}

/// What a module is called in a GGUF file.
fn target(tensor: &str, module: &str) -> Result<Target, Fault> {
    let unknown = || Fault::tensor(tensor, "is of no module that Gemma 4's text model has");
    for prefix in PREFIXES {
        let Some(rest) = module.strip_prefix(prefix) else { continue };
        if part::is_of_tower(rest) {
            let unknown = || Fault::tensor(tensor, "is of a module of a tower that is not adapted here");
            return part::in_projector(rest).map(Target::Tensor).ok_or_else(unknown);
        }
        let own = format!("{rest}.weight");
        if let Some(name) = OF_MODEL.iter().find(|name| name.module == own) {
            return Ok(Target::Tensor(name.gguf.into()));
        }
        let Some((layer, rest)) = rest.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else { continue };
        let layer: u32 = layer.parse().map_err(|_| unknown())?;
        if rest == "experts" || rest == "experts.base_layer" {
            return Ok(Target::Experts { layer });
        }
        if rest.starts_with("experts.") {
            return Err(Fault::tensor(tensor, "is of one expert: only pairs for all experts of a layer are supported"));
        }
        let own = format!("{rest}.weight");
        let name = OF_LAYER.iter().find(|name| name.module == own).ok_or_else(unknown)?;
        return Ok(Target::Tensor(format!("blk.{layer}.{}", name.gguf)));
    }
    Err(unknown())
}
