//! How much of a prompt goes between two decodes.
//!
//! A chunk of a prompt delays the next token of every running sequence by the time it takes. The limit on that gap, less the time of a
//! decode, times the measured rate of prefill, is the number of tokens that may go in. Times are those between results, so
//! that they are right for a device that works ahead of the host, too.

use std::time::Duration;

use super::device::Limits;

/// Before anything was measured.
const FIRST_GUESS: u32 = 128;
/// Weight of the latest measurement in the running mean.
const LATEST: f64 = 0.25;

/// Rates measured so far.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The longest gap between tokens that a prompt may cause; none: whole chunks always.
    limit: Option<Duration>,
    seconds_per_token: Option<f64>,
    seconds_per_decode: Option<f64>,
}

impl Pace {
    pub fn new(limit: Option<Duration>) -> Pace {
        Pace { limit, ..Pace::default() }
    }

    /// Tokens of prompts that may go in before the next decode.
    pub fn budget(&self, limits: &Limits, is_anybody_decoding: bool) -> u32 {
        let most = limits.chunk();
        let (Some(limit), true) = (self.limit, is_anybody_decoding) else { return most };
        let fits = match self.seconds_per_token {
            None => FIRST_GUESS,
            Some(seconds) => {
                let left = limit.as_secs_f64() - self.seconds_per_decode.unwrap_or(0.0);
                (left.max(0.0) / seconds.max(1e-12)).min(most as f64) as u32
            }
        };
        // Rows are computed by the chunk: one that is half used takes the time of a whole one. Something always goes in, or a prompt would
        // wait for as long as anybody is decoding.
        let smallest = limits.chunks.first().copied().unwrap_or(1);
        limits.chunks.iter().rev().copied().find(|chunk| *chunk <= fits).unwrap_or(smallest)
    }

    /// The device took so long for some tokens of a prompt, or for a decode.
    pub fn measured(&mut self, time: Duration, work: Work) {
        let time = time.as_secs_f64();
        match work {
            Work::Decode => mix(&mut self.seconds_per_decode, time),
            Work::Prompt(tokens) => mix(&mut self.seconds_per_token, time / tokens.max(1) as f64),
        }
    }
}

/// What a device does between two results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Prompt(u32),
    Decode,
}

fn mix(mean: &mut Option<f64>, latest: f64) {
    *mean = Some(mean.map_or(latest, |mean| mean + LATEST * (latest - mean)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            slots: 1,
            rings: 1,
            blocks: 1,
            block_rows: 256,
            rows: 1,
            chunks: vec![32, 128, 512, 2048],
            context: 8192,
            vocab: 10,
            ahead: 0,
            host_units: 0,
            ring_units: 1,
            block_units: 1,
        }
    }

    #[test]
    fn the_chunk_follows_the_limit_and_the_rate() {
        let ms = Duration::from_millis;
        let mut pace = Pace::new(Some(ms(50)));
        assert_eq!(pace.budget(&limits(), false), 2048, "nobody waits");
        assert_eq!(pace.budget(&limits(), true), 128, "a guess");
        // 0.1 ms a token, and decodes of 10 ms: 400 tokens fit.
        pace.measured(ms(10), Work::Decode);
        pace.measured(ms(20), Work::Prompt(200));
        assert_eq!(pace.budget(&limits(), true), 128);
        // Five times as fast.
        (0..40).for_each(|_| pace.measured(ms(20), Work::Prompt(1000)));
        assert_eq!(pace.budget(&limits(), true), 512);
        // Too slow for anything: the smallest chunk still goes in.
        (0..40).for_each(|_| pace.measured(ms(1000), Work::Prompt(10)));
        assert_eq!(pace.budget(&limits(), true), 32);
        assert_eq!(Pace::new(None).budget(&limits(), true), 2048);
    }
}
