//! GPU plans without machine code: everything the compiler decides before NVRTC compiles the kernels. Such a plan can
//! be inspected and run in the simulator, but not on a GPU.

use std::path::Path;

pub use gemma4c::options::Options;
use gemma4c::pipeline::{Declared, Files, Text};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::synth::{self, Preset};
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{Code, Cuda, Image};

/// The plan of a model for the H200.
pub fn plan(model: &Path, options: &Options) -> Plan {
    plan_for(model, options, &[Gpu::of_arch(Arch::Sm90a)])
}

/// The plan of a model for these GPUs.
pub fn plan_for(model: &Path, options: &Options, gpus: &[Gpu]) -> Plan {
    let options = Options { gpus: gpus.to_vec(), ..options.clone() };
    let files = Files::open(model, &options).expect("a model");
    let declared = Declared::new(&files, &options).expect("a graph");
    let no_code = Code { source: "// not compiled\n".into(), image: Image(vec![0]) };
    let program = |gpu: &Gpu| {
        let program = declared.lower(gpu).expect("launches").program;
        Cuda { code: vec![no_code.clone(); program.kernels.len()], program }
    };
    let programs = gpus.iter().map(program).collect();
    let text = Text::read(&declared).expect("a vocabulary");
    declared.into_plan(text, model.parent().expect("a folder"), programs).expect("a plan")
}

/// Writes a model of full size whose weights are a hole in a sparse file.
pub fn header(path: &Path, preset: Preset, dtype: DType) {
    let options = synth::Options::new(preset, dtype);
    synth::write_header(&options, path).expect("a header is written");
}
