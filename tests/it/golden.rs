//! The real program against the golden files: what Hugging Face transformers computes from the same weights.
//!
//! The limits are those the golden data's own description gives for an engine that computes in f32.

use std::path::Path;

use crate::common::{Place, Tensor, Tensors, golden, ids};
use gemma4c_runtime::argmax;

/// Largest absolute differences. For logits 1e-3 would do; half of it leaves less room for something to creep in.
const LOGITS: f32 = 5e-4;
const EMBEDDING: f32 = 1e-6;
const PER_LAYER_INPUTS: f32 = 3e-5;
const HIDDEN: f32 = 3e-4;
/// Of a channel's largest value, on top. A massive channel is a sum of tens of thousands, which may cancel, and f32 has
/// steps of up to 0.004 there; found are 9e-7. The other channels are small and hardly gain by it.
const HIDDEN_RELATIVE: f32 = 2e-6;
const FINAL_NORM: f32 = 5e-4;
/// Where the two best logits are closer, either may win.
const CLEAR_MARGIN: f32 = 2e-3;

/// What is there is in the tests' lists: a model that is added is compared, or this fails.
#[test]
fn all_reference_data_is_known() {
    let Some(folder) = golden::folder() else { return };
    let mut there = Vec::new();
    for part in ["", "checkpoints/", "formats/", "massive/", "trained/"] {
        for entry in std::fs::read_dir(folder.join(part)).expect("a folder") {
            let file = entry.expect("an entry").file_name().into_string().expect("a name");
            there.extend(file.strip_suffix(".golden.safetensors").map(|name| format!("{part}{name}")));
        }
    }
    there.sort();
    let mut known = golden::models();
    known.sort_unstable();
    assert_eq!(there, known);
}

#[test]
fn every_model_agrees() {
    for name in golden::of(&golden::models()) {
        check(&golden::some(), name);
    }
}

/// Keys and values that the CPU rounds to 8 bits, as a GPU keeps them: within the limits that `verify --golden` states
/// for them, and beyond those of f32, so that something was rounded.
#[test]
fn models_agree_with_keys_and_values_in_8_bits() {
    let (place, folder) = (Place::new(), golden::some());
    for name in golden::of(&["e_tiny_q8_0", "d_tiny_q4_k_m_lq", "m_tiny_q8_0", "trained/austen_q4_0"]) {
        let (model, golden) = (folder.join(format!("{name}.gguf")), folder.join(format!("{name}.golden.safetensors")));
        for kv in ["q8_0", "fp8"] {
            place.ok(&format!("compile '{}' -o plan.bin --target cpu --ctx 256 --kv {kv}", model.display()));
            place.ok(&format!("verify plan.bin --golden '{}'", golden.display()));
            let strict = "--limit-rms 0.001 --limit-row 9 --limit-max 9 --clear-margin 9";
            let ran = place.run(&format!("verify plan.bin --golden '{}' {strict}", golden.display()));
            assert_eq!(ran.code, Some(1), "{name}, {kv}: {}", ran.stdout);
        }
    }
}

fn check(folder: &Path, name: &str) {
    let golden = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
    let place = Place::new();
    let model = golden::model(folder, name);
    place.ok(&format!("compile '{}' -o plan.bin --target cpu", model.display()));

    let (prompt, greedy) = (golden.ids("tokens"), golden.ids("greedy.tokens"));
    let rows = prompt.len();
    let layers = (0..).take_while(|n| golden.find(&format!("hidden.{n}")).is_some()).count();
    // Where the types of the weights are the point, there are logits alone.
    assert!(
        layers > 0 || name.starts_with("formats/") || name.starts_with("checkpoints/"),
        "{name} has no hidden states"
    );
    let mut taps = Vec::new();
    if layers > 0 {
        taps.push(("embed".to_string(), "embedding.out".to_string(), EMBEDDING));
        taps.push(("final_norm".into(), "head.normed".into(), FINAL_NORM));
    }
    taps.extend((0..layers).map(|n| (format!("hidden.{n}"), format!("blk.{n}.layer.out"), HIDDEN)));
    if golden.find("per_layer_inputs").is_some() {
        taps.push(("per_layer_inputs".into(), "per_layer_inputs.out".into(), PER_LAYER_INPUTS));
    }

    // The prompt at once, then the golden continuation token by token, whatever this program would choose.
    let fed = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
    let tapped: String = taps.iter().map(|(_, tap, _)| format!(" --tap {tap}")).collect();
    let ours = place.logits("plan.bin", &format!("--tokens {} --all --prefill {rows}{tapped}", ids(&fed)));

    let mut report = format!("{name:<20}");
    let mut compare = |key: &str, ours: &[f32], limit: f32, relative: f32| {
        let worst = worst(ours, golden.get(key), limit, relative);
        let Worst { value, off, limit, .. } = worst;
        assert!(worst.share <= 1.0, "{name}: {key} is off by {off:e} where it is {value}, the limit is {limit:e}");
        report += &format!(" {key} {off:.1e}");
    };
    let logits = ours.get("logits");
    compare("logits", logits.rows(0..rows), LOGITS, 0.0);
    compare("greedy.logits", logits.rows(rows - 1..rows - 1 + greedy.len()), LOGITS, 0.0);
    for (key, tap, limit) in &taps {
        let relative = if key.starts_with("hidden.") { HIDDEN_RELATIVE } else { 0.0 };
        compare(key, ours.get(tap).rows(0..rows), *limit, relative);
    }
    eprintln!("{report}");

    let expected = golden.get("logits");
    for row in 0..rows {
        let (best, margin) = best_and_margin(expected.row(row));
        if margin > CLEAR_MARGIN {
            assert_eq!(argmax(logits.row(row)), Some(best), "{name}: the best token of row {row}");
        }
    }
    let clear: Vec<bool> = golden.get("greedy.margin").values.iter().map(|margin| *margin > CLEAR_MARGIN).collect();
    for (i, token) in greedy.iter().enumerate().filter(|(i, _)| clear[*i]) {
        assert_eq!(argmax(logits.row(rows - 1 + i)), Some(*token), "{name}: greedy token {i}, tokens fed");
    }

    // What the program chooses itself, up to the first choice that either token may win: after that the two may part.
    let comparable = clear.iter().take_while(|clear| **clear).count();
    assert!(comparable > greedy.len() / 4, "{name}: only the first {comparable} choices are clear");
    let chosen = place.ok(&format!("run plan.bin --tokens {} --temp 0 -n {comparable}", ids(&prompt)));
    let expected: Vec<String> = greedy[..comparable].iter().map(u32::to_string).collect();
    assert_eq!(chosen.trim_end(), expected.join(" "), "{name}: greedy tokens, chosen by the program");
}

/// The value that takes the most of its limit.
struct Worst {
    share: f32,
    /// What it should be, how far off it is, and how far it may be.
    value: f32,
    off: f32,
    limit: f32,
}

/// The worst of some values, each of which may be off by `limit` and by `relative` of the largest value of its channel.
fn worst(ours: &[f32], expected: &Tensor, limit: f32, relative: f32) -> Worst {
    assert_eq!(ours.len(), expected.values.len());
    let width = expected.width();
    let mut largest = vec![0.0f32; width];
    for (i, value) in expected.values.iter().enumerate() {
        largest[i % width] = largest[i % width].max(value.abs());
    }
    let judge = |(i, (ours, value)): (usize, (&f32, &f32))| {
        let off = if ours.is_nan() { f32::INFINITY } else { (ours - value).abs() };
        let limit = limit + relative * largest[i % width];
        Worst { share: off / limit, value: *value, off, limit }
    };
    let judged = ours.iter().zip(&expected.values).enumerate().map(judge);
    judged.max_by(|a, b| a.share.total_cmp(&b.share)).expect("there are values")
}

/// The index of the largest value, and how much larger it is than the next.
fn best_and_margin(row: &[f32]) -> (u32, f32) {
    let best = argmax(row).expect("a row has values");
    let others = row.iter().enumerate().filter(|(i, _)| *i != best as usize);
    let second = others.map(|(_, v)| *v).fold(f32::NEG_INFINITY, f32::max);
    (best, row[best as usize] - second)
}
