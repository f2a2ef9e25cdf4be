//! plan.bin says the same every time, comes back as it was, and explains what is wrong with it.

mod cuda;

use std::fmt::Write;

use crate::support;
use gemma4c_blocks::DType;
use gemma4c_plan::cuda::{Argument, CudaProgram};
use gemma4c_plan::embedded::EmbeddedForm;
use gemma4c_plan::{
    CacheId, Drafter, Kind, Medium, Op, Plan, PlanError, RowCount, START, VERSION, WeightId, own_bytes,
};

#[test]
fn a_plan_comes_back_as_it_was() {
    let plan = support::plan();
    let bytes = plan.to_bytes().unwrap();
    let back = Plan::from_bytes(&bytes).unwrap();
    assert_eq!(back, plan);
    assert_eq!(back.to_bytes().unwrap(), bytes);

    // And one for two GPUs, in the order of its programs.
    let mut two = plan.clone();
    let mut other = two.cuda.clone().unwrap();
    (other.program.gpu.key, other.program.gpu.multiprocessors) = ("rtx-4090".into(), 128);
    two.others.push(other);
    let mut back = Plan::from_bytes(&two.to_bytes().unwrap()).unwrap();
    assert_eq!(back, two);
    back.choose(1);
    assert_eq!((back.programs().count(), back.cuda.unwrap().program.gpu.multiprocessors), (1, 128));

    let silent = Plan { vocab: None, ..plan };
    assert_eq!(Plan::from_bytes(&silent.to_bytes().unwrap()).unwrap(), silent);
    let beside = [support::with_tower(support::cpu_plan()), support::with_drafter(support::cpu_plan())];
    for for_a_cpu in [support::cpu_plan()].into_iter().chain(beside) {
        assert_eq!(Plan::from_bytes(&for_a_cpu.to_bytes().unwrap()).unwrap(), for_a_cpu);
    }
}

#[test]
fn the_checksum_is_the_files_and_sees_every_section() {
    let plan = support::plan();
    let own = plan.checksum().unwrap();
    assert_eq!(plan.to_bytes().unwrap()[24..32], own.to_le_bytes());
    let mut changed = [plan.clone(), plan.clone(), plan.clone(), plan.clone(), plan.clone()];
    changed[0].model.fingerprint ^= 1;
    changed[1].program.context -= 1;
    changed[2].vocab = None;
    changed[3].cuda.as_mut().unwrap().code[0].source += " ";
    changed[4].report += " ";
    for other in changed {
        assert_ne!(other.checksum().unwrap(), own);
    }
}

/// Two pages of 8,192 bytes are those of one sequence; three sequences have use for six.
#[test]
fn a_program_gets_as_many_pages_as_there_is_room_for() {
    let mut plan = support::plan();
    let context = plan.program.context;
    let program = &mut plan.cuda.as_mut().unwrap().program;
    program.kv_layout.slots = 3;
    let fixed = program.memory.device().unwrap() - program.memory.kv;
    let within = |bytes, more| program.pages_within(bytes, context, more);
    assert_eq!((within(u64::MAX, false), within(u64::MAX, true)), (Ok(2), Ok(6)));
    assert_eq!((within(fixed + 5 * 8192 + 8191, false), within(fixed + 5 * 8192 + 8191, true)), (Ok(2), Ok(5)));
    assert_eq!(within(fixed + 2 * 8192, true), Ok(2));
    for too_few in [fixed + 2 * 8192 - 1, fixed - 1, 0] {
        assert_eq!(within(too_few, true), Err(fixed + 2 * 8192));
    }
    let of_kv = |program: &CudaProgram| match program.phases[0].steps[1].launch.arguments[1] {
        Argument::Memory(range) => (range.region, range.offset, range.bytes),
        other => panic!("{other:?}"),
    };
    let (region, offset, bytes) = of_kv(program);
    program.set_pages(5);
    assert_eq!(of_kv(program), (region, offset, bytes + 3 * 8192));
    assert_eq!((program.memory.kv, program.kv_layout.bytes()), (5 * 8192, 5 * 8192));
    let bytes = plan.to_bytes().unwrap();
    assert_eq!(Plan::from_bytes(&bytes).unwrap(), plan, "it is as right with more pages");
    let program = &mut plan.cuda.as_mut().unwrap().program;
    program.set_pages(2);
    assert_eq!(of_kv(program), (region, offset, 3072));
}

/// A file of this version, kept as it was written. If this fails, the format has changed: once it is released, raise
/// [`VERSION`].
#[test]
fn version_16_is_read_and_written_as_ever() {
    assert_eq!(VERSION, 16);
    let kept: &[u8] = include_bytes!("../data/plan-v16.bin");
    let now = support::plan().to_bytes().unwrap();
    if now != kept {
        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("plan-v16.bin");
        std::fs::write(&path, &now).unwrap();
        panic!("the bytes have changed; the new ones are in {}", path.display());
    }
    assert_eq!(Plan::from_bytes(kept).unwrap(), support::plan());
}

/// A plan is compiled from its model in seconds, so older versions are not read; but they are recognised.
#[test]
fn older_versions_are_refused_by_name() {
    let mut bytes = support::plan().to_bytes().unwrap();
    for old in 1..VERSION as u8 {
        bytes[8] = old;
        let error = Plan::from_bytes(&bytes).unwrap_err();
        assert_eq!(error, PlanError::Version { found: old.into() });
        let text = format!("plan version {old}, this gemma4c reads version {VERSION}: compile the model again");
        assert_eq!(error.to_string(), text);
    }
}

/// Weights behind a plan change nothing in front of them but what is said of them, and are not looked at.
#[test]
fn a_plan_with_its_weights_comes_back_as_it_was() {
    for plan in [support::plan(), support::cpu_plan()] {
        let (plan, file) = support::embedded(plan);
        let own = own_bytes(&file[..START]).unwrap() as usize;
        assert_eq!(own, plan.to_bytes().unwrap().len());
        assert_eq!(Plan::from_bytes(&file).unwrap(), plan);
        assert_eq!(Plan::from_start(&file[..own], file.len() as u64).unwrap(), plan);
        let weights = plan.embedded.clone().unwrap();
        let start = file.len() - weights.bytes as usize;
        assert!(
            start.is_multiple_of(4096)
                && (0..weights.sums.0.len()).all(|chunk| {
                    let range = weights.chunk(chunk);
                    weights.is_chunk(chunk, &file[start + range.start as usize..start + range.end as usize])
                })
        );
        // As long, whatever the sums are: it is written before they are known.
        let mut other = plan.clone();
        other.embedded.as_mut().unwrap().sums.0.fill(u64::MAX);
        assert_eq!(other.to_bytes().unwrap().len(), own);
    }
}

type Edit = fn(&mut Plan);

/// Each edits the plan into a contradiction.
const CONTRADICTIONS: [(&str, Edit); 41] = [
    ("no context", |p| p.program.context = 0),
    ("no chunk", |p| p.program.chunk = 0),
    ("more rows asked for than a chunk has", |p| p.program.asked = 5),
    ("a ring too short for its window and a chunk", |p| p.program.caches[0].capacity = 11),
    ("a cache too short for the context", |p| p.program.caches[0].window = None),
    ("a window of 0", |p| p.program.caches[0].window = Some(0)),
    ("a cache without heads", |p| p.program.caches[0].kv_heads = 0),
    ("a cache whose width overflows", |p| p.program.caches[0].head_dim = u32::MAX),
    ("a weight in no file", |p| p.weights[3].file = 1),
    ("a weight without dimensions", |p| p.weights[3].dims.clear()),
    ("a dimension of 0", |p| p.weights[3].dims[0] = 0),
    ("a weight of other bytes than its shape has", |p| p.weights[3].bytes += 1),
    ("a row that is not whole blocks", |p| p.weights[0].dims[0] = 33),
    ("a weight beyond the end of its file", |p| p.weights[11].offset += 1),
    ("a weight whose end overflows", |p| p.weights[3].offset = u64::MAX),
    ("more weights than there are bytes", |p| {
        p.model.files[0].bytes = u64::MAX;
        (p.weights[3].dims, p.weights[3].bytes) = (vec![1 << 28, 1 << 28, 16], 1 << 62);
        p.weights.extend(vec![p.weights[3].clone(); 3]);
    }),
    ("a name with a line break", |p| p.weights[3].name = "two\nlines".into()),
    ("a name that is a novel", |p| p.program.values[3].name = "x".repeat(1000)),
    ("a value of no width", |p| p.program.values[1].width = 0),
    ("a value beyond the arena", |p| p.program.arena_bytes -= 4),
    ("a value at an odd place", |p| offset_of(p, 5, 2)),
    ("a value whose end overflows", |p| offset_of(p, 5, u64::MAX - 3)),
    ("a value in no cache", |p| p.program.values[10].kind = Kind::Kv { cache: CacheId(1) }),
    ("a step of a value that does not exist", |p| p.program.steps[2].output = 99),
    ("a step that reads a value that does not exist", |p| p.program.steps[2].inputs[0] = 99),
    ("a step with an input too many", |p| p.program.steps[2].inputs.push(1)),
    ("a step that reads what is made later", |p| p.program.steps.swap(3, 4)),
    ("a step that reads its own output", |p| p.program.steps[2].inputs[0] = 2),
    ("a step that writes over its input", |p| offset_of(p, 2, 64)),
    ("a value made twice", |p| p.program.steps.push(p.program.steps[2].clone())),
    ("two appends to a cache", |p| {
        let (mut value, mut step) = (p.program.values[10].clone(), p.program.steps[10].clone());
        (value.name, step.output) = ("again".into(), p.program.values.len() as u32);
        p.program.values.push(value);
        p.program.steps.push(step);
    }),
    ("a weight that does not exist", |p| p.program.steps[4].op = Op::MatMul { weight: WeightId(12) }),
    ("a product of another width", |p| p.program.steps[4].op = Op::MatMul { weight: WeightId(4) }),
    ("a norm by a vector that is not f32", |p| {
        p.weights[1].dtype = DType::F16;
        p.weights[1].bytes /= 2;
    }),
    ("heads that do not share evenly", |p| p.program.steps[11].op = Op::Attention { heads: 3 }),
    ("an append of only the asked rows", |p| p.program.values[10].rows = RowCount::Asked),
    ("an output that does not exist", |p| p.program.output = 99),
    ("an output that is a row for every token", |p| p.program.output = 14),
    ("an output of another vocabulary", |p| p.model.vocab_size = 13),
    ("a merge of tokens that do not exist", |p| p.vocab.as_mut().unwrap().merges[0].result = 12),
    ("a token without a kind", |p| p.vocab.as_mut().unwrap().kinds.truncate(11)),
];

/// Of a plan with a tower.
const TOWERS: [(&str, Edit); 20] = [
    ("a tower that a program for GPUs has no launches for", |p| {
        *p = Plan { towers: p.towers.clone(), ..support::plan() }
    }),
    ("five towers", |p| p.towers = vec![p.towers[0].clone(); 5]),
    ("patches of no pixels", |p| p.towers[0].medium = Medium::Picture { patch: 0, pool: 2 }),
    ("patches of another size", |p| p.towers[0].medium = Medium::Picture { patch: 4, pool: 2 }),
    ("pooling of another size", |p| p.towers[0].medium = Medium::Picture { patch: 2, pool: 3 }),
    ("a sound's tower of patches", |p| p.towers[0].medium = Medium::Samples { frame: 12 }),
    ("features of no bins", |p| p.towers[0].medium = Medium::Mel { bins: 0 }),
    ("a convolution of a picture", |p| {
        p.towers[0].program.steps[9].op = Op::HalvingConv { weight: WeightId(0), channels: 1 }
    }),
    ("attention that sees nothing", |p| {
        p.towers[0].program.steps[7].op = Op::NearAttention { heads: 2, reach: 0, cap: 50.0, weight: WeightId(0) }
    }),
    ("pooling by a side that is not the tower's", |p| p.towers[0].program.steps[9].op = Op::GridMean { side: 1 }),
    ("patches that are not whole soft tokens", |p| p.towers[0].program.chunk = 15),
    ("a placeholder that does not exist", |p| p.towers[0].tokens.placeholder = 12),
    ("a stage that no step makes", |p| p.towers[0].stages[0].value = 99),
    ("soft tokens of another width", |p| p.towers[0].program.output = 8),
    ("a tower that remembers", |p| p.towers[0].program.caches = p.program.caches.clone()),
    ("a tower that reads tokens", |p| p.towers[0].program.values[0].rows = RowCount::Chunk),
    ("a table without that axis", |p| p.towers[0].program.steps[3].op = Op::AxisRows { table: WeightId(13), axis: 2 }),
    ("heads without quarters", |p| p.towers[0].program.steps[6].op = Op::GridRope { head_dim: 6, base: 1e2 }),
    ("a tower that turns by positions", |p| {
        p.towers[0].program.steps[6].op = Op::Rope { head_dim: 8, base: 1e4, factors: None };
    }),
    ("a text that reads pictures", |p| p.program.values[24].rows = RowCount::Soft),
];

/// Of a plan with a drafter.
const DRAFTERS: [(&str, Edit); 17] = [
    ("a drafter beside a program for GPUs", |p| *p = Plan { drafter: p.drafter.clone(), ..support::plan() }),
    ("a drafter's step in the text", |p| {
        let step = &mut p.program.steps[13];
        (step.op, step.inputs) = (Op::Hidden { width: 32 }, vec![]);
    }),
    ("a drafter of another context", |p| drafter(p).program.context = 32),
    ("a drafter that reads a cache the text has not", |p| drafter(p).program.caches[0].capacity = 20),
    ("a drafter that appends", |p| drafter(p).program.steps[1].op = Op::KvAppend { cache: CacheId(0) }),
    ("a drafter that sees its own position", |p| drafter(p).program.steps[8].op = Op::Attention { heads: 4 }),
    ("a drafter of asked rows", |p| drafter(p).program.values[2].rows = RowCount::Asked),
    ("hidden states of another width", |p| {
        let drafter = drafter(p);
        drafter.program.steps[3].op = Op::Hidden { width: 16 };
        drafter.program.values[3].width = 16;
    }),
    ("parts that are not the whole", |p| drafter(p).program.values[4].width = 60),
    ("groups that are not the vocabulary", |p| drafter(p).program.steps[12].op = Op::Candidates { each: 2 }),
    ("values for other tokens", |p| drafter(p).program.steps[14].inputs[1] = 0),
    ("a token twice in the order", |p| drafter(p).token_order[3] = 0),
    ("a token in the order that does not exist", |p| drafter(p).token_order[3] = 99),
    ("an order of other tokens", |p| drafter(p).token_order.truncate(11)),
    ("logits of a drafter that are none", |p| drafter(p).program.output = 5),
    ("a next hidden state that is none", |p| drafter(p).hidden = 5),
    ("a first hidden state that is none", |p| drafter(p).reads = 1),
];

fn drafter(plan: &mut Plan) -> &mut Drafter {
    plan.drafter.as_mut().unwrap()
}

/// Of weights in the plan's own file.
const EMBEDDED: [(&str, Edit); 5] = [
    ("embedded weights of other bytes", |p| p.embedded.as_mut().unwrap().bytes += 1),
    ("embedded weights of absurd size", |p| p.embedded.as_mut().unwrap().bytes = u64::MAX),
    ("embedded weights as a GPU has them, without a GPU", |p| {
        p.embedded.as_mut().unwrap().form = EmbeddedForm::Regions;
    }),
    ("embedded weights with a checksum too many", |p| p.embedded.as_mut().unwrap().sums.0.push(0)),
    ("an embedded tensor at another place", |p| p.weights[1].offset += 64),
];

fn offset_of(plan: &mut Plan, value: usize, offset: u64) {
    plan.program.values[value].kind = Kind::Floats { offset };
}

#[test]
fn each_fault_has_its_words() {
    let bytes = support::plan().to_bytes().unwrap();
    let mut texts = String::from("-- the file\n");
    let with = |at: usize, new: &[u8]| [&bytes[..at], new, &bytes[at + new.len()..]].concat();
    let files: [(&str, Vec<u8>); 12] = [
        ("an empty file", vec![]),
        ("wrong magic", with(0, b"PK\x03\x04")),
        ("newer version", with(8, &[VERSION as u8 + 1])),
        ("older version", with(8, &[1])),
        ("cut in the header", bytes[..20].to_vec()),
        ("cut in the section table", bytes[..100].to_vec()),
        ("cut in a section", bytes[..bytes.len() - 1].to_vec()),
        ("bytes after the end", [&bytes[..], b"x"].concat()),
        ("a flipped bit in the header", with(16, &[bytes[16] ^ 1])),
        ("a flipped bit in the section table", with(40, &[bytes[40] ^ 1])),
        ("a flipped bit in a section", with(400, &[bytes[400] ^ 1])),
        ("another file's checksum", with(24, &[0; 8])),
    ];
    for (name, file) in files {
        writeln!(texts, "{name}\n    {}", Plan::from_bytes(&file).expect_err(name)).unwrap();
    }
    let (_, whole) = support::embedded(support::plan());
    for (name, file) in [
        ("cut in the weights", whole[..whole.len() - 1].to_vec()),
        ("cut before the weights", whole[..own_bytes(&whole[..START]).unwrap() as usize].to_vec()),
        ("bytes after the weights", [&whole[..], b"x"].concat()),
        ("a plan without its weights in another's place", [&bytes[..], &whole[bytes.len()..]].concat()),
    ] {
        writeln!(texts, "{name}\n    {}", Plan::from_bytes(&file).expect_err(name)).unwrap();
    }
    texts.push_str("\n-- contradictions\n");
    let of_gpus = cuda::CONTRADICTIONS.into_iter().chain(cuda::PHASES).chain(cuda::KEYS_AND_VALUES);
    for (name, edit) in CONTRADICTIONS.into_iter().chain(of_gpus) {
        let mut plan = support::plan();
        edit(&mut plan);
        let error = plan.to_bytes().expect_err(name);
        assert!(matches!(error, PlanError::Invalid(_)), "{name}: {error}");
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    for (name, edit) in TOWERS {
        let mut plan = support::with_tower(support::cpu_plan());
        edit(&mut plan);
        writeln!(texts, "{name}\n    {}", plan.to_bytes().expect_err(name)).unwrap();
    }
    for (name, edit) in DRAFTERS {
        let mut plan = support::with_drafter(support::cpu_plan());
        edit(&mut plan);
        writeln!(texts, "{name}\n    {}", plan.to_bytes().expect_err(name)).unwrap();
    }
    for (name, edit) in EMBEDDED {
        let mut plan = support::embedded(support::cpu_plan()).0;
        edit(&mut plan);
        writeln!(texts, "{name}\n    {}", plan.to_bytes().expect_err(name)).unwrap();
    }
    let mut plan = support::plan();
    plan.weights[0].dims = vec![1; 5];
    writeln!(texts, "a fifth dimension\n    {}", plan.to_bytes().unwrap_err()).unwrap();
    assert_snapshot("errors", "plan", &texts);
}

fn assert_snapshot(area: &str, name: &str, text: &str) {
    insta::with_settings!({
        snapshot_path => format!("../../../../snapshots/{area}"),
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!(name, text) });
}
