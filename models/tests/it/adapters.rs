//! Adapters whose bytes or settings are changed at random: each is applied whole or refused with one sentence, without
//! a panic, and with no more memory than the file and some megabytes.
//!
//! `GEMMA4C_EXHAUSTIVE=1` tries 2,000 of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::counting_allocator::peak_during;
use gemma4c_blocks::DType;
use gemma4c_models::adapter::{self, Part};
use gemma4c_models::gemma4::{self, Beside, Config};
use gemma4c_models::gguf::{Header, Writer};
use gemma4c_models::synth::{self, Preset, Types};

/// What reading a small adapter may hold beyond its size.
const SLACK: usize = 16 << 20;
const RANK: u64 = 4;

/// A base, and the matrices that adapters of it change: names, inputs, outputs, experts.
struct Base {
    header: Header,
    config: Config,
    matrices: Vec<(String, [u64; 3])>,
}

impl Base {
    fn new(preset: Preset) -> Base {
        let header = synth::describe(preset, Types::All(DType::Q8_0)).unwrap();
        let config = Config::read(&header).unwrap();
        let graph = gemma4::graph(&header, &config).unwrap();
        let is_changed = |name: &str| name.starts_with("blk.") && !name.contains("_inp.");
        let matrices = graph.weights.iter().filter(|weight| is_changed(&weight.name) && weight.dims.len() > 1);
        let matrices = matrices.map(|weight| (weight.name.clone(), [weight.dim(0), weight.dim(1), weight.dim(2)]));
        let matrices = matrices.collect();
        Base { header, config, matrices }
    }

    /// The whole way from a path to a graph; how many pairs were applied.
    fn apply(&self, path: &Path) -> Result<usize, String> {
        let adapter = adapter::read(path).and_then(|stored| {
            let _ = stored.summary();
            stored.of_model(&self.config, &[Part::Text])
        });
        let adapter = adapter.map_err(|error| error.to_string())?;
        let beside = Beside { adapters: &[(&adapter, 1.0)], ..Beside::default() };
        let graph = gemma4::graph_with(&self.header, &self.config, beside).map_err(|error| error.to_string())?;
        let declared = graph.weights.iter().filter(|weight| weight.name.contains(".lora_")).count();
        assert_eq!(declared, 2 * adapter.pairs.len(), "every pair is declared");
        for weight in graph.weights.iter().filter(|weight| weight.name.contains(".lora_")) {
            let id = graph.weights.iter().position(|other| other.name == weight.name).unwrap();
            let is_read = graph.nodes.iter().any(|node| node.op.weight().is_some_and(|weight| weight.index() == id));
            assert!(is_read, "{} is declared, and no product reads it", weight.name);
        }
        Ok(adapter.pairs.len())
    }

    /// Keeps the promises for what is at a path, and says whether it was applied.
    fn check(&self, path: &Path, what: &str) -> bool {
        let start = Instant::now();
        let (result, peak) =
            peak_during(|| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.apply(path))));
        let result = result.unwrap_or_else(|_| panic!("{what}: a panic"));
        assert!(peak <= SLACK, "{what}: {peak} bytes held");
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", start.elapsed());
        if let Err(message) = &result {
            let is_one_sentence = message.len() < 2048 && !message.contains('\n') && message.len() > 20;
            assert!(is_one_sentence && message.contains("adapter"), "{what}: {message:?}");
        }
        result.is_ok()
    }

    fn write_gguf(&self, path: &Path) {
        let mut writer = Writer::new();
        for (key, value) in [("general.type", "adapter"), ("general.architecture", "gemma4"), ("adapter.type", "lora")]
        {
            writer.set(key, value).unwrap();
        }
        writer.set("adapter.lora.alpha", 8.0f32).unwrap();
        for (name, [inputs, outputs, experts]) in &self.matrices {
            let dims = |dims: [u64; 3]| if *experts == 1 { dims[..2].to_vec() } else { dims.to_vec() };
            writer.tensor(&format!("{name}.lora_a"), &dims([*inputs, RANK, *experts]), DType::F16).unwrap();
            writer.tensor(&format!("{name}.lora_b"), &dims([RANK, *outputs, *experts]), DType::F16).unwrap();
        }
        writer.create(path).unwrap().finish().unwrap();
    }

    /// The same pairs as PEFT saves them.
    fn write_peft(&self, folder: &Path) {
        let (mut entries, mut at) = (Vec::new(), 0);
        for (name, [inputs, outputs, experts]) in &self.matrices {
            let module = format!("base_model.model.model.language_model.{}", module(name));
            for (half, [rows, columns]) in [("A", [RANK * experts, *inputs]), ("B", [*outputs, RANK * experts])] {
                let end = at + 2 * rows * columns;
                entries.push(format!(
                    r#""{module}.lora_{half}.weight":{{"dtype":"BF16","shape":[{rows},{columns}],"data_offsets":[{at},{end}]}}"#
                ));
                at = end;
            }
        }
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + at as usize, 0);
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
        fs::write(folder.join("adapter_config.json"), CONFIG).unwrap();
    }
}

const CONFIG: &str = r#"{"peft_type": "LORA", "base_model_name_or_path": "google/gemma-4", "r": 4, "lora_alpha": 8,
"rank_pattern": {"layers.1.self_attn.q_proj": 4}, "alpha_pattern": {"o_proj": 16}, "use_rslora": false, "bias": "none",
"use_dora": false, "modules_to_save": null, "fan_in_fan_out": false, "init_lora_weights": true, "target_modules":
["q_proj", "v_proj"], "target_parameters": null, "layer_replication": null, "lora_bias": false}"#;

/// What PEFT calls the module of a tensor of a layer.
fn module(name: &str) -> String {
    let (layer, tensor) = name.strip_prefix("blk.").unwrap().split_once('.').unwrap();
    let module = match tensor.strip_suffix(".weight").unwrap() {
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "inp_gate" => "per_layer_input_gate",
        "proj" => "per_layer_projection",
        "ffn_gate_up_exps" => "experts.base_layer",
        "ffn_down_exps" => "experts",
        other => panic!("{other}"),
    };
    format!("layers.{layer}.{module}")
}

/// Splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

/// Changes some bytes of the first `header` ones, or the length. Letters and digits become others half of the time, so
/// that names, sizes and JSON stay what they are and say something else.
fn mutate(bytes: &[u8], header: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    match random.below(8) {
        0 => bytes.truncate(random.below(bytes.len())),
        1 => {
            let (from, to) = (random.below(header), random.below(header));
            let len = 1 + random.below(24);
            let part = bytes[from..(from + len).min(bytes.len())].to_vec();
            bytes.splice(to..to, part);
        }
        2 => {
            let from = random.below(header);
            let to = (from + 1 + random.below(24)).min(bytes.len());
            bytes.drain(from..to);
        }
        _ => {
            for _ in 0..1 + random.below(4) {
                let at = random.below(header);
                bytes[at] = match bytes[at] {
                    b'0'..=b'9' if random.below(2) == 0 => b'0' + random.below(10) as u8,
                    b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'.' if random.below(2) == 0 => b'a' + random.below(26) as u8,
                    _ => random.below(256) as u8,
                };
            }
        }
    }
    bytes
}

/// What a setting may be made.
const NASTY: [&str; 16] = [
    "null",
    "true",
    "0",
    "-1",
    "1e300",
    "0.5",
    "1e-300",
    "\"\"",
    "\"LORA\"",
    "\"pissa\"",
    "[]",
    "[1]",
    "{}",
    "{\"q_proj\": 2}",
    "{\"(a|b)*\": 2}",
    "18446744073709551616",
];

/// Replaces a setting of the config.
fn lie(config: &str, random: &mut Random) -> String {
    let mut settings: serde_json::Map<String, serde_json::Value> = serde_json::from_str(config).unwrap();
    let keys: Vec<String> = settings.keys().cloned().collect();
    let key = &keys[random.below(keys.len())];
    let value = NASTY[random.below(NASTY.len())];
    if random.below(8) == 0 {
        settings.remove(key);
    } else if let Ok(value) = serde_json::from_str(value) {
        settings.insert(key.clone(), value);
    }
    serde_json::to_string(&settings).unwrap()
}

#[test]
fn mutated_adapters_are_applied_whole_or_refused() {
    let cases = if std::env::var_os("GEMMA4C_EXHAUSTIVE").is_some() { 2000 } else { 300 };
    let folder = tempfile::tempdir().unwrap();
    for (seed, preset) in [(1, Preset::TinyE), (2, Preset::TinyMoe)] {
        let (base, mut random) = (Base::new(preset), Random(seed));
        let (gguf, peft): (PathBuf, PathBuf) = (folder.path().join("adapter.gguf"), folder.path().join("adapter"));
        base.write_gguf(&gguf);
        base.write_peft(&peft);
        assert_eq!(base.apply(&gguf), Ok(base.matrices.len()), "{}", preset.name());
        assert_eq!(base.apply(&peft), Ok(base.matrices.len()), "{}", preset.name());
        let (weights, config) = (peft.join("adapter_model.safetensors"), peft.join("adapter_config.json"));
        let (of_gguf, of_peft) = (fs::read(&gguf).unwrap(), fs::read(&weights).unwrap());
        let in_peft = 8 + u64::from_le_bytes(of_peft[..8].try_into().unwrap()) as usize;
        let in_gguf =
            of_gguf.len() - base.matrices.iter().map(|(_, [i, o, e])| (2 * RANK * e * (i + o)) as usize).sum::<usize>();
        let mut applied = 0;
        for case in 0..cases / 2 {
            let what = format!("{} case {case}", preset.name());
            applied += usize::from(match case % 4 {
                0 | 1 => {
                    fs::write(&gguf, mutate(&of_gguf, in_gguf, &mut random)).unwrap();
                    base.check(&gguf, &what)
                }
                2 => {
                    fs::write(&weights, mutate(&of_peft, in_peft, &mut random)).unwrap();
                    base.check(&peft, &what)
                }
                _ => {
                    fs::write(&weights, &of_peft).unwrap();
                    let bent = match random.below(2) {
                        0 => mutate(CONFIG.as_bytes(), CONFIG.len(), &mut random),
                        _ => lie(CONFIG, &mut random).into_bytes(),
                    };
                    fs::write(&config, bent).unwrap();
                    let is_applied = base.check(&peft, &what);
                    fs::write(&config, CONFIG).unwrap();
                    is_applied
                }
            });
        }
        eprintln!("{}: {} cases, {applied} applied", preset.name(), cases / 2);
        assert!(applied < cases / 4, "most such adapters make no sense: {applied}");
    }
}

/// What pairs cannot say is refused by the setting or the tensor that says it.
#[test]
fn what_pairs_cannot_say_is_refused_by_name() {
    let (base, folder) = (Base::new(Preset::TinyE), tempfile::tempdir().unwrap());
    let peft = folder.path().join("adapter");
    base.write_peft(&peft);
    for (setting, value) in [
        ("use_dora", "true"),
        ("modules_to_save", "[\"norm\"]"),
        ("bias", "\"all\""),
        ("lora_bias", "true"),
        ("fan_in_fan_out", "true"),
        ("peft_type", "\"IA3\""),
        ("r", "8"),
        ("init_lora_weights", "\"pissa_niter_16\""),
        ("rank_pattern", "{\"q_.*\": 4}"),
        ("layer_replication", "[[0, 2]]"),
        ("arrow_config", "{\"top_k\": 2}"),
        ("kasa_config", "{\"beta\": 0.1}"),
        ("lora_alpha", "\"much\""),
    ] {
        let mut settings: serde_json::Map<String, serde_json::Value> = serde_json::from_str(CONFIG).unwrap();
        settings.insert(setting.into(), serde_json::from_str(value).unwrap());
        fs::write(peft.join("adapter_config.json"), serde_json::to_string(&settings).unwrap()).unwrap();
        let refused = base.apply(&peft).expect_err(setting);
        let named = if setting == "r" { "lora_A" } else { setting };
        let is_named = refused.contains(named) || setting == "lora_alpha" && refused.contains("adapter_config.json");
        assert!(is_named, "{setting}: {refused}");
    }
}
