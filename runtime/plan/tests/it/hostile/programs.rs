//! Programs for GPUs that are mostly one long list of the smallest parts there are.

use gemma4c_plan::WeightId;
use gemma4c_plan::cuda::{Argument, Code, CudaProgram, CudaStep, Image, Kernel, Load, LoadPart, PassReport, Refusal};

use crate::support;

/// As much as a section may have, and a little less.
const ROOM: usize = (1 << 22) - (1 << 14);

/// The section of a program.
fn body(program: &CudaProgram) -> Vec<u8> {
    postcard::to_allocvec(&[program][..]).expect("it is plain data")
}

/// `part` added as often as the section has room, or `most` times.
fn crowded(most: usize, mut add: impl FnMut(&mut CudaProgram, usize)) -> Vec<u8> {
    let original = support::plan().cuda.expect("it has one").program;
    let empty = body(&original).len();
    let mut one = original.clone();
    (0..64).for_each(|i| add(&mut one, i));
    let each = (body(&one).len() - empty).div_ceil(64).max(1);
    let mut crowd = original;
    (0..most.min((ROOM - empty) / each)).for_each(|i| add(&mut crowd, i));
    body(&crowd)
}

/// Sections of the most memory a byte.
pub fn crowds() -> Vec<(&'static str, Vec<u8>)> {
    let phases = |program: &mut CudaProgram, index: usize| {
        let phase = program.phases[0].clone();
        while program.phases.len() < 32 {
            program.phases.push(phase.clone());
        }
        index % 32
    };
    let step = |arguments: usize, nodes: usize| {
        let original = support::plan().cuda.expect("it has one").program.phases[0].steps[0].clone();
        let mut step = CudaStep {
            reason: String::new(),
            runner_up: String::new(),
            outputs: vec![],
            nodes: vec![0; nodes],
            ..original
        };
        (step.bytes, step.flops, step.launch.grid) = (0, 0, [0; 3]);
        step.launch.arguments = vec![Argument::U32(0); arguments];
        step
    };
    let steps = |arguments, nodes, most| {
        let step = step(arguments, nodes);
        crowded(most, |program, i| {
            let phase = phases(program, i);
            program.phases[phase].steps.push(step.clone());
        })
    };
    let output = support::plan().cuda.expect("it has one").program.phases[0].steps[0].outputs[0];
    let outputs = crowded(32 * 16000, |program, i| {
        let phase = phases(program, i);
        program.phases[phase].steps.push(CudaStep { outputs: vec![output; 16], ..step(0, 0) });
    });
    let loads = crowded(16000, |program, _| {
        let to = program.constants[0].to;
        program.loads.push(Load { weight: WeightId(0), rows: 1, parts: vec![LoadPart::Copy { to }; 16] });
    });
    let kernels = crowded(4000, |program, _| {
        program.kernels.push(Kernel {
            name: "k".into(),
            instance: String::new(),
            block: 1,
            shared: 0,
            written: 0,
            waits: false,
            waits_first: false,
            early: 0,
        });
    });
    let refusal = Refusal { node: String::new(), reason: String::new() };
    let passes = crowded(60, |program, _| {
        let refused = vec![refusal.clone(); 4096];
        program.passes.push(PassReport {
            name: String::new(),
            about: String::new(),
            enabled: true,
            applied: 0,
            refused,
        });
    });
    vec![
        ("steps", steps(0, 0, 32 * 16000)),
        ("arguments", steps(64, 0, 32 * 16000)),
        ("nodes", steps(0, 64, 32 * 16000)),
        ("outputs", outputs),
        ("loads", loads),
        ("kernels", kernels),
        ("passes", passes),
    ]
}

/// The most programs of the most kernels, each with machine code of nothing.
pub fn most_code() -> Vec<u8> {
    let code = Code { source: String::new(), image: Image(vec![]) };
    postcard::to_allocvec(&vec![vec![code; 4096]; 16]).expect("it is plain data")
}
