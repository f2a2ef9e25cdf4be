//! From a model's files to a plan: the one place where the compile side's crates meet, and the only way to a plan.
//!
//! ```text
//! Files ──► Declared: graphs, their programs for a CPU, the table of weights ──► lower(GPU) ──► NVRTC ──► Plan
//! ```
//!
//! Each arrow can be left out by who needs less: the simulator and the tests stop before NVRTC, and what the kernels'
//! tests look at are declared from descriptions of models, which have no weights.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::Recipe;
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_codegen::cuda::{self, LowerError, Lowered, SoftTokens, TowerGraph, TowerMedium, build};
use gemma4c_codegen::nvrtc::{Cache, Compiler, Toolchain};
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_graph::{Graph, NodeId, Weight, WeightId, to_text};
use gemma4c_models::adapter::{self, Adapter, Part};
use gemma4c_models::chat::{self, ChatTemplate};
use gemma4c_models::gemma4::{self, AudioConfig, AudioKind, Beside, Config, DrafterConfig, DrafterGraph, VisionConfig};
use gemma4c_models::gguf::{Gguf, GgufError, Header, TensorInfo};
use gemma4c_models::media;
use gemma4c_models::tokenizer::vocab_from_metadata;
use gemma4c_plan::cuda::{Cuda, KvType};
use gemma4c_plan::{
    Drafter, MediaTokens, Medium, Model, ModelFile, Piece, Plan, Program, Sampling, Span, Stage, Target, Tower, Vocab,
};

use crate::adapters::{self, For, Merged};
use crate::error::Error;
use crate::files;
use crate::options::{DEFAULT_CHUNK, DEFAULT_CONTEXT, DEFAULT_CUDA_CHUNK, Options};

/// Rows of logits a pass keeps: 262144 floats each.
const ASKED: u32 = 32;

/// A model's file, or what would stand in its header.
pub enum Source {
    File(Gguf),
    Described(Header),
}

impl Deref for Source {
    type Target = Header;

    fn deref(&self) -> &Header {
        match self {
            Source::File(file) => file,
            Source::Described(header) => header,
        }
    }
}

impl Source {
    pub fn open(path: &Path) -> Result<Source, Error> {
        Ok(Source::File(files::open_model(path)?))
    }

    /// The same with its matrices of floats quantised while they are loaded.
    fn open_quantised(path: &Path, to: DType) -> Result<Source, Error> {
        let (model, matrices) = gemma4::quantised(files::open_model(path)?, to)?;
        match matrices {
            0 => Err(Error::Option(format!("--quantize: {} has no matrices of floats", path.display()))),
            _ => Ok(Source::File(model)),
        }
    }

    /// Its tensors' bytes, where it has some.
    pub fn file(&self) -> Option<&Gguf> {
        match self {
            Source::File(file) => Some(file),
            Source::Described(_) => None,
        }
    }

    /// For messages: the first of its files.
    fn path(&self) -> &Path {
        self.file().and_then(|file| file.files().first()).map_or(Path::new("a description"), |file| &file.path)
    }

    fn tensor_named(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.tensor(name).ok_or_else(|| Error::Option(format!("tensor {name} is missing")))
    }
}

/// What a plan is made of.
pub struct Files {
    pub text: Source,
    /// What is always added to products, and how strong each is.
    pub adapters: Vec<(Adapter, f32)>,
    /// What was merged into the text model.
    pub merged: Option<Merged>,
    /// What reads pictures and sound.
    pub projector: Option<Source>,
    /// What guesses tokens.
    pub drafter: Option<Source>,
}

impl Files {
    /// A model's file, and those that the options name.
    pub fn open(model: &Path, options: &Options) -> Result<Files, Error> {
        let open = |path: &Option<PathBuf>| path.as_deref().map(Source::open).transpose();
        let text = match options.quantize {
            Some(to) => Source::open_quantised(model, to)?,
            None => Source::open(model)?,
        };
        let projector = open(&options.projector)?;
        let adapters = adapters::open(options, For { text: &text, projector: projector.as_deref() })?;
        let drafter = open(&options.drafter)?;
        if !options.merges_adapter {
            return Ok(Files { text, adapters, merged: None, projector, drafter });
        }
        let (Source::File(file), Some(adapter)) = (text, adapters.into_iter().next()) else {
            return Err(Error::Option("--lora-merge: a description has no weights".into()));
        };
        let (file, merged) = adapters::merge(file, adapter)?;
        Ok(Files { text: Source::File(file), adapters: Vec::new(), merged: Some(merged), projector, drafter })
    }

    /// The adapters as a forward pass takes them.
    fn adapters(&self) -> Vec<(&Adapter, f32)> {
        self.adapters.iter().map(|(adapter, scale)| (adapter, *scale)).collect()
    }

    /// What whoever compiles them should know: what of them is not used, and a chat template that has been replaced.
    pub fn notes(&self, options: &Options) -> Vec<String> {
        let mut notes: Vec<String> = self.with_weights().iter().flat_map(|model| model.notes().to_vec()).collect();
        let template = self.text.metadata().optional::<&str>("tokenizer.chat_template").ok().flatten();
        let known = template.filter(|_| options.chat_template.is_none()).and_then(chat::known);
        if let Some(known) = known.filter(|known| known.is_old) {
            notes.push(format!("the chat template is {}: --chat-template FILE takes a newer one", known.name));
        }
        notes
    }

    /// The files that have weights, in a plan's order: all but descriptions.
    pub fn with_weights(&self) -> Vec<&Gguf> {
        let adapters = self.adapters.iter().map(|(adapter, _)| &adapter.file);
        let others = self.projector.iter().chain(&self.drafter).filter_map(Source::file);
        self.text.file().into_iter().chain(adapters).chain(others).collect()
    }
}

/// Compiles. `folder` is where the plan will be stored, so that it can name the model's files from there.
pub fn compile(files: &Files, folder: &Path, options: &Options) -> Result<Plan, Error> {
    let declared = Declared::new(files, options)?;
    // What may be wrong is found before kernels are compiled, which takes longest.
    let text = Text::read(&declared)?;
    let lowered = options.gpus.iter().map(|gpu| {
        let lowered = declared.lower(gpu);
        match options.gpus.len() {
            1 => lowered,
            _ => lowered.map_err(|source| Error::For { gpu: gpu.to_string(), source: Box::new(source) }),
        }
    });
    let lowered = lowered.collect::<Result<Vec<_>, Error>>()?;
    let mut programs = Vec::new();
    if !lowered.is_empty() {
        let compiler = Compiler { toolchain: Toolchain::find()?, cache: Cache::from_env() };
        for (gpu, lowered) in options.gpus.iter().zip(lowered) {
            programs.push(build::build(lowered, gpu.arch, &compiler)?.0);
        }
    }
    declared.into_plan(text, folder, programs)
}

/// A model as graphs, with the program for a CPU that says what each means, over one table of weights: the text's, the
/// towers', the drafter's.
pub struct Declared<'a> {
    files: &'a Files,
    options: &'a Options,
    config: Config,
    pub graph: Graph,
    pub program: Program,
    pub weights: Vec<Weight>,
    /// Where each weight is stored.
    tensors: Vec<Stored<'a>>,
    pub towers: Vec<DeclaredTower>,
    pub drafter: Option<DeclaredDrafter>,
}

/// Where a weight is stored.
enum Stored<'a> {
    /// In which file, unless that is only described, and where in it.
    In(Option<&'a Gguf>, &'a TensorInfo),
    /// Nowhere: it is reserved for adapters.
    Reserved,
}

/// A tower for pictures or sound.
pub struct DeclaredTower {
    name: &'static str,
    /// Over the plan's weights.
    graph: Graph,
    pub program: Program,
    medium: Medium,
    stages: Vec<(String, NodeId)>,
    /// Over its own weights.
    text: String,
}

/// A drafter.
pub struct DeclaredDrafter {
    /// Over the plan's weights.
    graph: Graph,
    pub of_plan: Drafter,
    /// Over its own weights.
    text: String,
}

impl<'a> Declared<'a> {
    pub fn new(files: &'a Files, options: &'a Options) -> Result<Declared<'a>, Error> {
        let text = &files.text;
        let config = Config::read(text)?;
        let context = options.context.unwrap_or(DEFAULT_CONTEXT.min(config.context));
        if !(1..=config.context).contains(&context) {
            let trained = config.context;
            return Err(Error::Option(format!(
                "a context of {context} is out of range: the model was trained for {trained} positions"
            )));
        }
        if options.chunk == Some(0) {
            return Err(Error::Option("a chunk of 0 tokens: at least 1 is needed".into()));
        }
        // Where soft tokens come, the text's graph has places for them.
        if let Some(projector) = &files.projector {
            let fits = gemma4::fits(&VisionConfig::read(projector).map_err(Error::within(projector.path()))?, &config);
            fits.map_err(Error::within(projector.path()))?;
        }
        let adapters = files.adapters();
        let pad = files.projector.as_ref().map(|_| padding(text)).transpose()?;
        let graph = gemma4::graph_with(text, &config, Beside { adapters: &adapters, seats: options.seats, pad })?;
        // A picture whose rows see each other is read in one pass.
        let least = files.projector.as_ref().filter(|_| config.sees_ahead()).map_or(1, |_| options.image_tokens);
        if least > context || options.chunk.is_some_and(|chunk| least > chunk) {
            return Err(Error::Option(format!(
                "a picture of {least} soft tokens is read in one pass: --ctx and --chunk must be at least that, or --image-tokens less"
            )));
        }
        let chunk = options.chunk.unwrap_or(DEFAULT_CHUNK.max(least)).min(context);
        // On a GPU plan this program is what its steps mean; the GPU's own chunks are longer.
        let chunk = if options.gpus.is_empty() { chunk } else { chunk.min(DEFAULT_CHUNK.max(least)) };
        let program = cpu::lower(&graph, Limits { context, chunk, asked: chunk.min(ASKED), kv: options.kv })?;
        let (weights, tensors, towers) = (Vec::new(), Vec::new(), Vec::new());
        let mut declared = Declared { files, options, config, graph, program, weights, tensors, towers, drafter: None };
        declared.add_weights(&files.text, declared.graph.weights.clone(), Some(Part::Text))?;
        if let Some(projector) = &files.projector {
            declared.declare_towers(projector).map_err(Error::within(projector.path()))?;
        }
        if let Some(drafter) = &files.drafter {
            declared.declare_drafter(drafter).map_err(Error::within(drafter.path()))?;
        }
        Ok(declared)
    }

    /// Adds a graph's weights: the file's own, and behind them the adapters' for this part of the model, those that are
    /// there and those that may come.
    fn add_weights(&mut self, source: &'a Source, weights: Vec<Weight>, part: Option<Part>) -> Result<(), Error> {
        let of_adapters: Vec<_> = part.into_iter().flat_map(|part| self.adapted(part)).collect();
        let reserved = weights.iter().filter(|weight| adapter::is_reserved(&weight.name)).count();
        for weight in &weights[..weights.len() - reserved - of_adapters.len()] {
            self.tensors.push(Stored::In(source.file(), source.tensor_named(&weight.name)?));
        }
        self.tensors.extend(of_adapters.into_iter().map(|(file, tensor)| Stored::In(file, tensor)));
        self.tensors.extend((0..reserved).map(|_| Stored::Reserved));
        self.weights.extend(weights);
        Ok(())
    }

    /// The adapters' tensors for a part of the model, and the files that they are in.
    fn adapted(&self, part: Part) -> impl Iterator<Item = (Option<&'a Gguf>, &'a TensorInfo)> + use<'a> {
        let of = move |(adapter, _): &'a (Adapter, f32)| {
            adapter.tensors_of(part).map(|tensor| (Some(&adapter.file), tensor))
        };
        self.files.adapters.iter().flat_map(of)
    }

    fn declare_towers(&mut self, file: &'a Source) -> Result<(), Error> {
        let vision = VisionConfig::read(file)?;
        let tower = gemma4::vision_tower(file, &vision, &self.files.adapters())?;
        let VisionConfig { patch, pool, .. } = vision;
        let most = self.options.image_tokens * pool * pool;
        self.add_tower(file, Part::Vision, Medium::Picture { patch, pool }, most, tower.graph, tower.stages)?;
        if !gemma4::has_audio(file)? {
            return Ok(());
        }
        let audio = AudioConfig::read(file)?;
        gemma4::audio_fits(&audio, &self.config)?;
        let tower = gemma4::audio_tower(file, &audio, &self.files.adapters())?;
        let samples = media::RATE * media::MOST_SECONDS;
        let (medium, most) = match audio.kind {
            AudioKind::Conformer { bins, .. } => (Medium::Mel { bins }, samples / media::HOP),
            AudioKind::Samples { frame } => (Medium::Samples { frame }, samples.div_ceil(frame)),
        };
        self.add_tower(file, Part::Audio, medium, most, tower.graph, tower.stages)
    }

    /// Adds a tower for `most` patches or frames, whose weights come behind those that are there.
    fn add_tower(
        &mut self,
        file: &'a Source,
        part: Part,
        medium: Medium,
        most: u32,
        graph: Graph,
        stages: Vec<(String, NodeId)>,
    ) -> Result<(), Error> {
        let first = self.weights.len() as u32;
        let places: Vec<WeightId> = (first..).map(WeightId).take(graph.weights.len()).collect();
        let limits = Limits { context: most, chunk: most, asked: medium.soft(most.into()) as u32, kv: KvType::F32 };
        let program = cpu::lower_beside(&graph, limits, &|weight| first + weight.0, &[])?;
        let text = to_text(&graph);
        self.add_weights(file, graph.weights.clone(), Some(part))?;
        let graph = graph.with_weights(&self.weights, places);
        self.towers.push(DeclaredTower { name: part.name(), graph, program, medium, stages, text });
        Ok(())
    }

    /// Adds the drafter, whose own weights come behind those that are there.
    fn declare_drafter(&mut self, file: &'a Source) -> Result<(), Error> {
        let config = DrafterConfig::read(file, &self.files.text, &self.config)?;
        let declared = gemma4::drafter(file, &config, &self.files.text, &self.config)?;
        let places = self.places_of_drafter(&declared)?;
        let DrafterGraph { graph, borrowed: (borrowed, _), hidden } = declared;
        let limits = Limits { context: self.program.context, chunk: 1, asked: 1, kv: self.program.kv };
        let mut program = cpu::lower_beside(&graph, limits, &|weight| places[weight.index()].0, &[hidden])?;
        for cache in &mut program.caches {
            let own = self.program.caches.iter().find(|own| own.layer == cache.layer);
            let without_keys = || Error::Option(format!("the model's layer {} has no keys", cache.layer));
            *cache = *own.ok_or_else(without_keys)?;
        }
        let token_order = match file.file() {
            Some(file) => gemma4::token_order(file, &config)?,
            // Any will do: no launch depends on the order.
            None => (0..config.centroids.as_ref().map_or(0, |_| self.config.vocab_size)).collect(),
        };
        let reads = head_input(&self.program)?;
        let text = to_text(&graph);
        let mut own = graph.weights.clone();
        own.remove(borrowed.index());
        self.add_weights(file, own, None)?;
        let graph = graph.with_weights(&self.weights, places);
        let of_plan = Drafter { program, reads, hidden: hidden.0, token_order };
        self.drafter = Some(DeclaredDrafter { graph, of_plan, text });
        Ok(())
    }

    /// Where the weights of a drafter are in a plan: its own behind those that are there, and the model's table where
    /// it is.
    fn places_of_drafter(&self, declared: &DrafterGraph) -> Result<Vec<WeightId>, Error> {
        let (borrowed, name) = declared.borrowed;
        let lender = self.graph.weights.iter().position(|weight| weight.name == name);
        let lender = lender.ok_or_else(|| Error::Option(format!("the model does not read {name}")))? as u32;
        let first = self.weights.len() as u32;
        let place = |weight: u32| match weight.cmp(&borrowed.0) {
            Ordering::Less => first + weight,
            Ordering::Equal => lender,
            Ordering::Greater => first + weight - 1,
        };
        Ok((0..declared.graph.weights.len() as u32).map(|weight| WeightId(place(weight))).collect())
    }

    /// The launches for a GPU, with their kernels as functions.
    pub fn lower(&self, gpu: &Gpu) -> Result<Lowered, Error> {
        let Options { kv, sequences, snapshots, vram, .. } = *self.options;
        let options = cuda::Options {
            context: self.program.context,
            chunk: self.options.chunk.unwrap_or(DEFAULT_CUDA_CHUNK),
            kv,
            sequences,
            verified: self.options.verified_rows(),
            snapshots,
            target: gpu.clone(),
            vram,
            disabled: self.options.passes_off(self.graph.weights.iter().map(|weight| weight.dtype))?,
        };
        let towers: Vec<TowerGraph<'_>> = self.towers.iter().map(DeclaredTower::for_gpus).collect();
        let drafter = self.drafter.as_ref().map(|drafter| cuda::Drafter {
            graph: &drafter.graph,
            meaning: &drafter.of_plan.program,
            hidden: NodeId(drafter.of_plan.hidden),
            token_order: &drafter.of_plan.token_order,
        });
        let model = cuda::Model {
            graph: &self.graph,
            meaning: &self.program,
            weights: &self.weights,
            soft: SoftTokens { towers: &towers, pad: padding(&self.files.text)? },
            drafter,
        };
        Ok(cuda::lower(model, &options, &|id| self.floats(id))?)
    }

    /// A small tensor: the factors of rotation frequencies are all that lowering reads. Of a description they are 1,
    /// since no launch depends on them.
    fn floats(&self, id: WeightId) -> Result<Vec<f32>, LowerError> {
        let weight = &self.weights[id.index()];
        if weight.dtype != DType::F32 {
            return Err(LowerError::NotFloats { tensor: weight.name.clone(), dtype: weight.dtype });
        }
        let not_floats = |_| LowerError::NotFloats { tensor: weight.name.clone(), dtype: weight.dtype };
        let bytes = self.bytes(id.index()).map_err(not_floats)?;
        let Some(bytes) = bytes else { return Ok(vec![1.0; weight.dim(0) as usize]) };
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// A weight as the plan wants it; `None` where it is only described, or nowhere.
    pub fn bytes(&self, weight: usize) -> Result<Option<Cow<'a, [u8]>>, GgufError> {
        match self.tensors[weight] {
            Stored::In(file, tensor) => file.map(|file| file.bytes(tensor)).transpose(),
            Stored::Reserved => Ok(None),
        }
    }

    /// The plan, with these programs for GPUs.
    pub fn into_plan(self, text: Text, folder: &Path, programs: Vec<Cuda>) -> Result<Plan, Error> {
        let (files, fingerprint) = self.stored(folder)?;
        let mut report = to_text(&self.graph);
        for tower in &self.towers {
            report += &format!("\n\ntower {}\n{}", tower.name, tower.text);
        }
        if let Some(drafter) = &self.drafter {
            report += &format!("\n\ndrafter\n{}", drafter.text);
        }
        let (weights, adapters) = (self.weights_in_files(), self.adapters());
        let mut programs = programs.into_iter();
        let (cuda, others) = (programs.next(), programs.collect());
        let towers = self.towers.into_iter().zip(text.media).map(|(tower, tokens)| tower.into_tower(tokens));
        Ok(Plan {
            model: Model {
                architecture: "gemma4".into(),
                name: self.config.name.clone(),
                files,
                fingerprint,
                layers: self.config.layers.len() as u32,
                hidden: self.config.hidden,
                vocab_size: self.config.vocab_size,
                trained_context: self.config.context,
                adapters,
                seats: self.options.seats,
            },
            target: if cuda.is_some() { Target::Cuda } else { Target::Cpu },
            weights,
            program: self.program,
            cuda,
            others,
            vocab: text.vocab,
            sampling: text.sampling,
            embedded: None,
            towers: towers.collect(),
            drafter: self.drafter.map(|drafter| drafter.of_plan),
            report,
        })
    }

    /// The files, and what tells them from others.
    fn stored(&self, folder: &Path) -> Result<(Vec<ModelFile>, u64), Error> {
        let models = self.files.with_weights();
        let in_model = |stored: &Stored<'a>| match stored {
            Stored::In(file, tensor) => {
                Some(models.iter().position(|model| is_same(*file, model)).map(|at| (at, *tensor)))
            }
            Stored::Reserved => None,
        };
        let tensors: Option<Vec<(usize, &TensorInfo)>> = self.tensors.iter().filter_map(in_model).collect();
        let tensors = tensors.ok_or_else(|| Error::Option("a description has no weights to run".into()))?;
        let parts = models.iter().flat_map(|model| model.files());
        let files = parts.map(|part| files::model_file(part, folder)).collect::<Result<_, Error>>()?;
        Ok((files, Gguf::fingerprint_of(&models, tensors)))
    }

    /// The table of weights as a plan has it.
    fn weights_in_files(&self) -> Vec<gemma4c_plan::Weight> {
        let weight = |(weight, stored): (&Weight, &Stored<'_>)| {
            let (file, offset, bytes, pieces) = match *stored {
                Stored::In(of, tensor) => {
                    let first = self.first_file(of);
                    let file = if tensor.pieces.is_empty() { (first + tensor.file) as u32 } else { 0 };
                    let pieces = tensor.pieces.iter().map(|piece| moved(piece, first as u32)).collect();
                    (file, tensor.offset, tensor.len, pieces)
                }
                Stored::Reserved => {
                    let rows = weight.dims.iter().skip(1).product();
                    let zeros = Piece { rows, recipe: Recipe::Zeros, inputs: Vec::new() };
                    (0, 0, weight.bytes().unwrap_or(0), vec![zeros])
                }
            };
            let Weight { name, dtype, dims } = weight.clone();
            gemma4c_plan::Weight { name, dtype, dims, file, offset, bytes, pieces }
        };
        self.weights.iter().zip(&self.tensors).map(weight).collect()
    }

    /// Where the files of one of the models begin among all of them.
    fn first_file(&self, of: Option<&Gguf>) -> usize {
        let before = self.files.with_weights().into_iter().take_while(|file| !is_same(of, file));
        before.map(|file| file.files().len()).sum()
    }

    fn adapters(&self) -> Vec<gemma4c_plan::Adapter> {
        let of = |(adapter, scale): &(Adapter, f32), file: usize, is_merged: bool| gemma4c_plan::Adapter {
            name: adapter.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            file: file as u32,
            scale: *scale,
            pairs: adapter.pairs.len() as u32,
            is_merged,
        };
        let added = self.files.adapters.iter().map(|own| of(own, self.first_file(Some(&own.0.file)), false));
        added.chain(self.files.merged.iter().map(|merged| of(&merged.adapter, merged.first_file, true))).collect()
    }
}

fn is_same(one: Option<&Gguf>, other: &Gguf) -> bool {
    one.is_some_and(|one| std::ptr::eq(one, other))
}

/// A piece whose files are counted from `first` on.
fn moved(piece: &Piece, first: u32) -> Piece {
    let inputs = piece.inputs.iter().map(|span| Span { file: first + span.file, ..*span }).collect();
    Piece { inputs, ..*piece }
}

impl DeclaredTower {
    fn for_gpus(&self) -> TowerGraph<'_> {
        let medium = match self.medium {
            Medium::Picture { pool, .. } => TowerMedium::Picture { pool },
            Medium::Mel { .. } => TowerMedium::Sound { frames: 4 },
            Medium::Samples { .. } => TowerMedium::Sound { frames: 1 },
        };
        TowerGraph { graph: &self.graph, meaning: &self.program, patch_width: self.medium.row_width(), medium }
    }

    fn into_tower(self, tokens: MediaTokens) -> Tower {
        let stage = |(name, node): (String, NodeId)| Stage { name, value: node.0 };
        let stages = self.stages.into_iter().map(stage).collect();
        Tower { name: self.name.into(), program: self.program, medium: self.medium, tokens, stages }
    }
}

/// What a plan has from its model's file besides graphs and weights.
pub struct Text {
    vocab: Option<Vocab>,
    sampling: Sampling,
    /// The tokens around each tower's media.
    media: Vec<MediaTokens>,
}

impl Text {
    pub fn read(declared: &Declared<'_>) -> Result<Text, Error> {
        let file = &declared.files.text;
        let mut vocab = vocab_from_metadata(file.metadata())?;
        if let (Some(vocab), Some(template)) = (&mut vocab, &declared.options.chat_template) {
            ChatTemplate::new(template)?;
            vocab.chat_template = Some(template.clone());
        }
        let tokens = |tower: &DeclaredTower| {
            let (found, lacking) = match tower.medium.is_picture() {
                true => (vocab.as_ref().and_then(media::image_tokens), "pictures: <|image>, <|image|>, <image|>"),
                false => (vocab.as_ref().and_then(media::audio_tokens), "sound: <|audio>, <|audio|>, <audio|>"),
            };
            found.ok_or_else(|| Error::Option(format!("the model's vocabulary lacks the tokens of {lacking}")))
        };
        let media = declared.towers.iter().map(tokens).collect::<Result<_, _>>()?;
        Ok(Text { sampling: sampling(file)?, media, vocab })
    }
}

/// The token whose row of the per-layer table soft tokens have.
fn padding(file: &Header) -> Result<u32, GgufError> {
    Ok(file.metadata().optional("tokenizer.ggml.padding_token_id")?.unwrap_or(0))
}

/// What the LM head of a program reads: its last product's input.
fn head_input(program: &Program) -> Result<u32, Error> {
    let is_product = |op| matches!(op, gemma4c_plan::Op::MatMul { .. });
    let product = program.steps.iter().rfind(|step| is_product(step.op));
    let input = product.and_then(|step| step.inputs.first()).copied();
    input.ok_or_else(|| Error::Option("the model has no LM head".into()))
}

/// The authors' advice, where the file has it.
fn sampling(file: &Header) -> Result<Sampling, GgufError> {
    let (meta, usual) = (file.metadata(), Sampling::default());
    Ok(Sampling {
        temperature: meta.optional("general.sampling.temp")?.unwrap_or(usual.temperature),
        top_k: meta.optional("general.sampling.top_k")?.unwrap_or(usual.top_k),
        top_p: meta.optional("general.sampling.top_p")?.unwrap_or(usual.top_p),
    })
}
