//! Drafts without a drafter: what followed the last tokens of a text where they stood before.
//!
//! Every place of the text is found by the tokens before it, so that a guess takes the same time however long the text
//! is.

use std::collections::HashMap;

/// Tokens that a lookup goes by: at most, and at least.
const LONGEST_KEY: usize = 4;
const SHORTEST_KEY: usize = 2;

/// Tokens of a match that are counted at most.
const LONGEST_MATCH: usize = 16;

/// Fills the keys that are shorter than the longest: no token.
const NONE: u32 = u32::MAX;

/// A text, and where each run of a few tokens was followed last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lookup {
    text: Vec<u32>,
    /// By their tokens: the position after them, of the latest that something follows.
    followed: HashMap<[u32; LONGEST_KEY], usize>,
}

impl Lookup {
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    pub fn push(&mut self, token: u32) {
        for length in SHORTEST_KEY..=LONGEST_KEY {
            if let Some(key) = self.key(length) {
                self.followed.insert(key, self.text.len());
            }
        }
        self.text.push(token);
    }

    /// Makes it the lookup of this text, of which it may know the beginning.
    pub fn read(&mut self, text: &[u32]) {
        if !text.starts_with(&self.text) {
            *self = Lookup::default();
        }
        text[self.text.len()..].iter().for_each(|token| self.push(*token));
    }

    /// The last tokens of the text.
    fn key(&self, length: usize) -> Option<[u32; LONGEST_KEY]> {
        let tokens = &self.text[self.text.len().checked_sub(length)?..];
        let mut key = [NONE; LONGEST_KEY];
        key[..length].copy_from_slice(tokens);
        Some(key)
    }

    /// Where the text stood as it does now: by as many tokens as match, and of such places the latest.
    fn place(&self) -> Option<usize> {
        let keys = (SHORTEST_KEY..=LONGEST_KEY).rev().filter_map(|length| self.key(length));
        keys.filter_map(|key| self.followed.get(&key)).next().copied()
    }

    /// How many of the last tokens stood before the place that is guessed by, as far as that is counted; 0 where there
    /// is nothing to guess by.
    pub fn matched(&self) -> u32 {
        let Some(at) = self.place() else { return 0 };
        let then = self.text[..at].iter().rev();
        then.zip(self.text.iter().rev()).take(LONGEST_MATCH).take_while(|(then, now)| then == now).count() as u32
    }

    /// What may follow, so many tokens; none where nothing is known. Behind the end of the text it goes on with itself,
    /// as a text does that repeats.
    pub fn guess(&self, most: usize) -> Vec<u32> {
        let Some(at) = self.place() else { return Vec::new() };
        let mut guessed: Vec<u32> = Vec::with_capacity(most);
        for place in at..at + most {
            let next = self.text.get(place).copied().unwrap_or_else(|| guessed[place - self.text.len()]);
            guessed.push(next);
        }
        guessed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looked_up(text: &[u32], most: usize) -> Vec<u32> {
        let mut lookup = Lookup::default();
        lookup.read(text);
        assert_eq!(lookup.matched() > 0, !lookup.guess(1).is_empty());
        lookup.guess(most)
    }

    #[test]
    fn what_followed_before_is_guessed_again() {
        assert_eq!(looked_up(&[1, 2, 3, 4, 5, 1, 2], 2), [3, 4]);
        // The longest key goes before the latest place.
        assert_eq!(looked_up(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [7]);
        assert_eq!(looked_up(&[2, 3, 7, 2, 3, 8, 2, 3], 3), [8, 2, 3]);
        // A text that repeats itself goes on.
        assert_eq!(looked_up(&[5, 6, 5, 6], 5), [5, 6, 5, 6, 5]);
        assert_eq!(looked_up(&[5, 5, 5], 3), [5, 5, 5]);
        assert!(
            looked_up(&[1, 2, 3, 4], 3).is_empty() && looked_up(&[1], 3).is_empty() && looked_up(&[], 3).is_empty()
        );
    }

    #[test]
    fn matches_are_as_long_as_the_texts_agree() {
        let matched = |text: &[u32]| {
            let mut lookup = Lookup::default();
            lookup.read(text);
            lookup.matched()
        };
        assert_eq!(matched(&[1, 2, 3, 4]), 0);
        assert_eq!(matched(&[8, 2, 3, 7, 9, 2, 3]), 2);
        assert_eq!(matched(&[1, 2, 3, 4, 5, 6, 9, 0, 2, 3, 4, 5, 6]), 5, "longer than a key");
        assert_eq!(matched(&[[1, 2].as_slice(); 40].concat()), LONGEST_MATCH as u32);
    }

    #[test]
    fn a_text_that_goes_on_is_read_on_and_another_is_read_anew() {
        let mut lookup = Lookup::default();
        lookup.read(&[1, 2, 3, 1, 2]);
        assert_eq!(lookup.guess(2), [3, 1]);
        lookup.read(&[1, 2, 3, 1, 2, 9, 3, 1]);
        assert_eq!(lookup.guess(1), [2]);
        lookup.read(&[1, 2, 4, 1, 2]);
        assert_eq!((lookup.guess(1), lookup.text()), (vec![4], &[1, 2, 4, 1, 2][..]));
    }
}
