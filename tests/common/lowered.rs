//! GPU plans before their kernels are compiled: everything the compiler decides, without machine code. They can be shown, and
//! run in the simulator; no GPU would take them.
//!
//! Whoever takes this in also has `src/compile.rs` as the module `compile`.

use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::Gguf;
use gemma4c_models::synth::{self, Preset};
use gemma4c_plan::cuda::{Code, Cuda, Image, KvType};
use gemma4c_plan::{Plan, Target};

use crate::compile::{self, CudaOptions, Options};

/// What `gemma4c compile` is told.
#[derive(Clone)]
pub struct Told {
    pub context: Option<u32>,
    pub chunk: Option<u32>,
    pub kv: KvType,
    pub vram: Option<u64>,
    pub disabled: Vec<String>,
}

impl Default for Told {
    fn default() -> Told {
        Told { context: None, chunk: None, kv: KvType::F16, vram: None, disabled: Vec::new() }
    }
}

impl Told {
    pub fn without(self, passes: &[&str]) -> Told {
        Told { disabled: passes.iter().map(|name| name.to_string()).collect(), ..self }
    }
}

/// The plan of a model for sm_90a.
pub fn plan(model: &Path, told: &Told) -> Plan {
    let file = Gguf::open(model).expect("a model");
    let graph = gemma4::graph(&file, &Config::read(&file).expect("a config")).expect("a graph");
    let architectures = vec![Arch::Sm90a];
    let cuda = CudaOptions { architectures, kv: told.kv, vram: told.vram, disabled: told.disabled.clone() };
    let folder = model.parent().expect("a folder");
    // As for the GPU, so that the two programs have the same limits; then its own part, without NVRTC.
    let chunk = Some(told.chunk.unwrap_or(compile::DEFAULT_CHUNK).min(compile::DEFAULT_CHUNK));
    let options = Options { context: told.context, chunk, cuda: None };
    let mut plan = compile::compile(&file, folder, &options).expect("a plan");
    let chunk = told.chunk.unwrap_or(compile::DEFAULT_CUDA_CHUNK);
    let lowered = compile::lower(&file, &graph, &plan.program, &cuda, chunk).expect("launches");
    let no_code = Code { source: "// not compiled\n".into(), cubins: vec![Image(vec![0])] };
    let code = vec![no_code; lowered.program.kernels.len()];
    plan.cuda = Some(Cuda { program: lowered.program, code });
    plan.target = Target::Cuda;
    plan
}

/// A model of full size whose weights are a hole.
pub fn header(path: &Path, preset: Preset, dtype: DType) {
    let options = synth::Options::new(preset, dtype);
    synth::write_header(&options, path).expect("a header is written");
}
