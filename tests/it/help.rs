//! The help texts, reviewed as snapshots, and what happens to a command nobody knows.

use crate::common::Place;

/// The commands, as the main help lists them.
fn commands(help: &str) -> Vec<String> {
    let list = help.split("Commands:\n").nth(1).expect("a list of commands");
    let lines = list.lines().take_while(|line| !line.is_empty());
    // Continued descriptions stand further in than a command's name.
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next()).map(str::to_string);
    // It shows the help of others and has none of its own.
    names.filter(|name| name != "help").collect()
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

/// A guess by spelling is often wrong, and then worse than none.
#[test]
fn nobody_is_told_what_they_did_not_mean() {
    let place = Place::new();
    for line in
        ["run plan.bin --stopp x", "run plan.bin --device gpu", "tokenize f --jsom", "inspct", "run plan.bin --tmp 1"]
    {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}");
        let advises = ["tip:", "similar", "-- -"].iter().find(|word| ran.stderr.contains(**word));
        assert_eq!(advises, None, "{line}: {}", ran.stderr);
    }
}

#[test]
fn help_is_a_command_too() {
    let place = Place::new();
    assert_eq!(place.ok("help"), place.ok("--help"));
    assert_eq!(place.ok("help run"), place.ok("run --help"));
}

/// The manual is made from the same descriptions as the help.
#[test]
fn every_command_has_a_page_in_the_manual() {
    let place = Place::new();
    let page = place.ok("man");
    assert!(page.contains(".TH gemma4c 1") && page.contains("GEMMA4C_CACHE") && page.contains("EXIT STATUS"), "{page}");
    place.ok("man -o pages");
    for command in commands(&place.ok("--help")) {
        let page = String::from_utf8(place.read(&format!("pages/gemma4c-{command}.1"))).unwrap();
        assert!(page.contains(&format!(".TH gemma4c-{command} 1")), "{page}");
        assert!(
            page.contains(&format!("gemma4c\\-{command}")) || page.contains(&format!("gemma4c {command}")),
            "{page}"
        );
    }
    assert_eq!(String::from_utf8(place.read("pages/gemma4c.1")).unwrap(), page);
    // The pages have the same variables.
    let shown = include_str!("../../docs/run.md");
    let environment = page.split("ENVIRONMENT").nth(1).and_then(|rest| rest.split("EXIT STATUS").next()).unwrap();
    let environment = environment.replace("\\fB", "");
    let words = environment.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
    let names: Vec<&str> = words.filter(|word| word.contains('_')).collect();
    assert!(names.len() >= 6 && names.iter().all(|name| shown.contains(name)), "{names:?}");
}
