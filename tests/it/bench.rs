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

/// The columns of `llama-batched-bench`, whose figures follow from each other.
#[test]
fn several_sequences_are_measured_together() {
    let place = place();
    let table = place.ok("bench plan.bin --sequences 1,3 -p 20 -n 4,0 -r 2");
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| "))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows[0], ["PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"]);
    let shapes: Vec<&[&str]> = rows[1..].iter().map(|row| &row[..4]).collect();
    assert_eq!(
        shapes,
        [["20", "4", "1", "24"], ["20", "4", "3", "72"], ["20", "0", "1", "20"], ["20", "0", "3", "60"]]
    );

    let report: serde_json::Value =
        serde_json::from_str(&place.ok("bench plan.bin --sequences 4 -p 9 -n 5 -r 1 -o json")).unwrap();
    let row = &report["results"][0];
    let figure = |name: &str| row[name].as_f64().unwrap();
    assert_eq!(report["device"], "cpu");
    assert_eq!(["pp", "tg", "b", "n_kv"].map(figure), [9.0, 5.0, 4.0, 56.0]);
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-6, "{row}");
    close(figure("s_pp") * figure("t_pp"), 36.0);
    close(figure("s_tg") * figure("t_tg"), 20.0);
    close(figure("t"), figure("t_pp") + figure("t_tg"));
    close(figure("s") * figure("t"), 56.0);
}

/// A turn's prompt is the whole chat so far; the last prompt was kept, and the last answer is read.
#[test]
fn a_turn_of_a_chat_reads_the_last_answer_and_what_is_new() {
    let place = Place::new();
    place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 400 --chunk 16");
    let chat = "bench plan.bin --device cpu --chat 4 --system 300 --turn 6 -n 5 -r 2";
    let report: serde_json::Value = serde_json::from_str(&place.ok(&format!("{chat} -o json"))).unwrap();
    let rate = report["limit"]["tokens_per_second"].as_f64().unwrap();
    assert_eq!(report["limit"]["prompt"], 399, "the context is shorter than 512");
    let expected = [[306, 0, 306], [317, 306, 11], [328, 317, 11], [339, 328, 11]];
    let turns = report["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 4);
    for (turn, expected) in turns.iter().zip(expected) {
        assert_eq!(["prompt", "cached", "new"].map(|name| turn[name].as_u64().unwrap()), expected, "{turn}");
        let limit = turn["limit_seconds"].as_f64().unwrap();
        assert!((limit / (expected[2] as f64 / rate + 0.015) - 1.0).abs() < 1e-6, "{turn}");
        let times: Vec<f64> =
            turn["first_token_seconds"].as_array().unwrap().iter().filter_map(|t| t.as_f64()).collect();
        assert_eq!((times.len(), turn["holds"].as_bool()), (2, Some(times.iter().all(|time| *time <= limit))));
    }
    let table = place.ok(&format!("{chat} --host-cache 1MiB --itl 50ms"));
    assert!(table.contains("\n| 2 | 317 | 306 | 11 | "), "{table}");
    assert!(table.contains(" t/s of pp399, and 15 ms; "), "{table}");

    let refused = |line: &str| place.refused(&format!("bench plan.bin {line}"));
    assert!(refused("--chat 0").contains("--chat 0: at least one turn is needed"));
    assert!(refused("--chat 2 --turn 0").contains("--turn 0"));
    assert!(refused("--chat 2 --system 9 -n 0").contains("-n 0: an answer has at least one token"));
    assert!(refused("--chat 2 --system 9 -n 1,2").contains("-n 1,2: an answer has one length"));
    assert!(refused("--chat 2 --system 390 --turn 4 -n 2").contains("a chat of 402 tokens does not fit"));
    assert!(refused("--chat 2 -p 8").contains("--prompt"));
    assert!(refused("--system 9").contains("--chat"));
    assert!(refused("--itl 5").contains("--itl is for many sequences: it needs --sequences or --chat"));
    assert!(refused("--host-cache 1GiB").contains("--host-cache is for many sequences"));
    assert!(refused("--chat 2 --itl fast").contains("a time is a number of milliseconds"));
    assert!(refused("--chat 2 --itl 0").contains("more than 0 is needed"));
}

/// A text that repeats itself is the answer, whatever a random model picks: most of it is looked up, and what the model
/// picks does not depend on that.
#[test]
fn a_text_is_forced_and_looked_up_in_itself() {
    let place = place();
    place.write("text", "round and round the rugged rocks ".repeat(40));
    let report: serde_json::Value =
        serde_json::from_str(&place.ok("bench plan.bin --ngram text -p 40 -n 60 -r 1 -o json")).unwrap();
    let rows = report["looked_up"].as_array().unwrap();
    let drafts: Vec<Option<u64>> = rows.iter().map(|row| row["drafts"].as_u64()).collect();
    assert_eq!(drafts, [Some(1), Some(3), Some(7), Some(15), None]);
    let rounds = |row: usize| rows[row]["rounds"].as_u64().unwrap();
    // Of 59 tokens after the first, with no room for all drafts at the end.
    assert!(rounds(0) <= 31 && rounds(3) <= 6 && rounds(3) < rounds(2), "{report:#}");
    assert!(rows.iter().all(|row| row["forced"] == true && row["accepted"].as_u64() > Some(0)), "{report:#}");
    let table = place.ok("bench plan.bin --ngram text -p 40 -n 20 -r 1");
    assert!(table.contains("\n| auto | ") && table.contains("The answer is forced"), "{table}");

    let refused = |line: &str| place.refused(&format!("bench plan.bin {line}"));
    assert!(refused("--ngram none -p 40 -n 60").contains("cannot read none"));
    assert!(refused("--ngram text -p 0 -n 60").contains("a prompt of 0 tokens"));
    assert!(refused("--ngram text -p 5000 -n 60").contains("tokens, and 5060 are needed"));
    assert!(refused("--ngram text -p 100 -n 60").contains("160 tokens do not fit the plan's context of 128"));
    assert!(refused("--ngram text --draft").contains("--draft"));
    place.ok("compile model.gguf -o narrow.bin --target cpu --ctx 128 --chunk 1");
    assert!(place.refused("bench narrow.bin --ngram text -p 40 -n 20").contains("verifies no drafts"));
}

#[test]
fn what_cannot_be_measured_together_is_refused() {
    let place = place();
    let refused = |line: &str| place.refused(&format!("bench plan.bin {line}"));
    assert!(refused("--sequences 0 -p 8 -n 2").contains("--sequences 0: at least one is needed"));
    assert!(refused("--sequences 2,x -p 8 -n 2").contains("\"x\" is no count"));
    assert!(refused("--sequences 2 -p 100 -n 29").contains("100 + 29 tokens do not fit the plan's context of 128"));
    assert!(refused("--sequences 2 -p 0 -n 2").contains("-p 0"));
    assert!(refused("--sequences 2 -p 8 -d 8").contains("--depth"));
    assert!(refused("--sequences 5000 -p 8 -n 2").contains("a number of sequences of 5000 is out of range"));
}
