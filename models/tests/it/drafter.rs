//! The drafter of a model: its graph as text, and what a file that does not belong to the model is told.

use std::fmt::Write as _;

use gemma4c_blocks::DType::{self, BF16, F32};
use gemma4c_graph::to_text;
use gemma4c_models::gemma4::{self, Config, DrafterConfig, DrafterError, DrafterGraph, Reach};
use gemma4c_models::gguf::{Header, Value, Writer};
use gemma4c_models::synth::{self, Preset, Types};

const WIDTH: u64 = 32;
const CENTROIDS: u64 = 8;

struct Target {
    file: Header,
    config: Config,
}

fn target(preset: Preset) -> Target {
    let file = synth::describe(preset, Types::All(DType::Q8_0)).unwrap();
    let config = Config::read(&file).unwrap();
    Target { file, config }
}

/// A drafter of two layers, a sliding and a global one, that belongs to `target`. `key` may change a key, `tensor` the
/// shape of a tensor or leave it out.
fn drafter_file(
    target: &Config,
    has_centroids: bool,
    key: impl Fn(&str) -> Option<Value<'static>>,
    tensor: impl Fn(&str, Vec<u64>) -> Option<Vec<u64>>,
) -> Header {
    let of = |is_sliding: bool| {
        let is_kind = |layer: &&gemma4::Layer| matches!(layer.attention.reach, Reach::Sliding { .. }) == is_sliding;
        target.layers.iter().find(is_kind).unwrap().attention
    };
    let (sliding, global) = (of(true), of(false));
    let Reach::Sliding { window } = sliding.reach else { unreachable!() };
    let heads = sliding.kv_heads.max(global.kv_heads) * 2;
    let numbers = [
        ("block_count", 2),
        ("embedding_length", WIDTH as u32),
        ("embedding_length_out", target.hidden),
        ("feed_forward_length", 64),
        ("attention.head_count", heads),
        ("attention.sliding_window", window),
        ("attention.shared_kv_layers", 2),
        ("attention.key_length_swa", sliding.head_dim),
        ("attention.key_length", global.head_dim),
        ("embedding_length_per_layer_input", 0),
    ];
    let floats = [
        ("attention.layer_norm_rms_epsilon", 1e-6),
        ("rope.freq_base", global.rope_base),
        ("rope.freq_base_swa", sliding.rope_base),
    ];
    let mut writer = Writer::new();
    let mut set = |name: &str, value: Value<'static>| {
        writer.set(name, key(name).unwrap_or(value)).unwrap();
    };
    set("general.architecture", "gemma4-assistant".into());
    set("general.name", "a small drafter".into());
    for (name, value) in numbers {
        set(&format!("gemma4-assistant.{name}"), value.into());
    }
    for (name, value) in floats {
        set(&format!("gemma4-assistant.{name}"), value.into());
    }
    let kv_heads = "gemma4-assistant.attention.head_count_kv";
    match key(kv_heads) {
        Some(value) => writer.set(kv_heads, value).unwrap(),
        None => writer.set_array(kv_heads, [sliding.kv_heads, global.kv_heads]).unwrap(),
    }
    writer.set_array("gemma4-assistant.attention.sliding_window_pattern", [true, false]).unwrap();
    let mut add = |name: &str, dims: &[u64], dtype: DType| {
        if let Some(dims) = tensor(name, dims.to_vec()) {
            writer.tensor(name, &dims, dtype).unwrap();
        }
    };
    let (vocab, hidden) = (target.vocab_size as u64, target.hidden as u64);
    add("token_embd.weight", &[WIDTH, vocab], BF16);
    add("output_norm.weight", &[WIDTH], F32);
    add("rope_freqs.weight", &[global.head_dim as u64 / 2], F32);
    add("nextn.pre_projection.weight", &[2 * hidden, WIDTH], BF16);
    add("nextn.post_projection.weight", &[WIDTH, hidden], BF16);
    if has_centroids {
        add("masked_embd_centroids.weight", &[WIDTH, CENTROIDS], BF16);
        // Only that it is there is looked at: its values are read from the file.
        add("masked_embd_ordering", &[vocab], F32);
    }
    for (layer, attention) in [sliding, global].into_iter().enumerate() {
        let name = |suffix: &str| format!("blk.{layer}.{suffix}.weight");
        let (head_dim, query) = (attention.head_dim as u64, (heads * attention.head_dim) as u64);
        for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            add(&name(norm), &[WIDTH], F32);
        }
        add(&name("attn_q_norm"), &[head_dim], F32);
        add(&name("layer_output_scale"), &[1], F32);
        add(&name("attn_q"), &[WIDTH, query], BF16);
        add(&name("attn_output"), &[query, WIDTH], BF16);
        add(&name("ffn_gate"), &[WIDTH, 64], BF16);
        add(&name("ffn_up"), &[WIDTH, 64], BF16);
        add(&name("ffn_down"), &[64, WIDTH], BF16);
    }
    writer.describe().unwrap()
}

fn unchanged(_: &str, dims: Vec<u64>) -> Option<Vec<u64>> {
    Some(dims)
}

fn drafter(file: &Header, target: &Target) -> Result<DrafterGraph, DrafterError> {
    let config = DrafterConfig::read(file, &target.file, &target.config)?;
    gemma4::drafter(file, &config, &target.file, &target.config)
}

fn assert_snapshot(area: &str, name: &str, text: &str) {
    insta::with_settings!({
        snapshot_path => format!("../../../snapshots/{area}"),
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!(name, text) });
}

#[test]
fn drafters_as_graphs() {
    let target = target(Preset::TinyE);
    for (name, has_centroids) in [("drafter-centroids", true), ("drafter-plain", false)] {
        let drafter = drafter(&drafter_file(&target.config, has_centroids, |_| None, unchanged), &target).unwrap();
        let next = drafter.graph.full_name(drafter.hidden);
        assert_snapshot("graphs", name, &format!("{}next hidden state {next}\n", to_text(&drafter.graph)));
    }
}

#[test]
fn a_drafter_reads_the_last_layers_that_own_keys() {
    let target = target(Preset::TinyE);
    let config = drafter_file(&target.config, true, |_| None, unchanged);
    let drafter = drafter(&config, &target).unwrap();
    let owners: Vec<u32> = (0..)
        .zip(&target.config.layers)
        .filter(|(_, layer)| !matches!(layer.attention.keys, gemma4::Keys::SharedWith { .. }))
        .map(|(index, _)| index)
        .collect();
    let mut read: Vec<u32> = drafter.graph.caches.iter().map(|cache| cache.layer).collect();
    read.sort_unstable();
    assert_eq!(read, owners[owners.len() - 2..]);
}

#[test]
fn each_drafter_that_does_not_fit_is_told_why() {
    let ours = target(Preset::TinyE);
    type Changed = fn(&str) -> Option<Value<'static>>;
    let keys: [(&str, Changed); 11] = [
        ("a text model", |k| (k == "general.architecture").then(|| "gemma4".into())),
        ("a model of another width", |k| k.ends_with("embedding_length_out").then(|| 99u32.into())),
        ("other kv heads", |k| k.ends_with("head_count_kv").then(|| 3u32.into())),
        ("another window", |k| k.ends_with("attention.sliding_window").then(|| 7u32.into())),
        ("another head size", |k| k.ends_with("key_length").then(|| 16u32.into())),
        ("another rotation", |k| k.ends_with("freq_base").then(|| 5e5f32.into())),
        ("keys of its own", |k| k.ends_with("shared_kv_layers").then(|| 1u32.into())),
        ("per-layer embeddings", |k| k.ends_with("per_layer_input").then(|| 256u32.into())),
        ("no layers", |k| k.ends_with("block_count").then(|| 0u32.into())),
        ("too many heads", |k| k.ends_with("attention.head_count").then(|| (1u32 << 23).into())),
        ("a bad epsilon", |k| k.ends_with("epsilon").then(|| f32::NAN.into())),
    ];
    let mut texts = String::new();
    for (name, key) in keys {
        let error = drafter(&drafter_file(&ours.config, true, key, unchanged), &ours).expect_err(name);
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    type Shaped = fn(&str, Vec<u64>) -> Option<Vec<u64>>;
    let tensors: [(&str, Shaped); 5] = [
        ("another vocabulary", |n, d| Some(if n == "token_embd.weight" { vec![32, 10] } else { d })),
        ("no order of tokens", |n, d| (n != "masked_embd_ordering").then_some(d)),
        ("an order without centroids", |n, d| (n != "masked_embd_centroids.weight").then_some(d)),
        ("centroids that do not divide the tokens", |n, d| {
            Some(if n == "masked_embd_centroids.weight" { vec![32, 7] } else { d })
        }),
        ("tensors missing and misshapen", |n, d| match n {
            "blk.1.attn_q.weight" | "output_norm.weight" => None,
            "nextn.pre_projection.weight" => Some(vec![32, 32]),
            _ => Some(d),
        }),
    ];
    for (name, tensor) in tensors {
        let error = drafter(&drafter_file(&ours.config, true, |_| None, tensor), &ours).expect_err(name);
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    let other = target(Preset::TinyDense);
    let error = drafter(&drafter_file(&other.config, false, |_| None, unchanged), &ours).unwrap_err();
    writeln!(texts, "a drafter for a model of another family\n    {error}").unwrap();
    assert_snapshot("errors", "drafter", &texts);
}
