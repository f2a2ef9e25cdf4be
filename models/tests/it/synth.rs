//! Random models as files: they open, they are the same on every machine, and they have the keys and tensors of the
//! real ones.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::golden;
use gemma4c_blocks::DType;
use gemma4c_models::gguf::{Gguf, Value};
use gemma4c_models::synth::{self, Options, Preset, SynthError, Types};

fn options(preset: Preset, dtype: DType) -> Options {
    Options { seed: 1, ..Options::new(preset, dtype) }
}

fn write(options: &Options, path: &Path) -> Gguf {
    let summary = synth::write(options, path, &|_, _| {}).unwrap();
    let gguf = Gguf::open(path).unwrap();
    assert_eq!(gguf.tensors().len(), summary.tensors);
    assert_eq!(gguf.files()[0].len, summary.file_bytes);
    gguf
}

#[test]
fn bytes_do_not_depend_on_threads_but_on_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = |threads: usize, options: &Options| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| write(options, &path));
        std::fs::read(&path).unwrap()
    };
    let plain = options(Preset::TinyE, DType::Q8_0);
    let one = bytes(1, &plain);
    assert!(one.len() > 4 << 20, "several pieces a tensor: {}", one.len());
    assert!(one == bytes(2, &plain), "two threads");
    assert!(one == bytes(3, &plain), "three threads");
    assert!(one != bytes(2, &Options { seed: 2, ..plain }), "another seed");
}

/// All presets, cut short where they are large, in a type with blocks of 32 and one with blocks of 256.
#[test]
fn every_preset_opens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (preset, dtype, layers) in [
        (Preset::TinyE, DType::Q6K, None),
        (Preset::TinyE, DType::F32, Some(3)),
        (Preset::TinyDense, DType::IQ4XS, None),
        (Preset::TinyDense, DType::F16, Some(2)),
        (Preset::TinyMoe, DType::Q4K, None),
        (Preset::TinyMoe, DType::BF16, Some(2)),
    ] {
        let options = Options { layers, ..options(preset, dtype) };
        let gguf = write(&options, &path);
        let layers = layers.unwrap_or(preset.layers());
        assert_eq!(gguf.metadata().u32("gemma4.block_count").unwrap(), layers);
        let sliding = gguf.metadata().per_layer_bool("gemma4.attention.sliding_window_pattern", layers).unwrap();
        assert!(sliding.contains(&true) && sliding.contains(&false));
        for (tensor, spec) in gguf.tensors().iter().zip(synth::tensors(&options).unwrap()) {
            assert_eq!((&*tensor.name, tensor.dims()), (&*spec.name, &*spec.dims));
            assert_eq!(tensor.dtype().unwrap(), spec.dtype);
            assert_decodes_to_sane_numbers(&gguf, &tensor.name);
        }
    }
}

fn assert_decodes_to_sane_numbers(gguf: &Gguf, name: &str) {
    let tensor = gguf.tensor(name).unwrap();
    let dtype = tensor.dtype().unwrap();
    let mut row = vec![0f32; tensor.dims()[0] as usize];
    gemma4c_blocks::decode::decode_row(dtype, gguf.data(tensor), &mut row);
    if name == "rope_freqs.weight" {
        assert_eq!((&row[..64], &row[64..]), (&[1f32; 64][..], &[1e30f32; 192][..]));
        return;
    }
    assert!(row.iter().all(|v| v.is_finite() && v.abs() < 40.0), "{name}");
    assert!(row.iter().any(|&v| v != 0.0), "{name}");
}

/// The real sizes, as headers: what differs between them, read back as a reader will.
#[test]
fn real_sizes_have_the_real_keys() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (preset, count, widths, kv_heads) in [
        (Preset::E2b, 541, [6144, 12_288], [1, 1]),
        (Preset::E4b, 666, [10_240; 2], [2, 2]),
        (Preset::Dense12b, 667, [15_360; 2], [8, 1]),
        (Preset::Moe26bA4b, 658, [2112; 2], [8, 2]),
        (Preset::Dense31b, 833, [21_504; 2], [16, 4]),
    ] {
        let options = options(preset, DType::Q4K);
        let summary = synth::write_header(&options, &path).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        assert_eq!((gguf.tensors().len(), summary.tensors), (count, count), "{preset:?}");
        let layers = preset.layers();
        let of = |key: &str| {
            let all = gguf.metadata().per_layer_u32(&format!("gemma4.{key}"), layers).unwrap();
            [all[0], all[layers as usize - 1]]
        };
        assert_eq!((of("feed_forward_length"), of("attention.head_count_kv")), (widths, kv_heads), "{preset:?}");

        // Shortened as far as it goes, in every size.
        let short = Options { layers: Some(preset.least_layers()), ..options };
        synth::write_header(&short, &path).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let sliding = gguf.metadata().array("gemma4.attention.sliding_window_pattern").unwrap();
        let sliding: Vec<Value<'_>> = sliding.iter().collect();
        assert_eq!(sliding[..2], [Value::Bool(true), Value::Bool(false)], "{preset:?}");
    }
}

#[test]
fn a_short_model_shares_keys_and_values_like_a_long_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("e2b.gguf");
    synth::write_header(&Options { layers: Some(7), ..options(Preset::E2b, DType::Q4_0) }, &path).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let metadata = gguf.metadata();
    assert_eq!(metadata.per_layer_u32("gemma4.feed_forward_length", 7).unwrap()[2..4], [6144, 12_288]);
    assert_eq!(metadata.u32("gemma4.attention.shared_kv_layers").unwrap(), 4);
    assert_eq!(
        metadata.get("gemma4.attention.head_count_kv"),
        Some(Value::U32(1)),
        "a plain number where layers agree"
    );
    assert_eq!(gguf.tensor("per_layer_token_embd.weight").unwrap().dims(), [256 * 7, 262_144]);
    assert_eq!(gguf.tensor("per_layer_model_proj.weight").unwrap().dtype().unwrap(), DType::BF16);
    assert!(gguf.tensor("blk.2.attn_k.weight").is_some() && gguf.tensor("blk.3.attn_k.weight").is_none());
}

#[test]
fn a_real_vocabulary_is_taken_over() {
    let Some(real) = golden::folder().map(|folder| folder.join("ggml-vocab-gemma-4.gguf")) else { return };
    let folder = tempfile::tempdir().unwrap();
    let options = Options { vocab: Some(real.clone()), layers: Some(2), ..options(Preset::TinyDense, DType::Q4_0) };
    let gguf = write(&options, &folder.path().join("model.gguf"));
    assert_eq!(gguf.tensor("token_embd.weight").unwrap().dims(), [256, 262_144]);
    let real = Gguf::open(real).unwrap();
    for (key, value) in real.metadata().iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
        assert!(gguf.metadata().get(key) == Some(value), "{key}");
    }
}

#[test]
fn progress_reaches_the_end_and_mistakes_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let plain = options(Preset::TinyMoe, DType::Q4_0);
    let (most, total) = (AtomicU64::new(0), AtomicU64::new(0));
    synth::write(&plain, &path, &|done, all| {
        most.fetch_max(done, Ordering::Relaxed);
        total.store(all, Ordering::Relaxed);
    })
    .unwrap();
    assert_eq!(most.into_inner(), total.into_inner());

    let error_of = |options: Options, path: &Path| synth::write(&options, path, &|_, _| {}).unwrap_err().to_string();
    let layers = error_of(Options { layers: Some(1), ..plain.clone() }, &path);
    assert_eq!(layers, "tiny-moe with 1 layers: it must have 2 to 3");
    let error = synth::write(&Options { vocab: Some(folder.path().into()), ..plain.clone() }, &path, &|_, _| {});
    assert!(matches!(error, Err(SynthError::Vocabulary(_))));
    assert!(error_of(plain, &folder.path().join("absent/model.gguf")).starts_with("cannot write"));
}

#[test]
fn massive_channels_are_refused_where_they_make_no_sense() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for size in [0.5, -3.0, f32::NAN, f32::INFINITY] {
        let options = Options { massive: Some(size), ..options(Preset::TinyE, DType::Q8_0) };
        let error = synth::write(&options, &folder.path().join("m.gguf"), &|_, _| {}).expect_err("not a size");
        assert!(error.to_string().starts_with("massive channels of "), "{error}");
    }
}

/// A model that is only described says what its file would, but for the vocabulary, and takes other types where it is
/// told.
#[test]
fn a_described_model_says_what_its_file_would() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for preset in [Preset::TinyE, Preset::TinyMoe, Preset::Dense31b] {
        let options = options(preset, DType::Q4K);
        synth::write_header(&options, &path).unwrap();
        let file = Gguf::open(&path).unwrap();
        let described = synth::describe(preset, Types::All(DType::Q4K)).unwrap();
        for (known, found) in file.tensors().iter().zip(described.tensors()) {
            assert_eq!((&known.name, known.dims(), known.len), (&found.name, found.dims(), found.len));
            assert_eq!(known.dtype().unwrap(), found.dtype().unwrap(), "{}", known.name);
        }
        assert_eq!(file.tensors().len(), described.tensors().len());
        let own = file.metadata().iter().filter(|(key, _)| !key.starts_with("tokenizer."));
        assert!(own.map(|(key, _)| key).eq(described.metadata().iter().map(|(key, _)| key)));
        assert_eq!(described.metadata().u32("gemma4.block_count").unwrap(), preset.layers());
    }
    // As llama-quantize has it: 667 tensors of 12B, 338 of them vectors, 45 of Q6_K with more bits for values and down.
    let mixed = synth::describe(Preset::Dense12b, Types::Q4KMixed).unwrap();
    let count = |dtype| mixed.tensors().iter().filter(|tensor| tensor.dtype().unwrap() == dtype).count();
    assert_eq!([DType::F32, DType::Q4K, DType::Q6K].map(count), [338, 284, 45]);
    let of = |types: Types, name: &str| {
        let described = synth::describe(Preset::TinyE, types).unwrap();
        described.tensor(name).map(|tensor| tensor.dtype().unwrap())
    };
    let trained = Types::Q4_0Trained;
    assert_eq!(of(trained, "token_embd.weight"), Some(DType::Q6K));
    assert_eq!(of(trained, "per_layer_model_proj.weight"), Some(DType::F16));
    assert_eq!(of(trained, "blk.0.attn_q.weight"), Some(DType::Q4_0));
    assert_eq!(of(Types::Q8_0WithTables(DType::Q5K), "blk.1.inp_gate.weight"), Some(DType::Q5K));
    assert_eq!(of(Types::Q8_0WithTables(DType::Q5K), "blk.1.ffn_up.weight"), Some(DType::Q8_0));
    // Blocks of 256 values do not divide the rows that an expert's down matrix has.
    let experts = synth::describe(Preset::Moe26bA4b, Types::Q4KMixed).unwrap();
    let down = |layer: u32| experts.tensor(&format!("blk.{layer}.ffn_down_exps.weight")).unwrap().dtype().unwrap();
    assert_eq!([down(0), down(3)], [DType::Q8_0, DType::Q5_0]);
}
