//! From an open GGUF file to a plan: the one place where the compile side's crates meet.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use gemma4c_blocks::DType;
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_codegen::cuda::{self, LowerError, Lowered, build};
use gemma4c_codegen::nvrtc::{Cache, Compiler, Toolchain};
use gemma4c_codegen::target::{DeviceFacts, Target as Gpu};
use gemma4c_graph::{Graph, WeightId, to_text};
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::{Gguf, GgufError, TensorInfo};
use gemma4c_models::tokenizer::vocab_from_metadata;
use gemma4c_plan::cuda::KvType;
use gemma4c_plan::{Model, ModelFile, Plan, Sampling, Target, Weight};
use gemma4c_runtime::machine;

/// Long enough for most conversations, and cheap: only global layers pay for every position.
pub const DEFAULT_CONTEXT: u32 = 8192;
/// Rows a pass takes on a CPU: enough to decode each weight once for many rows, few enough for the caches.
pub const DEFAULT_CHUNK: u32 = 256;
/// Rows a pass takes on a GPU: enough that reading the weights is a small part of it.
pub const DEFAULT_CUDA_CHUNK: u32 = 2048;
/// Rows of logits a pass keeps: 262144 floats each.
const ASKED: u32 = 32;

/// What the caller of the compiler decides.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub context: Option<u32>,
    pub chunk: Option<u32>,
    /// What a plan for the CPU alone rounds keys and values to, if it has 8 bits. Other plans have their GPU's.
    pub kv: Option<KvType>,
    /// `None`: for the CPU alone.
    pub cuda: Option<CudaOptions>,
}

/// What is decided for a GPU besides.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    pub targets: Vec<Gpu>,
    pub kv: KvType,
    /// Sequences at once.
    pub sequences: u32,
    /// Rings for snapshots; `None`: as many as are of use.
    pub snapshots: Option<u32>,
    pub vram: Option<u64>,
    pub disabled: Vec<String>,
}

/// Compiles. `plan_dir` is where the plan will lie, so that it can name the model's files from there.
pub fn compile(file: &Gguf, plan_dir: &Path, options: &Options) -> Result<Plan> {
    let config = Config::read(file)?;
    let context = options.context.unwrap_or(DEFAULT_CONTEXT.min(config.context));
    ensure!(
        (1..=config.context).contains(&context),
        "a context of {context} is out of range: the model was trained for {} positions",
        config.context
    );
    ensure!(options.chunk != Some(0), "a chunk of 0 tokens: at least 1 is needed");
    let graph = gemma4::graph(file, &config)?;
    let chunk = options.chunk.unwrap_or(DEFAULT_CHUNK).min(context);
    // On a GPU plan this program is what its steps mean; the GPU's own chunks are longer.
    let chunk = if options.cuda.is_some() { chunk.min(DEFAULT_CHUNK) } else { chunk };
    let kv = options.cuda.as_ref().map(|cuda| cuda.kv).or(options.kv).unwrap_or(KvType::F32);
    let program = cpu::lower(&graph, Limits { context, chunk, asked: chunk.min(ASKED), kv })?;
    let tensors = tensors_of(file, &graph)?;
    let mut programs = Vec::new();
    if let Some(cuda) = &options.cuda {
        let chunk = options.chunk.unwrap_or(DEFAULT_CUDA_CHUNK);
        let lowered = |target| {
            let lowered = lower(file, &graph, &program, cuda, target, chunk);
            if cuda.targets.len() > 1 { lowered.with_context(|| format!("for {target}")) } else { lowered }
        };
        let lowered = cuda.targets.iter().map(lowered).collect::<Result<Vec<_>>>()?;
        let compiler = Compiler { toolchain: Toolchain::find()?, cache: Cache::from_env() };
        for (target, lowered) in cuda.targets.iter().zip(lowered) {
            programs.push(build::build(lowered, target.arch, &compiler)?.0);
        }
    }
    let mut programs = programs.into_iter();
    let (cuda, others) = (programs.next(), programs.collect());
    Ok(Plan {
        model: Model {
            architecture: "gemma4".into(),
            name: config.name.clone(),
            files: file.files().iter().map(|f| model_file(f, plan_dir)).collect::<Result<_>>()?,
            fingerprint: file.fingerprint(tensors.iter().copied()),
            layers: config.layers.len() as u32,
            hidden: config.hidden,
            vocab_size: config.vocab_size,
            trained_context: config.context,
        },
        target: if cuda.is_some() { Target::Cuda } else { Target::Cpu },
        weights: std::iter::zip(&graph.weights, &tensors)
            .map(|(w, t)| Weight {
                name: w.name.clone(),
                dtype: w.dtype,
                dims: w.dims.clone(),
                file: t.file as u32,
                offset: t.offset,
                bytes: t.len,
            })
            .collect(),
        program,
        cuda,
        others,
        vocab: vocab_from_metadata(file.metadata())?,
        sampling: sampling(file)?,
        embedded: None,
        report: to_text(&graph),
    })
}

/// The target that this machine's GPU is; `None` for one that is older than all there are.
pub fn target_of(gpu: &machine::Gpu) -> Option<Gpu> {
    Gpu::of_device(&DeviceFacts {
        name: gpu.name.clone(),
        compute_capability: gpu.compute_capability,
        multiprocessors: gpu.multiprocessors,
        shared_bytes_per_block: gpu.shared_bytes_per_block,
        shared_bytes_per_multiprocessor: gpu.shared_bytes_per_multiprocessor,
        l2_bytes: gpu.l2_bytes,
    })
}

/// The launches for a GPU.
pub fn lower(
    file: &Gguf,
    graph: &Graph,
    meaning: &gemma4c_plan::Program,
    options: &CudaOptions,
    target: &Gpu,
    chunk: u32,
) -> Result<Lowered> {
    let read = |id: WeightId| -> Result<Vec<f32>, LowerError> {
        let weight = graph.weight(id);
        let unreadable = |why: String| LowerError::Unreadable { tensor: weight.name.clone(), why };
        let tensor = file.tensor(&weight.name).ok_or_else(|| unreadable("it is missing".into()))?;
        if weight.dtype != DType::F32 {
            return Err(LowerError::NotFloats { tensor: weight.name.clone(), dtype: weight.dtype });
        }
        let bytes = file.data(tensor);
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let options = cuda::Options {
        context: meaning.context,
        chunk,
        kv: options.kv,
        sequences: options.sequences,
        snapshots: options.snapshots,
        target: target.clone(),
        vram: options.vram,
        disabled: options.disabled.clone(),
    };
    Ok(cuda::lower(graph, meaning, &options, &read)?)
}

fn tensors_of<'a>(file: &'a Gguf, graph: &Graph) -> Result<Vec<&'a TensorInfo>> {
    let find = |name: &str| file.tensor(name).with_context(|| format!("tensor {name} is missing"));
    graph.weights.iter().map(|w| find(&w.name)).collect()
}

/// The authors' advice, where the file has it.
fn sampling(file: &Gguf) -> Result<Sampling, GgufError> {
    let (meta, usual) = (file.metadata(), Sampling::default());
    Ok(Sampling {
        temperature: meta.optional("general.sampling.temp")?.unwrap_or(usual.temperature),
        top_k: meta.optional("general.sampling.top_k")?.unwrap_or(usual.top_k),
        top_p: meta.optional("general.sampling.top_p")?.unwrap_or(usual.top_p),
    })
}

/// Named relative to the plan where it lies in the plan's folder or below, so that the two can move together.
fn model_file(file: &gemma4c_models::gguf::FileInfo, plan_dir: &Path) -> Result<ModelFile> {
    let absolute = |path: &Path| -> Result<PathBuf> {
        path.canonicalize().with_context(|| format!("cannot resolve {}", path.display()))
    };
    let path = absolute(&file.path)?;
    let path = path.strip_prefix(absolute(plan_dir)?).unwrap_or(&path);
    let path = path.to_str().with_context(|| format!("{} is not a name in UTF-8", path.display()))?;
    Ok(ModelFile { path: path.into(), bytes: file.len, header_bytes: file.header_len })
}
