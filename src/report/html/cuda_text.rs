//! CUDA C as HTML, lightly coloured: comments, strings, directives, numbers, keywords and types.
//!
//! Not a parser: it knows enough to be pleasant to read, and never loses or adds a character.

use super::escape;

const KEYWORDS: [&str; 32] = [
    "asm",
    "auto",
    "bool",
    "break",
    "case",
    "class",
    "const",
    "constexpr",
    "continue",
    "default",
    "do",
    "else",
    "extern",
    "false",
    "for",
    "if",
    "namespace",
    "operator",
    "return",
    "sizeof",
    "static",
    "static_assert",
    "struct",
    "switch",
    "template",
    "true",
    "typedef",
    "typename",
    "using",
    "void",
    "volatile",
    "while",
];
const TYPES: [&str; 26] = [
    "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64", "F16", "BF16", "U32x2", "U32x4", "I32x4",
    "F32x2", "F32x4", "int", "float", "double", "unsigned", "signed", "char", "short", "long", "weights",
];

/// The text with its parts marked.
pub fn coloured(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut rest = text;
    while !rest.is_empty() {
        let before = text[..text.len() - rest.len()].trim_end_matches([' ', '\t']);
        let (class, len) = next(rest, before.is_empty() || before.ends_with('\n'));
        let (part, behind) = rest.split_at(len);
        match class {
            "" => out += &escape(part),
            _ => out = out + "<i class=" + class + ">" + &escape(part) + "</i>",
        }
        rest = behind;
    }
    out
}

/// The class of what a text begins with, and how long that is.
fn next(text: &str, at_line_start: bool) -> (&'static str, usize) {
    let until = |end: &str, from: usize| text[from..].find(end).map_or(text.len(), |at| from + at);
    let first = text.chars().next().unwrap_or(' ');
    if text.starts_with("//") {
        return ("c", until("\n", 0));
    }
    if text.starts_with("/*") {
        return ("c", (until("*/", 2) + 2).min(text.len()));
    }
    if first == '#' && at_line_start {
        // The name of the directive; what follows is coloured as code.
        let name = text[1..].trim_start_matches(' ');
        let skipped = text.len() - name.len();
        return ("p", skipped + name.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(name.len()));
    }
    if first == '"' {
        let mut escaped = false;
        for (at, c) in text.char_indices().skip(1) {
            match c {
                '"' if !escaped => return ("s", at + 1),
                '\n' => return ("s", at),
                _ => escaped = c == '\\' && !escaped,
            }
        }
        return ("s", text.len());
    }
    if first.is_ascii_digit() {
        return ("n", text.find(|c: char| !c.is_ascii_alphanumeric() && c != '.').unwrap_or(text.len()));
    }
    if first.is_ascii_alphabetic() || first == '_' {
        let len = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        let word = &text[..len];
        let class = match word {
            _ if KEYWORDS.contains(&word) => "k",
            _ if TYPES.contains(&word) => "t",
            _ if word.starts_with("__") => "a",
            _ => "",
        };
        return (class, len);
    }
    let len = first.len_utf8();
    let starts_something = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '"' | '/' | '#');
    ("", text[len..].find(starts_something).map_or(text.len(), |at| len + at))
}

#[cfg(test)]
mod tests {
    use super::coloured;

    #[test]
    fn parts_are_marked_and_nothing_is_lost() {
        let text = "#define N 3 // <é>\nauto x = a < 0x1fu ? \"q\\\"\" : y_1;\n/* long */ __syncthreads(); # \"open";
        let html = coloured(text);
        for expected in [
            "<i class=p>#define</i> N <i class=n>3</i> <i class=c>// &lt;é&gt;</i>",
            "<i class=k>auto</i> x = a &lt; <i class=n>0x1fu</i> ? <i class=s>&quot;q\\&quot;&quot;</i> : y_1;",
            "<i class=c>/* long */</i> <i class=a>__syncthreads</i>(); # <i class=s>&quot;open</i>",
        ] {
            assert!(html.contains(expected), "{expected} is not in\n{html}");
        }
        let mut plain = html;
        for class in ["c", "s", "p", "n", "k", "t", "a"] {
            plain = plain.replace(&format!("<i class={class}>"), "");
        }
        let plain = plain.replace("</i>", "").replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
        assert_eq!(plain.replace("&amp;", "&"), text);
    }
}
