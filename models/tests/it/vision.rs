//! The vision tower of a projector file: its graph as text, what it changes in the text's graph, and what a file that
//! does not fit is told.

use std::fmt::Write as _;

use gemma4c_blocks::DType::{self, BF16, F32};
use gemma4c_graph::{Op, to_text};
use gemma4c_models::gemma4::{self, Beside, Config, Reach, VisionConfig, VisionError, VisionTower};
use gemma4c_models::gguf::{Header, Value, Writer};
use gemma4c_models::synth::{self, Preset, Types};

/// What a projector file has beyond what all have.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Bounds on the inputs and outputs of products, as E2B and E4B.
    Clipped,
    /// Pooled rows are standardised, as in 26B-A4B and 31B.
    Standardised,
    /// No encoder, as 12B.
    Plain,
}

/// A small tower: two layers of two heads of 8, a soft token of 32. `tensor` may change a tensor or leave it out, `key`
/// a key.
fn projector(
    kind: Kind,
    key: impl Fn(&str) -> Option<Value<'static>>,
    tensor: impl Fn(&str, Vec<u64>) -> Option<(Vec<u64>, DType)>,
) -> Header {
    let mut writer = Writer::new();
    let numbers = [
        ("clip.vision.embedding_length", 16u32),
        ("clip.vision.block_count", 2),
        ("clip.vision.attention.head_count", 2),
        ("clip.vision.feed_forward_length", 24),
        ("clip.vision.patch_size", 4),
        ("clip.vision.projection_dim", 32),
    ];
    let mut keys: Vec<(&str, Value<'static>)> = numbers.map(|(name, n)| (name, n.into())).to_vec();
    keys.push(("general.architecture", "clip".into()));
    keys.push(("general.name", "a small projector".into()));
    keys.push(("clip.has_vision_encoder", true.into()));
    let projector = if kind == Kind::Plain { "gemma4uv" } else { "gemma4v" };
    keys.push(("clip.vision.projector_type", projector.into()));
    keys.push(("clip.vision.attention.layer_norm_epsilon", 1e-6f32.into()));
    for (name, value) in keys {
        writer.set(name, key(name).unwrap_or(value)).unwrap();
    }
    let mut add = |name: &str, dims: &[u64], dtype: DType| {
        if let Some((dims, changed)) = tensor(name, dims.to_vec()) {
            writer.tensor(name, &dims, if changed == F32 { dtype } else { changed }).unwrap();
        }
    };
    if kind == Kind::Plain {
        add("v.patch_embd.weight", &[432, 16], F32);
        add("v.patch_embd.bias", &[16], F32);
        for (norm, width) in [(1, 432), (2, 16), (3, 16)] {
            add(&format!("v.patch_norm.{norm}.weight"), &[width], F32);
            add(&format!("v.patch_norm.{norm}.bias"), &[width], F32);
        }
    } else {
        add("v.patch_embd.weight", &[4, 4, 3, 16], F32);
    }
    add("v.position_embd.weight", &[16, 20, 2], F32);
    add("mm.input_projection.weight", &[16, 32], BF16);
    let layers = if kind == Kind::Plain { 0 } else { 2 };
    for layer in 0..layers {
        let name = |suffix: &str| format!("v.blk.{layer}.{suffix}");
        for norm in ["ln1", "ln2", "attn_post_norm", "ffn_post_norm"] {
            add(&name(&format!("{norm}.weight")), &[16], F32);
        }
        for norm in ["attn_q_norm", "attn_k_norm"] {
            add(&name(&format!("{norm}.weight")), &[8], F32);
        }
        for (matrix, dims) in [
            ("attn_q", [16, 16]),
            ("attn_k", [16, 16]),
            ("attn_v", [16, 16]),
            ("attn_out", [16, 16]),
            ("ffn_gate", [16, 24]),
            ("ffn_up", [16, 24]),
            ("ffn_down", [24, 16]),
        ] {
            add(&name(&format!("{matrix}.weight")), &dims, BF16);
            for bound in ["input_min", "input_max", "output_min", "output_max"] {
                if kind == Kind::Clipped {
                    add(&name(&format!("{matrix}.{bound}")), &[1], F32);
                }
            }
        }
    }
    if kind == Kind::Standardised {
        add("v.std_bias", &[16], F32);
        add("v.std_scale", &[16], F32);
    }
    writer.describe().unwrap()
}

fn unchanged(_: &str, dims: Vec<u64>) -> Option<(Vec<u64>, DType)> {
    Some((dims, F32))
}

fn tower(file: &Header) -> Result<VisionTower, VisionError> {
    gemma4::vision_tower(file, &VisionConfig::read(file)?, &[])
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
    let kinds =
        [("vision-clipped", Kind::Clipped), ("vision-standardised", Kind::Standardised), ("vision-plain", Kind::Plain)];
    for (name, kind) in kinds {
        let tower = tower(&projector(kind, |_| None, unchanged)).unwrap();
        let stages: Vec<String> =
            tower.stages.iter().map(|(stage, node)| format!("{stage} is {}", tower.graph.full_name(*node))).collect();
        assert_snapshot("graphs", name, &format!("{}\n{}", to_text(&tower.graph), stages.join("\n")));
    }
}

/// A bound that a file does not have bounds nothing.
#[test]
fn a_missing_bound_is_no_fault() {
    let without =
        projector(Kind::Clipped, |_| None, |name, dims| (!name.ends_with("attn_q.input_min")).then_some((dims, F32)));
    let nodes = |file: &Header| tower(file).unwrap().graph.nodes.len();
    assert_eq!(nodes(&without) + 2, nodes(&projector(Kind::Clipped, |_| None, unchanged)));
}

/// A text model that towers make soft tokens for.
const SOFT: Beside<'_> = Beside { adapters: &[], seats: None, pad: Some(0) };

/// Where a model has no per-layer embeddings, the soft tokens of a picture see each other in the sliding layers.
#[test]
fn soft_tokens_see_ahead_in_sliding_layers() {
    let file = synth::describe(Preset::TinyDense, Types::All(DType::Q8_0)).unwrap();
    let config = Config::read(&file).unwrap();
    let graph = gemma4::graph_with(&file, &config, SOFT).unwrap();
    for node in &graph.nodes {
        let layer = node.layer.map(|layer| config.layers[layer as usize]);
        let is_sliding = layer.is_some_and(|layer| layer.attention.reach != Reach::Global);
        match node.op {
            Op::AttentionAhead { .. } => assert!(is_sliding),
            Op::Attention { .. } => assert!(!is_sliding),
            _ => {}
        }
    }
    assert!(graph.nodes.iter().any(|node| matches!(node.op, Op::AttentionAhead { .. })));
}

/// Soft tokens change two places of a text's graph and nothing else.
#[test]
fn soft_tokens_stand_in_place_of_embeddings() {
    let file = synth::describe(Preset::TinyE, Types::All(DType::Q8_0)).unwrap();
    let config = Config::read(&file).unwrap();
    let [plain, soft] = [gemma4::graph(&file, &config), gemma4::graph_with(&file, &config, SOFT)]
        .map(|graph| to_text(&graph.unwrap()).lines().skip(1).map(str::to_owned).collect::<Vec<_>>());
    let only = |a: &[String], b: &[String]| a.iter().filter(|line| !b.contains(line)).cloned().collect::<Vec<_>>();
    let (gone, new) = (only(&plain, &soft), only(&soft, &plain));
    assert_eq!((gone.len(), new.len()), (2, 3), "{gone:#?}\n{new:#?}");
    assert!(new[0].starts_with("embedding.scaled = scale(embedding.rows"), "{}", new[0]);
    assert!(new[1].starts_with("embedding.out = place_soft(embedding.scaled)"), "{}", new[1]);
    assert!(new[2].starts_with("per_layer_inputs.rows = gather_text(tokens.out"), "{}", new[2]);
}

fn text_model(hidden: u32) -> Config {
    Config {
        name: Some("a text model".into()),
        hidden,
        vocab_size: 100,
        context: 100,
        rms_eps: 1e-6,
        softcap: None,
        per_layer_width: None,
        mixture: None,
        layers: vec![],
    }
}

#[test]
fn each_projector_that_does_not_fit_is_told_why() {
    type Changed = fn(&str) -> Option<Value<'static>>;
    let keys: [(&str, Changed); 8] = [
        ("a text model", |k| (k == "general.architecture").then(|| "gemma4".into())),
        ("no vision", |k| (k == "clip.has_vision_encoder").then(|| false.into())),
        ("another kind of projector", |k| (k == "clip.vision.projector_type").then(|| "gemma3".into())),
        ("no width", |k| (k == "clip.vision.embedding_length").then(|| 0u32.into())),
        ("heads that do not divide", |k| (k == "clip.vision.attention.head_count").then(|| 3u32.into())),
        ("huge patches", |k| (k == "clip.vision.patch_size").then(|| 4000u32.into())),
        ("too many layers", |k| (k == "clip.vision.block_count").then(|| 100_000u32.into())),
        ("a bad epsilon", |k| (k == "clip.vision.attention.layer_norm_epsilon").then(|| f32::NAN.into())),
    ];
    let mut texts = String::new();
    for (name, key) in keys {
        let error = VisionConfig::read(&projector(Kind::Clipped, key, unchanged)).expect_err(name);
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    let misshapen = projector(
        Kind::Standardised,
        |_| None,
        |name, dims| match name {
            "v.std_scale" | "v.position_embd.weight" | "v.blk.1.attn_k.weight" => None,
            "v.patch_embd.weight" => Some((vec![16, 16, 3, 16], F32)),
            "v.blk.0.ln1.weight" => Some((dims, DType::F16)),
            _ => Some((dims, F32)),
        },
    );
    writeln!(texts, "tensors missing and misshapen\n    {}", tower(&misshapen).unwrap_err()).unwrap();
    let vision = VisionConfig::read(&projector(Kind::Clipped, |_| None, unchanged)).unwrap();
    assert!(gemma4::fits(&vision, &text_model(32)).is_ok());
    writeln!(texts, "another size\n    {}", gemma4::fits(&vision, &text_model(64)).unwrap_err()).unwrap();
    assert_snapshot("errors", "projector", &texts);
}
