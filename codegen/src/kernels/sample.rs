//! The next token: the largest logits, and a choice among them by temperature, top-k and top-p.
//!
//! One launch for all rows. Each block of [`pick`] finds the KEPT largest logits of its slice of a row's vocabulary, in
//! order; the last block of the row to finish finds the KEPT largest of those, picks one and prepares the row's record
//! for the next token. With KEPT = 1 that is the argmax.
//!
//! Nothing depends on the order in which threads arrive: a logit and its token make one number, all numbers differ, and
//! the largest are found by counting.
//!
//! The rule is that of the runtime's sampler, with the same random number for (seed, position): candidates from the
//! largest down, of equals the lower token first; weights `exp((logit - largest) / temperature)`; the nucleus is the
//! shortest head of that list with a share of at least top-p. What differs: at most KEPT candidates, and weights and
//! sums in f32. A sum of 64 weights is within 4e-6 of its f64 value, so the pick differs only where the random number
//! falls within 4e-6 of the border between two tokens, or top-p within 4e-6 of the nucleus's end.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

/// A logit and its token as one number: a larger logit is a larger key, and of equal ones the lower token. NaN is 0,
/// the key of no token.
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

/// The token of a key; `u32::MAX` of key 0.
#[device]
pub fn token_of(key: u64) -> u32 {
    key as u32 ^ 0xffff_ffff
}

/// The KEPT-th largest of the threads' keys, or 0 where there are fewer: two of its bits at a time, from the highest,
/// by counting the keys that reach each of the three numbers they may make. `counts` are 32 zeros, one for each step,
/// which hold three counts each. A collective of the block.
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

/// Scratch of [`keep_largest`]: `found` has KEPT * PER keys, `counts` 32 words.
#[view]
pub struct LargestScratch {
    pub found: Shared<u64>,
    pub count: Shared<u32>,
    pub counts: Shared<u32>,
}

/// Writes the KEPT largest keys of the block to `kept`, the largest first, the rest 0. A collective of the block.
///
/// Each thread's largest key represents the thread: no more than KEPT threads reach the KEPT-th largest of those, and
/// all keys that are kept are theirs. Their keys are then ranked by counting.
#[device]
pub fn keep_largest<const THREADS: u32, const PER: u32, const KEPT: u32>(
    keys: &Regs<u64>,
    kept: Shared<u64>,
    scratch: LargestScratch,
) {
    // The largest alone needs no threshold.
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
            scratch.counts[thread_idx()] = 0;
        }
        if thread_idx() == 0 {
            scratch.count[0u32] = 0;
        }
        barrier();
        let threshold = kept_threshold(own_largest(keys), scratch.counts);
        #[unroll]
        for i in 0..PER {
            if keys[i] != 0 && keys[i] >= threshold {
                scratch.found[atomic_add(scratch.count, 0u32, 1u32)] = keys[i];
            }
        }
        barrier();
        let all = scratch.count[0u32];
        for place in (thread_idx()..all).by(THREADS) {
            let key = scratch.found[place];
            let mut before = 0u32;
            #[unroll(4)]
            for other in 0u32..all {
                before = before + if scratch.found[other] > key { 1 } else { 0 };
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

/// Tokens that are never picked: the first `count` of the list `tokens`, and those that a row's mask excludes. A row's
/// mask is `mask_words` words of `masks`: bit `token % 32` of word `token / 32` is set where the token is allowed.
#[view]
pub struct ExcludedTokens {
    pub tokens: Weights<u32>,
    pub count: u32,
    pub masks: Input<u32>,
    pub mask_words: u32,
}

/// What the blocks of a row hand to the last of them: the largest keys of their slices, and a counter of finished
/// blocks for each row, which is 0 between launches.
#[view]
pub struct RowSlices {
    pub largest: InOut<u64>,
    pub counters: InOut<u32>,
}

/// The tokens of the last `len` ticks, `rows` words each: a ring that the host reads.
#[view]
pub struct TokenHistory {
    pub tokens: InOut<u32>,
    pub len: u32,
    pub rows: u32,
}

/// The first twelve words of a row's record.
#[registers]
pub struct PickRecord {
    /// Position, rows in use, token, slot.
    pub place: U32x4,
    /// Tick, temperature, top-k, top-p: bits of f32 where not whole.
    pub sampling: U32x4,
    /// The seed's lower and upper half, whether the row has a mask, the column of the history.
    pub rest: U32x4,
}

/// The keys of a thread's logits: of a slice of a row, 0 for tokens past the vocabulary and those that the row's mask
/// excludes.
#[device(slots(transform(value: f32, token: u32) -> f32))]
pub fn load_keys<const THREADS: u32, const PER: u32>(
    keys: &mut Regs<u64>,
    logits: Input<f32>,
    vocabulary: u32,
    mask: Input<u32>,
    is_masked: bool,
) {
    let mut values = regs(0.0f32, PER);
    #[unroll]
    for i in 0..PER {
        values[i] = logits[((block_idx() * PER + i) * THREADS + thread_idx()).min(vocabulary - 1)];
    }
    #[unroll]
    for i in 0..PER {
        let token = (block_idx() * PER + i) * THREADS + thread_idx();
        let mut allowed = token < vocabulary;
        if is_masked && allowed {
            allowed = mask[token / 32] >> (token % 32) & 1 == 1;
        }
        if allowed {
            keys[i] = key_of(transform(values[i], token), token);
        }
    }
}

/// Clears a thread's keys of the `count` tokens in `excluded`.
#[device]
pub fn clear_excluded<const THREADS: u32, const PER: u32>(keys: &mut Regs<u64>, excluded: Shared<u32>, count: u32) {
    for s in 0..count {
        let place = excluded[s].wrapping_sub(block_idx() * PER * THREADS);
        #[unroll]
        for i in 0..PER {
            if place == i * THREADS + thread_idx() {
                keys[i] = 0;
            }
        }
    }
}

/// The place of the pick among the KEPT largest, whose weights are `weights`: 0 without a temperature.
#[device]
pub fn choose_place<const KEPT: u32>(weights: Shared<f32>, record: PickRecord, position: u32) -> u32 {
    let mut place = 0u32;
    if KEPT > 1 && f32::from_bits(record.sampling.y) > 0.0 {
        let uniform = philox_uniform(record.rest.x, record.rest.y, position);
        let top_k = record.sampling.z;
        let most = if top_k == 0 { KEPT } else { top_k.min(KEPT) };
        place = place_of_pick(weights, most, f32::from_bits(record.sampling.w), uniform);
    }
    place
}

/// Picks the next token of each row and prepares the row's record for the next one: its position advances by its rows
/// in use, token and tick are new; `history[tick % len][row + column]` = token. A row without rows in use is not
/// written.
///
/// A block takes a slice of THREADS * PER logits and writes the KEPT largest as keys, the largest first; the last block
/// of the row goes on with those. Excluded tokens and NaN are never picked. The slot transforms a logit first. The grid
/// is (slices, rows).
///
/// Temperature 0 takes the largest; top-k 0, or beyond KEPT, is KEPT. Where nothing can be picked the token is
/// `u32::MAX`. The record's column lets several picks of a row 0 share a tick.
#[kernel(block = THREADS, dependent, slots(transform(value: f32, token: u32) -> f32))]
pub fn pick<const THREADS: u32, const PER: u32, const KEPT: u32>(
    logits: Input<f32>,
    vocabulary: u32,
    excluded: ExcludedTokens,
    slices: RowSlices,
    records: InOut<u32>,
    history: TokenHistory,
) {
    require!(KEPT <= THREADS && THREADS >= 64);
    let kept = shared::<u64>(KEPT);
    let found = shared::<u64>(KEPT * PER);
    let count = shared::<u32>(1);
    let counts = shared::<u32>(32);
    let weights = shared::<f32>(KEPT);
    let never = shared::<u32>(THREADS);
    let scratch = LargestScratch { found, count, counts };
    let me = thread_idx();
    if me < excluded.count {
        never[me] = excluded.tokens[me];
    }
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let mut words = records.offset(row * 16);
    // The whole record at once, and with it the first row's logits: these loads do not depend on each other.
    let record = PickRecord {
        place: load::<U32x4>(words, 0u32),
        sampling: load::<U32x4>(words, 4u32),
        rest: load::<U32x4>(words, 8u32),
    };
    if row > 0 && record.place.y == 0 {
        return;
    }
    let mut row_largest = slices.largest.offset(row * grid_dim() * KEPT);
    let row_logits = logits.offset(row as u64 * vocabulary as u64);
    let mask = excluded.masks.offset(row * excluded.mask_words);
    let mut keys = regs(0u64, PER);
    load_keys(transform, &mut keys, row_logits, vocabulary, mask, record.rest.z != 0);
    barrier();
    clear_excluded(&mut keys, never, excluded.count);
    keep_largest(&keys, kept, scratch);
    if me < KEPT {
        row_largest[block_idx() * KEPT + me] = kept[me];
    }
    // The whole block returns: another one will finish.
    if !last_block_of(slices.counters, row, grid_dim()) || record.place.y == 0 {
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
    keep_largest(&keys, kept, scratch);

    if me < KEPT {
        let difference = logit_of(kept[me]) - logit_of(kept[0u32]);
        weights[me] = if kept[me] == 0 { 0.0 } else { (difference / f32::from_bits(record.sampling.y)).exp() };
    }
    barrier();
    if me == 0 {
        let position = record.place.x + record.place.y;
        let tick = record.sampling.x;
        let token = token_of(kept[choose_place(weights, record, position)]);
        words[0u32] = position;
        words[2u32] = token;
        words[4u32] = tick + 1;
        history.tokens[tick % history.len * history.rows + row + record.rest.w] = token;
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
    /// Threads of a block, and logits of a thread: few enough that many blocks share the vocabulary, and enough that
    /// one block can hold what all of them keep.
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
