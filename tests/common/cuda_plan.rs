//! A GPU plan made by hand, from the CPU plan of a small model: a launch for each given group of values, and figures
//! that do not change with the kernels. It cannot run; it can be inspected and compared.

use gemma4c_plan::cuda::{
    Argument, Code, Cuda, CudaProgram, CudaStep, Form, Image, Kernel, KvLayout, KvShape, KvType, Launch, Load,
    LoadArgument, LoadPart, Memory, PassReport, Phase, PhaseKind, Places, Range, Refusal, Region, StepOutput,
};
use gemma4c_plan::{Cache, Plan, Target, WeightId};

use super::Place;

/// The values of a layer that one launch computes, by kernel. What a layer has not is left out.
pub type Groups<'a> = &'a [(&'a str, &'a [&'a str])];

pub const FUSED: Groups<'static> = &[
    ("matvec[K = 256, NORMS = 1]", &["attention.normed", "attention.q_raw", "attention.k_raw", "attention.v_raw"]),
    (
        "attention[D = 256]",
        &[
            "attention.q_normed",
            "attention.q",
            "attention.k_normed",
            "attention.k",
            "attention.v",
            "attention.kv",
            "attention.mixed",
        ],
    ),
    ("matvec[K = 1024, NORMS = 0]", &["attention.projected"]),
    (
        "matvec[K = 256, NORMS = 2]",
        &[
            "attention.update",
            "attention.out",
            "mlp.normed",
            "gated.gate",
            "gated.up",
            "gated.activated",
            "gated.product",
        ],
    ),
    ("matvec[K = 256, NORMS = 0]", &["gated.out"]),
    ("norm", &["mlp.update", "mlp.out", "layer.out"]),
];

/// Compiles a model of two layers, one sliding and one global, for the CPU.
pub fn unfused(place: &Place) -> Plan {
    place.ok("synth tiny-dense --layers 2 -o model.gguf");
    place.ok("compile model.gguf -o cpu.bin --target cpu --ctx 64");
    Plan::from_bytes(&place.read("cpu.bin")).expect("a plan")
}

/// Gives a plan a GPU's program: decode, and a chunk of 8 rows of which one is asked for.
pub fn with_cuda(mut plan: Plan, groups: Groups<'_>) -> Plan {
    let mut kernels = vec![kernel("pick"), kernel("gather"), kernel("repack"), kernel("widen")];
    let decode = phase(&plan, &mut kernels, "decode", 1, groups);
    let prefill = phase(&plan, &mut kernels, "prefill 8", 8, groups);
    let code = |kernel: &Kernel| {
        let name = &kernel.name;
        let source = format!(
            "// A <kernel>.\n#define N 3\nextern \"C\" __global__ void {name}(const float* x, float* out) {{}}\n"
        );
        Code { source, image: Image(name.as_bytes().to_vec()) }
    };
    let kv_layout = kv_layout(&plan);
    let kv_bytes = kv_layout.bytes();
    plan.target = Target::Cuda;
    plan.cuda = Some(Cuda {
        code: kernels.iter().map(code).collect(),
        program: CudaProgram {
            gpu: gemma4c_codegen::target::Target::of_arch(gemma4c_codegen::arch::Arch::Sm90a).described(),
            toolchain: "NVRTC 13.0".into(),
            kv: KvType::F16,
            memory: Memory { weights: 4 << 20, kv: kv_bytes, arena: 1 << 17, host: 0, seats: 0 },
            kv_layout,
            places: Places {
                tokens: 0,
                rows: 256,
                chunk: 512,
                segments: 640,
                asked: 768,
                pages: 2048,
                windows: 2048 + 64,
                suppress: 1024,
                suppress_len: 4,
                history: 1280,
                history_len: 16,
                logits: 4096,
                masks: 1536,
                soft: None,
                seats: None,
            },
            kernels,
            loads: loads(&plan),
            constants: vec![],
            prepare: prepare(&plan),
            phases: vec![decode, prefill],
            towers: Vec::new(),
            most_candidates: 64,
            verified_rows: 1,
            drafter: None,
            passes: passes(),
        },
    });
    plan
}

/// Pages for one sequence.
fn kv_layout(plan: &Plan) -> KvLayout {
    let shape = |cache: &Cache| KvShape {
        window: cache.window,
        kept: cache.capacity,
        row_bytes: KvType::F16.row_bytes(cache.kv_heads, cache.head_dim),
    };
    let shapes: Vec<KvShape> = plan.program.caches.iter().map(shape).collect();
    let layout = KvLayout { slots: 1, ..KvLayout::divide(&shapes, plan.program.context) };
    KvLayout { pages: layout.pages_for(plan.program.context), ..layout }
}

fn passes() -> Vec<PassReport> {
    let refusal = |layer: u32| Refusal {
        node: format!("blk.{layer}.attention.q"),
        reason: "queries are needed for fewer rows than keys".into(),
    };
    let pass = |name: &str, about: &str, applied, refused| PassReport {
        name: name.into(),
        about: about.into(),
        enabled: true,
        applied,
        refused,
    };
    vec![
        pass("join-products", "products of the same rows are one", 2, vec![]),
        pass("heads", "norms, rotation and store as one", 0, vec![refusal(0), refusal(1)]),
        pass("geglu", "gate, up, gelu and their product as one", 2, vec![]),
    ]
}

fn range(region: Region, offset: u64, bytes: u64) -> Range {
    Range { region, offset, bytes }
}

fn kernel(instance: &str) -> Kernel {
    let name = instance.split('[').next().expect("a name").to_owned();
    // Its second argument, and attention also the keys and values behind it.
    let written = if name == "attention" { 0b110 } else { 0b10 };
    Kernel {
        name,
        instance: instance.into(),
        block: 128,
        shared: 0,
        written,
        waits: true,
        waits_first: false,
        early: 0,
    }
}

/// Every matrix repacked, the rest copied.
fn loads(plan: &Plan) -> Vec<Load> {
    let mut at = 0;
    let mut next = |bytes: u64| {
        at += bytes;
        range(Region::Weights, at - bytes, bytes)
    };
    let load = |(weight, w): (usize, &gemma4c_plan::Weight)| {
        let (rows, to) = (if w.dims.len() == 1 { 1 } else { w.dim(1) }, next(w.bytes));
        let part = match w.dims.len() {
            1 => LoadPart::Copy { to },
            _ => LoadPart::Kernel {
                kernel: 2,
                order: [LoadArgument::Blocks, LoadArgument::Out, LoadArgument::Count],
                to,
                row_count: 1,
                row_bytes: to.bytes / rows,
                per_block: 256,
            },
        };
        Load { weight: WeightId(weight as u32), rows, parts: vec![part] }
    };
    plan.weights.iter().enumerate().map(load).collect()
}

/// A bf16 copy of one of them, at the end.
fn prepare(plan: &Plan) -> Vec<Launch> {
    let queries = plan.weights.iter().position(|w| w.name.contains("blk.0.attn_q.")).expect("queries");
    let values = plan.weights[queries].dims.iter().product::<u64>();
    let loads = loads(plan);
    let LoadPart::Kernel { to, .. } = loads[queries].parts[0] else { panic!("a matrix") };
    let out = range(Region::Weights, (4 << 20) - values * 2, values * 2);
    let arguments = vec![Argument::Memory(to), Argument::Memory(out), Argument::U32(values as u32 / 16)];
    vec![Launch { kernel: 3, grid: [8, 1, 1], arguments, programmatic: false }]
}

fn phase(plan: &Plan, kernels: &mut Vec<Kernel>, name: &str, rows: u32, groups: Groups<'_>) -> Phase {
    let value = |name: &str| plan.program.values.iter().position(|v| v.name == name).map(|at| at as u32);
    let mut steps: Vec<CudaStep> = Vec::new();
    let mut add = |instance: &str, nodes: Vec<u32>, layer: Option<u32>| {
        let existing = kernels.iter().position(|kernel| kernel.instance == instance);
        let kernel_index = existing.unwrap_or_else(|| {
            kernels.push(kernel(instance));
            kernels.len() - 1
        });
        // Each launch reads what the one before it left, and leaves its own beside it.
        let place = |at: usize| range(Region::Arena, 16384 + (at as u64 % 3) * 8192, 8192);
        let mut arguments = vec![Argument::Memory(place(steps.len() + 2)), Argument::Memory(place(steps.len()))];
        if let (Some(layer), true) = (layer, instance.starts_with("attention")) {
            arguments.push(Argument::Memory(range(Region::Kv, layer as u64 * 65536, 65536 << layer)));
        }
        let measured = instance.starts_with("matvec");
        let outputs = nodes.last().map(|last| StepOutput { value: *last, form: Form::F32, place: place(steps.len()) });
        steps.push(CudaStep {
            launch: Launch {
                kernel: kernel_index as u32,
                grid: [16, 1, 1],
                arguments,
                programmatic: !steps.is_empty(),
            },
            after: steps.len().checked_sub(1).map(|before| before as u32).into_iter().collect(),
            bytes: 100_000 * nodes.len() as u64,
            flops: 200_000 * nodes.len() as u64 * rows as u64,
            nodes,
            outputs: outputs.into_iter().collect(),
            layer,
            reason: if measured { "one row: 20 warps a block" } else { "the only one" }.into(),
            runner_up: if measured { "16 warps a block: 8 % slower" } else { "" }.into(),
        });
    };
    let outside = |names: &[&str]| names.iter().filter_map(|name| value(name)).collect::<Vec<_>>();
    add("gather", outside(&["embedding.rows", "embedding.out"]), None);
    if rows > 1 {
        add("round_rows", vec![], None);
    }
    for layer in 0..plan.model.layers {
        for (instance, names) in groups {
            let nodes: Vec<u32> = names.iter().filter_map(|name| value(&format!("blk.{layer}.{name}"))).collect();
            add(instance, nodes, Some(layer));
        }
    }
    add("matvec[K = 256, NORMS = 1, epilogue = then_softcap]", outside(&["head.normed", "head.raw", "head.out"]), None);
    let asked_from = if rows == 1 { 0 } else { steps.len() as u32 - 1 };
    let logits = Argument::Memory(range(Region::Arena, 4096, plan.model.vocab_size as u64 * 4));
    let pick = vec![Launch { kernel: 0, grid: [4, 1, 1], arguments: vec![logits], programmatic: true }];
    let kind = if rows == 1 { PhaseKind::Decode } else { PhaseKind::Prefill };
    let (pick_largest, pick_sampled) = (pick.clone(), pick);
    Phase { name: name.into(), kind, rows, steps, asked_from, pick_largest, pick_sampled, arena_bytes: 65536 }
}
