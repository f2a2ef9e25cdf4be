//! Cases of the mixture of experts: routing with ties and few experts; the experts' products in every type, for one row and
//! for several, from and to int8, with rows past the end of a chunk.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};

use super::matvec::random_streams;
use super::quantise::{Int8, activations};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::slots::then_add;
use crate::kernels::moe::Activations;
use crate::kernels::moe::down::Down;
use crate::kernels::moe::gate_up::GateUp;
use crate::kernels::moe::router::Router;
use crate::kernels::streams::{Repacked, streams};

pub fn cases() -> Vec<Case> {
    routers().into_iter().chain(types()).chain(shapes()).chain([hidden_values_in_int8()]).collect()
}

// ---- router ---------------------------------------------------------------------------------------------------------

/// Not what the models have, so that one that is baked in would show.
const EPSILON: f32 = 0.02;

/// Few experts and many, widths beyond what a warp has on its way, equal logits, one row on several blocks.
pub fn routers() -> Vec<Case> {
    // (width, experts, top, rows in the buffers, rows in the chunk, blocks a row; 0: plain)
    let shapes = [
        (64, 4, 2, 3, 2, 1),
        (1060, 40, 8, 1, 1, 3),
        (96, 128, 8, 2, 2, 1),
        (96, 128, 8, 1, 1, 16),
        (32, 3, 3, 1, 1, 1),
        (96, 128, 8, 2, 2, 0),
        (64, 4, 2, 3, 2, 0),
    ];
    shapes
        .into_iter()
        .map(|(width, experts, top, rows, active, blocks)| {
            routing(Router { epsilon: EPSILON, ..Router::new(width, experts, top) }, rows, active, blocks)
        })
        .collect()
}

fn routing(router: Router, rows: usize, active: usize, blocks: u32) -> Case {
    let (width, experts, top) = (router.width as usize, router.experts as usize, router.top as usize);
    let mut random = Random::new((width * experts) as u64);
    let mut matrix = random.floats(experts * width, -1.0, 1.0);
    // The last expert is the first one again: wherever they are chosen, the lower comes first.
    matrix.copy_within(0..width, (experts - 1) * width);
    let scale = random.floats(width, 0.5, 30.0);
    let mut x = random.floats(rows * width, -3.0, 3.0);
    // The first row points where the twins do, so that both are chosen.
    for i in 0..width {
        x[i] = matrix[i] / scale[i];
    }

    let (mut logits, mut ids, mut weights) =
        (vec![0.0f32; rows * experts], vec![0u32; rows * top], vec![0.0; rows * top]);
    for (row, x) in x.chunks_exact(width).enumerate().take(active) {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
        let factor = 1.0 / ((mean + f64::from(EPSILON)).sqrt() * (width as f64).sqrt());
        let logit = |expert: usize| {
            let terms =
                (0..width).map(|i| f64::from(matrix[expert * width + i]) * f64::from(x[i]) * f64::from(scale[i]));
            terms.sum::<f64>() * factor
        };
        let exact: Vec<f64> = (0..experts).map(logit).collect();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| exact[b].total_cmp(&exact[a]));
        let share = |expert: usize| (exact[expert] - exact[order[0]]).exp();
        let total: f64 = order[..top].iter().map(|&expert| share(expert)).sum();
        for j in 0..top {
            ids[row * top + j] = order[j] as u32;
            weights[row * top + j] = (share(order[j]) / total) as f32;
        }
        for (to, exact) in logits[row * experts..].iter_mut().zip(&exact) {
            *to = *exact as f32;
        }
    }

    let close = Bound::Within { absolute: 2e-5, relative: 2e-5 };
    let (name, instance, grid) = match blocks {
        0 => ("plain, ", router.plain_instance(), [1, 1, 1]),
        1 => ("", router.instance(), [1, rows as u32, 1]),
        _ => ("split, ", router.split_instance(), [blocks, 1, 1]),
    };
    let name = format!("{name}{top} of {experts} experts, {active} of {rows} rows of {width}, {blocks} blocks");
    let mut case = Case::new(name, instance.expect("any router fits"))
        .grid(grid)
        .buffer("router", matrix)
        .buffer("scale", scale)
        .buffer("x", x)
        .buffer("state", vec![0, active as u32, 0])
        .buffer("logits", vec![0.0f32; rows * experts])
        .expect("logits", logits, close);
    if blocks == 0 {
        case = case.buffer("ids", vec![0u32; rows * top]).buffer("weights", vec![0.0f32; rows * top]);
    } else {
        case = case.buffer("counter", vec![0u32]).expect("counter", vec![0u32], Bound::Exact);
    }
    let unwritten = active * top..rows * top;
    let case = case.expect("ids", ids, Bound::Exact).except(unwritten.clone());
    case.expect("weights", weights, close).except(unwritten)
}

// ---- experts --------------------------------------------------------------------------------------------------------

/// Random experts and random choices of them.
struct Experts {
    matrix: Repacked,
    /// Rows of an expert.
    height: usize,
    count: usize,
    top: usize,
    rows: usize,
    active: usize,
    ids: Vec<u32>,
    /// One row of activations for each row, or for each pair.
    x: Vec<f32>,
}

impl Experts {
    fn random(dtype: DType, height: usize, k: usize, top: usize, [rows, active]: [usize; 2], vectors: usize) -> Self {
        let count = 3 + top;
        let streams = random_streams(dtype, count * height, k, (height * k) as u64 + dtype as u64);
        let matrix = Repacked { dtype, rows: count * height, k, streams };
        let mut random = Random::new((height + k) as u64);
        // A rotation for each row, so that no choice comes twice, and the last expert is chosen.
        let ids = (0..rows).flat_map(|_| {
            let start = random.below(count as u64) as usize;
            (0..top).map(move |j| ((start + count - j) % count) as u32)
        });
        let ids = ids.collect();
        Self { matrix, height, count, top, rows, active, ids, x: activations(vectors * k, k as u64 + 3) }
    }

    /// Row `row` of `expert` times vector `vector`: the product, and the sum of its terms' sizes.
    fn product(&self, expert: u32, row: usize, vector: usize) -> (f64, f64) {
        let k = self.matrix.k;
        let x = &self.x[vector * k..][..k];
        let int8 = Int8::of(x);
        let terms = (0..k).map(|i| {
            let x = match format(self.matrix.dtype).integer {
                true => f64::from(int8.code(i)) * f64::from(int8.scales[i / 32]),
                false => f64::from(x[i]),
            };
            x * f64::from(self.matrix.value(expert as usize * self.height + row, i))
        });
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }

    fn fast(&self, name: &str, instance: gemma4c_dsl::Instance, from: Activations) -> Case {
        let int8 = Int8::of(&self.x);
        let case = self.weights(name, instance);
        match from {
            Activations::F32 => case.buffer("arrive_x", self.x.clone()),
            Activations::Int8 => case
                .buffer("arrive_xq", int8.codes)
                .buffer("arrive_xscale", int8.scales)
                .buffer("arrive_xsum", int8.sums),
        }
    }

    fn plain(&self, name: &str, instance: gemma4c_dsl::Instance) -> Case {
        let int8 = Int8::of(&self.x);
        let words = match format(self.matrix.dtype).integer {
            true => int8.codes,
            false => self.x.iter().map(|x| x.to_bits()).collect(),
        };
        let case = self.weights(&format!("plain, {name}"), instance);
        case.buffer("x", words).buffer("xscale", int8.scales).buffer("xsum", int8.sums)
    }

    /// Everything but the activations.
    fn weights(&self, name: &str, instance: gemma4c_dsl::Instance) -> Case {
        let Self { matrix, count, top, rows, active, .. } = self;
        let name =
            format!("{name}, {}, {top} of {count} experts, {active} of {rows} rows of {}", matrix.dtype, matrix.k);
        let mut case = Case::new(name, instance);
        for (stream, bytes) in &matrix.streams {
            let param = if stream.name == "codes" { "codes".to_owned() } else { format!("side_{}", stream.name) };
            case = case.buffer(&param, Data::new(stream.element(), bytes.clone()));
        }
        case.buffer("ids", self.ids.clone()).buffer("state", vec![0, *active as u32, 0])
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// Fast and plain.
fn gate_up(gate_up: GateUp, rows: [usize; 2]) -> [Case; 2] {
    let (hidden, top) = (gate_up.hidden as usize, gate_up.top as usize);
    let experts = Experts::random(gate_up.dtype, 2 * hidden, gate_up.k as usize, top, rows, rows[0]);
    let mut expected = vec![0.0f32; rows[0] * top * hidden];
    let (mut size, mut largest) = (0.0f64, 1.0f64);
    for (pair, expert) in experts.ids.iter().enumerate().take(rows[1] * top) {
        for output in 0..hidden {
            let (gate, gate_size) = experts.product(*expert, output, pair / top);
            let (up, up_size) = experts.product(*expert, hidden + output, pair / top);
            expected[pair * hidden + output] = (gelu(gate) * up) as f32;
            size = size.max(gate_size).max(up_size);
            largest = largest.max(gate.abs()).max(up.abs());
        }
    }
    // The gate's error is multiplied by up, and up's by the gate.
    let bound = Bound::Within { absolute: (size * 4e-6 * largest) as f32, relative: 1e-5 };
    let unwritten = rows[1] * top * hidden..rows[0] * top * hidden;
    let name = format!("{hidden} hidden from {:?}", gate_up.from);
    let fast = experts
        .fast(&name, gate_up.instance().expect("a shape that fits"), gate_up.from)
        .grid(gate_up.grid(rows[0] as u32))
        .expect("leave_out", expected.clone(), bound);
    let plain = experts
        .plain(&name, gate_up.plain_instance().expect("a shape that fits"))
        .grid([gate_up.hidden.div_ceil(64), (rows[0] * top) as u32, 1])
        .expect("out", expected, bound);
    [fast, plain].map(|case| case.except(unwritten.clone()).scalar("outputs", gate_up.hidden))
}

/// Fast and plain.
fn down(down: Down, rows: [usize; 2]) -> [Case; 2] {
    let (outputs, top) = (down.outputs as usize, down.top as usize);
    let experts = Experts::random(down.dtype, outputs, down.k as usize, top, rows, rows[0] * top);
    let mut random = Random::new(outputs as u64);
    let weights = random.floats(rows[0] * top, 0.05, 0.5);
    let scales = random.floats(experts.count, 0.5, 1.5);
    let addend = random.floats(rows[0] * outputs, -9.0, 9.0);
    let mut expected = vec![0.0f32; rows[0] * outputs];
    let mut size = 0.0f64;
    for row in 0..rows[1] {
        for output in 0..outputs {
            let (mut sum, mut sum_size) = (0.0, 0.0);
            for j in row * top..(row + 1) * top {
                let (product, product_size) = experts.product(experts.ids[j], output, j);
                let factor = f64::from(weights[j]) * f64::from(scales[experts.ids[j] as usize]);
                (sum, sum_size) = (sum + factor * product, sum_size + factor * product_size);
            }
            let at = row * outputs + output;
            expected[at] = (sum + if down.epilogue.is_empty() { 0.0 } else { f64::from(addend[at]) }) as f32;
            size = size.max(sum_size);
        }
    }
    let bound = Bound::Within { absolute: (size * 2e-6) as f32, relative: 1e-5 };
    let unwritten = rows[1] * outputs..rows[0] * outputs;
    let name = format!("{outputs} outputs from {:?}", down.from);
    let fast =
        experts.fast(&name, down.instance().expect("a shape that fits"), down.from).grid(down.grid(rows[0] as u32));
    let plain = experts.plain(&name, down.plain_instance().expect("a shape that fits")).grid([
        down.outputs.div_ceil(64),
        rows[0] as u32,
        1,
    ]);
    [fast, plain].map(|case| {
        let case = case.buffer("weights", weights.clone()).buffer("expert_scale", scales.clone());
        let case = if down.epilogue.is_empty() { case } else { case.buffer("epilogue_addend", addend.clone()) };
        case.scalar("outputs", down.outputs).expect("out", expected.clone(), bound).except(unwritten.clone())
    })
}

/// Every type, fast and plain: gate and up, and down.
pub fn types() -> Vec<Case> {
    let of = |dtype: DType| {
        let from = if format(dtype).integer { Activations::Int8 } else { Activations::F32 };
        let up = GateUp { dtype, hidden: 5, k: 256, top: 2, from, to: Activations::F32 };
        let back = Down { dtype, outputs: 18, k: 256, top: 2, from, epilogue: Vec::new() };
        gate_up(up, [1, 1]).into_iter().chain(down(back, [1, 1]))
    };
    DType::ALL.into_iter().flat_map(of).collect()
}

/// Widths beyond what is on its way at once, several rows, rows past the end, activations quantised on arrival.
pub fn shapes() -> Vec<Case> {
    use Activations::{F32, Int8};
    let up = |dtype, hidden, k, top, from| GateUp { dtype, hidden, k, top, from, to: F32 };
    let back = |dtype, outputs, k, top, from, epilogue: &[_]| Down {
        dtype,
        outputs,
        k,
        top,
        from,
        epilogue: epilogue.to_vec(),
    };
    let cases = [
        gate_up(up(DType::Q4_0, 3, 3168, 1, F32), [1, 1]),
        gate_up(up(DType::Q8_0, 35, 96, 3, Int8), [3, 2]),
        gate_up(up(DType::F32, 2, 544, 2, F32), [2, 2]),
        down(back(DType::Q8_0, 3, 704, 8, Int8, &[]), [1, 1]),
        down(back(DType::Q5_0, 18, 96, 3, F32, &[then_add::DEF]), [3, 2]),
        down(back(DType::BF16, 17, 96, 8, F32, &[then_add::DEF]), [2, 2]),
    ];
    cases.into_iter().flatten().collect()
}

/// Hidden values that are exact, so that their codes are: a gate of 16, whose GELU is itself, times ups in halves.
pub fn hidden_values_in_int8() -> Case {
    let (hidden, k, top) = (64usize, 96usize, 2usize);
    let mut experts = Experts::random(DType::F32, 2 * hidden, k, top, [2, 1], 2);
    let mut random = Random::new(64);
    let mut integer = |range: u64| random.below(2 * range + 1) as f32 - range as f32;
    experts.x = (0..2 * k).map(|i| if i % k == 0 { 1.0 } else { integer(2) }).collect();
    let mut matrix: Vec<f32> = (0..experts.count * 2 * hidden * k).map(|_| integer(2)).collect();
    let mut expected = Vec::new();
    for (at, row) in matrix.chunks_exact_mut(k).enumerate() {
        let output = at % (2 * hidden);
        // 127 in each group of 32, so that the scale is 16 * 127 / 127.
        let wanted = match output {
            _ if output < hidden => 16.0,
            _ if output % 32 == 7 => 127.0,
            _ => integer(252) / 2.0,
        };
        let rest: f32 = row[1..].iter().zip(&experts.x[1..k]).map(|(w, x)| w * x).sum();
        row[0] = wanted - rest;
        expected.push(16.0 * wanted);
    }
    let bytes = matrix.iter().flat_map(|value| value.to_le_bytes()).collect();
    experts.matrix.streams = vec![(streams(DType::F32)[0], bytes)];
    let of_expert = |expert: &u32| expected[(*expert as usize * 2 + 1) * hidden..][..hidden].to_vec();
    let int8 = Int8::of(&experts.ids.iter().flat_map(of_expert).collect::<Vec<f32>>());

    let from = Activations::F32;
    let gate_up =
        GateUp { dtype: DType::F32, hidden: hidden as u32, k: k as u32, top: top as u32, from, to: Activations::Int8 };
    let pairs = top..2 * top;
    experts
        .fast("64 hidden to int8", gate_up.instance().expect("a shape that fits"), from)
        .grid(gate_up.grid(2))
        .scalar("outputs", gate_up.hidden)
        .expect("leave_xq", int8.codes, Bound::Exact)
        .except(pairs.start * hidden / 4..pairs.end * hidden / 4)
        .expect("leave_xscale", int8.scales, Bound::Exact)
        .except(pairs.start * hidden / 32..pairs.end * hidden / 32)
        .expect("leave_xsum", int8.sums, Bound::Exact)
        .except(pairs.start * hidden / 32..pairs.end * hidden / 32)
}
