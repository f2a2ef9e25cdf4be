//! Cases of the sampler: ties, NaN, suppressed tokens, vocabularies that leave threads and slices over, and picks that a
//! plain f64 sampler makes alike.

use gemma4c_dsl::harness::{Bound, Case, Random};

use crate::kernels::sample::{self, Picker, softcap};

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
    let slice = logits.len().div_ceil(picker.slices() as usize).next_multiple_of(2048);
    let all = sorted(logits, suppress);
    let of_slice = |start: usize| -> Vec<(f32, u32)> {
        all.iter().copied().filter(|(_, token)| (start..start + slice).contains(&(*token as usize))).collect()
    };
    (0..logits.len()).step_by(slice).flat_map(|start| keys(&of_slice(start), picker.kept).collect::<Vec<_>>()).collect()
}

fn candidates(name: &str, picker: Picker, logits: Vec<f32>, suppress: &[u32]) -> Case {
    let expected = largest(picker, &logits, suppress);
    Case::new(name, picker.candidates(&[]).expect("a slice is a block"))
        .grid([picker.slices(), 1, 1])
        .buffer("logits", logits)
        .buffer("suppress", suppress)
        .scalar("vocabulary", picker.vocabulary)
        .scalar("suppressed", suppress.len() as u32)
        .expect("largest", expected, Bound::Exact)
}

/// Logits far enough apart that squashing, whose last bits differ between machines, keeps their order.
fn squashed(picker: Picker, cap: f32) -> Case {
    let logits: Vec<f32> = (0..picker.vocabulary).map(|i| (i * 37 % picker.vocabulary) as f32 * 0.02 - 40.0).collect();
    let capped: Vec<f32> = logits.iter().map(|x| (f64::from(cap) * f64::from(x / cap).tanh()) as f32).collect();
    let expected = largest(picker, &capped, &[]);
    // Six units in the logit's last place: a quotient, a tanh and a product, each rounded.
    let bound = Bound::Within { absolute: 6.0 * 4_294_967_296.0, relative: 0.0 };
    Case::new("softcap", picker.candidates(&[softcap::DEF]).expect("a slice is a block"))
        .grid([picker.slices(), 1, 1])
        .buffer("logits", logits)
        .buffer("suppress", Vec::<u32>::new())
        .scalar("vocabulary", picker.vocabulary)
        .scalar("suppressed", 0u32)
        .scalar("transform_cap", cap)
        .expect("largest", expected, bound)
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

/// The first pick from `position` on that no rounding can change.
fn sampled(name: &str, picker: Picker, of: Settings, logits: &[f32], first: u32, rows: u32) -> Case {
    let mut candidates = sorted(logits, &[]);
    candidates.truncate(picker.kept as usize);
    let greedy = of.temperature == 0.0 || picker.kept == 1;
    let decided = |position: u32| if greedy { Some(candidates[0].1) } else { pick(&candidates, of, position.into()) };
    let (position, token) = (first..).find_map(|at| Some((at, decided(at + rows)?))).expect("some pick is clear");
    let next = position + rows;
    let history_len = 8;
    let mut history: Vec<u32> = (1000..1000 + history_len).collect();
    let before = history.clone();
    history[(next % history_len) as usize] = token;
    let settings = [of.temperature.to_bits(), of.top_k, of.top_p.to_bits(), of.seed as u32, (of.seed >> 32) as u32];
    Case::new(name, picker.sample().expect("the slices fit a block"))
        .buffer("largest", largest(picker, logits, &[]))
        .buffer("settings", settings.to_vec())
        .buffer("state", vec![position, rows, 5])
        .buffer("history", before)
        .scalar("slices", picker.slices())
        .scalar("history_len", history_len)
        .expect("state", vec![next, 1, token], Bound::Exact)
        .expect("history", history, Bound::Exact)
}

fn nobody(picker: Picker) -> Case {
    Case::new("no number among the logits", picker.sample().expect("the slices fit a block"))
        .buffer("largest", vec![0u64; (picker.slices() * picker.kept) as usize])
        .buffer("settings", vec![1.0f32.to_bits(), 64, 1.0f32.to_bits(), 1, 2])
        .buffer("state", vec![6u32, 1, 5])
        .buffer("history", vec![0u32])
        .scalar("slices", picker.slices())
        .scalar("history_len", 1u32)
        .expect("state", vec![7u32, 1, u32::MAX], Bound::Exact)
        .expect("history", vec![u32::MAX], Bound::Exact)
}

fn plain(name: &str, logits: Vec<f32>) -> Case {
    let token = sorted(&logits, &[])[0].1;
    Case::new(name, sample::plain().expect("a warp is a block"))
        .scalar("vocabulary", logits.len() as u32)
        .buffer("logits", logits)
        .expect("token", vec![token], Bound::Exact)
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
    let logits = random(5000);
    vec![
        candidates("one token", picker(1, 64), vec![-3.0], &[]),
        candidates("fewer tokens than are kept", picker(50, 64), random(50), &[7, 49]),
        candidates("two slices, the second of one token", picker(2049, 64), random(2049), &[2048]),
        candidates("three slices", picker(5000, 64), logits.clone(), &[3, 4999]),
        candidates("ties", picker(2100, 64), tied(2100), &[2]),
        candidates("argmax of ties", picker(2100, 1), tied(2100), &[0, 1, 2, 3]),
        candidates("argmax, the whole vocabulary", picker(262_144, 1), random(262_144), &[]),
        squashed(picker(3001, 64), 30.0),
        sampled("temperature 1, top-k 64, top-p 0.95", picker(5000, 64), usual, &logits, 40, 1),
        sampled("after a prompt", picker(5000, 64), usual, &logits, 0, 17),
        sampled("hot, top-k 5", picker(5000, 64), Settings { temperature: 20.0, top_k: 5, ..usual }, &logits, 3, 1),
        sampled(
            "cold, no top-k, top-p 1",
            picker(5000, 64),
            Settings { temperature: 0.1, top_k: 0, top_p: 1.0, seed: 9 },
            &logits,
            3,
            1,
        ),
        sampled("a narrow nucleus", picker(50, 64), Settings { top_p: 0.3, ..usual }, &random(50), 11, 1),
        sampled("temperature 0", picker(5000, 64), Settings { temperature: 0.0, ..usual }, &logits, 262_142, 1),
        sampled("argmax", picker(5000, 1), Settings { temperature: 0.0, ..usual }, &logits, 9, 1),
        sampled("argmax, the whole vocabulary", picker(262_144, 1), usual, &random(262_144), 9, 1),
        nobody(picker(100, 64)),
        plain("argmax, plainly", random(77)),
        plain("argmax of ties, plainly", tied(100)),
    ]
}
