//! What is read from a model file: the configs of the five sizes, and the graphs and plans that follow from them.
//!
//! The files are headers: a synthetic model with every key and tensor of its size, whose weights are a hole on the
//! disk.

use std::fmt::Write;

use crate::common::{Place, golden};
use gemma4c_blocks::DType;
use gemma4c_models::synth::{self, Preset};
use serde_json::{Value, json};

/// What is published about a size. The two numbers of a pair are for sliding and for global layers.
struct Size {
    preset: Preset,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: (u64, u64),
    ffn: u64,
    /// Every so many layers one is global, the last of them.
    period: u64,
    window: u64,
    context: u64,
    /// The last layers share keys: how many, their width, and whose keys.
    shared: Option<(u64, u64, (u64, u64))>,
    per_layer_width: Option<u64>,
    values_from_keys: bool,
    experts: Option<(u64, u64, u64)>,
}

const SIZES: [Size; 5] = [
    Size {
        preset: Preset::E2b,
        hidden: 1536,
        layers: 35,
        heads: 8,
        kv_heads: (1, 1),
        ffn: 6144,
        period: 5,
        window: 512,
        context: 131_072,
        shared: Some((20, 12_288, (13, 14))),
        per_layer_width: Some(256),
        values_from_keys: false,
        experts: None,
    },
    Size {
        preset: Preset::E4b,
        hidden: 2560,
        layers: 42,
        heads: 8,
        kv_heads: (2, 2),
        ffn: 10_240,
        period: 6,
        window: 512,
        context: 131_072,
        shared: Some((18, 10_240, (22, 23))),
        per_layer_width: Some(256),
        values_from_keys: false,
        experts: None,
    },
    Size { preset: Preset::Dense12b, hidden: 3840, layers: 48, heads: 16, kv_heads: (8, 1), ffn: 15_360, ..LARGE },
    Size {
        preset: Preset::Moe26bA4b,
        hidden: 2816,
        layers: 30,
        heads: 16,
        kv_heads: (8, 2),
        ffn: 2112,
        experts: Some((128, 8, 704)),
        ..LARGE
    },
    Size { preset: Preset::Dense31b, hidden: 5376, layers: 60, heads: 32, kv_heads: (16, 4), ffn: 21_504, ..LARGE },
];

/// What the three larger sizes have in common.
const LARGE: Size = Size {
    preset: Preset::Dense31b,
    hidden: 0,
    layers: 0,
    heads: 0,
    kv_heads: (0, 0),
    ffn: 0,
    period: 6,
    window: 1024,
    context: 262_144,
    shared: None,
    per_layer_width: None,
    values_from_keys: true,
    experts: None,
};

impl Size {
    /// The config as `gemma4c inspect --json` gives it, but for the name.
    fn config(&self) -> Value {
        let layers = (0..self.layers).map(|i| {
            let is_global = (i + 1) % self.period == 0;
            let of = |pair: (u64, u64)| if is_global { pair.1 } else { pair.0 };
            let shared = self.shared.filter(|(count, ..)| i >= self.layers - count);
            let keys = match shared {
                Some((_, _, donors)) => format!("of layer {}", of(donors)),
                None if is_global && self.values_from_keys => "own, values from keys".into(),
                None => "own".into(),
            };
            json!({
                "window": (!is_global).then_some(self.window),
                "heads": self.heads,
                "kv_heads": of(self.kv_heads),
                "head_dim": of((256, 512)),
                "rope_base": if is_global { 1e6 } else { 1e4 },
                "keys": keys,
                "ffn": shared.map_or(self.ffn, |(_, ffn, _)| ffn),
            })
        });
        json!({
            "hidden": self.hidden,
            "vocab_size": 262_144,
            "context": self.context,
            "rms_eps": 1e-6f32,
            "softcap": 30.0,
            "per_layer_width": self.per_layer_width,
            "mixture": self.experts.map(|(experts, used, ffn)| json!({"experts": experts, "used": used, "ffn": ffn})),
            "layers": layers.collect::<Vec<_>>(),
        })
    }
}

/// A model of full size whose weights are a hole.
fn header(place: &Place, preset: Preset, dtype: DType, name: &str) {
    let options = synth::Options::new(preset, dtype);
    synth::write_header(&options, &place.path(name)).expect("a header is written");
}

/// `inspect --json` of a file, without the model's name.
fn config(place: &Place, file: &str) -> Value {
    let mut config: Value = serde_json::from_str(&place.ok(&format!("inspect '{file}' --json"))).expect("JSON");
    config.as_object_mut().expect("an object").shift_remove("name").expect("a name");
    config.as_object_mut().expect("an object").shift_remove("contents").expect("what is in the file");
    config
}

#[test]
fn configs_of_the_five_sizes_are_as_published() {
    let place = Place::new();
    let mut texts = String::new();
    for size in SIZES {
        let file = format!("{}.gguf", size.preset.name());
        header(&place, size.preset, DType::Q4_0, &file);
        assert_eq!(config(&place, &file), size.config(), "{file}");
        writeln!(texts, "==> gemma4c inspect {file}\n{}", place.ok(&format!("inspect {file}"))).expect("a string");
    }
    assert_text!("models", "configs", texts);
}

/// The metadata here is a real file's, written by the usual converter.
#[test]
fn the_config_of_26b_a4b_is_read_from_a_real_header() {
    let Some(folder) = golden::folder() else { return };
    let place = Place::new();
    let file = folder.join("ggml-vocab-gemma-4.gguf");
    let expected = &SIZES[3];
    assert_eq!(expected.preset, Preset::Moe26bA4b);
    assert_eq!(config(&place, &file.display().to_string()), expected.config());
}

/// The graphs of the tiny models, in full; those of the real sizes differ in numbers and in how often a layer repeats.
#[test]
fn graphs_of_the_tiny_models() {
    let place = Place::new();
    for preset in [Preset::TinyE, Preset::TinyDense, Preset::TinyMoe] {
        let name = preset.name();
        header(&place, preset, DType::Q8_0, "model.gguf");
        let graph = place.ok("inspect model.gguf --graph");
        place.ok("compile model.gguf -o plan.bin");
        assert_eq!(place.ok("inspect plan.bin --graph"), graph, "{name}: a plan carries its graph");
        assert_text!("graphs", name, graph);
    }
}

/// What a plan says of itself for each size: how many steps, and the memory it will take, to the byte.
#[test]
fn plans_of_the_five_sizes() {
    let place = Place::new();
    let mut texts = String::new();
    for size in SIZES {
        let name = size.preset.name();
        header(&place, size.preset, DType::Q4_0, "model.gguf");
        place.ok("compile model.gguf -o plan.bin --target cpu");
        let text = place.ok("inspect plan.bin");
        let without_fingerprint = text.lines().filter(|line| !line.starts_with("fingerprint"));
        let text: String = without_fingerprint.map(|line| format!("{line}\n")).collect();
        writeln!(texts, "==> {name}\n{text}").expect("a string");

        let graph = place.ok("inspect plan.bin --graph");
        let repeated = graph.lines().filter(|line| line.starts_with("layer")).collect::<Vec<_>>().join("\n");
        writeln!(texts, "{}\n{repeated}\n", graph.lines().next().unwrap_or_default()).expect("a string");
    }
    assert_text!("models", "plans", texts);
}

/// A layer's drawing is for Graphviz; that it is drawn right is a test of the graph's.
#[test]
fn a_layer_can_be_drawn() {
    let place = Place::new();
    header(&place, Preset::TinyE, DType::Q8_0, "model.gguf");
    let dot = place.ok("inspect model.gguf --dot 4");
    assert!(dot.starts_with("digraph {") && dot.contains("blk.4.attention.q\\nrope"), "{dot}");
    assert!(!dot.contains("blk.5.") && !dot.contains("head.out"), "{dot}");
}
