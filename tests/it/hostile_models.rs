//! The way from a model file to a plan, with metadata and tensor tables that lie: no panic, no hang, and no more memory
//! than the file's size and 64 MB. That the file is well-formed as a GGUF is another test's business; here it always
//! is.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::gguf::{Key, rewrite_header, same};
use crate::common::{Place, Random};
use crate::counting_allocator::peak_during;
use gemma4c_blocks::DType;
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_graph::to_text;
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::{Gguf, TensorInfo, Value, Writer};
use gemma4c_models::synth::{self, Preset};
use gemma4c_models::tokenizer::vocab_from_metadata;
use gemma4c_plan::cuda::KvType;

/// The files are mapped, so all that is held is beyond their size.
const MOST_HELD: usize = 64 << 20;

/// All the compiler does with a file, short of writing the plan.
fn compile(path: &Path) -> Result<usize, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let file = Gguf::open(path).map_err(|e| text(&e))?;
    let config = Config::read(&file).map_err(|e| text(&e))?;
    let graph = gemma4::graph(&file, &config).map_err(|e| text(&e))?;
    let context = config.context.min(8192);
    let limits = Limits { context, chunk: context.min(256), asked: context.min(32), kv: KvType::F16 };
    let program = cpu::lower(&graph, limits).map_err(|e| text(&e))?;
    vocab_from_metadata(file.metadata()).map_err(|e| text(&e))?;
    Ok(program.steps.len() + to_text(&graph).len())
}

/// Compiles a file and keeps the promises; says whether it was accepted.
fn check(path: &Path, what: &str) -> bool {
    let start = Instant::now();
    let caught = std::panic::catch_unwind(|| peak_during(|| compile(path)));
    let (result, peak) = caught.unwrap_or_else(|_| panic!("{what}: a panic"));
    assert!(peak <= MOST_HELD, "{what}: {peak} bytes held");
    assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", start.elapsed());
    if let Err(message) = &result {
        assert!(message.len() < 64 << 10, "{what}: a message of {} bytes", message.len());
    }
    result.is_ok()
}

/// Numbers that break arithmetic done on trust, and some that are merely wrong.
const NASTY: [Value<'static>; 22] = [
    Value::U32(0),
    Value::U32(1),
    Value::U32(2),
    Value::U32(3),
    Value::U32(255),
    Value::U32(65_536),
    Value::U32(65_537),
    Value::U32(1 << 24),
    Value::U32((1 << 24) + 1),
    Value::U32(1 << 31),
    Value::U32(u32::MAX),
    Value::I32(-1),
    Value::U64(u64::MAX),
    Value::U64(1 << 32),
    Value::F32(0.0),
    Value::F32(-1.0),
    Value::F32(f32::NAN),
    Value::F32(f32::INFINITY),
    Value::F64(1e300),
    Value::Bool(true),
    Value::Bool(false),
    Value::Str("gemma4"),
];

/// The model whose header is bent; its weights are a hole.
fn model(place: &Place, preset: Preset) -> Gguf {
    let options = synth::Options::new(preset, DType::Q8_0);
    synth::write_header(&options, &place.path("model.gguf")).unwrap();
    assert!(check(&place.path("model.gguf"), "the model itself"));
    Gguf::open(place.path("model.gguf")).unwrap()
}

#[test]
fn every_key_may_be_anything_or_missing() {
    for preset in [Preset::TinyE, Preset::TinyDense, Preset::TinyMoe] {
        let place = Place::new();
        let (original, to) = (model(&place, preset), place.path("bent.gguf"));
        let (mut cases, mut accepted) = (0, 0);
        let mut try_with = |what: &str, key: &str, new: Option<Value<'static>>| {
            let edit = |name: &str| match (name == key, new) {
                (false, _) => Key::Keep,
                (true, None) => Key::Drop,
                (true, Some(value)) => Key::Set(value),
            };
            rewrite_header(&original, &to, edit, same);
            cases += 1;
            accepted += usize::from(check(&to, &format!("{}: {key} {what}", preset.name())));
        };
        for (key, _) in original.metadata().iter() {
            try_with("missing", key, None);
            for value in NASTY {
                try_with(&format!("{value:?}"), key, Some(value));
            }
        }
        eprintln!("{}: {cases} cases, {accepted} accepted", preset.name());
        assert!(accepted < cases / 2, "most such models make no sense: {accepted} of {cases}");
    }
}

/// Several numbers wrong together: a width that two lies agree on is harder to notice.
#[test]
fn several_keys_may_lie_together() {
    let place = Place::new();
    let (original, to) = (model(&place, Preset::TinyMoe), place.path("bent.gguf"));
    let keys: Vec<&str> = original.metadata().iter().map(|(key, _)| key).filter(|k| k.starts_with("gemma4.")).collect();
    let mut random = Random(6);
    for case in 0..600 {
        let lies: Vec<(&str, Value<'static>)> = (0..2 + random.below(4))
            .map(|_| {
                let key = keys[random.below(keys.len() as u64) as usize];
                (key, NASTY[random.below(NASTY.len() as u64) as usize])
            })
            .collect();
        let edit = |name: &str| match lies.iter().find(|(key, _)| *key == name) {
            Some((_, value)) => Key::Set(*value),
            None => Key::Keep,
        };
        // Without tensors the metadata has nothing to disagree with until the very end.
        let with_tensors = random.below(2) == 0;
        rewrite_header(&original, &to, edit, |tensor| same(tensor).filter(|_| with_tensors));
        check(&to, &format!("case {case}: {lies:?}"));
    }
}

#[test]
fn every_tensor_may_be_missing_or_of_another_shape() {
    for preset in [Preset::TinyE, Preset::TinyMoe] {
        let place = Place::new();
        let (original, to) = (model(&place, preset), place.path("bent.gguf"));
        for (i, target) in original.tensors().iter().enumerate() {
            let dims = target.dims();
            let shapes = [None, Some(vec![dims[0]]), Some(vec![dims[0], 1, 2, 3]), Some([dims, &[1]].concat())];
            // One of them for each tensor, in turn: every tensor is wrong, and every way of being wrong is tried.
            let shape = &shapes[i % shapes.len()];
            let bend = |tensor: &TensorInfo| match tensor.name == target.name {
                true => shape.clone(),
                false => same(tensor),
            };
            rewrite_header(&original, &to, |_| Key::Keep, bend);
            let unchanged = shape.as_deref() == Some(dims);
            assert_eq!(check(&to, &format!("{} {shape:?}", target.name)), unchanged, "{} {shape:?}", target.name);
        }
    }
}

/// As many layers as a header can claim in few bytes, and none of their tensors.
#[test]
fn crowds_of_layers_stay_within_bounds() {
    let place = Place::new();
    let original = model(&place, Preset::TinyMoe);
    for layers in [1000u32, 1024, 1025, 65_536] {
        let mut writer = Writer::new();
        for (key, value) in original.metadata().iter() {
            match key {
                "gemma4.block_count" => writer.set(key, layers).unwrap(),
                _ if key.ends_with("sliding_window_pattern") => {
                    writer.set_array(key, (0..layers).map(|i| i % 3 != 2)).unwrap();
                }
                _ if key.ends_with("head_count_kv") => writer.set(key, 1u32).unwrap(),
                _ => writer.set(key, value).unwrap(),
            }
        }
        writer.create(place.path("crowd.gguf")).unwrap().finish().unwrap();
        assert!(!check(&place.path("crowd.gguf"), &format!("{layers} layers")));
    }
}
