//! Random models with the exact shape of the real ones, for tests, demos and measurements where no weights are at hand.
//!
//! A synthetic file has the metadata, the tensors and the types a converter would have written, and numbers that keep
//! activations sane through all layers. It knows nothing and says nonsense, at the speed of the real thing.
//!
//! The bytes follow from the options alone: every piece of a tensor has its own generator, so neither the number of
//! threads nor their order shows.

mod checkpoint;
mod drafter;
mod error;
mod fill;
mod inventory;
mod list;
mod metadata;
mod preset;
mod random;
mod sound;
mod tower;
mod types;
mod vocab;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use gemma4c_blocks::DType;
use xxhash_rust::xxh3::xxh3_64;

use crate::gguf::{Body, Gguf, Header, WriteError, Writer};
use fill::Filler;
use inventory::{Fill, Massive};
use random::Lanes;
use types::name_in_layer;

pub use checkpoint::{Form, write as write_checkpoint};
pub use error::SynthError;
pub use inventory::TensorSpec;
pub use preset::Preset;
pub use types::Types;

/// What to write.
#[derive(Clone, Debug)]
pub struct Options {
    pub preset: Preset,
    /// Of the matrices; vectors, norms and the router are F32 in any model.
    pub dtype: DType,
    pub seed: u64,
    /// Fewer layers than the preset's.
    pub layers: Option<u32>,
    /// A GGUF file whose vocabulary is taken; otherwise one is generated.
    pub vocab: Option<PathBuf>,
    /// How many times larger than the others a few channels of the residual are, as in trained models; none if not
    /// given.
    pub massive: Option<f32>,
    /// The model's drafter instead of the model.
    pub drafter: bool,
}

impl Options {
    /// The whole model, with a generated vocabulary and no massive channels.
    pub fn new(preset: Preset, dtype: DType) -> Options {
        Options { preset, dtype, seed: 0, layers: None, vocab: None, massive: None, drafter: false }
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    pub layers: u32,
    pub tensors: usize,
    pub parameters: u64,
    pub file_bytes: u64,
}

/// Bytes a thread makes before it writes them: few enough to stay in its cache.
const PIECE: u64 = 256 << 10;

/// A model's shape, and the file its vocabulary comes from.
struct Model {
    shape: preset::Shape,
    vocabulary: Option<Gguf>,
}

impl Model {
    fn new(options: &Options) -> Result<Model, SynthError> {
        if options.massive.is_some() && !fill::can_be_set(options.dtype) {
            return Err(SynthError::MassiveType(options.dtype));
        }
        if let Some(size) = options.massive.filter(|size| !(1.0..=100_000.0).contains(size)) {
            return Err(SynthError::Massive(size));
        }
        let mut shape = options.preset.shape(options.layers)?;
        let vocabulary = options.vocab.as_ref().map(Gguf::open).transpose().map_err(SynthError::Vocabulary)?;
        if let (Some(file), Some(path)) = (&vocabulary, &options.vocab) {
            let tokens = file.metadata().array("tokenizer.ggml.tokens").map_err(SynthError::Vocabulary)?.len();
            let size = u32::try_from(tokens).ok().filter(|&size| size > 0);
            shape.vocab = size.ok_or_else(|| SynthError::VocabularySize { path: path.clone(), tokens })?;
        }
        Ok(Model { shape, vocabulary })
    }
}

/// The tensors such a model has.
pub fn tensors(options: &Options) -> Result<Vec<TensorSpec>, SynthError> {
    let shape = Model::new(options)?.shape;
    Ok(match options.drafter {
        true => drafter::inventory(&drafter::shape(options.preset, &shape), options.dtype),
        false => inventory::inventory(&shape, options.dtype, options.massive),
    })
}

/// Writes a random model to `out`, on all threads of the current pool. `progress` is told the bytes done and the bytes
/// in all, from any of them.
pub fn write(options: &Options, out: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<Summary, SynthError> {
    let (body, tensors, summary) = create(options, out)?;
    fill_tensors(&tensors, &body, options.seed, progress)?;
    body.finish()?;
    Ok(summary)
}

/// Writes the projector file (mmproj) of such a model instead: its towers.
pub fn write_projector(
    options: &Options,
    out: &Path,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Summary, SynthError> {
    let Model { shape, .. } = Model::new(options)?;
    let (writer, tensors) = tower::projector(options.preset, &shape, options.dtype)?;
    let body = writer.create(out)?;
    let parameters = tensors.iter().map(|t| t.dims.iter().product::<u64>()).sum();
    let summary = Summary { layers: shape.layers, tensors: tensors.len(), parameters, file_bytes: body.file_len() };
    fill_tensors(&tensors, &body, options.seed, progress)?;
    body.finish()?;
    Ok(summary)
}

/// Writes everything but the numbers: a file of the full size whose weights are zeros that no disk block backs. Enough
/// for whatever reads metadata and shapes alone, at any size, in milliseconds.
pub fn write_header(options: &Options, out: &Path) -> Result<Summary, SynthError> {
    let (body, _, summary) = create(options, out)?;
    body.finish()?;
    Ok(summary)
}

/// What the file of a model of full size would say, without a file and without a vocabulary: enough for its config and
/// its graph.
pub fn describe(preset: Preset, types: Types) -> Result<Header, SynthError> {
    let (shape, dtype) = (preset.shape(None)?, types.base());
    let mut writer = Writer::new();
    metadata::set_model(&mut writer, preset.name(), &shape, dtype)?;
    let tensors = inventory::inventory(&shape, dtype, None);
    let mut places: HashMap<&str, (usize, usize)> = HashMap::new();
    for tensor in &tensors {
        places.entry(name_in_layer(tensor)).or_default().1 += 1;
    }
    for tensor in &tensors {
        let place = places.entry(name_in_layer(tensor)).or_default();
        writer.tensor(&tensor.name, &tensor.dims, types.of(tensor, *place))?;
        place.0 += 1;
    }
    writer.describe().map_err(SynthError::Described)
}

fn create(options: &Options, out: &Path) -> Result<(Body, Vec<TensorSpec>, Summary), SynthError> {
    let Model { shape, vocabulary } = Model::new(options)?;
    let tensors = tensors(options)?;

    let mut writer = Writer::new();
    let mut layers = shape.layers;
    if options.drafter {
        let of_drafter = drafter::shape(options.preset, &shape);
        drafter::set_metadata(&mut writer, options.preset.name(), &of_drafter)?;
        layers = of_drafter.body.layers;
    } else {
        metadata::set_model(&mut writer, options.preset.name(), &shape, options.dtype)?;
        match &vocabulary {
            Some(file) => metadata::copy_vocabulary(&mut writer, file)?,
            None => metadata::set_vocabulary(&mut writer, &shape)?,
        }
    }
    add_tensors(&mut writer, &tensors)?;
    let body = writer.create(out)?;

    let parameters = tensors.iter().map(|t| t.dims.iter().product::<u64>()).sum();
    let summary = Summary { layers, tensors: tensors.len(), parameters, file_bytes: body.file_len() };
    Ok((body, tensors, summary))
}

fn add_tensors(writer: &mut Writer, tensors: &[TensorSpec]) -> Result<(), WriteError> {
    tensors.iter().try_for_each(|tensor| {
        match tensor.fill {
            Fill::EveryToken => writer.integers(&tensor.name, &tensor.dims)?,
            _ => writer.tensor(&tensor.name, &tensor.dims, tensor.dtype)?,
        };
        Ok(())
    })
}

/// What the file of a drafter of full size would say, without a file.
pub fn describe_drafter(preset: Preset, dtype: DType) -> Result<Header, SynthError> {
    let shape = drafter::shape(preset, &preset.shape(None)?);
    let mut writer = Writer::new();
    drafter::set_metadata(&mut writer, preset.name(), &shape)?;
    add_tensors(&mut writer, &drafter::inventory(&shape, dtype))?;
    writer.describe().map_err(SynthError::Described)
}

/// The same of a projector.
pub fn describe_projector(preset: Preset, dtype: DType) -> Result<Header, SynthError> {
    let (writer, _) = tower::projector(preset, &preset.shape(None)?, dtype)?;
    writer.describe().map_err(SynthError::Described)
}

/// A tensor cut into pieces of whole blocks.
struct Job {
    filler: Filler,
    /// Identifies the tensor's random numbers.
    id: u64,
    len: u64,
    piece: u64,
    /// Number of its first piece among all pieces.
    first: u64,
}

fn fill_tensors(
    tensors: &[TensorSpec],
    body: &Body,
    seed: u64,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), WriteError> {
    let mut unit_rms = [None; DType::ALL.len()];
    let mut pieces = 0;
    let jobs: Vec<Job> = tensors
        .iter()
        .enumerate()
        .map(|(i, tensor)| {
            let len = body.tensor_len(i);
            let measured = |dtype: DType| *unit_rms[dtype as usize].get_or_insert_with(|| fill::unit_rms(dtype));
            let mut filler = Filler::new(tensor.fill, tensor.dtype, len, measured);
            if tensor.massive != Massive::Untouched {
                filler = filler.with_massive(tensor.massive, tensor.dtype, tensor.dims[0]);
            }
            let piece = PIECE - PIECE % tensor.dtype.layout().file_bytes as u64;
            let first = pieces;
            pieces += len.div_ceil(piece);
            Job { filler, id: xxh3_64(tensor.random.as_bytes()), len, piece, first }
        })
        .collect();
    let total = jobs.iter().map(|job| job.len).sum();

    let (next, done, failed) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(None));
    rayon::broadcast(|_| {
        let mut buffer = vec![0; PIECE as usize];
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return;
            }
            let tensor = jobs.partition_point(|job| job.first <= piece) - 1;
            let job = &jobs[tensor];
            let part = piece - job.first;
            let offset = part * job.piece;
            let out = &mut buffer[..job.piece.min(job.len - offset) as usize];
            job.filler.fill(&mut Lanes::new(seed, job.id, part), offset, out);
            if let Err(error) = body.write_at(tensor, offset, out) {
                // Nobody takes another piece after the first failure.
                next.store(pieces, Ordering::Relaxed);
                failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
                return;
            }
            progress(done.fetch_add(out.len() as u64, Ordering::Relaxed) + out.len() as u64, total);
        }
    });
    let failed = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    failed.map_or(Ok(()), Err)
}
