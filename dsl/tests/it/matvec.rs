//! The example a kernel's author may start from: a Q8_0 matrix-vector product over repacked weights, its device
//! functions for the epilogue slot, its plain oracle and its cases.

use gemma4c_dsl::harness::{Bound, Case, Random};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance};

/// Adds the residual.
#[device]
fn add_residual(value: f32, row: u32, residual: Input<f32>) -> f32 {
    value + residual[row]
}

/// Squashes into `-cap..cap`.
#[device]
fn softcap(value: f32, row: u32, cap: f32) -> f32 {
    cap * (value / cap).tanh()
}

/// Sixteen products of signed bytes.
#[device]
fn dot16(a: U32x4, b: U32x4) -> i32 {
    let lower = dp4a(a.y, b.y, dp4a(a.x, b.x, 0));
    dp4a(a.w, b.w, dp4a(a.z, b.z, lower))
}

/// `out = W · x`, W in Q8_0 as two planes: quants, and one F16 scale for each 32 of them. A warp computes ROWS weight
/// rows; a lane takes 16 quants of each at a time.
#[kernel(block = WARPS * 32, dependent, slots(epilogue(value: f32, row: u32) -> f32))]
pub fn matvec_q8_0<const K: u32, const ROWS: u32, const WARPS: u32>(
    quants: Weights<i8>,
    scales: Weights<F16>,
    x: Input<i8>,
    x_scales: Input<f32>,
    out: Output<f32>,
    rows: u32,
) {
    require!(K % 32 == 0);
    let x_tile = shared::<i8>(K);
    let first = (block_idx() * WARPS + warp_id()) * ROWS;
    let start = lane_id() * 16;

    // The first weights are on their way before the activations are there.
    let mut ahead = regs(U32x4::ZERO, ROWS);
    #[unroll]
    for r in 0..ROWS {
        if start < K {
            ahead[r] = load_streamed::<U32x4>(quants, (first + r).min(rows - 1) * K + start);
        }
    }

    grid_dependency_wait();
    for at in (thread_idx() * 16..K).by(WARPS * 512) {
        store(x_tile, at, load::<U32x4>(x, at));
    }
    barrier();

    let mut sums = regs(0.0f32, ROWS);
    for at in (start..K).by(512) {
        let activations = load::<U32x4>(x_tile, at);
        let x_scale = x_scales[at / 32];
        #[unroll]
        for r in 0..ROWS {
            let row = (first + r).min(rows - 1);
            let weights = ahead[r];
            if at + 512 < K {
                ahead[r] = load_streamed::<U32x4>(quants, row * K + at + 512);
            }
            let scale = scales[(row * K + at) / 32].to_f32() * x_scale;
            sums[r] = (dot16(weights, activations) as f32).mul_add(scale, sums[r]);
        }
    }

    #[unroll]
    for r in 0..ROWS {
        let sum = warp_sum(sums[r]);
        if lane_id() == 0 && first + r < rows {
            out[first + r] = epilogue(sum, first + r);
        }
    }
    grid_launch_dependents();
}

struct Product {
    quants: Vec<i8>,
    scales: Vec<F16>,
    x: Vec<i8>,
    x_scales: Vec<f32>,
    rows: usize,
    k: usize,
}

impl Product {
    fn random(rows: usize, k: usize) -> Self {
        let mut random = Random::new((rows * k) as u64);
        Self {
            quants: random.bytes(rows * k).into_iter().map(|b| b as i8).collect(),
            scales: random.floats(rows * k / 32, 0.001, 0.01).into_iter().map(F16::from_f32).collect(),
            x: random.bytes(k).into_iter().map(|b| b as i8).collect(),
            x_scales: random.floats(k / 32, 0.001, 0.01),
            rows,
            k,
        }
    }

    /// The plain product, in f64.
    fn oracle(&self) -> Vec<f32> {
        let row = |row: usize| {
            (0..self.k).map(move |i| {
                let scale = f64::from(self.scales[(row * self.k + i) / 32].to_f32()) * f64::from(self.x_scales[i / 32]);
                scale * f64::from(self.quants[row * self.k + i]) * f64::from(self.x[i])
            })
        };
        (0..self.rows).map(|r| row(r).sum::<f64>() as f32).collect()
    }

    fn case(&self, rows_per_warp: u32, epilogue: &[&'static DeviceDef]) -> Case {
        let warps = 2;
        let instance = Instance::of(matvec_q8_0::DEF)
            .constant("K", self.k as u32)
            .constant("ROWS", rows_per_warp)
            .constant("WARPS", warps)
            .slot("epilogue", epilogue)
            .build()
            .expect("all parameters are set");
        Case::new(format!("{} x {}, {rows_per_warp} rows a warp", self.rows, self.k), instance)
            .grid([(self.rows as u32).div_ceil(rows_per_warp * warps), 1, 1])
            .buffer("quants", self.quants.clone())
            .buffer("scales", self.scales.clone())
            .buffer("x", self.x.clone())
            .buffer("x_scales", self.x_scales.clone())
            .scalar("rows", self.rows as u32)
    }
}

const BOUND: Bound = Bound::Within { absolute: 1e-4, relative: 1e-5 };

#[test]
fn the_product_equals_its_oracle() {
    for (rows, k, rows_per_warp) in [(1, 32, 1), (7, 64, 2), (16, 544, 4), (5, 2560, 2), (33, 1024, 1)] {
        let product = Product::random(rows, k);
        product.case(rows_per_warp, &[]).expect("out", product.oracle(), BOUND).assert();
    }
}

#[test]
fn a_slot_chains_device_functions_with_arguments_of_their_own() {
    let product = Product::random(9, 96);
    let residual = Random::new(5).floats(9, -1.0, 1.0);
    let cap = 3.0f32;
    let expected: Vec<f32> =
        product.oracle().iter().zip(&residual).map(|(v, r)| cap * ((v + r) / cap).tanh()).collect();
    product
        .case(2, &[add_residual::DEF, softcap::DEF])
        .buffer("epilogue_residual", residual)
        .scalar("epilogue_cap", cap)
        .expect("out", expected, BOUND)
        .assert();
}

#[test]
fn the_text_reads_like_the_source() {
    let text = matvec_q8_0::DEF.cuda;
    for line in [
        "// The first weights are on their way before the activations are there.",
        "    __shared__ __align__(16) i8 x_tile[K];",
        "    U32x4 ahead[ROWS] = {};",
        "            ahead[r] = load_streamed<U32x4>(quants, min(first + r, rows - 1) * K + start);",
        "    for (u32 at = thread_idx() * 16; at < K; at += WARPS * 512) {",
        "            sums[r] = mul_add((f32)dot16(weights_, activations), scale, sums[r]);",
        "            out[first + r] = epilogue(sum, first + r EPILOGUE_ARGS);",
    ] {
        assert!(text.contains(line), "{line}\nis not in\n{text}");
    }
    assert!(matvec_q8_0::DEF.rust.starts_with("/// `out = W · x`"), "{}", matvec_q8_0::DEF.rust);
}
