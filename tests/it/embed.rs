//! Plans that have their weights with them: one file that runs alone, whose weights are those of the model to the bit.

use std::borrow::Cow;

use crate::common::lowered::{self, Options};
use crate::common::{Place, without_numbers};
use gemma4c::embed;
use gemma4c::pipeline::{Declared, Files};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::cuda::image::write_region;
use gemma4c_codegen::cuda::simulate::Simulator;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::gguf::Gguf;
use gemma4c_plan::cuda::{Argument, Launch, Range, Region};
use gemma4c_plan::{Plan, START, WeightId, own_bytes};
use gemma4c_runtime::{ModelLocation, RuntimeError, Session};

/// A place with a tiny model and its plan for the CPU, with weights and without.
fn for_the_cpu(preset: &str, dtype: &str) -> Place {
    let place = Place::new();
    place.ok(&format!("synth {preset} -q {dtype} -o model.gguf"));
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64");
    place.ok("compile model.gguf -o whole.bin --target cpu --ctx 64 --embed-weights");
    place
}

/// A place with a tiny model and its plan for GPUs, `plan.bin`, and with weights, `whole.bin`. Neither has machine
/// code.
fn for_gpus(preset: &str, dtype: &str, options: &Options) -> Place {
    let place = Place::new();
    place.ok(&format!("synth {preset} -q {dtype} -o model.gguf"));
    let mut plan = lowered::plan(&place.path("model.gguf"), options);
    place.write("plan.bin", plan.to_bytes().unwrap());
    let model = Gguf::open(place.path("model.gguf")).unwrap();
    let mut progress = (0, 0);
    let bytes =
        embed::write(&mut plan, &[&model], &place.path("whole.bin"), &mut |done, total| progress = (done, total));
    assert_eq!(bytes.unwrap(), std::fs::metadata(place.path("whole.bin")).unwrap().len());
    assert!(progress.0 == progress.1 && progress.1 > 0, "{progress:?}");
    place
}

fn short() -> Options {
    Options { context: Some(64), chunk: Some(32), ..Options::default() }
}

#[test]
fn a_plan_for_the_cpu_runs_without_its_model() {
    for (preset, dtype) in [("tiny-e", "q8_0"), ("tiny-dense", "q4_k"), ("tiny-moe", "q4_0")] {
        let place = for_the_cpu(preset, dtype);
        let line = "--tokens 2,10,11,12 --all";
        let expected = place.logits("plan.bin", line);
        place.ok("compile model.gguf -o again.bin --target cpu --ctx 64 --embed-weights");
        assert!(place.read("whole.bin") == place.read("again.bin"), "{preset}: the same bytes every time");
        std::fs::remove_file(place.path("model.gguf")).unwrap();
        assert!(place.logits("whole.bin", line) == expected, "{preset}");
        assert!(place.refused("run plan.bin --tokens 2").contains("model.gguf was not found"));
        // The file may go anywhere.
        std::fs::create_dir(place.path("elsewhere")).unwrap();
        std::fs::rename(place.path("whole.bin"), place.path("elsewhere/other.bin")).unwrap();
        assert!(place.logits("elsewhere/other.bin", line) == expected, "{preset}: moved");
        let shown = place.ok("inspect elsewhere/other.bin");
        assert!(shown.contains("as in the model file: no model file is needed"), "{shown}");
        let all = place.ok("inspect elsewhere/other.bin --check-weights");
        assert!(all.ends_with("of weights, all as they were compiled\n"), "{all}");
        assert!(place.ok("tokenize elsewhere/other.bin -p hello").starts_with("2 "));
    }
}

/// What the file has is what loading would leave in memory, of every type: the simulator's kernels and the host agree.
#[test]
fn the_weights_of_a_gpu_are_those_that_its_kernels_make() {
    let dtypes =
        ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"];
    let mut widened = 0;
    for (at, dtype) in dtypes.into_iter().enumerate() {
        let place = Place::new();
        let preset = ["tiny-e", "tiny-dense", "tiny-moe"][at % 3];
        place.ok(&format!(
            "synth {preset} -q {dtype} --layers {} -o model.gguf",
            if preset == "tiny-e" { 6 } else { 2 }
        ));
        let model = Gguf::open(place.path("model.gguf")).unwrap();
        let plan = lowered::plan(&place.path("model.gguf"), &short());
        // The per-layer table goes to the host's memory.
        let vram = (preset == "tiny-e").then(|| plan.cuda.as_ref().unwrap().program.memory.device().unwrap() - 1);
        let options = Options { vram, gpus: vec![Gpu::of_arch(Arch::Sm90a)], ..short() }.with_copies();
        let files = Files::open(&place.path("model.gguf"), &options).unwrap();
        let lowered = Declared::new(&files, &options).unwrap().lower(&options.gpus[0]).unwrap();
        let program = lowered.program.clone();
        let tensor = |weight: WeightId| {
            let named = model.tensor(&plan.weights[weight.index()].name).unwrap();
            Cow::Borrowed(model.data(named))
        };
        let mut simulator = Simulator::new(&program, lowered.instances);
        simulator.load(&program, tensor).unwrap();
        for region in [Region::Weights, Region::Host] {
            let mut image = Vec::new();
            write_region(&program, &plan.weights, region, &|weight| Ok(tensor(weight)), &mut image).unwrap();
            let bytes = if region == Region::Weights { program.loaded_bytes() } else { program.memory.host };
            let loaded = simulator.read(Range { region, offset: 0, bytes });
            let first = std::iter::zip(&image, loaded).position(|(a, b)| a != b);
            assert!(image.len() == loaded.len() && first.is_none(), "{preset} {dtype}: byte {first:?} of {region:?}");
        }
        // Copies in bf16 come last, and are in no file.
        let copies: u64 = program.prepare.iter().map(|launch| last_range(launch).bytes).sum();
        assert!(program.memory.weights - program.loaded_bytes() - copies <= 256 * program.prepare.len() as u64 + 256);
        widened += program.prepare.len();
    }
    assert!(widened > 0, "no plan has copies in bf16");
}

/// What a launch that prepares weights writes.
fn last_range(launch: &Launch) -> Range {
    let ranges = launch.arguments.iter().filter_map(|argument| match argument {
        Argument::Memory(range) => Some(*range),
        _ => None,
    });
    ranges.max_by_key(|range| range.offset).unwrap()
}

#[test]
fn a_plan_for_gpus_computes_the_same_with_its_weights() {
    let place = for_gpus("tiny-dense", "q8_0", &short());
    let line = "--device sim --tokens 2,10,11,12,13 --prefill 3 --all";
    let expected = place.logits("plan.bin", line);
    assert!(place.logits("whole.bin", line) == expected);
    // The model is needed for anything that is not a GPU, and where it is there, all goes on as ever.
    let on_cpu = place.logits("plan.bin", "--device cpu --tokens 2,10,11 --all");
    assert!(place.logits("whole.bin", "--device cpu --tokens 2,10,11 --all") == on_cpu);
    let shown = place.ok("inspect whole.bin");
    assert!(shown.contains("as the GPU's memory holds them"), "{shown}");
    let json: serde_json::Value = serde_json::from_str(&place.ok("inspect whole.bin --json")).unwrap();
    assert_eq!(json["embedded"]["form"], "regions");
    assert!(json["embedded"]["bytes"].as_u64() <= json["memory"]["weights"].as_u64());
    let plain: serde_json::Value = serde_json::from_str(&place.ok("inspect plan.bin --json")).unwrap();
    assert!(plain["embedded"].is_null());
    assert!(place.ok("diff plan.bin whole.bin").contains("in the model file -> in the plan"));
}

/// What can be wrong with such a file, and the words for it.
#[test]
fn each_fault_of_a_plan_with_its_weights_has_its_words() {
    let place = for_gpus("tiny-dense", "q4_0", &short());
    let whole = place.read("whole.bin");
    let weights = Plan::from_bytes(&whole).unwrap().embedded.unwrap();
    let start = whole.len() - weights.bytes as usize;
    let with = |at: usize| [&whole[..at], &[whole[at] ^ 1], &whole[at + 1..]].concat();
    place.write("cut.bin", &whole[..whole.len() - 5000]);
    place.write("cut-at-the-weights.bin", &whole[..start]);
    place.write("longer.bin", [&whole[..], &[0; 10]].concat());
    place.write("header.bin", with(17));
    place.write("sums.bin", with(own_bytes(&whole[..START]).unwrap() as usize - 4));
    place.write("flipped.bin", with(start + weights.bytes as usize / 2));
    let mut texts = String::new();
    let mut record_refusal =
        |line: &str| texts += &format!("$ gemma4c {line}\n{}", without_numbers(&place.refused(line)));
    for name in ["cut", "cut-at-the-weights", "longer", "header", "sums"] {
        record_refusal(&format!("inspect {name}.bin"));
    }
    record_refusal("inspect flipped.bin --check-weights");
    record_refusal("run flipped.bin --device sim --tokens 1 -n 1");
    record_refusal("inspect plan.bin --check-weights");
    record_refusal("inspect model.gguf --check-weights");
    record_refusal("compile whole.bin -o out.bin --embed-weights");
    record_refusal("compile model.gguf -o nowhere/out.bin --embed-weights");
    std::fs::remove_file(place.path("model.gguf")).unwrap();
    record_refusal("run whole.bin --device cpu --tokens 1 -n 1");
    record_refusal("run whole.bin --device sim --tokens 1 -n 1");
    record_refusal("verify whole.bin --device sim");
    assert_text!("errors", "embedded", texts);
}

/// A file that is cut between the reading of its plan and of its weights, and one whose weights are others by then.
#[test]
fn weights_that_change_under_a_plan_are_noticed() {
    let place = for_the_cpu("tiny-dense", "q4_0");
    let plan = Plan::from_bytes(&place.read("whole.bin")).unwrap();
    let location = ModelLocation { plan: place.path("whole.bin"), given: None };
    let open = || Session::on_cpu(plan.clone(), &location).map(drop);
    open().unwrap();
    let whole = place.read("whole.bin");
    let weights = plan.embedded.as_ref().unwrap().bytes as usize;
    place.write("whole.bin", &whole[..weights - 1]);
    assert!(matches!(open(), Err(RuntimeError::WeightsCut { needed, found, .. }) if needed == found + 1));
    // As long, but all of it from a later place.
    place.write("whole.bin", &whole[..whole.len() - 1]);
    assert!(matches!(open(), Err(RuntimeError::WeightsDamaged { first: 0, .. })));
    std::fs::remove_file(place.path("whole.bin")).unwrap();
    assert!(matches!(open(), Err(RuntimeError::Io { .. })));
}
