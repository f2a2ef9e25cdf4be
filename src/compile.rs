//! From an open GGUF file to a plan: the one place where the compile side's crates meet.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_graph::{Graph, to_text};
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::{Gguf, GgufError, TensorInfo};
use gemma4c_models::tokenizer::vocab_from_metadata;
use gemma4c_plan::{Model, ModelFile, Plan, Sampling, Target, Weight};

/// Long enough for most conversations, and cheap: only global layers pay for every position.
pub const DEFAULT_CONTEXT: u32 = 8192;
/// Rows a pass takes on a CPU: enough to decode each weight once for many rows, few enough for the caches.
pub const DEFAULT_CHUNK: u32 = 256;
/// Rows of logits a pass keeps: 262144 floats each.
const ASKED: u32 = 32;

/// What the caller of the compiler decides.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub context: Option<u32>,
    pub chunk: u32,
}

/// Compiles for the CPU. `plan_dir` is where the plan will lie, so that it can name the model's files from there.
pub fn compile(file: &Gguf, plan_dir: &Path, options: Options) -> Result<Plan> {
    let config = Config::read(file)?;
    let context = options.context.unwrap_or(DEFAULT_CONTEXT.min(config.context));
    ensure!(
        (1..=config.context).contains(&context),
        "a context of {context} is out of range: the model was trained for {} positions",
        config.context
    );
    ensure!(options.chunk >= 1, "a chunk of 0 tokens: at least 1 is needed");
    let graph = gemma4::graph(file, &config)?;
    let chunk = options.chunk.min(context);
    let program = cpu::lower(&graph, Limits { context, chunk, asked: chunk.min(ASKED) })?;
    let tensors = tensors_of(file, &graph)?;
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
        target: Target::Cpu,
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
        cuda: None,
        vocab: vocab_from_metadata(file.metadata())?,
        sampling: sampling(file)?,
        report: to_text(&graph),
    })
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
