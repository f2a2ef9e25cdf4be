//! Cases of a tower's kernels: grids that are no squares, rows left over, heads of 64 and of 72, and what each refuses
//! to touch.

use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::harness::{Bound, Case, Random};

use crate::kernels::heads::inverse_frequencies;
use crate::kernels::plain::map;
use crate::kernels::tower::{self, flash, then_at_least, then_at_most, then_plus, then_plus_weight};

const CLOSE: Bound = Bound::Within { absolute: 4e-6, relative: 4e-6 };

pub fn cases() -> Vec<Case> {
    let mut cases = vec![
        axis(0, 40, [6, 3], 2),
        axis(1, 300, [3, 6], 0),
        rotated(2, 64, [6, 3], 1),
        rotated(1, 72, [3, 4], 0),
        mean(1, 7, [4, 2]),
        mean(3, 260, [6, 3]),
        centred(300, 3),
        centred(7, 1),
        attended(2, 64, [6, 3], 2),
        attended(1, 72, [5, 9], 0),
        multiplied(2, 64, [7, 11], 2),
        multiplied(1, 72, [9, 15], 70),
        multiplied(1, 64, [3, 1], 0),
        placed(300, &[0, 2, 1, 0]),
        placed(8, &[0]),
    ];
    let chains: [&[&'static DeviceDef]; 4] = [
        &[then_plus::DEF],
        &[then_plus_weight::DEF],
        &[then_at_least::DEF, then_at_most::DEF],
        &[then_at_most::DEF, then_plus_weight::DEF],
    ];
    cases.extend(chains.iter().flat_map(|chain| [linked(chain, 40), linked(chain, 1)]));
    cases
}

/// The record of a grid.
pub fn record([columns, rows]: [usize; 2]) -> Vec<u32> {
    vec![0, (columns * rows) as u32, columns as u32, 0]
}

/// `free` rows behind the last are left as they are.
fn with_free(case: Case, mut expected: Vec<f32>, free: usize) -> Case {
    let written = expected.len();
    expected.resize(written + free, 0.0);
    case.expect("out", expected, CLOSE).except(written..written + free)
}

fn axis(axis: usize, width: usize, grid: [usize; 2], free: usize) -> Case {
    let (length, count) = (7, grid[0] * grid[1]);
    let table = Random::new(width as u64).floats(2 * length * width, -1.0, 1.0);
    let row = |patch: usize| [patch % grid[0], patch / grid[0]][axis];
    let expected = (0..count).flat_map(|patch| table[(axis * length + row(patch)) * width..][..width].to_vec());
    let expected = expected.collect();
    let name = format!("axis {axis} of {}x{} patches, {width} wide, {free} free rows", grid[0], grid[1]);
    let case = Case::new(name, tower::axis_rows_instance().expect("256 threads are a block"))
        .grid(tower::grid(width as u32, (count + free) as u32))
        .buffer("table", table)
        .buffer("grid", record(grid))
        .scalar("width", width as u32)
        .scalar("length", length as u32)
        .scalar("axis", axis as u32);
    with_free(case, expected, free * width)
}

fn rotated(heads: usize, dim: usize, grid: [usize; 2], free: usize) -> Case {
    let (count, width, quarter) = (grid[0] * grid[1], heads * dim, dim / 4);
    let x = Random::new(dim as u64).floats((count + free) * width, -3.0, 3.0);
    let turned = |at: usize| {
        let (patch, i) = (at / width, at % dim);
        let position = if i < 2 * quarter { patch % grid[0] } else { patch / grid[0] };
        let start = at - i % (2 * quarter);
        let pair = i % quarter;
        let angle = position as f64 * 100f64.powf(-4.0 * pair as f64 / dim as f64);
        let (a, b) = (f64::from(x[start + pair]), f64::from(x[start + pair + quarter]));
        let is_first = i % (2 * quarter) < quarter;
        (if is_first { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }) as f32
    };
    let expected = (0..count * width).map(turned).collect();
    let name = format!("{}x{} patches of {heads} heads of {dim}, {free} free rows", grid[0], grid[1]);
    let case = Case::new(name, tower::rope_instance().expect("256 threads are a block"))
        .grid(tower::grid((width / 2) as u32, (count + free) as u32))
        .buffer("inverse_frequencies", inverse_frequencies(dim as u32 / 2, 100.0, None))
        .buffer("grid", record(grid))
        .scalar("heads", heads as u32)
        .scalar("dim", dim as u32)
        .buffer("x", x.clone());
    with_free(case, expected, free * width)
}

fn mean(side: usize, width: usize, grid: [usize; 2]) -> Case {
    let x = Random::new(width as u64).floats(grid[0] * grid[1] * width, -3.0, 3.0);
    let squares = grid.map(|length| length / side);
    let value = |at: usize| {
        let (square, i) = (at / width, at % width);
        let (left, top) = (square % squares[0] * side, square / squares[0] * side);
        let of = |n: usize| f64::from(x[((top + n / side) * grid[0] + left + n % side) * width + i]);
        ((0..side * side).map(of).sum::<f64>() / (side * side) as f64) as f32
    };
    let count = squares[0] * squares[1];
    let expected: Vec<f32> = (0..count * width).map(value).collect();
    let name = format!("squares of {side} of {}x{} patches, {width} wide", grid[0], grid[1]);
    Case::new(name, tower::mean_instance().expect("256 threads are a block"))
        .grid(tower::grid(width as u32, count as u32))
        .buffer("grid", record(grid))
        .buffer("squares", record(squares))
        .scalar("width", width as u32)
        .scalar("side", side as u32)
        .expect("out", expected, CLOSE)
        .buffer("x", x)
}

fn centred(width: usize, count: usize) -> Case {
    let x = Random::new(width as u64).floats(count * width, -1.0, 3.0);
    let row = |row: &[f32]| {
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
        row.iter().map(|x| (f64::from(*x) - mean) as f32).collect::<Vec<_>>()
    };
    let expected: Vec<f32> = x.chunks(width).flat_map(row).collect();
    let name = format!("{count} rows of {width} without their mean");
    Case::new(name, tower::sub_mean_instance().expect("a warp is a block"))
        .grid([count as u32, 1, 1])
        .buffer("x", x)
        .scalar("width", width as u32)
        .expect("out", expected, CLOSE)
}

/// What attention of all to all must give.
pub fn mixed(q: &[f32], k: &[f32], v: &[f32], heads: usize, dim: usize) -> Vec<f32> {
    let (width, count) = (heads * dim, k.len() / (heads * dim));
    let mut out = vec![0.0; count * width];
    for (row, head) in (0..count).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        let of = |x: &[f32], patch: usize| {
            x[patch * width + head * dim..][..dim].iter().map(|x| f64::from(*x)).collect::<Vec<_>>()
        };
        let dot = |patch| of(q, row).iter().zip(of(k, patch)).map(|(a, b)| a * b).sum::<f64>();
        let scores: Vec<f64> = (0..count).map(dot).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (patch, weight) in weights.iter().enumerate() {
            for (i, value) in of(v, patch).into_iter().enumerate() {
                out[row * width + head * dim + i] += (weight / total * value) as f32;
            }
        }
    }
    out
}

fn attended(heads: usize, dim: usize, grid: [usize; 2], free: usize) -> Case {
    let (count, width) = (grid[0] * grid[1], heads * dim);
    let mut random = Random::new(dim as u64);
    let [q, k, v] = [(); 3].map(|()| random.floats((count + free) * width, -1.0, 1.0));
    let used = count * width;
    let expected = mixed(&q[..used], &k[..used], &v[..used], heads, dim);
    let name = format!("{}x{} patches, {heads} heads of {dim}, {free} free rows", grid[0], grid[1]);
    let case = Case::new(name, tower::attention_instance(dim as u32).expect("a warp is a block"))
        .grid([heads as u32, (count + free) as u32, 1])
        .buffer("q", q)
        .buffer("k", k)
        .buffer("v", v)
        .buffer("grid", record(grid));
    with_free(case, expected, free * width)
}

/// On tensor cores, from values that bf16 holds.
fn multiplied(heads: usize, dim: usize, grid: [usize; 2], free: usize) -> Case {
    let (count, width) = (grid[0] * grid[1], heads * dim);
    let mut random = Random::new(dim as u64 + 1);
    let rounded = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
    let values = |()| random.floats((count + free) * width, -1.0, 1.0).into_iter().map(rounded).collect::<Vec<_>>();
    let [mut q, mut k, mut v] = [(); 3].map(values);
    let mut expected = mixed(&q[..count * width], &k[..count * width], &v[..count * width], heads, dim);
    // What nobody sees is not a number: a kernel that looks there shows it.
    [&mut q, &mut k, &mut v].into_iter().for_each(|x| x[count * width..].fill(f32::NAN));
    let written = expected.len();
    expected.resize(written + free * width, 0.0);
    let name = format!("tensor cores, {}x{} patches, {heads} heads of {dim}, {free} free rows", grid[0], grid[1]);
    let instance = flash::instance(dim as u32).expect("128 threads are a block").expect("heads that it takes");
    let case = Case::new(name, instance)
        .grid(flash::grid(heads as u32, (count + free) as u32))
        .buffer("q", q)
        .buffer("k", k)
        .buffer("v", v)
        .buffer("grid", record(grid))
        .expect("out", expected, Bound::Within { absolute: 4e-3, relative: 4e-3 });
    if free == 0 { case } else { case.except(written..written + free * width) }
}

fn placed(width: usize, ahead: &[u32]) -> Case {
    let mut random = Random::new(width as u64);
    let [x, soft] = [(); 2].map(|()| random.floats(ahead.len() * width, -1.0, 1.0));
    let row = |row: usize| (if ahead[row] == 0 { &x } else { &soft })[row * width..][..width].to_vec();
    let expected: Vec<f32> = (0..ahead.len()).flat_map(row).collect();
    let name = format!("rows of {width}, soft tokens ahead {ahead:?}");
    Case::new(name, tower::place_soft_instance().expect("256 threads are a block"))
        .grid(tower::grid(width as u32, ahead.len() as u32))
        .buffer("ahead", ahead.to_vec())
        .scalar("width", width as u32)
        .expect("out", expected, Bound::Exact)
        .buffer("x", x)
        .buffer("soft", soft)
}

/// Links of a chain, whose weights have `terms` elements.
fn linked(chain: &[&'static DeviceDef], terms: usize) -> Case {
    let (count, width, term) = (3, 40, 0.75f32);
    let mut random = Random::new(terms as u64);
    let x = random.floats(count * width, -6.0, 6.0);
    let [low, high] = [random.floats(terms, -4.0, -1.0), random.floats(terms, 1.0, 4.0)];
    let value = |at: usize| {
        chain.iter().fold(x[at], |value, function| match function.name {
            "then_plus" => value + term,
            "then_plus_weight" => value + low[at % terms],
            "then_at_least" => value.max(low[at % terms]),
            _ => value.min(high[at % terms]),
        })
    };
    let expected: Vec<f32> = (0..count * width).map(value).collect();
    let names: Vec<&str> = chain.iter().map(|function| function.name).collect();
    let name = format!("{} of {terms} values", names.join(" "));
    let case = Case::new(name, map::instance(chain).expect("256 threads are a block"))
        .grid(map::grid(width as u32, count as u32))
        .buffer("x", x.clone())
        .scalar("width", width as u32)
        .scalar("x_stride", width as u32);
    let given = chain.iter().fold(case, |case, function| match function.name {
        "then_plus" => case.scalar("chain_term", term),
        "then_plus_weight" => case.buffer("chain_term", low.clone()).scalar("chain_terms", terms as u32),
        "then_at_least" => case.buffer("chain_low", low.clone()).scalar("chain_lows", terms as u32),
        _ => case.buffer("chain_high", high.clone()).scalar("chain_highs", terms as u32),
    });
    given.expect("out", expected, Bound::Exact)
}
