//! Talking to the program: text in, text out, the same for the same seed, and well behaved at its ends.

use std::io::{Read, Write};
use std::process::Stdio;

use crate::common::Place;
use crate::common::gguf::{Key, rewrite, same};
use gemma4c_models::gguf::Value;

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

#[test]
fn a_conversation_is_read_line_by_line() {
    let place = place();
    let ask = |lines: &str| {
        let mut command = place.command("run plan.bin --chat -n 8 --temp 0");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        child.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
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
