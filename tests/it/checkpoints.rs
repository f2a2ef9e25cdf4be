//! Checkpoints of safetensors through the real program: reference numbers of every form, the same bits as the GGUF file
//! of the same weights, quantising while loading, and refusals.

use crate::common::{Place, golden, ids};

/// Folders with reference numbers.
const FOLDERS: [&str; 11] = [
    "d_fp8",
    "d_fp8_block",
    "d_modelopt_nvfp4",
    "d_nvfp4",
    "e_bf16",
    "e_int4",
    "e_int4_asym",
    "e_mobile",
    "m_bf16",
    "m_fp8",
    "m_modelopt_nvfp4",
];

#[test]
fn every_form_agrees_with_its_reference() {
    let Some(folder) = golden::folder() else { return };
    let folder = folder.join("checkpoints");
    let entries = std::fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut there: Vec<String> = entries
        .filter(|path| path.is_dir())
        .map(|path| path.file_name().expect("a name").to_string_lossy().into_owned())
        .collect();
    there.sort();
    assert_eq!(there, FOLDERS);
    let place = Place::new();
    for name in FOLDERS {
        let model = folder.join(name);
        place.ok(&format!("compile '{}' -o {name}.bin --target cpu --ctx 256", model.display()));
        place.ok(&format!("verify {name}.bin --golden '{}.golden.safetensors'", model.display()));
    }
}

#[test]
fn a_checkpoint_answers_as_its_gguf_file_to_the_bit() {
    let Some(folder) = golden::folder() else { return };
    let tokens: Vec<u32> = (0..40).map(|i| 2 + i * 37 % 500).collect();
    let fed = format!("--tokens {} --all", ids(&tokens));
    for name in ["e_bf16", "m_bf16"] {
        let place = Place::new();
        let model = folder.join("checkpoints").join(name);
        for more in ["", "--quantize q8_0", "--quantize q4_0", "--embed-weights"] {
            place.ok(&format!("compile '{}' -o own.bin --target cpu --ctx 256 {more}", model.display()));
            place.ok(&format!("compile '{}.gguf' -o file.bin --target cpu --ctx 256 {more}", model.display()));
            let [own, file] = ["own.bin", "file.bin"].map(|plan| place.logits(plan, &fed));
            let [own, file] = [&own, &file].map(|tensors| &tensors.get("logits").values);
            assert!(own.iter().zip(file).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} {more}");
        }
    }
}

#[test]
fn a_checkpoint_is_taken_wherever_a_model_is() {
    let place = Place::new();
    place.ok("synth tiny-dense -q w4a16 -o model --layers 2");
    let shown = place.ok("inspect model");
    assert!(shown.contains("i4"), "{shown}");
    let told = place.run("compile model -o plan.bin --target cpu");
    assert_eq!(told.code, Some(0), "{}", told.stderr);
    let answer = |model: &str| place.ok(&format!("run {model} --device cpu --tokens 2,5,9 --temp 0 -n 8"));
    let of_plan = answer("plan.bin");
    assert_eq!(answer("model"), of_plan);
    assert_eq!(answer("model/model.safetensors"), of_plan);
    place.ok("compile model -o with.bin --target cpu --embed-weights");
    assert_eq!(answer("with.bin"), of_plan);
    assert_eq!(place.ok("tokenize model -p hello"), place.ok("tokenize plan.bin -p hello"));
}

#[test]
fn what_cannot_be_read_is_refused_in_one_sentence() {
    let place = Place::new();
    place.ok("synth tiny-moe -q fp8 -o model --layers 2");
    let quantised = place.refused("compile model -o plan.bin --quantize q5_0");
    assert!(quantised.contains("q4_0, q8_0"), "{quantised}");
    let config = std::fs::read_to_string(place.path("model/config.json")).expect("a config");
    place.write("model/config.json", config.replace("gemma4_text", "llama"));
    let refused = place.refused("compile model -o plan.bin --target cpu");
    assert!(refused.contains("config.json: model_type `llama` is not supported"), "{refused}");
    std::fs::create_dir(place.path("empty")).expect("a folder");
    let refused = place.refused("run empty -p hello");
    assert!(refused.contains("empty: not a folder with a checkpoint: it has no config.json"), "{refused}");
}
