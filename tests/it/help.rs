//! The help texts, reviewed as snapshots, and what happens to a command nobody knows.

use crate::common::Place;

/// The commands, as the main help lists them.
fn commands(help: &str) -> Vec<String> {
    let list = help.split("Commands:\n").nth(1).expect("a list of commands");
    let lines = list.lines().take_while(|line| !line.is_empty());
    // Continued descriptions stand further in than a command's name.
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).map(str::to_string).collect()
}

#[test]
fn every_command_explains_itself() {
    let place = Place::new();
    let help = place.ok("--help");
    assert_eq!(place.ok("-h").lines().next(), help.lines().next());
    let commands = commands(&help);
    for expected in ["synth", "compile", "run", "logits", "tokenize", "inspect", "demo", "doctor", "completions"] {
        assert!(commands.iter().any(|c| c == expected), "{expected} is not in the help:\n{help}");
    }
    assert_text!("help", "gemma4c", help);
    for command in commands {
        let help = place.ok(&format!("{command} --help"));
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
        assert_text!("help", command, help);
    }
}

#[test]
fn the_version_is_the_packages() {
    assert_eq!(Place::new().ok("--version"), format!("gemma4c {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn completions_name_every_command() {
    let place = Place::new();
    let commands = commands(&place.ok("--help"));
    for shell in ["bash", "zsh", "fish"] {
        let script = place.ok(&format!("completions {shell}"));
        for command in &commands {
            assert!(script.contains(command.as_str()), "{shell} does not complete {command}");
        }
    }
}

#[test]
fn what_cannot_be_understood_is_refused_on_stderr() {
    let place = Place::new();
    for line in ["", "frobnicate", "run", "compile model.gguf", "logits plan.bin --tokens", "synth huge -o x.gguf"] {
        let ran = place.run(line);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{line:?}");
        let shows_a_way = ran.stderr.contains("Usage: gemma4c") || ran.stderr.contains("try '--help'");
        assert!(shows_a_way, "{line:?}: {}", ran.stderr);
    }
}

#[test]
fn doctor_reports_what_there_is() {
    let report = Place::new().ok("doctor");
    for noun in ["cpu", "memory", "gpu", "nvrtc"] {
        assert!(report.lines().any(|line| line.starts_with(noun)), "{noun} is not in\n{report}");
    }
}
