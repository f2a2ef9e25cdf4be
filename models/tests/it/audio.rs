//! The tower for sound of a projector file: its graph as text, and what a file that does not fit is told.

use std::fmt::Write as _;

use gemma4c_blocks::DType::{BF16, F32};
use gemma4c_graph::to_text;
use gemma4c_models::gemma4::{self, AudioConfig};
use gemma4c_models::gguf::{Header, Value, Writer};

/// A small conformer: two layers of two heads of 8, features of 8 bins, a soft token of 32; or frames of 10 samples
/// without one.
fn projector(
    has_encoder: bool,
    key: impl Fn(&str) -> Option<Value<'static>>,
    tensor: impl Fn(&str, &[u64]) -> Option<Vec<u64>>,
) -> Header {
    let mut writer = Writer::new();
    let width = if has_encoder { 16u32 } else { 10 };
    let keys: Vec<(&str, Value<'static>)> = vec![
        ("general.architecture", "clip".into()),
        ("clip.has_audio_encoder", true.into()),
        ("clip.audio.projector_type", if has_encoder { "gemma4a" } else { "gemma4ua" }.into()),
        ("clip.audio.embedding_length", width.into()),
        ("clip.audio.feed_forward_length", 24u32.into()),
        ("clip.audio.block_count", 2u32.into()),
        ("clip.audio.attention.head_count", 2u32.into()),
        ("clip.audio.num_mel_bins", 8u32.into()),
        ("clip.audio.projection_dim", 32u32.into()),
    ];
    for (name, value) in keys {
        writer.set(name, key(name).unwrap_or(value)).unwrap();
    }
    let mut add = |name: &str, dims: &[u64]| {
        let dtype = if dims.len() == 2 && !name.ends_with("conv_dw.weight") { BF16 } else { F32 };
        if let Some(dims) = tensor(name, dims) {
            writer.tensor(name, &dims, dtype).unwrap();
        }
    };
    if !has_encoder {
        add("mm.a.input_projection.weight", &[10, 32]);
        return writer.describe().unwrap();
    }
    add("a.conv1d.0.weight", &[3, 3, 1, 4]);
    add("a.conv1d.0.norm.weight", &[4]);
    add("a.conv1d.1.weight", &[3, 3, 4, 2]);
    add("a.conv1d.1.norm.weight", &[2]);
    add("a.input_projection.weight", &[4, 16]);
    add("a.pre_encode.out.weight", &[16, 20]);
    add("a.pre_encode.out.bias", &[20]);
    add("mm.a.input_projection.weight", &[20, 32]);
    for layer in 0..2 {
        let name = |suffix: &str| format!("a.blk.{layer}.{suffix}.weight");
        for norm in ["attn_pre_norm", "attn_post_norm", "conv_norm", "norm_conv", "ln2"] {
            add(&name(norm), &[16]);
        }
        for ending in ["", "_1"] {
            add(&name(&format!("ffn_norm{ending}")), &[16]);
            add(&name(&format!("ffn_up{ending}")), &[16, 24]);
            add(&name(&format!("ffn_down{ending}")), &[24, 16]);
            add(&name(&format!("ffn_post_norm{ending}")), &[16]);
        }
        for matrix in ["attn_q", "attn_k", "attn_v", "attn_k_rel", "attn_out", "conv_pw2"] {
            add(&name(matrix), &[16, 16]);
        }
        add(&name("conv_pw1"), &[16, 32]);
        add(&name("conv_dw"), &[5, 16]);
        add(&name("per_dim_scale"), &[8]);
        add(&format!("a.blk.{layer}.attn_q.input_min"), &[1]);
        add(&format!("a.blk.{layer}.attn_q.input_max"), &[1]);
    }
    writer.describe().unwrap()
}

fn assert_snapshot(area: &str, name: &str, text: &str) {
    insta::with_settings!({
        snapshot_path => format!("../../../snapshots/{area}"),
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!(name, text) });
}

#[test]
fn towers_as_graphs() {
    for (name, has_encoder) in [("audio-conformer", true), ("audio-samples", false)] {
        let file = projector(has_encoder, |_| None, |_, dims| Some(dims.to_vec()));
        let tower = gemma4::audio_tower(&file, &AudioConfig::read(&file).unwrap(), &[]).unwrap();
        let stages: Vec<String> =
            tower.stages.iter().map(|(stage, node)| format!("{stage} is {}", tower.graph.full_name(*node))).collect();
        assert_snapshot("graphs", name, &format!("{}\n{}", to_text(&tower.graph), stages.join("\n")));
    }
}

#[test]
fn each_projector_that_does_not_fit_is_told_why() {
    type Changed = fn(&str) -> Option<Value<'static>>;
    let keys: [(&str, Changed); 5] = [
        ("another kind of projector", |k| (k == "clip.audio.projector_type").then(|| "ultravox".into())),
        ("no width", |k| (k == "clip.audio.embedding_length").then(|| 0u32.into())),
        ("heads that do not divide", |k| (k == "clip.audio.attention.head_count").then(|| 3u32.into())),
        ("bins that cannot be halved twice", |k| (k == "clip.audio.num_mel_bins").then(|| 6u32.into())),
        ("too many layers", |k| (k == "clip.audio.block_count").then(|| 100_000u32.into())),
    ];
    let mut texts = String::new();
    for (name, key) in keys {
        let error = AudioConfig::read(&projector(true, key, |_, dims| Some(dims.to_vec()))).expect_err(name);
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    let misshapen = projector(
        true,
        |_| None,
        |name, dims| match name {
            "a.conv1d.1.weight" | "a.blk.1.attn_k_rel.weight" => None,
            "a.blk.0.conv_dw.weight" => Some(vec![7, 16]),
            "a.conv1d.0.weight" => Some(vec![5, 5, 1, 4]),
            _ => Some(dims.to_vec()),
        },
    );
    let error = gemma4::audio_tower(&misshapen, &AudioConfig::read(&misshapen).unwrap(), &[]).unwrap_err();
    writeln!(texts, "tensors missing and misshapen\n    {error}").unwrap();
    assert_snapshot("errors", "projector-audio", &texts);
}
