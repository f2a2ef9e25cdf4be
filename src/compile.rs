//! From an open GGUF file to a plan: the one place where the compile side's crates meet.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use gemma4c_blocks::DType;
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_codegen::cuda::{self, LowerError, Lowered, SoftTokens, TowerGraph, TowerMedium, build};
use gemma4c_codegen::nvrtc::{Cache, Compiler, Toolchain};
use gemma4c_codegen::target::{DeviceFacts, Target as Gpu};
use gemma4c_graph::{Graph, NodeId, WeightId, to_text};
use gemma4c_models::gemma4::{self, AudioConfig, AudioKind, Config, DrafterConfig, DrafterGraph, VisionConfig};
use gemma4c_models::gguf::{Gguf, GgufError, TensorInfo};
use gemma4c_models::media;
use gemma4c_models::tokenizer::vocab_from_metadata;
use gemma4c_plan::cuda::KvType;
use gemma4c_plan::{
    Drafter, MediaTokens, Medium, Model, ModelFile, Plan, Sampling, Stage, Target, Tower, Vocab, Weight,
};
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
    /// What reads pictures; `None`: the plan reads text alone.
    pub projector: Option<Arc<Projector>>,
    /// The file of what guesses the next tokens, if there is one.
    pub drafter: Option<Arc<Gguf>>,
}

/// A projector file that belongs to the model.
#[derive(Debug)]
pub struct Projector {
    pub file: Gguf,
    /// Soft tokens of a picture, at most.
    pub image_tokens: u32,
}

/// A model's file, for messages.
fn path_of(file: &Gguf) -> String {
    file.files().first().map_or(String::new(), |file| file.path.display().to_string())
}

/// What is decided for a GPU besides.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    pub targets: Vec<Gpu>,
    pub kv: KvType,
    /// Sequences at once.
    pub sequences: u32,
    /// Rows of one sequence that are decoded at once, to verify drafts: 1 for none.
    pub verified: u32,
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
    let vocab = vocab_from_metadata(file.metadata())?;
    let projector = options.projector.as_deref();
    let towers = match projector {
        None => Vec::new(),
        Some(projector) => {
            let vision = VisionConfig::read(&projector.file).with_context(|| path_of(&projector.file))?;
            gemma4::fits(&vision, &config).with_context(|| path_of(&projector.file))?;
            let tokens = vocab.as_ref().and_then(media::image_tokens);
            let tokens =
                tokens.context("the model's vocabulary lacks the tokens of pictures: <|image>, <|image|>, <image|>")?;
            let tower = gemma4::vision_tower(&projector.file, &vision).with_context(|| path_of(&projector.file))?;
            let Projector { file: beside, image_tokens } = projector;
            let VisionConfig { patch, pool, .. } = vision;
            let medium = Medium::Picture { patch, pool };
            let most = image_tokens * pool * pool;
            let (graph, stages) = (tower.graph, tower.stages);
            let mut towers = vec![NewTower { name: "vision", graph, stages, medium, most, tokens }];
            towers.extend(audio(beside, &config, vocab.as_ref()).with_context(|| path_of(beside))?);
            towers
        }
    };
    let graph = text_graph(file, &config, !towers.is_empty())?;
    // A picture whose rows see each other is read in one pass.
    let least = projector.filter(|_| config.sees_ahead()).map_or(1, |projector| projector.image_tokens);
    ensure!(
        least <= context && options.chunk.is_none_or(|chunk| least <= chunk),
        "a picture of {least} soft tokens is read in one pass: --ctx and --chunk must be at least that, or --image-tokens less"
    );
    let chunk = options.chunk.unwrap_or(DEFAULT_CHUNK.max(least)).min(context);
    // On a GPU plan this program is what its steps mean; the GPU's own chunks are longer.
    let chunk = if options.cuda.is_some() { chunk.min(DEFAULT_CHUNK.max(least)) } else { chunk };
    let kv = options.cuda.as_ref().map(|cuda| cuda.kv).or(options.kv).unwrap_or(KvType::F32);
    let program = cpu::lower(&graph, Limits { context, chunk, asked: chunk.min(ASKED), kv })?;
    let tensors = tensors_of(file, &graph)?;
    let mut weights = weights_of(&graph.weights, &tensors, 0);
    let mut sources = Sources::of(file, &graph.weights, &tensors);
    let mut models = vec![(file, tensors)];
    let (mut lowered, mut tower_graphs) = (Vec::new(), Vec::new());
    let mut report = to_text(&graph);
    if let Some(projector) = projector {
        let mut of_projector = Vec::new();
        for tower in &towers {
            let tensors = tensors_of(&projector.file, &tower.graph)?;
            lowered.push(tower.lower(weights.len() as u32)?);
            weights.extend(weights_of(&tower.graph.weights, &tensors, file.files().len() as u32));
            let places = towers_places(&tower.graph, sources.weights.len());
            sources.extend(&projector.file, &tower.graph.weights, &tensors);
            tower_graphs.push(tower.graph.clone().with_weights(&sources.weights, places));
            of_projector.extend(tensors);
            report += &format!("\n\ntower {}\n{}", tower.name, to_text(&tower.graph));
        }
        models.push((&projector.file, of_projector));
    }
    let (mut drafter, mut drafter_graph) = (None, None);
    if let Some(drafter_file) = options.drafter.as_deref() {
        let first_file: usize = models.iter().map(|(model, _)| model.files().len()).sum();
        let target = Drafted { file, config: &config, graph: &graph, program: &program };
        let parts = target.drafter(drafter_file, weights.len() as u32).with_context(|| path_of(drafter_file))?;
        weights.extend(weights_of(&parts.own_weights, &parts.tensors, first_file as u32));
        sources.extend(drafter_file, &parts.own_weights, &parts.tensors);
        models.push((drafter_file, parts.tensors));
        report += &format!("\n\ndrafter\n{}", to_text(&parts.graph));
        drafter_graph = Some(parts.graph.with_weights(&sources.weights, parts.place));
        drafter = Some(parts.drafter);
    }
    let mut programs = Vec::new();
    if let Some(cuda) = &options.cuda {
        let chunk = options.chunk.unwrap_or(DEFAULT_CUDA_CHUNK);
        let of_towers: Vec<TowerGraph<'_>> = lowered.iter().zip(&tower_graphs).map(of_tower).collect();
        let soft = SoftTokens { towers: &of_towers, pad: padding(file)? };
        let lowered = |target| {
            let drafter = drafter.as_ref().zip(drafter_graph.as_ref());
            let model = Parts { graph: &graph, meaning: &program, sources: &sources, soft, drafter };
            let lowered = lower(model, cuda, target, chunk);
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
            files: models
                .iter()
                .flat_map(|(model, _)| model.files())
                .map(|f| model_file(f, plan_dir))
                .collect::<Result<_>>()?,
            fingerprint: Gguf::fingerprint_of(&models),
            layers: config.layers.len() as u32,
            hidden: config.hidden,
            vocab_size: config.vocab_size,
            trained_context: config.context,
        },
        target: if cuda.is_some() { Target::Cuda } else { Target::Cpu },
        weights,
        program,
        cuda,
        others,
        vocab,
        sampling: sampling(file)?,
        embedded: None,
        towers: lowered,
        drafter,
        report,
    })
}

/// The text's graph: with places for soft tokens where there is a tower.
fn text_graph(file: &Gguf, config: &Config, has_tower: bool) -> Result<Graph> {
    match has_tower {
        false => Ok(gemma4::graph(file, config)?),
        true => Ok(gemma4::graph_with_soft_tokens(file, config, padding(file)?)?),
    }
}

/// The token whose row of the per-layer table soft tokens have.
fn padding(file: &Gguf) -> Result<u32> {
    Ok(file.metadata().optional("tokenizer.ggml.padding_token_id")?.unwrap_or(0))
}

/// A plan's tower, and its graph over the plan's weights, as the lowering for a GPU takes it.
fn of_tower<'a>((tower, graph): (&'a Tower, &'a Graph)) -> TowerGraph<'a> {
    let medium = match tower.medium {
        Medium::Picture { pool, .. } => TowerMedium::Picture { pool },
        Medium::Mel { .. } => TowerMedium::Sound { frames: 4 },
        Medium::Samples { .. } => TowerMedium::Sound { frames: 1 },
    };
    TowerGraph { graph, meaning: &tower.program, patch_width: tower.medium.row_width(), medium }
}

/// Where the weights of a tower stand in a plan: behind each other from `first_weight` on.
fn towers_places(graph: &Graph, first_weight: usize) -> Vec<WeightId> {
    (first_weight..first_weight + graph.weights.len()).map(|weight| WeightId(weight as u32)).collect()
}

/// Where weights lie, the first of whose files is the plan's `first_file`-th.
fn weights_of(weights: &[gemma4c_graph::Weight], tensors: &[&TensorInfo], first_file: u32) -> Vec<Weight> {
    let weight = |(w, t): (&gemma4c_graph::Weight, &&TensorInfo)| Weight {
        name: w.name.clone(),
        dtype: w.dtype,
        dims: w.dims.clone(),
        file: first_file + t.file as u32,
        offset: t.offset,
        bytes: t.len,
    };
    std::iter::zip(weights, tensors).map(weight).collect()
}

/// What is known of a tower before it is lowered.
struct NewTower {
    name: &'static str,
    graph: Graph,
    stages: Vec<(String, NodeId)>,
    medium: Medium,
    /// Patches or frames, at most.
    most: u32,
    tokens: MediaTokens,
}

impl NewTower {
    fn lower(&self, first_weight: u32) -> Result<Tower> {
        let soft = self.medium.soft(self.most.into()) as u32;
        let limits = Limits { context: self.most, chunk: self.most, asked: soft, kv: KvType::F32 };
        let stage = |(name, node): &(String, NodeId)| Stage { name: name.clone(), value: node.0 };
        Ok(Tower {
            name: self.name.into(),
            program: cpu::lower_beside(&self.graph, limits, &|weight| first_weight + weight.0, &[])?,
            medium: self.medium,
            tokens: self.tokens,
            stages: self.stages.iter().map(stage).collect(),
        })
    }
}

/// The tower for sound, where a projector file has one.
fn audio(file: &Gguf, text: &Config, vocab: Option<&Vocab>) -> Result<Option<NewTower>> {
    if !gemma4::has_audio(file)? {
        return Ok(None);
    }
    let config = AudioConfig::read(file)?;
    gemma4::audio_fits(&config, text)?;
    let tokens = vocab.and_then(media::audio_tokens);
    let tokens = tokens.context("the model's vocabulary lacks the tokens of sound: <|audio>, <|audio|>, <audio|>")?;
    let tower = gemma4::audio_tower(file, &config)?;
    let samples = media::RATE * media::MOST_SECONDS;
    let (medium, most) = match config.kind {
        AudioKind::Conformer { bins, .. } => (Medium::Mel { bins }, samples / media::HOP),
        AudioKind::Samples { frame } => (Medium::Samples { frame }, samples.div_ceil(frame)),
    };
    Ok(Some(NewTower { name: "audio", graph: tower.graph, stages: tower.stages, medium, most, tokens }))
}

/// A text model that a drafter is to belong to.
struct Drafted<'a> {
    file: &'a Gguf,
    config: &'a Config,
    graph: &'a Graph,
    program: &'a gemma4c_plan::Program,
}

/// A drafter, and what it adds to a plan.
struct DrafterParts<'a> {
    drafter: Drafter,
    /// But for the model's.
    own_weights: Vec<gemma4c_graph::Weight>,
    tensors: Vec<&'a TensorInfo>,
    /// With weights of its own numbers.
    graph: Graph,
    /// Where each of these stands in the plan.
    place: Vec<WeightId>,
}

/// Where the weights of a drafter stand in a plan: its own behind each other from `first_weight` on, and the model's table where it is.
pub fn drafters_places(declared: &DrafterGraph, text: &Graph, first_weight: u32) -> Result<Vec<WeightId>> {
    let (borrowed, name) = declared.borrowed;
    let lender = text.weights.iter().position(|weight| weight.name == name);
    let lender = lender.with_context(|| format!("the model does not read {name}"))? as u32;
    let place = |weight: u32| match weight.cmp(&borrowed.0) {
        Ordering::Less => first_weight + weight,
        Ordering::Equal => lender,
        Ordering::Greater => first_weight + weight - 1,
    };
    Ok((0..declared.graph.weights.len() as u32).map(|weight| WeightId(place(weight))).collect())
}

impl Drafted<'_> {
    /// The drafter in `file`, whose weights stand from `first_weight` on in the plan.
    fn drafter<'a>(&self, file: &'a Gguf, first_weight: u32) -> Result<DrafterParts<'a>> {
        let config = DrafterConfig::read(file, self.file, self.config)?;
        let declared = gemma4::drafter(file, &config, self.file, self.config)?;
        let place = drafters_places(&declared, self.graph, first_weight)?;
        let borrowed = declared.borrowed.0;
        let (context, kv) = (self.program.context, self.program.kv);
        let limits = Limits { context, chunk: 1, asked: 1, kv };
        let mut program =
            cpu::lower_beside(&declared.graph, limits, &|weight| place[weight.index()].0, &[declared.hidden])?;
        for cache in &mut program.caches {
            let own = self.program.caches.iter().find(|own| own.layer == cache.layer);
            *cache = *own.with_context(|| format!("the model's layer {} has no keys", cache.layer))?;
        }
        let mut own_weights = declared.graph.weights.clone();
        own_weights.remove(borrowed.index());
        let find = |name: &str| file.tensor(name).with_context(|| format!("tensor {name} is missing"));
        let tensors = own_weights.iter().map(|weight| find(&weight.name)).collect::<Result<Vec<_>>>()?;
        let drafter = Drafter {
            program,
            reads: head_input(self.program)?,
            hidden: declared.hidden.0,
            token_order: gemma4::token_order(file, &config)?,
        };
        Ok(DrafterParts { drafter, own_weights, tensors, graph: declared.graph, place })
    }
}

/// What the LM head of a program reads: its last product's input.
fn head_input(program: &gemma4c_plan::Program) -> Result<u32> {
    let product = program.steps.iter().rfind(|step| matches!(step.op, gemma4c_plan::Op::MatMul { .. }));
    product.and_then(|step| step.inputs.first()).copied().context("the model has no LM head")
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

/// The weights of a plan, and where each is read from.
pub struct Sources<'a> {
    pub weights: Vec<gemma4c_graph::Weight>,
    tensors: Vec<(&'a Gguf, TensorInfo)>,
}

impl<'a> Sources<'a> {
    pub fn of(file: &'a Gguf, weights: &[gemma4c_graph::Weight], tensors: &[&TensorInfo]) -> Sources<'a> {
        let mut sources = Sources { weights: Vec::new(), tensors: Vec::new() };
        sources.extend(file, weights, tensors);
        sources
    }

    pub fn extend(&mut self, file: &'a Gguf, weights: &[gemma4c_graph::Weight], tensors: &[&TensorInfo]) {
        self.weights.extend_from_slice(weights);
        self.tensors.extend(tensors.iter().map(|tensor| (file, (*tensor).clone())));
    }

    /// A tensor as it lies in its file.
    pub fn bytes(&self, weight: usize) -> Option<&'a [u8]> {
        self.tensors.get(weight).map(|(file, tensor)| file.data(tensor))
    }
}

/// A model that is to be lowered for a GPU.
#[derive(Clone, Copy)]
pub struct Parts<'a> {
    pub graph: &'a Graph,
    pub meaning: &'a gemma4c_plan::Program,
    pub sources: &'a Sources<'a>,
    pub soft: SoftTokens<'a>,
    /// The drafter, and its graph over the plan's weights.
    pub drafter: Option<(&'a Drafter, &'a Graph)>,
}

/// The launches for a GPU.
pub fn lower(model: Parts<'_>, options: &CudaOptions, target: &Gpu, chunk: u32) -> Result<Lowered> {
    let Parts { graph, meaning, sources, soft, drafter } = model;
    let read = |id: WeightId| -> Result<Vec<f32>, LowerError> {
        let weight = &sources.weights[id.index()];
        let unreadable = |why: String| LowerError::Unreadable { tensor: weight.name.clone(), why };
        let bytes = sources.bytes(id.index()).ok_or_else(|| unreadable("it is missing".into()))?;
        if weight.dtype != DType::F32 {
            return Err(LowerError::NotFloats { tensor: weight.name.clone(), dtype: weight.dtype });
        }
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let options = cuda::Options {
        context: meaning.context,
        chunk,
        kv: options.kv,
        sequences: options.sequences,
        verified: options.verified,
        snapshots: options.snapshots,
        target: target.clone(),
        vram: options.vram,
        disabled: options.disabled.clone(),
    };
    let drafter = drafter.map(|(of_plan, graph)| cuda::Drafter {
        graph,
        meaning: &of_plan.program,
        hidden: NodeId(of_plan.hidden),
        token_order: &of_plan.token_order,
    });
    let model = cuda::Model { graph, meaning, weights: &sources.weights, soft, drafter };
    Ok(cuda::lower(model, &options, &read)?)
}

/// The files that a plan was made of.
#[derive(Clone, Copy)]
pub struct Files<'a> {
    pub file: &'a Gguf,
    pub projector: Option<&'a Gguf>,
    pub drafter: Option<&'a Gguf>,
}

/// A plan's launches once more, with its kernels as functions, and the bytes of its weights.
pub fn lower_again<'a>(
    plan: &Plan,
    files: Files<'a>,
    options: &CudaOptions,
    target: &Gpu,
    chunk: u32,
) -> Result<(Lowered, Vec<&'a [u8]>)> {
    let Files { file, projector, drafter: drafter_file } = files;
    let config = Config::read(file)?;
    let graph = text_graph(file, &config, !plan.towers.is_empty())?;
    let mut sources = Sources::of(file, &graph.weights, &tensors_of(file, &graph)?);
    let mut tower_graphs = Vec::new();
    for (projector, tower) in
        projector.iter().flat_map(|projector| plan.towers.iter().map(move |tower| (*projector, tower)))
    {
        let own = match tower.medium.is_picture() {
            true => gemma4::vision_tower(projector, &VisionConfig::read(projector)?)?.graph,
            false => gemma4::audio_tower(projector, &AudioConfig::read(projector)?)?.graph,
        };
        let places = towers_places(&own, sources.weights.len());
        sources.extend(projector, &own.weights, &tensors_of(projector, &own)?);
        tower_graphs.push(own.with_weights(&sources.weights, places));
    }
    let of_towers: Vec<TowerGraph<'_>> = plan.towers.iter().zip(&tower_graphs).map(of_tower).collect();
    let soft = SoftTokens { towers: &of_towers, pad: padding(file)? };
    let mut drafter = None;
    if let (Some(drafter_file), Some(of_plan)) = (drafter_file, &plan.drafter) {
        let drafted = Drafted { file, config: &config, graph: &graph, program: &plan.program };
        let parts = drafted.drafter(drafter_file, sources.weights.len() as u32)?;
        sources.extend(drafter_file, &parts.own_weights, &parts.tensors);
        drafter = Some((of_plan, parts.graph.with_weights(&sources.weights, parts.place)));
    }
    let drafter = drafter.as_ref().map(|(of_plan, graph)| (*of_plan, graph));
    let model = Parts { graph: &graph, meaning: &plan.program, sources: &sources, soft, drafter };
    let lowered = lower(model, options, target, chunk)?;
    let bytes = (0..sources.weights.len()).filter_map(|weight| sources.bytes(weight)).collect();
    Ok((lowered, bytes))
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
