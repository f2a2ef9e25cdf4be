//! Steps of plans as launches that can be timed one by one: the instance, grid and arguments that a plan has, over
//! memory of its own.
//!
//! A step's arguments say how large each of its buffers is. What lies in them decides no kernel's time but where it
//! says which rows or experts are meant, so weights and activations are random numbers of a form that is finite
//! whatever a kernel takes them for. Everything but the launch happens here, and needs no GPU.

use std::collections::HashSet;

use anyhow::{Context, Result};
use gemma4c_dsl::harness::{Random, Scalar};
use gemma4c_dsl::{Access, ElementType, Instance, ParamKind};
use gemma4c_graph::Elem;
use gemma4c_plan::cuda::{Argument, CudaStep, Phase, PhaseKind, RECORD_WORDS, Range, Region, Segment, record};
use gemma4c_runtime::cuda::Shape;

use crate::launched::Plan;

/// A step to be timed.
pub struct Timed {
    /// The model, the step's place in it, and rows and columns of its matrices.
    pub shape: String,
    /// The types of its matrices.
    pub types: String,
    /// How the plan says that it multiplies.
    pub how: String,
    pub instance: Instance,
    pub grid: [u32; 3],
    /// Bytes it must read, as the plan says.
    pub bytes: u64,
    pub flops: u64,
    /// The sizes of what it multiplies, where that is one product: experts are many.
    pub product: Option<Shape>,
    pub arguments: Vec<Given>,
}

/// An argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    Scalar(Scalar),
    Buffer {
        bytes: usize,
        content: Content,
        /// Every copy of the launch has its own, so that none finds it in L2.
        is_rotated: bool,
    },
}

/// What a buffer holds before the launch.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Counters, which are zero between launches, and what is written before it is read.
    Zeros,
    Words(Vec<u32>),
    /// Floats from -1 to 1.
    Floats,
    /// Sums of 32 codes of activations.
    Sums,
    /// Halves of words that are small as f16 and as bf16, and so is each word as f32.
    Halves,
    /// Numbers below this one, each of which comes once before any comes again: other ones for every copy.
    Experts {
        of: u32,
    },
}

/// Random bytes that are made once and repeated: making them must not take longer than timing what reads them.
const REPEATED: usize = 4 << 20;

impl Content {
    /// That many bytes, for copy number `copy` of the launch.
    pub fn bytes(&self, len: usize, copy: usize) -> Vec<u8> {
        let mut random = Random::new(len as u64 + ((copy as u64) << 40));
        let mut repeated = |word: &dyn Fn(&mut Random) -> u32| {
            let some: Vec<u8> =
                (0..len.min(REPEATED).div_ceil(4)).flat_map(|_| word(&mut random).to_le_bytes()).collect();
            let mut bytes = some.repeat(len.div_ceil(some.len().max(1)));
            bytes.truncate(len);
            bytes
        };
        match self {
            Content::Zeros => vec![0; len],
            Content::Words(words) => words.iter().flat_map(|word| word.to_le_bytes()).collect(),
            Content::Floats => repeated(&|random| random.float(-1.0, 1.0).to_bits()),
            Content::Sums => repeated(&|random| (random.below(2001) as i32 - 1000) as u32),
            Content::Halves => repeated(&|random| random.bits() as u32 & 0x93ff_93ff | 0x2000_2000),
            Content::Experts { of } => {
                let first = random.below(u64::from(*of)) as u32;
                (0..len as u32 / 4).flat_map(|i| ((first + i * EXPERT_STRIDE) % of).to_le_bytes()).collect()
            }
        }
    }
}

/// From one chosen expert to the next: a prime, so that it meets all of any number of experts that it does not divide.
const EXPERT_STRIDE: u32 = 13;

/// The steps of one phase that launch wanted kernels, each kind once: layers that differ in nothing but their numbers
/// are one.
pub fn steps<'p>(
    plan: &'p Plan,
    phase: &'p Phase,
    is_wanted: impl Fn(&str) -> bool + 'p,
) -> impl Iterator<Item = Result<Timed>> + 'p {
    let mut seen = HashSet::new();
    let kernels = &plan.lowered.program.kernels;
    let wanted =
        phase.steps.iter().enumerate().filter(move |(_, step)| is_wanted(&kernels[step.launch.kernel as usize].name));
    let first_of_kind = wanted.filter(move |(_, step)| seen.insert(kind(step)));
    first_of_kind.map(move |(at, _)| timed(plan, phase, at))
}

/// What a launch is but for where its memory lies.
pub fn kind(step: &CudaStep) -> String {
    let argument = |argument: &Argument| match argument {
        Argument::Memory(range) => format!("{} bytes", range.bytes),
        Argument::U32(value) => value.to_string(),
        Argument::F32(value) => value.to_string(),
    };
    let arguments: Vec<String> = step.launch.arguments.iter().map(argument).collect();
    format!("{} on {:?}: {}", step.launch.kernel, step.launch.grid, arguments.join(", "))
}

fn timed(plan: &Plan, phase: &Phase, at: usize) -> Result<Timed> {
    let step = &phase.steps[at];
    let instance = plan.lowered.instances[step.launch.kernel as usize].clone();
    let matrices = plan.matrices_of(step);
    let mut shape = format!("{}, {}", plan.recipe.preset.name(), plan.place(phase, at));
    let mut product = None;
    if let Some(k) = matrices.first().map(|matrix| matrix.dim(0))
        && matrices.iter().all(|matrix| matrix.dim(0) == k)
    {
        let rows: u64 = matrices.iter().map(|matrix| matrix.dims[1..].iter().product::<u64>()).sum();
        shape += &format!(", {rows} x {k}");
        if matrices.iter().all(|matrix| matrix.dims.len() == 2) {
            product = Some(Shape { rows: rows_at(phase, at), outputs: rows as u32, k: k as u32 });
        }
    }
    let mut types: Vec<String> = matrices.iter().map(|matrix| matrix.dtype.to_string()).collect();
    types.dedup();
    let how = step.reason.split_once(": ").map_or(step.reason.as_str(), |(_, how)| how).to_owned();
    let arguments = arguments(plan, phase, at, &instance)?;
    let launch = &step.launch;
    Ok(Timed {
        shape,
        types: types.join(" + "),
        how,
        instance,
        grid: launch.grid,
        bytes: step.bytes,
        flops: step.flops,
        product,
        arguments,
    })
}

/// Rows of a step: one behind the chunk's own, for the row that is asked for.
fn rows_at(phase: &Phase, at: usize) -> u32 {
    let asked = phase.kind == PhaseKind::Prefill && at >= phase.asked_from as usize;
    if asked { 1 } else { phase.rows }
}

fn arguments(plan: &Plan, phase: &Phase, at: usize, instance: &Instance) -> Result<Vec<Given>> {
    let step = &phase.steps[at];
    let is_weights = |range: &Range| matches!(range.region, Region::Weights | Region::Host | Region::Seats);
    let ranges = step.launch.arguments.iter().filter_map(|argument| match argument {
        Argument::Memory(range) => Some(range),
        _ => None,
    });
    // Of all experts and of a table a launch reads a part: copies take other parts of the same.
    let weights: u64 = ranges.filter(|range| is_weights(range)).map(|range| range.bytes).sum();
    let is_read_whole = weights <= 2 * step.bytes;
    let given = |(argument, param): (&Argument, &gemma4c_dsl::InstanceParam)| {
        let range = match argument {
            Argument::U32(value) => return Ok(Given::Scalar(Scalar::U32(*value))),
            Argument::F32(value) => return Ok(Given::Scalar(Scalar::F32(*value))),
            Argument::Memory(range) => range,
        };
        let ParamKind::Memory { element, access } = param.def.kind else {
            anyhow::bail!("{instance}: `{}` is given memory and is none", param.name);
        };
        let element = instance.values().element(element);
        let content = match access {
            Access::Output => Content::Zeros,
            _ => content(plan, phase, at, param.def.name, range, element)?,
        };
        let is_rotated = match range.region {
            Region::Weights | Region::Host | Region::Seats => is_read_whole,
            Region::Kv => true,
            Region::Arena => matches!(content, Content::Experts { .. }),
        };
        Ok(Given::Buffer { bytes: range.bytes as usize, content, is_rotated })
    };
    anyhow::ensure!(step.launch.arguments.len() == instance.params().len(), "{instance}: another number of arguments");
    step.launch.arguments.iter().zip(instance.params()).map(given).collect()
}

/// What an argument of that name must hold for the launch to be one of a running model. A view's field goes by its own name.
fn content(
    plan: &Plan,
    phase: &Phase,
    at: usize,
    name: &str,
    range: &Range,
    element: Option<ElementType>,
) -> Result<Content> {
    let rows = rows_at(phase, at);
    let experts = || {
        let routing = plan.graph.nodes.iter().find_map(|node| match node.ty.elem {
            Elem::Routing { experts } => Some(experts),
            _ => None,
        });
        routing.context("experts in a model without a router")
    };
    Ok(match name {
        _ if range.bytes == 0 => Content::Zeros,
        // The last rows of the context: all keys are visible.
        "state" if range.offset == plan.lowered.program.places.segments => {
            let whole = Segment::alone(plan.meaning.context.saturating_sub(rows), rows, 0);
            Content::Words(Segment::words(&[whole], rows))
        }
        "state" | "asked" => Content::Words(records(plan, phase, rows)),
        // The first slot's pages, in order.
        "pages" => Content::Words((0..range.bytes as u32 / 4).collect()),
        "tokens" | "counter" | "counters" => Content::Zeros,
        "ids" => Content::Experts { of: experts()? },
        "order" => Content::Words((0..range.bytes as u32 / 4).collect()),
        "groups" => Content::Words(groups(plan, phase, at, range, experts()?)?),
        _ if matches!(element, Some(ElementType::F32 | ElementType::F32x2 | ElementType::F32x4)) => Content::Floats,
        _ if element == Some(ElementType::I32) => Content::Sums,
        _ => Content::Halves,
    })
}

/// The record of a chunk of so many rows, or as many of decoded rows.
fn records(plan: &Plan, phase: &Phase, rows: u32) -> Vec<u32> {
    let (count, rows) = if phase.kind == PhaseKind::Decode { (rows, 1) } else { (1, rows) };
    let mut words = vec![0; (count * RECORD_WORDS) as usize];
    for row in words.chunks_exact_mut(RECORD_WORDS as usize) {
        (row[record::POSITION], row[record::ROWS]) = (plan.meaning.context.saturating_sub(rows), rows);
    }
    words
}

/// The pairs of rows and experts, evenly shared out among the experts, in groups as the sort before this step would
/// make them: how many, then the first of each, the one behind its last, and its expert.
fn groups(plan: &Plan, phase: &Phase, at: usize, range: &Range, experts: u32) -> Result<Vec<u32>> {
    let is_sort = |step: &&CudaStep| {
        let kernel = &plan.lowered.program.kernels[step.launch.kernel as usize].name;
        kernel == "group_pairs" && step.launch.arguments.contains(&Argument::Memory(*range))
    };
    let sort = phase.steps[..at].iter().rev().find(is_sort).context("no sort before a product of sorted rows")?;
    let instance = &plan.lowered.instances[sort.launch.kernel as usize];
    let height = instance.values().constants().iter().find_map(|(name, value)| match value {
        gemma4c_dsl::ConstantValue::U32(height) if *name == "HEIGHT" => Some(*height),
        _ => None,
    });
    let height = height.context("a sort without a height")?;
    let top = sort.launch.arguments.iter().find_map(|argument| match argument {
        Argument::U32(top) => Some(*top),
        _ => None,
    });
    let pairs = phase.rows * top.context("a sort without a number of choices")?;
    let mut found = Vec::new();
    for expert in 0..experts {
        let place = |expert: u32| (u64::from(pairs) * u64::from(expert) / u64::from(experts)) as u32;
        for first in (place(expert)..place(expert + 1)).step_by(height as usize) {
            found.extend([first, (first + height).min(place(expert + 1)), expert, 0]);
        }
    }
    let mut words = vec![found.len() as u32 / 4, 0, 0, 0];
    words.append(&mut found);
    words.resize(range.bytes as usize / 4, 0);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::kernels::bench::{decode_recipes, prefill_recipes};
    use crate::launched::recipes::{Recipe, SIZES};
    use gemma4c_blocks::DType;
    use gemma4c_codegen::arch::Arch;
    use gemma4c_dsl::sim::{self, Memory};
    use gemma4c_models::synth::{Preset, Types};

    fn prepared(plan: &Plan, phase: &Phase) -> Vec<Timed> {
        steps(plan, phase, |_| true).map(|timed| timed.expect("a step that can be timed")).collect()
    }

    /// Every kind of launch of a decode plan is timed once, as it is in the plan, and nothing else is.
    #[test]
    fn what_is_timed_is_what_decode_plans_launch() {
        let recipes = decode_recipes(Arch::Sm90a);
        let sizes: Vec<Preset> = recipes.iter().map(|recipe| recipe.preset).collect();
        assert!(SIZES.iter().all(|size| sizes.iter().filter(|known| *known == size).count() == 2), "{sizes:?}");
        for recipe in recipes.into_iter().filter(|recipe| [Preset::E4b, Preset::Moe26bA4b].contains(&recipe.preset)) {
            let plan = Plan::lower(recipe).expect("a plan");
            let program = &plan.lowered.program;
            let decode = &program.phases[0];
            let kinds: HashSet<String> = decode.steps.iter().map(kind).collect();
            let all = prepared(&plan, decode);
            assert_eq!(all.len(), kinds.len(), "{}", plan.recipe.name());
            for timed in &all {
                let is_it = |step: &&CudaStep| {
                    let sizes = step.launch.arguments.iter().zip(&timed.arguments).all(|pair| match pair {
                        (Argument::Memory(range), Given::Buffer { bytes, .. }) => range.bytes == *bytes as u64,
                        (Argument::U32(value), Given::Scalar(Scalar::U32(given))) => value == given,
                        (Argument::F32(value), Given::Scalar(Scalar::F32(given))) => value == given,
                        _ => false,
                    });
                    let kernel = &program.kernels[step.launch.kernel as usize];
                    sizes && step.launch.grid == timed.grid && kernel.instance == timed.instance.to_string()
                };
                assert!(decode.steps.iter().any(|step| is_it(&step)), "{}: no step is that", timed.shape);
                assert!(timed.bytes > 0, "{}", timed.shape);
            }
            // A product's weights are read whole and lie in memory; of the experts each copy reads others.
            let rotated = |timed: &Timed| {
                let bytes = timed.arguments.iter().map(|given| match given {
                    Given::Buffer { bytes, is_rotated: true, .. } => *bytes as u64,
                    _ => 0,
                });
                bytes.sum::<u64>()
            };
            for timed in all.iter().filter(|timed| timed.instance.def.name == "matvec") {
                assert!(rotated(timed) * 10 >= timed.bytes * 9, "{}", timed.shape);
            }
            for timed in all.iter().filter(|timed| timed.instance.def.name == "expert_geglu") {
                assert_eq!(rotated(timed), 8 * 4, "{}: the ids of eight experts", timed.shape);
            }
        }
        let (usual, with_copies): (Vec<_>, Vec<_>) =
            prefill_recipes(Arch::Sm90a).into_iter().partition(|recipe| recipe.options.enabled.is_empty());
        assert_eq!((usual.len(), with_copies.len()), (5, 5));
        assert_eq!(prefill_recipes(Arch::Sm89).len(), 5);
    }

    /// What is prepared can be launched: in the simulator, which checks every access.
    #[test]
    fn prepared_launches_stay_in_their_memory() {
        let mut launched = HashSet::new();
        for (preset, dtype) in [(Preset::TinyE, DType::Q8_0), (Preset::TinyMoe, DType::Q4_0)] {
            let mut recipe = Recipe::new(preset, Types::All(dtype), Arch::Sm90a);
            (recipe.options.context, recipe.options.chunk) = (Some(256), Some(32));
            let plan = Plan::lower(recipe).expect("a plan");
            for phase in &plan.lowered.program.phases {
                for timed in prepared(&plan, phase) {
                    let mut memory = Memory::new();
                    let arguments: Vec<sim::Arg> =
                        timed.arguments.iter().map(|given| argument(given, &mut memory)).collect();
                    let options = sim::Options { unchecked: true, ..sim::Options::default() };
                    sim::launch(&timed.instance, timed.grid, &mut memory, &arguments, &options)
                        .unwrap_or_else(|error| panic!("{}: {error}", timed.shape));
                    launched.insert(timed.instance.def.name);
                }
            }
        }
        for kernel in ["matvec", "attention_step", "per_layer_step", "expert_geglu", "expert_down", "product_team"] {
            assert!(launched.contains(kernel), "{kernel} is not among {launched:?}");
        }
    }

    fn argument(given: &Given, memory: &mut Memory) -> sim::Arg {
        match given {
            Given::Scalar(scalar) => (*scalar).into(),
            Given::Buffer { bytes, content, .. } => {
                let buffer = memory.allocate(*bytes);
                memory.bytes_mut(buffer).copy_from_slice(&content.bytes(*bytes, 1));
                sim::Arg::Memory(memory.view(buffer))
            }
        }
    }

    #[test]
    fn contents_are_as_long_as_asked_and_finite_in_every_form() {
        for (content, len) in
            [(Content::Halves, 6), (Content::Floats, 12), (Content::Zeros, 3), (Content::Halves, REPEATED + 10)]
        {
            assert_eq!(content.bytes(len, 0).len(), len, "{content:?}");
        }
        for pair in Content::Halves.bytes(4096, 3).chunks_exact(2) {
            let bits = u16::from_le_bytes([pair[0], pair[1]]);
            let (half, brain) = (half::f16::from_bits(bits).to_f32(), half::bf16::from_bits(bits).to_f32());
            assert!(half.abs() < 1.0 && brain.abs() < 1.0, "{half} {brain}");
        }
        let ids = |copy| {
            let bytes = Content::Experts { of: 128 }.bytes(32, copy);
            bytes.chunks_exact(4).map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect::<HashSet<u32>>()
        };
        assert!(ids(0).len() == 8 && ids(0).iter().all(|id| *id < 128), "{:?}", ids(0));
        assert_ne!(ids(0), ids(1));
    }
}
