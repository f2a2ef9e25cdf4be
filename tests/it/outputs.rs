//! No output of any command takes the place of a file that the command reads.
//!
//! Commands, their inputs and their outputs are taken from the description of the command line, so that a new one is
//! covered when it is declared.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command};
use gemma4c::commands::inputs::is_of;
use gemma4c::output::{OutputFile, OutputFolder};

use crate::common::{Place, finish};

/// An argument on a command line: its flag, if it has one, and a value, if it takes one.
fn given(arg: &Arg, value: &str) -> Vec<String> {
    let flag = arg.get_long().map(|long| format!("--{long}")).or(arg.get_short().map(|short| format!("-{short}")));
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    flag.into_iter().chain(takes_value.then(|| value.to_owned())).collect()
}

/// Something that an argument can be parsed from. What it says does not matter: outputs are looked at before anything
/// runs.
fn sample(arg: &Arg) -> String {
    if is_of::<PathBuf>(arg) || is_of::<OutputFile>(arg) || is_of::<OutputFolder>(arg) {
        return format!("{}.other", arg.get_id());
    }
    match arg.get_possible_values().first() {
        Some(value) => value.get_name().into(),
        None if arg.get_id() == "preset" => "tiny-e".into(),
        None => "1".into(),
    }
}

/// A command line that gives one file as the input and as the output, and whatever the command requires besides.
fn line(command: &Command, input: &Arg, output: &Arg, file: &str) -> Vec<String> {
    let mut words = vec![command.get_name().to_owned()];
    for arg in command.get_arguments() {
        if arg.get_id() == input.get_id() || arg.get_id() == output.get_id() {
            words.extend(given(arg, file));
        } else if arg.is_required_set() {
            words.extend(given(arg, &sample(arg)));
        }
    }
    words
}

/// Every pair of a file that a command reads and one that it writes.
fn pairs(command: &Command) -> Vec<(&Arg, &Arg)> {
    let inputs = || command.get_arguments().filter(|arg| is_of::<PathBuf>(arg));
    let outputs = command.get_arguments().filter(|arg| is_of::<OutputFile>(arg));
    outputs.flat_map(|output| inputs().map(move |input| (input, output))).collect()
}

#[test]
fn no_output_of_any_command_overwrites_what_it_reads() {
    let place = Place::new();
    let content = b"what nobody must lose";
    place.write("file", content);
    fs::hard_link(place.path("file"), place.path("hard")).unwrap();
    symlink("file", place.path("soft")).unwrap();
    let (mut refused, mut exclusive) = (Vec::new(), Vec::new());
    let mut described = gemma4c::command_line();
    described.build();
    for command in described.get_subcommands() {
        for (input, output) in pairs(command) {
            let name = format!("{}: {} onto {}", command.get_name(), output.get_id(), input.get_id());
            for link in ["file", "hard", "soft"] {
                let mut words = line(command, input, output, "file");
                // The output is reached through a link.
                let at = words
                    .iter()
                    .position(|word| given(output, "")[0] == *word)
                    .unwrap_or_else(|| panic!("{name}: {words:?}"));
                words[at + 1] = link.into();
                let mut ran = finish(place.command("").args(&words));
                for other in command.get_arguments().filter(|arg| arg.get_long().is_some()) {
                    // What an argument requires besides: clap names it when it refuses.
                    let missing = ran.stderr.split("Usage:").next().filter(|said| said.contains("were not provided"));
                    if missing.is_some_and(|said| said.contains(&given(other, "")[0])) {
                        words.extend(given(other, &sample(other)));
                        ran = finish(place.command("").args(&words));
                    }
                }
                assert_eq!(ran.code, Some(2), "{name}: {words:?}\n{}", ran.stderr);
                if ran.stderr.contains("cannot be used with") {
                    exclusive.push(name.clone());
                    break;
                }
                let says = format!("{link} would be overwritten, and it is read by this command");
                assert!(ran.stderr.contains(&says), "{name}: {words:?}\n{}", ran.stderr);
                assert_eq!(place.read("file"), content, "{name}");
                refused.push(name.clone());
            }
        }
    }
    refused.dedup();
    // A blind test would find nothing to refuse.
    for expected in [
        "compile: output onto model",
        "compile: output onto draft",
        "logits: output onto plan",
        "inspect: html onto file",
    ] {
        assert!(refused.iter().any(|name| name == expected), "{expected} is not among {refused:#?}");
    }
    insta::assert_snapshot!(exclusive.join("\n"), @"");
}

/// What a command reads by way of a plan: its models, wherever they are found.
#[test]
fn the_model_of_a_plan_is_read_too() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    place.ok("synth tiny-e --draft -o draft.gguf");
    place.ok("compile model.gguf --draft draft.gguf -o plan.bin --target cpu --ctx 64");
    fs::create_dir(place.path("moved")).unwrap();
    fs::copy(place.path("model.gguf"), place.path("moved/model.gguf")).unwrap();
    let (model, draft) = (place.read("model.gguf"), place.read("draft.gguf"));
    for (line, says) in [
        ("logits plan.bin --tokens 2 -o model.gguf", "it is the model of plan.bin"),
        ("logits plan.bin --tokens 2 -o draft.gguf", "it is the model of plan.bin"),
        ("logits plan.bin --tokens 2 --model moved -o moved/model.gguf", "it is the model of plan.bin"),
        ("inspect plan.bin --html ./model.gguf", "it is the model of plan.bin"),
        ("inspect plan.bin --html plan.bin", "it is read by this command"),
        ("profile plan.bin --trace model.gguf", "it is the model of plan.bin"),
        ("perplexity plan.bin --tokens model.gguf --checkpoint draft.gguf", "it is the model of plan.bin"),
        ("run plan.bin --file prompts.jsonl -o model.gguf", "it is the model of plan.bin"),
        ("run model.gguf --draft draft.gguf --file prompts.jsonl -o draft.gguf", "it is read by this command"),
        ("compile model.gguf -o model.gguf", "it is read by this command"),
        ("compile model.gguf --draft draft.gguf -o draft.gguf", "it is read by this command"),
        ("synth tiny-e --vocab model.gguf -o model.gguf", "it is read by this command"),
        ("load http://127.0.0.1:1 --json same --answers same", "same is given for two outputs"),
    ] {
        let said = place.refused(line);
        assert!(said.contains(says), "{line}: {said}");
    }
    assert!(place.read("model.gguf") == model && place.read("draft.gguf") == draft);
}

/// An argument that is written to but declared as a path that is read would escape: files are opened for writing in one
/// place.
#[test]
fn files_are_written_through_one_door() {
    let mut folders = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
    let mut read = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
                continue;
            }
            let Ok(text) = fs::read_to_string(&entry) else { continue };
            read += 1;
            let written = ["fs::write(", "File::create", "OpenOptions::new", "fs::copy(", "fs::rename("];
            let found = written.iter().find(|word| text.contains(**word));
            let is_the_door = entry.ends_with("src/output.rs");
            assert!(found.is_none() || is_the_door, "{}: {found:?} belongs in output.rs", entry.display());
        }
    }
    assert!(read > 80, "{read} files");
}
