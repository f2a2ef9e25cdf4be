//! Finding special tokens in raw text, before anything else looks at it.
//!
//! The leftmost match wins, and the longest at that place. The tokens are kept sorted, so that a walk along the text
//! narrows the range of those that still fit: the cost of a place in the text is bounded by the longest token.

use std::ops::Range;

/// Longer special tokens are refused: the search is linear in the text only for tokens of bounded length.
pub(super) const LONGEST: usize = 256;

/// A set of special tokens to look for.
#[derive(Debug)]
pub(super) struct Specials {
    /// Texts and ids in the order of the texts' bytes.
    sorted: Vec<(Box<str>, u32)>,
    /// Those of `sorted` that begin with a byte.
    by_first_byte: Box<[Range<usize>; 256]>,
}

impl Specials {
    /// Empty texts match nothing, and of equal texts the lowest id counts.
    pub(super) fn new<'a>(tokens: impl Iterator<Item = (&'a str, u32)>) -> Specials {
        let mut sorted: Vec<_> = tokens.filter(|(text, _)| !text.is_empty()).map(|(t, id)| (t.into(), id)).collect();
        sorted.sort();
        sorted.dedup_by(|later, kept: &mut (Box<str>, u32)| later.0 == kept.0);
        let by_first_byte = Box::new(std::array::from_fn(|byte| narrow(&sorted, 0..sorted.len(), 0, byte as u8)));
        Specials { sorted, by_first_byte }
    }

    /// The first special token in the text: where it is, and its id.
    pub(super) fn find(&self, text: &str) -> Option<(Range<usize>, u32)> {
        (0..text.len()).find_map(|start| {
            let (len, id) = self.longest_at(&text.as_bytes()[start..])?;
            Some((start..start + len, id))
        })
    }

    /// Whether any of them begins with this byte.
    pub(super) fn begins_with(&self, byte: u8) -> bool {
        !self.by_first_byte[byte as usize].is_empty()
    }

    fn longest_at(&self, text: &[u8]) -> Option<(usize, u32)> {
        let mut fitting = self.by_first_byte[text[0] as usize].clone();
        let mut longest = None;
        for len in 1.. {
            // A text that ends here sorts before its continuations.
            let Some((special, id)) = self.sorted[fitting.clone()].first() else { break };
            if special.len() == len {
                longest = Some((len, *id));
            }
            let Some(&next) = text.get(len) else { break };
            fitting = narrow(&self.sorted, fitting, len, next);
        }
        longest
    }
}

/// Of a range that shares its first `at` bytes, the part whose next byte is `byte`.
fn narrow(sorted: &[(Box<str>, u32)], range: Range<usize>, at: usize, byte: u8) -> Range<usize> {
    let next = |(text, _): &(Box<str>, u32)| text.as_bytes().get(at).copied();
    let start = range.start + sorted[range.clone()].partition_point(|special| next(special) < Some(byte));
    let end = range.start + sorted[range].partition_point(|special| next(special) <= Some(byte));
    start..end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials(texts: &[&'static str]) -> Specials {
        Specials::new((0u32..).zip(texts).map(|(id, text)| (*text, id)))
    }

    #[test]
    fn the_leftmost_match_wins_then_the_longest() {
        let set = specials(&["<a>", "<a>b", "b<", "", "<a"]);
        assert_eq!(set.find("x<a>bb"), Some((1..5, 1)));
        assert_eq!(set.find("x<a>c"), Some((1..4, 0)));
        assert_eq!(set.find("xb<a>b"), Some((1..3, 2)));
        assert_eq!(set.find("<a"), Some((0..2, 4)));
        assert_eq!(set.find("x<"), None);
        assert_eq!(set.find(""), None);
    }

    #[test]
    fn matches_lie_on_character_boundaries() {
        let set = specials(&["é", "▁▁"]);
        assert_eq!(set.find("aé"), Some((1..3, 0)));
        assert_eq!(set.find("▁é▁▁"), Some((3..5, 0)));
    }

    #[test]
    fn of_equal_texts_the_lowest_id_counts() {
        assert_eq!(specials(&["<a>", "<a>"]).find("<a>"), Some((0..3, 0)));
        assert_eq!(specials(&[]).find("<a>"), None);
    }
}
