//! Talking to the program: text in, text out, the same for the same seed, and well behaved at its ends.

use std::io::{Read, Write};
use std::process::Stdio;

use crate::common::gguf::{Key, rewrite, same};
use crate::common::{Place, Ran};
use gemma4c_models::gguf::Value;
use serde_json::Value as Json;

fn place() -> Place {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --ctx 256");
    place
}

#[test]
fn streamed_text_is_the_text_of_the_tokens() {
    let place = place();
    let prompt = "The sky above — naïve, 東京 🚀";
    let ids = place.ok(&format!("tokenize plan.bin -p '{prompt}'"));
    assert_eq!(ids, place.ok(&format!("tokenize model.gguf -p '{prompt}'")), "model and plan have one vocabulary");
    assert_eq!(place.ok(&format!("tokenize plan.bin --decode '{}'", ids.trim())).trim_end(), prompt);

    for seed in 0..4 {
        let options = format!("-n 40 --seed {seed} --top-k 5");
        let text = place.ok(&format!("run plan.bin -p '{prompt}' {options}"));
        let written = place.ok(&format!("run plan.bin --tokens '{}' {options}", ids.trim()));
        assert_eq!(place.ok(&format!("tokenize plan.bin --decode '{}'", written.trim())), text, "seed {seed}");
    }
}

#[test]
fn a_seed_is_a_text() {
    let place = place();
    let text = |seed: u32| place.ok(&format!("run plan.bin -p hello -n 20 --seed {seed}"));
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
    let greedy = |seed: u32| place.ok(&format!("run plan.bin -p hello -n 20 --temp 0 --seed {seed}"));
    assert_eq!(greedy(1), greedy(2), "without chance the seed does not matter");
    assert_eq!(place.ok("run plan.bin -p hello -n 20 --top-k 1"), greedy(0), "the best of one is the best");
}

#[test]
fn it_writes_as_many_tokens_as_it_is_asked_for() {
    let place = place();
    assert_eq!(place.ok("run plan.bin -p hello -n 0"), "\n");
    assert_eq!(place.ok("run plan.bin --tokens 2,5 -n 0"), "\n");
    let ids = place.ok("run plan.bin --tokens 2,5 -n 7 --temp 0");
    assert_eq!(ids.split_whitespace().count(), 7);
    assert!(place.ok("run plan.bin --tokens 2,5 -n 12 --temp 0").starts_with(ids.trim_end()), "more of the same");
}

#[test]
fn it_stops_where_the_context_ends() {
    let place = place();
    place.ok("compile model.gguf -o short.bin --ctx 8");
    let ran = place.run("run short.bin --tokens 2,5,6 -n 100 --temp 0");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    // Five positions are left; what the last of them answers needs no place of its own.
    assert_eq!(ran.stdout.split_whitespace().count(), 6);
    assert!(ran.stderr.contains("the context of 8 positions is full"), "{}", ran.stderr);
    let exactly = place.run("run short.bin --tokens 2,3,4,5,6,7,8,9 -n 1 --temp 0");
    assert_eq!((exactly.code, exactly.stdout.split_whitespace().count()), (Some(0), 1), "{}", exactly.stderr);
}

/// Whatever the model would say fifth is declared its end token: it says four tokens.
#[test]
fn it_stops_at_the_models_stop_tokens() {
    let place = place();
    let said: Vec<u32> = place
        .ok("run plan.bin --tokens 2,300 -n 12 --temp 0")
        .split_whitespace()
        .map(|id| id.parse().expect("an id"))
        .collect();
    let (at, end) = (1..).zip(&said[1..]).find(|(at, id)| !said[..*at].contains(id)).expect("a token said once");
    let end = *end;
    let edit = move |key: &str| match key {
        "tokenizer.ggml.eos_token_id" => Key::Set(Value::U32(end)),
        _ => Key::Keep,
    };
    rewrite(&place.path("model.gguf"), &place.path("ends.gguf"), edit, same);
    place.ok("compile ends.gguf -o ends.bin --ctx 256");
    let ids = place.ok("run ends.bin --tokens 2,300 -n 12 --temp 0");
    let until: Vec<String> = said[..at].iter().map(u32::to_string).collect();
    assert_eq!(ids.trim_end(), until.join(" "));
}

/// Runs a command with something on its standard input.
fn piped(place: &Place, line: &str, input: &[u8]) -> Ran {
    let mut command = place.command(line);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // What is refused early need not be read.
    _ = child.stdin.take().expect("a pipe").write_all(input);
    let output = child.wait_with_output().expect("it ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The same where it must work.
fn piped_ok(place: &Place, line: &str, input: &str) -> String {
    let ran = piped(place, line, input.as_bytes());
    assert_eq!(ran.code, Some(0), "{line}\n{}", ran.stderr);
    ran.stdout
}

#[test]
fn a_conversation_is_read_line_by_line() {
    let place = place();
    let ask = |lines: &str| piped_ok(&place, "run plan.bin --chat -n 8 --temp 0", lines);
    let one = ask("who are you?\n");
    assert_eq!(one, place.ok("run plan.bin --chat -n 8 --temp 0 -p 'who are you?'"));
    let two = ask("who are you?\n\n   \nand now?");
    assert!(two.len() > one.len() && two.starts_with(&one), "{two:?} goes on from {one:?}");
    assert_ne!(two[one.len()..], ask("and now?"), "the second answer knows of the first question");
    assert_eq!(ask(""), "");
    assert_ne!(one, place.ok("run plan.bin --chat -n 8 --temp 0 --system 'Be brief.' -p 'who are you?'"));
}

/// The reader of a pipe may go away in the middle: that is no error, and no reason to go on.
#[test]
fn a_closed_pipe_ends_it_quietly() {
    let place = place();
    for line in ["run plan.bin -p hello -n 100000", "inspect plan.bin --graph", "completions bash"] {
        let mut command = place.command(line);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut first = [0; 1];
        child.stdout.take().expect("a pipe").read_exact(&mut first).expect("it says something");
        let output = child.wait_with_output().expect("it ends");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !errors.contains("error") && !errors.contains("panic"), "{line}: {errors}");
    }
}

/// The note about a seed, where there is one.
fn seed(ran: &Ran) -> Option<u64> {
    ran.stderr.lines().find_map(|line| line.strip_prefix("[seed ")?.strip_suffix(']')?.parse().ok())
}

#[test]
fn a_seed_that_nobody_gave_is_random_and_printed() {
    let place = place();
    let line = "run plan.bin -p hello -n 20";
    let [one, two] = [place.run(line), place.run(line)];
    let seeds = [seed(&one), seed(&two)].map(|seed| seed.expect("a seed"));
    assert_ne!(seeds[0], seeds[1]);
    assert_ne!(one.stdout, two.stdout);
    let again = place.run(&format!("{line} --seed {}", seeds[0]));
    assert_eq!((again.stdout.as_str(), seed(&again)), (one.stdout.as_str(), None));
    assert_eq!(seed(&place.run(&format!("{line} --temp 0"))), None, "nothing depends on it");
    // All 64 bits count, however they are written.
    let text = |seed: &str| place.ok(&format!("{line} --seed {seed}"));
    assert_eq!(text("-1"), text(&u64::MAX.to_string()));
}

#[test]
fn standard_input_is_the_prompt() {
    let place = place();
    let run = "run plan.bin -n 8 --temp 0";
    let hello = place.ok(&format!("{run} -p hello"));
    for (line, input) in [(run.to_owned(), "hello\n"), (run.to_owned(), "hello"), (format!("{run} -p -"), "hello\r\n")]
    {
        assert_eq!(piped_ok(&place, &line, input), hello, "{line}");
    }
    assert_eq!(piped_ok(&place, &format!("{run} -p hello"), "nobody reads this"), hello);
    let count = piped_ok(&place, "tokenize plan.bin -p -", "hello\n");
    assert_eq!(count, place.ok("tokenize plan.bin -p hello"), "a prompt is counted as it is read");
    place.write("hello.txt", "hello");
    assert_eq!(count, place.ok("tokenize plan.bin --file hello.txt"));
    // One question of several lines, where --chat alone takes a question a line.
    let question = place.ok(&format!("{run} --chat -p 'one\ntwo'"));
    assert_eq!(piped_ok(&place, &format!("{run} --chat -p -"), "one\ntwo\n"), question);
    let asked = format!("{run} --system 'Be brief.'");
    let briefly = place.ok(&format!("{asked} --chat -p 'one\ntwo'"));
    assert_eq!(piped_ok(&place, &asked, "one\ntwo\n"), briefly, "a system prompt is for a question");
    assert_ne!(briefly, question);
    for (input, message) in [
        (&b"caf\xe9\n"[..], "standard input is not UTF-8 text: byte 3 is wrong"),
        (b"", "nothing to do: give a text with -p or on standard input, or talk with --chat"),
    ] {
        let ran = piped(&place, run, input);
        assert_eq!((ran.code, ran.stderr), (Some(2), format!("error: {message}\n")));
    }
    assert!(piped(&place, run, &vec![b'a'; (16 << 20) + 1]).stderr.contains("no prompt is that long"));
}

#[test]
fn an_answer_goes_to_a_file() {
    let place = place();
    for line in [
        "run plan.bin -p hello -n 8 --temp 0",
        "run plan.bin --tokens 2,5 -n 8 --temp 0",
        "run plan.bin --chat -p hello -n 8 --temp 0",
    ] {
        let printed = place.ok(line);
        assert_eq!(place.ok(&format!("{line} -o -")), printed);
        assert_eq!(place.ok(&format!("{line} -o answer.txt")), "");
        assert_eq!(String::from_utf8(place.read("answer.txt")).unwrap(), printed);
    }
    std::fs::create_dir(place.path("folder")).unwrap();
    assert!(place.refused("run plan.bin -p hello -o folder").contains("cannot write folder"));
    assert!(place.refused("run plan.bin --chat -o answer.txt").contains("/save FILE writes the conversation"));
}

#[test]
fn an_answer_is_json_with_all_that_is_known_of_it() {
    let place = place();
    let json = |line: &str| serde_json::from_str::<Json>(&place.ok(&format!("run plan.bin {line}"))).expect("JSON");
    let answer = json("-p hello -n 8 --seed 3 --json");
    assert_eq!(format!("{}\n", answer["text"].as_str().unwrap()), place.ok("run plan.bin -p hello -n 8 --seed 3"));
    assert_eq!((answer["tokens"].as_array().unwrap().len(), &answer["finish_reason"]), (8, &"length".into()));
    let prompt = place.ok("tokenize plan.bin -p hello").split_whitespace().count();
    assert_eq!((&answer["seed"], &answer["prompt_tokens"]), (&3.into(), &prompt.into()));
    let timings = &answer["timings"];
    assert_eq!((&timings["prefill_tokens"], &timings["decode_tokens"]), (&prompt.into(), &8.into()));
    assert!(timings["prefill_seconds"].as_f64().unwrap() > 0.0 && timings["decode_seconds"].as_f64().unwrap() > 0.0);
    assert!(json("-p hello -n 2 --json")["seed"].is_u64());
    assert!(json("-p hello -n 2 --temp 0 --json")["seed"].is_null());
    // Ids come with what they spell.
    let ids = json("--tokens 2,5 -n 3 --temp 0 --json");
    let spelled = ids["tokens"].as_array().unwrap().iter().map(Json::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!(
        place.ok(&format!("tokenize plan.bin --decode '{spelled}'")),
        format!("{}\n", ids["text"].as_str().unwrap())
    );
    place.ok("run plan.bin -p hello -n 3 --temp 0 --json -o answer.json");
    assert!(serde_json::from_slice::<Json>(&place.read("answer.json")).unwrap()["text"].is_string());
    // Of a chat in a pipe, a line for each answer.
    let lines = piped_ok(&place, "run plan.bin --chat -n 3 --temp 0 --json", "one\ntwo\n");
    assert_eq!(lines.lines().filter(|line| serde_json::from_str::<Json>(line).unwrap()["text"].is_string()).count(), 2);
}

#[test]
fn a_stop_string_ends_an_answer() {
    let place = place();
    for mode in ["-p hello", "--chat -p hello"] {
        let line = format!("run plan.bin {mode} -n 40 --temp 0 --json");
        let whole: Json = serde_json::from_str(&place.ok(&line)).unwrap();
        let text = whole["text"].as_str().unwrap();
        let characters: Vec<char> = text.chars().filter(|c| *c != '\'').collect();
        let stop: String = characters[characters.len() / 2..][..3].iter().collect();
        let Some(at) = text.find(&stop) else { panic!("{stop:?} is not in {text:?}") };
        let stopped: Json = serde_json::from_str(&place.ok(&format!("{line} --stop nowhere --stop '{stop}'"))).unwrap();
        assert_eq!((stopped["text"].as_str().unwrap(), &stopped["finish_reason"]), (&text[..at], &"stop".into()));
        assert!(stopped["tokens"].as_array().unwrap().len() < whole["tokens"].as_array().unwrap().len());
    }
    assert!(place.refused("run plan.bin -p hello --stop ''").contains("--stop"));
    assert!(place.refused("run plan.bin --tokens 2 --stop x").contains("cannot be used with"));
}

#[test]
fn penalties_change_what_is_written() {
    let place = place();
    let run = |line: &str| place.ok(&format!("run plan.bin --tokens 2,5 -n 30 --seed 1 {line}"));
    let plain = run("--temp 0");
    assert_eq!(run("--temp 0 --repetition-penalty 1 --min-p 0 --presence-penalty 0 --frequency-penalty 0"), plain);
    assert_eq!(run("--min-p 1"), plain, "only the likeliest is as likely as the likeliest");
    assert_eq!(run("--top-p 0"), plain);
    assert_eq!(run("--top-k=-1 --temperature 1"), run("--top-k 0 --temp 1"));
    // A model of random weights repeats itself: here it must not.
    let has_repeated = |text: &str| {
        let mut ids: Vec<&str> = text.split_whitespace().collect();
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        ids.len() < all
    };
    assert!(has_repeated(&plain), "{plain}");
    for penalty in ["--repetition-penalty 100", "--repeat-penalty 100"] {
        let text = run(&format!("--temp 0 {penalty}"));
        assert!(text != plain && !has_repeated(&text), "{penalty}: {text}");
        assert_eq!(run(&format!("--temp 0 {penalty} --draft ngram")), text, "drafts change nothing");
    }
    for penalty in ["--presence-penalty 2", "--frequency-penalty 2"] {
        assert_ne!(run(&format!("--temp 0 {penalty}")), plain, "{penalty}");
    }
    assert!(place.refused("run plan.bin --file x.jsonl -o y.jsonl --min-p 0.1").contains("cannot be used with"));
}

#[test]
fn minus_one_is_as_many_tokens_as_fit() {
    let place = place();
    place.ok("compile model.gguf -o short.bin --ctx 8");
    let ran = place.run("run short.bin --tokens 2,5,6 -n -1 --temp 0");
    assert_eq!((ran.code, ran.stdout.split_whitespace().count()), (Some(0), 6), "{}", ran.stderr);
    assert_eq!(place.run("run short.bin --tokens 2,5,6 --max-tokens=-1 --temp 0").stdout, ran.stdout);
    assert_eq!(place.ok("run short.bin --tokens 2,5,6 --max-tokens 2 --temp 0").split_whitespace().count(), 2);
    // Drafts do not go beyond the end.
    assert_eq!(place.ok("run short.bin --tokens 2,5,6 -n -1 --temp 0 --draft ngram"), ran.stdout);
}

/// What a chat's commands do is tested where they are; here they come through a pipe, as lines do.
#[test]
fn a_chat_in_a_pipe_knows_the_commands() {
    let place = place();
    let chat = "run plan.bin --chat -n 8 --temp 0";
    let lines = "/nothing\n/system Be brief.\n\"\"\"one\ntwo\"\"\"\n/save chat.json\n/save chat.json\n/exit\nthree\n";
    let ran = piped(&place, chat, lines.as_bytes());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.stdout, place.ok(&format!("{chat} --system 'Be brief.' -p 'one\ntwo'")));
    assert!(ran.stderr.contains("error: there is no command /nothing"), "{}", ran.stderr);
    assert!(ran.stderr.contains("error: chat.json is there already"), "{}", ran.stderr);
    let saved: Json = serde_json::from_slice(&place.read("chat.json")).unwrap();
    assert_eq!((saved.as_array().unwrap().len(), &saved[1]["content"]), (3, &"one\ntwo".into()));
    let unclosed = piped(&place, chat, b"\"\"\"one\n");
    assert_eq!((unclosed.code, unclosed.stdout.as_str()), (Some(2), ""), "{}", unclosed.stderr);
}
