//! Adapters that are compiled in, against the golden files: what transformers computes from the same weights with
//! `s B A` added to them.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{Place, Tensors, golden, ids};

/// Largest absolute difference of a logit, for an engine that computes in f32.
const LOGITS: f32 = 1e-3;
/// Root mean square of that, of weights that were rounded to 8 bits once more.
const MERGED: f32 = 0.15;

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

fn rms_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let squares: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (squares / a.len() as f32).sqrt()
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

/// Merged into blocks of 8 bits, an adapter is as far from the reference as rounding weights once more, whatever its form;
/// merged into floats, nearer still. Without it the logits are another model's.
#[test]
fn a_merged_adapter_is_as_exact_as_its_weights() {
    let Some(folder) = folder() else { return };
    let place = Place::new();
    let one_adapter = |case: &Value| case["adapters"].as_array().is_some_and(|all| all.len() == 1);
    for case in cases(&folder, "cases.json").iter().filter(|case| one_adapter(case)) {
        let golden = Tensors::read(&folder.join(text(case, "golden")));
        let base = folder.join("..").join(text(case, "base"));
        let of = |ending| logits(&place, &base, &format!("{} --lora-merge", options(&folder, case, ending)), &golden);
        let (gguf, peft) = (of(".gguf"), of(""));
        let off = rms_difference(&gguf, &golden.get("logits").values);
        let without = rms_difference(&logits(&place, &base, "", &golden), &golden.get("logits").values);
        eprintln!("{:<28} rms {off:.4}, without the adapter {without:.4}", text(case, "golden"));
        assert!(off <= MERGED && off * 4.0 <= without, "{case}: rms {off}, without the adapter {without}");
        assert!(largest_difference(&gguf, &peft) <= 0.25, "{case}: the forms are apart");
    }
    let (base, adapter) = (folder.join("../d_tiny_bf16.gguf"), format!(" --lora '{}'", folder.join("d_r16").display()));
    let golden = Tensors::read(&folder.join("d_r16.golden.safetensors"));
    let added = logits(&place, &base, &adapter, &golden);
    let merged = logits(&place, &base, &format!("{adapter} --lora-merge"), &golden);
    let off = rms_difference(&merged, &added);
    eprintln!("in bf16 rms {off:.4}");
    assert!(off > 0.0 && off <= MERGED / 4.0, "in bf16: rms {off}");
}

/// What merging does is said, a plan with its weights holds the merged ones, and it is refused where it cannot be.
#[test]
fn merging_says_what_it_does() {
    let Some(folder) = folder() else { return };
    let place = Place::new();
    let (base, adapter) = (folder.join("../d_tiny_q4_k.gguf"), folder.join("d_r4"));
    let (base, adapter) = (base.display(), adapter.display());
    let ran = place.run(&format!("compile '{base}' -o plan.bin --target cpu --lora '{adapter}' --lora-merge"));
    let compile = format!("  gemma4c compile {base} --lora {adapter} -o exact.bin");
    let compare = "  gemma4c perplexity plan.bin --file TEXT --against exact.bin";
    for said in ["merged 26 of 26 pairs", "26 matrices of q4_k are q8_0 now", &compile, compare] {
        assert!(ran.stderr.contains(said), "{said}: {}", ran.stderr);
    }
    let summary = place.ok("inspect plan.bin");
    assert!(summary.contains("d_r4: 26 pairs, times 1, merged"), "{summary}");
    place.ok(&format!("compile '{base}' -o held.bin --target cpu --lora '{adapter}' --lora-merge --embed-weights"));
    let line = "--tokens 2,5,6,7 --all";
    assert_eq!(
        place.logits("held.bin", line).get("logits").values,
        place.logits("plan.bin", line).get("logits").values
    );
    let twice = format!("compile '{base}' -o no.bin --target cpu --lora '{adapter}' --lora '{adapter}' --lora-merge");
    let refused = place.refused(&twice);
    assert!(refused.contains("--lora-merge merges one adapter; --lora is given 2 times"), "{refused}");
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
    assert!(refused.contains("the plan has no seats for adapters: compile it with --adapters"), "{refused}");
    let summary = place.ok("inspect plan.bin");
    assert!(summary.contains("e_r4.gguf") && summary.contains("38 pairs"), "{summary}");
    let shown = place.ok(&format!("inspect '{}'", adapter.display()));
    assert!(shown.contains("38 pairs") && shown.contains("rank"), "{shown}");
    let of_peft = place.ok(&format!("inspect '{}' --json", folder.join("e_r4").display()));
    let of_peft: Value = serde_json::from_str(&of_peft).expect("JSON");
    assert_eq!((&of_peft["pairs"], &of_peft["ranks"][0]), (&Value::from(38), &Value::from(4)));
}
