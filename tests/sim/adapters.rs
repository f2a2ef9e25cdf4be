//! GPU plans with adapters against the golden files: their ranks are padded, and their products are launches among those
//! that are fused.

use std::path::Path;

use gemma4c::options::AdapterAt;
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::Asked;
use serde_json::Value;

use crate::common::lowered::Options;
use crate::common::{Tensors, golden};
use crate::golden::{F32, INT8, Limits, check_model};
use crate::simulated::{each, exhaustive};

/// A golden file, the base, and its adapters with how strong they are.
struct Case {
    golden: String,
    base: String,
    adapters: Vec<(String, f32)>,
}

fn cases(folder: &Path) -> Vec<Case> {
    let cases = std::fs::read(folder.join("cases.json")).expect("the cases");
    let cases: Vec<Value> = serde_json::from_slice(&cases).expect("a list of cases");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let adapter = |value: &Value| (text(&value["name"]), value["scale"].as_f64().expect("a number") as f32);
    let case = |case: &Value| Case {
        golden: text(&case["golden"]),
        base: text(&case["base"]),
        adapters: case["adapters"].as_array().expect("a list").iter().map(adapter).collect(),
    };
    cases.iter().map(case).collect()
}

/// A chunk and a row alone, each adapter as a file with this ending or as a folder, `times` as strong as the case.
fn check(folder: &Path, case: &Case, (ending, times): (&str, f32), is_f32: bool) -> Result<(), String> {
    let at = |(name, scale): &(String, f32)| AdapterAt {
        path: folder.join(format!("{name}{ending}")),
        scale: scale * times,
    };
    let adapters = case.adapters.iter().map(at).collect();
    let options = Options { context: Some(128), chunk: Some(4), adapters, ..Options::default() };
    let (options, limits): (Options, &Limits) = match is_f32 {
        true => (Options { kv: KvType::F32, ..options }.without(&["int8"]), &F32),
        false => (options, &INT8),
    };
    let file = Tensors::read(&folder.join(&case.golden));
    let base = folder.parent().expect("the golden files").join(&case.base);
    let name = case.golden.trim_end_matches(".golden.safetensors");
    check_model(name, &base, &file, &options, |_| (vec![4], Asked::All, 5), limits)
}

/// A case by the name of its golden file, the ending of its adapters, and whether activations are not rounded. An adapter
/// takes four times the launches, and a simulated launch its time: these have each form, a mixture, two at once and
/// another strength.
const USUAL: [(&str, &str, bool); 4] =
    [("e_sum", ".gguf", true), ("m_r4", "", true), ("d_half", ".gguf", true), ("e_r4", "", false)];

/// Without rounding of activations, an adapter that is a tenth too weak is seen.
#[test]
fn every_adapter_agrees_as_it_is_compiled() {
    let Some(folder) = golden::folder() else { return };
    let folder = folder.join("lora");
    let all = cases(&folder);
    let mut jobs = Vec::new();
    for case in &all {
        let usual = |job: &&(&str, &str, bool)| exhaustive() || case.golden.starts_with(&format!("{}.", job.0));
        jobs.extend(USUAL.iter().filter(usual).map(|(_, ending, is_f32)| (case, *ending, *is_f32)));
    }
    assert!(jobs.len() >= USUAL.len(), "the cases have other names");
    each(&jobs, |(case, ending, is_f32)| check(&folder, case, (ending, 1.0), *is_f32));
    let half = all.iter().find(|case| case.golden.starts_with("d_half.")).expect("a case at half its strength");
    let weak = [(half, ".gguf")];
    each(&weak, |(case, ending)| match check(&folder, case, (ending, 0.9), true) {
        Ok(()) => Err(format!("{} agrees at another strength, too", case.golden)),
        Err(_) => Ok(()),
    });
}
