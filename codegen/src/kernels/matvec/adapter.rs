//! An adapter within a product of one row: `W x + B (A x)` in one launch.
//!
//! ```text
//! x in shared memory ──► rows of A, a chunk of K a warp ──► packets ──┐
//! weights on their way ──► the product's own rows ──► their results ──┴─► + B t ──► epilogue
//! ```
//!
//! `t = A x` is a few numbers that every block needs, and A as large as a few rows of W. So the blocks share it out: each
//! warp takes a chunk of a row of A, if there is one for it, and sends its sum to all ([`send`]). When the first results of
//! a block are there, its first warp adds up the chunks, four at a time in their order, and the others wait for it at an
//! mbarrier: if all warps asked for the same few lines of L2, they would wait for each other. A lane loads its part of a
//! row of B before that, so that B arrives with W.
//!
//! A packet is a word that is not zero, so a sum of zero is sent as a negative one. The words must be zero before the
//! launch: each launch clears those of the one before it that had an adapter. A row without a seat reads neither A nor B,
//! and sends and clears nothing.
//!
//! What it does not do: activations with fine codes, matrices with pairs of different ranks, more than one pair a matrix
//! (`codegen/src/passes/adapters.rs` takes those apart).

use gemma4c_dsl::prelude::*;

use super::parts::part_at;

/// The adapters of a product's matrices: RANK values between the halves of each pair, 0 where there is no adapter. HAS
/// has a bit for each matrix, of up to three, which begin with the rows 0, SECOND and THIRD. A lane receives EACH of the
/// values of all matrices.
#[config]
pub struct Adapted {
    pub RANK: u32,
    pub EACH: u32,
    pub HAS: u32,
    pub SECOND: u32,
    pub THIRD: u32,
}

/// Both halves of all pairs, in bf16, those of one matrix behind those of the one before, of each those of all `seats`.
/// `words` are the packets, `spent` those of the launch before. `seat` has the row's seat, counted from 1, and the bits
/// of how strong its adapter is.
#[view]
pub struct AdapterPlaces {
    pub a: Weights<u32>,
    pub b: Weights<u32>,
    pub words: InOut<u32>,
    pub spent: Output<u32>,
    pub spent_words: u32,
    pub seat: Weights<u32>,
    pub seats: u32,
}

/// Values of a chunk: two turns of a warp, whose lanes take 16 values each.
pub const CHUNK: u32 = 1024;

/// Words for each number between the halves, of rows of `k` values: one a chunk, in whole fours.
pub const fn words_of(k: u32) -> u32 {
    k.div_ceil(CHUNK).next_multiple_of(4)
}

// The device functions below say them as numbers.
const _: () = assert!(CHUNK == 1024 && words_of(4096) == 4 && words_of(4097) == 8);

/// Fours of words for each number between the halves.
#[device]
pub fn fours_of(k: u32) -> u32 {
    (k + 4095) / 4096
}

/// The matrices before that one which have an adapter.
#[device]
pub fn pairs_before(has: u32, matrix: u32) -> u32 {
    (if matrix > 0 { has & 1 } else { 0 })
        + (if matrix > 1 { has >> 1 & 1 } else { 0 })
        + (if matrix > 2 { has >> 2 & 1 } else { 0 })
}

/// Numbers between the halves: those of all matrices.
#[device]
pub fn narrow_values<const A: Adapted>() -> u32 {
    pairs_before(A.HAS, 3) * A.RANK
}

/// Clears the packets of the launch before.
#[device]
pub fn clear_spent<const WARPS: u32>(of: AdapterPlaces) {
    for word in (block_idx() * WARPS * 32 + thread_idx()..of.spent_words).by(grid_dim() * WARPS * 32) {
        of.spent[word] = 0;
    }
}

/// Sixteen values of A, two in a word, times what lies in shared memory.
#[device]
pub fn narrow_part<const UNIT: u32, const INTEGER: bool>(
    at: u32,
    low: U32x4,
    high: U32x4,
    units: u32,
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
) -> f32 {
    let mut sum = 0.0f32;
    if INTEGER {
        let codes = load::<U32x4>(x_words, part_at(at / 16, units));
        sum = narrow_codes(codes, low, high) * f32::from_bits(x_scales[at / 32].x);
    } else {
        sum = narrow_floats(load::<U32x4>(x_words, part_at(at / 4, units)), low.x, low.y, sum);
        sum = narrow_floats(load::<U32x4>(x_words, part_at(at / 4 + 1, units)), low.z, low.w, sum);
        sum = narrow_floats(load::<U32x4>(x_words, part_at(at / 4 + 2, units)), high.x, high.y, sum);
        sum = narrow_floats(load::<U32x4>(x_words, part_at(at / 4 + 3, units)), high.z, high.w, sum);
    }
    sum
}

/// Sixteen values of A times as many codes.
#[device]
pub fn narrow_codes(codes: U32x4, low: U32x4, high: U32x4) -> f32 {
    let first = narrow_four_codes(codes.x, low.x, low.y, 0.0);
    let second = narrow_four_codes(codes.y, low.z, low.w, first);
    let third = narrow_four_codes(codes.z, high.x, high.y, second);
    narrow_four_codes(codes.w, high.z, high.w, third)
}

/// Four codes.
#[device]
pub fn narrow_four_codes(codes: u32, first: u32, second: u32, sum: f32) -> f32 {
    let a = bf16_lo(first).mul_add(signed_byte_of(codes, 0) as f32, sum);
    let b = bf16_hi(first).mul_add(signed_byte_of(codes, 1) as f32, a);
    let c = bf16_lo(second).mul_add(signed_byte_of(codes, 2) as f32, b);
    bf16_hi(second).mul_add(signed_byte_of(codes, 3) as f32, c)
}

/// Four floats.
#[device]
pub fn narrow_floats(floats: U32x4, first: u32, second: u32, sum: f32) -> f32 {
    let a = bf16_lo(first).mul_add(f32::from_bits(floats.x), sum);
    let b = bf16_hi(first).mul_add(f32::from_bits(floats.y), a);
    let c = bf16_lo(second).mul_add(f32::from_bits(floats.z), b);
    bf16_hi(second).mul_add(f32::from_bits(floats.w), c)
}

/// The first value of A of a task: a chunk of a row. Seats lie behind each other within a matrix.
#[device]
pub fn start_of_task<const K: u32, const A: Adapted>(task: u32, seat: u32, seats: u32) -> u32 {
    let value = task / (fours_of(K) * 4);
    ((value / A.RANK.max(1) * seats + seat - 1) * A.RANK + value % A.RANK.max(1)) * K
}

/// Brings the first of this warp's chunks of A near.
#[device]
pub fn prefetch_narrow<const K: u32, const A: Adapted>(seat: u32, of: AdapterPlaces) {
    let task = block_idx() + warp_id() * grid_dim();
    let at = task % (fours_of(K) * 4) * 1024 + lane_id() * 32;
    if seat > 0 && task < narrow_values() * fours_of(K) * 4 && at < K {
        prefetch(of.a, (start_of_task(task, seat, of.seats) + at) / 2);
    }
}

/// Multiplies this warp's chunks of A, and sends their sums. A chunk behind the end is sent, too.
#[device]
pub fn send_narrow<const K: u32, const UNIT: u32, const INTEGER: bool, const WARPS: u32, const A: Adapted>(
    seat: u32,
    of: AdapterPlaces,
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
) {
    let all = narrow_values() * fours_of(K) * 4;
    if seat > 0 {
        for task in (block_idx() + warp_id() * grid_dim()..all).by(grid_dim() * WARPS) {
            let start = start_of_task(task, seat, of.seats);
            let first = task % (fours_of(K) * 4) * 1024 + lane_id() * 16;
            // Both turns are on their way before the first is there.
            let mut parts = regs(U32x4::ZERO, 4);
            #[unroll]
            for turn in 0u32..2 {
                if first + turn * 512 < K {
                    parts[turn * 2] = load_streamed::<U32x4>(of.a, (start + first + turn * 512) / 2);
                    parts[turn * 2 + 1] = load_streamed::<U32x4>(of.a, (start + first + turn * 512) / 2 + 4);
                }
            }
            let mut sum = 0.0f32;
            #[unroll]
            for turn in 0u32..2 {
                let at = first + turn * 512;
                if at < K {
                    sum = sum + narrow_part(at, parts[turn * 2], parts[turn * 2 + 1], K / UNIT, x_words, x_scales);
                }
            }
            let sum = warp_sum(sum);
            if lane_id() == 0 {
                send(of.words, task, packet_of(sum));
            }
        }
    }
}

/// A number as a word that is not zero.
#[device]
pub fn packet_of(number: f32) -> u32 {
    if number == 0.0 { 0x80000000 } else { number.to_bits() }
}

/// The sum of four chunks.
#[device]
pub fn sum_of_four(words: U32x4) -> f32 {
    f32::from_bits(words.x) + f32::from_bits(words.y) + f32::from_bits(words.z) + f32::from_bits(words.w)
}

/// Receives all numbers between the halves, times `factor`: neighbouring ones by a lane, all of them at once.
#[device]
pub fn receive_narrow<const K: u32, const A: Adapted>(factor: f32, of: AdapterPlaces, narrow: Shared<f32>) {
    if lane_id() * A.EACH < narrow_values() {
        let mut words = regs(U32x4::ZERO, A.EACH * ((K + 4095) / 4096));
        receive(of.words, lane_id() * A.EACH * fours_of(K) * 4, &mut words);
        #[unroll]
        for value in 0u32..A.EACH {
            let mut sum = sum_of_four(words[value * fours_of(K)]);
            #[unroll]
            for four in 1u32..fours_of(K) {
                sum = sum + sum_of_four(words[value * fours_of(K) + four]);
            }
            narrow[lane_id() * A.EACH + value] = sum * factor;
        }
    }
}

/// The matrix that a row of the stacked ones is of: the second and the third begin there.
#[device]
pub fn matrix_of(row: u32, second: u32, third: u32) -> u32 {
    (if row >= second { 1u32 } else { 0 }) + (if row >= third { 1u32 } else { 0 })
}

/// The row of B for a row of the stacked matrices, of which there are `rows`: of each matrix with a pair B has all seats',
/// one behind the other.
#[device]
pub fn row_of_b(row: u32, seat: u32, seats: u32, has: u32, second: u32, third: u32, rows: u32) -> u32 {
    let matrix = matrix_of(row, second, third);
    let mut start = 0u32;
    let mut end = second;
    if matrix == 1 {
        start = second;
        end = third;
    }
    if matrix == 2 {
        start = third;
        end = rows;
    }
    let of_first = if matrix > 0 && has & 1 == 1 { second } else { 0 };
    let of_second = if matrix > 1 && has >> 1 & 1 == 1 { third - second } else { 0 };
    (of_first + of_second) * seats + (seat - 1) * (end - start) + row - start
}

/// Row `m` of the matrix rows that a warp works on at once, whose first output is `first`.
#[device]
pub fn row_of_set<const PAIRED: bool>(first: u32, m: u32, rows: u32) -> u32 {
    let output = (first + if PAIRED { m / 2 } else { m }).min(rows - 1);
    output + if PAIRED { m % 2 * rows } else { 0 }
}

/// Turns in which a warp has the matrix rows that it works on at once, four to a turn.
#[device]
pub fn wide_turns<const LANES: u32, const ROWS: u32>() -> u32 {
    (32 / LANES * ROWS).div_ceil(4)
}

/// Starts a warp's rows of B on their way: eight lanes have a row, RANK / 8 values each. Zeros where a matrix has no
/// adapter.
#[device]
pub fn fetch_wide<const LANES: u32, const ROWS: u32, const PAIRED: bool, const A: Adapted>(
    first: u32,
    rows: u32,
    seat: u32,
    of: AdapterPlaces,
    held: &mut Regs<u32>,
) {
    #[unroll]
    for turn in 0u32..wide_turns() {
        let row = row_of_set(first, turn * 4 + lane_id() / 8, rows);
        let matrix = matrix_of(row, A.SECOND, A.THIRD);
        let at = row_of_b(row, seat, of.seats, A.HAS, A.SECOND, A.THIRD, rows);
        #[unroll]
        for w in 0u32..A.RANK / 16 {
            let mut word = 0u32;
            if A.HAS >> matrix & 1 == 1 {
                word = of.b[at * (A.RANK / 2) + lane_id() % 8 * (A.RANK / 16) + w];
            }
            held[turn * (A.RANK / 16) + w] = word;
        }
    }
}

/// What the adapter adds to the output that a lane has, and with PAIRED to the row above it: `output` is that of the
/// lane's warp. A collective of the warp.
#[device]
pub fn changes_of<const LANES: u32, const ROWS: u32, const PAIRED: bool, const A: Adapted>(
    first: u32,
    output: u32,
    rows: u32,
    held: &Regs<u32>,
    narrow: Shared<f32>,
) -> F32x2 {
    let own = if PAIRED { output * 2 } else { output };
    let mut changes = f32x2(0.0, 0.0);
    #[unroll]
    for turn in 0u32..wide_turns() {
        let row = row_of_set(first, turn * 4 + lane_id() / 8, rows);
        // The numbers of a matrix that has none are multiplied by zeros.
        let pair = pairs_before(A.HAS, matrix_of(row, A.SECOND, A.THIRD)).min(pairs_before(A.HAS, 3) - 1);
        let at = pair * A.RANK + lane_id() % 8 * (A.RANK / 8);
        let mut sum = 0.0f32;
        #[unroll]
        for w in 0u32..A.RANK / 16 {
            sum = bf16_lo(held[turn * (A.RANK / 16) + w]).mul_add(narrow[at + w * 2], sum);
            sum = bf16_hi(held[turn * (A.RANK / 16) + w]).mul_add(narrow[at + w * 2 + 1], sum);
        }
        sum = sum + shfl_xor(sum, 4);
        sum = sum + shfl_xor(sum, 2);
        sum = sum + shfl_xor(sum, 1);
        let value = shfl_idx(sum, own % 4 * 8);
        let up = shfl_idx(sum, (own + 1) % 4 * 8);
        if own / 4 == turn {
            changes.x = value;
            changes.y = if PAIRED { up } else { 0.0 };
        }
    }
    changes
}

/// Two values of a row of B, in a word, times as many numbers.
#[device]
pub fn wide_pair(word: u32, low: f32, high: f32, sum: f32) -> f32 {
    bf16_hi(word).mul_add(high, bf16_lo(word).mul_add(low, sum))
}

/// The sum of eight parts of a row of B: every product with an adapter adds them up like this.
#[device]
pub fn sum_of_eight(sums: &Regs<f32>) -> f32 {
    sums[0u32] + sums[4u32] + (sums[2u32] + sums[6u32]) + (sums[1u32] + sums[5u32] + (sums[3u32] + sums[7u32]))
}
