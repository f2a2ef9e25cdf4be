//! The adapters that a plan is compiled with: opening them for a model, merging one into its weights, and saying what was
//! applied.

use std::collections::BTreeMap;
use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::Float;
use gemma4c_models::adapter::{self, Adapter, Part};
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::{Gguf, Header};
use gemma4c_plan::MOST_ADAPTERS;

use crate::error::Error;
use crate::options::{AdapterAt, Options};

/// The model that adapters are for: its text, and the projector that has its towers.
#[derive(Clone, Copy)]
pub struct For<'a> {
    pub text: &'a Header,
    pub projector: Option<&'a Header>,
}

impl For<'_> {
    fn parts(self) -> Result<Vec<Part>, Error> {
        let mut parts = vec![Part::Text];
        if let Some(projector) = self.projector {
            parts.push(Part::Vision);
            parts.extend(gemma4::has_audio(projector)?.then_some(Part::Audio));
        }
        Ok(parts)
    }
}

/// Those that the options name, and how strong each is.
pub fn open(options: &Options, model: For<'_>) -> Result<Vec<(Adapter, f32)>, Error> {
    let given = options.adapters.len();
    if given > MOST_ADAPTERS {
        return Err(Error::Option(format!("--lora is given {given} times: a plan has at most {MOST_ADAPTERS}")));
    }
    if options.merges_adapter && given != 1 {
        return Err(Error::Option(format!("--lora-merge merges one adapter; --lora is given {given} times")));
    }
    // Nothing multiplies with what is merged.
    let for_gpu = !options.gpus.is_empty() && !options.merges_adapter;
    options.adapters.iter().enumerate().map(|at| open_one(at, model, for_gpu)).collect()
}

/// An adapter for a model, and which of its adapters it is. For a GPU, which multiplies groups of 32 values, it has
/// such a rank.
pub fn open_one((number, at): (usize, &AdapterAt), model: For<'_>, for_gpu: bool) -> Result<(Adapter, f32), Error> {
    let stored = adapter::read(&at.path)?;
    let adapter = stored.of_model(&Config::read(model.text)?, &model.parts()?)?.numbered(number);
    Ok((if for_gpu { adapter.padded() } else { adapter }, at.scale))
}

/// What was applied, a sentence for each adapter, and what merging costs.
pub fn applied(adapters: &[(Adapter, f32)], merged: Option<&Merged>) -> Vec<String> {
    let of = |how: &str, (adapter, scale): &(Adapter, f32)| {
        let times = if *scale == 1.0 { String::new() } else { format!(", times {scale}") };
        let pairs = adapter.pairs.len();
        format!("{}: {how} {pairs} of {pairs} pairs{times}", adapter.path.display())
    };
    let merged = merged.into_iter().flat_map(|merged| {
        let requantised = merged.types.iter().map(|(from, to, count)| match from == to {
            true => format!("{count} matrices of {from} are quantised again"),
            false => format!("{count} matrices of {from} are {to} now"),
        });
        let requantised: Vec<String> = requantised.collect();
        let cost =
            (!requantised.is_empty()).then(|| format!("{}; without --lora-merge it is exact", requantised.join(", ")));
        [of("merged", &merged.adapter)].into_iter().chain(cost)
    });
    adapters.iter().map(|adapter| of("applied", adapter)).chain(merged).collect()
}

/// The commands that tell how far a plan with a merged adapter is from one that has it exactly: where matrices were
/// quantised again.
pub fn commands_of_distance(merged: &Merged, model: &Path, plan: &Path) -> Option<[String; 2]> {
    let (adapter, scale) = (&merged.adapter.0, merged.adapter.1);
    let strength = if scale == 1.0 { String::new() } else { format!(":{scale}") };
    let (model, lora) = (model.display(), adapter.path.display());
    let compile = format!("gemma4c compile {model} --lora {lora}{strength} -o exact.bin");
    let compare = format!("gemma4c perplexity {} --file TEXT --against exact.bin", plan.display());
    (!merged.types.is_empty()).then_some([compile, compare])
}

/// An adapter that was merged into a model.
pub struct Merged {
    pub adapter: (Adapter, f32),
    /// Its files among the model's.
    pub first_file: usize,
    /// Types in blocks that were changed, what they have become, and how many matrices.
    pub types: Vec<(DType, DType, usize)>,
}

/// Merges the adapter that the options name.
pub fn merge(model: Gguf, adapter: (Adapter, f32)) -> Result<(Gguf, Merged), Error> {
    let config = Config::read(&model)?;
    let (first_file, before) = (model.files().len(), model.tensors().to_vec());
    let model = gemma4::merged(model, &config, (&adapter.0, adapter.1))?;
    let mut types: BTreeMap<(DType, DType), usize> = BTreeMap::new();
    for (old, new) in before.iter().zip(model.tensors()).filter(|(old, new)| old.pieces != new.pieces) {
        if let (Ok(from), Ok(to)) = (old.dtype(), new.dtype()) {
            *types.entry((from, to)).or_default() += usize::from(Float::of(from).is_none());
        }
    }
    let types = types.into_iter().map(|((from, to), count)| (from, to, count)).filter(|(.., count)| *count > 0);
    Ok((model, Merged { adapter, first_file, types: types.collect() }))
}
