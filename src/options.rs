//! How a model is compiled: the one set of options. The command line's arguments, the library's builder, the recipes of
//! the kernels' tests and the simulator all fill in this struct, and [`crate::pipeline`] reads no other.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::Recipe;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::kernels::formats;
use gemma4c_codegen::passes::{self, PASSES};
use gemma4c_codegen::target::{DeviceFacts, Target as Gpu};
use gemma4c_models::media::USUAL_BUDGET;
use gemma4c_plan::cuda::{CudaProgram, KvType};
use gemma4c_plan::{Plan, Seats, Weight};
use gemma4c_runtime::{MOST_DRAFTS, machine};

use crate::error::Error;

/// Long enough for most conversations, and cheap: only global layers pay for every position.
pub const DEFAULT_CONTEXT: u32 = 8192;
/// Rows a pass takes on a CPU: enough to decode each weight once for many rows, few enough for the caches.
pub const DEFAULT_CHUNK: u32 = 256;
/// Rows a pass takes on a GPU: enough that reading the weights is a small part of it.
pub const DEFAULT_CUDA_CHUNK: u32 = 2048;

/// Sequences from which on the products of a plan for Hopper have 16-bit operands (the pass `gemm`), unless that is
/// switched off: from 16 of them on that is faster, fewer are slower (BENCHMARKS.md).
pub const SEQUENCES_IN_16_BITS: u32 = 64;
/// The same where weights have a type of low bits or of checkpoints: 32 sequences of E4B Q3_K decode 4,285 tokens a
/// second as integers, and 6,976 in 16 bits.
pub const SEQUENCES_OF_LATER_IN_16_BITS: u32 = 32;
/// The same, on every GPU, where weights have a type that int8 tensor cores cannot multiply: CUDA cores would decode it
/// for every few rows.
pub const SEQUENCES_OF_FLOATS_IN_16_BITS: u32 = 4;

/// What a model is compiled for, and with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Positions of a sequence; `None`: [`DEFAULT_CONTEXT`], or what the model was trained for if that is less.
    pub context: Option<u32>,
    /// Prompt tokens of a pass; `None`: [`DEFAULT_CHUNK`] on a CPU, [`DEFAULT_CUDA_CHUNK`] on a GPU.
    pub chunk: Option<u32>,
    /// The type of keys and values. A CPU keeps f32, rounded to a type of 8 bits.
    pub kv: KvType,
    /// A program is made for each; none: the plan is for the CPU alone.
    pub gpus: Vec<Gpu>,
    /// Sequences at once on a GPU.
    pub sequences: u32,
    /// Drafts of a sequence that a GPU verifies at once; `None`: as many as a drafter makes, if there is one.
    pub drafts: Option<u32>,
    /// Snapshots that a GPU has room for beside the sequences; `None`: as many as are of use.
    pub snapshots: Option<u32>,
    /// Bytes of a GPU's memory that the plan may take; `None`: as many as it needs.
    pub vram: Option<u64>,
    /// Passes that do not run.
    pub disabled: Vec<String>,
    /// Passes that run although they must be asked for.
    pub enabled: Vec<String>,
    /// The file of what reads pictures and sound.
    pub projector: Option<PathBuf>,
    /// Soft tokens of a picture, at most.
    pub image_tokens: u32,
    /// The file of what guesses the next tokens.
    pub drafter: Option<PathBuf>,
    /// Adapters that are always on.
    pub adapters: Vec<AdapterAt>,
    /// Whether the adapter, of which there is one, is merged into the weights while they are loaded.
    pub merges_adapter: bool,
    /// Room for adapters that come and go while the plan runs.
    pub seats: Option<Seats>,
    /// What the model's matrices of floats become while they are loaded.
    pub quantize: Option<DType>,
    /// The text of a chat template in place of the model's.
    pub chat_template: Option<String>,
}

/// An adapter: where it is, and how strong it is to be.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterAt {
    /// A GGUF file, or a folder of PEFT.
    pub path: PathBuf,
    /// 1 is as it was trained.
    pub scale: f32,
}

impl FromStr for AdapterAt {
    type Err = String;

    /// `FILE` or `FILE:SCALE`.
    fn from_str(text: &str) -> Result<AdapterAt, String> {
        let scaled = text.rsplit_once(':').and_then(|(path, scale)| Some((path, scale.parse::<f32>().ok()?)));
        let (path, scale) = match scaled {
            // A file may be called so.
            Some(_) if Path::new(text).exists() => (text, 1.0),
            Some(scaled) => scaled,
            None => (text, 1.0),
        };
        if path.is_empty() || !scale.is_finite() {
            return Err("expected a file or a folder, and if wanted a scale: FILE or FILE:0.5".into());
        }
        Ok(AdapterAt { path: path.into(), scale })
    }
}

/// What a plan's matrices of floats are quantised to. Tables are never narrower than 8 bits, so the least is what was
/// asked for.
fn quantized_to(plan: &Plan) -> Option<DType> {
    let is_quantised =
        |weight: &&Weight| weight.pieces.iter().any(|piece| matches!(piece.recipe, Recipe::Quantise { .. }));
    plan.weights.iter().filter(is_quantised).map(|weight| weight.dtype).min_by_key(|dtype| dtype.layout().bytes)
}

impl Default for Options {
    fn default() -> Options {
        Options {
            context: None,
            chunk: None,
            kv: KvType::F16,
            gpus: Vec::new(),
            sequences: 1,
            drafts: None,
            snapshots: None,
            vram: None,
            disabled: Vec::new(),
            enabled: Vec::new(),
            projector: None,
            image_tokens: USUAL_BUDGET,
            drafter: None,
            adapters: Vec::new(),
            seats: None,
            merges_adapter: false,
            quantize: None,
            chat_template: None,
        }
    }
}

impl Options {
    /// What a plan's program for a GPU was compiled with, as far as the plan says it; without the files.
    pub fn of_program(plan: &Plan, program: &CudaProgram) -> Result<Options, Error> {
        let gpu = Gpu::of_program(&program.gpu).ok_or_else(|| {
            Error::Option(format!("the plan is for {}, which this gemma4c does not know", program.gpu))
        })?;
        let named = |is_enabled: bool| {
            let passes = program.passes.iter().filter(move |pass| pass.enabled == is_enabled);
            passes.map(|pass| pass.name.clone())
        };
        let picture = plan.towers.iter().find(|tower| tower.medium.is_picture());
        let image_tokens = picture.map(|tower| tower.medium.soft(tower.program.chunk.into()) as u32);
        let layout = &program.kv_layout;
        Ok(Options {
            context: Some(plan.program.context),
            chunk: Some(program.phases.last().map_or(1, |phase| phase.rows)),
            kv: program.kv,
            gpus: vec![gpu],
            sequences: layout.slots,
            drafts: Some(program.verified_rows - 1),
            // What a budget decided then is what it decides now, if it is as large as the plan.
            vram: program.memory.device(),
            seats: plan.model.seats,
            disabled: named(false).collect(),
            enabled: named(true).filter(|name| must_be_asked_for(name)).collect(),
            image_tokens: image_tokens.unwrap_or(USUAL_BUDGET),
            quantize: quantized_to(plan),
            ..Options::default()
        })
    }

    /// The same without these passes.
    pub fn without(mut self, passes: &[&str]) -> Options {
        self.disabled.extend(passes.iter().map(|name| name.to_string()));
        self
    }

    /// The same with these passes, which must be asked for.
    pub fn with(mut self, passes: &[&str]) -> Options {
        self.enabled.extend(passes.iter().map(|name| name.to_string()));
        self
    }

    /// The same with bf16 copies of the weights.
    pub fn with_copies(self) -> Options {
        self.with(&["bf16-copies"])
    }

    /// Rows of one sequence that are decoded at once, to verify drafts: 1 for none.
    pub fn verified_rows(&self) -> u32 {
        self.drafts.unwrap_or(if self.drafter.is_some() { MOST_DRAFTS } else { 0 }) + 1
    }

    /// All passes that are switched off for a model with weights of these types: those that are not wanted, and those
    /// that must be asked for and are not.
    pub fn passes_off(&self, types: impl IntoIterator<Item = DType>) -> Result<Vec<String>, Error> {
        for name in &self.enabled {
            if !must_be_asked_for(name) {
                let known: Vec<&str> = PASSES.iter().filter(|pass| pass.asked_for).map(|pass| pass.name).collect();
                let known = known.join(", ");
                let why = format!("--enable-pass {name}: the passes that are off unless asked for are {known}");
                return Err(Error::Option(why));
            }
            if self.disabled.contains(name) {
                let why = format!("--enable-pass {name} and --disable-pass {name} contradict each other");
                return Err(Error::Option(why));
            }
        }
        let mut enabled = self.enabled.clone();
        let hopper = self.gpus.iter().all(|gpu| gpu.arch.has_wgmma());
        let many = self.sequences >= SEQUENCES_IN_16_BITS && hopper;
        let types: Vec<DType> = types.into_iter().collect();
        let of_later = |dtype: &DType| formats::of(*dtype).is_some();
        let many_of_later = self.sequences >= SEQUENCES_OF_LATER_IN_16_BITS && hopper && types.iter().any(of_later);
        let of_floats = |dtype: &DType| formats::wants_16_bits(*dtype);
        let many_of_floats = self.sequences >= SEQUENCES_OF_FLOATS_IN_16_BITS && types.iter().any(of_floats);
        if (many || many_of_later || many_of_floats) && !self.disabled.iter().any(|name| name == GEMM) {
            enabled.push(GEMM.to_owned());
        }
        Ok(passes::switched_off(&self.disabled, &enabled))
    }
}

/// The pass that gives all decoded rows one arithmetic in 16 bits.
const GEMM: &str = "gemm";

fn must_be_asked_for(pass: &str) -> bool {
    PASSES.iter().any(|known| known.asked_for && known.name == pass)
}

/// The GPU that everything is measured on, for whoever names none and has none.
pub fn measured_gpu() -> Gpu {
    Gpu::of_arch(Arch::Sm90a)
}

/// This machine's first GPU as a target; `None` where there is none.
pub fn gpu_here() -> Result<Option<Gpu>, Error> {
    let gpu = machine::gpus().ok().and_then(|gpus| gpus.into_iter().next());
    gpu.map(|gpu| target_of(&gpu)).transpose()
}

/// The target that a GPU is.
pub fn target_of(gpu: &machine::Gpu) -> Result<Gpu, Error> {
    let facts = DeviceFacts {
        name: gpu.name.clone(),
        compute_capability: gpu.compute_capability,
        multiprocessors: gpu.multiprocessors,
        shared_bytes_per_block: gpu.shared_bytes_per_block,
        shared_bytes_per_multiprocessor: gpu.shared_bytes_per_multiprocessor,
        l2_bytes: gpu.l2_bytes,
    };
    let older = || Error::Option(format!("{} is older than any architecture kernels are made for", gpu.name));
    Gpu::of_device(&facts).ok_or_else(older)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_sequences_on_hopper_have_16_bit_operands_unless_that_is_switched_off() {
        let of =
            |arch: Arch, sequences: u32| Options { gpus: vec![Gpu::of_arch(arch)], sequences, ..Options::default() };
        let is_off_for = |options: Options, dtype: DType| {
            options.passes_off([dtype]).expect("passes there are").iter().any(|name| name == GEMM)
        };
        let is_off = |options: Options| is_off_for(options, DType::Q4_0);
        assert!(is_off(of(Arch::Sm90a, SEQUENCES_IN_16_BITS - 1)));
        assert!(!is_off(of(Arch::Sm90a, SEQUENCES_IN_16_BITS)));
        assert!(!is_off(of(Arch::Sm90a, 1).with(&[GEMM])));
        assert!(is_off(of(Arch::Sm90a, SEQUENCES_IN_16_BITS).without(&[GEMM])));
        assert!(is_off(of(Arch::Sm80, SEQUENCES_IN_16_BITS)));
        assert!(is_off_for(of(Arch::Sm90a, SEQUENCES_OF_LATER_IN_16_BITS - 1), DType::Q3K));
        assert!(!is_off_for(of(Arch::Sm90a, SEQUENCES_OF_LATER_IN_16_BITS), DType::Q3K));
        assert!(is_off_for(of(Arch::Sm80, SEQUENCES_OF_FLOATS_IN_16_BITS - 1), DType::F8));
        assert!(!is_off_for(of(Arch::Sm80, SEQUENCES_OF_FLOATS_IN_16_BITS), DType::F8));
    }
}
