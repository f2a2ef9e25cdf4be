//! A row of logits is the same to the bit however its prompt was fed, on however many threads, and from run to run.
//!
//! Prompts are far longer than the windows, so that the pages of sliding layers were used several times.

use crate::common::{Place, Tensors, finish, golden, ids, random_tokens};

const PRESETS: [&str; 3] = ["tiny-e", "tiny-dense", "tiny-moe"];

/// Ways to feed a prompt, as options of `gemma4c logits`; the first is what the others are compared with.
const WAYS: [&str; 6] = ["", "--chunk 7", "--chunk 1", "--prefill 1", "--prefill 9 --chunk 4", "--chunk 100000"];

/// Compares what `tensors` every way of feeding gives, all rows of logits and the output of a layer.
fn assert_ways_agree(place: &Place, plan: &str, tokens: &[u32]) -> Tensors {
    let line = format!("--tokens {} --all --tap blk.1.layer.out", ids(tokens));
    let whole = place.logits(plan, &line);
    assert_eq!(whole.get("logits").shape[0], tokens.len());
    assert!(whole.get("logits").values.iter().all(|v| v.is_finite()), "{plan}");
    for way in WAYS {
        assert!(place.logits(plan, &format!("{line} {way}")) == whole, "{plan}: fed with {way:?}");
    }
    whole
}

#[test]
fn any_chunks_give_the_same_bits_long_after_pages_are_used_again() {
    for preset in PRESETS {
        let place = Place::new();
        place.ok(&format!("synth {preset} -q q8_0 -o model.gguf --seed 3"));
        // A window of 32 and chunks of 16: 260 tokens go round its page twice.
        place.ok("compile model.gguf -o small.bin --ctx 300 --chunk 16");
        let tokens = random_tokens(5, 260, 1024);
        let whole = assert_ways_agree(&place, "small.bin", &tokens);

        // Without --all nothing cuts the prompt but the plan: one pass of 260 rows.
        place.ok("compile model.gguf -o large.bin --ctx 4096 --chunk 300");
        let at_once = place.logits("large.bin", &format!("--tokens {} --tap blk.1.layer.out", ids(&tokens)));
        assert_eq!(at_once.get("logits").shape[0], 1);
        assert!(at_once.get("logits").values == whole.get("logits").row(259), "{preset}: the last row, fed at once");
        assert!(at_once.get("blk.1.layer.out") == whole.get("blk.1.layer.out"), "{preset}: layer 1, fed at once");
        assert!(place.logits("large.bin", &format!("--tokens {} --all --tap blk.1.layer.out", ids(&tokens))) == whole);
    }
}

#[test]
fn threads_and_runs_leave_no_trace() {
    let place = Place::new();
    place.ok("synth tiny-moe -q q4_k -o model.gguf --seed 8");
    place.ok("compile model.gguf -o plan.bin --ctx 128 --chunk 32");
    let line = format!("logits plan.bin -o out.safetensors --all --tokens {}", ids(&random_tokens(1, 100, 1024)));
    let run = |threads: &str| {
        let ran = finish(place.command(&line).env("RAYON_NUM_THREADS", threads));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        place.read("out.safetensors")
    };
    let first = run("1");
    for threads in ["1", "2", "3", "2"] {
        assert!(run(threads) == first, "on {threads} threads");
    }
}

#[test]
fn every_type_of_weights_is_read_alike_one_row_at_a_time_and_in_bulk() {
    for dtype in "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q4_k q5_k q6_k iq4_nl iq4_xs".split(' ') {
        let place = Place::new();
        place.ok(&format!("synth tiny-dense -q {dtype} -o model.gguf"));
        place.ok("compile model.gguf -o plan.bin --ctx 64 --chunk 64");
        let line = format!("--all --tokens {}", ids(&random_tokens(2, 40, 1024)));
        let whole = place.logits("plan.bin", &line);
        let logits = whole.get("logits");
        assert!(logits.values.iter().all(|v| v.is_finite() && v.abs() <= 30.0), "{dtype}");
        assert!(logits.row(38) != logits.row(39), "{dtype}: rows do not depend on their tokens");
        assert!(place.logits("plan.bin", &format!("{line} --chunk 1")) == whole, "{dtype}");
    }
}

#[test]
fn golden_prompts_beyond_their_windows_too() {
    let folder = golden::some();
    for name in golden::of(&["d_tiny_q4_k_m_lq", "e_tiny_q4_0_lq", "m_tiny_q4_0"]) {
        let place = Place::new();
        place.ok(&format!("compile '{}' -o plan.bin --chunk 24", folder.join(format!("{name}.gguf")).display()));
        let file = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
        let tokens = [file.ids("tokens"), file.ids("greedy.tokens")].concat();
        assert_ways_agree(&place, "plan.bin", &tokens);
    }
}
