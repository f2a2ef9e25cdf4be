//! The sequences to score: given as ids, or cut out of a text the way llama.cpp's perplexity tool does.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::Vocab;
use gemma4c_runtime::RuntimeError;
use xxhash_rust::xxh3::Xxh3Default;

use crate::commands::tokenize::parse_ids;
use crate::scoring::Cut;

/// Tokens that are read as a sequence of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Where it comes from, for a person: `ids.txt, line 3`.
    pub name: String,
    pub tokens: Vec<u32>,
    /// The first token that is scored. What stands before is only read.
    pub first_scored: usize,
}

impl Window {
    /// What is fed: nobody asks what comes after the last token.
    pub fn fed(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }

    pub fn scored(&self) -> usize {
        self.tokens.len() - self.first_scored
    }
}

/// All there is to score.
#[derive(Debug)]
pub struct Windows {
    /// The file they come from.
    pub name: String,
    pub list: Vec<Window>,
    /// Tokens at the end that fill no window.
    pub left_over: usize,
}

impl Windows {
    /// A window a line; empty lines are none.
    pub fn from_lines(name: String, text: &str, vocab_size: u32) -> Result<Windows> {
        let mut list = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let window = format!("{name}, line {number}");
            let tokens = parse_ids(line).with_context(|| window.clone())?;
            if tokens.is_empty() {
                continue;
            }
            ensure!(tokens.len() > 1, "{window} has one token: at least 2 are needed to score the second");
            check_ids(&window, &tokens, vocab_size)?;
            list.push(Window { name: window, tokens, first_scored: 1 });
        }
        ensure!(!list.is_empty(), "{name} has no tokens: a line of ids is a window");
        Ok(Windows { name, list, left_over: 0 })
    }

    /// The text's tokens cut into windows of equal length.
    pub fn from_text(
        name: String,
        text: &str,
        tokenizer: &Tokenizer,
        vocab: &Vocab,
        cut: Cut,
        vocab_size: u32,
    ) -> Result<Windows> {
        ensure!(!text.is_empty(), "{name} is empty");
        let ids = tokenizer.encode(text, EncodeOptions { add_bos: true, parse_special: false });
        check_ids(&name, &ids, vocab_size)?;
        let bos = vocab.bos.filter(|_| vocab.add_bos);
        let left_over = ids.len() % cut.tokens;
        let window = |(number, tokens): (usize, Vec<u32>)| Window {
            name: format!("{name}, window {number}"),
            tokens,
            first_scored: cut.first_scored(),
        };
        let list: Vec<Window> = (1..).zip(cut.windows(&ids, bos)).map(window).collect();
        ensure!(
            !list.is_empty(),
            "{name} has {} tokens, too few for a window of {}: give a smaller --window or more text",
            ids.len(),
            cut.tokens
        );
        Ok(Windows { name, list, left_over })
    }

    /// Refuses a window that a plan's context has no room for.
    pub fn check_context(&self, plan: &Path, context: u32) -> Result<()> {
        let too_long = self.list.iter().find(|window| window.fed().len() > context as usize);
        let Some(window) = too_long else { return Ok(()) };
        anyhow::bail!(
            "{} has {} tokens, {} at most fit the context of {}: compile with a larger --ctx",
            window.name,
            window.tokens.len(),
            context as usize + 1,
            plan.display()
        );
    }

    /// How many tokens are scored.
    pub fn scored(&self) -> usize {
        self.list.iter().map(Window::scored).sum()
    }

    /// Tells other windows, or another choice of what is scored in them, apart.
    pub fn hash(&self) -> u64 {
        let mut hash = Xxh3Default::new();
        for window in &self.list {
            for number in [window.tokens.len(), window.first_scored] {
                hash.update(&(number as u64).to_le_bytes());
            }
            window.tokens.iter().for_each(|token| hash.update(&token.to_le_bytes()));
        }
        hash.digest()
    }
}

fn check_ids(name: &str, tokens: &[u32], vocab_size: u32) -> Result<()> {
    match tokens.iter().find(|token| **token >= vocab_size) {
        Some(&token) => Err(RuntimeError::TokenOutOfRange { token, vocab_size }).with_context(|| name.to_string()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_window_by_any_separator() {
        let windows = Windows::from_lines("ids".into(), "1 2,3\r\n\n  4,\t5\n", 6).expect("two windows");
        let found: Vec<_> = windows.list.iter().map(|w| (w.name.as_str(), w.tokens.as_slice(), w.scored())).collect();
        assert_eq!(found, [("ids, line 1", &[1, 2, 3][..], 2), ("ids, line 3", &[4, 5], 1)]);
    }

    #[test]
    fn the_hash_sees_where_windows_end_and_what_is_scored() {
        let hash = |windows: &[(&[u32], usize)]| {
            let window = |(tokens, first_scored): &(&[u32], usize)| Window {
                name: String::new(),
                tokens: tokens.to_vec(),
                first_scored: *first_scored,
            };
            Windows { name: String::new(), list: windows.iter().map(window).collect(), left_over: 0 }.hash()
        };
        let plain = hash(&[(&[1, 2, 3], 1), (&[4, 5], 1)]);
        assert_eq!(plain, hash(&[(&[1, 2, 3], 1), (&[4, 5], 1)]));
        assert_ne!(plain, hash(&[(&[1, 2], 1), (&[3, 4, 5], 1)]));
        assert_ne!(plain, hash(&[(&[1, 2, 3], 2), (&[4, 5], 1)]));
        assert_ne!(plain, hash(&[(&[1, 2, 3], 1), (&[4, 6], 1)]));
    }
}
