//! The real program against the golden files: what Hugging Face transformers computes from the same weights.
//!
//! The limits are those the golden data's own description gives for an engine that computes in f32.

mod common;

use std::path::Path;

use common::{Place, Tensors, golden_folder, ids, largest_difference};
use gemma4c_runtime::argmax;

/// Largest absolute differences. For logits 1e-3 would do; half of it leaves less room for something to creep in.
const LOGITS: f32 = 5e-4;
const EMBEDDING: f32 = 1e-6;
const PER_LAYER_INPUTS: f32 = 3e-5;
const HIDDEN: f32 = 3e-4;
const FINAL_NORM: f32 = 5e-4;
/// Where the two best logits are closer, either may win.
const CLEAR_MARGIN: f32 = 2e-3;

#[test]
fn every_fixture_agrees() {
    let Some(folder) = golden_folder() else { return };
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("the folder can be listed")
        .filter_map(|entry| {
            let name = entry.expect("an entry").file_name().into_string().ok()?;
            Some(name.strip_suffix(".golden.safetensors")?.to_string())
        })
        .collect();
    names.sort();
    assert!(!names.is_empty(), "{} has no golden files", folder.display());
    for name in names {
        check(&folder, &name);
    }
}

fn check(folder: &Path, name: &str) {
    let golden = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
    let place = Place::new();
    let model = folder.join(format!("{name}.gguf"));
    place.ok(&format!("compile '{}' -o plan.bin --target cpu", model.display()));

    let (prompt, greedy) = (golden.ids("tokens"), golden.ids("greedy.tokens"));
    let rows = prompt.len();
    let layers = (0..).take_while(|n| golden.find(&format!("hidden.{n}")).is_some()).count();
    assert!(layers > 0, "{name} has no hidden states");
    let mut taps = vec![
        ("embed".to_string(), "embedding.out".to_string(), EMBEDDING),
        ("final_norm".into(), "head.normed".into(), FINAL_NORM),
    ];
    taps.extend((0..layers).map(|n| (format!("hidden.{n}"), format!("blk.{n}.layer.out"), HIDDEN)));
    if golden.find("per_layer_inputs").is_some() {
        taps.push(("per_layer_inputs".into(), "per_layer_inputs.out".into(), PER_LAYER_INPUTS));
    }

    // The prompt at once, then the golden continuation token by token, whatever this program would choose.
    let fed = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
    let tapped: String = taps.iter().map(|(_, tap, _)| format!(" --tap {tap}")).collect();
    let ours = place.logits("plan.bin", &format!("--tokens {} --all --prefill {rows}{tapped}", ids(&fed)));

    let mut report = format!("{name:<20}");
    let mut compare = |key: &str, ours: &[f32], limit: f32| {
        let worst = largest_difference(ours, &golden.get(key).values);
        assert!(worst <= limit, "{name}: {key} differs by {worst:e}, the limit is {limit:e}");
        report += &format!(" {key} {worst:.1e}");
    };
    let logits = ours.get("logits");
    compare("logits", logits.rows(0..rows), LOGITS);
    compare("greedy.logits", logits.rows(rows - 1..rows - 1 + greedy.len()), LOGITS);
    for (key, tap, limit) in &taps {
        compare(key, ours.get(tap).rows(0..rows), *limit);
    }
    eprintln!("{report}");

    let expected = golden.get("logits");
    for row in 0..rows {
        let (best, margin) = best_and_margin(expected.row(row));
        if margin > CLEAR_MARGIN {
            assert_eq!(argmax(logits.row(row)), Some(best), "{name}: the best token of row {row}");
        }
    }
    for (i, token) in greedy.iter().enumerate() {
        assert_eq!(argmax(logits.row(rows - 1 + i)), Some(*token), "{name}: greedy token {i}, tokens fed");
    }

    let chosen = place.ok(&format!("run plan.bin --tokens {} --temp 0 -n {}", ids(&prompt), greedy.len()));
    let expected: Vec<String> = greedy.iter().map(u32::to_string).collect();
    assert_eq!(chosen.trim_end(), expected.join(" "), "{name}: greedy tokens, chosen by the program");
}

/// The index of the largest value, and how much larger it is than the next.
fn best_and_margin(row: &[f32]) -> (u32, f32) {
    let best = argmax(row).expect("a row has values");
    let others = row.iter().enumerate().filter(|(i, _)| *i != best as usize);
    let second = others.map(|(_, v)| *v).fold(f32::NEG_INFINITY, f32::max);
    (best, row[best as usize] - second)
}
