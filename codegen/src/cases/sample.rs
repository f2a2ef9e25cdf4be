//! Cases of the sampler: ties, NaN, suppressed and masked tokens, vocabularies that leave threads and slices over, and
//! picks that a plain f64 sampler makes alike.

use gemma4c_dsl::harness::{Bound, Case, Random};

use crate::kernels::matvec::slots::then_softcap;
use crate::kernels::sample::Picker;

/// Larger first; of equal ones the lower token.
fn sorted(logits: &[f32], suppress: &[u32]) -> Vec<(f32, u32)> {
    let may_be_picked = |(x, token): &(f32, u32)| !x.is_nan() && !suppress.contains(token);
    let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).filter(may_be_picked).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    all
}

/// A logit and its token as the kernels order them.
fn key((logit, token): (f32, u32)) -> u64 {
    let bits = logit.to_bits();
    let ordered = if logit.is_sign_negative() { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!token)
}

/// The `kept` largest of a slice, as keys; 0 where there are no more.
fn keys(slice: &[(f32, u32)], kept: u32) -> impl Iterator<Item = u64> {
    slice.iter().copied().map(key).chain(std::iter::repeat(0)).take(kept as usize)
}

/// The largest keys of each slice of the vocabulary.
fn largest(picker: Picker, logits: &[f32], suppress: &[u32]) -> Vec<u64> {
    let slice = picker.slice_len() as usize;
    let all = sorted(logits, suppress);
    let of_slice = |start: usize| -> Vec<(f32, u32)> {
        all.iter().copied().filter(|(_, token)| (start..start + slice).contains(&(*token as usize))).collect()
    };
    (0..logits.len()).step_by(slice).flat_map(|start| keys(&of_slice(start), picker.kept).collect::<Vec<_>>()).collect()
}

#[derive(Clone, Copy)]
struct Settings {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    seed: u64,
}

/// Philox 4x32-10: 24 bits of the first word.
fn uniform(seed: u64, position: u64) -> f64 {
    let mut counter = [position as u32, (position >> 32) as u32, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let products = [0xD251_1F53 * u64::from(counter[0]), 0xCD9E_8D57 * u64::from(counter[2])];
        let high = products.map(|product| (product >> 32) as u32);
        counter =
            [high[1] ^ counter[1] ^ key[0], products[1] as u32, high[0] ^ counter[3] ^ key[1], products[0] as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    f64::from(counter[0] >> 8) / f64::from(1 << 24)
}

/// The pick in f64, as the runtime's sampler makes it; `None` where rounding to f32 could make another.
fn pick(candidates: &[(f32, u32)], of: Settings, position: u64) -> Option<u32> {
    let largest = candidates[0].0;
    let weight = |x: f32| f64::from((x - largest) / of.temperature).exp();
    let kept = if of.top_k == 0 { candidates.len() } else { candidates.len().min(of.top_k as usize) };
    let total: f64 = candidates[..kept].iter().map(|(x, _)| weight(*x)).sum();
    let border = 1e-5 * total;
    let (mut mass, mut nucleus) = (0.0, 0);
    while nucleus < kept && mass < total * f64::from(of.top_p) {
        mass += weight(candidates[nucleus].0);
        nucleus += 1;
        if of.top_p < 1.0 && (mass - total * f64::from(of.top_p)).abs() < border {
            return None;
        }
    }
    let mut rest = uniform(of.seed, position) * mass;
    for (x, token) in &candidates[..nucleus] {
        rest -= weight(*x);
        if rest.abs() < border {
            return None;
        }
        if rest < 0.0 {
            return Some(*token);
        }
    }
    None
}

const LARGEST: Settings = Settings { temperature: 0.0, top_k: 0, top_p: 0.0, seed: 0 };

/// The tick of a case's record.
const TICK: u32 = 13;

/// A row's record, from its first five words, without a mask.
fn record(of: &Settings, first: [u32; 5]) -> Vec<u32> {
    record_with(of, first, 0)
}

fn record_with(of: &Settings, first: [u32; 5], masked: u32) -> Vec<u32> {
    let settings = [of.temperature.to_bits(), of.top_k, of.top_p.to_bits(), of.seed as u32, (of.seed >> 32) as u32];
    [&first[..], &settings, &[masked, 0], &[77; 4]].concat()
}

/// A row's mask: a bit for every token.
fn mask(vocabulary: u32, is_allowed: impl Fn(u32) -> bool) -> Vec<u32> {
    let word = |first: u32| (0..32).filter(|bit| is_allowed(first + bit)).fold(0, |word, bit| word | 1 << bit);
    (0..vocabulary).step_by(32).map(word).collect()
}

/// What a mask leaves of the logits: the rest is nobody, as NaN is.
fn masked(logits: &[f32], is_allowed: impl Fn(u32) -> bool) -> Vec<f32> {
    logits.iter().zip(0..).map(|(logit, token)| if is_allowed(token) { *logit } else { f32::NAN }).collect()
}

/// Three rows: the first and the last have masks of their own, the one between has none, although a mask lies in its
/// place.
fn rows_by_masks(kept: u32, vocabulary: u32) -> Case {
    let picker = Picker { vocabulary, kept };
    let settings = Settings { temperature: 1.0, top_k: 64, top_p: 0.95, seed: 5 };
    let logits = Random::new(9).floats(3 * vocabulary as usize, -12.0, 12.0);
    // The last row may only have the last token, the masks' last bit.
    let is_allowed = |row: usize, token: u32| match row {
        0 => token % 7 == 3,
        1 => false,
        _ => token == vocabulary - 1,
    };
    let slots = (picker.slices() * kept) as usize;
    let (mut records, mut after, mut keys, mut masks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut history = vec![1000u32; 4];
    for row in 0..3 {
        let of_row = &logits[row * vocabulary as usize..][..vocabulary as usize];
        masks.extend(mask(vocabulary, |token| is_allowed(row, token)));
        let left = if row == 1 { of_row.to_vec() } else { masked(of_row, |token| is_allowed(row, token)) };
        let alone = Pick { picker, settings, logits: &left, suppress: &[3], position: 20, rows: 1 };
        let (position, token) = alone.clear();
        let is_masked = u32::from(row != 1);
        records.extend(record_with(&settings, [position, 1, 5, 1, 0], is_masked));
        after.extend(record_with(&settings, [position + 1, 1, token, 1, 1], is_masked));
        history[row] = token;
        keys.extend(largest(picker, &left, &[3]));
    }
    let name = format!("three rows, two of them with masks, {kept} kept of {vocabulary}");
    Case::new(name, picker.pick(&[]).expect("a slice is a block"))
        .grid([picker.slices(), 3, 1])
        .buffer("logits", &logits[..])
        .buffer("excluded_tokens", vec![3u32])
        .buffer("excluded_masks", masks)
        .buffer("slices_largest", vec![7u64; 3 * slots])
        .buffer("slices_counters", vec![0u32; 3])
        .buffer("records", records)
        .buffer("history_tokens", vec![1000u32; 4])
        .scalar("vocabulary", vocabulary)
        .scalar("excluded_mask_words", vocabulary.div_ceil(32))
        .scalar("excluded_count", 1u32)
        .scalar("history_len", 1u32)
        .scalar("history_rows", 4u32)
        .expect("slices_largest", keys, Bound::Exact)
        .expect("slices_counters", vec![0u32; 3], Bound::Exact)
        .expect("records", after, Bound::Exact)
        .expect("history_tokens", history, Bound::Exact)
}

/// A pick by a mask of so many words; too few are read beyond.
pub fn by_mask_of(words: u32) -> Case {
    let picker = Picker { vocabulary: 70, kept: 1 };
    Case::new(format!("a mask of {words} words for 70 tokens"), picker.pick(&[]).expect("a slice is a block"))
        .grid([picker.slices(), 1, 1])
        .buffer("logits", vec![1.0f32; 70])
        .buffer("excluded_tokens", Vec::<u32>::new())
        .buffer("excluded_masks", vec![0u32; words as usize])
        .buffer("slices_largest", vec![7u64; picker.slices() as usize])
        .buffer("slices_counters", vec![0u32])
        .buffer("records", record_with(&LARGEST, [3, 1, 5, 0, 0], 1))
        .buffer("history_tokens", vec![9u32])
        .scalar("vocabulary", 70u32)
        .scalar("excluded_mask_words", 3u32)
        .scalar("excluded_count", 0u32)
        .scalar("history_len", 1u32)
        .scalar("history_rows", 1u32)
        .expect("slices_largest", vec![0u64; picker.slices() as usize], Bound::Exact)
        .expect("records", record_with(&LARGEST, [4, 1, u32::MAX, 0, 1], 1), Bound::Exact)
        .expect("history_tokens", vec![u32::MAX], Bound::Exact)
}

/// Three rows, of which the second is free: each as it would be alone, with its own settings, into the column of the
/// history that its record says.
fn rows_apart(kept: u32) -> Case {
    let vocabulary = 5000;
    let picker = Picker { vocabulary, kept };
    let usual = Settings { temperature: 1.0, top_k: 64, top_p: 0.95, seed: 5 };
    let of = [usual, usual, Settings { temperature: 0.0, ..usual }];
    let logits = Random::new(8).floats(3 * vocabulary as usize, -12.0, 12.0);
    let row = |at: usize| &logits[at * vocabulary as usize..][..vocabulary as usize];
    let slots = (picker.slices() * kept) as usize;
    let (mut records, mut after, mut keys) = (Vec::new(), Vec::new(), Vec::new());
    let before: Vec<u32> = (1000..1016).collect();
    let mut history = before.clone();
    for at in 0..3 {
        if at == 1 {
            records.extend(record(&of[at], [9, 0, 8, 1, 2]));
            after.extend(record(&of[at], [9, 0, 8, 1, 2]));
            keys.extend(vec![7u64; slots]);
            continue;
        }
        let alone = Pick { picker, settings: of[at], logits: row(at), suppress: &[], position: 20, rows: 1 };
        let (position, token) = alone.clear();
        let tick = 5 + at as u32;
        for (words, first) in
            [(&mut records, [position, 1, 5, 1, tick]), (&mut after, [position + 1, 1, token, 1, tick + 1])]
        {
            let mut record = record(&of[at], first);
            record[11] = 1;
            words.extend(record);
        }
        history[(tick % 4 * 4) as usize + at + 1] = token;
        keys.extend(largest(picker, row(at), &[]));
    }
    Case::new(format!("three rows, one of them free, {kept} kept"), picker.pick(&[]).expect("a slice is a block"))
        .grid([picker.slices(), 3, 1])
        .buffer("logits", &logits[..])
        .buffer("excluded_tokens", Vec::<u32>::new())
        .buffer("excluded_masks", Vec::<u32>::new())
        .buffer("slices_largest", vec![7u64; 3 * slots])
        .buffer("slices_counters", vec![0u32; 3])
        .buffer("records", records)
        .buffer("history_tokens", before)
        .scalar("vocabulary", vocabulary)
        .scalar("excluded_mask_words", 0u32)
        .scalar("excluded_count", 0u32)
        .scalar("history_len", 4u32)
        .scalar("history_rows", 4u32)
        .expect("slices_largest", keys, Bound::Exact)
        .expect("slices_counters", vec![0u32; 3], Bound::Exact)
        .expect("records", after, Bound::Exact)
        .expect("history_tokens", history, Bound::Exact)
}

/// A loop's state before a pick, and what the pick is made from.
struct Pick<'a> {
    picker: Picker,
    settings: Settings,
    logits: &'a [f32],
    suppress: &'a [u32],
    /// Of the first row.
    position: u32,
    rows: u32,
}

impl Pick<'_> {
    /// What the pick must be, among `candidates`; `None` where rounding to f32 could make another.
    fn decided(&self, candidates: &[(f32, u32)], position: u32) -> Option<u32> {
        match candidates.first() {
            None => Some(u32::MAX),
            Some((_, token)) if self.settings.temperature == 0.0 || self.picker.kept == 1 => Some(*token),
            Some(_) => pick(candidates, self.settings, position.into()),
        }
    }

    /// The first position from `position` on whose pick no rounding can change, and the pick.
    fn clear(&self) -> (u32, u32) {
        let mut candidates = sorted(self.logits, self.suppress);
        candidates.truncate(self.picker.kept as usize);
        (self.position..)
            .find_map(|at| Some((at, self.decided(&candidates, at + self.rows)?)))
            .expect("some pick is clear")
    }

    /// At that position.
    fn case(&self, name: &str) -> Case {
        let Self { picker, settings: of, logits, suppress, rows, .. } = *self;
        let (position, token) = self.clear();
        let next = position + rows;
        let before: Vec<u32> = (1000..1008).collect();
        let mut history = before.clone();
        history[(TICK % 8) as usize] = token;
        let record = |position, token, tick| record(&of, [position, rows, token, 3, tick]);
        let kept = (picker.slices() * picker.kept) as usize;
        Case::new(name, picker.pick(&[]).expect("a slice is a block"))
            .grid([picker.slices(), 1, 1])
            .buffer("logits", logits)
            .buffer("excluded_tokens", suppress)
            .buffer("excluded_masks", Vec::<u32>::new())
            .buffer("slices_largest", vec![7u64; kept])
            .buffer("slices_counters", vec![0u32])
            .buffer("records", record(position, 5, TICK))
            .buffer("history_tokens", before)
            .scalar("vocabulary", picker.vocabulary)
            .scalar("excluded_mask_words", 0u32)
            .scalar("excluded_count", suppress.len() as u32)
            .scalar("history_len", 8u32)
            .scalar("history_rows", 1u32)
            .expect("slices_largest", largest(picker, logits, suppress), Bound::Exact)
            .expect("slices_counters", vec![0u32], Bound::Exact)
            .expect("records", record(next, token, TICK + 1), Bound::Exact)
            .expect("history_tokens", history, Bound::Exact)
    }
}

/// Logits far enough apart that squashing, whose last bits differ between machines, keeps their order.
fn squashed(picker: Picker, cap: f32) -> Case {
    let logits: Vec<f32> = (0..picker.vocabulary).map(|i| (i * 37 % picker.vocabulary) as f32 * 0.02 - 40.0).collect();
    let capped: Vec<f32> = logits.iter().map(|x| (f64::from(cap) * f64::from(x / cap).tanh()) as f32).collect();
    let token = sorted(&capped, &[])[0].1;
    // Six units in the logit's last place: a quotient, a tanh and a product, each rounded.
    let bound = Bound::Within { absolute: 6.0 * 4_294_967_296.0, relative: 0.0 };
    Case::new("softcap", picker.pick(&[then_softcap::DEF]).expect("a slice is a block"))
        .grid([picker.slices(), 1, 1])
        .buffer("logits", logits)
        .buffer("excluded_tokens", Vec::<u32>::new())
        .buffer("excluded_masks", Vec::<u32>::new())
        .buffer("slices_largest", vec![7u64; (picker.slices() * picker.kept) as usize])
        .buffer("slices_counters", vec![0u32])
        .buffer("records", record(&LARGEST, [3, 1, 5, 0, 0]))
        .buffer("history_tokens", vec![9u32])
        .scalar("vocabulary", picker.vocabulary)
        .scalar("excluded_mask_words", 0u32)
        .scalar("excluded_count", 0u32)
        .scalar("history_len", 1u32)
        .scalar("history_rows", 1u32)
        .scalar("transform_cap", cap)
        .expect("slices_largest", largest(picker, &capped, &[]), bound)
        .expect("records", record(&LARGEST, [4, 1, token, 0, 1]), Bound::Exact)
        .expect("history_tokens", vec![token], Bound::Exact)
}

/// A thread has every 512th logit of a slice: here eight of the largest each, so that far more keys than are kept reach
/// what the KEPT-th thread has.
fn crowded(count: usize) -> Vec<f32> {
    let random = Random::new(3).floats(count, -12.0, 12.0);
    random.iter().enumerate().map(|(token, logit)| if token % 512 < 64 { logit + 100.0 } else { *logit }).collect()
}

/// Few distinct values, both zeros, infinities and NaN: ties everywhere.
fn tied(count: usize) -> Vec<f32> {
    let values = [0.0, -0.0, 3.5, f32::NAN, -7.25, 3.5, f32::NEG_INFINITY, 1e-40];
    let mut random = Random::new(count as u64);
    (0..count).map(|_| values[random.below(values.len() as u64) as usize]).collect()
}

pub fn cases() -> Vec<Case> {
    let picker = |vocabulary, kept| Picker { vocabulary, kept };
    let random = |count: u32| Random::new(u64::from(count)).floats(count as usize, -12.0, 12.0);
    let usual = Settings { temperature: 1.0, top_k: 64, top_p: 0.95, seed: 0x1234_5678_9abc_def0 };
    let largest = Settings { temperature: 0.0, ..usual };
    let logits = random(9000);
    let sampled = |name: &str, settings, logits: &[f32], suppress: &[u32], position, rows| {
        let picker = picker(logits.len() as u32, 64);
        Pick { picker, settings, logits, suppress, position, rows }.case(name)
    };
    let argmax = |name: &str, logits: &[f32], suppress: &[u32]| {
        let picker = picker(logits.len() as u32, 1);
        Pick { picker, settings: usual, logits, suppress, position: 9, rows: 1 }.case(name)
    };
    vec![
        sampled("one token", usual, &[-3.0], &[], 0, 1),
        sampled("fewer tokens than are kept", usual, &random(50), &[7, 49], 4, 1),
        sampled("two slices, the second of one token", largest, &random(4097), &[4096], 4, 1),
        sampled("three slices", usual, &logits, &[3, 8999], 40, 1),
        sampled("after a prompt", usual, &logits, &[], 0, 17),
        sampled("hot, top-k 5", Settings { temperature: 20.0, top_k: 5, ..usual }, &logits, &[], 3, 1),
        sampled(
            "cold, no top-k, top-p 1",
            Settings { temperature: 0.1, top_k: 0, top_p: 1.0, seed: 9 },
            &logits,
            &[],
            3,
            1,
        ),
        sampled("a narrow nucleus", Settings { top_p: 0.3, ..usual }, &random(50), &[], 11, 1),
        sampled("temperature 0", largest, &logits, &[], 262_142, 1),
        sampled("ties", largest, &tied(2100), &[2], 1, 1),
        sampled("the largest of a slice in few threads", usual, &crowded(9000), &[512], 7, 1),
        sampled("no number among the logits", usual, &[f32::NAN; 100], &[], 6, 1),
        argmax("argmax of ties", &tied(2100), &[0, 1, 2, 3]),
        argmax("argmax of one slice", &random(77), &[]),
        argmax("argmax, the whole vocabulary", &random(262_144), &[]),
        rows_apart(1),
        rows_apart(64),
        rows_by_masks(1, 5000),
        rows_by_masks(64, 4999),
        by_mask_of(3),
        squashed(picker(4999, 64), 30.0),
    ]
}
