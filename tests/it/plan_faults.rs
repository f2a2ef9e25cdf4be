//! What goes wrong with plans for GPUs, and the words for it: damaged files, models that changed or moved, and requests
//! that the compiler cannot meet. What a driver may answer is in `tests/it/driver.rs`, a plan for another GPU with it.
//!
//! The plans have no machine code, so that nothing here needs a compiler for it.

use crate::common::gguf::{Key, rewrite, same};
use crate::common::lowered::{self, Options};
use crate::common::{Place, without_numbers};
use gemma4c_models::gguf::Value;
use gemma4c_plan::Plan;

/// The sections of a plan, in the order of its table.
const SECTIONS: [&str; 9] = ["model", "target", "weights", "program", "text", "report", "cuda", "code", "embedded"];

/// A place with a tiny model and its plan for a GPU, and the faults met so far as text.
struct Faults {
    place: Place,
    texts: String,
}

impl Faults {
    fn new() -> Faults {
        let place = Place::new();
        place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
        let options = Options { context: Some(64), chunk: Some(16), ..Options::default() };
        let plan = lowered::plan(&place.path("model.gguf"), &options);
        place.write("plan.bin", plan.to_bytes().expect("a plan that can be written"));
        Faults { place, texts: String::new() }
    }

    fn about(&mut self, what: &str) {
        self.texts += &format!("{}-- {what}\n", if self.texts.is_empty() { "" } else { "\n" });
    }

    /// Runs a command that must be refused and appends its message to the snapshot.
    fn record_refusal(&mut self, line: &str) {
        let words = without_numbers(&self.place.refused(line));
        self.texts += &format!("$ gemma4c {line}\n{words}");
    }
}

/// A byte of every part of the file, by the part's name.
fn places(plan: &[u8]) -> Vec<(String, usize)> {
    let number = |at: usize| u64::from_le_bytes(plan[at..at + 8].try_into().expect("eight bytes")) as usize;
    let sections = SECTIONS.iter().enumerate().map(|(index, name)| {
        let entry = 32 + 32 * index;
        let (offset, length) = (number(entry + 8), number(entry + 16));
        assert!(length > 0, "{name} is empty");
        (name.to_string(), offset + length / 2)
    });
    [("header".into(), 25), ("table".into(), 32 + 40)].into_iter().chain(sections).collect()
}

#[test]
fn a_damaged_plan() {
    let mut faults = Faults::new();
    let plan = faults.place.read("plan.bin");
    let with = |at: usize, byte: u8| [&plan[..at], &[byte], &plan[at + 1..]].concat();
    faults.about("one bit of each part");
    for (name, at) in places(&plan) {
        let file = format!("{name}.bin");
        faults.place.write(&file, with(at, plan[at] ^ 1));
        faults.record_refusal(&format!("inspect {file}"));
    }
    faults.about("of a later version");
    faults.place.write("newer.bin", with(8, plan[8] + 1));
    faults.record_refusal("run newer.bin -p hello --device sim");
    faults.about("cut");
    faults.place.write("cut.bin", &plan[..plan.len() - 1]);
    faults.record_refusal("run cut.bin -p hello --device cuda");
    assert_text!("errors", "gpu-plans-damaged", faults.texts);
}

/// The weights under a plan are looked at before anything is computed from them, wherever it runs.
#[test]
fn another_model_under_a_plan() {
    let mut faults = Faults::new();
    let place = &faults.place;
    let model = place.read("model.gguf");
    std::fs::create_dir(place.path("folder")).expect("a folder");
    place.ok("synth tiny-dense -q q8_0 --layers 2 --seed 1 -o folder/model.gguf");
    place.ok("synth tiny-dense -q q4_0 --layers 2 -o smaller.gguf");
    for device in ["sim", "cpu"] {
        faults.about(&format!("on {device}"));
        faults.record_refusal(&format!("run plan.bin --device {device} --tokens 1 -n 1 --model folder"));
        faults.record_refusal(&format!("run plan.bin --device {device} --tokens 1 -n 1 --model smaller.gguf"));
        faults.record_refusal(&format!("run plan.bin --device {device} --tokens 1 -n 1 --model absent.gguf"));
    }
    faults.about("changed where it lies");
    let plan = Plan::from_bytes(&faults.place.read("plan.bin")).expect("a plan");
    let end_of = |weight: &gemma4c_plan::Weight| (weight.offset + weight.bytes) as usize;
    let last = plan.weights.iter().map(end_of).max().expect("weights") - 1;
    let mut changed = model.clone();
    changed[last] ^= 1;
    faults.place.write("model.gguf", changed);
    faults.record_refusal("run plan.bin --device sim --tokens 1 -n 1");
    faults.about("gone");
    std::fs::remove_file(faults.place.path("model.gguf")).expect("the model can go");
    faults.record_refusal("run plan.bin --device sim --tokens 1 -n 1");
    assert_text!("errors", "gpu-plans-and-models", faults.texts);
}

/// A model may move: with its plan, or with a word about where it went.
#[test]
fn a_model_that_has_moved_is_found() {
    let Faults { place, .. } = Faults::new();
    let line = "--device sim --tokens 1,2 -n 1 --temp 0";
    let expected = place.ok(&format!("run plan.bin {line}"));
    std::fs::create_dir(place.path("elsewhere")).expect("a folder");
    let rename = |from: &str, to: &str| std::fs::rename(place.path(from), place.path(to)).expect("a rename");
    rename("model.gguf", "elsewhere/model.gguf");
    assert_eq!(place.ok(&format!("run plan.bin {line} --model elsewhere")), expected);
    rename("plan.bin", "elsewhere/plan.bin");
    assert_eq!(place.ok(&format!("run elsewhere/plan.bin {line}")), expected, "moved together");
    rename("elsewhere/model.gguf", "renamed.gguf");
    assert_eq!(place.ok(&format!("run elsewhere/plan.bin {line} --model renamed.gguf")), expected);
}

#[test]
fn what_cannot_be_compiled_for_a_gpu() {
    let mut faults = Faults::new();
    let place = &faults.place;
    place.ok("compile model.gguf -o cpu.bin --target cpu --ctx 64");
    place.ok("synth tiny-dense -q f32 --layers 2 -o floats.gguf");
    // A feed-forward whose width is not a multiple of the quantisation block of 32.
    rewrite(
        &place.path("floats.gguf"),
        &place.path("odd.gguf"),
        |key| match key {
            "gemma4.feed_forward_length" => Key::Set(Value::U32(250)),
            _ => Key::Keep,
        },
        |tensor| match same(tensor)?.as_slice() {
            [inputs, 256] if tensor.name.contains("ffn_down") => Some(vec![inputs.min(&250).to_owned(), 256]),
            [inputs, _] if tensor.name.contains("ffn_gate") || tensor.name.contains("ffn_up") => {
                Some(vec![*inputs, 250])
            }
            other => Some(other.to_vec()),
        },
    );
    faults.about("what is asked of the compiler");
    faults.record_refusal("compile model.gguf -o out.bin --target cuda --disable-pass fuse-everything");
    faults.record_refusal("compile model.gguf -o out.bin --target cuda --ctx 64 --vram 3MB");
    faults.record_refusal("compile model.gguf -o out.bin --target cpu --arch sm_90a");
    faults.record_refusal("compile model.gguf -o out.bin --gpu a100,h200 --kv fp8");
    faults.about("a shape that no kernel takes");
    faults.record_refusal("compile odd.gguf -o out.bin --target cuda --ctx 64");
    faults.about("where it runs");
    faults.record_refusal("run cpu.bin --device sim --tokens 1");
    assert!(!faults.place.path("out.bin").exists(), "a failed compile leaves nothing");
    assert_text!("errors", "gpu-plans-requests", faults.texts);
}
