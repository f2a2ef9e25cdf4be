//! GPU plans without machine code: everything the compiler decides before NVRTC compiles the kernels. Such a plan can be inspected and
//! run in the simulator, but not on a GPU.

use std::path::Path;

use gemma4c::compile::{self, CudaOptions, Options};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::gemma4::{self, Config};
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
    pub vram: Option<u64>,
    pub disabled: Vec<String>,
}

impl Default for LowerOptions {
    fn default() -> LowerOptions {
        LowerOptions { context: None, chunk: None, kv: KvType::F16, vram: None, disabled: Vec::new() }
    }
}

impl LowerOptions {
    pub fn without(self, passes: &[&str]) -> LowerOptions {
        LowerOptions { disabled: passes.iter().map(|name| name.to_string()).collect(), ..self }
    }
}

/// The plan of a model for sm_90a.
pub fn plan(model: &Path, options: &LowerOptions) -> Plan {
    let file = Gguf::open(model).expect("a model");
    let graph = gemma4::graph(&file, &Config::read(&file).expect("a config")).expect("a graph");
    let h200 = Gpu::of_arch(Arch::Sm90a);
    let cuda = CudaOptions {
        targets: vec![h200.clone()],
        kv: options.kv,
        vram: options.vram,
        disabled: options.disabled.clone(),
    };
    let folder = model.parent().expect("a folder");
    // The CPU program first, with the GPU's limits, then the GPU program without NVRTC.
    let chunk = Some(options.chunk.unwrap_or(compile::DEFAULT_CHUNK).min(compile::DEFAULT_CHUNK));
    let cpu_options = Options { context: options.context, chunk, cuda: None };
    let mut plan = compile::compile(&file, folder, &cpu_options).expect("a plan");
    let chunk = options.chunk.unwrap_or(compile::DEFAULT_CUDA_CHUNK);
    let lowered = compile::lower(&file, &graph, &plan.program, &cuda, &h200, chunk).expect("launches");
    let no_code = Code { source: "// not compiled\n".into(), cubins: vec![Image(vec![0])] };
    let code = vec![no_code; lowered.program.kernels.len()];
    plan.cuda = Some(Cuda { program: lowered.program, code });
    plan.target = Target::Cuda;
    plan
}

/// Writes a model of full size whose weights are a hole in a sparse file.
pub fn header(path: &Path, preset: Preset, dtype: DType) {
    let options = synth::Options::new(preset, dtype);
    synth::write_header(&options, path).expect("a header is written");
}
