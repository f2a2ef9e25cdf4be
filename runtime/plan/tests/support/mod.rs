//! A plan made by hand, with every operation in it, for tests of the format, of its checks and of whoever runs it.

#![allow(dead_code, reason = "every test binary takes in all of this and uses its part")]

pub mod cuda;

use gemma4c_blocks::DType;
use gemma4c_plan::cuda::KvType;
use gemma4c_plan::embedded::{Embedded, Summing};
use gemma4c_plan::{
    Cache, CacheId, Drafter, Kind, MediaTokens, Medium, Merge, Model, ModelFile, Op, Plan, Program, RowCount, Sampling,
    Stage, Step, Strings, Target, TokenKind, Tower, Value, Vocab, Weight, WeightId,
};

const VOCAB: u32 = 12;
const CHUNK: u32 = 4;
const ASKED: u32 = 2;
/// Soft tokens of a picture, of four patches each.
const SOFT: u32 = 4;

struct Sketch {
    weights: Vec<Weight>,
    values: Vec<Value>,
    steps: Vec<Step>,
    file_bytes: u64,
    arena_bytes: u64,
}

impl Sketch {
    fn weight(&mut self, name: &str, dtype: DType, dims: &[u64]) -> WeightId {
        let mut weight = Weight {
            name: name.into(),
            dtype,
            dims: dims.into(),
            file: 0,
            offset: self.file_bytes,
            bytes: 0,
            pieces: vec![],
        };
        weight.bytes = weight.expected_bytes().expect("rows are whole blocks");
        self.file_bytes += weight.bytes;
        self.weights.push(weight);
        WeightId(self.weights.len() as u32 - 1)
    }

    fn step(&mut self, op: Op, inputs: &[u32], kind: Kind, rows: RowCount, width: u32) -> u32 {
        let output = self.values.len() as u32;
        self.values.push(Value { name: format!("value.{output}"), kind, rows, width });
        self.steps.push(Step { op, inputs: inputs.into(), output });
        output
    }

    /// A step that makes rows of f32, each in a place of its own.
    fn floats(&mut self, op: Op, inputs: &[u32], rows: RowCount, width: u32) -> u32 {
        let offset = self.arena_bytes;
        let most = match rows {
            RowCount::Chunk => CHUNK,
            RowCount::Asked => ASKED,
            RowCount::Patches => 4 * SOFT,
            RowCount::Halves => 2 * SOFT,
            RowCount::Soft => SOFT,
        };
        self.arena_bytes += 4 * (most * width) as u64;
        self.step(op, inputs, Kind::Floats { offset }, rows, width)
    }
}

/// One layer with a window, one that reads its cache, experts, and a head; for the CPU and for GPUs.
pub fn plan() -> Plan {
    cuda::with_cuda(cpu_plan())
}

/// A plan with its weights in its file: the plan, and all bytes of the file. The weights are numbers that count up.
pub fn embedded(mut plan: Plan) -> (Plan, Vec<u8>) {
    Embedded::prepare(&mut plan).expect("it fits a file");
    let weights = plan.embedded.as_mut().expect("prepared");
    let bytes: Vec<u8> = (0..weights.bytes).map(|i| (i % 251) as u8).collect();
    let mut summing = Summing::default();
    summing.update(&bytes);
    weights.sums = summing.finish();
    let mut file = plan.to_bytes().expect("a plan that can be written");
    file.resize(Embedded::start(file.len() as u64) as usize, 0);
    file.extend(bytes);
    (plan, file)
}

/// The same for the CPU alone.
pub fn cpu_plan() -> Plan {
    use RowCount::{Asked, Chunk};
    let mut s = Sketch { weights: vec![], values: vec![], steps: vec![], file_bytes: 1000, arena_bytes: 0 };
    let embed = s.weight("token_embd.weight", DType::Q8_0, &[32, VOCAB as u64]);
    let norm = s.weight("norm.weight", DType::F32, &[32]);
    let q = s.weight("q.weight", DType::Q4_0, &[32, 64]);
    let head_norm = s.weight("head_norm.weight", DType::F32, &[16]);
    let k = s.weight("k.weight", DType::F16, &[32, 32]);
    let factors = s.weight("rope_freqs.weight", DType::F32, &[8]);
    let o = s.weight("o.weight", DType::BF16, &[64, 32]);
    let router = s.weight("router.weight", DType::F32, &[32, 4]);
    let up = s.weight("up_exps.weight", DType::Q8_0, &[32, 96, 4]);
    let down = s.weight("down_exps.weight", DType::Q8_0, &[32, 32, 4]);
    let expert_scale = s.weight("expert_scale.weight", DType::F32, &[4]);
    let scale = s.weight("scale.weight", DType::F32, &[1]);

    let rope = Op::Rope { head_dim: 16, base: 1e4, factors: Some(factors) };
    let tokens = s.step(Op::Tokens, &[], Kind::Tokens, Chunk, 1);
    let rows = s.floats(Op::Gather { table: embed }, &[tokens], Chunk, 32);
    let h = s.floats(Op::Scale { factor: 5.65 }, &[rows], Chunk, 32);
    let normed = s.floats(Op::RmsNorm { weight: Some(norm), group: 32, eps: 1e-6 }, &[h], Chunk, 32);
    let q_raw = s.floats(Op::MatMul { weight: q }, &[normed], Chunk, 64);
    let q_normed = s.floats(Op::RmsNorm { weight: Some(head_norm), group: 16, eps: 1e-6 }, &[q_raw], Chunk, 64);
    let q = s.floats(rope, &[q_normed], Chunk, 64);
    let k_raw = s.floats(Op::MatMul { weight: k }, &[normed], Chunk, 32);
    let k = s.floats(rope, &[k_raw], Chunk, 32);
    let v = s.floats(Op::RmsNorm { weight: None, group: 16, eps: 1e-6 }, &[k_raw], Chunk, 32);
    let kv = s.step(Op::KvAppend { cache: CacheId(0) }, &[k, v], Kind::Kv { cache: CacheId(0) }, Chunk, 32);
    let mixed = s.floats(Op::Attention { heads: 4 }, &[q, kv], Chunk, 64);
    let out = s.floats(Op::MatMul { weight: o }, &[mixed], Chunk, 32);
    let h = s.floats(Op::Add, &[h, out], Chunk, 32);
    let logits = s.floats(Op::MatMul { weight: router }, &[h], Chunk, 4);
    let routing = s.step(Op::Route { top_k: 2 }, &[logits], Kind::Routing { experts: 4 }, Chunk, 2);
    let gate = s.floats(Op::ExpertMatMul { weight: up, first: 0, len: 32 }, &[h, routing], Chunk, 64);
    let up = s.floats(Op::ExpertMatMul { weight: up, first: 64, len: 32 }, &[h, routing], Chunk, 64);
    let gate = s.floats(Op::Gelu, &[gate], Chunk, 64);
    let product = s.floats(Op::Mul, &[gate, up], Chunk, 64);
    let down = s.floats(Op::ExpertMatMul { weight: down, first: 0, len: 32 }, &[product, routing], Chunk, 64);
    let sum = s.floats(Op::ExpertSum { scale: Some(expert_scale) }, &[down, routing], Chunk, 32);
    let h = s.floats(Op::MulWeight { weight: scale }, &[sum], Chunk, 32);
    let part = s.floats(Op::Columns { first: 16, len: 16 }, &[h], Chunk, 16);
    s.floats(Op::Scale { factor: 2.0 }, &[part], Chunk, 16);
    let asked = s.floats(Op::TakeAsked, &[h], Asked, 32);
    let raw = s.floats(Op::MatMul { weight: embed }, &[asked], Asked, VOCAB);
    let output = s.floats(Op::Softcap { cap: 30.0 }, &[raw], Asked, VOCAB);

    Plan {
        model: Model {
            architecture: "gemma4".into(),
            name: Some("by hand".into()),
            files: vec![ModelFile { path: "model.gguf".into(), bytes: s.file_bytes, header_bytes: 1000 }],
            fingerprint: 0x0123_4567_89ab_cdef,
            layers: 1,
            hidden: 32,
            vocab_size: VOCAB,
            trained_context: 128,
            adapters: Vec::new(),
            seats: None,
        },
        target: Target::Cpu,
        cuda: None,
        others: Vec::new(),
        weights: s.weights,
        program: Program {
            context: 64,
            chunk: CHUNK,
            asked: ASKED,
            arena_bytes: s.arena_bytes,
            kv: KvType::F32,
            caches: vec![Cache { layer: 0, kv_heads: 2, head_dim: 16, window: Some(8), capacity: 12 }],
            values: s.values,
            steps: s.steps,
            output,
        },
        vocab: Some(vocab()),
        sampling: Sampling::default(),
        embedded: None,
        towers: Vec::new(),
        drafter: None,
        report: "graph: by hand\n".into(),
    }
}

/// The same with a tower that has every operation of pictures, and soft tokens in the text.
pub fn with_tower(mut plan: Plan) -> Plan {
    use RowCount::{Patches, Soft};
    let file_bytes = plan.model.files[0].bytes;
    let mut s = Sketch { weights: plan.weights, values: vec![], steps: vec![], file_bytes, arena_bytes: 0 };
    let embed = s.weight("v.patch_embd.weight", DType::F32, &[12, 16]);
    let table = s.weight("v.position_embd.weight", DType::F32, &[16, 8, 2]);
    let bound = s.weight("v.bound", DType::F32, &[1]);
    let bias = s.weight("v.bias", DType::F32, &[16]);
    let project = s.weight("mm.weight", DType::F32, &[16, 32]);
    let pixels = s.floats(Op::Patches { width: 12 }, &[], Patches, 12);
    let centred = s.floats(Op::AddConstant { term: -1.0 }, &[pixels], Patches, 12);
    let embedded = s.floats(Op::MatMul { weight: embed }, &[centred], Patches, 16);
    let columns = s.floats(Op::AxisRows { table, axis: 0 }, &[], Patches, 16);
    let rows = s.floats(Op::AxisRows { table, axis: 1 }, &[], Patches, 16);
    let positions = s.floats(Op::Add, &[columns, rows], Patches, 16);
    let q = s.floats(Op::GridRope { head_dim: 8, base: 100.0 }, &[embedded], Patches, 16);
    let mixed = s.floats(Op::FullAttention { heads: 2 }, &[q, embedded, positions], Patches, 16);
    let low = s.floats(Op::AtLeast { weight: bound }, &[mixed], Patches, 16);
    let pooled = s.floats(Op::GridMean { side: 2 }, &[low], Soft, 16);
    let high = s.floats(Op::AtMost { weight: bound }, &[pooled], Soft, 16);
    let sum = s.floats(Op::AddWeight { weight: bias }, &[high], Soft, 16);
    let output = s.floats(Op::MatMul { weight: project }, &[sum], Soft, 32);
    let program = Program {
        context: 4 * SOFT,
        chunk: 4 * SOFT,
        asked: SOFT,
        arena_bytes: s.arena_bytes,
        kv: KvType::F32,
        caches: vec![],
        values: s.values,
        steps: s.steps,
        output,
    };
    let tokens = MediaTokens { begin: 9, placeholder: 10, end: 11 };
    let stages = vec![Stage { name: "pooled".into(), value: pooled }];
    plan.towers.push(Tower {
        name: "vision".into(),
        program,
        medium: Medium::Picture { patch: 2, pool: 2 },
        tokens,
        stages,
    });
    plan.weights = s.weights;
    plan.model.files[0].bytes = s.file_bytes;
    // The text's rows take them in.
    plan.program.steps[2].op = Op::PlaceSoft;
    plan.program.steps[1].op = Op::GatherText { table: WeightId(0), pad: 0 };
    plan
}

/// The same with a drafter that has every operation of drafters.
pub fn with_drafter(mut plan: Plan) -> Plan {
    use RowCount::Chunk;
    let file_bytes = plan.model.files[0].bytes;
    let mut s = Sketch { weights: plan.weights, values: vec![], steps: vec![], file_bytes, arena_bytes: 0 };
    let pre = s.weight("nextn.pre_projection.weight", DType::F32, &[64, 16]);
    let q = s.weight("d.q.weight", DType::F32, &[16, 64]);
    let o = s.weight("d.o.weight", DType::F32, &[64, 16]);
    let centroids = s.weight("masked_embd_centroids.weight", DType::F32, &[16, 4]);
    let head = s.weight("token_embd.weight", DType::F32, &[16, VOCAB as u64]);
    let post = s.weight("nextn.post_projection.weight", DType::F32, &[16, 32]);
    let tokens = s.step(Op::Tokens, &[], Kind::Tokens, Chunk, 1);
    let kv = s.step(Op::BorrowKv { cache: CacheId(0) }, &[], Kind::Kv { cache: CacheId(0) }, Chunk, 32);
    let rows = s.floats(Op::Gather { table: WeightId(0) }, &[tokens], Chunk, 32);
    let hidden = s.floats(Op::Hidden { width: 32 }, &[], Chunk, 32);
    let both = s.floats(Op::Concat, &[rows, hidden], Chunk, 64);
    let x = s.floats(Op::MatMul { weight: pre }, &[both], Chunk, 16);
    let q = s.floats(Op::MatMul { weight: q }, &[x], Chunk, 64);
    let q = s.floats(Op::Rope { head_dim: 16, base: 1e4, factors: None }, &[q], Chunk, 64);
    let mixed = s.floats(Op::AttentionBefore { heads: 4 }, &[q, kv], Chunk, 64);
    let x = s.floats(Op::MatMul { weight: o }, &[mixed], Chunk, 16);
    let scores = s.floats(Op::MatMul { weight: centroids }, &[x], Chunk, 4);
    let closest = s.step(Op::Route { top_k: 2 }, &[scores], Kind::Routing { experts: 4 }, Chunk, 2);
    let candidates = s.step(Op::Candidates { each: 3 }, &[closest], Kind::Tokens, Chunk, 6);
    let scored = s.floats(Op::TokenMatMul { weight: head }, &[x, candidates], Chunk, 6);
    let output = s.floats(Op::SpreadTokens { width: VOCAB }, &[scored, candidates], Chunk, VOCAB);
    let next = s.floats(Op::MatMul { weight: post }, &[x], Chunk, 32);
    let program = Program {
        arena_bytes: s.arena_bytes,
        caches: plan.program.caches.clone(),
        values: s.values,
        steps: s.steps,
        output,
        ..plan.program
    };
    let reads = plan.program.steps.iter().find(|step| step.op == Op::TakeAsked).expect("an LM head").output;
    let token_order = (0..VOCAB).map(|i| i * 5 % VOCAB).collect();
    plan.drafter = Some(Drafter { program, reads, hidden: next, token_order });
    plan.weights = s.weights;
    plan.model.files[0].bytes = s.file_bytes;
    plan
}

fn vocab() -> Vocab {
    let mut tokens = Strings::default();
    let texts = ["<pad>", "<eos>", "<bos>", "▁", "a", "b", "é", "ab", "▁ab", "<0x0A>", "<|turn>", "▁▁"];
    texts.iter().for_each(|text| assert!(tokens.push(text)));
    let mut kinds = vec![TokenKind::Normal; texts.len()];
    kinds[..3].fill(TokenKind::Control);
    (kinds[9], kinds[10]) = (TokenKind::Byte, TokenKind::UserDefined);
    let merge = |left, right, result| Merge { left, right, result };
    Vocab {
        tokens,
        kinds,
        merges: vec![merge(4, 5, 7), merge(3, 7, 8), merge(3, 3, 11)],
        bos: Some(2),
        eos: Some(1),
        unknown: None,
        add_bos: true,
        stop: vec![1],
        suppress: vec![0, 10],
        chat_template: Some("{{ messages }}".into()),
    }
}
