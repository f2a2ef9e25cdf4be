//! Cases of an adapter's halves: one pair for all rows, and rows with seats of their own, among them some without. And
//! what a product of one row takes for its adapters.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, F16, Float};

use super::quantise::Int8;
use crate::kernels::adapter::{
    Arriving, decoded_instance, narrow_grid, narrow_instance, tiles_grid, tiles_instance, widen_grid, widen_instance,
};
use crate::kernels::matvec::Pairs;

const SEATS: usize = 3;
const FACTOR: f32 = 0.75;

/// The pairs of a product's matrices, those of all seats, and which of them its row has.
pub struct Adapter {
    pairs: Pairs,
    k: usize,
    /// Counted from 1, 0 for none, and of how many.
    seat: (usize, usize),
    a: (Vec<u32>, Vec<f32>),
    b: (Vec<u32>, Vec<f32>),
}

/// The second halves that a launch before their product brings to L2.
fn with_bank(case: Case, b: Vec<u32>, pairs: Option<&Pairs>, seats: u32) -> Case {
    let number = |of: fn(&Pairs) -> u32| pairs.map_or(0, of);
    case.buffer("wide_b", b)
        .scalar("wide_seats", seats)
        .scalar("wide_has", number(Pairs::has))
        .scalar("wide_second", number(|pairs| pairs.start(1)))
        .scalar("wide_third", number(|pairs| pairs.start(2)))
        .scalar("wide_rows", number(|pairs| pairs.start(3)))
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
        let seat = if pairs.seated { (2, SEATS) } else { (1, 1) };
        let changed: u32 = pairs.matrices.iter().filter(|(_, has)| *has).map(|(rows, _)| rows).sum();
        let a = words_of(pairs.narrow_values() as usize * seat.1 * k, k as u64);
        let b = words_of(changed as usize * seat.1 * pairs.rank as usize, k as u64 + 1);
        Adapter { pairs, k, seat, a, b }
    }

    /// The same for a row with that seat.
    pub fn in_seat(self, seat: usize) -> Adapter {
        Adapter { seat: (seat, self.seat.1), ..self }
    }

    /// The entry of its row.
    pub fn entry(&self) -> [u32; 2] {
        [self.seat.0 as u32, FACTOR.to_bits()]
    }

    /// What each row of the matrices gets of it, and the sum of the terms' sizes.
    pub fn changes(&self, x: &[f64]) -> Vec<(f64, f64)> {
        let (rank, (seat, seats)) = (self.pairs.rank as usize, self.seat);
        let seat = seat.checked_sub(1).expect("its row has a seat");
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
        let Some(Adapter { pairs, k, seat, a, b }) = of else {
            let names = ["a", "b", "words", "spent", "seat"].into_iter();
            let case = names.fold(case, |case, name| case.buffer(&format!("adapter_{name}"), Vec::<u32>::new()));
            return case.scalar("adapter_spent_words", 0u32).scalar("adapter_seats", 0u32);
        };
        case.buffer("adapter_a", a.0.clone())
            .buffer("adapter_b", b.0.clone())
            .buffer("adapter_words", vec![0u32; pairs.words(*k as u32) as usize])
            .buffer("adapter_seat", vec![seat.0 as u32, FACTOR.to_bits()])
            .scalar("adapter_spent_words", if seat.0 > 0 { 5u32 } else { 0 })
            .scalar("adapter_seats", seat.1 as u32)
            .expect("adapter_spent", vec![0u32; if seat.0 > 0 { 5 } else { 0 }], Bound::Exact)
    }

    /// What the launch that prepares rows takes for it, and how many numbers it leaves.
    pub fn give_prepared(of: Option<&Adapter>, entries: Vec<u32>, case: Case) -> (Case, usize) {
        let (a, seats, values) =
            of.map_or((Vec::new(), 0, 0), |of| (of.a.0.clone(), of.seat.1 as u32, of.pairs.narrow_values() as usize));
        let count = entries.len() / 2 * values;
        let case = case.buffer("narrowed_a", a).buffer("narrowed_row_seats", entries).scalar("narrowed_seats", seats);
        let (b, pairs) = of.map_or((Vec::new(), None), |of| (of.b.0.clone(), Some(&of.pairs)));
        (with_bank(case, b, pairs, seats), count)
    }

    /// What a product of several rows takes for it.
    pub fn give_rows(of: Option<&Adapter>, entries: Vec<u32>, narrow: Vec<f32>, case: Case) -> Case {
        let Some(Adapter { pairs, seat, b, .. }) = of else { return case };
        let case = case.buffer("change_of_b", b.0.clone()).buffer("change_of_narrow", narrow);
        let case = case.buffer("change_of_row_seats", entries);
        let numbers = [
            ("values", pairs.narrow_values()),
            ("rank", pairs.rank),
            ("seats", seat.1 as u32),
            ("has", pairs.has()),
            ("second", pairs.start(1)),
            ("third", pairs.start(2)),
            ("rows", pairs.start(3)),
        ];
        numbers.into_iter().fold(case, |case, (name, value)| case.scalar(&format!("change_of_{name}"), value))
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

/// Entries of rows' seats; the last of several is free.
fn entries(count: usize, seated: bool) -> Vec<u32> {
    let entry = |row: usize| match pair_of(row, count, seated) {
        Some(pair) => [pair as u32 + 1, seat(row, seated).1.to_bits()],
        None => [0, 0],
    };
    (0..count).flat_map(entry).collect()
}

/// Rows of decoded sequences, each with an entry of its own.
fn with_seats(case: Case, count: usize, seated: bool) -> Case {
    let seats = if seated { entries(count, seated) } else { Vec::new() };
    case.buffer("rows_state", Vec::<u32>::new()).buffer("rows_seats", seats).scalar("rows_segments", 0u32)
}

/// Rows of a prompt: all of one segment, whose slot has the first row's seat.
fn of_a_segment(case: Case, count: usize) -> Case {
    let slot = 2;
    let mut seats = vec![0u32; 2 * slot];
    seats.extend(&entries(2, true)[..2]);
    case.buffer("rows_state", vec![9, count as u32, 0, slot as u32])
        .buffer("rows_seats", seats)
        .scalar("rows_segments", 1u32)
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

/// What lies between the halves of two pairs of rank 16, of as many rows as a panel has and some more.
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
    let instance = decoded_instance(&pairs, k as u32, arriving, true).expect("as many warps as chunks");
    let name =
        format!("{arriving:?}, {k} values to 32, {count} decoded rows{}", if seated { " with seats" } else { "" });
    let case = Case::new(name, instance)
        .grid([values as u32 / 16, count as u32, 1])
        .buffer("a", a)
        .buffer("factor", by)
        .buffer("row_seats", entries(count, seated))
        .scalar("seats", seats as u32)
        .expect("out", expected, Bound::Within { absolute: 2e-3, relative: 1e-5 });
    let case = with_bank(case, words_of(2 * seats * 16, 1).0, Some(&pairs), seats as u32);
    match arriving {
        Arriving::Codes { in_panels } => {
            let (codes, scales) = rows_of_codes(&x, k, in_panels);
            case.buffer("sixteen_xq", codes).buffer("sixteen_xscale", scales)
        }
        Arriving::Floats => case.buffer("sixteen_x", x).scalar("sixteen_stride", k as u32),
        Arriving::BF16 => case.buffer("sixteen_x", halves(&x, |x| BF16::from_f32(x).to_bits())),
        Arriving::F16 => case.buffer("sixteen_x", halves(&x, |x| F16::from_f32(x).to_bits())),
    }
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
    let case = if seated { of_a_segment(case, count) } else { with_seats(case, count, seated) };
    case.expect("out", expected, Bound::Within { absolute: 2e-3, relative: 1e-5 })
}
