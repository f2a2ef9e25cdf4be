//! Pieces of text from pieces of tokens: characters that are split over tokens, and stop strings that are.

/// Bytes to text that never ends within a character. What cannot become UTF-8 turns into U+FFFD.
#[derive(Clone, Debug, Default)]
pub struct Characters {
    /// At most three bytes.
    waiting: Vec<u8>,
}

impl Characters {
    /// The text that is certain now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.waiting.extend_from_slice(bytes);
        let (mut text, mut unfinished) = (String::new(), 0);
        let mut chunks = self.waiting.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if chunks.peek().is_none() && may_become_character(invalid) {
                unfinished = invalid.len();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.waiting.drain(..self.waiting.len() - unfinished);
        text
    }

    /// The end: bytes that still wait cannot become a character any more.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.waiting).into_owned();
        self.waiting.clear();
        text
    }
}

fn may_become_character(bytes: &[u8]) -> bool {
    str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

/// Holds back text that may be the beginning of a stop string.
#[derive(Clone, Debug, Default)]
pub struct Stops {
    stops: Vec<String>,
    held: String,
    /// Which of them has come.
    found: Option<usize>,
}

impl Stops {
    /// Empty strings stop nothing.
    pub fn new(stops: Vec<String>) -> Stops {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Stops { stops, held: String::new(), found: None }
    }

    /// The text that is certain to be before any stop string, and whether one has come.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        // The string that ends first stops, whatever the pieces are; of several that end together the longest.
        for character in text.chars() {
            self.held.push(character);
            let ended = self.stops.iter().enumerate().filter(|(_, stop)| self.held.ends_with(stop.as_str()));
            if let Some((index, stop)) = ended.max_by_key(|(_, stop)| stop.len()) {
                self.held.truncate(self.held.len() - stop.len());
                self.found = Some(index);
                return (std::mem::take(&mut self.held), true);
            }
        }
        let keep = self.stops.iter().map(|stop| beginning_at_end(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The stop string that has come.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.stops[index].as_str())
    }

    /// No more text comes: what was held back is no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The length of the longest end of `text` with which `stop` begins, without being all of it.
fn beginning_at_end(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    let begins = |length: &usize| stop.is_char_boundary(*length) && text.ends_with(&stop[..*length]);
    (1..=longest).rev().find(begins).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_wait_for_their_last_byte() {
        let mut characters = Characters::default();
        let euro = "a€".as_bytes();
        assert_eq!(characters.push(&euro[..2]), "a");
        assert_eq!(characters.push(&euro[2..3]), "");
        assert_eq!(characters.push(&euro[3..]), "€");
        assert_eq!(characters.push(b"\xe2"), "");
        assert_eq!(characters.push(b"b"), "\u{FFFD}b");
        assert_eq!(characters.push(b"\xff"), "\u{FFFD}");
        assert_eq!(characters.push(b"\xe2"), "");
        assert_eq!(characters.finish(), "\u{FFFD}");
    }

    /// Whatever the pieces, the same text comes out and nothing of the stop string does.
    #[test]
    fn stop_strings_are_found_across_pieces() {
        for (text, stops, expected, stop) in [
            ("one two three", vec!["two"], "one ", Some("two")),
            ("aaab", vec!["aab"], "a", Some("aab")),
            ("ab", vec!["abc"], "ab", None),
            ("xéy", vec!["y", "éy"], "x", Some("éy")),
            ("x", vec![""], "x", None),
            ("abcd", vec!["", "cd", "bc"], "a", Some("bc")),
            ("abcd", vec!["abcd", "c"], "ab", Some("c")),
        ] {
            let places: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).collect();
            for cuts in 0..1u32 << places.len() {
                let mut found = Stops::new(stops.iter().map(|stop| stop.to_string()).collect());
                let (mut given, mut from, mut has_stopped) = (String::new(), 0, false);
                let chosen = places.iter().enumerate().filter(|(bit, _)| cuts >> bit & 1 == 1).map(|(_, at)| *at);
                for at in chosen.chain([text.len()]) {
                    if !has_stopped {
                        let (piece, has_ended) = found.push(&text[from..at]);
                        given.push_str(&piece);
                        has_stopped = has_ended;
                    }
                    from = at;
                }
                if !has_stopped {
                    given.push_str(&found.finish());
                }
                let found = (given.as_str(), has_stopped, found.found());
                assert_eq!(found, (expected, stop.is_some(), stop), "{text} {stops:?} {cuts:b}");
            }
        }
    }
}
