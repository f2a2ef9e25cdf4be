//! An answer that goes round in circles: the same tokens again and again, which no sampling ends any more.
//!
//! Repetition by itself is no fault: tables, lists and code repeat. A loop is what repeats without a change for so long
//! that nobody reads it.

/// The longest circle that is seen, in tokens.
const LONGEST: usize = 256;
/// Tokens that a circle must have repeated, however short it is.
const LEAST: usize = 1024;
/// Times that a circle must have come round, however long it is.
const TIMES: usize = 8;

/// What is remembered of an answer.
#[derive(Clone, Debug)]
pub struct Loops {
    /// The latest tokens, each at its place modulo the length.
    latest: Box<[u32; LONGEST]>,
    /// For each distance, how many of the latest tokens were the same as the token that far before.
    same: Box<[u32; LONGEST]>,
    tokens: usize,
}

impl Default for Loops {
    fn default() -> Loops {
        Loops { latest: Box::new([0; LONGEST]), same: Box::new([0; LONGEST]), tokens: 0 }
    }
}

impl Loops {
    /// Takes the next token; true when it is the last of a loop.
    pub fn push(&mut self, token: u32) -> bool {
        let mut is_loop = false;
        for distance in 1..=LONGEST.min(self.tokens) {
            let is_same = self.latest[(self.tokens - distance) % LONGEST] == token;
            let same = &mut self.same[distance - 1];
            *same = if is_same { *same + 1 } else { 0 };
            is_loop |= *same as usize >= LEAST.max((TIMES - 1) * distance);
        }
        self.latest[self.tokens % LONGEST] = token;
        self.tokens += 1;
        is_loop
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After how many tokens the loop is found.
    fn found(tokens: impl Iterator<Item = u32>) -> Option<usize> {
        let mut loops = Loops::default();
        tokens.map(|token| loops.push(token)).position(|is_loop| is_loop).map(|at| at + 1)
    }

    #[test]
    fn circles_of_any_length_are_found() {
        assert_eq!(found([7].into_iter().cycle().take(5000)), Some(1 + LEAST));
        assert_eq!(found((0..100).cycle().take(5000)), Some(100 + LEAST));
        // Eight times round, whatever came before.
        assert_eq!(found((1000..1300).chain((0..256).cycle()).take(5000)), Some(300 + 8 * 256));
        assert_eq!(found((0..257).cycle().take(20_000)), None, "longer than what is remembered");
    }

    #[test]
    fn what_changes_now_and_then_is_no_loop() {
        // A table whose rows are alike but for a number.
        assert_eq!(found((0..50_000).map(|at| if at % 40 == 7 { at } else { at % 40 })), None);
        assert_eq!(found([7].into_iter().cycle().take(LEAST)), None);
    }
}
