//! Compiling a model, for whoever uses the library: [`Options`] as a builder.

use std::path::{Path, PathBuf};

use gemma4c_codegen::target::Target as Gpu;
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::KvType;

use crate::error::Error;
use crate::options::{self, AdapterAt, Options};
use crate::pipeline::{self, Files};
use crate::{embed, files};

/// A model that is about to be compiled: what is not set is as `gemma4c compile` has it.
/// [`Model::compile`](crate::Model::compile) begins, [`Compiler::open`] and [`Compiler::write`] end.
///
/// ```
/// use gemma4c::{KvType, Model, Sampling};
///
/// # fn main() -> Result<(), gemma4c::Error> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let gguf = gemma4c::demo_model(folder.path())?;
/// let plan = folder.path().join("plan.bin");
/// Model::compile(&gguf).cpu().context(512).chunk(64).kv(KvType::Q8_0).embed_weights().write(&plan)?;
/// // The plan has its weights with it: the model is no longer needed.
/// std::fs::remove_file(gguf).unwrap();
/// let mut model = Model::open(&plan)?;
/// assert_eq!(model.context(), 512);
/// assert!(!model.generate("She was", &Sampling::greedy().max_tokens(4))?.text.is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is compiled before `open` or `write`"]
pub struct Compiler {
    model: PathBuf,
    options: Options,
    /// By name; `None`: for this machine.
    gpus: Option<Vec<String>>,
    embeds_weights: bool,
}

impl Compiler {
    pub(super) fn new(model: PathBuf) -> Compiler {
        Compiler { model, options: Options::default(), gpus: None, embeds_weights: false }
    }

    /// Positions that a sequence may have: 8192 unless set, or what the model was trained for if that is less.
    pub fn context(mut self, positions: u32) -> Compiler {
        self.options.context = Some(positions);
        self
    }

    /// Prompt tokens of one pass: 256 on a CPU and 2048 on a GPU unless set. More is faster and needs more memory.
    pub fn chunk(mut self, tokens: u32) -> Compiler {
        self.options.chunk = Some(tokens);
        self
    }

    /// The type of keys and values: f16 unless set. A CPU keeps f32, rounded to a type of 8 bits.
    pub fn kv(mut self, kv: KvType) -> Compiler {
        self.options.kv = kv;
        self
    }

    /// Sequences that a GPU runs at once: one unless set. A CPU decides when the plan is opened.
    pub fn sequences(mut self, count: u32) -> Compiler {
        self.options.sequences = count;
        self
    }

    /// Bytes of a GPU's memory that the plan may take: as many as it needs unless set.
    pub fn vram(mut self, bytes: u64) -> Compiler {
        self.options.vram = Some(bytes);
        self
    }

    /// The GGUF file of the model's drafter, which guesses tokens that the model then verifies several at once. Answers
    /// are the same.
    ///
    /// ```
    /// use gemma4c::{Model, Sampling};
    ///
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let gguf = gemma4c::demo_model(folder.path())?;
    /// let sampling = Sampling::greedy().max_tokens(12);
    /// let alone = Model::compile(&gguf).cpu().open()?.generate("She was", &sampling)?;
    /// let drafter = gemma4c::demo_drafter(folder.path())?;
    /// assert_eq!(Model::compile(&gguf).cpu().drafter(drafter).open()?.generate("She was", &sampling)?, alone);
    /// # Ok(())
    /// # }
    /// ```
    pub fn drafter(mut self, path: impl Into<PathBuf>) -> Compiler {
        self.options.drafter = Some(path.into());
        self
    }

    /// An adapter (LoRA) that is always on, `scale` times as strong as it was trained: a GGUF file, or a folder of PEFT.
    /// It is applied whole or refused. May be called for several.
    pub fn adapter(mut self, path: impl Into<PathBuf>, scale: f32) -> Compiler {
        self.options.adapters.push(AdapterAt { path: path.into(), scale });
        self
    }

    /// For the CPU alone. Unless this or [`Compiler::gpu`] is called, the plan is for this machine: its GPU where it
    /// has one.
    pub fn cpu(mut self) -> Compiler {
        self.gpus = Some(Vec::new());
        self
    }

    /// For a GPU by its name, such as `h200` or `rtx-4090`, which need not be here. May be called for several; the plan
    /// then has a program for each.
    pub fn gpu(mut self, name: impl Into<String>) -> Compiler {
        self.gpus.get_or_insert_default().push(name.into());
        self
    }

    /// Stores the weights in the plan, which then runs without the model's file.
    pub fn embed_weights(mut self) -> Compiler {
        self.embeds_weights = true;
        self
    }

    /// Compiles, and writes the plan. The file gets its name once it is complete.
    pub fn write(&self, plan: impl AsRef<Path>) -> Result<(), Error> {
        let path = plan.as_ref();
        let (mut plan, files) = self.compile(files::folder(path))?;
        match self.embeds_weights {
            true => embed::write(&mut plan, &files.with_weights(), path, &mut |_, _| {})?,
            false => files::write_plan(&plan, path)?,
        };
        Ok(())
    }

    /// Compiles for a plan that will be in this folder.
    pub(super) fn compile(&self, folder: &Path) -> Result<(Plan, Files), Error> {
        let gpus = match &self.gpus {
            None => options::gpu_here()?.into_iter().collect(),
            Some(names) => names.iter().map(|name| gpu(name)).collect::<Result<_, _>>()?,
        };
        let options = Options { gpus, ..self.options.clone() };
        let files = Files::open(&self.model, &options)?;
        Ok((pipeline::compile(&files, folder, &options)?, files))
    }

    /// The folder of the model.
    pub(super) fn folder(&self) -> &Path {
        files::folder(&self.model)
    }
}

fn gpu(name: &str) -> Result<Gpu, Error> {
    Gpu::find(name).cloned().map_err(|unknown| Error::Option(unknown.to_string()))
}
