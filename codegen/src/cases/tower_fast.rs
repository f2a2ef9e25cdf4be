//! Cases of a tower's fast kernels: heads of 64 and 72 in tiles and attention by warpgroups over them, with patches
//! left over; and what is between clipped products.

use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, ElementType, Float};

use super::geglu::gelu;
use super::tower::{mixed, record};
use crate::kernels::heads::inverse_frequencies;
use crate::kernels::tower::heads::HeadTiles;
use crate::kernels::tower::warpgroups::PatchAttention;
use crate::kernels::tower::{clipped, then_at_least, then_at_most};

const ROUNDED: Bound = Bound::Within { absolute: 1e-3, relative: 1.0 / 128.0 };
/// Bounds that some values lie beyond.
const CLIP: [f32; 2] = [-0.7, 0.9];

pub fn cases() -> Vec<Case> {
    vec![
        prepared(2, 64, [6, 3], true),
        prepared(1, 72, [11, 13], false),
        attended(2, 64, [9, 15], 2, false),
        attended(1, 72, [7, 3], 2, false),
        attended(1, 64, [20, 20], 3, true),
        attended(1, 72, [13, 16], 3, true),
        normed(64, 3, true, 3),
        normed(1152, 2, true, 2),
        normed(40, 2, false, 1),
        normed(24, 2, true, 0),
        gated(12, 12, 2, ElementType::F32),
        gated(1036, 2072, 1, ElementType::BF16),
    ]
}

fn rounded(x: f32) -> f32 {
    BF16::from_f32(x).to_f32()
}

fn bounded(x: f32, [low, high]: [f32; 2]) -> f32 {
    x.max(low).min(high)
}

/// The tiles of queries or keys: values of a row of `x`, which is `heads` wide in heads.
fn tiled(x: &[f32], heads: usize, tiles: HeadTiles, patches: usize) -> Vec<BF16> {
    let (dim, width) = (tiles.dim as usize, heads * tiles.dim as usize);
    let mut out = vec![BF16::from_f32(0.0); tiles.query_values(heads as u32, patches as u32) as usize];
    for (at, value) in x.iter().enumerate() {
        let (patch, head, i) = (at / width, at % width / dim, at % dim);
        let block = (head * patches.div_ceil(128) + patch / 128) * tiles.tiles() as usize + i / 64;
        let line = patch % 128;
        out[block * 8192 + line * 64 + ((i % 64 / 8) ^ (line % 8)) * 8 + i % 8] = BF16::from_f32(*value);
    }
    out
}

/// The tiles of values.
fn turned(x: &[f32], heads: usize, tiles: HeadTiles, patches: usize) -> Vec<BF16> {
    let (dim, width) = (tiles.dim as usize, heads * tiles.dim as usize);
    let mut out = vec![BF16::from_f32(0.0); tiles.value_values(heads as u32, patches as u32) as usize];
    for (at, value) in x.iter().enumerate() {
        let (patch, head, i) = (at / width, at % width / dim, at % dim);
        let block = head * patches.div_ceil(128) * 2 + patch / 64;
        let vector = (patch % 64 / 8) ^ (i % 8);
        out[(block * tiles.values() as usize + i) * 64 + vector * 8 + patch % 8] = BF16::from_f32(*value);
    }
    out
}

/// Heads from their product to tiles. What a tile has beyond a head is not written.
fn prepared(heads: usize, dim: usize, grid: [usize; 2], beside: bool) -> Case {
    let (count, width, quarter) = (grid[0] * grid[1], heads * dim, dim / 4);
    let tiles = HeadTiles::of(dim as u32).expect("heads that it takes");
    let mut random = Random::new(dim as u64);
    let [q, k, v] = [(); 3].map(|()| random.floats(count * width, -3.0, 3.0));
    let [q_weight, k_weight] = [(); 2].map(|()| random.floats(dim, 0.5, 1.5));
    let clips = [[-2.0f32, 2.5], [-2.75, 1.5], [f32::NEG_INFINITY, f32::INFINITY]];
    let epsilon = 1e-6f32;
    let made = |x: &[f32], which: usize| -> Vec<f32> {
        let mut out = vec![0.0f32; x.len()];
        for (at, head) in x.chunks(dim).enumerate() {
            let patch = at / heads;
            let head: Vec<f64> = head.iter().map(|x| f64::from(bounded(*x, clips[which]))).collect();
            let factor = (head.iter().map(|x| x * x).sum::<f64>() / dim as f64 + f64::from(epsilon)).powf(-0.5);
            let weight = |i: usize| {
                [q_weight.get(i), k_weight.get(i)].get(which).map_or(1.0, |w| f64::from(*w.expect("a value")))
            };
            let normed: Vec<f64> = (0..dim).map(|i| head[i] * factor * weight(i)).collect();
            for i in 0..dim {
                let (pair, start) = (i % quarter, i / (2 * quarter) * 2 * quarter);
                let at_grid = if start == 0 { patch % grid[0] } else { patch / grid[0] };
                let angle = at_grid as f64 * 100f64.powf(-4.0 * pair as f64 / dim as f64);
                let (a, b) = (normed[start + pair], normed[start + pair + quarter]);
                let is_first = i - start < quarter;
                let value = match (which, is_first) {
                    (2, _) => normed[i],
                    (_, true) => a * angle.cos() - b * angle.sin(),
                    (_, false) => b * angle.cos() + a * angle.sin(),
                };
                out[at * dim + i] = (if which == 0 { value * std::f64::consts::LOG2_E } else { value }) as f32;
            }
        }
        out
    };
    let (q_tiles, k_tiles) = (tiled(&made(&q, 0), heads, tiles, count), tiled(&made(&k, 1), heads, tiles, count));
    let v_tiles = turned(&made(&v, 2), heads, tiles, count);
    let stride = if beside { 3 * width } else { width };
    let (q, k, v) = match beside {
        false => (q, k, v),
        true => {
            // One after the other in every row, as one product writes them; each starts at its first value.
            let row = |row: usize| [&q, &k, &v].map(|x| x[row * width..][..width].to_vec()).concat();
            let all: Vec<f32> = (0..count).flat_map(row).collect();
            (all.clone(), all[width..].to_vec(), all[2 * width..].to_vec())
        }
    };
    let one = |values: [f32; 2], at: usize| vec![values[at]];
    let patches = count as u32;
    let name = format!("{}x{} patches, {heads} heads of {dim} to tiles, rows of {stride}", grid[0], grid[1]);
    let case = Case::new(name, tiles.instance().expect("128 threads are a block"))
        .grid(HeadTiles::grid(heads as u32, patches))
        .buffer("q_x", q)
        .buffer("k_x", k)
        .buffer("v_x", v)
        .buffer("q_low", one(clips[0], 0))
        .buffer("q_high", one(clips[0], 1))
        .buffer("k_low", one(clips[1], 0))
        .buffer("k_high", one(clips[1], 1))
        .buffer("v_low", one(clips[2], 0))
        .buffer("v_high", one(clips[2], 1))
        .buffer("norms_q_weight", q_weight.clone())
        .buffer("norms_k_weight", k_weight.clone())
        .scalar("norms_epsilon", epsilon)
        .buffer("norms_inverse_frequencies", inverse_frequencies(dim as u32 / 2, 100.0, None))
        .buffer("grid", record(grid))
        .scalar("stride", stride as u32)
        .scalar("tiles_blocks", HeadTiles::blocks(patches))
        .expect("tiles_q", q_tiles, ROUNDED);
    // Of heads of 72 a tile's last vectors, and a tile's last lines of values.
    let is_vector = |at: usize| {
        at / 8192 % tiles.tiles() as usize * 64 + ((at % 64 / 8) ^ (at / 64 % 8)) * 8 < tiles.padded() as usize
    };
    let is_line = |at: usize| at / 64 % (tiles.values() as usize) < dim;
    let (of_queries, of_values) =
        (tiles.query_values(heads as u32, patches), tiles.value_values(heads as u32, patches));
    let case = but(case, of_queries as usize, is_vector).expect("tiles_k", k_tiles, ROUNDED);
    let case = but(case, of_queries as usize, is_vector).expect("tiles_v", v_tiles, ROUNDED);
    but(case, of_values as usize, is_line)
}

/// The last expectation without the eights that are not written.
fn but(case: Case, count: usize, is_written: impl Fn(usize) -> bool) -> Case {
    (0..count).step_by(8).filter(|at| !is_written(*at)).fold(case, |case, at| case.except(at..at + 8))
}

/// Attention over tiles, from values that bf16 holds. Patches that nobody sees are not numbers.
fn attended(heads: usize, dim: usize, grid: [usize; 2], warpgroups: u32, clips: bool) -> Case {
    let (count, width) = (grid[0] * grid[1], heads * dim);
    let tiles = HeadTiles::of(dim as u32).expect("heads that it takes");
    let mut random = Random::new(dim as u64 + 1);
    let [q, k, v] =
        [(); 3].map(|()| random.floats(count * width, -1.0, 1.0).into_iter().map(rounded).collect::<Vec<_>>());
    let expected = mixed(&q, &k, &v, heads, dim);
    let scaled: Vec<f32> = q.iter().map(|x| x * std::f32::consts::LOG2_E).collect();
    let bound = |x: f32| if clips { bounded(x, CLIP.map(|bound| bound / 20.0)) } else { x };
    let expected: Vec<BF16> = expected.into_iter().map(|x| BF16::from_f32(bound(x))).collect();
    let kernel = PatchAttention { tiles, warpgroups };
    let epilogue = if clips { vec![then_at_least::DEF, then_at_most::DEF] } else { Vec::new() };
    let name = format!(
        "{}x{} patches, {heads} heads of {dim}, {warpgroups} warpgroups{}",
        grid[0],
        grid[1],
        if clips { ", within bounds" } else { "" }
    );
    let case = Case::new(name, kernel.instance(epilogue).expect("warpgroups that fit"))
        .grid(kernel.grid(heads as u32, count as u32))
        .buffer("tiles_q", tiled(&scaled, heads, tiles, count))
        .buffer("tiles_k", tiled(&k, heads, tiles, count))
        .buffer("tiles_v", turned(&v, heads, tiles, count))
        .buffer("grid", record(grid))
        .scalar("tiles_blocks", HeadTiles::blocks(count as u32))
        .expect("out", expected, Bound::Within { absolute: 6e-3, relative: 1e-2 });
    if !clips {
        return case;
    }
    case.buffer("epilogue_low", vec![CLIP[0] / 20.0])
        .scalar("epilogue_lows", 1u32)
        .buffer("epilogue_high", vec![CLIP[1] / 20.0])
        .scalar("epilogue_highs", 1u32)
}

fn normed(width: usize, rows: usize, residual: bool, clips: usize) -> Case {
    let mut random = Random::new(width as u64);
    let [h, x] = [(); 2].map(|()| random.floats(rows * width, -2.0, 2.0));
    let [weight, next] = [(); 2].map(|()| random.floats(width, 0.5, 1.5));
    let (entry, epsilon) = ([-1.5f32, 1.25], 1e-6f32);
    let bounds = [[-1.0f32, 2.0], [-2.0, 0.5], [-0.25, 0.25]];
    let norm = |row: &[f64], weight: &[f32]| -> Vec<f64> {
        let factor = (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + f64::from(epsilon)).powf(-0.5);
        row.iter().zip(weight).map(|(x, w)| x * factor * f64::from(*w)).collect()
    };
    let (mut sums, mut copies) = (Vec::new(), vec![Vec::new(); clips]);
    for row in 0..rows {
        let of = |x: &[f32]| x[row * width..][..width].to_vec();
        let entered: Vec<f64> = of(&x).iter().map(|x| f64::from(bounded(*x, entry))).collect();
        let mut now = entered.clone();
        if residual {
            now = of(&h).iter().zip(norm(&entered, &weight)).map(|(h, x)| f64::from(*h) + x).collect();
        }
        sums.extend(now.iter().map(|x| *x as f32));
        for (copy, bounds) in copies.iter_mut().zip(bounds) {
            copy.extend(norm(&now, &next).iter().map(|x| BF16::from_f32(bounded(*x as f32, bounds))));
        }
    }
    let name =
        format!("{rows} rows of {width}, {} and {clips} copies", if residual { "residual" } else { "no residual" });
    let close = Bound::Within { absolute: 4e-6, relative: 4e-6 };
    let one = |values: [f32; 2], at: usize| vec![values[at]];
    let instance = clipped::norm(width as u32, residual, clips as u32).expect("a row of threads is a block");
    Case::new(name, instance)
        .grid([rows as u32, 1, 1])
        .buffer("residual_before", if residual { h } else { Vec::new() })
        .buffer("x", x)
        .buffer("residual_weight", if residual { weight } else { Vec::new() })
        .buffer("copies_weight", if clips > 0 { next } else { Vec::new() })
        .buffer("entry_low", one(entry, 0))
        .buffer("entry_high", one(entry, 1))
        .buffer("first_low", one(bounds[0], 0))
        .buffer("first_high", one(bounds[0], 1))
        .buffer("second_low", one(bounds[1], 0))
        .buffer("second_high", one(bounds[1], 1))
        .buffer("third_low", one(bounds[2], 0))
        .buffer("third_high", one(bounds[2], 1))
        .scalar("copies_part", (rows * width) as u32)
        .scalar("epsilon", epsilon)
        .expect("residual_after", if residual { sums } else { Vec::new() }, close)
        .expect("copies_rounded", copies.concat(), ROUNDED)
}

fn gated(width: usize, stride: usize, rows: usize, of: ElementType) -> Case {
    let mut random = Random::new(stride as u64);
    let is_rounded = of == ElementType::BF16;
    let [gate, up] = [(); 2].map(|()| {
        let values = random.floats(rows * stride, -3.0, 3.0).into_iter();
        values.map(|x| if is_rounded { rounded(x) } else { x }).collect::<Vec<f32>>()
    });
    let bounds = [[-2.0f32, 2.5], [-1.0, 2.0], [-0.5, 1.5]];
    let value = |at: usize| {
        let from = at / width * stride + at % width;
        let (gate, up) = (bounded(gate[from], bounds[0]), bounded(up[from], bounds[1]));
        BF16::from_f32(bounded((gelu(gate) * f64::from(up)) as f32, bounds[2]))
    };
    let expected: Vec<BF16> = (0..rows * width).map(value).collect();
    let one = |values: [f32; 2], at: usize| vec![values[at]];
    let data = |values: &[f32]| match is_rounded {
        true => Data::from(values.iter().map(|x| BF16::from_f32(*x)).collect::<Vec<_>>()),
        false => Data::from(values.to_vec()),
    };
    Case::new(
        format!("{rows} rows of {width} gated within bounds, {stride} apart"),
        clipped::geglu(of).expect("256 threads are a block"),
    )
    .grid([width.div_ceil(1024) as u32, rows as u32, 1])
    .buffer("gate", data(&gate))
    .buffer("up", data(&up))
    .buffer("gate_bounds_low", one(bounds[0], 0))
    .buffer("gate_bounds_high", one(bounds[0], 1))
    .buffer("up_bounds_low", one(bounds[1], 0))
    .buffer("up_bounds_high", one(bounds[1], 1))
    .buffer("out_bounds_low", one(bounds[2], 0))
    .buffer("out_bounds_high", one(bounds[2], 1))
    .scalar("width", width as u32)
    .scalar("stride", stride as u32)
    .expect("out", expected, ROUNDED)
}
