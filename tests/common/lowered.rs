//! GPU plans without machine code: everything the compiler decides before NVRTC compiles the kernels. Such a plan can be inspected and
//! run in the simulator, but not on a GPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gemma4c::compile::{self, CudaOptions, Files, Options};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::passes;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::gguf::Gguf;
use gemma4c_models::synth::{self, Preset};
use gemma4c_plan::cuda::{Code, Cuda, Image, KvType};
use gemma4c_plan::{Plan, Target};

/// The options of `gemma4c compile` that decide how a graph is lowered for a GPU.
#[derive(Clone)]
pub struct LowerOptions {
    pub context: Option<u32>,
    pub chunk: Option<u32>,
    pub kv: KvType,
    pub sequences: u32,
    /// Rows of one sequence at once.
    pub verified: u32,
    pub snapshots: Option<u32>,
    pub vram: Option<u64>,
    pub disabled: Vec<String>,
    /// The file of a drafter.
    pub drafter: Option<PathBuf>,
}

impl Default for LowerOptions {
    fn default() -> LowerOptions {
        LowerOptions {
            context: None,
            chunk: None,
            kv: KvType::F16,
            sequences: 1,
            verified: 1,
            snapshots: None,
            vram: None,
            disabled: passes::switched_off(&[], &[]),
            drafter: None,
        }
    }
}

impl LowerOptions {
    pub fn without(self, passes: &[&str]) -> LowerOptions {
        let names: Vec<String> = passes.iter().map(|name| name.to_string()).collect();
        LowerOptions { disabled: passes::switched_off(&names, &[]), ..self }
    }

    /// With bf16 copies of the weights.
    pub fn with_copies(self) -> LowerOptions {
        LowerOptions { disabled: passes::switched_off(&[], &["bf16-copies".to_owned()]), ..self }
    }
}

/// The plan of a model for the H200.
pub fn plan(model: &Path, options: &LowerOptions) -> Plan {
    plan_for(model, options, &[Gpu::of_arch(Arch::Sm90a)])
}

/// The plan of a model for these GPUs.
pub fn plan_for(model: &Path, options: &LowerOptions, targets: &[Gpu]) -> Plan {
    let file = Gguf::open(model).expect("a model");
    let LowerOptions { kv, sequences, verified, snapshots, vram, ref disabled, .. } = *options;
    let (targets_given, disabled) = (targets.to_vec(), disabled.clone());
    let cuda = CudaOptions { targets: targets_given, kv, sequences, verified, snapshots, vram, disabled };
    let drafter = options.drafter.as_ref().map(|path| Arc::new(Gguf::open(path).expect("a drafter")));
    let folder = model.parent().expect("a folder");
    // The CPU program first, with the GPU's limits, then the GPU programs without NVRTC.
    let chunk = Some(options.chunk.unwrap_or(compile::DEFAULT_CHUNK).min(compile::DEFAULT_CHUNK));
    let cpu_options =
        Options { context: options.context, chunk, kv: Some(kv), drafter: drafter.clone(), ..Options::default() };
    let mut plan = compile::compile(&file, folder, &cpu_options).expect("a plan");
    let chunk = options.chunk.unwrap_or(compile::DEFAULT_CUDA_CHUNK);
    let no_code = Code { source: "// not compiled\n".into(), image: Image(vec![0]) };
    for target in targets {
        let files = Files { file: &file, projector: None, drafter: drafter.as_deref() };
        let (lowered, _) = compile::lower_again(&plan, files, &cuda, target, chunk).expect("launches");
        let program = lowered.program;
        plan.others.push(Cuda { code: vec![no_code.clone(); program.kernels.len()], program });
    }
    plan.show(0);
    plan.target = Target::Cuda;
    plan
}

/// Writes a model of full size whose weights are a hole in a sparse file.
pub fn header(path: &Path, preset: Preset, dtype: DType) {
    let options = synth::Options::new(preset, dtype);
    synth::write_header(&options, path).expect("a header is written");
}
