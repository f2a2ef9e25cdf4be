//! Contradictions in the GPU's part of a plan: a GPU would not notice any of them.

use gemma4c_plan::cuda::{
    Argument, Code, Constant, Cuda, CudaDrafter, CudaProgram, CudaStep, DrafterPlaces, Image, KvLayout, Launch,
    LoadPart, PhaseKind, Range, Region,
};
use gemma4c_plan::{Plan, WeightId};

use super::Edit;

fn cuda(plan: &mut Plan) -> &mut Cuda {
    plan.cuda.as_mut().expect("the plan has a program for GPUs")
}

fn program(plan: &mut Plan) -> &mut CudaProgram {
    &mut cuda(plan).program
}

fn launch(plan: &mut Plan) -> &mut Launch {
    &mut program(plan).phases[1].steps[1].launch
}

fn step(plan: &mut Plan) -> &mut CudaStep {
    &mut program(plan).phases[1].steps[1]
}

fn part(plan: &mut Plan, load: usize, index: usize) -> &mut LoadPart {
    &mut program(plan).loads[load].parts[index]
}

fn to(part: &mut LoadPart) -> &mut Range {
    match part {
        LoadPart::Copy { to } | LoadPart::Kernel { to, .. } => to,
    }
}

/// Each edits the plan into a contradiction.
pub const CONTRADICTIONS: [(&str, Edit); 60] = [
    ("a GPU plan without a program", |p| p.cuda = None),
    ("a CPU plan with a program for GPUs", |p| p.target = gemma4c_plan::Target::Cpu),
    ("weights larger than any GPU", |p| program(p).memory.weights = 1 << 43),
    ("an arena larger than any GPU", |p| program(p).memory.arena = u64::MAX),
    ("machine code for nothing", |p| program(p).gpu.architecture.clear()),
    ("machine code for a novel", |p| program(p).gpu.architecture = "sm_".repeat(20)),
    ("an architecture that is not ASCII", |p| program(p).gpu.architecture = "sm_é".into()),
    ("a GPU whose name rings", |p| program(p).gpu.name = "H\x07200".into()),
    ("a GPU without a key", |p| program(p).gpu.key.clear()),
    ("a GPU without SMs", |p| program(p).gpu.multiprocessors = 0),
    ("two programs for one GPU", |p| p.others = vec![cuda(p).clone()]),
    ("a program for another GPU that does not fit", |p| {
        let mut other = cuda(p).clone();
        other.program.gpu.key = "another".into();
        other.program.phases[0].rows = 2;
        p.others.push(other);
    }),
    ("a kernel without code", |p| drop(cuda(p).code.pop())),
    ("code for a kernel too many", |p| cuda(p).code.push(Code { source: String::new(), image: Image(vec![1]) })),
    ("a kernel without a name", |p| program(p).kernels[1].name.clear()),
    ("a kernel whose name is no symbol", |p| program(p).kernels[1].name = "a-b".into()),
    ("a kernel whose name has a zero byte", |p| program(p).kernels[1].name = "a\0b".into()),
    ("a block of no threads", |p| program(p).kernels[1].block = 0),
    ("a block of 1025 threads", |p| program(p).kernels[1].block = 1025),
    ("more shared memory than there is", |p| program(p).kernels[1].shared = 1 << 20),
    ("tokens beyond the arena", |p| program(p).places.tokens = 8192 - 28),
    ("records beyond the arena", |p| program(p).places.rows = 8192 - 48),
    ("a record at an odd place", |p| program(p).places.chunk += 4),
    ("the chunk beyond the arena", |p| program(p).places.chunk = 8192 - 48),
    ("a segment at an odd place", |p| program(p).places.segments += 8),
    ("segments beyond the arena", |p| program(p).places.segments = 8192),
    ("segments of a longer phase beyond the arena", |p| {
        program(p).places.segments = 8192 - 16;
        program(p).phases[2].rows = 65;
    }),
    ("the asked row beyond the arena", |p| program(p).places.asked = 8192 - 48),
    ("an asked row whose end overflows", |p| program(p).places.asked = u64::MAX - 15),
    ("a page table beyond the arena", |p| program(p).places.pages = 8192),
    ("suppressed tokens beyond the arena", |p| program(p).places.suppress_len = 10_000),
    ("a history beyond the arena", |p| program(p).places.history_len = 10_000),
    ("a history of no tokens", |p| program(p).places.history_len = 0),
    ("logits beyond the arena", |p| program(p).places.logits = 8192 - 44),
    ("masks beyond the arena", |p| program(p).places.masks = 8192),
    ("a table beyond the weights", |p| program(p).constants[0].to.offset = 1 << 16),
    ("a table of another length", |p| program(p).constants[0].values.push(0.0)),
    ("a table whose end overflows", |p| {
        let table = Constant { name: "endless".into(), values: vec![], ..program(p).constants[0].clone() };
        program(p).constants.push(Constant { to: Range { offset: u64::MAX, ..table.to }, ..table });
    }),
    ("a load of a weight that does not exist", |p| program(p).loads[0].weight = WeightId(12)),
    ("a load of no rows", |p| program(p).loads[0].rows = 0),
    ("a load of rows that are not whole", |p| program(p).loads[0].rows = 11),
    ("a copy of other bytes than the tensor has", |p| to(part(p, 0, 1)).bytes -= 1),
    ("a copy beyond the weights", |p| to(part(p, 0, 1)).offset = 1 << 16),
    ("a copy into keys and values", |p| to(part(p, 0, 1)).region = Region::Kv),
    ("a copy into the arena", |p| to(part(p, 0, 1)).region = Region::Arena),
    ("a repacked tensor larger than its place", |p| program(p).loads[1].rows = 32 * 4),
    ("a repacked tensor on the host", |p| *to(part(p, 1, 0)) = Range { region: Region::Host, ..*to(part(p, 1, 0)) }),
    ("a repack by a kernel that does not exist", |p| {
        if let LoadPart::Kernel { kernel, .. } = part(p, 1, 0) {
            *kernel = 5;
        }
    }),
    ("a repack of blocks of nothing", |p| {
        if let LoadPart::Kernel { per_block, .. } = part(p, 1, 0) {
            *per_block = 0;
        }
    }),
    ("a launch of a kernel that does not exist", |p| launch(p).kernel = 5),
    ("a launch of no blocks", |p| launch(p).grid = [1, 0, 1]),
    ("a launch of more blocks than there can be", |p| launch(p).grid = [1, 65536, 1]),
    ("an argument beyond its region", |p| {
        launch(p).arguments[0] = Argument::Memory(Range { region: Region::Weights, offset: (1 << 16) - 1, bytes: 2 });
    }),
    ("a pick of a kernel that does not exist", |p| program(p).phases[1].pick_sampled[0].kernel = 9),
    ("a phase whose name has a line break", |p| program(p).phases[1].name = "two\nlines".into()),
    ("a copy of weights by a kernel that does not exist", |p| program(p).prepare[0].kernel = 5),
    ("a copy of weights beyond the memory for them", |p| program(p).memory.weights = 20_000),
    ("a reason that is a novel", |p| program(p).phases[1].steps[0].reason = "x".repeat(5000)),
    ("a runner-up that rings", |p| program(p).phases[1].steps[0].runner_up = "\x07".into()),
    ("a first phase of two rows", |p| drop(program(p).phases.remove(0))),
];

/// More of them, of the phases.
pub const PHASES: [(&str, Edit); 24] = [
    ("more rows of a sequence than are decoded", |p| program(p).verified_rows = 9),
    ("launches of a drafter that there is not", |p| {
        let phase = program(p).phases[0].clone();
        program(p).drafter = Some(CudaDrafter { ends: vec![1], phase, places: DrafterPlaces::default() });
    }),
    ("no phase", |p| program(p).phases.clear()),
    ("a first phase that is not decode", |p| program(p).phases[0].kind = PhaseKind::Prefill),
    ("decode after prefill", |p| program(p).phases[2].kind = PhaseKind::Decode),
    ("decode of more rows than have records", |p| {
        program(p).phases[1].kind = PhaseKind::Decode;
        program(p).places.rows = 8192 - 64;
    }),
    ("decode of more rows than have logits", |p| {
        program(p).phases[1].kind = PhaseKind::Decode;
        program(p).places.logits = 8192 - 48;
    }),
    ("prefill phases out of order", |p| program(p).phases.swap(1, 2)),
    ("two prefill phases of the same rows", |p| program(p).phases[2].rows = 2),
    ("a phase of no rows", |p| program(p).phases[1].rows = 0),
    ("more asked steps than there are", |p| program(p).phases[1].asked_from = 4),
    ("a phase that needs more than the arena", |p| program(p).phases[1].arena_bytes = 8193),
    ("a step of a value that does not exist", |p| program(p).phases[1].steps[0].nodes.push(99)),
    ("a step that leaves a value that does not exist", |p| program(p).phases[1].steps[0].outputs[0].value = 99),
    ("a step that leaves a value beyond the arena", |p| {
        program(p).phases[1].steps[0].outputs[0].place.offset = 8192;
    }),
    ("a step that does not wait for what it reads", |p| {
        launch(p).programmatic = false;
        step(p).after.clear();
    }),
    ("a step that waits for another one than that it reads from", |p| {
        program(p).phases[1].steps[2].after = vec![0];
    }),
    ("a step that waits for itself", |p| step(p).after = vec![1]),
    ("a step that waits for a later one", |p| step(p).after = vec![0, 2]),
    ("a step that waits for one twice", |p| step(p).after = vec![0, 0]),
    ("a step that may overlap with two others", |p| program(p).phases[1].steps[2].after = vec![0, 1]),
    ("a kernel that starts early and does not wait", |p| program(p).kernels[2].waits = false),
    ("a step that reads before it waits what its predecessor writes", |p| program(p).kernels[2].early = 0b100),
    ("a step that writes to weights", |p| program(p).kernels[2].written |= 1),
];

/// More of them, of keys and values.
pub const KEYS_AND_VALUES: [(&str, Edit); 19] = [
    ("no sequence", |p| layout(p).slots = 0),
    ("tables of more sequences than there is room for", |p| layout(p).slots = 1 << 20),
    ("pages beyond their region", |p| layout(p).pages = 3),
    ("pages of more bytes than there can be", |p| layout(p).page_bytes = u64::MAX),
    ("pages that do not fill their region", |p| program(p).memory.kv += 1),
    ("pages of odd rows", |p| layout(p).sliding.rows = 65),
    ("pages of no rows", |p| layout(p).full.rows = 0),
    ("no pages for a sliding layer", |p| layout(p).sliding.entries = 0),
    ("more pages of a window than the context has", |p| layout(p).sliding.entries = 2),
    ("pages of windows that there are not", |p| {
        (p.program.caches[0].window, p.program.caches[0].capacity) = (None, p.program.context);
        layout(p).caches[0].window = None;
    }),
    ("pages for another context", |p| layout(p).full.entries = 2),
    ("a cache too few", |p| layout(p).caches.clear()),
    ("pages that hold less than a window", |p| {
        (p.program.context, layout(p).caches[0].window) = (512, Some(65));
        layout(p).full.entries = 8;
        program(p).set_pages(9);
        (p.program.caches[0].window, p.program.caches[0].capacity) = (Some(65), 512);
    }),
    ("a cache of another window", |p| layout(p).caches[0].window = Some(9)),
    ("a sliding cache where the program has a full one", |p| {
        (p.program.caches[0].window, p.program.caches[0].capacity) = (None, p.program.context);
    }),
    ("values over keys", |p| layout(p).caches[0].values = 4092),
    ("values beyond the page", |p| layout(p).caches[0].values = 4100),
    ("values whose end overflows", |p| layout(p).caches[0].values = u64::MAX - 1),
    ("fewer pages than a sequence takes", |p| program(p).set_pages(1)),
];

fn layout(plan: &mut Plan) -> &mut KvLayout {
    &mut program(plan).kv_layout
}
