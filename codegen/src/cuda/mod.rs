//! Lowers a graph to a GPU's program: fused, phase by phase, with a kernel for every group and a place for every byte.
//!
//! ```text
//! Graph ──► passes ──► schedule of a phase (decode; prefill by rows) ──► launches ──► places ──► CudaProgram + instances
//! ```
//!
//! - [`crate::passes`] decides what a launch is, and the form of every value;
//! - `phase` walks the groups, one launch each, and places the values;
//! - `products`, `norms`, `attention`, `experts`, `grouped`, `singles` know which kernel a group gets and what it is given;
//! - `weights` places weights in the layouts those kernels read, `launch` puts the arguments of a launch in order;
//! - `build` compiles the instances.
//!
//! The choice of a kernel is a function of the group, the rows, the types, the options, and rules whose constants were measured
//! ([`crate::measured`]). `choice` puts it into words: a reason and a runner-up for every step. Nothing here needs a GPU.

mod attention;
pub mod build;
#[doc(hidden)]
pub mod choice;
mod clipped;
mod drafter;
mod edges;
mod experts;
mod gathered;
mod grouped;
pub mod image;
#[doc(hidden)]
pub mod launch;
mod memory;
mod norms;
mod per_layer;
mod phase;
mod products;
mod rows;
mod runs;
pub mod simulate;
mod singles;
mod soft;
mod towers;
mod weights;

use std::collections::{HashMap, HashSet};

use gemma4c_blocks::DType;
use gemma4c_dsl::{ArgumentError, Instance, InstanceError};
use gemma4c_graph::passes::{self, Goal, Report};
use gemma4c_graph::{Graph, Op, Weight, WeightId};
use gemma4c_plan::cuda::{
    CudaProgram, CudaTower, DrafterPlaces, KvLayout, KvType, Memory, PassReport, Phase, PhaseKind, Places,
    RECORD_WORDS, Range, Refusal, Region, SEGMENT_ROWS, SEGMENT_WORDS, SoftPlaces, TowerPlaces,
};
use gemma4c_plan::{Program, ValueIndex};

pub use drafter::Drafter;

use crate::kernels::moe::gathered::GatheredError;
use crate::kernels::rows::RowsError;
use crate::kernels::sample::MOST_KEPT;
use crate::passes::{self as target_passes, Abilities, PhaseRows};
use crate::target::Target;
use launch::{Kernels, Span};
use memory::Room;
use phase::PhaseBuilder;
use weights::Weights;

/// What the caller decides.
#[derive(Clone, Debug)]
pub struct Options {
    pub context: u32,
    /// Most prompt tokens of one pass.
    pub chunk: u32,
    pub kv: KvType,
    /// Sequences at once.
    pub sequences: u32,
    /// Rows of one sequence that are decoded at once, to verify drafts: 1 for none.
    pub verified: u32,
    /// Rings beyond those of the sequences, for snapshots; `None`: as many as are of use.
    pub snapshots: Option<u32>,
    /// The GPU that launches are shaped for.
    pub target: Target,
    /// Bytes of device memory a plan may take; `None`: as many as it needs.
    pub vram: Option<u64>,
    /// Passes that do not run: of [`target_passes::optional`].
    pub disabled: Vec<String>,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    #[error("no kernel for {tensor} ({dtype}, {shape}) in {phase}: {why}")]
    NoKernel { tensor: String, dtype: DType, shape: String, phase: String, why: String },
    #[error("{tensor} is {dtype}; a GPU plan needs it in f32")]
    NotFloats { tensor: String, dtype: DType },
    #[error("unknown pass `{name}`; there are {known}")]
    UnknownPass { name: String, known: String },
    #[error("pass `{name}` cannot be switched off: there is no program without it")]
    RequiredPass { name: String },
    #[error(
        "the plan needs {needed} bytes of device memory, the budget is {budget}: a smaller --ctx, --chunk, --sequences or model fits"
    )]
    Budget { needed: u64, budget: u64 },
    #[error("keys and values in {kv} on {target}: {why}")]
    Kv { kv: &'static str, target: String, why: String },
    #[error("pages of {bytes} bytes of keys and values: a kernel counts up to 2^32 values")]
    Page { bytes: u64 },
    #[error("{node} is {op}, which no kernel computes: it runs on the CPU alone")]
    OnCpuAlone { node: String, op: &'static str },
    #[error("the drafter cannot run on a GPU: {why}")]
    Drafter { why: String },
    #[error("cannot read {tensor}: {why}")]
    Unreadable { tensor: String, why: String },
    // What follows are faults of the compiler, not of its input.
    #[error("internal: {0}")]
    Argument(#[from] ArgumentError),
    #[error("internal: kernel {kernel}: a scalar is neither u32 nor f32, and a plan has no others")]
    Scalar { kernel: String },
    #[error("internal: kernel {kernel} is launched outside the phases, and so has no buffers")]
    Buffer { kernel: String },
    #[error("internal: a {kind} of {node} is {launches} launches, not one")]
    Launches { kind: &'static str, node: String, launches: usize },
    #[error("internal: nothing has made {node}")]
    NoValue { node: String },
    #[error("internal: phase {phase} puts buffers {a} and {b} in the same place")]
    Overlap { phase: String, a: usize, b: usize },
    #[error("internal: phase {phase} cuts memory into too many pieces")]
    Pieces { phase: String },
    #[error("internal: {0}")]
    Instance(#[from] InstanceError),
    #[error("internal: {0}")]
    Rows(#[from] RowsError),
    #[error("internal: {0}")]
    Gathered(#[from] GatheredError),
}

/// What is lowered.
#[derive(Clone, Copy)]
pub struct Model<'a> {
    /// The text's graph.
    pub graph: &'a Graph,
    /// Its program for a CPU, whose values the steps refer to.
    pub meaning: &'a Program,
    /// The weights of the plan: the text's, the towers', the drafter's.
    pub weights: &'a [Weight],
    /// The towers, whose soft tokens take the places of embeddings.
    pub soft: SoftTokens<'a>,
    pub drafter: Option<Drafter<'a>>,
}

/// Reads a small tensor of floats from the model file.
pub type ReadFloats<'a> = dyn Fn(WeightId) -> Result<Vec<f32>, LowerError> + 'a;

/// A program, and the kernels it launches, in the program's order.
pub struct Lowered {
    pub program: CudaProgram,
    pub instances: Vec<Instance>,
}

/// What all phases share.
pub struct Common<'a> {
    weights: Weights<'a>,
    kernels: Kernels,
    places: Places,
    /// Words that are zero between launches: their place, and their bytes.
    counters: (u64, u64),
    /// Words that runs of products exchange values through, and count by: zero before the first launch, and nobody else's. Their place, and their bytes.
    exchange: (u64, u64),
    /// Runs so far.
    runs: u32,
    /// What the kernels can do, and are asked for.
    can: Abilities,
    /// Where keys and values lie.
    kv_layout: KvLayout,
    value_index: HashMap<String, ValueIndex>,
    /// Of the tower that is being lowered.
    tower: Option<TowerPlaces>,
    read: &'a ReadFloats<'a>,
    /// What host and drafter exchange, if there is one.
    drafter: Option<DrafterPlaces>,
    /// Of the drafter, while it is lowered.
    drafting: Option<drafter::Drafting>,
}

/// Words of [`Common::counters`] for each decoded row.
const COUNTERS: u64 = 1024;
/// The compute capability from which on GPUs convert e4m3.
const FIRST_WITH_FP8: u32 = 89;
/// Tokens that the device remembers for the host.
const HISTORY: u32 = 1024;
/// Tokens that the device can be told never to pick: those of other media, and a few that a model's authors may add.
const SUPPRESSED: u32 = 16;
// A pick's block holds them, a thread each, and has 64 threads at least.
const _: () = assert!(SUPPRESSED <= 64);
/// Every fixed place starts at a multiple of this.
const ALIGNMENT: u64 = 256;
/// Rows of the prefill phases: each serves chunks up to its size.
const LADDER: [u32; 4] = [32, 128, 512, 2048];

impl Common<'_> {
    fn counters(&self) -> Span {
        let (offset, bytes) = self.counters;
        Span::Fixed(Range { region: Region::Arena, offset, bytes })
    }
}

impl PhaseBuilder<'_, '_> {
    fn phase_name(&self) -> String {
        match self.schedule.soft_rows {
            Some(soft) => format!("a tower of {soft} soft tokens"),
            None => name_of(self.schedule.decodes, self.rows()),
        }
    }
}

fn name_of(decodes: bool, rows: u32) -> String {
    match (decodes, rows) {
        (true, 1) => "decode".to_owned(),
        (true, rows) => format!("decode {rows}"),
        (false, rows) => format!("prefill {rows}"),
    }
}

/// A tower beside the text.
#[derive(Clone, Copy)]
pub struct TowerGraph<'a> {
    /// Its weights are those of the plan.
    pub graph: &'a Graph,
    /// Its program for a CPU, whose values the steps refer to.
    pub meaning: &'a Program,
    /// Numbers of a patch.
    pub patch_width: u32,
    pub medium: TowerMedium,
}

/// What a tower reads, as far as its phases depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TowerMedium {
    /// Patches along the square of a soft token.
    Picture { pool: u32 },
    /// Frames of a soft token.
    Sound { frames: u32 },
}

/// What soft tokens need of a text's phases.
#[derive(Clone, Copy)]
pub struct SoftTokens<'a> {
    pub towers: &'a [TowerGraph<'a>],
    /// The token that stands where a soft token is.
    pub pad: u32,
}

impl SoftTokens<'_> {
    /// Of a model that reads text alone.
    pub const NONE: SoftTokens<'static> = SoftTokens { towers: &[], pad: 0 };
}

/// Lowers a model.
pub fn lower(model: Model<'_>, options: &Options, read: &ReadFloats<'_>) -> Result<Lowered, LowerError> {
    check_passes(&options.disabled)?;
    check_kv(model.graph, options)?;
    let kept = match model.drafter {
        Some(_) => Some(drafter::keeping_what_enters(model.graph)?),
        None => None,
    };
    let graph = kept.as_ref().unwrap_or(model.graph);
    let model = Model { graph, ..model };
    // Tables that are only gathered from are read a row a token: they can stay in the host's memory.
    let tables = gathered_alone(graph);
    let budget = options.vram.unwrap_or(u64::MAX);
    let room = Room::of(options);
    let mut needed = 0;
    let has_copies = !options.disabled.iter().any(|name| name == target_passes::copies::PASS.name);
    let with_copies = [(Copies::All, &[][..]), (Copies::NoExperts, &[][..])];
    let without = [(Copies::Passing, &[][..]), (Copies::None, &[][..]), (Copies::None, &tables[..])];
    for (copies, on_host) in with_copies.into_iter().filter(|_| has_copies).chain(without) {
        let lowered = lower_with(model, options, read, Extras { copies, on_host, room })?;
        needed = lowered.program.memory.device().unwrap_or(u64::MAX);
        if needed <= budget {
            return Ok(lowered);
        }
        // Sequences come before copies of weights; then there are fewer blocks, down to those of one sequence.
        if copies == Copies::None {
            let block = lowered.program.kv_layout.block_bytes;
            let spare = if block == 0 { 0 } else { room.blocks - memory::pages_of(options.context) };
            let over = (needed - budget).div_ceil(block.max(1));
            if over <= spare as u64 {
                let room = Room { blocks: room.blocks - over as u32, ..room };
                return lower_with(model, options, read, Extras { copies, on_host, room });
            }
            needed -= spare as u64 * block;
        }
    }
    Err(LowerError::Budget { needed, budget })
}

/// Second copies of weights, for speed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copies {
    All,
    /// Of those that every row is multiplied by.
    NoExperts,
    /// Of one product after another, for as long as it runs.
    Passing,
    None,
}

/// What a budget decides.
#[derive(Clone, Copy)]
struct Extras<'a> {
    copies: Copies,
    /// Tables in the host's memory.
    on_host: &'a [WeightId],
    room: Room,
}

fn check_passes(disabled: &[String]) -> Result<(), LowerError> {
    let known: Vec<&str> = target_passes::optional().collect();
    for name in disabled {
        if target_passes::PASSES.iter().any(|pass| pass.required && pass.name == name) {
            return Err(LowerError::RequiredPass { name: name.clone() });
        }
        if !known.contains(&name.as_str()) {
            return Err(LowerError::UnknownPass { name: name.clone(), known: known.join(", ") });
        }
    }
    Ok(())
}

/// Whether there are kernels for the keys and values.
fn check_kv(graph: &Graph, options: &Options) -> Result<(), LowerError> {
    let refused = |why: String| Err(LowerError::Kv { kv: options.kv.name(), target: options.target.to_string(), why });
    let (major, minor) = options.target.arch.compute_capability();
    if options.kv == KvType::Fp8 && major * 10 + minor < FIRST_WITH_FP8 {
        return refused("it cannot convert them, GPUs from sm_89 on can; q8_0 is nearly as small".into());
    }
    let odd = graph.caches.iter().find(|cache| options.kv.is_narrow() && !cache.head_dim.is_multiple_of(64));
    match odd {
        Some(cache) => refused(format!("heads of {} values are not whole groups of 64", cache.head_dim)),
        None => Ok(()),
    }
}

/// Tables that no product reads.
fn gathered_alone(graph: &Graph) -> Vec<WeightId> {
    let gathered = graph.nodes.iter().filter_map(|node| match node.op {
        Op::Gather { table } => Some(table),
        _ => None,
    });
    let multiplied = |table: &WeightId| graph.nodes.iter().any(|n| n.op == Op::MatMul { weight: *table });
    gathered.filter(|table| !multiplied(table)).collect()
}

fn lower_with(
    model: Model<'_>,
    options: &Options,
    read: &ReadFloats<'_>,
    extras: Extras<'_>,
) -> Result<Lowered, LowerError> {
    let Model { graph, meaning, soft, .. } = model;
    let off = |name: &str| options.disabled.iter().any(|disabled| disabled == name);
    let chunk = options.chunk.min(options.context);
    let mut ladder: Vec<u32> = LADDER.into_iter().filter(|rows| *rows < chunk).collect();
    ladder.push(chunk.max(2));
    let vocabulary = graph.output.map_or(0, |id| graph.node(id).ty.width);
    let decode_ladder = memory::decode_ladder(extras.room.slots, options.verified);
    let decode_rows = decode_ladder.iter().copied().max().unwrap_or(1) as u64;
    let max_pages = memory::pages_of(options.context);

    let mut next = 0u64;
    let mut reserve = |words: u64| {
        let offset = next;
        next = (next + words * 4).next_multiple_of(ALIGNMENT);
        offset
    };
    let places = Places {
        tokens: reserve(chunk.max(2) as u64),
        rows: reserve(decode_rows * RECORD_WORDS as u64),
        chunk: reserve(RECORD_WORDS as u64),
        segments: reserve(chunk.max(2).div_ceil(SEGMENT_ROWS) as u64 * SEGMENT_WORDS as u64),
        asked: reserve(RECORD_WORDS as u64),
        pages: reserve(extras.room.rings as u64 * max_pages as u64),
        max_pages,
        suppress: reserve(SUPPRESSED as u64),
        suppress_len: SUPPRESSED,
        history: reserve(HISTORY as u64 * decode_rows),
        history_len: HISTORY,
        logits: reserve(vocabulary as u64 * decode_rows),
        masks: reserve(Places::mask_words(vocabulary) as u64 * decode_rows),
        soft: None,
    };
    let has_towers = !soft.towers.is_empty();
    let hidden = graph.nodes.iter().find(|node| node.op == Op::PlaceSoft).map_or(0, |node| node.ty.width);
    let places = Places {
        soft: has_towers.then(|| SoftPlaces {
            rows: reserve(chunk.max(2) as u64 * hidden as u64),
            ahead: reserve(chunk.max(2) as u64),
            pad: soft.pad,
        }),
        ..places
    };
    let of_towers: Vec<TowerPlaces> = soft.towers.iter().map(|tower| towers::places(tower, &mut reserve)).collect();
    let drafter = model.drafter.map(|drafter| drafter.places(&places, vocabulary, decode_rows, &mut reserve));
    let counters = (reserve(COUNTERS * decode_rows), COUNTERS * 4 * decode_rows);
    let exchange_words = if off("persistent") || !options.target.arch.has_tma() { 0 } else { runs::most_words(graph) };
    let exchange = (reserve(exchange_words), exchange_words * 4);
    let value_index = index_of_values(meaning);
    let target = options.target.clone();
    let copies = |of: &[Copies]| match target.arch.has_wgmma() {
        false => Err("the GPU has no warpgroup products"),
        true if !of.contains(&extras.copies) => Err("the budget of memory has no room for it"),
        true => Ok(()),
    };
    let can = Abilities {
        exact: off("int8"),
        verifies: options.verified > 1,
        per_layer_step: !off("per-layer-step"),
        kv: options.kv,
        context: options.context,
        chunk,
        cluster: if off("clusters") { 1 } else { options.target.arch.most_peers() },
        target: options.target.clone(),
        copies: copies(&[Copies::All, Copies::NoExperts]),
        copies_of_experts: copies(&[Copies::All]),
        widens: copies(&[Copies::All, Copies::NoExperts, Copies::Passing]),
    };
    let kv_layout = memory::kv_layout(graph, &can, extras.room);
    let mut common = Common {
        weights: Weights::new(model.weights, extras.on_host.to_vec()),
        kernels: Kernels::default(),
        places,
        counters,
        exchange,
        runs: 0,
        can,
        kv_layout,
        value_index,
        tower: None,
        read,
        drafter,
        drafting: None,
    };
    let mut phases = Vec::new();
    let mut reports: Vec<Report> = Vec::new();
    let mut of_target: Vec<Report> = Vec::new();
    // The picks' scratch lies behind the fixed places, before the phases' values.
    let base = next + memory::pick_scratch(vocabulary, decode_rows);
    // All phases of a goal are lowered from the same groups.
    for (goal, of_rows) in [(Goal::Decode, &decode_ladder[..]), (Goal::Prefill, &ladder)] {
        let graph = if has_towers { &soft::text(graph, goal)? } else { graph };
        let (fused, report) = passes::fuse(graph, goal, &options.disabled);
        merge_reports(&mut reports, report);
        for &rows in of_rows {
            let of = if goal == Goal::Decode { PhaseRows::Decode(rows) } else { PhaseRows::Prefill(rows) };
            let (schedule, report) = target_passes::schedule(fused.clone(), of, &common.can, &options.disabled);
            merge_reports(&mut of_target, report);
            let mut builder = PhaseBuilder::new(&mut common, &schedule);
            let asked_from = builder.lower()?;
            let mut phase = builder.finish(name_of(goal == Goal::Decode, rows), asked_from, base)?;
            let (records, picked) = match phase.kind {
                PhaseKind::Decode => (places.rows, rows),
                PhaseKind::Prefill | PhaseKind::Tower => (places.asked, 1),
            };
            let of = memory::Picked { vocabulary, records, rows: picked, history_rows: decode_rows as u32 };
            phase.pick_largest = memory::picks(&mut common, of, 1, next)?;
            phase.pick_sampled = memory::picks(&mut common, of, MOST_KEPT, next)?;
            phases.push(phase);
        }
    }
    let mut towers = Vec::new();
    for (tower, places) in soft.towers.iter().zip(of_towers) {
        let phases = towers::phases(&mut common, tower, places, &options.disabled, base)?;
        towers.push(CudaTower { places, phases });
    }
    let drafter = match model.drafter {
        Some(drafter) => Some(drafter.lower(&mut common, graph, options, [next, base])?),
        None => None,
    };
    let of_towers = towers.iter().flat_map(|tower| &tower.phases);
    let all = phases.iter().chain(of_towers).chain(drafter.as_ref().map(|drafter| &drafter.phase));
    let arena = all.map(|phase: &Phase| phase.arena_bytes).max().unwrap_or(base);
    let kv = common.kv_layout.blocks_at + common.kv_layout.blocks_bytes();
    let memory = Memory { weights: common.weights.device_bytes, kv, arena, host: common.weights.host_bytes };
    let program = CudaProgram {
        gpu: options.target.described(),
        toolchain: String::new(),
        kv: options.kv,
        memory,
        kv_layout: common.kv_layout,
        places,
        kernels: common.kernels.described(),
        loads: common.weights.loads(),
        constants: common.weights.constants.clone(),
        prepare: common.weights.prepare.clone(),
        phases,
        towers,
        most_candidates: MOST_KEPT,
        verified_rows: options.verified.max(1),
        drafter,
        passes: reports.iter().chain(&of_target).map(pass_report).collect(),
    };
    Ok(Lowered { program, instances: common.kernels.instances })
}

/// The values of a program by their names.
fn index_of_values(meaning: &Program) -> HashMap<String, ValueIndex> {
    meaning.values.iter().zip(0..).map(|(value, index)| (value.name.clone(), index)).collect()
}

/// The reports of all phases as one. A node counts once: what one phase merged the others did not refuse, and what several refuse
/// is one refusal, also where a later one has cut the group in two.
fn merge_reports(all: &mut Vec<Report>, more: Vec<Report>) {
    if all.is_empty() {
        *all = more;
        return;
    }
    for (known, new) in all.iter_mut().zip(more) {
        let log = &mut known.log;
        log.applied = log.applied.max(new.log.applied);
        log.merged.extend(new.log.merged);
        for (node, reason) in new.log.refused {
            match log.refused.iter_mut().find(|(known, _)| *known == node) {
                Some((_, said)) if *said == reason => {}
                Some((_, said)) if said.contains(&reason) => {}
                Some((_, said)) => *said += &format!("; in prefill: {reason}"),
                None if log.covered.contains(&node) => {}
                None => log.refused.push((node, reason)),
            }
        }
        log.covered.extend(new.log.covered);
        let merged: HashSet<&String> = log.merged.iter().collect();
        let applied = log.applied > 0;
        log.refused.retain(|(node, _)| match node.as_str() {
            passes::WHOLE_GRAPH => !applied,
            _ => !merged.contains(node),
        });
    }
}

fn pass_report(report: &Report) -> PassReport {
    let refusal = |(node, reason): &(String, String)| Refusal { node: node.clone(), reason: reason.clone() };
    PassReport {
        name: report.name.to_owned(),
        about: report.about.to_owned(),
        enabled: report.enabled,
        applied: report.log.applied,
        refused: report.log.refused.iter().map(refusal).collect(),
    }
}
