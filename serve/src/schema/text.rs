//! Strings of a schema: lengths, regular expressions and single values.
//!
//! `pattern` is ECMAScript's and may match anywhere in a string. It is rewritten once: as a regular expression of the
//! whole string, in the syntax of the grammars.

use llguidance::derivre::{Regex, RegexAst, RegexBuilder};
use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Hir, HirKind, Look};

/// Work that is spent on finding out whether any string has all the patterns.
const FUEL: u64 = 20_000;
const MOST_WAYS: usize = 64;
/// No answer is longer.
pub const LONGEST: u64 = 1 << 24;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Text {
    pub patterns: Vec<Pattern>,
    pub least: u64,
    pub most: Option<u64>,
    /// This value and no other.
    pub only: Option<String>,
}

/// A regular expression of a whole string.
#[derive(Clone, Debug, PartialEq)]
pub struct Pattern(pub String);

impl Pattern {
    /// What `pattern` says; `None` for what only a backtracking engine can match.
    pub fn search(pattern: &str) -> Option<Pattern> {
        let translated = translate(pattern)?;
        let hir = ParserBuilder::new().crlf(true).build().parse(&translated).ok()?;
        let ways = ways(&hir);
        let ways: Option<Vec<String>> =
            (ways.len() <= MOST_WAYS).then_some(ways)?.into_iter().map(Way::whole).collect();
        Some(Pattern(format!("(?:{})", ways?.join("|")))).filter(|pattern| pattern.automaton().is_some())
    }

    fn automaton(&self) -> Option<Regex> {
        let mut builder = RegexBuilder::new();
        let expression = builder.mk_regex(&self.0).ok()?;
        builder.to_regex_limited(expression, FUEL).ok()
    }

    pub fn matches(&self, text: &str) -> bool {
        self.automaton().is_some_and(|mut automaton| automaton.is_match(text))
    }
}

/// Whether a string has all of these patterns and a length between these; not certain where that takes too long.
pub fn may_match(patterns: &[Pattern], least: u64, most: Option<u64>) -> bool {
    let mut all: Vec<RegexAst> = patterns.iter().map(|pattern| RegexAst::Regex(pattern.0.clone())).collect();
    all.extend(lengths(least, most).map(RegexAst::Regex));
    let mut builder = RegexBuilder::new();
    let Ok(expression) = builder.mk(&RegexAst::And(all)) else { return true };
    !builder.to_regex_limited(expression, FUEL).is_ok_and(|mut automaton| automaton.always_empty())
}

/// The regular expression of a length, where one is asked for.
pub fn lengths(least: u64, most: Option<u64>) -> Option<String> {
    (least > 0 || most.is_some())
        .then(|| format!("(?s:.{{{least},{}}})", most.map_or(String::new(), |most| most.to_string())))
}

impl Text {
    pub fn only(text: &str) -> Text {
        Text { only: Some(text.into()), ..Text::default() }
    }

    pub fn allows(&self, text: &str) -> bool {
        let length = text.chars().count() as u64;
        let fits = length >= self.least && self.most.is_none_or(|most| length <= most);
        fits && self.only.as_ref().is_none_or(|only| only == text)
            && self.patterns.iter().all(|pattern| pattern.matches(text))
    }

    /// As one regular expression, where that says it all.
    pub fn regex(&self) -> Option<String> {
        match (&self.only, &self.patterns[..], lengths(self.least, self.most)) {
            (Some(only), ..) => Some(regex_syntax::escape(only)),
            (None, [], lengths) => Some(lengths.unwrap_or_else(|| "(?s:.*)".into())),
            (None, [pattern], None) => Some(pattern.0.clone()),
            _ => None,
        }
    }
}

/// From ECMAScript's syntax to that of the grammars. `\s` is narrower and `\S` too, so that both mean what every engine
/// means.
fn translate(pattern: &str) -> Option<String> {
    let (mut out, mut in_class, mut before) = (String::new(), false, '\0');
    let mut characters = pattern.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' => match characters.next()? {
                'd' => out.push_str("[0-9]"),
                'D' => out.push_str("[^0-9]"),
                'w' => out.push_str("[0-9A-Za-z_]"),
                'W' => out.push_str("[^0-9A-Za-z_]"),
                's' => out.push_str(r"[ \t\n\r\f\v]"),
                'S' => out.push_str(r"[^\s\x{FEFF}\x{1C}-\x{1F}]"),
                'b' if in_class => out.push_str(r"\x08"),
                'c' => {
                    let letter = characters.next().filter(char::is_ascii_alphabetic)?;
                    out.push_str(&format!(r"\x{{{:x}}}", letter as u32 % 32));
                }
                '0' => out.push_str(r"\x00"),
                // Anchors of other engines.
                'A' | 'z' | 'Z' | '<' | '>' => return None,
                other => out.extend(['\\', other]),
            },
            // Without these a class has no operators.
            '[' if in_class => out.push_str(r"\["),
            '&' | '~' if in_class => out.extend(['\\', character]),
            '-' if in_class && before == '-' => return None,
            '[' => {
                in_class = true;
                out.push('[');
                if characters.peek() == Some(&'^') {
                    out.extend(characters.next());
                }
                if characters.peek() == Some(&']') {
                    return None;
                }
            }
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            _ => out.push(character),
        }
        before = character;
    }
    Some(out)
}

/// One way in which a pattern matches: from the start, to the end, and what lies between.
#[derive(Clone, Default)]
struct Way {
    parts: Vec<Hir>,
}

impl Way {
    /// As a regular expression of the whole string; `None` where an anchor lies inside.
    fn whole(self) -> Option<String> {
        let is = |hir: &Hir, look: Look| matches!(hir.kind(), HirKind::Look(found) if *found == look);
        let starts = self.parts.iter().take_while(|part| is(part, Look::Start)).count();
        let ends = self.parts[starts..].iter().rev().take_while(|part| is(part, Look::End)).count();
        let between = &self.parts[starts..self.parts.len() - ends];
        if between.iter().any(|part| !part.properties().look_set().is_empty()) {
            return None;
        }
        let open = |is_anchored: bool| if is_anchored { "" } else { "(?s:.)*" };
        let between: String = between.iter().map(|part| format!("(?:{part})")).collect();
        Some(format!("{}{between}{}", open(starts > 0), open(ends > 0)))
    }
}

/// The ways of an expression, told apart where anchors make a difference.
fn ways(hir: &Hir) -> Vec<Way> {
    match hir.kind() {
        _ if hir.properties().look_set().is_empty() => vec![Way { parts: vec![hir.clone()] }],
        HirKind::Alternation(all) => all.iter().flat_map(ways).collect(),
        HirKind::Capture(capture) => ways(&capture.sub),
        HirKind::Concat(all) => all.iter().fold(vec![Way::default()], |so_far, part| {
            let next = ways(part);
            let joined = so_far
                .iter()
                .flat_map(|way| next.iter().map(|next| Way { parts: [&way.parts[..], &next.parts[..]].concat() }));
            // One more than is taken, so that too many are seen to be.
            joined.take(MOST_WAYS + 1).collect()
        }),
        _ => vec![Way { parts: vec![hir.clone()] }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_as_it_does_in_a_script() {
        for (pattern, matching, others) in [
            ("x[yz]", vec!["xy", "a xz\nb"], vec!["x", "yx"]),
            ("^a+$", vec!["a", "aaa"], vec!["", "ba", "a\n"]),
            ("^a|b$", vec!["abc", "cb"], vec!["ba"]),
            (r"^(\d{3}|x$)", vec!["123", "1234", "x"], vec!["12", "xy"]),
            ("", vec!["", "anything"], vec![]),
            (r"^\S(|(.|\n)*\S)$", vec!["a", "a b"], vec![" a", "a "]),
            ("[[&&a]", vec!["[", "&", "a"], vec!["b"]),
            (r"^\cC$", vec!["\u{3}"], vec!["c"]),
            (r"^a/b\/c$", vec!["a/b/c"], vec!["a/b"]),
        ] {
            let whole = Pattern::search(pattern).unwrap_or_else(|| panic!("{pattern}"));
            matching.iter().for_each(|text| assert!(whole.matches(text), "{pattern} {text:?} {whole:?}"));
            others.iter().for_each(|text| assert!(!whole.matches(text), "{pattern} {text:?} {whole:?}"));
        }
        for pattern in ["(?=a)b", r"(a)\1", r"\bword", "[]", "a(^b)", "[", "(?!x)"] {
            assert_eq!(Pattern::search(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn patterns_that_exclude_each_other_match_nothing() {
        let pattern = |text: &str| Pattern::search(text).unwrap();
        assert!(!may_match(&[pattern("^a"), pattern("^b")], 0, None));
        assert!(!may_match(&[pattern("^aaa$")], 4, None));
        assert!(may_match(&[pattern("^a"), pattern("b$")], 0, Some(2)));
    }
}
