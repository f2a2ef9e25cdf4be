//! The tree as tidy sees it: the project's text files, and Rust files with code, comments and literals told apart.
//!
//! A scanner and no parser: it knows where comments and literals end and nothing of the grammar, which is enough to look
//! for a word in code without being fooled by a text that speaks of it.

use std::fs;
use std::path::Path;

/// One text file of the project.
pub struct Source {
    /// From the root of the project, with `/`.
    pub path: String,
    pub text: String,
    /// The text with comments and the insides of literals blanked out; lines stay where they are. Rust files only.
    pub code: String,
    /// The text with all but comments blanked out. Rust files only.
    pub comments: String,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Source {
        let (code, comments) = if path.ends_with(".rs") { scan(text) } else { Default::default() };
        Source { path: path.into(), text: text.into(), code, comments }
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// `path:line` of every place where `found` says yes to the line of `text`, which is one of the three texts.
    pub fn places(&self, text: &str, found: impl Fn(&str) -> bool) -> Vec<String> {
        let lines = text.lines().zip(1..).filter(|(line, _)| found(line));
        lines.map(|(_, number)| format!("{}:{number}", self.path)).collect()
    }

    /// What of the file is a test: all of a file under `tests`, else what follows the first `#[cfg(test)]`.
    pub fn test_code(&self) -> &str {
        match self.path.starts_with("tests/") || self.path.contains("/tests/") {
            true => &self.code,
            false => self.code.find("#[cfg(test)]").map_or("", |start| &self.code[start..]),
        }
    }
}

/// A function with a body, as far as its size goes.
pub struct Function {
    pub name: String,
    /// From its name to its last brace.
    pub lines: usize,
    pub parameters: usize,
    /// Constants, types and lifetimes in its angle brackets.
    pub generics: usize,
    /// It is under `#[kernel]` or `#[device]`: it becomes CUDA.
    pub is_cuda: bool,
}

impl Source {
    /// The functions outside tests.
    pub fn functions(&self) -> Vec<Function> {
        let code = &self.code[..self.code.len() - self.test_code().len()];
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let mut found = Vec::new();
        let mut last = 0;
        for (at, keyword) in code.match_indices("fn ").filter(|(at, _)| !code[..*at].ends_with(is_word)) {
            let head = &code[at + keyword.len()..];
            let name = &head[..head.find(|c| !is_word(c)).unwrap_or(head.len())];
            let generics = bracketed(&head[name.len()..], '<');
            let parameters = bracketed(&head[name.len() + generics.len()..], '(');
            let after = &head[name.len() + generics.len() + parameters.len()..];
            let Some(result) = (!name.is_empty()).then(|| until_body(after)).flatten() else { continue };
            let end = at + code[at..].len() - after.len() + result + bracketed(&after[result..], '{').len();
            let is_cuda = ["#[kernel", "#[device"].iter().any(|attribute| code[last..at].contains(attribute));
            found.push(Function {
                name: name.to_string(),
                lines: code[at..end].lines().count(),
                parameters: parts(parameters),
                generics: parts(generics),
                is_cuda,
            });
            last = at;
        }
        found
    }
}

/// What `open` and its counterpart enclose at the start of a text, with both; empty where it starts otherwise.
fn bracketed(text: &str, open: char) -> &str {
    let mut depth = 0usize;
    let mut before = ' ';
    for (at, c) in text.char_indices().take_while(|(at, c)| *at > 0 || *c == open) {
        match c {
            '(' | '[' | '{' => depth += 1,
            '<' if open == '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            // Not that of an arrow.
            '>' if open == '<' && !"-=".contains(before) => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[..at + c.len_utf8()];
        }
        before = c;
    }
    ""
}

/// Where a function's body starts, behind its parameters; none where the function has no body.
fn until_body(after: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, c) in after.char_indices() {
        match c {
            '{' if depth == 0 => return Some(at),
            ';' if depth == 0 => return None,
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.checked_sub(1)?,
            _ => {}
        }
    }
    None
}

/// How many parts commas make of what brackets enclose.
fn parts(enclosed: &str) -> usize {
    let mut depth = 0i32;
    let mut before = ' ';
    let mut parts = vec![false];
    for c in enclosed.chars() {
        depth -= i32::from(")]}".contains(c) || c == '>' && !"-=".contains(before));
        match c {
            ',' if depth == 1 => parts.push(false),
            c if depth > 0 && !c.is_whitespace() => *parts.last_mut().expect("there is a first part") = true,
            _ => {}
        }
        depth += i32::from("([{<".contains(c));
        before = c;
    }
    parts.into_iter().filter(|is_there| *is_there).count()
}

/// The names tidy reads; what else is in the tree (models, pictures) is none of its business.
const TEXTS: [&str; 13] = ["rs", "md", "toml", "sh", "py", "snap", "json", "jsonl", "stderr", "cu", "cuh", "h", "cpp"];

/// Every text file of the project in order of their paths, without what is built, cached or hidden, and without the programs that
/// macros must refuse (`ui` folders): those break rules on purpose.
pub fn tree(root: &Path) -> Vec<Source> {
    let mut sources = Vec::new();
    collect(root, root, &mut sources);
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    sources
}

fn collect(root: &Path, folder: &Path, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("the project's folders can be listed") {
        let entry = entry.expect("the project's folders can be listed");
        let (path, kind) = (entry.path(), entry.file_type().expect("a file has a type"));
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_ours = !(folder == root && name == "target" || name == "ui" || name.starts_with('.') && name != ".ci");
        if kind.is_dir() && is_ours {
            collect(root, &path, sources);
        }
        let extension = path.extension().map(|e| e.to_string_lossy().into_owned());
        if kind.is_file() && extension.is_none_or(|e| TEXTS.contains(&e.as_str())) && !name.starts_with('.') {
            let relative =
                path.strip_prefix(root).expect("it lies below the root").to_string_lossy().replace('\\', "/");
            if let Ok(text) = fs::read_to_string(&path) {
                sources.push(Source::new(&relative, &text));
            }
        }
    }
}

/// Code and comments of a Rust text, each with the other blanked out.
fn scan(text: &str) -> (String, String) {
    let (mut code, mut comments) = (String::with_capacity(text.len()), String::with_capacity(text.len()));
    let mut rest = text;
    let mut before = ' ';
    while let Some(first) = rest.chars().next() {
        let (len, is_comment) = match first {
            '/' if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), true),
            '/' if rest.starts_with("/*") => (block_comment(rest), true),
            _ => (literal(rest, before), false),
        };
        let (piece, after) = rest.split_at(if len == 0 { first.len_utf8() } else { len });
        let blank: String = piece.chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
        code.push_str(if len == 0 { piece } else { &blank });
        comments.push_str(if is_comment { piece } else { &blank });
        before = piece.chars().next_back().unwrap_or(' ');
        rest = after;
    }
    (code, comments)
}

/// The length of the block comment at the start; they nest.
fn block_comment(text: &str) -> usize {
    let mut depth = 0usize;
    let mut at = 0;
    while at < text.len() {
        match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// The length of the literal at the start, 0 where there is none; `before` is the character before it.
fn literal(text: &str, before: char) -> usize {
    let is_word = before.is_alphanumeric() || before == '_';
    let raw = text.strip_prefix("br").or_else(|| text.strip_prefix('r')).filter(|_| !is_word);
    if let Some(raw) = raw {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let start = text.len() - raw.len() + hashes + 1;
            let end = format!("\"{}", "#".repeat(hashes));
            return text[start..].find(&end).map_or(text.len(), |at| start + at + end.len());
        }
    }
    let mut characters = text.char_indices();
    match characters.next() {
        Some((_, '"')) => quoted(text, '"'),
        // A lifetime has no quote after its first character.
        Some((_, '\'')) => match (characters.next(), characters.next()) {
            (Some((_, '\\')), _) | (Some(_), Some((_, '\''))) => quoted(text, '\''),
            _ => 0,
        },
        _ => 0,
    }
}

fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[test]
fn code_comments_and_literals_are_told_apart() {
    let text = r##"
let a = "unsafe // no"; // unsafe "yes
let b = 'x'; let c: &'static str = r#"unsafe "quoted" "#; /* one /* two */ still */ unsafe {}
let d = '\''; let e = b"\"unsafe"; let number = for_(1);
"##;
    let source = Source::new("a.rs", text);
    assert_eq!(source.places(&source.code, |line| line.contains("unsafe")), ["a.rs:3"]);
    assert_eq!(source.places(&source.comments, |line| line.contains("unsafe")), ["a.rs:2"]);
    assert!(source.code.contains("&'static str") && source.comments.contains("still"));
    assert!(source.code.ends_with("let number = for_(1);\n") && !source.code.contains("quoted"));
    assert_eq!(source.code.lines().count(), text.lines().count());
}

#[test]
fn functions_are_measured() {
    let text = "
#[kernel(block = 32, slots(f(value: f32, row: u32) -> f32))]
pub fn a<const N: u32, E: Float>(
    x: Input<E>,
    pair: (u32, u32),
) {
    if N > 3 {}
}
fn b<F: Fn(u32, u32) -> bool>(f: F) -> [u32; 2] { [1, 2] }
trait T { fn c(&self, _: HashMap<u32, Vec<u8>>) -> u32; }
#[device]
fn d() {}
type F = fn (u32);
#[cfg(test)]
mod tests { fn e() {} }
";
    let functions = Source::new("a.rs", text).functions();
    let measured: Vec<_> =
        functions.iter().map(|f| (f.name.as_str(), f.lines, f.parameters, f.generics, f.is_cuda)).collect();
    assert_eq!(measured, [("a", 6, 2, 2, true), ("b", 1, 1, 1, false), ("d", 1, 0, 0, true)]);
}
