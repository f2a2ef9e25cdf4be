//! GPU plans of the full sizes, compiled where no GPU is: how many launches, how much work, how much memory.
//!
//! The models are headers whose weights are a hole on the disk. Most of it needs no kernel's machine code.

mod common;
#[path = "../src/compile.rs"]
#[allow(dead_code, reason = "the program uses all of it")]
mod compile;
#[path = "common/lowered.rs"]
mod lowered;

use common::Place;
use gemma4c_blocks::DType;
use gemma4c_models::synth::Preset;
use lowered::{Told, header};
use serde_json::Value;

/// `inspect --json` of the plan of a full size.
fn inspected(place: &Place, preset: Preset, dtype: DType, told: &Told) -> Value {
    let model = place.path("model.gguf");
    header(&model, preset, dtype);
    let plan = lowered::plan(&model, told);
    place.write("plan.bin", plan.to_bytes().expect("a plan that can be written"));
    serde_json::from_str(&place.ok("inspect plan.bin --json")).expect("JSON")
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

/// Decode is bound by launches as much as by bytes: a budget that a change must not break unnoticed.
#[test]
fn decode_keeps_its_budget_of_launches() {
    let place = Place::new();
    for (preset, dtype, in_a_layer, outside) in [
        (Preset::E2b, DType::Q8_0, 7, 6),
        (Preset::E4b, DType::Q8_0, 7, 6),
        (Preset::Dense12b, DType::Q4_0, 5, 6),
        (Preset::Dense31b, DType::Q4_0, 5, 6),
        // Beside the dense half there are a router and a norm of its own for the experts.
        (Preset::Moe26bA4b, DType::Q4_0, 10, 6),
    ] {
        let plan = inspected(&place, preset, dtype, &Told::default());
        let decode = &plan["phases"][0];
        assert_eq!(decode["name"], "decode");
        let (most, around) = (number(decode, "launches_per_layer"), number(decode, "launches_outside_layers"));
        eprintln!("{}: {most} a layer, {around} outside, {} in all", preset.name(), decode["launches"]);
        assert!(most <= in_a_layer, "{}: {most} launches a layer, {in_a_layer} are allowed", preset.name());
        assert!(around <= outside, "{}: {around} launches outside the layers, {outside} are allowed", preset.name());
    }
}

/// The layers without keys of their own, and the head, are computed for the asked row alone.
#[test]
fn prefill_leaves_dead_rows_out() {
    let place = Place::new();
    for (preset, own_keys, percent) in [(Preset::E4b, 24, 58.0), (Preset::E2b, 15, 30.0)] {
        let plan = inspected(&place, preset, DType::Q8_0, &Told::default());
        let full = inspected(&place, preset, DType::Q8_0, &Told::default().without(&["dead-rows"]));
        let phases = |plan: &Value| plan["phases"].as_array().expect("phases").clone();
        for (phase, full) in phases(&plan).iter().zip(&phases(&full)).skip(1) {
            let steps = phase["steps"].as_array().expect("steps");
            for step in steps {
                let is_of_the_tail = step["layer"].as_u64().is_some_and(|layer| layer >= own_keys);
                let is_head = step["nodes"].as_array().expect("nodes").iter().any(|node| node == "head.out");
                if is_of_the_tail || is_head {
                    assert_eq!(number(step, "rows"), 1, "{} {}: {step}", preset.name(), phase["name"]);
                }
            }
            let layers = steps.iter().filter_map(|step| step["layer"].as_u64());
            assert_eq!(layers.max(), Some(number(&plan["model"], "layers") - 1), "the tail is there");
            let share = 100.0 * number(phase, "flops") as f64 / number(full, "flops") as f64;
            eprintln!("{} {}: {share:.1} % of the full work", preset.name(), phase["name"]);
            assert!((share - percent).abs() <= 3.0, "{} {}: {share} %", preset.name(), phase["name"]);
        }
    }
}

/// What a sliding layer costs follows from its window, not from the context.
#[test]
fn sliding_layers_cost_their_window() {
    let place = Place::new();
    let told = |context: u32| Told { context: Some(context), ..Told::default() };
    let by_layer = |plan: &Value| -> Vec<(bool, u64)> {
        let caches = plan["caches"].as_array().expect("caches");
        caches.iter().map(|cache| (cache["window"].is_u64(), number(cache, "bytes"))).collect()
    };
    let short = inspected(&place, Preset::Dense12b, DType::Q4_0, &told(4096));
    let long = inspected(&place, Preset::Dense12b, DType::Q4_0, &told(262_144));
    for ((slides, before), (_, after)) in by_layer(&short).into_iter().zip(by_layer(&long)) {
        assert_eq!(after / before, if slides { 1 } else { 64 });
        if slides {
            // A window of 1024 and a chunk of 2048; 8 heads of 256, keys and values, two bytes each.
            assert_eq!(after, (1024 + 2048) * 8 * 256 * 2 * 2);
        }
    }
}
