//! A vocabulary of our own making, in the form of Gemma 4's: special tokens where the real ones are, byte tokens, runs
//! of newlines and spaces, the characters of English text, and a few hundred merges learnt from a page of it. The rest
//! of the ids are unused, as many of the real ones are.

use std::collections::{BTreeMap, BTreeSet};

/// Kinds of token in GGUF files.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// The special tokens, by id. Those above a small vocabulary's end are left out of it.
#[rustfmt::skip]
const SPECIAL: [(u32, &str, i32); 24] = [
    (0, "<pad>", CONTROL), (1, "<eos>", CONTROL), (2, "<bos>", CONTROL), (3, "<unk>", CONTROL), (4, "<mask>", CONTROL),
    (46, "<|tool>", CONTROL), (47, "<tool|>", CONTROL), (48, "<|tool_call>", USER_DEFINED),
    (49, "<tool_call|>", USER_DEFINED), (50, "<|tool_response>", USER_DEFINED), (51, "<tool_response|>", USER_DEFINED),
    (52, "<|\"|>", USER_DEFINED), (98, "<|think|>", CONTROL), (100, "<|channel>", USER_DEFINED),
    (101, "<channel|>", USER_DEFINED), (105, "<|turn>", CONTROL), (106, "<turn|>", CONTROL),
    (255_999, "<|image>", CONTROL), (256_000, "<|audio>", CONTROL), (258_880, "<|image|>", CONTROL),
    (258_881, "<|audio|>", CONTROL), (258_882, "<image|>", CONTROL), (258_883, "<audio|>", CONTROL),
    (258_884, "<|video|>", CONTROL),
];

/// Runs of 1 to 31 newlines, and of 2 to 31 spaces (a single one is among the characters).
const NEWLINES: usize = 107;
const SPACES: usize = 138;
const LONGEST_RUN: usize = 31;
const BYTES: usize = 238;
const CHARACTERS: usize = 494;
const SPACE: char = '\u{2581}';

const TEXT: &str = include_str!("vocab.txt");
const CHAT_TEMPLATE: &str = include_str!("chat_template.jinja");
/// Merges learnt from the text, at most; even the smallest vocabulary has room for them.
const LEARNT: usize = 400;

pub(super) struct Vocabulary {
    pub tokens: Vec<String>,
    /// One a token.
    pub kinds: Vec<i32>,
    /// `left right`, best first.
    pub merges: Vec<String>,
}

impl Vocabulary {
    /// A vocabulary of `len` tokens, at least 1024.
    pub fn generate(len: usize) -> Vocabulary {
        let mut named: BTreeMap<usize, (String, i32)> = BTreeMap::new();
        for (id, text, kind) in SPECIAL {
            named.insert(id as usize, (text.into(), kind));
        }
        for run in 1..=LONGEST_RUN {
            named.insert(NEWLINES + run - 1, ("\n".repeat(run), NORMAL));
        }
        for run in 2..=LONGEST_RUN {
            named.insert(SPACES + run - 2, (SPACE.to_string().repeat(run), NORMAL));
        }
        for byte in 0..=255 {
            named.insert(BYTES + byte, (format!("<0x{byte:02X}>"), BYTE));
        }
        let characters = [SPACE, '\t'].into_iter().chain('!'..='~').map(String::from);
        let (learnt, pairs) = learn(TEXT, LEARNT);
        for (i, text) in characters.chain(learnt).enumerate() {
            named.insert(CHARACTERS + i, (text, NORMAL));
        }

        let mut unused = 0..;
        let tokens = (0..len).map(|id| {
            let unused = || (format!("<unused{}>", unused.next().unwrap_or_default()), NORMAL);
            named.remove(&id).unwrap_or_else(unused)
        });
        let (tokens, kinds) = tokens.unzip();
        let pairs = pairs.into_iter().map(|(left, right)| format!("{left} {right}"));
        Vocabulary { tokens, kinds, merges: runs().chain(pairs).collect() }
    }
}

/// Gemma 4's chat format. The larger models open their answer with an empty thought when they are not to think.
pub(super) fn chat_template(empty_thought: bool) -> String {
    CHAT_TEMPLATE.replace("empty_thought", if empty_thought { "true" } else { "false" })
}

/// Merges that make one token of a run of newlines or spaces, the longest left side first.
fn runs() -> impl Iterator<Item = String> {
    let lengths =
        (1..LONGEST_RUN).rev().flat_map(|left| (1..=LONGEST_RUN - left).rev().map(move |right| (left, right)));
    lengths.flat_map(|(left, right)| {
        ["\n".to_string(), SPACE.to_string()].map(|one| format!("{} {}", one.repeat(left), one.repeat(right)))
    })
}

/// Byte-pair encoding learnt the plain way: join the pair of neighbours that is most frequent inside words, again and
/// again. Returns the new tokens and the merges that make them.
fn learn(text: &str, most: usize) -> (Vec<String>, Vec<(String, String)>) {
    let words = text
        .split_whitespace()
        .flat_map(|word| word.split(|c: char| !c.is_ascii_alphabetic()))
        .filter(|w| !w.is_empty());
    let mut counted: BTreeMap<Vec<String>, usize> = BTreeMap::new();
    for word in words {
        let symbols = std::iter::once(SPACE).chain(word.chars()).map(String::from).collect();
        *counted.entry(symbols).or_default() += 1;
    }
    let (mut tokens, mut merges, mut known) = (Vec::new(), Vec::new(), BTreeSet::new());
    while tokens.len() < most {
        let mut pairs: BTreeMap<(&String, &String), usize> = BTreeMap::new();
        for (word, count) in &counted {
            for pair in word.windows(2) {
                *pairs.entry((&pair[0], &pair[1])).or_default() += count;
            }
        }
        // The first in order among the most frequent.
        let best = pairs.into_iter().rev().max_by_key(|&(_, count)| count);
        let Some(((left, right), 2..)) = best else { break };
        let (left, right) = (left.clone(), right.clone());
        counted = counted.into_iter().map(|(word, count)| (joined(word, &left, &right), count)).collect();
        let token = format!("{left}{right}");
        if known.insert(token.clone()) {
            tokens.push(token);
        }
        merges.push((left, right));
    }
    (tokens, merges)
}

/// `word` with every `left` followed by `right` made one symbol.
fn joined(word: Vec<String>, left: &str, right: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::with_capacity(word.len());
    let mut fresh = false;
    for symbol in word {
        match out.last_mut() {
            // A symbol just made is not a left side again, even where it reads the same.
            Some(last) if !fresh && last == left && symbol == right => {
                last.push_str(&symbol);
                fresh = true;
            }
            _ => {
                out.push(symbol);
                fresh = false;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn it_hangs_together() {
        for len in [1024, 262_144] {
            let vocabulary = Vocabulary::generate(len);
            assert_eq!((vocabulary.tokens.len(), vocabulary.kinds.len()), (len, len));
            let tokens: HashSet<&str> = vocabulary.tokens.iter().map(String::as_str).collect();
            assert_eq!(tokens.len(), len, "no token is there twice");
            assert!(vocabulary.merges.len() > 1100, "{} merges", vocabulary.merges.len());
            assert_eq!(vocabulary.merges.iter().collect::<HashSet<_>>().len(), vocabulary.merges.len());
            for merge in &vocabulary.merges {
                let (left, right) = merge.split_once(' ').unwrap();
                assert!(tokens.contains(left) && tokens.contains(right), "{merge:?}");
                assert!(tokens.contains(format!("{left}{right}").as_str()), "{merge:?}");
            }
            for (id, text, kind) in SPECIAL.into_iter().filter(|s| (s.0 as usize) < len) {
                assert_eq!((vocabulary.tokens[id as usize].as_str(), vocabulary.kinds[id as usize]), (text, kind));
            }
            assert_eq!(vocabulary.tokens[BYTES + 0xF0], "<0xF0>");
            assert_eq!(vocabulary.kinds.iter().filter(|&&kind| kind == BYTE).count(), 256);
            assert!(("!"..="~").contains(&vocabulary.tokens[CHARACTERS + 2].as_str()));
            assert!(tokens.contains("\u{2581}the"), "a common word is one token");
        }
    }

    #[test]
    fn the_template_speaks_the_format() {
        let render = |empty_thought, enable_thinking| {
            let mut environment = minijinja::Environment::new();
            let template = chat_template(empty_thought);
            environment.add_template("chat", &template).unwrap();
            let message = |role, content| minijinja::context! { role, content };
            let messages = [message("system", "Be brief. "), message("user", "Hi"), message("assistant", "Yes?")];
            let context =
                minijinja::context! { bos_token => "<bos>", messages, enable_thinking, add_generation_prompt => true };
            environment.get_template("chat").unwrap().render(context).unwrap()
        };
        let turns = "<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nYes?<turn|>\n<|turn>model\n";
        assert_eq!(render(false, false), format!("<bos><|turn>system\nBe brief.{turns}"));
        assert_eq!(render(true, false), format!("<bos><|turn>system\nBe brief.{turns}<|channel>thought\n<channel|>"));
        assert_eq!(render(true, true), format!("<bos><|turn>system\n<|think|>\nBe brief.{turns}"));
    }
}
