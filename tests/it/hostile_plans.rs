//! A plan that passes its checks can be run, whoever wrote it.
//!
//! Real plans are changed at random, number by number and part by part. Most changes are refused; what is accepted is
//! opened and fed, and must compute something, however senseless, without a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::{Place, Random, golden};
use gemma4c_blocks::DType;
use gemma4c_plan::fingerprint::{FileBytes, fingerprint};
use gemma4c_plan::{Attribute, CacheId, Kind, Medium, Op, Plan, RowCount, WeightId};
use gemma4c_runtime::{Asked, ModelLocation, Patches, Session};

/// A number near `n`, or one that breaks arithmetic done on trust.
fn another(random: &mut Random, n: u32) -> u32 {
    match random.below(12) {
        0 => 0,
        1 => 1,
        2 => n.wrapping_add(1),
        3 => n.wrapping_sub(1),
        4 => n.wrapping_mul(2),
        5 => n / 2,
        6 => u32::MAX,
        7 => 1 << 28,
        8 => (1 << 28) + 1,
        9 => random.bits() as u32,
        10 => random.below(64) as u32,
        _ => n ^ (1 << random.below(32)),
    }
}

fn another_u64(random: &mut Random, n: u64) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => u64::MAX,
        2 => n.wrapping_add(4 * random.below(1024)),
        3 => n.wrapping_sub(4 * random.below(1024)),
        4 => n.wrapping_add(1),
        5 => n / 2,
        6 => random.bits(),
        _ => n ^ (1 << random.below(64)),
    }
}

fn another_f32(random: &mut Random) -> f32 {
    [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-30, 1e30, f32::from_bits(random.bits() as u32)][random.below(7) as usize]
}

fn pick<'a, T>(random: &mut Random, list: &'a mut [T]) -> &'a mut T {
    let at = random.below(list.len() as u64) as usize;
    &mut list[at]
}

/// One change somewhere in a plan.
fn mutate(plan: &mut Plan, random: &mut Random) {
    let program = &mut plan.program;
    let values = program.values.len() as u64;
    let steps = program.steps.len() as u64;
    match random.below(26) {
        0 => program.context = another(random, program.context),
        1 => program.chunk = another(random, program.chunk),
        2 => program.asked = another(random, program.asked),
        3 => program.arena_bytes = another_u64(random, program.arena_bytes),
        4 => program.output = random.below(values + 1) as u32,
        5 => {
            let cache = pick(random, &mut program.caches);
            cache.capacity = another(random, cache.capacity);
        }
        6 => {
            let cache = pick(random, &mut program.caches);
            cache.window = [None, Some(another(random, cache.window.unwrap_or(32)))][random.below(2) as usize];
        }
        7 => {
            let cache = pick(random, &mut program.caches);
            (cache.kv_heads, cache.head_dim) = (cache.head_dim, cache.kv_heads);
        }
        8 => {
            let cache = pick(random, &mut program.caches);
            (cache.kv_heads, cache.head_dim) = (cache.kv_heads * 2, cache.head_dim / 2);
        }
        9 | 10 => {
            let arena = program.arena_bytes;
            let value = pick(random, &mut program.values);
            if let Kind::Floats { offset } = &mut value.kind {
                *offset = if random.below(2) == 0 { another_u64(random, *offset) } else { 4 * random.below(arena / 4) };
            }
        }
        11 => {
            let value = pick(random, &mut program.values);
            value.width = another(random, value.width);
        }
        12 => {
            let value = pick(random, &mut program.values);
            let rows = [RowCount::Chunk, RowCount::Asked, RowCount::Patches, RowCount::Soft];
            value.rows = rows[random.below(4) as usize];
        }
        13 => {
            let kinds = [
                Kind::Tokens,
                Kind::Kv { cache: CacheId(0) },
                Kind::Routing { experts: 8 },
                Kind::Floats { offset: 0 },
            ];
            pick(random, &mut program.values).kind = kinds[random.below(4) as usize];
        }
        14 => {
            // All asked for is all there is: widths and places stay, only the rows of everything after a point change.
            let from = random.below(values) as usize;
            program.values[from..].iter_mut().for_each(|value| value.rows = RowCount::Asked);
        }
        15 => program.steps.swap(random.below(steps) as usize, random.below(steps) as usize),
        16 => drop(program.steps.remove(random.below(steps) as usize)),
        17 => {
            let step = program.steps[random.below(steps) as usize].clone();
            program.steps.insert(random.below(steps) as usize, step);
        }
        18 | 19 => {
            let step = pick(random, &mut program.steps);
            if !step.inputs.is_empty() {
                *pick(random, &mut step.inputs) = random.below(values + 1) as u32;
            }
        }
        20 => pick(random, &mut program.steps).output = random.below(values + 1) as u32,
        21 | 22 => {
            let weights = plan.weights.len() as u64;
            let step = pick(random, &mut program.steps);
            mutate_op(&mut step.op, random, weights);
        }
        23 => {
            let weight = pick(random, &mut plan.weights);
            match random.below(3) {
                0 => weight.offset = another_u64(random, weight.offset),
                1 => weight.dtype = DType::ALL[random.below(DType::ALL.len() as u64) as usize],
                _ => weight.dims.reverse(),
            }
            weight.bytes = weight.expected_bytes().unwrap_or(weight.bytes);
        }
        24 => {
            let model = &mut plan.model;
            match random.below(3) {
                0 => model.vocab_size = another(random, model.vocab_size),
                1 => model.files[0].bytes = another_u64(random, model.files[0].bytes),
                _ => model.files[0].header_bytes = another_u64(random, model.files[0].header_bytes),
            }
        }
        _ => plan.weights.swap(random.below(4) as usize, random.below(9) as usize),
    }
}

/// Changes an attribute of an operation, or one that has none to another such.
fn mutate_op(op: &mut Op, random: &mut Random, weights: u64) {
    let mut attributes = 0;
    op.each_attribute(|_, _| attributes += 1);
    if attributes == 0 {
        let others = [Op::Add, Op::Mul, Op::Gelu, Op::TakeAsked, Op::PlaceSoft, Op::Scale { factor: 2.0 }];
        *op = others[random.below(6) as usize];
        return;
    }
    let other_weight = WeightId(random.below(weights + 1) as u32);
    let (chosen, mut at) = (random.below(attributes), 0);
    op.each_attribute(|_, attribute| {
        match attribute {
            _ if at != chosen => {}
            Attribute::Number(number) => *number = another(random, *number),
            Attribute::Real(number) => *number = another_f32(random),
            Attribute::Weight(weight) => *weight = other_weight,
            Attribute::OptionalWeight(weight) => *weight = [None, Some(other_weight)][random.below(2) as usize],
            Attribute::Cache(cache) => *cache = CacheId(random.below(5) as u32),
        }
        at += 1;
    });
}

/// Feeds a few tokens in several ways, to the last position of the context.
fn exercise(plan: Plan, location: &ModelLocation) -> Result<(), gemma4c_runtime::RuntimeError> {
    let vocab = plan.model.vocab_size;
    let mut session = Session::on_cpu(plan, location)?;
    let tokens: Vec<u32> = (0..12).map(|i| i * 41 % vocab).collect();
    session.feed(&tokens[..3], Asked::All, None, |_, row| assert_eq!(row.len(), vocab as usize))?;
    session.feed(&tokens[3..4], Asked::Last, None, |_, _| {})?;
    session.feed(&tokens, Asked::None, Some(7), |_, _| {})?;
    session.feed(&tokens[..8], Asked::Last, None, |_, _| {})?;
    session.reset();
    session.feed(&tokens[..5], Asked::All, None, |_, _| {})
}

fn run_mutants(preset: &str, seed: u64, cases: usize) {
    let place = Place::new();
    place.ok(&format!("synth {preset} -q q8_0 --layers 3 -o model.gguf"));
    place.ok("compile model.gguf -o plan.bin --ctx 24 --chunk 8");
    let original = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let model = place.read("model.gguf");
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    exercise(original.clone(), &location).unwrap();

    let mut random = Random(seed);
    let (mut accepted, mut ran, mut stopped) = (0, 0, 0);
    for case in 0..cases {
        let mut plan = original.clone();
        for _ in 0..1 + random.below(2) {
            mutate(&mut plan, &mut random);
        }
        let Ok(bytes) = catch_unwind(|| plan.to_bytes()).unwrap_or_else(|_| panic!("{preset} {case}: checked")) else {
            continue;
        };
        accepted += 1;
        let mut plan = Plan::from_bytes(&bytes).unwrap();
        // Whoever writes a plan can write a fingerprint too.
        let file = FileBytes { bytes: &model, header_len: plan.model.files[0].header_bytes };
        let tensors = plan.weights.iter().map(|w| (w.file as usize, w.offset, w.bytes));
        plan.model.fingerprint = fingerprint(&[file], tensors).unwrap_or(0);
        // More than this is asked for honestly, but is no fun to try hundreds of times.
        let memory = plan.program.cache_bytes().unwrap_or(u64::MAX).saturating_add(plan.program.arena_bytes);
        if memory > 1 << 30 {
            continue;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| exercise(plan, &location)));
        match outcome.unwrap_or_else(|_| panic!("{preset} {case}: run")) {
            Ok(()) => ran += 1,
            Err(_) => stopped += 1,
        }
    }
    eprintln!("{preset}: {cases} cases, {accepted} accepted, {ran} ran, {stopped} stopped with an error");
    assert!(ran > cases / 20 && accepted < cases / 2, "the cases have lost their bite: {ran} ran of {accepted}");
}

#[test]
fn what_passes_the_checks_can_be_run() {
    for (preset, seed, cases) in [("tiny-e", 1, 350), ("tiny-dense", 2, 150), ("tiny-moe", 3, 350)] {
        run_mutants(preset, seed, cases);
    }
}

/// One change somewhere in a tower.
fn mutate_tower(plan: &mut Plan, random: &mut Random) {
    let weights = plan.weights.len() as u64;
    let tower = &mut plan.towers[0];
    let program = &mut tower.program;
    let values = program.values.len() as u64;
    match random.below(12) {
        0 | 1 => {
            let numbers = [16, 3].map(|number| another(random, number));
            let [patch, pool] = numbers;
            tower.medium = match random.below(4) {
                0 => Medium::Picture { patch, pool: 3 },
                1 => Medium::Picture { patch: 16, pool },
                2 => Medium::Mel { bins: patch },
                _ => Medium::Samples { frame: pool },
            };
        }
        2 => tower.tokens.placeholder = another(random, tower.tokens.placeholder),
        3 => pick(random, &mut tower.stages).value = random.below(values + 1) as u32,
        4 => program.output = random.below(values + 1) as u32,
        5 => pick(random, &mut program.values).width = another(random, 192),
        6 => {
            let rows = [RowCount::Chunk, RowCount::Asked, RowCount::Patches, RowCount::Soft];
            pick(random, &mut program.values).rows = rows[random.below(4) as usize];
        }
        7 => {
            let arena = program.arena_bytes;
            pick(random, &mut program.values).kind = Kind::Floats { offset: 4 * random.below(arena / 4) };
        }
        8 => {
            let step = pick(random, &mut program.steps);
            if !step.inputs.is_empty() {
                *pick(random, &mut step.inputs) = random.below(values + 1) as u32;
            }
        }
        9 => {
            let rope = Op::Rope { head_dim: 64, base: 1e4, factors: None };
            let others =
                [rope, Op::GridMean { side: 3 }, Op::PlaceSoft, Op::Gelu, Op::SubMean { group: 8 }, Op::TakeAsked];
            pick(random, &mut program.steps).op = others[random.below(6) as usize];
        }
        _ => mutate_op(&mut pick(random, &mut program.steps).op, random, weights),
    }
}

#[test]
fn what_passes_the_checks_of_a_tower_can_be_run() {
    let Some(folder) = golden::folder().map(|folder| folder.join("vision")) else { return };
    let place = Place::new();
    let (model, projector) = (folder.join("v_tiny_e.gguf"), folder.join("v_tiny_e.mmproj.gguf"));
    let files = format!("'{}' --mmproj '{}'", model.display(), projector.display());
    place.ok(&format!("compile {files} -o plan.bin --ctx 24 --chunk 8 --image-tokens 70 --target cpu"));
    let original = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    let pixels = vec![0.5; 9 * 6 * original.towers[0].medium.row_width() as usize];
    let (mut random, mut accepted, mut ran, cases) = (Random(5), 0, 0, 300);
    for case in 0..cases {
        let mut plan = original.clone();
        mutate_tower(&mut plan, &mut random);
        let Ok(bytes) = catch_unwind(|| plan.to_bytes()).unwrap_or_else(|_| panic!("{case}: checked")) else {
            continue;
        };
        accepted += 1;
        let plan = Plan::from_bytes(&bytes).unwrap();
        let looked = catch_unwind(AssertUnwindSafe(|| {
            let mut session = Session::on_cpu(plan, &location)?;
            let soft = session.look(0, Patches { values: &pixels, columns: 9, rows: 6 }, &mut |_, _, _| {})?;
            assert_eq!(soft.rows.len(), 6 * 256);
            Ok::<_, gemma4c_runtime::RuntimeError>(())
        }));
        ran += usize::from(looked.unwrap_or_else(|_| panic!("{case}: run")).is_ok());
    }
    assert!(ran > cases / 20 && accepted < cases / 2, "the cases have lost their bite: {ran} ran of {accepted}");
}

/// One change somewhere in a drafter.
fn mutate_drafter(plan: &mut Plan, random: &mut Random) {
    let weights = plan.weights.len() as u64;
    let drafter = plan.drafter.as_mut().unwrap();
    let program = &mut drafter.program;
    let values = program.values.len() as u64;
    match random.below(12) {
        0 => drafter.reads = random.below(2000) as u32,
        1 => drafter.hidden = random.below(values + 1) as u32,
        2 => program.output = random.below(values + 1) as u32,
        3 => *pick(random, &mut drafter.token_order) = random.below(1000) as u32,
        4 => pick(random, &mut program.values).width = another(random, 128),
        5 => pick(random, &mut program.caches).capacity = another(random, 24),
        6 => program.chunk = another(random, 1),
        7 => {
            let arena = program.arena_bytes;
            pick(random, &mut program.values).kind = Kind::Floats { offset: 4 * random.below(arena / 4) };
        }
        8 => {
            let step = pick(random, &mut program.steps);
            if !step.inputs.is_empty() {
                *pick(random, &mut step.inputs) = random.below(values + 1) as u32;
            }
        }
        9 => {
            let spread = Op::SpreadTokens { width: plan.model.vocab_size };
            let others = [Op::Concat, spread, Op::Tokens, Op::Gelu, Op::SubMean { group: 8 }, Op::TakeAsked];
            pick(random, &mut program.steps).op = others[random.below(6) as usize];
        }
        _ => mutate_op(&mut pick(random, &mut program.steps).op, random, weights),
    }
}

#[test]
fn what_passes_the_checks_of_a_drafter_can_be_run() {
    let Some(folder) = golden::folder() else { return };
    let place = Place::new();
    let (model, drafter) = (folder.join("e_tiny_q8_0.gguf"), folder.join("assistant/e_tiny_assistant_q8_0.gguf"));
    let files = format!("'{}' --draft '{}'", model.display(), drafter.display());
    place.ok(&format!("compile {files} -o plan.bin --ctx 24 --chunk 8 --target cpu"));
    let original = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    let (mut random, mut accepted, mut ran, cases) = (Random(6), 0, 0, 300);
    for case in 0..cases {
        let mut plan = original.clone();
        mutate_drafter(&mut plan, &mut random);
        let Ok(bytes) = catch_unwind(|| plan.to_bytes()).unwrap_or_else(|_| panic!("{case}: checked")) else {
            continue;
        };
        accepted += 1;
        let plan = Plan::from_bytes(&bytes).unwrap();
        let drafted = catch_unwind(AssertUnwindSafe(|| {
            let mut session = Session::on_cpu(plan, &location)?;
            session.feed(&[2, 5, 6, 7, 8], Asked::Last, None, |_, _| {})?;
            session.draft(9, 3, &mut |_, _, _| {}, &mut |_| {})
        }));
        ran += usize::from(drafted.unwrap_or_else(|_| panic!("{case}: run")).is_ok());
    }
    assert!(ran > cases / 20 && accepted < cases / 2, "the cases have lost their bite: {ran} ran of {accepted}");
}

/// The text side: a vocabulary that passes the checks makes a tokenizer, or an error.
#[test]
fn a_vocabulary_that_passes_the_checks_can_be_used() {
    use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 --layers 3 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --ctx 48");
    let original = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let mut random = Random(4);
    let mut used = 0;
    for case in 0..1500 {
        let mut plan = original.clone();
        let vocab = plan.vocab.as_mut().unwrap();
        let tokens = vocab.tokens.len() as u64;
        for _ in 0..1 + random.below(3) {
            let beyond = u64::from(random.below(50) == 0);
            let id = random.below(tokens + beyond) as u32;
            match random.below(7) {
                0 => pick(&mut random, &mut vocab.merges).left = id,
                1 => pick(&mut random, &mut vocab.merges).right = id,
                2 => pick(&mut random, &mut vocab.merges).result = id,
                3 => {
                    let from = *pick(&mut random, &mut vocab.kinds);
                    *pick(&mut random, &mut vocab.kinds) = from;
                }
                4 => (vocab.bos, vocab.eos) = (Some(id), vocab.bos),
                5 => vocab.unknown = [None, Some(id)][random.below(2) as usize],
                _ => {
                    let merge = *pick(&mut random, &mut vocab.merges);
                    vocab.merges.insert(random.below(100) as usize, merge);
                }
            }
        }
        let caught = catch_unwind(|| {
            let bytes = plan.to_bytes().ok()?;
            let vocab = Plan::from_bytes(&bytes).unwrap().vocab.unwrap();
            let tokenizer = Tokenizer::new(&vocab).ok()?;
            let text = "<bos>The sky above\n\n the port — naïve 東京 🚀 <|turn>user <0x0A>";
            let ids = tokenizer.encode(text, EncodeOptions { add_bos: true, parse_special: case % 2 == 0 });
            assert!(ids.iter().all(|id| u64::from(*id) < tokens));
            let all: Vec<u32> = (0..tokens as u32).chain(ids).collect();
            tokenizer.decode(&all, case % 3 == 0).map(drop).ok()
        });
        used += usize::from(caught.unwrap_or_else(|_| panic!("case {case}")).is_some());
    }
    assert!(used > 100, "the cases have lost their bite: {used}");
}

#[test]
fn compiling_twice_gives_the_same_bytes() {
    for preset in ["tiny-e", "tiny-dense", "tiny-moe"] {
        let place = Place::new();
        place.ok(&format!("synth {preset} -q q4_0 -o model.gguf"));
        place.ok("compile model.gguf -o once.bin");
        place.ok("compile model.gguf -o again.bin");
        let once = place.read("once.bin");
        assert!(once == place.read("again.bin"), "{preset}");
        assert!(Plan::from_bytes(&once).unwrap().to_bytes().unwrap() == once, "{preset}: read and written again");

        // Nor does it matter where: the model beside the plan is named from there.
        std::fs::create_dir(place.path("elsewhere")).unwrap();
        std::fs::copy(place.path("model.gguf"), place.path("elsewhere/model.gguf")).unwrap();
        place.ok("compile elsewhere/model.gguf -o elsewhere/once.bin");
        assert!(place.read("elsewhere/once.bin") == once, "{preset}: elsewhere");
    }
}
