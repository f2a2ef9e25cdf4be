//! `gemma4c bench` measures what it says, on the processor: how fast is no test's business.

use crate::common::Place;

fn place() -> Place {
    let place = Place::new();
    place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 128 --chunk 16");
    place
}

#[test]
fn every_test_at_every_depth_has_a_row() {
    let place = place();
    let table = place.ok("bench plan.bin -p 8,20 -n 3 -d 0,40 -r 2");
    let tests: Vec<&str> =
        table.lines().filter_map(|line| line.split('|').nth(4)).map(str::trim).filter(|t| *t != "---").collect();
    assert_eq!(tests, ["test", "pp8", "pp20", "tg3", "pp8 @ d40", "pp20 @ d40", "tg3 @ d40"], "{table}");
    assert!(table.lines().any(|line| line.starts_with("cold start")), "{table}");
}

#[test]
fn the_samples_are_there_as_json_and_make_the_mean() {
    let place = place();
    let report: serde_json::Value = serde_json::from_str(&place.ok("bench plan.bin -p 8 -n 4 -r 3 -o json")).unwrap();
    assert_eq!(report["device"], "cpu");
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, tokens) in rows.iter().zip([8.0, 4.0]) {
        let seconds: Vec<f64> = row["seconds"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
        assert_eq!(seconds.len(), 3);
        let mean = seconds.iter().map(|s| tokens / s).sum::<f64>() / 3.0;
        let said = row["tokens_per_second"]["mean"].as_f64().unwrap();
        assert!(seconds.iter().all(|s| *s > 0.0) && (said / mean - 1.0).abs() < 1e-6, "{row}");
    }
    let parts = report["cold_start_seconds"]["parts"].as_object().unwrap();
    let total: f64 = parts.values().map(|part| part.as_f64().unwrap()).sum();
    assert!((report["cold_start_seconds"]["total"].as_f64().unwrap() / total - 1.0).abs() < 1e-6);
}

#[test]
fn nothing_need_be_measured() {
    let table = place().ok("bench plan.bin -p 0 -n 0");
    assert!(table.starts_with("| model |") && table.lines().nth(2) == Some(""), "{table}");
}
