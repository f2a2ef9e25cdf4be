//! Cases of what a sound's frames need: convolutions of odd numbers of rows and columns, and rows that look back to
//! before the first.

use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::harness::{Bound, Case, Random};

use crate::kernels::plain::map;
use crate::kernels::tower::sound::{self, then_relu, then_sigmoid};

const CLOSE: Bound = Bound::Within { absolute: 2e-5, relative: 2e-5 };

pub fn cases() -> Vec<Case> {
    let mut cases = vec![
        halved(1, 7, 5, 3, 0, 7),
        halved(8, 6, 4, 5, 1, 11),
        halved(128, 3, 2, 2, 1, 5),
        convolved(7, 300, 5),
        convolved(2, 8, 3),
        attended(5, 2, 128, 12),
        attended(15, 1, 40, 12),
        attended(2, 1, 8, 1),
    ];
    let functions: [&'static DeviceDef; 2] = [then_sigmoid::DEF, then_relu::DEF];
    cases.extend(functions.map(linked));
    cases
}

/// `rows` are those that there are after `halvings` of `frames`.
fn halved(channels: usize, rows: usize, columns: usize, outputs: usize, halvings: u32, frames: u32) -> Case {
    assert_eq!(frames.div_ceil(1 << halvings) as usize, rows);
    let (taps, width) = (9 * channels, columns * channels);
    let mut random = Random::new(taps as u64);
    let (x, weight) = (random.floats(rows * width, -1.0, 1.0), random.floats(outputs * taps, -0.5, 0.5));
    let (out_rows, out_columns) = (rows.div_ceil(2), columns.div_ceil(2));
    let value = |at: usize| {
        let (row, column, output) = (at / outputs / out_columns, at / outputs % out_columns, at % outputs);
        let tap = |tap: usize| {
            let (channel, dy, dx) = (tap / 9, tap / 3 % 3, tap % 3);
            let (y, z) = ((2 * row + dy).checked_sub(1)?, (2 * column + dx).checked_sub(1)?);
            let inside = y < rows && z < columns;
            inside.then(|| f64::from(x[y * width + z * channels + channel]) * f64::from(weight[output * taps + tap]))
        };
        (0..taps).filter_map(tap).sum::<f64>() as f32
    };
    let expected: Vec<f32> = (0..out_rows * out_columns * outputs).map(value).collect();
    let name = format!("{rows}x{columns} places of {channels} channels to {outputs}");
    Case::new(name, sound::halving(taps as u32).expect("a warp is a block"))
        .grid([out_columns as u32, out_rows as u32, 1])
        .buffer("x", x.clone())
        .buffer("weight", weight.clone())
        .buffer("grid", vec![0, frames, frames, 0])
        .scalar("columns", columns as u32)
        .scalar("outputs", outputs as u32)
        .scalar("halvings", halvings)
        .expect("out", expected, CLOSE)
}

fn convolved(rows: usize, width: usize, taps: usize) -> Case {
    let mut random = Random::new(width as u64);
    let (x, weight) = (random.floats(rows * width, -1.0, 1.0), random.floats(width * taps, -1.0, 1.0));
    let value = |at: usize| {
        let (row, i) = (at / width, at % width);
        let tap = |j: usize| (row + j + 1).checked_sub(taps).map(|from| (from, f64::from(weight[i * taps + j])));
        (0..taps).filter_map(tap).map(|(from, w)| w * f64::from(x[from * width + i])).sum::<f64>() as f32
    };
    let expected: Vec<f32> = (0..rows * width).map(value).collect();
    Case::new(format!("{rows} rows of {width}, {taps} taps"), sound::causal().expect("256 threads are a block"))
        .grid([width.div_ceil(256) as u32, rows as u32, 1])
        .buffer("x", x.clone())
        .buffer("weight", weight.clone())
        .scalar("width", width as u32)
        .scalar("taps", taps as u32)
        .expect("out", expected, CLOSE)
}

fn attended(rows: usize, heads: usize, dim: usize, reach: usize) -> Case {
    let width = heads * dim;
    let mut random = Random::new(dim as u64);
    let [q, k, v] = [(); 3].map(|()| random.floats(rows * width, -1.0, 1.0));
    let (by_distance, cap) = (random.floats(reach * width, -1.0, 1.0), 5.0f64);
    let value = |at: usize| {
        let (row, i) = (at / width, at % width);
        let head = i / dim * dim;
        let score = |distance: usize| {
            let dot = (head..head + dim).map(|j| {
                let key = f64::from(k[(row - distance) * width + j]) + f64::from(by_distance[distance * width + j]);
                f64::from(q[row * width + j]) * key
            });
            (cap * (dot.sum::<f64>() / cap).tanh()).exp()
        };
        let scores: Vec<f64> = (0..reach.min(row + 1)).map(score).collect();
        let mixed = scores.iter().enumerate().map(|(d, s)| s * f64::from(v[(row - d) * width + i]));
        (mixed.sum::<f64>() / scores.iter().sum::<f64>()) as f32
    };
    let expected: Vec<f32> = (0..rows * width).map(value).collect();
    let name = format!("{rows} rows, {heads} heads of {dim}, {reach} seen");
    Case::new(name, sound::near(dim as u32).expect("a warp is a block"))
        .grid([heads as u32, rows as u32, 1])
        .buffer("q", q.clone())
        .buffer("k", k.clone())
        .buffer("v", v.clone())
        .buffer("by_distance", by_distance.clone())
        .scalar("reach", reach as u32)
        .scalar("cap", cap as f32)
        .expect("out", expected, CLOSE)
}

fn linked(function: &'static DeviceDef) -> Case {
    let (rows, width) = (2, 40);
    let x = Random::new(5).floats(rows * width, -6.0, 6.0);
    let value = |x: &f32| match function.name {
        "then_relu" => x.max(0.0),
        _ => (1.0 / (1.0 + (-f64::from(*x)).exp())) as f32,
    };
    let expected: Vec<f32> = x.iter().map(value).collect();
    Case::new(function.name, map::instance(&[function]).expect("256 threads are a block"))
        .grid(map::grid(width as u32, rows as u32))
        .scalar("width", width as u32)
        .scalar("x_stride", width as u32)
        .buffer("x", x)
        .expect("out", expected, CLOSE)
}
