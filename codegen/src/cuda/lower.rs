//! Lowers a model: the fixed places first, then the phases of the text, of its towers and of its drafter, within the
//! budget of memory.

use std::collections::{BTreeSet, HashSet};

use gemma4c_dsl::Instance;
use gemma4c_graph::passes::{self, Goal};
use gemma4c_graph::{Graph, Node, Op, WeightId};
use gemma4c_plan::cuda::{
    CudaProgram, CudaTower, DrafterPlaces, KvLayout, KvType, Memory, Phase, PhaseKind, Places, RECORD_WORDS,
    SEGMENT_ROWS, SEGMENT_WORDS, SoftPlaces, TowerPlaces,
};

use super::bounds;
use super::common::{ALIGNMENT, COUNTERS, Common, HISTORY, SUPPRESSED, index_of_values};
use super::drafter;
use super::error::LowerError;
use super::launch::Kernels;
use super::memory;
use super::model::{Model, Options, ReadFloats};
use super::phase::{PhaseBuilder, phase_name};
use super::reports::{Reports, pass_report};
use super::soft;
use super::towers;
use super::weights::Weights;
use crate::kernels::matvec::adapter::words_of;
use crate::kernels::matvec::formats::{format, has_kernels};
use crate::kernels::sample::MOST_KEPT;
use crate::passes::{self as target_passes, Abilities, PhaseRows};

/// A program, and the kernels it launches, in the program's order.
pub struct Lowered {
    pub program: CudaProgram,
    pub instances: Vec<Instance>,
}

/// The compute capability from which on GPUs convert e4m3.
const FIRST_WITH_FP8: u32 = 89;
/// Rows of the prefill phases: each serves chunks up to its size.
const LADDER: [u32; 4] = [32, 128, 512, 2048];

/// Lowers a model.
pub fn lower(model: Model<'_>, options: &Options, read: &ReadFloats<'_>) -> Result<Lowered, LowerError> {
    check_passes(&options.disabled)?;
    check_kv(model.graph, options)?;
    for weight in &model.graph.weights {
        let why = match weight.dtype {
            dtype if !has_kernels(dtype) => format!("a GPU has no kernels for {dtype} yet"),
            // Copies of 16 bytes start with every other unit.
            dtype if format(dtype).side.thin && !weight.dim(0).is_multiple_of(64) => {
                format!("a GPU has no kernels for rows of {dtype} that are no multiple of 64 values")
            }
            _ => continue,
        };
        return Err(LowerError::Unreadable { tensor: weight.name.clone(), why });
    }
    let kept = match model.drafter {
        Some(_) => Some(drafter::with_lm_head_input(model.graph)?),
        None => None,
    };
    let graph = kept.as_ref().unwrap_or(model.graph);
    let model = Model { graph, ..model };
    // Tables that are only gathered from are read a row a token: they can stay in the host's memory.
    let tables = tables_without_products(graph);
    let budget = options.vram.unwrap_or(u64::MAX);
    let mut tried = Vec::new();
    let has_copies = !options.disabled.iter().any(|name| name == target_passes::copies::PASS.name);
    let with_copies = [(Copies::All, &[][..]), (Copies::NoExperts, &[][..])];
    let without = [(Copies::Passing, &[][..]), (Copies::None, &[][..]), (Copies::None, &tables[..])];
    for (copies, on_host) in with_copies.into_iter().filter(|_| has_copies).chain(without) {
        let lowered = lower_with(model, options, read, Extras { copies, on_host })?;
        if lowered.program.memory.device().is_some_and(|needed| needed <= budget) {
            return Ok(lowered);
        }
        tried.push((copies, lowered));
    }
    with_fewer_pages(tried, options, budget)
}

/// Positions of every sequence that come before copies of weights.
const SHORT: u32 = 1024;

/// The first of these programs that fits into the budget with fewer pages than are of use: as many as there is room
/// for. Short texts of all sequences come before copies of weights, and one whole sequence is the least.
fn with_fewer_pages(tried: Vec<(Copies, Lowered)>, options: &Options, budget: u64) -> Result<Lowered, LowerError> {
    let mut least = (u64::MAX, String::new());
    for one_is_enough in [false, true] {
        for (copies, lowered) in &tried {
            let (layout, memory) = (&lowered.program.kv_layout, &lowered.program.memory);
            let whole = layout.pages_for(options.context);
            let short = layout.slots.saturating_mul(layout.pages_for(options.context.min(SHORT)));
            if one_is_enough && *copies != Copies::None {
                continue;
            }
            let pages = if one_is_enough { whole } else { short.max(whole) };
            let fixed = memory.device().map_or(u64::MAX, |bytes| bytes - memory.kv);
            let needed = fixed.saturating_add(u64::from(pages).saturating_mul(layout.page_bytes));
            if needed < least.0 {
                least = (needed, lowered.program.advice(options.context, budget));
            }
            if needed <= budget {
                let fitting = u32::try_from((budget - fixed) / layout.page_bytes.max(1)).unwrap_or(u32::MAX);
                let mut lowered = Lowered { program: lowered.program.clone(), instances: lowered.instances.clone() };
                lowered.program.set_pages(fitting.min(layout.pages));
                return Ok(lowered);
            }
        }
    }
    let (needed, advice) = least;
    Err(LowerError::Budget { needed, budget, advice })
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
fn tables_without_products(graph: &Graph) -> Vec<WeightId> {
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
    let decode_ladder = memory::decode_ladder(options.sequences.max(1), options.verified);
    let decode_rows = decode_ladder.iter().copied().max().unwrap_or(1) as u64;
    let vocabulary = graph.output.map_or(0, |id| graph.node(id).ty.width);
    let mut can = abilities(options, extras.copies);
    if !options.disabled.iter().any(|name| name == target_passes::gemm::PASS.name) {
        can.bounded = bounds::of(graph, read)?;
    }
    let kv_layout = memory::kv_layout(graph, &can, options);
    let fixed = FixedPlaces::reserve(model, options, &kv_layout, decode_rows);
    let mut common = Common {
        weights: Weights::new(model.weights, extras.on_host.to_vec(), &banks(graph)),
        kernels: Kernels::default(),
        places: fixed.text,
        decode_rows: decode_rows as u32,
        counters: (fixed.counters, COUNTERS * 4 * decode_rows),
        packets: fixed.packets,
        can,
        kv_layout,
        value_index: index_of_values(meaning),
        tower: None,
        read,
        drafter: fixed.drafter,
        drafting: None,
    };
    let mut reports = Reports::default();
    // The picks' scratch follows the fixed places; the phases' values follow it.
    let scratch = fixed.end;
    let base = scratch + memory::pick_scratch(vocabulary, decode_rows);
    let phases = text_phases(&mut common, model, options, &decode_ladder, [scratch, base], &mut reports)?;
    // Towers and the drafter have values of their own.
    common.can.bounded.clear();
    let mut towers = Vec::new();
    for (tower, places) in soft.towers.iter().zip(fixed.towers) {
        let phases = towers::phases(&mut common, tower, places, &options.disabled, base, &mut reports)?;
        towers.push(CudaTower { places, phases });
    }
    let drafter = match model.drafter {
        Some(drafter) => Some(drafter.lower(&mut common, graph, options, [scratch, base])?),
        None => None,
    };
    let of_towers = towers.iter().flat_map(|tower| &tower.phases);
    let all = phases.iter().chain(of_towers).chain(drafter.as_ref().map(|drafter| &drafter.phase));
    let arena = all.map(|phase: &Phase| phase.arena_bytes).max().unwrap_or(base);
    let kv = common.kv_layout.bytes();
    let Weights { device_bytes: weights, host_bytes: host, seat_bytes: seats, .. } = common.weights;
    let memory = Memory { weights, kv, arena, host, seats };
    let program = CudaProgram {
        gpu: options.target.described(),
        toolchain: String::new(),
        kv: options.kv,
        memory,
        kv_layout: common.kv_layout,
        places: fixed.text,
        kernels: common.kernels.described(),
        loads: common.weights.loads(),
        constants: common.weights.constants.clone(),
        prepare: common.weights.prepare.clone(),
        phases,
        towers,
        most_candidates: MOST_KEPT,
        verified_rows: options.verified.max(1),
        drafter,
        passes: reports.all().map(pass_report).collect(),
    };
    Ok(Lowered { program, instances: common.kernels.instances })
}

/// What host and device exchange, at the start of the arena.
struct FixedPlaces {
    text: Places,
    towers: Vec<TowerPlaces>,
    drafter: Option<DrafterPlaces>,
    /// Words that are zero between launches.
    counters: u64,
    /// Words that blocks of a launch send each other, zero between launches, and the first byte behind them.
    packets: (u64, u64),
    /// The first byte after them.
    end: u64,
}

impl FixedPlaces {
    fn reserve(model: Model<'_>, options: &Options, layout: &KvLayout, decode_rows: u64) -> FixedPlaces {
        let Model { graph, soft, .. } = model;
        let chunk_rows = chunk_of(options).max(2);
        let vocabulary = graph.output.map_or(0, |id| graph.node(id).ty.width);
        let mut end = 0u64;
        let mut reserve = |words: u64| {
            let offset = end;
            end = (end + words * 4).next_multiple_of(ALIGNMENT);
            offset
        };
        let text = Places {
            tokens: reserve(chunk_rows as u64),
            rows: reserve(decode_rows * RECORD_WORDS as u64),
            chunk: reserve(RECORD_WORDS as u64),
            segments: reserve(chunk_rows.div_ceil(SEGMENT_ROWS) as u64 * SEGMENT_WORDS as u64),
            asked: reserve(RECORD_WORDS as u64),
            pages: reserve(u64::from(layout.slots) * u64::from(layout.full.entries)),
            windows: reserve(u64::from(layout.slots) * u64::from(layout.sliding.entries)),
            suppress: reserve(SUPPRESSED as u64),
            suppress_len: SUPPRESSED,
            history: reserve(HISTORY as u64 * decode_rows),
            history_len: HISTORY,
            logits: reserve(vocabulary as u64 * decode_rows),
            masks: reserve(Places::mask_words(vocabulary) as u64 * decode_rows),
            soft: None,
            seats: None,
        };
        let hidden = graph.nodes.iter().find(|node| node.op == Op::PlaceSoft).map_or(0, |node| node.ty.width);
        let text = Places {
            soft: (!soft.towers.is_empty()).then(|| SoftPlaces {
                rows: reserve(chunk_rows as u64 * hidden as u64),
                ahead: reserve(chunk_rows as u64),
                pad: soft.pad,
            }),
            seats: (!banks(graph).is_empty()).then(|| reserve(Places::seat_words(layout.slots, decode_rows as u32))),
            ..text
        };
        let towers = soft.towers.iter().map(|tower| towers::places(tower, &mut reserve)).collect();
        let drafter = model.drafter.map(|drafter| drafter.places(&text, vocabulary, decode_rows, &mut reserve));
        let counters = reserve(COUNTERS * decode_rows);
        // Products of one row are in the first phase of decode and in each of prefill.
        let narrow = |node: &Node| match node.op {
            Op::Narrow { weight, .. } => node.ty.width as u64 * words_of(graph.weight(weight).dim(0) as u32) as u64,
            _ => 0,
        };
        let words = graph.nodes.iter().map(narrow).sum::<u64>() * (LADDER.len() as u64 + 2);
        let packets = reserve(words);
        FixedPlaces { text, towers, drafter, counters, packets: (packets, packets + words * 4), end }
    }
}

/// The weights that are reserved for adapters, in the table's order: seat after seat of halves of pairs.
fn banks(graph: &Graph) -> Vec<WeightId> {
    let halves = graph.nodes.iter().filter_map(|node| match node.op {
        Op::Narrow { weight, .. } | Op::Widen { weight } => Some(weight),
        _ => None,
    });
    let banks: BTreeSet<WeightId> = halves.filter(|weight| graph.weight(*weight).dims.len() == 3).collect();
    banks.into_iter().collect()
}

/// Most rows of a pass over a prompt.
fn chunk_of(options: &Options) -> u32 {
    options.chunk.min(options.context)
}

/// What the target's kernels may do, with the copies of weights that the budget allows.
fn abilities(options: &Options, allowed: Copies) -> Abilities {
    let off = |name: &str| options.disabled.iter().any(|disabled| disabled == name);
    let copies = |of: &[Copies]| match options.target.arch.has_wgmma() {
        false => Err("the GPU has no warpgroup products"),
        true if !of.contains(&allowed) => Err("the budget of memory has no room for it"),
        true => Ok(()),
    };
    Abilities {
        exact: off("int8"),
        verifies: options.verified > 1,
        per_layer_step: !off("per-layer-step"),
        kv: options.kv,
        context: options.context,
        chunk: chunk_of(options),
        cluster: if off("clusters") { 1 } else { options.target.arch.most_peers() },
        target: options.target.clone(),
        bounded: HashSet::new(),
        copies: copies(&[Copies::All, Copies::NoExperts]),
        copies_of_experts: copies(&[Copies::All]),
        dequantises: copies(&[Copies::All, Copies::NoExperts, Copies::Passing]),
    }
}

/// The phases of the text: decode by rows, then prefill by rows. Picks work at `scratch`, values begin at `base`.
fn text_phases(
    common: &mut Common<'_>,
    model: Model<'_>,
    options: &Options,
    decode_ladder: &[u32],
    [scratch, base]: [u64; 2],
    reports: &mut Reports,
) -> Result<Vec<Phase>, LowerError> {
    let chunk = chunk_of(options);
    let mut prefill_ladder: Vec<u32> = LADDER.into_iter().filter(|rows| *rows < chunk).collect();
    prefill_ladder.push(chunk.max(2));
    let vocabulary = model.graph.output.map_or(0, |id| model.graph.node(id).ty.width);
    let history_rows = decode_ladder.iter().copied().max().unwrap_or(1);
    let mut phases = Vec::new();
    // All phases of a goal are lowered from the same groups.
    for (goal, ladder) in [(Goal::Decode, decode_ladder), (Goal::Prefill, &prefill_ladder)] {
        let graph = if model.soft.towers.is_empty() { model.graph } else { &soft::text(model.graph, goal)? };
        let (fused, report) = passes::fuse(graph, goal, &options.disabled);
        reports.add_graph(report);
        for &rows in ladder {
            let of = if goal == Goal::Decode { PhaseRows::Decode(rows) } else { PhaseRows::Prefill(rows) };
            let (schedule, report) = target_passes::schedule(fused.clone(), of, &common.can, &options.disabled);
            reports.add_target(report);
            let mut builder = PhaseBuilder::new(common, &schedule);
            let asked_from = builder.lower()?;
            let mut phase = builder.finish(phase_name(goal == Goal::Decode, rows), asked_from, base)?;
            let (records, picked) = match phase.kind {
                PhaseKind::Decode => (common.places.rows, rows),
                PhaseKind::Prefill | PhaseKind::Tower => (common.places.asked, 1),
            };
            let of = memory::Picked { vocabulary, records, rows: picked, history_rows };
            phase.pick_largest = memory::picks(common, of, 1, scratch)?;
            phase.pick_sampled = memory::picks(common, of, MOST_KEPT, scratch)?;
            phases.push(phase);
        }
    }
    Ok(phases)
}
