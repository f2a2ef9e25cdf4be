//! What README.md and docs/ show of the program is what it does: commands and their options exist, and those on the
//! demo's files print what stands below them.

use std::collections::BTreeMap;

use crate::common::{Place, finish};

const PAGES: [(&str, &str); 7] = [
    ("README.md", include_str!("../../README.md")),
    ("docs/run.md", include_str!("../../docs/run.md")),
    ("docs/serve.md", include_str!("../../docs/serve.md")),
    ("docs/python.md", include_str!("../../docs/python.md")),
    ("docs/compile.md", include_str!("../../docs/compile.md")),
    ("docs/measure.md", include_str!("../../docs/measure.md")),
    ("docs/verify.md", include_str!("../../docs/verify.md")),
];

/// Fenced blocks, with the word behind the fence.
fn blocks(page: &str) -> impl Iterator<Item = (&str, &str)> {
    page.split("\n```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'))
}

/// Whatever begins with the program's name: lines of blocks, and what stands in backticks.
fn commands(page: &str) -> Vec<String> {
    let lines = blocks(page).flat_map(|(_, block)| block.lines());
    let spans = page.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let begun = lines.chain(spans).map(|text| text.trim_start().trim_start_matches("$ "));
    begun.filter_map(|text| text.strip_prefix("gemma4c ")).map(str::to_owned).collect()
}

#[test]
fn commands_and_options_of_the_pages_exist() {
    let place = Place::new();
    let mut helps = BTreeMap::new();
    let mut wrong = Vec::new();
    let mut looked_at = 0;
    for (page, text) in PAGES {
        for line in commands(text) {
            // What follows is a comment, or the description in the demo's list.
            let line = line.split(" #").next().and_then(|line| line.split("  ").next()).expect("a beginning");
            let mut words = line.split_whitespace();
            let Some(command) = words.next().filter(|word| word.bytes().all(|b| b.is_ascii_lowercase())) else {
                continue;
            };
            let help = helps.entry(command.to_owned()).or_insert_with(|| place.run(&format!("{command} --help")));
            if help.code != Some(0) {
                wrong.push(format!("{page}: there is no `gemma4c {command}`"));
                continue;
            }
            let is_option =
                |word: &&str| word.len() > 1 && word.starts_with('-') && !word[1..].starts_with(char::is_numeric);
            for option in words.filter(is_option) {
                looked_at += 1;
                let named = help.stdout.split(|c: char| c.is_whitespace() || c == ',').any(|word| word == option);
                if !named && option != "--help" {
                    wrong.push(format!("{page}: `gemma4c {command}` has no {option}"));
                }
            }
        }
    }
    assert!(looked_at > 60, "the pages' commands were not found: {looked_at}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Commands over what the demo leaves are run in the order of their page; `$ cat FILE` says what is in a file that they
/// read. A line `…` leaves something out, and a line that ends with a time is compared without its figures.
#[test]
fn the_tour_prints_what_the_pages_show() {
    let place = Place::new();
    place.ok("demo --device cpu -n 3");
    let mut ran = 0;
    for (page, text) in &PAGES[1..] {
        for block in blocks(text).filter(|(kind, _)| *kind == "text").map(|(_, block)| block) {
            for shown in block.strip_prefix("$ ").unwrap_or("").split("\n$ ") {
                let (line, output) = shown.split_once('\n').unwrap_or((shown, ""));
                if let Some(file) = line.strip_prefix("cat ") {
                    place.write(file, output.trim_end());
                }
                let is_ours = ["gemma4c-demo/", "austen.bin"].iter().any(|file| line.contains(file));
                if let Some(line) = line.strip_prefix("gemma4c ").filter(|_| is_ours) {
                    ran += 1;
                    compare(&place, page, line, output);
                }
            }
        }
    }
    assert!(ran >= 8, "the tour was not found: {ran} commands");
}

fn compare(place: &Place, page: &str, line: &str, shown: &str) {
    let mut command = place.command(&line.replace('"', "'"));
    // Text and plans of the pages are the CPU's.
    command.env("CUDA_VISIBLE_DEVICES", "").env("GEMMA4C_CACHE", place.path("cache"));
    let ran = finish(&mut command);
    let is_refused = shown.starts_with("error: ");
    assert_eq!(ran.code, Some(if is_refused { 2 } else { 0 }), "{page}: gemma4c {line}\n{}", ran.stderr);
    let printed = format!("{}{}", ran.stdout, ran.stderr);
    let mut rest = printed.lines();
    for expected in shown.lines().filter(|line| !line.is_empty() && line.trim() != "…") {
        let found = rest.any(|printed| comparable(printed) == comparable(expected));
        assert!(found, "{page}: gemma4c {line} does not print, at this place,\n{expected}\nbut\n{printed}");
    }
}

fn comparable(line: &str) -> String {
    let is_timed = line.ends_with(" s");
    line.chars().filter(|c| !(is_timed && (c.is_ascii_digit() || *c == '.'))).collect()
}
