//! What must hold of the GPU's program: every range lies in its region, every index exists, and no launch is absurd.
//!
//! A GPU checks none of this. That the kernels stay within the ranges they are given is the compiler's promise, tested
//! in its simulator; that the ranges lie in the allocations, and that no two launches meet there, is checked here,
//! whoever wrote the plan.

use std::collections::HashSet;

use crate::cuda::{
    Argument, Cuda, CudaDrafter, CudaProgram, Gpu, Launch, LoadPart, Phase, PhaseKind, RECORD_WORDS, Range, Region,
};
use crate::hazards::{self, Order};
use crate::validate_kv::{check_kv, check_places};
use crate::validate_range::check_range;
use crate::{Plan, Program};

/// Beyond any GPU.
const MOST_BYTES: u64 = 1 << 42;
/// SMs of a GPU: beyond any.
const MOST_MULTIPROCESSORS: u32 = 1 << 16;
/// Bytes of a text.
const LONGEST_TEXT: usize = 4096;
/// What CUDA allows in the second and third dimension; the first one's limit is far away.
const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// All of a plan's programs for GPUs.
pub(crate) fn check_all(plan: &Plan) -> Result<(), String> {
    let mut keys = HashSet::new();
    for cuda in plan.programs() {
        check(plan, cuda)?;
        let gpu = &cuda.program.gpu;
        if !keys.insert(&gpu.key) {
            return Err(format!("two programs for {gpu}"));
        }
    }
    Ok(())
}

fn check_gpu(gpu: &Gpu) -> Result<(), String> {
    let arch = &gpu.architecture;
    let is_arch = arch.len() <= 16 && arch.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !arch.is_empty();
    let can_be_shown = |text: &String| !text.is_empty() && text.len() <= 200 && !text.contains(char::is_control);
    if !is_arch || ![&gpu.key, &gpu.name].into_iter().all(can_be_shown) {
        return Err("a program for a GPU without a proper name or architecture".into());
    }
    if gpu.multiprocessors == 0 || gpu.multiprocessors > MOST_MULTIPROCESSORS {
        return Err(format!("a program for {} SMs", gpu.multiprocessors));
    }
    Ok(())
}

fn check(plan: &Plan, cuda: &Cuda) -> Result<(), String> {
    let program = &cuda.program;
    let memory = &program.memory;
    if [memory.weights, memory.kv, memory.arena, memory.host, memory.seats].iter().any(|bytes| *bytes > MOST_BYTES) {
        return Err(format!("memory of {memory:?}"));
    }
    if program.kv.on_cpu() != plan.program.kv {
        let (kv, cpu) = (program.kv.name(), plan.program.kv.name());
        return Err(format!("keys and values are {kv} on a GPU and {cpu} on a CPU, which is not what they mean"));
    }
    let reserved = plan.reserved().try_fold(0u64, |sum, (_, weight)| sum.checked_add(weight.bytes));
    if reserved != Some(memory.seats) {
        return Err(format!("{} bytes for seats, and their weights are {reserved:?}", memory.seats));
    }
    check_gpu(&program.gpu)?;
    check_texts(program)?;
    check_kernels(cuda)?;
    check_kv(plan, program)?;
    check_places(plan, program)?;
    for constant in &program.constants {
        check_range(program, &constant.to, &constant.name)?;
        if constant.to.bytes != constant.values.len() as u64 * 4 {
            return Err(format!(
                "{} values in {} bytes of {}",
                constant.values.len(),
                constant.to.bytes,
                constant.name
            ));
        }
    }
    check_loads(plan, program)?;
    program.prepare.iter().try_for_each(|launch| check_launch(program, launch, "what prepares the weights"))?;
    check_ladders(program)?;
    program.phases.iter().try_for_each(|phase| check_phase(&plan.program, program, phase))?;
    check_towers(plan, program)?;
    match (&program.drafter, &plan.drafter) {
        (None, None) => Ok(()),
        (Some(drafter), Some(meaning)) => {
            check_phase(&meaning.program, program, &drafter.phase)?;
            check_drafter(plan, program, drafter)
        }
        _ => Err("one of the GPU and the CPU has a drafter, and the other has none".into()),
    }
}

/// Each tower of the plan has phases of its own, whose largest takes every picture that the tower does.
fn check_towers(plan: &Plan, program: &CudaProgram) -> Result<(), String> {
    if program.towers.len() != plan.towers.len() {
        return Err(format!("launches for {} towers of {}", program.towers.len(), plan.towers.len()));
    }
    for (tower, own) in plan.towers.iter().zip(&program.towers) {
        let name = &tower.name;
        let in_order = own.phases.windows(2).all(|two| two[0].rows < two[1].rows);
        let most = own.phases.last().map_or(0, |phase| phase.rows);
        if !in_order || own.phases.iter().any(|phase| phase.kind != PhaseKind::Tower) || most < tower.program.chunk {
            return Err(format!("the phases of tower {name} do not take {} patches", tower.program.chunk));
        }
        let (patches, soft) = (tower.program.chunk as u64, tower.program.asked as u64);
        let words = [
            ("grids", own.places.grids, 2 * RECORD_WORDS as u64),
            ("patches", own.places.patches, patches * tower.medium.row_width() as u64),
            ("soft tokens", own.places.soft, soft * plan.model.hidden as u64),
        ];
        for (what, offset, words) in words {
            if !offset.is_multiple_of(16) {
                return Err(format!("the {what} of tower {name} lie at {offset}"));
            }
            check_range(program, &Range { region: Region::Arena, offset, bytes: words * 4 }, what)?;
        }
        own.phases.iter().try_for_each(|phase| check_phase(&tower.program, program, phase))?;
    }
    Ok(())
}

/// The places of a drafter lie in the arena, and its drafts can be verified.
fn check_drafter(plan: &Plan, program: &CudaProgram, drafter: &CudaDrafter) -> Result<(), String> {
    let (ends, places, steps) = (&drafter.ends, &drafter.places, drafter.phase.steps.len());
    let in_order = ends.is_sorted_by(|a, b| a < b) && ends.first() > Some(&0);
    // One launch more ends a round.
    if ends.is_empty() || !in_order || ends.last().is_none_or(|end| *end as usize + 1 != steps) {
        return Err(format!("drafts that end at {ends:?} of {steps} launches"));
    }
    if ends.len() as u32 >= program.verified_rows {
        return Err(format!("{} drafts, and {} rows that are verified", ends.len(), program.verified_rows));
    }
    let (record, hidden) = (RECORD_WORDS as u64, plan.model.hidden as u64);
    let words = [
        ("the drafter's record", places.record, record),
        ("the drafter's second record", places.before, record),
        ("what enters the last norm", places.entering, hidden * program.decode_rows() as u64),
        ("the drafter's hidden state", places.hidden, hidden),
        ("the drafts", places.drafts, program.decode_rows() as u64),
        ("what takes their places", places.given, program.decode_rows() as u64),
        ("the drafter's scores", places.scores, places.score_count as u64),
        ("the drafter's groups", places.groups, places.group_count as u64),
    ];
    for (name, offset, words) in words {
        if !offset.is_multiple_of(16) {
            return Err(format!("{name} lies at {offset}, which is no place for it"));
        }
        check_range(program, &Range { region: Region::Arena, offset, bytes: words * 4 }, name)?;
    }
    let order = plan.drafter.as_ref().map_or(0, |drafter| drafter.token_order.len() as u32);
    let scored = match places.group_count {
        0 => places.score_count == plan.model.vocab_size,
        groups => order > 0 && places.score_count.is_multiple_of(groups) && places.score_count <= order,
    };
    if scored && places.before == places.record + 4 * record {
        Ok(())
    } else {
        Err(format!("a drafter of {} scores in {} groups", places.score_count, places.group_count))
    }
}

/// Decode of one row first, then more rows; then prefill.
fn check_ladders(program: &CudaProgram) -> Result<(), String> {
    if program.phases.first().is_none_or(|phase| (phase.kind, phase.rows) != (PhaseKind::Decode, 1)) {
        return Err("the first phase does not decode one row".into());
    }
    if !(1..=program.decode_rows()).contains(&program.verified_rows) {
        let (verified, decoded) = (program.verified_rows, program.decode_rows());
        return Err(format!("{verified} rows of a sequence at once, and {decoded} are decoded at most"));
    }
    let in_order = |two: &[Phase]| match (two[0].kind, two[1].kind) {
        (PhaseKind::Decode, PhaseKind::Prefill) => true,
        (PhaseKind::Prefill, PhaseKind::Decode) | (PhaseKind::Tower, _) | (_, PhaseKind::Tower) => false,
        _ => two[0].rows < two[1].rows,
    };
    if program.phases.windows(2).all(in_order) { Ok(()) } else { Err("the phases are not in order".into()) }
}

/// What a person is shown must be fit for a terminal.
fn check_texts(program: &CudaProgram) -> Result<(), String> {
    let steps = program.all_phases().flat_map(|phase| &phase.steps);
    let refusals = program.passes.iter().flat_map(|pass| &pass.refused);
    let texts = (program.all_phases().map(|phase| &phase.name))
        .chain(program.constants.iter().map(|constant| &constant.name))
        .chain(program.kernels.iter().map(|kernel| &kernel.instance))
        .chain(steps.flat_map(|step| [&step.reason, &step.runner_up]))
        .chain(program.passes.iter().flat_map(|pass| [&pass.name, &pass.about]))
        .chain(refusals.flat_map(|refusal| [&refusal.node, &refusal.reason]))
        .chain([&program.toolchain]);
    match texts.into_iter().find(|text| text.len() > LONGEST_TEXT || text.contains(char::is_control)) {
        Some(text) => Err(format!("a text of {} bytes in the GPU's program cannot be shown", text.len())),
        None => Ok(()),
    }
}

fn check_kernels(cuda: &Cuda) -> Result<(), String> {
    let kernels = &cuda.program.kernels;
    if kernels.len() != cuda.code.len() {
        return Err(format!("{} kernels, but code for {}", kernels.len(), cuda.code.len()));
    }
    for kernel in kernels {
        let name = &kernel.name;
        if name.is_empty() || name.len() > 200 || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            return Err(format!("a kernel has a name of {} bytes that is no symbol", name.len()));
        }
        if kernel.block == 0 || kernel.block > 1024 || kernel.shared > 256 * 1024 {
            return Err(format!("kernel {name}: blocks of {} threads, {} bytes shared", kernel.block, kernel.shared));
        }
    }
    Ok(())
}

fn check_loads(plan: &Plan, program: &CudaProgram) -> Result<(), String> {
    for load in &program.loads {
        let weight = plan.weights.get(load.weight.index()).ok_or(format!("weight {:?} is loaded", load.weight))?;
        let name = &weight.name;
        if weight.is_reserved() {
            return Err(format!("{name} is reserved for adapters, and loaded"));
        }
        if load.rows == 0 || !weight.bytes.is_multiple_of(load.rows) {
            return Err(format!("{name}: {} bytes in {} rows", weight.bytes, load.rows));
        }
        for part in &load.parts {
            match *part {
                LoadPart::Copy { to } => {
                    check_range(program, &to, name)?;
                    if to.bytes != weight.bytes || !matches!(to.region, Region::Weights | Region::Host) {
                        return Err(format!("{name}: {} bytes copied to {to:?}", weight.bytes));
                    }
                }
                LoadPart::Kernel { kernel, to, row_count, row_bytes, per_block, .. } => {
                    check_range(program, &to, name)?;
                    let fits = row_bytes.checked_mul(load.rows).is_some_and(|bytes| bytes <= to.bytes);
                    let kernel_exists = (kernel as usize) < program.kernels.len();
                    if !fits
                        || !kernel_exists
                        || to.region != Region::Weights
                        || per_block == 0
                        || row_count > u32::MAX as u64
                    {
                        return Err(format!("{name}: {} rows of {row_bytes} bytes to {to:?}", load.rows));
                    }
                }
            }
        }
    }
    Ok(())
}

fn check_launch(program: &CudaProgram, launch: &Launch, what: &str) -> Result<(), String> {
    if launch.kernel as usize >= program.kernels.len() {
        return Err(format!("{what} launches kernel {} of {}", launch.kernel, program.kernels.len()));
    }
    if launch.grid.iter().zip(MOST_BLOCKS).any(|(blocks, most)| *blocks == 0 || *blocks > most) {
        return Err(format!("{what} launches a grid of {:?}", launch.grid));
    }
    let kernel = &program.kernels[launch.kernel as usize];
    if launch.programmatic && !kernel.waits {
        return Err(format!("{what} may start kernel {} early, which waits for nothing", kernel.name));
    }
    launch.arguments.iter().try_for_each(|argument| match argument {
        Argument::Memory(range) => check_range(program, range, what),
        Argument::U32(_) | Argument::F32(_) => Ok(()),
    })
}

fn check_phase(meaning: &Program, program: &CudaProgram, phase: &Phase) -> Result<(), String> {
    let name = &phase.name;
    if phase.rows == 0 || phase.asked_from as usize > phase.steps.len() || phase.arena_bytes > program.memory.arena {
        return Err(format!("phase {name} of {} rows does not fit", phase.rows));
    }
    let picks = phase.pick_largest.iter().chain(&phase.pick_sampled);
    picks.into_iter().try_for_each(|launch| check_launch(program, launch, &format!("the pick of {name}")))?;
    for step in &phase.steps {
        check_launch(program, &step.launch, name)?;
        let outputs = step.outputs.iter().map(|output| output.value);
        if let Some(value) = step.nodes.iter().copied().chain(outputs).find(|v| *v as usize >= meaning.values.len()) {
            return Err(format!("a step of {name} computes value {value}"));
        }
        step.outputs.iter().try_for_each(|output| check_range(program, &output.place, name))?;
    }
    check_edges(program, phase)
}

/// Every step waits for whoever wrote what it reads, and for whoever touched what it writes: by its own edges, or by
/// those of the steps it waits for.
fn check_edges(program: &CudaProgram, phase: &Phase) -> Result<(), String> {
    let name = &phase.name;
    for (at, step) in phase.steps.iter().enumerate() {
        let ends_before = |edge: &u32| (*edge as usize) < at;
        if !step.after.iter().all(ends_before) || !step.after.is_sorted_by(|a, b| a < b) {
            return Err(format!("step {at} of {name} waits for steps {:?}", step.after));
        }
        // It would wait for one predecessor, and not for the others.
        if step.launch.programmatic && step.after.len() > 1 {
            return Err(format!("step {at} of {name} may overlap with {} steps at once", step.after.len()));
        }
        let stays = |argument: &Range| matches!(argument.region, Region::Kv | Region::Arena) || argument.bytes == 0;
        if written(program, &step.launch).any(|range| !stays(range)) {
            return Err(format!("step {at} of {name} writes to weights"));
        }
    }
    let launches: Vec<&Launch> = phase.steps.iter().map(|step| &step.launch).collect();
    let needs = hazards::needs(&launches, &program.kernels);
    let needs = needs.ok_or_else(|| format!("the steps of {name} cut memory into too many pieces"))?;
    let edges: Vec<Vec<u32>> = phase.steps.iter().map(|step| step.after.clone()).collect();
    let order = Order::of(&edges);
    for (at, own) in needs.iter().enumerate() {
        if let Some(needed) = own.iter().find(|needed| !order.is_before(**needed, at as u32)) {
            return Err(format!("step {at} of {name} does not wait for step {needed}, whose memory it uses"));
        }
    }
    let started = Order::started(&edges, &launches, &program.kernels);
    for (at, before) in started.iter().enumerate() {
        let has_ended = |step| order.is_before(step, *before);
        if let Some(writer) = hazards::disturbed(at, &launches, &program.kernels, &program.kv_layout, has_ended) {
            return Err(format!("step {at} of {name} reads what step {writer} may still write when it starts"));
        }
    }
    Ok(())
}

/// The memory that a launch writes to.
fn written<'a>(program: &'a CudaProgram, launch: &'a Launch) -> impl Iterator<Item = &'a Range> {
    let kernel = &program.kernels[launch.kernel as usize];
    launch.arguments.iter().enumerate().filter_map(|(index, argument)| match argument {
        Argument::Memory(range) if kernel.writes_to(index) => Some(range),
        _ => None,
    })
}
