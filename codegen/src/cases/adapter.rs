//! Cases of an adapter's halves: one pair for all rows, and rows with seats of their own, among them some without. And
//! what a product of one row takes for its adapters.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, F16, Float};

use super::quantise::Int8;
use crate::kernels::adapter::{
    Arriving, decoded_instance, narrow_grid, narrow_instance, tiles_grid, tiles_instance, widen_grid, widen_instance,
};
use crate::kernels::attention::address::RECORD_WORDS;
use crate::kernels::matvec::Pairs;

const SEATS: usize = 3;
const FACTOR: f32 = 0.75;

/// The pairs of a product's matrices, those of all seats, and which of them its row has.
pub struct Adapter {
    pairs: Pairs,
    k: usize,
    /// Counted from 0, and of how many.
    seat: (usize, usize),
    a: (Vec<u32>, Vec<f32>),
    b: (Vec<u32>, Vec<f32>),
}

/// bf16 numbers, two in a word, and their values.
pub fn words_of(count: usize, seed: u64) -> (Vec<u32>, Vec<f32>) {
    let rounded = Random::new(seed).floats(count, -0.5, 0.5).into_iter().map(BF16::from_f32);
    let rounded: Vec<BF16> = rounded.collect();
    let words = rounded.chunks(2).map(|pair| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16);
    (words.collect(), rounded.iter().map(|value| value.to_f32()).collect())
}

impl Adapter {
    pub fn random(pairs: Pairs, k: usize) -> Adapter {
        let seat = if pairs.seated { (1, SEATS) } else { (0, 1) };
        let changed: u32 = pairs.matrices.iter().filter(|(_, has)| *has).map(|(rows, _)| rows).sum();
        let a = words_of(pairs.narrow_values() as usize * seat.1 * k, k as u64);
        let b = words_of(changed as usize * seat.1 * pairs.rank as usize, k as u64 + 1);
        Adapter { pairs, k, seat, a, b }
    }

    /// What each row of the matrices gets of it, and the sum of the terms' sizes.
    pub fn changes(&self, x: &[f64]) -> Vec<(f64, f64)> {
        let (rank, (seat, seats)) = (self.pairs.rank as usize, self.seat);
        let (mut changes, mut pair, mut before) = (Vec::new(), 0, 0);
        for &(rows, has) in &self.pairs.matrices {
            let rows = rows as usize;
            if !has {
                changes.extend(vec![(0.0, 0.0); rows]);
                continue;
            }
            let of_a = |r: usize| &self.a.1[((pair * seats + seat) * rank + r) * self.k..][..self.k];
            let narrow = |r: usize| of_a(r).iter().zip(x).map(|(a, x)| f64::from(*a) * x);
            let narrow: Vec<(f64, f64)> =
                (0..rank).map(|r| (narrow(r).sum::<f64>(), narrow(r).map(f64::abs).sum::<f64>())).collect();
            for row in 0..rows {
                let of_b = &self.b.1[(before * seats + seat * rows + row) * rank..][..rank];
                let strength = f64::from(FACTOR);
                let sum = |of: fn(&(f64, f64)) -> f64, size: fn(f64) -> f64| -> f64 {
                    of_b.iter().zip(&narrow).map(|(b, narrow)| size(f64::from(*b)) * of(narrow) * strength).sum()
                };
                changes.push((sum(|(value, _)| *value, |b| b), sum(|(_, size)| *size, f64::abs)));
            }
            (pair, before) = (pair + 1, before + rows);
        }
        changes
    }

    /// What a product of one row takes for it; without one all of it is nothing.
    pub fn give(of: Option<&Adapter>, case: Case) -> Case {
        let nothing = Vec::<u32>::new;
        let Some(Adapter { pairs, k, seat, a, b }) = of else {
            let case = ["a", "b", "words", "spent", "rows", "table"]
                .into_iter()
                .fold(case, |case, name| case.buffer(&format!("adapter_{name}"), nothing()));
            return case
                .scalar("adapter_spent_words", 0u32)
                .scalar("adapter_seats", 0u32)
                .scalar("adapter_strength", 0.0f32);
        };
        // The row is of slot 2, which sits in this seat.
        let (records, table) = match pairs.seated {
            true => (vec![9, 1, 7, 2], vec![0, 0, 0, 0, seat.0 as u32 + 1, FACTOR.to_bits()]),
            false => (nothing(), nothing()),
        };
        case.buffer("adapter_a", a.0.clone())
            .buffer("adapter_b", b.0.clone())
            .buffer("adapter_words", vec![0u32; pairs.words(*k as u32) as usize])
            .buffer("adapter_rows", records)
            .buffer("adapter_table", table)
            .scalar("adapter_spent_words", 5u32)
            .scalar("adapter_seats", seat.1 as u32)
            .scalar("adapter_strength", FACTOR)
            .expect("adapter_spent", vec![0u32; 5], Bound::Exact)
    }
}

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for seated in [false, true] {
        for (dtype, rank, k, count) in [(DType::BF16, 16, 96, 5), (DType::F32, 4, 40, 1), (DType::F16, 32, 64, 9)] {
            all.extend([narrowed(dtype, rank, k, count, seated), widened(dtype, rank, k, count, seated)]);
        }
    }
    for arriving in [Arriving::Codes { in_panels: true }, Arriving::Floats, Arriving::BF16, Arriving::F16] {
        all.push(decoded(arriving, 1, 544, true));
    }
    all.push(decoded(Arriving::Codes { in_panels: false }, 9, 4352, false));
    all.extend([tiled(9, 544, false), tiled(1, 96, true)]);
    all
}

/// The seat of each row, and its strength; without seats all rows have the first pair.
fn seat(row: usize, seated: bool) -> (usize, f32) {
    let strength = 0.5 + row as f32 * 0.25;
    if seated { ((row * 2 + 1) % (SEATS + 1), strength) } else { (1, FACTOR) }
}

/// Rows have records; the seat of a row's slot, which is not its number. The last record of several is free.
fn with_seats(case: Case, count: usize, seated: bool) -> Case {
    let slot = |row: usize| count - 1 - row;
    let (mut records, mut seats) = (vec![0u32; count * RECORD_WORDS as usize], vec![0u32; count * 2]);
    for row in 0..count {
        let (number, strength) = seat(row, seated);
        let free = is_free(row, count);
        records[row * RECORD_WORDS as usize..][..4].copy_from_slice(&[9, u32::from(!free), 7, slot(row) as u32]);
        seats[slot(row) * 2..][..2].copy_from_slice(&[number as u32, strength.to_bits()]);
    }
    let (records, seats) = if seated { (records, seats) } else { (Vec::new(), Vec::new()) };
    case.buffer("rows_state", records).buffer("rows_seats", seats).scalar("rows_stride", RECORD_WORDS)
}

fn is_free(row: usize, count: usize) -> bool {
    count > 1 && row + 1 == count
}

/// The pair that a row has, as the place of its matrix among those of all seats.
fn pair_of(row: usize, count: usize, seated: bool) -> Option<usize> {
    let (number, _) = seat(row, seated);
    (number > 0 && !(seated && is_free(row, count))).then(|| number - 1)
}

/// Matrices of that type, and their values.
pub fn matrices(dtype: DType, values: usize) -> (Data, Vec<f32>) {
    let floats = Random::new(values as u64).floats(values, -1.0, 1.0);
    match dtype {
        DType::BF16 => {
            let rounded: Vec<BF16> = floats.into_iter().map(BF16::from_f32).collect();
            (rounded.clone().into(), rounded.into_iter().map(|value| value.to_f32()).collect())
        }
        DType::F16 => {
            let rounded: Vec<F16> = floats.into_iter().map(F16::from_f32).collect();
            (rounded.clone().into(), rounded.into_iter().map(|value| value.to_f32()).collect())
        }
        _ => (floats.clone().into(), floats),
    }
}

fn dot(a: &[f32], x: &[f32]) -> f64 {
    a.iter().zip(x).map(|(a, x)| f64::from(*a) * f64::from(*x)).sum()
}

fn narrowed(dtype: DType, rank: usize, k: usize, count: usize, seated: bool) -> Case {
    let pairs = if seated { SEATS } else { 1 };
    let (tensor, values) = matrices(dtype, pairs * rank * k);
    let x = Random::new(k as u64).floats(count * k, -2.0, 2.0);
    let of = |row: usize, output: usize| {
        let product = pair_of(row, count, seated)
            .map_or(0.0, |pair| dot(&values[(pair * rank + output) * k..][..k], &x[row * k..][..k]));
        (product * f64::from(seat(row, seated).1)) as f32
    };
    let expected: Vec<f32> = (0..count * rank).map(|at| of(at / rank, at % rank)).collect();
    let name = format!("{dtype}, {k} values to {rank}, {count} rows{}", if seated { " with seats" } else { "" });
    let case = Case::new(name, narrow_instance(dtype, seated).expect("256 threads are a block"))
        .grid(narrow_grid(rank as u32, count as u32))
        .buffer("value_tensor", tensor)
        .buffer("x", x.clone())
        .scalar("k", k as u32)
        .scalar("rank", rank as u32)
        .scalar("factor", FACTOR);
    with_seats(case, count, seated).expect("out", expected, Bound::Within { absolute: 2e-4, relative: 1e-5 })
}

fn widened(dtype: DType, rank: usize, outputs: usize, count: usize, seated: bool) -> Case {
    let pairs = if seated { SEATS } else { 1 };
    let (tensor, values) = matrices(dtype, pairs * outputs * rank);
    let mut random = Random::new(outputs as u64);
    let stride = outputs + 7;
    let (x, y) = (random.floats(count * rank, -2.0, 2.0), random.floats(count * stride, -2.0, 2.0));
    let of = |row: usize, output: usize| {
        let change = pair_of(row, count, seated)
            .map_or(0.0, |pair| dot(&values[(pair * outputs + output) * rank..][..rank], &x[row * rank..][..rank]));
        (f64::from(y[row * stride + output]) + change) as f32
    };
    let expected: Vec<f32> = (0..count * outputs).map(|at| of(at / outputs, at % outputs)).collect();
    let name = format!("{dtype}, {rank} values to {outputs}, {count} rows{}", if seated { " with seats" } else { "" });
    let case = Case::new(name, widen_instance(dtype, rank as u32, seated).expect("256 threads are a block"))
        .grid(widen_grid(outputs as u32, count as u32))
        .buffer("value_tensor", tensor)
        .buffer("y_values", y.clone())
        .scalar("y_stride", stride as u32)
        .buffer("x", x.clone())
        .scalar("outputs", outputs as u32)
        .scalar("count", count as u32);
    with_seats(case, count, seated).expect("out", expected, Bound::Within { absolute: 2e-4, relative: 1e-5 })
}

/// What lies between the halves of two pairs of rank 16, of as many rows as a panel has and some more; the first rows are those of
/// [`with_seats`].
fn decoded(arriving: Arriving, count: usize, k: usize, seated: bool) -> Case {
    let pairs = Pairs { rank: 16, matrices: vec![(1, true), (1, true)], seated };
    let (values, seats) = (32, if seated { SEATS } else { 1 });
    let (a, of_a) = words_of(values * seats * k, k as u64);
    let x = Random::new(7).floats(count * k, -2.0, 2.0);
    let by = Random::new(8).floats(count, 0.5, 1.5);
    let int8 = |row: &[f32]| Int8::of(row);
    let read: Vec<f64> = match arriving {
        Arriving::Codes { .. } => x.chunks(k).flat_map(|row| int8(row).values()).collect(),
        Arriving::Floats => x.iter().map(|x| f64::from(*x)).collect(),
        Arriving::BF16 => x.iter().map(|x| f64::from(BF16::from_f32(*x).to_f32())).collect(),
        Arriving::F16 => x.iter().map(|x| f64::from(F16::from_f32(*x).to_f32())).collect(),
    };
    let expected = (0..count * values).map(|at| {
        let (row, value) = (at / values, at % values);
        let of_pair = |pair: usize| &of_a[((value / 16 * seats + pair) * 16 + value % 16) * k..][..k];
        let product = pair_of(row, count, seated)
            .map_or(0.0, |pair| of_pair(pair).iter().zip(&read[row * k..]).map(|(a, x)| f64::from(*a) * x).sum());
        (product * f64::from(seat(row, seated).1) * f64::from(by[row])) as f32
    });
    let expected: Vec<f32> = expected.collect();
    let seats_of: Vec<u32> =
        (0..count).map(|row| pair_of(row, count, seated).map_or(0, |pair| pair as u32 + 1)).collect();
    let instance = decoded_instance(&pairs, k as u32, arriving, true).expect("as many warps as chunks");
    let name =
        format!("{arriving:?}, {k} values to 32, {count} decoded rows{}", if seated { " with seats" } else { "" });
    let case = Case::new(name, instance)
        .grid([values as u32 / 16, count as u32, 1])
        .buffer("a", a)
        .buffer("factor", by)
        .scalar("seats", seats as u32)
        .scalar("strength", FACTOR)
        .expect("out", expected, Bound::Within { absolute: 2e-3, relative: 1e-5 })
        .expect("seats_of", seats_of, Bound::Exact);
    let case = match arriving {
        Arriving::Codes { in_panels } => {
            let (codes, scales) = rows_of_codes(&x, k, in_panels);
            case.buffer("sixteen_xq", codes).buffer("sixteen_xscale", scales)
        }
        Arriving::Floats => case.buffer("sixteen_x", x).scalar("sixteen_stride", k as u32),
        Arriving::BF16 => case.buffer("sixteen_x", halves(&x, |x| BF16::from_f32(x).to_bits())),
        Arriving::F16 => case.buffer("sixteen_x", halves(&x, |x| F16::from_f32(x).to_bits())),
    };
    with_seats(case, count, seated)
}

fn halves(x: &[f32], bits: impl Fn(f32) -> u16) -> Vec<u32> {
    x.chunks(2).map(|pair| u32::from(bits(pair[0])) | u32::from(bits(pair[1])) << 16).collect()
}

/// Codes and scales of rows, one after the other, or in panels of eight.
fn rows_of_codes(x: &[f32], k: usize, in_panels: bool) -> (Vec<u32>, Vec<f32>) {
    let rows: Vec<Int8> = x.chunks(k).map(Int8::of).collect();
    let held = if in_panels { rows.len().next_multiple_of(8) } else { rows.len() };
    let (mut codes, mut scales) = (vec![0u32; held * k / 4], vec![0.0f32; held * k / 32]);
    for (row, int8) in rows.iter().enumerate() {
        let place = |at: usize, of_row: usize| match in_panels {
            true => (row / 8 * of_row + at) * 8 + row % 8,
            false => row * of_row + at,
        };
        for (at, four) in int8.codes.chunks(4).enumerate() {
            codes[place(at, k / 16) * 4..][..4].copy_from_slice(four);
        }
        int8.scales.iter().enumerate().for_each(|(at, scale)| scales[place(at, k / 32)] = *scale);
    }
    (codes, scales)
}

/// A prompt's rows on tensor cores: of one pair, or of the first row's seat.
fn tiled(count: usize, k: usize, seated: bool) -> Case {
    let (rank, seats) = (32, if seated { SEATS } else { 1 });
    let (a, of_a) = words_of(rank * seats * k, k as u64);
    let x = Random::new(5).floats(count * k, -2.0, 2.0);
    let read: Vec<f64> = x.iter().map(|x| f64::from(BF16::from_f32(*x).to_f32())).collect();
    let of = |row: usize, output: usize| {
        let pair = pair_of(0, count, seated).expect("the first row has one");
        let of_a = &of_a[(pair * rank + output) * k..][..k];
        let product: f64 = of_a.iter().zip(&read[row * k..]).map(|(a, x)| f64::from(*a) * x).sum();
        (product * f64::from(seat(0, seated).1)) as f32
    };
    let expected: Vec<f32> = (0..count * rank).map(|at| of(at / rank, at % rank)).collect();
    let name = format!("{k} values to {rank}, {count} rows on tensor cores{}", if seated { " with seats" } else { "" });
    let case = Case::new(name, tiles_instance(seated).expect("eight warps are a block"))
        .grid(tiles_grid(rank as u32, count as u32))
        .buffer("a", a)
        .buffer("x", halves(&x, |x| BF16::from_f32(x).to_bits()))
        .scalar("k", k as u32)
        .scalar("rank", rank as u32)
        .scalar("count", count as u32)
        .scalar("factor", FACTOR);
    with_seats(case, count, seated).expect("out", expected, Bound::Within { absolute: 2e-3, relative: 1e-5 })
}
