//! `gemma4c perplexity`: its figures are those of the reference data and of plain arithmetic on the same logits, an
//! interrupted run ends as a whole one does, and what makes no sense is refused by name.

use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::Duration;

use crate::common;
use crate::common::gguf::{Key, rewrite, same};
use crate::common::lowered::{self, Options};
use crate::common::{Place, Random, Tensors, finish, golden, ids, random_tokens};
use gemma4c_models::gguf::Value;
use gemma4c_plan::Plan;
use gemma4c_runtime::argmax;
use serde_json::Value as Json;

/// The figures, as JSON.
fn figures(place: &Place, line: &str) -> Json {
    serde_json::from_str(&place.ok(&format!("perplexity {line} -o json"))).unwrap()
}

#[track_caller]
fn number(figures: &Json, key: &str) -> f64 {
    figures[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {figures}"))
}

/// The windows of a checkpoint: of each its columns of numbers.
fn windows(text: &str) -> Vec<Vec<Vec<f64>>> {
    let (_, lines) = text.split_once("\n\n").expect("a header");
    let column = |column: &str| column.split(' ').map(|word| word.parse().unwrap()).collect();
    lines.lines().map(|line| line.split('\t').skip(1).map(column).collect()).collect()
}

fn text(place: &Place, name: &str) -> String {
    String::from_utf8(place.read(name)).unwrap()
}

fn lines(windows: &[Vec<u32>]) -> String {
    windows.iter().map(|window| ids(window) + "\n").collect()
}

/// A tiny model in two types, compiled for the CPU.
fn two_plans() -> Place {
    let place = Place::new();
    for dtype in ["q8_0", "q4_0"] {
        place.ok(&format!("synth tiny-dense -q {dtype} --layers 2 -o {dtype}.gguf"));
        place.ok(&format!("compile {dtype}.gguf -o {dtype}.bin --target cpu --ctx 64 --chunk 16"));
    }
    place
}

/// What transformers computes from the same weights: the mean, and every single token, by prefill and by decode.
#[test]
fn a_trained_models_likelihoods_are_the_golden_ones() {
    let (place, folder) = (Place::new(), golden::some());
    for (name, expected) in [("austen_q8_0", 3.587098), ("austen_q4_0", 3.612617)] {
        if !golden::has(&format!("trained/{name}")) {
            continue;
        }
        let model = folder.join(format!("trained/{name}.gguf"));
        place.ok(&format!("compile '{}' -o {name}.bin --target cpu --ctx 512", model.display()));
        let golden = Tensors::read(&folder.join(format!("trained/{name}.golden.safetensors")));
        let (tokens, nll) = (golden.ids("windows"), golden.get("nll"));
        assert_eq!((golden.get("windows").shape.as_slice(), nll.shape.as_slice()), (&[5, 513][..], &[5, 512][..]));
        place.write("windows.txt", lines(&tokens.chunks(513).map(<[u32]>::to_vec).collect::<Vec<_>>()));

        let prefill = figures(&place, &format!("{name}.bin --tokens windows.txt --checkpoint {name}.scores"));
        assert_eq!(prefill["tokens"], 2560);
        assert!((number(&prefill, "nll") - expected).abs() < 1e-5, "{name}: {prefill}");
        assert!((number(&prefill, "perplexity") - expected.exp()).abs() < 1e-3, "{name}: {prefill}");
        let values: Vec<f64> = nll.values.iter().map(|value| *value as f64).collect();
        let mean = values.iter().sum::<f64>() / 2560.0;
        let error = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 2559.0 / 2560.0).sqrt();
        assert!((number(&prefill, "error") - error).abs() < 1e-5, "{name}: {error}, {prefill}");

        let ours: Vec<f64> = windows(&text(&place, &format!("{name}.scores"))).concat().concat();
        assert_eq!(ours.len(), 2560);
        let worst = ours.iter().zip(&values).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 5e-4, "{name}: a token is off by {worst}");
    }
    let first: String = text(&place, "windows.txt").lines().take(1).collect();
    place.write("first.txt", first);
    // The CPU computes a row one way.
    let [prefill, decode] =
        ["", "--decode"].map(|way| figures(&place, &format!("austen_q4_0.bin --tokens first.txt {way}")));
    assert_eq!(decode, prefill);
    // The repository has one of the two models.
    if !place.path("austen_q8_0.bin").is_file() {
        return;
    }
    let against = figures(&place, "austen_q4_0.bin --tokens first.txt --against austen_q8_0.bin");
    let (kl, p99) = (number(&against, "kl_mean"), number(&against, "kl_p99"));
    assert!(0.0 < kl && kl < p99 && p99 < 1.0, "{against}");
    assert!((0.5..1.0).contains(&number(&against, "same_top")), "{against}");
}

/// All figures from the logits that `gemma4c logits` writes, by plain formulas.
#[test]
fn the_figures_are_those_of_the_logits() {
    let place = two_plans();
    // More rows than are asked for at once, and a window that begins with fewer.
    let sequences = [random_tokens(1, 50, 1024), random_tokens(2, 2, 1024), random_tokens(3, 17, 1024)];
    place.write("ids.txt", lines(&sequences));
    let found = figures(&place, "q4_0.bin --tokens ids.txt --against q8_0.bin");
    let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["nll", "error", "tokens", "perplexity", "kl_mean", "kl_p99", "same_top", "nll_against"]);

    let (mut nll, mut nll_against, mut kl, mut same_top) = (vec![], vec![], vec![], 0);
    for sequence in &sequences {
        let line = format!("--tokens {} --all", ids(&sequence[..sequence.len() - 1]));
        let (this, other) = (place.logits("q4_0.bin", &line), place.logits("q8_0.bin", &line));
        for (row, token) in sequence[1..].iter().enumerate() {
            let rows = [&this, &other].map(|tensors| tensors.get("logits").row(row));
            let [q, p] = rows.map(|row| {
                let sum: f64 = row.iter().map(|x| (*x as f64).exp()).sum();
                row.iter().map(|x| (*x as f64).exp() / sum).collect::<Vec<f64>>()
            });
            nll.push(-q[*token as usize].ln());
            nll_against.push(-p[*token as usize].ln());
            kl.push(p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum::<f64>());
            same_top += usize::from(argmax(rows[0]) == argmax(rows[1]));
        }
    }
    let count = nll.len() as f64;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / count;
    kl.sort_by(f64::total_cmp);
    // 66 tokens: 0.99 of the way from the first to the last is 64.35.
    assert_eq!(kl.len(), 66);
    let p99 = 0.65 * kl[64] + 0.35 * kl[65];
    let expected = [
        ("nll", mean(&nll)),
        ("tokens", count),
        ("perplexity", mean(&nll).exp()),
        ("kl_mean", mean(&kl)),
        ("kl_p99", p99),
        ("same_top", same_top as f64 / count),
        ("nll_against", mean(&nll_against)),
    ];
    for (key, value) in expected {
        let found = number(&found, key);
        assert!((found - value).abs() < 1e-9 * value.abs().max(1.0), "{key}: {found}, expected {value}");
    }
    assert!(mean(&kl) > 0.0);

    let alone = figures(&place, "q4_0.bin --tokens ids.txt");
    let keys: Vec<&String> = alone.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["nll", "error", "tokens", "perplexity"]);
    assert!(keys.iter().all(|key| alone[*key] == found[*key]), "{alone} {found}");
}

#[test]
fn a_plan_does_not_differ_from_itself() {
    let place = two_plans();
    place.write("ids.txt", lines(&[random_tokens(4, 40, 1024), random_tokens(5, 9, 1024)]));
    for options in ["", "--decode", "--against-device cpu"] {
        let found = figures(&place, &format!("q8_0.bin --tokens ids.txt --against q8_0.bin {options}"));
        assert_eq!((&found["kl_mean"], &found["kl_p99"]), (&Json::from(0.0), &Json::from(0.0)), "{options}: {found}");
        assert_eq!(found["same_top"], 1.0, "{options}: {found}");
        assert_eq!(found["nll_against"], found["nll"], "{options}: {found}");
    }
}

#[test]
fn one_token_has_no_error() {
    let place = two_plans();
    place.write("ids.txt", "5 6\n");
    let found = figures(&place, "q8_0.bin --tokens ids.txt");
    assert_eq!((&found["tokens"], &found["error"]), (&Json::from(1), &Json::Null), "{found}");
    let table = place.ok("perplexity q8_0.bin --tokens ids.txt");
    assert!(table.contains("scored") && !table.contains('±'), "{table}");
}

/// A text is cut as llama.cpp does: windows side by side, each with the first token replaced, the second half scored.
#[test]
fn a_text_is_cut_into_windows_that_begin_with_bos() {
    let place = two_plans();
    let words = ["the sky", " above ", "naïve\n", "port 東京 ", "was 17 "];
    let mut random = Random(6);
    let prose: String = (0..61).map(|_| words[random.below(5) as usize]).collect();
    place.write("prose.txt", &prose);
    let tokens: Vec<u32> =
        place.ok("tokenize q8_0.bin -f prose.txt").split_whitespace().map(|id| id.parse().unwrap()).collect();
    assert_eq!(tokens[0], 2, "the text begins with BOS");
    let left_over = tokens.len() % 21;
    assert!(tokens.len() > 63 && left_over > 0, "{} tokens", tokens.len());
    let cut = tokens.chunks_exact(21).map(|window| [&[2], &window[1..]].concat());
    place.write("ids.txt", lines(&cut.collect::<Vec<_>>()));

    let ran = place.run("perplexity q8_0.bin --file prose.txt --window 21 --all -o json");
    assert_eq!(ran.stdout, place.ok("perplexity q8_0.bin --tokens ids.txt -o json"));
    let note = format!("[the last {left_over} tokens of prose.txt do not fill a window of 21 and are not scored]\n");
    assert_eq!(ran.stderr, note);

    // Of 21 tokens the last 21 - 1 - 10 are scored, with the same numbers.
    place.ok("perplexity q8_0.bin --file prose.txt --window 21 --all --checkpoint all");
    place.ok("perplexity q8_0.bin --file prose.txt --window 21 --checkpoint half");
    let (all, half) = (windows(&text(&place, "all")), windows(&text(&place, "half")));
    assert_eq!(all.len(), tokens.len() / 21);
    for (all, half) in all.iter().zip(&half) {
        assert_eq!((all[0].len(), half[0].len()), (20, 10));
        assert_eq!(all[0][10..], half[0][..]);
    }
    assert_eq!(all.len(), half.len());

    // The text may come through a pipe.
    let mut command = place.command("perplexity q8_0.bin --file - --window 21 --all -o json");
    command.stdin(Stdio::from(std::fs::File::open(place.path("prose.txt")).unwrap()));
    let piped = finish(&mut command);
    assert_eq!(piped.stdout, ran.stdout, "{}", piped.stderr);
    assert!(piped.stderr.contains("tokens of standard input do not fill"), "{}", piped.stderr);
}

/// Wherever a run was interrupted, it ends with the bits of one that was not, and does not compute again what is there.
#[test]
fn an_interrupted_run_goes_on() {
    let place = two_plans();
    place.write("ids.txt", lines(&(0..4).map(|seed| random_tokens(seed, 12, 1024)).collect::<Vec<_>>()));
    for against in ["", "--against q8_0.bin"] {
        let line = format!("perplexity q4_0.bin --tokens ids.txt {against} -o json");
        let expected = place.ok(&line);
        std::fs::remove_file(place.path("state")).ok();
        let resumable = format!("{line} --checkpoint state");
        assert_eq!(place.ok(&resumable), expected, "a new checkpoint");
        let whole = place.read("state");
        let header = whole.windows(2).position(|pair| pair == b"\n\n").unwrap() + 2;
        let ends: Vec<usize> = (header..whole.len()).filter(|at| whole[*at] == b'\n').map(|at| at + 1).collect();
        assert_eq!(ends.len(), 4);
        // Before the header, within it, right after it, within lines, between them, at the end.
        for cut in [0, 1, 40, header - 1, header, header + 1, ends[0], ends[1] - 1, ends[1], ends[3] - 1, ends[3]] {
            place.write("state", &whole[..cut]);
            let ran = place.run(&resumable);
            assert_eq!(ran.stdout, expected, "cut at {cut}: {}", ran.stderr);
            let there = ends.iter().filter(|end| **end <= cut).count();
            let note = format!("[{there} of 4 windows are in state already]\n");
            assert_eq!(ran.stderr, if there == 0 { "" } else { &note }, "cut at {cut}");
            assert_eq!(place.read("state"), whole, "cut at {cut}");
        }
    }
    // What is there is not computed again: another number shows in the result.
    let whole = text(&place, "state");
    let first = whole.lines().find(|line| line.starts_with("1\t")).unwrap();
    let (_, rest) = first.split_once(' ').unwrap();
    place.write("state", whole.replace(first, &format!("1\t100.0 {rest}")));
    let line = "perplexity q4_0.bin --tokens ids.txt --against q8_0.bin -o json";
    assert_ne!(place.ok(&format!("{line} --checkpoint state")), place.ok(line));
}

#[test]
fn a_killed_run_goes_on() {
    let place = two_plans();
    place.write("ids.txt", lines(&(0..12).map(|seed| random_tokens(seed, 60, 1024)).collect::<Vec<_>>()));
    let line = "perplexity q8_0.bin --tokens ids.txt --decode -o json";
    let mut child = place.command(&format!("{line} --checkpoint state")).stdout(Stdio::null()).spawn().unwrap();
    let finished = || std::fs::read_to_string(place.path("state")).map_or(0, |text| windows_in(&text));
    while finished() < 3 && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(finished() >= 3);
    let ran = place.run(&format!("{line} --checkpoint state"));
    assert!(ran.stderr.contains("of 12 windows are in state already"), "{}", ran.stderr);
    assert_eq!(ran.stdout, place.ok(line));
}

/// Whole lines after the header, of a file that is being written.
fn windows_in(text: &str) -> usize {
    text.split_once("\n\n").map_or(0, |(_, lines)| lines.matches('\n').count())
}

/// Prefill and decode are other kernels with other roundings: each is scored by its own, and both are close to the CPU.
#[test]
fn a_simulated_gpu_is_scored_by_the_phase_it_is_fed_through() {
    let place = Place::new();
    place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
    let options = Options { context: Some(64), chunk: Some(8), ..Options::default() };
    place.write("plan.bin", lowered::plan(&place.path("model.gguf"), &options).to_bytes().unwrap());
    place.write("ids.txt", lines(&[random_tokens(7, 6, 1024)]));
    let line = "plan.bin --tokens ids.txt --device sim --against plan.bin --against-device cpu";
    let (prefill, decode) = (figures(&place, line), figures(&place, &format!("{line} --decode")));
    let cpu = figures(&place, "plan.bin --tokens ids.txt --device cpu");
    for found in [&prefill, &decode] {
        assert_eq!(found["nll_against"], cpu["nll"], "{found}");
        let kl = number(found, "kl_mean");
        assert!(kl > 0.0 && kl < 0.01, "{found}");
        assert!((number(found, "nll") - number(&cpu, "nll")).abs() < 0.1, "{found} {cpu}");
    }
    assert_ne!(prefill["nll"], decode["nll"]);
}

/// The errors met so far, as text.
struct Refusals {
    place: Place,
    texts: String,
}

impl Refusals {
    fn record_refusal(&mut self, line: &str) {
        let words = self.place.refused(&format!("perplexity {line}"));
        self.texts += &format!("$ gemma4c perplexity {line}\n{}", common::without_numbers(&words));
    }
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let place = two_plans();
    place.ok("synth tiny-e -q q8_0 --layers 3 -o e.gguf");
    place.ok("compile e.gguf -o short.bin --target cpu --ctx 8");
    let silence = |key: &str| match key {
        "tokenizer.ggml.model" => Key::Set(Value::Str("none")),
        _ if key.starts_with("tokenizer.") => Key::Drop,
        _ => Key::Keep,
    };
    rewrite(&place.path("q8_0.gguf"), &place.path("silent.gguf"), silence, same);
    place.ok("compile silent.gguf -o silent.bin --target cpu --ctx 64");
    smaller_vocabulary(&place);
    logits_beyond_floats(&place);
    for (name, text) in [
        ("ids.txt", "1 2 3\n4,5,6\n"),
        ("empty.txt", ""),
        ("blank.txt", "\n  \n"),
        ("lonely.txt", "1 2\n\n3\n"),
        ("words.txt", "1 2\n3 four\n"),
        ("large.txt", "1 2\n3 1024 4\n"),
        ("long.txt", &format!("1 2\n{}\n", ids(&random_tokens(1, 10, 1024)))),
        ("seven.txt", "1 2 3\n4 5 6 7 8 9\n"),
        ("prose.txt", "the sky above the port"),
    ] {
        place.write(name, text);
    }
    place.write("latin1.txt", b"caf\xe9");
    std::fs::create_dir(place.path("folder")).unwrap();

    let mut refusals = Refusals { place, texts: String::new() };
    for line in [
        "q8_0.bin --tokens absent.txt",
        "q8_0.bin --tokens folder",
        "q8_0.bin --tokens empty.txt",
        "q8_0.bin --tokens blank.txt",
        "q8_0.bin --tokens lonely.txt",
        "q8_0.bin --tokens words.txt",
        "q8_0.bin --tokens large.txt",
        "short.bin --tokens long.txt",
        "q8_0.bin --tokens long.txt --against short.bin",
        "huge.bin --tokens seven.txt",
        "huge.bin --tokens seven.txt --decode",
        "short.bin --tokens seven.txt --against huge.bin",
        "q8_0.bin --tokens ids.txt --against absent.bin",
        "q8_0.bin --tokens ids.txt --against q8_0.gguf",
        "q8_0.bin --tokens ids.txt --against fewer.bin",
        "q8_0.bin --tokens ids.txt --against q4_0.bin --against-model q8_0.gguf",
        "q8_0.bin --tokens ids.txt --against q4_0.bin --against-device cuda",
        "q8_0.bin --file absent.txt",
        "q8_0.bin --file empty.txt",
        "q8_0.bin --file latin1.txt",
        "q8_0.bin --file prose.txt",
        "q8_0.bin --file prose.txt --window 2",
        "q8_0.bin --file prose.txt --window 1 --all",
        "short.bin --file prose.txt --window 10",
        "silent.bin --file prose.txt",
        "q8_0.bin --tokens ids.txt --checkpoint folder",
        "q8_0.bin --tokens ids.txt --checkpoint nowhere/state",
        "q8_0.bin --tokens ids.txt --checkpoint prose.txt",
    ] {
        refusals.record_refusal(line);
    }
    assert_eq!(
        text(&refusals.place, "prose.txt"),
        "the sky above the port",
        "a file that is something else is left alone"
    );
    refusals.checkpoints();
    assert_text!("errors", "perplexity", refusals.texts);
}

impl Refusals {
    /// Files of other runs, and files that were damaged.
    fn checkpoints(&mut self) {
        self.place.ok("perplexity q8_0.bin --tokens ids.txt --checkpoint state");
        let state = text(&self.place, "state");
        for line in [
            "q4_0.bin --tokens ids.txt --checkpoint state",
            "q8_0.bin --tokens long.txt --checkpoint state",
            "q8_0.bin --file prose.txt --window 5 --checkpoint state",
            "q8_0.bin --tokens ids.txt --checkpoint state --decode",
            "q8_0.bin --tokens ids.txt --checkpoint state --against q4_0.bin",
        ] {
            self.record_refusal(line);
            assert_eq!(text(&self.place, "state"), state, "{line}: it is left as it was");
        }
        self.place.write("simulated", state.replace("device: cpu", "device: a simulated GPU"));
        self.record_refusal("q8_0.bin --tokens ids.txt --checkpoint simulated");
        self.place.write("older", state.replace("checkpoint 1", "checkpoint 0"));
        self.record_refusal("q8_0.bin --tokens ids.txt --checkpoint older");
        let second = state.lines().last().unwrap();
        for (name, changed) in [
            ("header", state.replace("phase: prefill\n", "phase: prefill\nmore: 1\n")),
            ("number", state.replace(second, &second.replacen('.', ",", 1))),
            ("not-finite", state.replace(second, "2\tNaN 1.0")),
            ("order", state.replace(second, &second.replacen('2', "3", 1))),
            ("fewer", state.replace(second, second.rsplit_once(' ').unwrap().0)),
            ("extra", format!("{state}3\t1.0 1.0\n")),
            ("endless", format!("{}{}", state.strip_suffix('\n').unwrap(), "1".repeat(1000))),
        ] {
            assert_ne!(changed, state, "{name}");
            self.place.write(name, changed);
            self.record_refusal(&format!("q8_0.bin --tokens ids.txt --checkpoint {name}"));
        }
        let held = std::fs::File::open(self.place.path("state")).unwrap();
        held.lock().unwrap();
        self.record_refusal("q8_0.bin --tokens ids.txt --checkpoint state");
    }
}

/// What the command line itself refuses.
#[test]
fn options_that_contradict_each_other_are_refused() {
    let place = Place::new();
    for line in [
        "plan.bin",
        "plan.bin --tokens a --file b",
        "plan.bin --tokens a --all",
        "plan.bin --tokens a --window 512",
        "plan.bin --file a --window many",
        "plan.bin --file a --against-device cpu",
        "plan.bin --file a --against-model b",
        "plan.bin --file a -o xml",
    ] {
        let ran = place.run(&format!("perplexity {line}"));
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{line}");
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains("--help"), "{line}: {}", ran.stderr);
    }
}

/// The model of `q8_0.bin` with 32 tokens less, as `fewer.bin`.
fn smaller_vocabulary(place: &Place) {
    let silence = |key: &str| match key {
        "tokenizer.ggml.model" => Key::Set(Value::Str("none")),
        _ if key.starts_with("tokenizer.") => Key::Drop,
        _ => Key::Keep,
    };
    rewrite(&place.path("q8_0.gguf"), &place.path("fewer.gguf"), silence, |tensor| match &*tensor.name {
        "token_embd.weight" => Some(vec![tensor.dims()[0], tensor.dims()[1] - 32]),
        _ => same(tensor),
    });
    place.ok("compile fewer.gguf -o fewer.bin --target cpu --ctx 64");
}

/// A model whose logits are too large for floats, as `huge.bin`: its last norm has the largest factors there are.
fn logits_beyond_floats(place: &Place) {
    place.write("huge.gguf", place.read("e.gguf"));
    let plan = Plan::from_bytes(&place.read("short.bin")).unwrap();
    let norm = plan.weights.iter().find(|weight| weight.name == "output_norm.weight").unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(place.path("huge.gguf")).unwrap();
    let factors = f32::MAX.to_le_bytes().repeat(norm.bytes as usize / 4);
    file.write_all_at(&factors, norm.offset).unwrap();
    place.ok("compile huge.gguf -o huge.bin --target cpu --ctx 8");
}
