//! Prompts in which the words of others stay words: no text that somebody writes can become a marker of the chat
//! format.
//!
//! A template is rendered to one string, in which its own `<turn|>` and the same characters in a message look alike. So
//! messages are [quoted](Tokenizer::quote) before they are rendered: a noncharacter goes behind every first character
//! of a marker. Templates trim, split and compare as before. When the result is [encoded](Tokenizer::encode_rendered),
//! markers are looked for first, then the noncharacters are taken out.

use super::Tokenizer;

/// Unicode reserves it for use inside a program. In a message it has no meaning, and is dropped.
const QUOTED: char = '\u{FDD0}';

impl Tokenizer {
    /// A text in which no marker is found, neither within nor across its ends.
    pub fn quote(&self, text: &str) -> String {
        let mut quoted = String::with_capacity(text.len());
        for character in text.chars().filter(|c| *c != QUOTED) {
            quoted.push(character);
            let mut utf8 = [0; 4];
            if self.markers.begins_with(character.encode_utf8(&mut utf8).as_bytes()[0]) {
                quoted.push(QUOTED);
            }
        }
        quoted
    }

    /// The ids of a rendered template whose arguments were [quoted](Tokenizer::quote). The template spells the
    /// beginning-of-sequence token itself.
    pub fn encode_rendered(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        while let Some((place, marker)) = self.markers.find(rest) {
            self.encode_words(&rest[..place.start], &mut ids);
            ids.push(marker);
            rest = &rest[place.end..];
        }
        self.encode_words(rest, &mut ids);
        ids
    }

    fn encode_words(&self, text: &str, ids: &mut Vec<u32>) {
        self.encode_with(&self.user_defined_words, &text.replace(QUOTED, ""), ids);
    }

    /// The id of a marker by its spelling.
    pub fn marker(&self, text: &str) -> Option<u32> {
        self.markers.find(text).filter(|(place, _)| place.len() == text.len()).map(|(_, id)| id)
    }
}
