//! Comments are not tokens: they are found again in the source text behind the function's body, by line, and handed
//! to the printer statement by statement. Where the text is not available (some editors), the kernel has no comments.

use proc_macro2::Span;

/// One comment, with the marker (`//`) it is printed with.
#[derive(Debug, PartialEq)]
struct Comment {
    line: usize,
    text: String,
    /// Code stands before it on its line.
    trailing: bool,
}

/// The comments of one body, in source order.
#[derive(Default)]
pub struct Comments {
    all: Vec<Comment>,
    next: usize,
}

impl Comments {
    /// Reads the comments inside a brace group.
    pub fn of_group(group: Span) -> Self {
        match group.source_text() {
            Some(text) => Self { all: scan(&text, group.start().line), next: 0 },
            None => Self::default(),
        }
    }

    /// The comments that stand on lines of their own before `line`, with their lines.
    pub fn before(&mut self, line: usize) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        while let Some(comment) = self.all.get(self.next).filter(|c| c.line < line) {
            found.push((comment.line, comment.text.clone()));
            self.next += 1;
        }
        found
    }

    /// The comment behind the code on `line`.
    pub fn trailing(&mut self, line: usize) -> Option<String> {
        let comment = self.all.get(self.next).filter(|c| c.trailing && c.line == line)?;
        self.next += 1;
        Some(comment.text.clone())
    }
}

/// Finds comments outside string literals. Character literals that hold a quote do not occur in kernels.
fn scan(text: &str, first_line: usize) -> Vec<Comment> {
    let mut found = Vec::new();
    let mut rest = text;
    let mut line = first_line;
    let mut code_on_line = false;
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("//") {
            let end = rest.find('\n').unwrap_or(rest.len());
            found.push(Comment { line, text: rest[..end].trim_end().to_string(), trailing: code_on_line });
            rest = &rest[end..];
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |at| at + 2);
            let inner = rest[..end].trim_start_matches("/*").trim_end_matches("*/");
            for part in inner.lines().map(str::trim).filter(|part| !part.is_empty()) {
                found.push(Comment { line, text: format!("// {part}"), trailing: code_on_line });
            }
            line += rest[..end].matches('\n').count();
            rest = &rest[end..];
        } else if c == '"' {
            let mut end = 1;
            let mut escaped = false;
            for (at, c) in rest.char_indices().skip(1) {
                end = at + c.len_utf8();
                if c == '"' && !escaped {
                    break;
                }
                escaped = c == '\\' && !escaped;
            }
            line += rest[..end].matches('\n').count();
            code_on_line = true;
            rest = &rest[end..];
        } else {
            if c == '\n' {
                line += 1;
                code_on_line = false;
            } else if !c.is_whitespace() {
                code_on_line = true;
            }
            rest = &rest[c.len_utf8()..];
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_line_trailing_and_block_comments_are_found_by_line() {
        let text = "{\n    // first\n    a(); // second\n    let s = \"// no\";\n    /* third */ b();\n}";
        let mut comments = Comments { all: scan(text, 10), next: 0 };
        assert_eq!(comments.before(12), [(11, "// first".to_string())]);
        assert_eq!(comments.trailing(12), Some("// second".to_string()));
        assert_eq!(comments.trailing(13), None);
        assert_eq!(comments.before(99), [(14, "// third".to_string())]);
    }
}
