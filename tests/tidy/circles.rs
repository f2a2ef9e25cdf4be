//! Circles of imports between the files of a crate, found from `use` and from paths in code.
//!
//! A name that a file re-exports leads to the file that defines it. Re-exporting is no import, unless the file uses the name as well.
//! What a macro's expansion would import, beyond the paths in its text, is not seen.

use std::collections::{BTreeMap, BTreeSet};

use super::source::Source;

/// Files by their module's path.
struct Crate<'s> {
    modules: BTreeMap<Vec<String>, &'s Source>,
    /// What a module passes on: name to path.
    exports: BTreeMap<Vec<String>, BTreeMap<String, Vec<String>>>,
}

/// A `use` of a file, with its braces taken apart.
struct Import {
    path: Vec<String>,
    /// The name it brings; `*` brings all.
    name: String,
    exported: bool,
}

/// Each circle of a crate, as the files on the way round. `folder` holds its `lib.rs`.
pub fn circles(sources: &[Source], folder: &str) -> Vec<String> {
    let files = sources.iter().filter(|source| source.is_rust() && source.path.starts_with(folder));
    let modules = files.map(|source| (module(&source.path[folder.len()..]), source)).collect();
    let mut of = Crate { modules, exports: BTreeMap::new() };
    for (module, source) in &of.modules {
        let exported = imports(program(source)).into_iter().filter(|import| import.exported);
        let absolute = exported.filter_map(|import| Some((import.name.clone(), of.absolute(module, &import.path)?)));
        let names: BTreeMap<_, _> = absolute.collect();
        of.exports.insert(module.clone(), names);
    }
    let edges: BTreeMap<&str, BTreeSet<&str>> =
        of.modules.iter().map(|(module, source)| (source.path.as_str(), of.imported(module, source))).collect();
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for file in edges.keys() {
        if let Some(way) = way_back(&edges, file).filter(|way| !way.iter().any(|file| seen.contains(file))) {
            seen.extend(way.iter().copied());
            found.push(format!("{} -> {file}", way.join(" -> ")));
        }
    }
    found
}

/// `["sim", "memory"]` of `/sim/memory.rs`.
fn module(path: &str) -> Vec<String> {
    let mut parts: Vec<String> = path.trim_matches('/').trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

/// The file's code without its tests.
fn program(source: &Source) -> &str {
    &source.code[..source.code.len() - source.test_code().len()]
}

impl<'s> Crate<'s> {
    /// A path from the crate's root; `None` where it leads out of the crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let (first, rest) = path.split_first()?;
        let child = [module, std::slice::from_ref(first)].concat();
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([module, rest].concat()),
            "super" => {
                let mut above = module;
                let mut rest = path;
                while rest.first().is_some_and(|part| part == "super") {
                    above = above.split_last()?.1;
                    rest = &rest[1..];
                }
                Some([above, rest].concat())
            }
            _ if self.modules.contains_key(&child) => Some([module, path].concat()),
            _ => None,
        }
    }

    /// The file that defines what a path from the root names.
    fn defining(&self, path: &[String]) -> Option<&'s str> {
        let mut path = path.to_vec();
        // Re-exports of re-exports end somewhere.
        for _ in 0..8 {
            let known = (0..=path.len()).rev().find(|len| self.modules.contains_key(&path[..*len]))?;
            let exported = path.get(known).and_then(|name| self.exports.get(&path[..known])?.get(name));
            match exported {
                Some(target) => path = [&target[..], &path[known + 1..]].concat(),
                None => return self.modules.get(&path[..known]).map(|source| source.path.as_str()),
            }
        }
        None
    }

    fn imported(&self, module: &[String], source: &Source) -> BTreeSet<&'s str> {
        let code = program(source);
        let all = imports(code);
        let used = |import: &Import| !import.exported || import.name != "*" && mentions(code, &import.name) > 1;
        let paths =
            all.iter().filter(|import| used(import)).map(|import| import.path.clone()).chain(inline_paths(code));
        let absolute = paths.filter_map(|path| self.absolute(module, &path));
        absolute.filter_map(|path| self.defining(&path)).filter(|file| *file != source.path).collect()
    }
}

/// How often a word stands in a text.
fn mentions(text: &str, word: &str) -> usize {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|part| *part == word).count()
}

fn imports(code: &str) -> Vec<Import> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let line = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        if !(line.is_empty() || line.starts_with("pub")) {
            continue;
        }
        let Some(end) = code[at..].find(';') else { continue };
        let mut paths = Vec::new();
        expand("", &code[at + 4..at + end], &mut paths);
        for path in paths {
            let (path, alias) = path.split_once(" as ").unwrap_or((&path, ""));
            let mut path: Vec<String> = path.split("::").map(|part| part.trim().to_owned()).collect();
            path.retain(|part| !part.is_empty());
            if path.len() > 1 && path.last().is_some_and(|part| part == "self" || part == "*") {
                path.pop();
            }
            let name =
                if alias.is_empty() { path.last().cloned().unwrap_or_default() } else { alias.trim().to_owned() };
            found.push(Import { path, name, exported: line.starts_with("pub") });
        }
    }
    found
}

/// `a::{b, c::{d, e}}` as `a::b`, `a::c::d`, `a::c::e`.
fn expand(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let Some(open) = tree.find('{') else {
        paths.push(format!("{prefix}{}", tree.trim()));
        return;
    };
    let inner = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
    let prefix = format!("{prefix}{}", tree[..open].trim());
    let (mut depth, mut start) = (0, 0);
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&prefix, &inner[start..at], paths);
                start = at + 1;
            }
            _ => {}
        }
    }
    if !inner[start..].trim().is_empty() {
        expand(&prefix, &inner[start..], paths);
    }
}

/// Paths outside `use` that start at the root or above.
fn inline_paths(code: &str) -> impl Iterator<Item = Vec<String>> {
    ["crate::", "super::"].into_iter().flat_map(move |start| {
        code.match_indices(start).filter_map(move |(at, _)| {
            let before = code[..at].chars().next_back();
            let inside = before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':');
            let end =
                code[at..].find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(code.len() - at);
            let parts = code[at..at + end].split("::").filter(|part| !part.is_empty()).map(str::to_owned);
            (!inside).then(|| parts.collect())
        })
    })
}

/// The files on a way from `file` to itself.
fn way_back<'s>(edges: &BTreeMap<&'s str, BTreeSet<&'s str>>, file: &'s str) -> Option<Vec<&'s str>> {
    let mut ways: Vec<Vec<&str>> = vec![vec![file]];
    let mut visited = BTreeSet::new();
    // The shortest first.
    let mut next = 0;
    while let Some(way) = ways.get(next).cloned() {
        next += 1;
        for target in edges.get(way.last()?)? {
            if *target == file {
                return Some(way);
            }
            if visited.insert(*target) {
                ways.push([&way[..], &[*target]].concat());
            }
        }
    }
    None
}
