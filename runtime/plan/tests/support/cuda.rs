//! The GPU's part of the plan made by hand: small, and with everything a program may have.

use gemma4c_plan::cuda::{
    Argument, Code, Constant, Cuda, CudaProgram, CudaStep, Form, Gpu, Image, Kernel, KvCache, KvLayout, KvType, Launch,
    Load, LoadArgument, LoadPart, Memory, PAGE_UNIT, Paging, PassReport, Phase, PhaseKind, Places, Range, Refusal,
    Region, StepOutput,
};
use gemma4c_plan::{Plan, Target, WeightId};

const MEMORY: Memory = Memory { weights: 1 << 16, kv: 16384, arena: 8192, host: 4096, seats: 0 };
/// Indices into the kernels.
const REPACK: u32 = 0;
const EMBED: u32 = 1;
const LAYER: u32 = 2;
const HEAD: u32 = 3;
const PICK: u32 = 4;

/// Adds a program of three phases: decode, and chunks of 2 and 8 rows.
pub fn with_cuda(plan: Plan) -> Plan {
    // With what they write to: a bit for each argument.
    let kernels = [("repack", 0b10), ("embed", 0b100), ("layer", 0b110), ("head", 0b100), ("pick", 0b110)];
    let names = kernels.map(|(name, _)| name);
    let kernel = |(name, written): &(&str, u64)| Kernel {
        name: (*name).into(),
        instance: format!("{name} THREADS=128"),
        block: 128,
        shared: if *name == "layer" { 65536 } else { 0 },
        written: *written,
        waits: *name != "repack",
        waits_first: false,
        early: 0,
    };
    let code = |name: &&str| Code { source: format!("void {name}() {{}}\n"), image: Image(name.as_bytes().to_vec()) };
    let vocab = plan.model.vocab_size as u64;
    let places = Places {
        tokens: 0,
        rows: 256,
        chunk: 320,
        segments: 64,
        asked: 384,
        pages: 448,
        windows: 452,
        suppress: 464,
        suppress_len: 4,
        history: 576,
        history_len: 16,
        logits: 512,
        masks: 640,
        soft: None,
        seats: None,
    };
    let kv_layout = KvLayout {
        slots: 1,
        pages: 2,
        page_bytes: 8192,
        sliding: Paging { rows: PAGE_UNIT, entries: 1 },
        full: Paging { rows: PAGE_UNIT, entries: 1 },
        caches: vec![KvCache { keys: 0, values: 4096, window: Some(8) }],
    };
    let logits = range(Region::Arena, places.logits, vocab * 4);
    let history = range(Region::Arena, places.history, 64);
    let suppress = range(Region::Arena, places.suppress, 16);
    let memory = |ranges: &[Range]| ranges.iter().copied().map(Argument::Memory).collect::<Vec<_>>();
    let launch =
        |kernel, arguments: Vec<Argument>, programmatic| Launch { kernel, grid: [2, 1, 1], arguments, programmatic };
    let pick = |record, extra: &[Range], count| {
        let arguments = [memory(&[logits, record, history]), memory(extra), vec![Argument::U32(count)]].concat();
        vec![launch(PICK, arguments, true)]
    };
    let phase = |name: &str, kind: PhaseKind, rows: u32| {
        let record = |offset| range(Region::Arena, offset, 64);
        let (state, picked) = match kind {
            PhaseKind::Decode => (record(places.rows), record(places.rows)),
            PhaseKind::Prefill | PhaseKind::Tower => (record(places.chunk), record(places.asked)),
        };
        let hidden = range(Region::Arena, 1024, rows as u64 * 128);
        let step = |launch, after: &[u32], nodes: &[u32], outputs, layer| CudaStep {
            launch,
            after: after.to_vec(),
            nodes: nodes.to_vec(),
            outputs,
            layer,
            bytes: 4096,
            flops: 1 << 20,
            reason: "the only one".into(),
            runner_up: String::new(),
        };
        let output = |value, form, place| vec![StepOutput { value, form, place }];
        Phase {
            name: name.into(),
            kind,
            rows,
            steps: vec![
                step(
                    launch(EMBED, memory(&[range(Region::Host, 0, 408), state, hidden]), false),
                    &[],
                    &[1, 2],
                    output(2, Form::F32, hidden),
                    None,
                ),
                step(
                    launch(
                        LAYER,
                        [
                            memory(&[range(Region::Weights, 0, 2304), range(Region::Kv, 0, 3072), hidden]),
                            vec![Argument::F32(1e-6)],
                        ]
                        .concat(),
                        true,
                    ),
                    &[0],
                    &[3, 4, 5, 6],
                    output(6, Form::Int8, hidden),
                    Some(0),
                ),
                step(
                    launch(HEAD, memory(&[range(Region::Weights, 4096, 408), hidden, logits]), true),
                    &[1],
                    &[26, 27],
                    output(27, Form::F32, logits),
                    None,
                ),
            ],
            asked_from: 2,
            pick_largest: pick(picked, &[], 1),
            pick_sampled: pick(picked, &[suppress], 8),
            arena_bytes: 4096,
        }
    };
    let program = CudaProgram {
        gpu: Gpu {
            key: "h200".into(),
            name: "H200".into(),
            architecture: "sm_90a".into(),
            multiprocessors: 132,
            shared_bytes_per_block: 227 << 10,
            l2_bytes: 50 << 20,
            measured: true,
        },
        toolchain: "nvrtc 13.0".into(),
        kv: KvType::BF16,
        memory: MEMORY,
        kv_layout,
        places,
        kernels: kernels.iter().map(kernel).collect(),
        loads: loads(&plan),
        constants: vec![Constant {
            name: "rope".into(),
            to: range(Region::Weights, 8192, 16),
            values: vec![1.0, 0.5, 0.25, 0.125],
        }],
        prepare: vec![launch(
            REPACK,
            memory(&[range(Region::Weights, 0, 2304), range(Region::Weights, 16384, 4096)]),
            false,
        )],
        phases: vec![
            phase("decode", PhaseKind::Decode, 1),
            phase("prefill 2", PhaseKind::Prefill, 2),
            phase("prefill 8", PhaseKind::Prefill, 8),
        ],
        towers: Vec::new(),
        most_candidates: 8,
        verified_rows: 1,
        drafter: None,
        passes: vec![PassReport {
            name: "fuse_layer".into(),
            about: "a layer as one launch".into(),
            enabled: true,
            applied: 3,
            refused: vec![Refusal { node: "value.23".into(), reason: "nobody reads it".into() }],
        }],
    };
    Plan { target: Target::Cuda, cuda: Some(Cuda { program, code: names.iter().map(code).collect() }), ..plan }
}

/// The embedding as it is on the host and on the device, the queries repacked.
fn loads(plan: &Plan) -> Vec<Load> {
    let rows_of = |weight: usize| plan.weights[weight].dims[1..].iter().product();
    let bytes = plan.weights[0].bytes;
    vec![
        Load {
            weight: WeightId(0),
            rows: rows_of(0),
            parts: vec![
                LoadPart::Copy { to: range(Region::Host, 0, bytes) },
                LoadPart::Copy { to: range(Region::Weights, 4096, bytes) },
            ],
        },
        Load {
            weight: WeightId(2),
            rows: rows_of(2),
            parts: vec![LoadPart::Kernel {
                kernel: REPACK,
                order: [LoadArgument::Blocks, LoadArgument::Out, LoadArgument::Count],
                to: range(Region::Weights, 0, 64 * 36),
                row_count: 1,
                row_bytes: 36,
                per_block: 128,
            }],
        },
    ]
}

pub fn range(region: Region, offset: u64, bytes: u64) -> Range {
    Range { region, offset, bytes }
}
