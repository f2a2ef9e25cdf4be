//! How much of the prompts goes between two decodes.
//!
//! A chunk of a prompt delays the next token of every running sequence by the time it takes. The limit on that gap,
//! less the time of a decode, is what chunks may take together. A chunk's time is not in proportion to its tokens,
//! since a short one reads all weights too: each size that the device has is measured by itself, and so is a decode for
//! each power of two of its rows. Times are those between results, so that they are right for a device that works ahead
//! of the host, too.

use std::collections::BTreeMap;
use std::time::Duration;

use super::device::Limits;

/// The longest gap between two tokens of a sequence that the prompts of others may cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gap {
    /// Any: chunks are as long as they can be.
    #[default]
    Any,
    /// This, where the smallest chunk allows it.
    Within(Duration),
    /// A decode and a chunk of [`WORTHWHILE`] tokens, but no less than [`SHORT_GAP`] and no more than [`LONG_GAP`]:
    /// shorter chunks read all weights for few tokens, and would make prompts, and with them everybody, wait.
    Measured,
}

/// What nobody notices who reads along.
const SHORT_GAP: f64 = 0.020;
/// What somebody does.
const LONG_GAP: f64 = 0.080;
/// Tokens of a chunk that is as fast by the token as a long one, or nearly.
const WORTHWHILE: u32 = 512;
/// A chunk's time varies with its depth: one a little slower than the mean still fits.
const ROOM: f64 = 1.1;
/// Before anything was measured.
const FIRST_GUESS: u32 = 128;
/// Weight of the latest measurement in the running mean: a slower one counts at once, a faster one has to last.
const SLOWER: f64 = 0.5;
const FASTER: f64 = 0.1;
/// What is left of the time of an asked row after each chunk that has only one: a time that keeps prompts apart would
/// never be measured again.
const FADING: f64 = 0.98;

/// Of what a round that a device closes was seen to take, what one more counts.
const CLOSED_WEIGHT: f64 = 0.1;
/// Of what the last drafts cost that were tried, what more are hoped to cost.
const HOPED_SHARE: f64 = 0.5;

/// Times measured so far.
#[derive(Debug, Default)]
pub(super) struct Pace {
    gap: Gap,
    /// Seconds of a chunk of each size that the device has.
    chunks: Vec<Option<f64>>,
    /// Seconds of a decode of up to one row, two, four and so on.
    decodes: [Option<f64>; 32],
    /// The same of a decode that the host waits for before it queues the next, without the drafts that it verifies.
    rounds: [Option<f64>; 32],
    /// Seconds of a token of the device's drafter.
    draft: Option<f64>,
    /// Seconds of each asked row of a chunk but the first, which is in the chunk's own time.
    asked: Option<f64>,
    /// Of the rounds that a device closes by itself.
    pub closed: ClosedRounds,
}

/// Seconds of a round that a device closes by itself, drafts included, by their number. What a draft more takes is not
/// the same for all: a device may verify eight rows in the time of three.
#[derive(Debug, Default)]
pub(super) struct ClosedRounds(BTreeMap<u32, f64>);

impl ClosedRounds {
    pub fn measured(&mut self, drafts: u32, seconds: f64) {
        let known = self.0.entry(drafts).or_insert(seconds);
        *known += CLOSED_WEIGHT * (seconds - *known);
    }

    /// Whether a round with so many was measured.
    pub fn knows(&self, drafts: u32) -> bool {
        self.0.contains_key(&drafts)
    }

    /// The most drafts of a round that was measured.
    pub fn most(&self) -> Option<u32> {
        self.0.last_key_value().map(|(drafts, _)| *drafts)
    }

    /// What a round takes with so many drafts. Between two numbers that were seen it lies between them. Beyond them
    /// more drafts are hoped to cost half of what the last ones did, since a device may verify eight rows in the time
    /// of five: where that is wrong, the first such round shows it.
    pub fn seconds(&self, drafts: u32) -> f64 {
        let mut below = self.0.range(..=drafts).rev();
        let (above, below, before) = (self.0.range(drafts..).next(), below.next(), below.next());
        let slope = |(a, low): (&u32, &f64), (b, high): (&u32, &f64)| (high - low) / f64::from(b - a);
        match (before, below, above) {
            (_, Some((seen, seconds)), _) if *seen == drafts => *seconds,
            (_, Some(low), Some(high)) => low.1 + slope(low, high) * f64::from(drafts - low.0),
            (Some(lower), Some(low), None) => {
                low.1 + HOPED_SHARE * slope(lower, low).max(0.0) * f64::from(drafts - low.0)
            }
            (_, Some((_, seconds)), _) | (_, None, Some((_, seconds))) => *seconds,
            (_, None, None) => f64::INFINITY,
        }
    }
}

/// A piece of a prompt that may share a chunk with those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Its rows, which it would have alone.
    pub alone: u32,
    /// Rows of the chunk that ends with it.
    pub end: u32,
    /// Rows of it that are asked for.
    pub asked: u32,
}

/// What may still go in before the next decode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Budget {
    tokens: u32,
    seconds: f64,
    /// Something always goes in, or a prompt would wait for as long as anybody is decoding.
    is_first: bool,
}

impl Pace {
    pub fn new(gap: Gap) -> Pace {
        Pace { gap, ..Pace::default() }
    }

    /// What may go in before so many rows are decoded.
    pub fn budget(&self, limits: &Limits, decoding: u32) -> Budget {
        let decode = self.decode_seconds(decoding);
        let gap = match self.gap {
            _ if decoding == 0 => f64::INFINITY,
            Gap::Any => f64::INFINITY,
            Gap::Within(gap) => gap.as_secs_f64(),
            Gap::Measured => {
                let chunk = self.seconds(size_of(WORTHWHILE, limits), limits);
                (decode + chunk * ROOM).clamp(SHORT_GAP, LONG_GAP)
            }
        };
        Budget { tokens: limits.chunk(), seconds: (gap - decode).max(0.0), is_first: true }
    }

    /// Tokens that the next chunk may have; `None` where the decode comes first.
    pub fn next_chunk(&self, budget: &Budget, limits: &Limits) -> Option<u32> {
        if budget.seconds == f64::INFINITY {
            return (budget.tokens > 0).then_some(budget.tokens);
        }
        if self.chunks.iter().all(Option::is_none) {
            // Rows are computed by the chunk: one that is half used takes the time of a whole one.
            let guess = limits.chunks.iter().rev().copied().find(|rows| *rows <= FIRST_GUESS);
            return budget.is_first.then(|| guess.unwrap_or(smallest(limits)));
        }
        let fits = |index: &usize| self.seconds(*index, limits) <= budget.seconds;
        let fitting = (0..limits.chunks.len()).rev().find(fits).map(|index| limits.chunks[index]);
        fitting.or(budget.is_first.then(|| smallest(limits)))
    }

    /// A chunk of so many rows goes in, some of which are asked for.
    pub fn spend(&self, budget: &mut Budget, rows: u32, asked: u32, limits: &Limits) {
        budget.is_first = false;
        budget.tokens = budget.tokens.saturating_sub(rows);
        if budget.seconds.is_finite() {
            budget.seconds = (budget.seconds - self.chunk_seconds(rows, asked, limits)).max(0.0);
        }
    }

    /// How many of some pieces, from the first on, are to share the next chunk, so that all of them take the least time
    /// in the end. The first always goes in, others only within the budget. Of equal times that of the fuller chunk.
    /// Before anything was measured, all.
    pub fn together(&self, shares: &[Share], budget: &Budget, limits: &Limits) -> usize {
        if self.chunks.iter().all(Option::is_none) {
            return shares.len();
        }
        // The least time of all pieces from each one on, and how many of these begin together.
        let mut best = vec![(0.0, 0); shares.len() + 1];
        for first in (0..shares.len()).rev() {
            let (mut least, mut asked) = ((f64::INFINITY, 1), 0);
            for (count, share) in (1..).zip(&shares[first..]) {
                asked += share.asked;
                let rows = share.end - (shares[first].end - shares[first].alone);
                let is_within = first > 0 || count == 1 || self.chunk_seconds(rows, asked, limits) <= budget.seconds;
                let all = self.hoped_seconds(rows, asked, limits) + best[first + count].0;
                if is_within && all <= least.0 {
                    least = (all, count);
                }
            }
            best[first] = least;
        }
        best[0].1
    }

    fn chunk_seconds(&self, rows: u32, asked: u32, limits: &Limits) -> f64 {
        self.seconds(size_of(rows, limits), limits) + self.more_asked(asked)
    }

    /// The same, but a size above all that were measured takes no longer than the largest of these: it is tried, or it
    /// would never be measured.
    fn hoped_seconds(&self, rows: u32, asked: u32, limits: &Limits) -> f64 {
        let size = size_of(rows, limits);
        let largest = self.chunks.iter().rposition(Option::is_some).unwrap_or(size);
        self.seconds(size.min(largest), limits) + self.more_asked(asked)
    }

    fn more_asked(&self, asked: u32) -> f64 {
        asked.saturating_sub(1) as f64 * self.asked.unwrap_or(0.0)
    }

    /// The time of a decode of so many rows. Of a size that was not measured, that of the next one that was: a larger
    /// one takes no less.
    fn decode_seconds(&self, rows: u32) -> f64 {
        let of = |power: usize| self.decodes[power].or(self.rounds[power]);
        let power = power_of(rows);
        let larger = (power..self.decodes.len()).find_map(of);
        larger.or_else(|| (0..power).rev().find_map(of)).unwrap_or(0.0)
    }

    /// The time of a decode of so many rows that is queued behind another, if one of that size was measured.
    pub fn plain_seconds(&self, rows: u32) -> Option<f64> {
        self.decodes[power_of(rows)]
    }

    /// The time of a decode of so many rows that verifies drafts. A size that was not measured is hoped to take no
    /// longer than the largest smaller one: it is tried, or it would never be measured.
    pub fn round_seconds(&self, rows: u32) -> f64 {
        let of = |power: usize| self.rounds[power].or(self.decodes[power]);
        let power = power_of(rows);
        let smaller = (0..=power).rev().find_map(of);
        smaller.or_else(|| (power..self.rounds.len()).find_map(of)).unwrap_or(0.0)
    }

    /// The time of one token of the device's drafter; nothing until it was measured.
    pub fn draft_seconds(&self) -> f64 {
        self.draft.unwrap_or(0.0)
    }

    /// A size that was slow once may not be slow for ever: what keeps it from being tried loses weight.
    pub fn doubt_rounds(&mut self) {
        self.rounds.iter_mut().flatten().for_each(|seconds| *seconds *= FADING);
    }

    /// The time of a chunk of a size. Of one that was not measured: on the line between its neighbours; below all of
    /// them, halfway between none and all of the time being for the weights; above all of them, no more than that many
    /// smaller ones.
    fn seconds(&self, index: usize, limits: &Limits) -> f64 {
        let of = |index: usize| self.chunks.get(index).copied().flatten();
        if let Some(seconds) = of(index) {
            return seconds;
        }
        let rows = |index: usize| f64::from(limits.chunks[index].max(1));
        let larger = (index + 1..limits.chunks.len()).find_map(|larger| Some((rows(larger), of(larger)?)));
        let smaller = (0..index).rev().find_map(|smaller| Some((rows(smaller), of(smaller)?)));
        match (smaller, larger) {
            (Some((few, short)), Some((many, long))) => short + (long - short) * (rows(index) - few) / (many - few),
            (None, Some((many, long))) => long * (1.0 + rows(index) / many) / 2.0,
            (Some((few, short)), None) => short * rows(index) / few,
            (None, None) => f64::INFINITY,
        }
    }

    /// The device took so long for a chunk of a prompt, or for a decode.
    pub fn measured(&mut self, time: Duration, work: Work, limits: &Limits) {
        let time = time.as_secs_f64();
        match work {
            Work::Decode(rows) => mix(&mut self.decodes[power_of(rows)], time),
            Work::Round(rows) => mix(&mut self.rounds[power_of(rows)], time),
            Work::Drafts(tokens) => mix(&mut self.draft, time / f64::from(tokens.max(1))),
            Work::Closed { drafts, .. } => self.closed.measured(drafts, time),
            Work::Unmeasured => {}
            Work::Prompt { rows, asked } => {
                let size = size_of(rows, limits);
                self.chunks.resize(limits.chunks.len(), None);
                match self.chunks[size] {
                    Some(chunk) if asked > 1 => mix(&mut self.asked, (time - chunk).max(0.0) / (asked - 1) as f64),
                    _ => mix(&mut self.chunks[size], time),
                }
                if asked <= 1 {
                    self.asked = self.asked.map(|seconds| seconds * FADING);
                }
            }
        }
    }
}

/// What a device does between two results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A chunk of so many rows, some of which are asked for.
    Prompt { rows: u32, asked: u32 },
    /// A token for each of so many rows.
    Decode(u32),
    /// The same, of rows that verify drafts.
    Round(u32),
    /// So many tokens of the device's drafter.
    Drafts(u32),
    /// A round of so many drafts that the device closes by itself, and whether they are tried although they do not seem
    /// to pay.
    Closed { drafts: u32, is_trial: bool },
    /// What tells nothing about times.
    Unmeasured,
}

/// The least power of two that so many rows fit, as its exponent.
fn power_of(rows: u32) -> usize {
    rows.max(1).next_power_of_two().trailing_zeros() as usize
}

fn smallest(limits: &Limits) -> u32 {
    limits.chunks.first().copied().unwrap_or(1)
}

/// The size of chunk that so many tokens go through.
fn size_of(tokens: u32, limits: &Limits) -> usize {
    let size = limits.chunks.iter().position(|rows| *rows >= tokens);
    size.unwrap_or(limits.chunks.len().saturating_sub(1))
}

fn mix(mean: &mut Option<f64>, latest: f64) {
    let weight = |mean: f64| if latest > mean { SLOWER } else { FASTER };
    *mean = Some(mean.map_or(latest, |mean| mean + weight(mean) * (latest - mean)));
}

#[cfg(test)]
mod tests {
    use gemma4c_plan::cuda::Paging;

    use super::*;

    fn limits() -> Limits {
        Limits {
            slots: 1,
            pages: 2,
            sliding: Paging::default(),
            full: Paging { rows: 256, entries: 32 },
            rows: 1,
            decode_rows: 1,
            verified_rows: 1,
            drafts: 0,
            chunks: vec![32, 128, 512, 2048],
            alignment: 64,
            context: 8192,
            vocab: 10,
            ahead: 0,
            spare_rows: 0,
            host_units: 0,
            seats: None,
        }
    }

    fn prompt(rows: u32) -> Work {
        Work::Prompt { rows, asked: 1 }
    }

    fn ms(time: f64) -> Duration {
        Duration::from_secs_f64(time / 1000.0)
    }

    /// The chunks of a prompt without an end that go before a decode.
    fn chunks(pace: &Pace, is_anybody_decoding: bool, prompt: u32) -> Vec<u32> {
        let mut budget = pace.budget(&limits(), if is_anybody_decoding { 3 } else { 0 });
        let mut all = Vec::new();
        while let Some(most) = pace.next_chunk(&budget, &limits()) {
            all.push(most.min(prompt));
            pace.spend(&mut budget, most.min(prompt), 1, &limits());
        }
        all
    }

    #[test]
    fn chunks_follow_the_gap_and_their_own_times() {
        let mut pace = Pace::new(Gap::Within(ms(50.0)));
        assert_eq!(chunks(&pace, false, 4000), [2048], "nobody waits");
        assert_eq!(chunks(&pace, true, 4000), [128], "a guess");
        let mut measured = |time, work| pace.measured(ms(time), work, &limits());
        measured(10.0, Work::Decode(4));
        measured(8.0, prompt(100));
        // 40 ms are left. 512 may take 32, as far as is known.
        assert_eq!(chunks(&pace, true, 4000), [512, 128]);
        (0..40).for_each(|_| pace.measured(ms(19.0), prompt(512), &limits()));
        assert_eq!(chunks(&pace, true, 4000), [512, 512]);
        // Short prompts take the time of the chunk that they go through: five of 8 ms.
        assert_eq!(chunks(&pace, true, 100), [100; 5]);
        // A slower one counts at once.
        (0..3).for_each(|_| pace.measured(ms(60.0), prompt(512), &limits()));
        assert_eq!(chunks(&pace, true, 4000), [128; 5]);
        // Too slow for anything: the smallest chunk still goes in.
        (0..9).for_each(|_| pace.measured(ms(60.0), Work::Decode(4), &limits()));
        assert_eq!(chunks(&pace, true, 4000), [32]);
        assert_eq!(chunks(&Pace::new(Gap::Any), true, 4000), [2048]);
    }

    /// The smallest chunk is nearly as slow as the next, which was never measured because it was thought too slow.
    #[test]
    fn sizes_that_were_not_measured_are_tried() {
        let mut pace = Pace::new(Gap::Within(ms(80.0)));
        let mut measured = |time, work| pace.measured(ms(time), work, &limits());
        measured(27.0, Work::Decode(4));
        measured(64.0, prompt(512));
        assert!((pace.seconds(1, &limits()) - 0.040).abs() < 1e-9);
        pace.measured(ms(15.0), prompt(32), &limits());
        assert!((pace.seconds(1, &limits()) - 0.0248).abs() < 1e-9);
        assert_eq!(chunks(&pace, true, 4000), [128, 128]);
    }

    #[test]
    fn a_slow_decode_makes_no_prompt_starve() {
        let mut pace = Pace::new(Gap::Measured);
        pace.measured(ms(8.0), prompt(512), &limits());
        pace.measured(ms(4.0), prompt(128), &limits());
        pace.measured(ms(3.5), prompt(32), &limits());
        pace.measured(ms(2.0), Work::Decode(4), &limits());
        assert_eq!(chunks(&pace, true, 4000), [512, 512], "20 ms that nobody notices");
        (0..9).for_each(|_| pace.measured(ms(30.0), prompt(512), &limits()));
        (0..9).for_each(|_| pace.measured(ms(20.0), Work::Decode(4), &limits()));
        assert_eq!(chunks(&pace, true, 4000), [512], "a slower device takes its chunk all the same");
        (0..9).for_each(|_| pace.measured(ms(60.0), Work::Decode(4), &limits()));
        assert_eq!(chunks(&pace, true, 4000), [128; 5], "20 ms are left: a gap has an end");
    }

    /// Short prompts, each of which is asked for its last row.
    fn shares(count: u32, rows: u32) -> Vec<Share> {
        let stride = rows.next_multiple_of(64);
        (0..count).map(|at| Share { alone: rows, end: at * stride + rows, asked: 1 }).collect()
    }

    #[test]
    fn prompts_share_a_chunk_where_that_takes_less_time() {
        let mut pace = Pace::new(Gap::Within(ms(50.0)));
        let nobody = Budget { tokens: 2048, seconds: f64::INFINITY, is_first: true };
        let together = |pace: &Pace, budget, shares: &[Share]| pace.together(shares, &budget, &limits());
        assert_eq!(together(&pace, nobody, &shares(9, 20)), 9, "nothing is known");
        // The next size is tried, where it would fit if it took as much by the row.
        pace.measured(ms(3.5), prompt(32), &limits());
        assert_eq!(together(&pace, nobody, &shares(2, 20)), 2);
        assert_eq!(together(&pace, Budget { seconds: 0.013, ..nobody }, &shares(2, 20)), 1);
        for (rows, time) in [(32, 3.5), (128, 4.0), (512, 8.0), (2048, 30.0)] {
            pace.measured(ms(time), prompt(rows), &limits());
        }
        // Two in 128 rows take 4 ms instead of 7; a third by itself 3.5 more, and with them 4; eight take 8 instead of
        // 28.
        assert_eq!([1, 2, 3, 8].map(|count| together(&pace, nobody, &shares(count, 20))), [1, 2, 2, 8]);
        // Sixteen in two chunks of 8 ms: one of 1,024 rows would take 30.
        assert_eq!(together(&pace, nobody, &shares(16, 20)), 8);
        assert_eq!(together(&pace, Budget { seconds: 0.008, ..nobody }, &shares(16, 20)), 8, "the gap");
        assert_eq!(together(&pace, Budget { seconds: 0.001, ..nobody }, &shares(16, 20)), 1, "something goes in");
        // Two of 600 would have a chunk of 2,048 rows each; two of 400 have one of 512.
        assert_eq!([600, 400].map(|rows| together(&pace, nobody, &shares(2, rows))), [2, 1]);
    }

    #[test]
    fn what_asked_rows_take_is_told_apart_and_fades() {
        let mut pace = Pace::new(Gap::Any);
        let nobody = Budget { tokens: 2048, seconds: f64::INFINITY, is_first: true };
        for (rows, time) in [(32, 3.5), (128, 4.0), (512, 8.0)] {
            pace.measured(ms(time), prompt(rows), &limits());
        }
        pace.measured(ms(15.0), Work::Prompt { rows: 512, asked: 8 }, &limits());
        assert!((pace.chunk_seconds(512, 8, &limits()) - 0.015).abs() < 1e-9);
        assert!((pace.chunk_seconds(512, 1, &limits()) - 0.008).abs() < 1e-9);
        assert_eq!(pace.together(&shares(8, 20), &nobody, &limits()), 8);
        // As long as a chunk of their own: nobody shares, and the estimate fades.
        (0..20).for_each(|_| pace.measured(ms(60.0), Work::Prompt { rows: 512, asked: 8 }, &limits()));
        assert_eq!(pace.together(&shares(8, 20), &nobody, &limits()), 1);
        (0..100).for_each(|_| pace.measured(ms(3.5), prompt(32), &limits()));
        assert_eq!(pace.together(&shares(8, 20), &nobody, &limits()), 8);
    }
}
