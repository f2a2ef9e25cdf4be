//! The next token: the largest logits, and a choice among them by temperature, top-k and top-p.
//!
//! One launch for all rows. Each block of [`pick`] finds the KEPT largest logits of its slice of a row's vocabulary, in order; the last
//! block of the row to finish finds the KEPT largest of those, picks one and makes the row's record ready for the next token. With
//! KEPT = 1 that is the argmax.
//! Nothing depends on the order in which threads arrive: a logit and its token make one number, all numbers differ, and
//! the largest are found by counting.
//!
//! The rule is that of the runtime's sampler, with the same random number for (seed, position): candidates from the largest
//! down, of equals the lower token first; weights `exp((logit - largest) / temperature)`; the nucleus is the shortest
//! head of that list with a share of at least top-p. What differs: at most KEPT candidates, and weights and sums in f32.
//! A sum of 64 weights is within 4e-6 of its f64 value, so the pick differs only where the random number falls within
//! 4e-6 of the border between two tokens, or top-p within 4e-6 of the nucleus's end.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

/// A logit and its token as one number: a larger logit is a larger key, and of equal ones the lower token. NaN is 0, the key
/// of nobody.
#[device]
pub fn key_of(logit: f32, token: u32) -> u64 {
    let bits = logit.to_bits();
    let ordered = if bits >> 31 == 0 { bits ^ 0x8000_0000 } else { bits ^ 0xffff_ffff };
    if logit.is_nan() { 0u64 } else { ((ordered as u64) << 32) | (token ^ 0xffff_ffff) as u64 }
}

#[device]
pub fn logit_of(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered ^ 0x8000_0000 } else { ordered ^ 0xffff_ffff })
}

/// The token of a key; `u32::MAX` for nobody.
#[device]
pub fn token_of(key: u64) -> u32 {
    key as u32 ^ 0xffff_ffff
}

/// The KEPT-th largest of the threads' keys, or 0 where there are fewer: two of its bits at a time, from the highest, by counting the keys
/// that reach each of the three numbers they may make. `counts` are 32 zeros, one for each step, which hold three counts each. A collective of the block.
#[device]
pub fn kept_threshold<const THREADS: u32, const KEPT: u32>(key: u64, counts: Shared<u32>) -> u64 {
    require!(THREADS < 1024);
    let mut threshold = 0u64;
    for step in 0u32..32 {
        let shift = 62 - 2 * step;
        let mut of_warp = 0u32;
        #[unroll]
        for digit in 1u32..4 {
            let reaches = ballot(key >= threshold | ((digit as u64) << shift));
            of_warp = of_warp | reaches.count_ones() << (10 * (digit - 1));
        }
        if lane_id() == 0 {
            atomic_add(counts, step, of_warp);
        }
        barrier();
        let reaching = counts[step];
        let mut digit = 0u32;
        let mut of_digit = 0u32;
        #[unroll]
        for larger in 1u32..4 {
            let of_larger = reaching >> (10 * (larger - 1)) & 1023;
            if of_larger >= KEPT {
                digit = larger;
                of_digit = of_larger;
            }
        }
        threshold = threshold | ((digit as u64) << shift);
        if of_digit == KEPT {
            break;
        }
    }
    threshold
}

/// The largest of a thread's keys.
#[device]
pub fn own_largest<const PER: u32>(keys: &Regs<u64>) -> u64 {
    let mut largest = 0u64;
    #[unroll]
    for i in 0..PER {
        largest = largest.max(keys[i]);
    }
    largest
}

/// The largest of the keys in the block's registers. A collective of the block.
#[device]
pub fn largest_key<const PER: u32>(keys: &Regs<u64>) -> u64 {
    let largest = own_largest(keys);
    let high = (largest >> 32) as u32;
    let highest = block_max(high);
    let low = block_max(if high == highest { largest as u32 } else { 0u32 });
    ((highest as u64) << 32) | low as u64
}

/// Leaves the KEPT largest keys of the block in `kept`, the largest first, the rest 0. A collective of the block; `found`, KEPT * PER keys, `count` and `counts` are scratch.
///
/// Each thread's largest key stands for the thread: no more than KEPT threads reach the KEPT-th largest of those, and all keys that are kept are theirs. What they have is counted.
#[device]
pub fn keep_largest<const THREADS: u32, const PER: u32, const KEPT: u32>(
    keys: &Regs<u64>,
    kept: Shared<u64>,
    found: Shared<u64>,
    count: Shared<u32>,
    counts: Shared<u32>,
) {
    // The largest alone is known at once.
    if KEPT == 1 {
        let largest = largest_key(keys);
        if thread_idx() == 0 {
            kept[0u32] = largest;
        }
        barrier();
    } else {
        if thread_idx() < KEPT {
            kept[thread_idx()] = 0;
        }
        if thread_idx() < 32 {
            counts[thread_idx()] = 0;
        }
        if thread_idx() == 0 {
            count[0u32] = 0;
        }
        barrier();
        let threshold = kept_threshold(own_largest(keys), counts);
        #[unroll]
        for i in 0..PER {
            if keys[i] != 0 && keys[i] >= threshold {
                found[atomic_add(count, 0u32, 1u32)] = keys[i];
            }
        }
        barrier();
        let all = count[0u32];
        for place in (thread_idx()..all).by(THREADS) {
            let key = found[place];
            let mut before = 0u32;
            #[unroll(4)]
            for other in 0..all {
                before = before + if found[other] > key { 1 } else { 0 };
            }
            if before < KEPT {
                kept[before] = key;
            }
        }
        barrier();
    }
}

/// A number in 0..1 from Philox 4x32-10, the seed its key and the position its counter: 24 bits, exact in f32.
#[device]
pub fn philox_uniform(seed_low: u32, seed_high: u32, position: u32) -> f32 {
    let mut key_low = seed_low;
    let mut key_high = seed_high;
    let mut a = position;
    let mut b = 0u32;
    let mut c = 0u32;
    let mut d = 0u32;
    for _ in 0u32..10 {
        let first = 0xD251_1F53u64 * a as u64;
        let second = 0xCD9E_8D57u64 * c as u64;
        a = (second >> 32) as u32 ^ b ^ key_low;
        b = second as u32;
        c = (first >> 32) as u32 ^ d ^ key_high;
        d = first as u32;
        key_low = key_low.wrapping_add(0x9E37_79B9);
        key_high = key_high.wrapping_add(0xBB67_AE85);
    }
    (a >> 8) as f32 / 16777216.0
}

/// The place of the pick among `count` candidates with those weights, the largest first.
#[device]
pub fn place_of_pick(weights: Shared<f32>, count: u32, top_p: f32, uniform: f32) -> u32 {
    let mut total = 0.0f32;
    for i in 0..count {
        total += weights[i];
    }
    let mut nucleus = 0u32;
    let mut mass = 0.0f32;
    while nucleus < count && mass < total * top_p {
        mass += weights[nucleus];
        nucleus += 1;
    }
    let mut picked = 0u32;
    let mut rest = uniform * mass - weights[0u32];
    while rest >= 0.0 && picked + 1 < nucleus {
        picked += 1;
        rest -= weights[picked];
    }
    picked
}

/// Picks the next token of each row, and leaves the row's record ready for it: its position goes on by its rows in use, token and tick
/// are new; `history[tick % history_len][row + column]` = token, `history_rows` words for each tick. A row without rows in use is left as it is.
/// A block takes a slice of THREADS * PER logits and leaves its KEPT largest in `largest`, as keys, the largest first; the last one
/// of the row, for which the row's counter is a zero, goes on. Tokens of the list `suppress`, tokens that the row's mask leaves out, and NaN
/// are nobody. The slot is what happens to a logit first. The grid is (slices, rows).
///
/// Words 5 to 9 of a record = temperature, top-k, top-p (bits of f32 where not whole), the seed's lower and upper half. Temperature 0
/// takes the largest; top-k 0, or beyond KEPT, is KEPT. Where nothing can be picked the token is `u32::MAX`. Word 10 says whether the row has
/// a mask: `mask_words` words at its place in `masks`, of which bit `token % 32` of word `token / 32` is set where the token is allowed. Word 11 is
/// the column: several picks of a row 0 may share a tick.
#[kernel(block = THREADS, dependent, slots(transform(value: f32, token: u32) -> f32))]
pub fn pick<const THREADS: u32, const PER: u32, const KEPT: u32>(
    logits: Input<f32>,
    suppress: Weights<u32>,
    masks: Input<u32>,
    largest: InOut<u64>,
    counters: InOut<u32>,
    records: InOut<u32>,
    history: InOut<u32>,
    vocabulary: u32,
    mask_words: u32,
    suppressed: u32,
    history_len: u32,
    history_rows: u32,
) {
    require!(KEPT <= THREADS && THREADS >= 64);
    let kept = shared::<u64>(KEPT);
    let found = shared::<u64>(KEPT * PER);
    let count = shared::<u32>(1);
    let counts = shared::<u32>(32);
    let weights = shared::<f32>(KEPT);
    let never = shared::<u32>(THREADS);
    let me = thread_idx();
    if me < suppressed {
        never[me] = suppress[me];
    }
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let mut record = records.offset(row * 16);
    // All of the record at once, and the first row's logits with it: nothing is asked for later that could be asked for now.
    let of_row = load::<U32x4>(record, 0u32);
    let of_pick = load::<U32x4>(record, 4u32);
    let of_seed = load::<U32x4>(record, 8u32);
    if row > 0 && of_row.y == 0 {
        return;
    }
    let row_logits = logits.offset(row as u64 * vocabulary as u64);
    let row_mask = masks.offset(row * mask_words);
    let is_masked = of_seed.z != 0;
    let mut row_largest = largest.offset(row * grid_dim() * KEPT);
    let mut values = regs(0.0f32, PER);
    #[unroll]
    for i in 0..PER {
        values[i] = row_logits[((block_idx() * PER + i) * THREADS + me).min(vocabulary - 1)];
    }
    let mut keys = regs(0u64, PER);
    #[unroll]
    for i in 0..PER {
        let token = (block_idx() * PER + i) * THREADS + me;
        let mut allowed = token < vocabulary;
        if is_masked && allowed {
            allowed = row_mask[token / 32] >> (token % 32) & 1 == 1;
        }
        if allowed {
            keys[i] = key_of(transform(values[i], token), token);
        }
    }
    barrier();
    for s in 0..suppressed {
        let place = never[s].wrapping_sub(block_idx() * PER * THREADS);
        #[unroll]
        for i in 0..PER {
            if place == i * THREADS + me {
                keys[i] = 0;
            }
        }
    }
    keep_largest(&keys, kept, found, count, counts);
    if me < KEPT {
        row_largest[block_idx() * KEPT + me] = kept[me];
    }
    // The whole block leaves: another one will finish.
    if !last_block_of(counters, row, grid_dim()) || of_row.y == 0 {
        return;
    }

    #[unroll]
    for i in 0..PER {
        let at = i * THREADS + me;
        keys[i] = 0;
        if at < grid_dim() * KEPT {
            keys[i] = row_largest[at];
        }
    }
    keep_largest(&keys, kept, found, count, counts);

    let temperature = f32::from_bits(of_pick.y);
    if me < KEPT {
        let difference = logit_of(kept[me]) - logit_of(kept[0u32]);
        weights[me] = if kept[me] == 0 { 0.0 } else { (difference / temperature).exp() };
    }
    barrier();
    if me == 0 {
        let top_k = of_pick.z;
        let position = of_row.x + of_row.y;
        let tick = of_pick.x;
        let mut place = 0u32;
        if KEPT > 1 && temperature > 0.0 {
            let uniform = philox_uniform(of_seed.x, of_seed.y, position);
            let most = if top_k == 0 { KEPT } else { top_k.min(KEPT) };
            place = place_of_pick(weights, most, f32::from_bits(of_pick.w), uniform);
        }
        let token = token_of(kept[place]);
        record[0u32] = position;
        record[2u32] = token;
        record[4u32] = tick + 1;
        history[tick % history_len * history_rows + row + of_seed.w] = token;
    }
}

/// The token of the largest logit, plainly: one warp reads them all.
#[kernel(block = 32)]
pub fn argmax_plain(logits: Input<f32>, token: Output<u32>, vocabulary: u32) {
    let mut largest = 0u64;
    for i in (lane_id()..vocabulary).by(32) {
        largest = largest.max(key_of(logits[i], i));
    }
    let high = (largest >> 32) as u32;
    let highest = warp_max(high);
    let low = warp_max(if high == highest { largest as u32 } else { 0u32 });
    if lane_id() == 0 {
        token[0u32] = low ^ 0xffff_ffff;
    }
}

/// The most candidates that sampling keeps. Larger top-k is the host's to do.
pub const MOST_KEPT: u32 = 64;

/// The pick from a vocabulary: `kept` is 1 for the argmax, up to [`MOST_KEPT`] for sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picker {
    pub vocabulary: u32,
    pub kept: u32,
}

impl Picker {
    /// Threads of a block, and logits of a thread: few enough that many blocks share the vocabulary, and enough that one
    /// block can hold what all of them keep.
    fn slice(self) -> (u32, u32) {
        let threads = if self.kept == 1 { 256 } else { 512 };
        let holds_all = |per: &u32| {
            let slices = self.vocabulary.div_ceil(threads * per);
            u64::from(slices) * u64::from(self.kept) <= u64::from(threads * per)
        };
        (threads, (8..).find(holds_all).unwrap_or(8))
    }

    /// Logits of a block.
    pub fn slice_len(self) -> u32 {
        let (threads, per) = self.slice();
        threads * per
    }

    /// Slices of the vocabulary: a row's blocks. `largest` holds `kept` keys for each.
    pub fn slices(self) -> u32 {
        self.vocabulary.div_ceil(self.slice_len())
    }

    /// A [`pick`] on a grid `[slices, rows, 1]`. `transform` is done to each logit.
    pub fn pick(self, transform: &[&'static DeviceDef]) -> Result<Instance, InstanceError> {
        let (threads, per) = self.slice();
        pick::Chosen { THREADS: threads, PER: per, KEPT: self.kept, transform: transform.to_vec() }.build()
    }
}

/// An [`argmax_plain`], of one block.
pub fn plain() -> Result<Instance, InstanceError> {
    argmax_plain::Chosen {}.build()
}
