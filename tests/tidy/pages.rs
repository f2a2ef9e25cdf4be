//! Rules for the pages that people read: how long they are, how wide, and that what they point to is there.
//!
//! A page is read by people who decide in a minute whether to go on. What it says of commands is held by `tests/it/pages.rs`.

use std::collections::{BTreeMap, BTreeSet};

use super::source::Source;
use super::{check, none, packages, read, root, sources};

/// Pages with a most number of lines.
const SHORT: [(&str, usize); 3] = [("README.md", 180), ("ARCHITECTURE.md", 300), ("BENCHMARKS.md", 300)];

const WIDTH: usize = 120;

#[test]
fn pages_are_short() {
    let lines = |page: &str| read(page).lines().count();
    let long = SHORT.iter().filter(|(page, most)| lines(page) > *most);
    none(
        "Too long to be read to its end. Move what few need to docs/:",
        long.map(|(page, most)| format!("{page} has {} lines, of {most}", lines(page))).collect(),
    );
}

#[test]
fn prose_is_wrapped() {
    check("Wrap prose at 120 characters:", wide_prose);
}

#[test]
fn pages_point_to_files_that_are_there() {
    check("A page names a file that is not there. Say where it is now:", |page| {
        // What a ledger tells of may be gone.
        let is_page = page.path.ends_with(".md") && page.path != "docs/ledger.md";
        let text = if is_page { page.text.as_str() } else { "" };
        let missing = named_files(text).chain(links(&page.path, text)).filter(|name| !root().join(name).exists());
        missing.map(|name| format!("{}: {name}", page.path)).collect()
    });
}

/// The house drawn in ARCHITECTURE.md is the one that cargo builds.
#[test]
fn the_drawn_imports_are_those_of_the_crates() {
    let ours = |name: &str| name.strip_prefix("gemma4c-").unwrap_or(name).to_owned();
    let page = read("ARCHITECTURE.md");
    let arrows = page.lines().filter_map(|line| line.split_once(" ─► "));
    let names = |list: &str| list.split(", ").map(|name| name.trim().to_owned()).collect::<BTreeSet<String>>();
    let drawn: BTreeMap<String, BTreeSet<String>> =
        arrows.flat_map(|(from, to)| names(from).into_iter().map(move |name| (name, names(to)))).collect();
    let packages = packages();
    for package in &packages {
        let imports = package.dependencies.iter().filter(|d| d.name.starts_with("gemma4c") && !d.is_for_tests);
        let imports: BTreeSet<String> = imports.map(|d| ours(&d.name)).collect();
        let expected = drawn.get(&ours(&package.name)).cloned().unwrap_or_default();
        assert_eq!(expected, imports, "ARCHITECTURE.md draws other imports of {} (left) than it has", package.name);
    }
    none(
        "Drawn, and no crate:",
        drawn.into_keys().filter(|name| !packages.iter().any(|p| ours(&p.name) == *name)).collect(),
    );
}

#[test]
fn the_pages_show_every_command() {
    let pages = sources().iter().filter(|s| s.path == "README.md" || s.path.starts_with("docs/"));
    let pages: String = pages.map(|s| s.text.as_str()).collect();
    let enumeration = read("src/commands/mod.rs");
    let commands = enumeration.lines().filter_map(|line| line.trim().split_once("(")?.1.strip_suffix("::Args),"));
    let commands: Vec<&str> = commands.collect();
    assert!(commands.contains(&"compile"), "the list of commands was not found in src/commands/mod.rs: {commands:?}");
    let shown = |command: &&&str| ["gemma4c", "--"].iter().any(|before| pages.contains(&format!("{before} {command}")));
    let missing = commands.iter().filter(|c| !shown(c)).map(|c| c.to_string()).collect();
    none("A command that neither README.md nor docs/ shows:", missing);
}

#[test]
fn the_rules_for_pages_see_planted_faults() {
    let wide = format!("{} end", "word ".repeat(24));
    for (text, faults) in [
        (wide.clone(), 1),
        (format!("| {wide} |"), 0),
        (format!("```text\n{wide}\n```\nshort\n"), 0),
        (format!("```text\n{wide}\n```\n{wide}\n"), 1),
    ] {
        assert_eq!(wide_prose(&Source::new("page.md", &text)).len(), faults, "{text}");
    }
    let text = "`a/b.rs` and `c/` are, `d.rs`, `x/NAME.rs`, `n/m`, `/v1/models/` and `*/e.rs` are no names of files";
    assert_eq!(named_files(text).collect::<Vec<_>>(), ["a/b.rs", "c/"]);
    let text = "[a](b.md#there) ![c](d/e.png) [f](https://g) [h](#i) [j](../K.md)";
    assert_eq!(links("docs/x.md", text).collect::<Vec<_>>(), ["docs/b.md", "docs/d/e.png", "docs/../K.md"]);
}

/// Lines of prose that are too wide. Tables, headings and what is fenced are as wide as they are.
fn wide_prose(source: &Source) -> Vec<String> {
    let mut fenced = false;
    let mut wide = Vec::new();
    for (line, number) in source.text.lines().zip(1..).filter(|_| source.path.ends_with(".md")) {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        let is_prose = !fenced && !is_fence && !line.starts_with(['|', '#', '!']);
        if is_prose && line.chars().count() > WIDTH {
            wide.push(format!("{}:{number}", source.path));
        }
    }
    wide
}

/// Names of files and folders in backticks, from the root. Placeholders in capitals, patterns and bare names are none.
fn named_files(text: &str) -> impl Iterator<Item = String> {
    const ENDS: [&str; 7] = [".rs", ".md", ".sh", ".py", ".mjs", ".toml", "/"];
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-".contains(c);
    text.split('`').skip(1).step_by(2).map(str::to_owned).filter(move |name| {
        let is_path = name.contains('/') && !name.starts_with('/') && ENDS.iter().any(|end| name.ends_with(end));
        is_path && name.chars().all(is_plain)
    })
}

/// Files that a page links to.
fn links(page: &str, text: &str) -> impl Iterator<Item = String> {
    let folder = page.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once([')', '#'])).map(|(target, _)| target);
    let ours = targets.filter(|target| !target.is_empty() && !target.contains("://"));
    ours.map(|target| format!("{folder}{target}")).collect::<Vec<_>>().into_iter()
}
