//! Everything that typically goes wrong, through the real program: each fault ends with code 2, nothing on stdout and
//! one message, and the messages are a snapshot, because they are what a person has to go by.

use crate::common::Place;
use crate::common::gguf::{Key, rewrite, same};
use gemma4c_models::gguf::{Gguf, Value};

/// A place with a tiny model and its plan, and the faults met so far as text.
struct Faults {
    place: Place,
    texts: String,
}

impl Faults {
    fn new() -> Faults {
        let place = Place::new();
        place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
        place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64 --chunk 16");
        Faults { place, texts: String::new() }
    }

    fn about(&mut self, what: &str) {
        self.texts += &format!("{}-- {what}\n", if self.texts.is_empty() { "" } else { "\n" });
    }

    /// Runs a command that must be refused and appends its message to the snapshot.
    fn record_refusal(&mut self, line: &str) {
        let words = without_fingerprints(&self.place.refused(line));
        self.texts += &format!("$ gemma4c {line}\n{words}");
    }
}

/// Fingerprints follow from random weights; the words around them are what is reviewed.
fn without_fingerprints(text: &str) -> String {
    let is_fingerprint = |word: &str| word.len() == 16 && word.chars().all(|c| c.is_ascii_hexdigit());
    let words = text.split_inclusive(|c: char| !c.is_alphanumeric());
    words
        .map(|word| match word.char_indices().last() {
            Some((end, mark)) if is_fingerprint(&word[..end]) => format!("FINGERPRINT{mark}"),
            _ => word.to_string(),
        })
        .collect()
}

#[test]
fn a_model_that_cannot_be_compiled() {
    let mut faults = Faults::new();
    let place = &faults.place;
    let good = place.read("model.gguf");
    let with = |at: usize, new: &[u8]| [&good[..at], new, &good[at + new.len()..]].concat();
    place.write("archive.gguf", with(0, b"PK\x03\x04"));
    place.write("empty.gguf", "");
    place.write("newer.gguf", with(4, &[9]));
    place.write("cut.gguf", &good[..good.len() - 100_000]);
    place.write("cut-header.gguf", &good[..1000]);
    std::fs::create_dir(place.path("folder.gguf")).expect("a folder");
    let made = std::process::Command::new("mkfifo").arg(place.path("pipe.gguf")).status().expect("mkfifo runs");
    assert!(made.success());
    let variant = |name: &str, edit: fn(&str) -> Key<'static>| {
        rewrite(&place.path("model.gguf"), &place.path(name), edit, same);
    };
    variant("llama.gguf", |key| match key {
        "general.architecture" => Key::Set(Value::Str("llama")),
        _ => Key::Keep,
    });
    variant("no-layers.gguf", |key| if key == "gemma4.block_count" { Key::Drop } else { Key::Keep });
    variant("other-tokenizer.gguf", |key| match key {
        "tokenizer.ggml.model" => Key::Set(Value::Str("bert")),
        _ => Key::Keep,
    });
    variant("odd-heads.gguf", |key| match key {
        "gemma4.attention.head_count" => Key::Set(Value::U32(3)),
        _ => Key::Keep,
    });
    rewrite(
        &place.path("model.gguf"),
        &place.path("missing.gguf"),
        |_| Key::Keep,
        |tensor| {
            let is_gone =
                ["blk.0.attn_k.weight", "blk.1.ffn_norm.weight", "output_norm.weight"].contains(&&*tensor.name);
            same(tensor).filter(|_| !is_gone)
        },
    );
    rewrite(
        &place.path("model.gguf"),
        &place.path("misshapen.gguf"),
        |_| Key::Keep,
        |tensor| {
            if &*tensor.name == "blk.1.attn_q.weight" { Some(vec![256, 1024]) } else { same(tensor) }
        },
    );

    faults.about("no model");
    for name in ["absent", "folder", "pipe", "archive", "empty", "newer", "cut", "cut-header"] {
        faults.record_refusal(&format!("compile {name}.gguf -o out.bin"));
    }
    faults.record_refusal("compile plan.bin -o out.bin");
    faults.about("not this kind of model");
    for name in ["llama", "no-layers", "other-tokenizer", "odd-heads", "missing", "misshapen"] {
        faults.record_refusal(&format!("compile {name}.gguf -o out.bin"));
    }
    faults.about("what the compiler is asked for");
    for options in ["--ctx 0", "--ctx 8193", "--chunk 0"] {
        faults.record_refusal(&format!("compile model.gguf -o out.bin {options}"));
    }
    faults.record_refusal("compile model.gguf -o nowhere/out.bin");
    faults.record_refusal("compile model.gguf -o folder.gguf");
    faults.record_refusal("compile model.gguf -o pipe.gguf");
    faults.about("looking at it");
    for line in ["absent.gguf", "pipe.gguf", "empty.gguf", "cut.gguf --json", "missing.gguf --graph"] {
        faults.record_refusal(&format!("inspect {line}"));
    }
    faults.record_refusal("inspect model.gguf --dot 2");
    faults.record_refusal("inspect plan.bin --dot 0");
    assert!(!faults.place.path("out.bin").exists(), "a failed compile leaves nothing");
    assert_text!("errors", "compile", faults.texts);
}

/// A factor that is infinite, one that is NaN, and one whose products are no halves: of matrices, of the table of
/// embeddings.
#[test]
fn a_weight_that_is_no_number() {
    let mut faults = Faults::new();
    let good = faults.place.read("model.gguf");
    let offset = |name: &str| {
        let file = Gguf::open(faults.place.path("model.gguf")).expect("a model");
        file.tensor(name).expect("a tensor").offset as usize
    };
    let places = [
        ("infinite", "blk.1.ffn_down.weight", 34 * 1000, 0x7c00u16),
        ("nan", "token_embd.weight", 0, 0xfe01),
        ("large", "blk.0.ffn_up.weight", 34, 0xe000),
    ];
    for (name, tensor, block, half) in places {
        let at = offset(tensor) + block;
        let damaged = [&good[..at], &half.to_le_bytes(), &good[at + 2..]].concat();
        faults.place.write(&format!("{name}.gguf"), damaged);
        faults.place.ok(&format!("compile {name}.gguf -o {name}.bin --target cpu --ctx 64 --chunk 16"));
    }
    faults.record_refusal("run infinite.bin -p hello");
    faults.record_refusal("run nan.bin -p hello");
    faults.record_refusal("run large.bin -p hello");
    faults.record_refusal("bench infinite.bin -p 16 -n 4");
    assert_text!("errors", "weights", faults.texts);
}

#[test]
fn a_plan_that_cannot_be_run() {
    let mut faults = Faults::new();
    let place = &faults.place;
    let (plan, model) = (place.read("plan.bin"), place.read("model.gguf"));
    let with = |at: usize, new: &[u8]| [&plan[..at], new, &plan[at + new.len()..]].concat();
    place.write("archive.bin", with(0, b"PK\x03\x04"));
    place.write("newer.bin", with(8, &[gemma4c_plan::VERSION as u8 + 1]));
    place.write("cut.bin", &plan[..plan.len() - 1]);
    place.write("cut-header.bin", &plan[..20]);
    place.write("flipped.bin", with(plan.len() / 2, &[plan[plan.len() / 2] ^ 1]));
    place.write("empty.bin", "");
    std::fs::create_dir(place.path("folder")).expect("a folder");
    place.ok("synth tiny-dense -q q8_0 --layers 2 --seed 1 -o folder/model.gguf");
    place.ok("synth tiny-dense -q q4_0 --layers 2 -o smaller.gguf");

    faults.about("no plan");
    for name in ["absent", "archive", "newer", "cut", "cut-header", "flipped", "empty"] {
        faults.record_refusal(&format!("run {name}.bin -p hello"));
    }
    faults.record_refusal("verify model.gguf");
    faults.record_refusal("run folder -p hello");
    faults.about("another model under it");
    faults.record_refusal("run plan.bin -p hello --model folder");
    faults.record_refusal("run plan.bin -p hello --model folder/model.gguf");
    faults.record_refusal("run plan.bin -p hello --model smaller.gguf");
    faults.record_refusal("run plan.bin -p hello --model absent.gguf");
    faults.place.write("model.gguf", &model[..model.len() - 32]);
    faults.record_refusal("run plan.bin -p hello");
    // As large, but of another seed.
    let other = faults.place.read("folder/model.gguf");
    assert_eq!(other.len(), model.len());
    faults.place.write("model.gguf", other);
    faults.record_refusal("run plan.bin -p hello");
    std::fs::remove_file(faults.place.path("model.gguf")).expect("the model can go");
    faults.record_refusal("run plan.bin -p hello");
    assert_text!("errors", "plan-and-model", faults.texts);
}

#[test]
fn a_request_that_makes_no_sense() {
    let mut faults = Faults::new();
    let place = &faults.place;
    rewrite(
        &place.path("model.gguf"),
        &place.path("silent.gguf"),
        |key| match key {
            "tokenizer.ggml.model" => Key::Set(Value::Str("none")),
            _ if key.starts_with("tokenizer.") => Key::Drop,
            _ => Key::Keep,
        },
        same,
    );
    let no_template = |key: &str| if key == "tokenizer.chat_template" { Key::Drop } else { Key::Keep };
    rewrite(&place.path("model.gguf"), &place.path("base.gguf"), no_template, same);
    place.ok("compile silent.gguf -o silent.bin --ctx 64");
    place.ok("compile base.gguf -o base.bin --ctx 64");
    place.write("latin1.txt", b"caf\xe9");
    std::fs::create_dir(place.path("folder")).expect("a folder");
    let long = (0..65).map(|i| i.to_string()).collect::<Vec<_>>().join(",");

    faults.about("tokens");
    faults.record_refusal("run plan.bin --tokens 1,2,1024");
    faults.record_refusal("run plan.bin --tokens ''");
    faults.record_refusal("run plan.bin --tokens 1,two");
    faults.record_refusal("run plan.bin --tokens=-1");
    faults.record_refusal(&format!("run plan.bin --tokens {long}"));
    faults.record_refusal("logits plan.bin -o out.safetensors --tokens 1024");
    faults.record_refusal("logits plan.bin -o out.safetensors --tokens ''");
    faults.record_refusal(&format!("logits plan.bin -o out.safetensors --tokens {long}"));
    faults.about("what logits are asked for");
    faults.record_refusal("logits plan.bin -o out.safetensors --tokens 1,2 --prefill 0");
    faults.record_refusal("logits plan.bin -o out.safetensors --tokens 1,2 --prefill 3");
    faults.record_refusal("logits plan.bin -o out.safetensors --tokens 1,2 --chunk 0");
    faults.record_refusal("logits plan.bin -o out.safetensors --tokens 1,2 --tap blk.9.layer.out");
    faults.record_refusal("logits plan.bin -o out.safetensors --tokens 1,2 --tap blk.0.attention.kv");
    faults.record_refusal("logits plan.bin -o nowhere/out.safetensors --tokens 1,2");
    faults.record_refusal("logits plan.bin -o folder --tokens 1,2");
    faults.about("sampling");
    for option in [
        "--temp=-1",
        "--temp nan",
        "--temp 2.1",
        "--top-p=-0.1",
        "--top-p 1.5",
        "--top-p nan",
        "--top-k=-2",
        "--min-p 1.5",
        "--repetition-penalty 0",
        "--presence-penalty 2.5",
        "--frequency-penalty=-3",
        "--seed x",
        "-n=-2",
    ] {
        faults.record_refusal(&format!("run plan.bin -p hello {option}"));
    }
    faults.about("text");
    faults.record_refusal("run plan.bin");
    faults.record_refusal("run silent.bin -p hello");
    faults.record_refusal("run silent.bin --chat -p hello");
    faults.record_refusal("run base.bin --chat -p hello");
    faults.record_refusal("tokenize silent.gguf -p hello");
    faults.record_refusal("tokenize silent.bin -p hello");
    faults.record_refusal("tokenize plan.bin --decode 1024");
    faults.record_refusal("tokenize plan.bin --decode 5,x");
    faults.record_refusal("tokenize plan.bin -f absent.txt");
    faults.record_refusal("tokenize plan.bin -f latin1.txt");
    faults.record_refusal("tokenize absent.bin -p hello");
    faults.record_refusal("tokenize folder -p hello");
    faults.about("measuring, and where");
    faults.record_refusal("run plan.bin -p hello --device cuda");
    faults.record_refusal("bench plan.bin -p 16 -n 64");
    faults.record_refusal("bench plan.bin -p 16 -n 8 -d 60");
    faults.record_refusal("bench plan.bin -p 16 -r 0");
    faults.record_refusal("bench plan.bin -p 16,many");
    faults.record_refusal("profile plan.bin");
    faults.record_refusal("profile plan.bin --ceiling-gbs 0");
    faults.record_refusal("profile plan.bin --trace folder");
    faults.about("random models");
    faults.record_refusal("synth tiny-e --layers 2 -o out.gguf");
    faults.record_refusal("synth tiny-e --layers 7 -o out.gguf");
    faults.record_refusal("synth tiny-e -o nowhere/out.gguf");
    faults.record_refusal("synth tiny-e -o folder");
    faults.record_refusal("synth tiny-e -o out.gguf --vocab absent.gguf");
    faults.record_refusal("synth tiny-e -o out.gguf --vocab silent.gguf");
    for left in ["out.safetensors", "out.gguf", "out.gguf.partial"] {
        assert!(!faults.place.path(left).exists(), "{left} is left behind");
    }
    assert_text!("errors", "requests", faults.texts);
}

/// A model without a vocabulary is a model: it compiles, and runs on ids.
#[test]
fn a_model_without_a_vocabulary_runs_on_ids() {
    let Faults { place, .. } = Faults::new();
    let silence = |key: &str| match key {
        "tokenizer.ggml.model" => Key::Set(Value::Str("none")),
        _ if key.starts_with("tokenizer.") => Key::Drop,
        _ => Key::Keep,
    };
    rewrite(&place.path("model.gguf"), &place.path("silent.gguf"), silence, same);
    place.ok("compile silent.gguf -o silent.bin --ctx 64");
    assert!(place.ok("inspect silent.bin").contains("vocabulary     none: runs on token ids"));
    let ids = place.ok("run silent.bin --tokens 5,6,7 -n 9 --temp 0");
    assert_eq!(ids.split_whitespace().count(), 9, "{ids}");
    assert_eq!(ids, place.ok("run plan.bin --tokens 5,6,7 -n 9 --temp 0"), "the vocabulary changes no number");
    let logits = place.logits("silent.bin", "--tokens 5,6,7 --all");
    assert_eq!(logits.get("logits").shape, [3, 1024]);
}

/// A model may move: with its plan, or with a word about where it went.
#[test]
fn a_model_that_has_moved_is_found() {
    let Faults { place, .. } = Faults::new();
    let expected = place.ok("run plan.bin --tokens 1,2 -n 4 --temp 0");
    std::fs::create_dir(place.path("elsewhere")).expect("a folder");
    let rename = |from: &str, to: &str| std::fs::rename(place.path(from), place.path(to)).expect("a rename");

    rename("model.gguf", "elsewhere/model.gguf");
    assert_eq!(place.ok("run plan.bin --tokens 1,2 -n 4 --temp 0 --model elsewhere"), expected);
    assert_eq!(place.ok("run plan.bin --tokens 1,2 -n 4 --temp 0 --model elsewhere/model.gguf"), expected);
    rename("plan.bin", "elsewhere/plan.bin");
    assert_eq!(place.ok("run elsewhere/plan.bin --tokens 1,2 -n 4 --temp 0"), expected, "moved together");
    rename("elsewhere/model.gguf", "renamed.gguf");
    assert_eq!(place.ok("run elsewhere/plan.bin --tokens 1,2 -n 4 --temp 0 --model renamed.gguf"), expected);

    // Compiled where the model is not: the plan knows the way.
    rename("renamed.gguf", "model.gguf");
    place.ok("compile model.gguf -o elsewhere/far.bin --ctx 64");
    assert_eq!(place.ok("run elsewhere/far.bin --tokens 1,2 -n 4 --temp 0"), expected);
    // And finds it beside itself, should the old place be empty.
    rename("model.gguf", "elsewhere/model.gguf");
    assert_eq!(place.ok("run elsewhere/far.bin --tokens 1,2 -n 4 --temp 0"), expected);
}
