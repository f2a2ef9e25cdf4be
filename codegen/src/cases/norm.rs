//! Cases of the norms. Sums are taken in another order than the oracle's, so floats agree within a few units in the last
//! place and an int8 code within one step.

use gemma4c_dsl::harness::{Bound, Case, Random};
use gemma4c_dsl::{BF16, F16, Float};

use crate::kernels::norm::{self, Residual};
use crate::kernels::outputs::Outputs;

const EPSILON: f32 = 1e-6;
const CLOSE: Bound = Bound::Within { absolute: 1e-6, relative: 4e-6 };

/// The norm of a row, in f64.
pub fn normed(row: &[f32], weight: Option<&[f32]>) -> Vec<f32> {
    let mean = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / row.len() as f64;
    let factor = (mean + f64::from(EPSILON)).sqrt().recip();
    let weight = |i: usize| weight.map_or(1.0, |weight| f64::from(weight[i]));
    row.iter().enumerate().map(|(i, x)| (f64::from(*x) * factor * weight(i)) as f32).collect()
}

/// Codes, scales and sums of groups of 32.
pub struct Int8 {
    pub codes: Vec<i8>,
    pub scales: Vec<f32>,
    pub sums: Vec<i32>,
}

impl Int8 {
    pub fn of(values: &[f32]) -> Self {
        let mut int8 = Self { codes: Vec::new(), scales: Vec::new(), sums: Vec::new() };
        for group in values.chunks_exact(32) {
            let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let scale = largest / 127.0;
            let per_unit = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let code = |x: &f32| (x * per_unit).round_ties_even().clamp(-127.0, 127.0) as i8;
            int8.sums.push(group.iter().map(|x| i32::from(code(x))).sum());
            int8.codes.extend(group.iter().map(code));
            int8.scales.push(scale);
        }
        int8
    }

    /// Expects the outputs `xq`, `xscale` and `xsum`. A value that lies between two codes may get either.
    pub fn expected(self, case: Case) -> Case {
        let step = |absolute| Bound::Within { absolute, relative: 0.0 };
        case.expect("xq", self.codes, step(1.0)).expect("xscale", self.scales, CLOSE).expect(
            "xsum",
            self.sums,
            step(2.0),
        )
    }
}

/// Expects the values in the forms that an instance leaves, and nothing in the others.
pub fn left(case: Case, outputs: Outputs, values: &[f32], close: Bound) -> Case {
    let when = |there: bool| if there { values } else { &[] };
    let rounded: Vec<BF16> = when(outputs.bf16).iter().map(|x| BF16::from_f32(*x)).collect();
    // A value between two bf16 may become either: a step is at most 1 / 128 of it.
    let step = Bound::Within { absolute: 1e-6, relative: 1.0 / 128.0 };
    let case = case.expect("out", when(outputs.floats), close).expect("rounded", rounded, step);
    Int8::of(when(outputs.int8)).expected(case)
}

/// Expects the values in the forms that an instance writes, and nothing in the others: the view `out` of a kernel.
pub fn written(case: Case, out: &str, outputs: Outputs, values: &[f32], close: Bound) -> Case {
    let when = |there: bool| if there { values } else { &[] };
    let rounded: Vec<BF16> = when(outputs.bf16).iter().map(|x| BF16::from_f32(*x)).collect();
    let halves: Vec<F16> = when(outputs.f16).iter().map(|x| F16::from_f32(*x)).collect();
    let int8 = Int8::of(when(outputs.int8));
    // A value between two bf16 may become either: a step is at most 1 / 128 of it. Likewise one between two codes.
    let within = |absolute, relative| Bound::Within { absolute, relative };
    case.expect(&format!("{out}_floats"), when(outputs.floats), close)
        .expect(&format!("{out}_rounded"), rounded, within(1e-6, 1.0 / 128.0))
        .expect(&format!("{out}_halves"), halves, within(1e-6, 1.0 / 1024.0))
        .expect(&format!("{out}_codes"), int8.codes, within(1.0, 0.0))
        .expect(&format!("{out}_scales"), int8.scales, CLOSE)
        .expect(&format!("{out}_sums"), int8.sums, within(2.0, 0.0))
}

/// Rows of very different sizes: the residual of a deep layer is thousands of times that of the first.
fn rows(random: &mut Random, rows: usize, width: usize) -> Vec<f32> {
    (0..rows)
        .flat_map(|row| random.floats(width, -1.0, 1.0).into_iter().map(move |x| x * [1.0, 900.0, 0.003][row % 3]))
        .collect()
}

fn norm_case(width: usize, count: usize, weighted: bool, outputs: Outputs) -> Case {
    let mut random = Random::new(width as u64);
    let (x, weight) = (rows(&mut random, count, width), random.floats(width, -0.5, 3.0));
    let expected: Vec<f32> = x.chunks(width).flat_map(|row| normed(row, weighted.then_some(&weight[..]))).collect();
    let instance = norm::norm(width as u32, weighted, outputs).expect("the width is a block");
    let case = Case::new(format!("{count} rows of {width}, {outputs}"), instance)
        .grid([count as u32, 1, 1])
        .buffer("x", x)
        .buffer("weight", if weighted { weight } else { Vec::new() })
        .scalar("epsilon", EPSILON);
    written(case, "out", outputs, &expected, CLOSE)
}

fn residual_case(width: usize, count: usize, of: Residual) -> Case {
    let mut random = Random::new(width as u64 + 1);
    let (h, x, branch) =
        (rows(&mut random, count, width), rows(&mut random, count, width), rows(&mut random, count, width));
    let mut weights = || random.floats(width, -0.5, 3.0);
    let [x_weight, branch_weight, weight, next_weight] = std::array::from_fn(|_| weights());
    let layer_scale = vec![0.37f32];
    let (mut h_out, mut out) = (Vec::new(), Vec::new());
    for row in 0..count {
        let row = row * width..(row + 1) * width;
        let mut inner = x[row.clone()].to_vec();
        if of.branches {
            let other = normed(&branch[row.clone()], Some(&branch_weight));
            inner = normed(&inner, Some(&x_weight)).iter().zip(&other).map(|(a, b)| a + b).collect();
        }
        let inner = normed(&inner, Some(&weight));
        let scale = if of.scaled { layer_scale[0] } else { 1.0 };
        let sum: Vec<f32> = h[row].iter().zip(&inner).map(|(h, x)| (h + x) * scale).collect();
        out.extend(if of.next { normed(&sum, Some(&next_weight)) } else { sum.clone() });
        h_out.extend(sum);
    }
    let instance = norm::residual(width as u32, of).expect("the width is a block");
    let when = |there: bool, data: Vec<f32>| if there { data } else { Vec::new() };
    let case = Case::new(format!("{count} rows of {width}, {of:?}"), instance)
        .grid([count as u32, 1, 1])
        .buffer("h", h)
        .buffer("x", x)
        .buffer("branch_values", when(of.branches, branch))
        .buffer("branch_x_weight", when(of.branches, x_weight))
        .buffer("branch_weight", when(of.branches, branch_weight))
        .buffer("norms_post", weight)
        .buffer("norms_layer_scale", when(of.scaled, layer_scale))
        .buffer("norms_next", when(of.next, next_weight))
        .scalar("epsilon", EPSILON);
    // Where the two terms of the sum cancel, the error is that of the terms.
    let sums = Bound::Within { absolute: 2e-4, relative: 4e-6 };
    written(case.expect("h_out", h_out, sums), "out", of.outputs, &out, CLOSE)
}

fn plain_case(width: usize, count: usize, weighted: bool) -> Case {
    let mut random = Random::new(width as u64);
    let (x, weight) = (rows(&mut random, count, width), random.floats(width, -0.5, 3.0));
    let expected: Vec<f32> = x.chunks(width).flat_map(|row| normed(row, weighted.then_some(&weight[..]))).collect();
    Case::new(format!("{count} rows of {width}, plainly"), norm::plain(weighted).expect("a warp is a block"))
        .grid([count as u32, 1, 1])
        .buffer("x", x)
        .buffer("weight", if weighted { weight } else { Vec::new() })
        .scalar("width", width as u32)
        .scalar("epsilon", EPSILON)
        .expect("out", expected, CLOSE)
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![
        plain_case(1, 2, true),
        plain_case(77, 3, true),
        plain_case(1536, 1, false),
        norm_case(8, 3, true, Outputs::FLOATS),
        norm_case(328, 2, false, Outputs::BF16),
        norm_case(328, 2, true, Outputs::F16),
        norm_case(96, 3, false, Outputs::INT8),
        norm_case(2560, 2, true, Outputs::INT8.and(Outputs::FLOATS)),
        norm_case(2816, 2, true, Outputs::BF16.and(Outputs::FLOATS)),
    ];
    // The residual's width in each of the five sizes.
    cases.extend([1536, 2560, 3840, 2816, 5376].map(|width| norm_case(width, 1, true, Outputs::INT8)));
    let plain = Residual { branches: false, scaled: false, next: false, outputs: Outputs::NONE };
    let next = Residual { next: true, ..plain };
    let all = Outputs::INT8.and(Outputs::BF16).and(Outputs::FLOATS);
    cases.extend([
        residual_case(40, 3, plain),
        residual_case(352, 3, Residual { scaled: true, outputs: Outputs::INT8, ..plain }),
        residual_case(352, 3, Residual { outputs: Outputs::BF16, ..next }),
        residual_case(352, 3, Residual { outputs: Outputs::F16.and(Outputs::BF16), ..next }),
        residual_case(2816, 1, Residual { branches: true, scaled: true, outputs: all, ..next }),
        residual_case(5376, 1, Residual { scaled: true, outputs: Outputs::FLOATS, ..next }),
        residual_case(1536, 2, Residual { scaled: true, outputs: Outputs::INT8, ..next }),
    ]);
    cases
}
