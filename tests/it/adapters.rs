//! Adapters that are compiled in, against the golden files: what transformers computes from the same weights with
//! `s B A` added to them.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{Place, Tensors, golden, ids};

/// Largest absolute difference of a logit, for an engine that computes in f32.
const LOGITS: f32 = 1e-3;

/// The folder of the adapters; without it, the test says that it has checked nothing.
fn folder() -> Option<PathBuf> {
    Some(golden::folder()?.join("lora"))
}

fn cases(folder: &Path, name: &str) -> Vec<Value> {
    let text = std::fs::read(folder.join(name)).expect("the cases");
    serde_json::from_slice(&text).expect("a list of cases")
}

fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap_or_else(|| panic!("{case} has no {key}"))
}

/// The options of a case whose adapters are files with this ending, or folders.
fn options(folder: &Path, case: &Value, ending: &str) -> String {
    let adapters = case["adapters"].as_array().expect("a list of adapters");
    let of = |adapter: &Value| {
        format!(" --lora '{}/{}{ending}:{}'", folder.display(), text(adapter, "name"), adapter["scale"])
    };
    adapters.iter().map(of).collect()
}

/// The logits of a golden file's tokens, by a plan with these options.
fn logits(place: &Place, base: &Path, options: &str, golden: &Tensors) -> Vec<f32> {
    place.ok(&format!("compile '{}' -o plan.bin --target cpu --ctx 256{options}", base.display()));
    let tokens = golden.ids("tokens");
    let line = format!("--tokens {} --all --prefill {}", ids(&tokens), tokens.len());
    place.logits("plan.bin", &line).get("logits").values.clone()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Of both forms, one and two at once, at several strengths.
#[test]
fn every_adapter_agrees() {
    let Some(folder) = folder() else { return };
    let place = Place::new();
    for case in cases(&folder, "cases.json") {
        let golden = Tensors::read(&folder.join(text(&case, "golden")));
        let base = folder.join("..").join(text(&case, "base"));
        let of = |ending| logits(&place, &base, &options(&folder, &case, ending), &golden);
        let (gguf, peft) = (of(".gguf"), of(""));
        let off = largest_difference(&gguf, &golden.get("logits").values);
        let apart = largest_difference(&gguf, &peft);
        eprintln!("{:<28} off {off:.1e}, forms apart {apart:.1e}", text(&case, "golden"));
        assert!(off <= LOGITS, "{case}: off by {off}");
        assert!(apart <= LOGITS / 10.0, "{case}: the GGUF file and the PEFT folder are {apart} apart");
    }
}

/// What is not the adapter's numbers is seen: another strength, the halves of other layers, none at all.
#[test]
fn a_wrong_strength_and_swapped_halves_are_seen() {
    let Some(folder) = folder() else { return };
    let place = Place::new();
    // With two layers whose projections are as large.
    for (name, base, layers) in
        [("e_r4", "e_tiny_q8_0", [0, 2]), ("d_r4", "d_tiny_q8_0", [0, 2]), ("m_r4", "m_tiny_q8_0", [0, 1])]
    {
        let golden = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
        let base = folder.join(format!("../{base}.gguf"));
        let expected = &golden.get("logits").values;
        let off = |options: &str| largest_difference(&logits(&place, &base, options, &golden), expected);
        let adapter = folder.join(name);
        for scale in ["0", "0.99", "-1"] {
            let off = off(&format!(" --lora '{}:{scale}'", adapter.display()));
            assert!(off > LOGITS, "{name} at {scale}: off by {off} alone");
        }
        // The B of one layer's projection in place of another's, which is as large.
        let weights = std::fs::read(adapter.join("adapter_model.safetensors")).expect("the adapter");
        let header = 8 + u64::from_le_bytes(weights[..8].try_into().expect("eight bytes")) as usize;
        let names = String::from_utf8(weights[8..header].to_vec()).expect("JSON");
        let [first, second] = layers.map(|layer| format!("layers.{layer}.self_attn.q_proj.lora_B"));
        assert!(names.contains(&first) && names.contains(&second), "{names}");
        let hold = "layers.X.self_attn.q_proj.lora_B";
        let swapped = names.replace(&first, hold).replace(&second, &first).replace(hold, &second);
        std::fs::create_dir_all(place.path("swapped")).expect("a folder");
        place.write(
            "swapped/adapter_model.safetensors",
            [&weights[..8], swapped.as_bytes(), &weights[header..]].concat(),
        );
        let config = std::fs::read(adapter.join("adapter_config.json")).expect("the settings");
        place.write("swapped/adapter_config.json", config);
        let off = off(" --lora swapped");
        assert!(off > LOGITS, "{name} with swapped halves: off by {off} alone");
    }
}

/// At no strength an adapter changes nothing, to the bit; and a plan with its weights has those of its adapters, too.
#[test]
fn an_adapter_at_no_strength_changes_nothing_and_plans_may_hold_them() {
    let Some(folder) = folder() else { return };
    let (place, base) = (Place::new(), folder.join("../m_tiny_q8_0.gguf"));
    let golden = Tensors::read(&folder.join("m_r4.golden.safetensors"));
    let adapter = folder.join("m_r4");
    let none = logits(&place, &base, "", &golden);
    assert_eq!(logits(&place, &base, &format!(" --lora '{}:0'", adapter.display()), &golden), none);
    let mapped = logits(&place, &base, &format!(" --lora '{}'", adapter.display()), &golden);
    let held = logits(&place, &base, &format!(" --lora '{}' --embed-weights", adapter.display()), &golden);
    assert_eq!(held, mapped);
}

/// Folders of PEFT have files of one name; they stay where they are when a run is told that the model is elsewhere.
#[test]
fn adapters_stay_where_they_are_when_the_model_moves() {
    let Some(folder) = folder() else { return };
    let (place, base) = (Place::new(), folder.join("../e_tiny_q8_0.gguf"));
    let adapters = ["e_r4", "e_r16"].map(|name| format!(" --lora '{}'", folder.join(name).display())).concat();
    place.ok(&format!("compile '{}' -o plan.bin --target cpu --ctx 256{adapters}", base.display()));
    std::fs::create_dir_all(place.path("elsewhere")).expect("a folder");
    std::fs::copy(&base, place.path("elsewhere/renamed.gguf")).expect("a copy");
    let line =
        format!("--tokens {} --all", ids(&Tensors::read(&folder.join("e_sum.golden.safetensors")).ids("tokens")));
    let of = |more: &str| place.logits("plan.bin", &format!("{line}{more}")).get("logits").values.clone();
    assert_eq!(of(" --model elsewhere/renamed.gguf"), of(""));
}

/// Every broken adapter is refused by the name of what cannot be applied.
#[test]
fn broken_adapters_are_refused_by_name() {
    let Some(folder) = folder() else { return };
    let place = Place::new();
    for case in cases(&folder, "broken.json") {
        let adapter = text(&case, "adapter");
        let base = folder.join("..").join(text(&case, "base"));
        let (base, path) = (base.display(), folder.join(adapter));
        let refused = place.refused(&format!("compile '{base}' -o plan.bin --target cpu --lora '{}'", path.display()));
        let named = match adapter.trim_start_matches("broken/").trim_end_matches(".gguf") {
            "missing_half" if adapter.ends_with(".gguf") => "blk.1.ffn_up.weight.lora_a",
            "missing_half" => "layers.1.mlp.up_proj.lora_A",
            "wrong_shape" if adapter.ends_with(".gguf") => "blk.0.attn_output.weight.lora_a",
            "wrong_shape" => "layers.0.self_attn.o_proj.lora_A",
            "wrong_rank" => "rank",
            "norm" if adapter.ends_with(".gguf") => "blk.0.attn_norm.weight",
            "norm" => "modules_to_save",
            "shared_key" => "layer 5",
            "no_such_layer" => "layer 9",
            "other_arch" if adapter.ends_with(".gguf") => "general.architecture",
            "other_arch" => "c_attn",
            "dora" => "use_dora",
            "not_lora" => "peft_type",
            other => panic!("{other} is new"),
        };
        eprint!("{refused}");
        assert!(refused.contains(named), "{adapter} is refused without {named}: {refused}");
        assert!(!place.path("plan.bin").exists(), "{adapter} left a plan");
    }
}

/// It is said that all of it was applied, and a plan takes no other.
#[test]
fn compiling_says_what_was_applied() {
    let Some(folder) = folder() else { return };
    let (place, base) = (Place::new(), folder.join("../e_tiny_q8_0.gguf"));
    let (base, adapter) = (base.display(), folder.join("e_r4.gguf"));
    let ran = place.run(&format!("compile '{base}' -o plan.bin --target cpu --lora '{}:0.5'", adapter.display()));
    assert!(ran.stderr.contains("applied 38 of 38 pairs, times 0.5"), "{}", ran.stderr);
    let refused = place.refused(&format!("run plan.bin --tokens 2 --lora '{}'", adapter.display()));
    assert!(refused.contains("--lora is for a GGUF model"), "{refused}");
    let summary = place.ok("inspect plan.bin");
    assert!(summary.contains("e_r4.gguf") && summary.contains("38 pairs"), "{summary}");
    let shown = place.ok(&format!("inspect '{}'", adapter.display()));
    assert!(shown.contains("38 pairs") && shown.contains("rank"), "{shown}");
    let of_peft = place.ok(&format!("inspect '{}' --json", folder.join("e_r4").display()));
    let of_peft: Value = serde_json::from_str(&of_peft).expect("JSON");
    assert_eq!((&of_peft["pairs"], &of_peft["ranks"][0]), (&Value::from(38), &Value::from(4)));
}
