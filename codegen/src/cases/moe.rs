//! Cases of the mixture of experts: routing with ties and few experts, alone and as the mixture's entry; the experts'
//! products in every type, alone and with a dense half, for one row and for several, with rows past the end of a chunk.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, F16, Float, U32x4};

use super::matvec::{error_of_sums, random_planes};
use super::quantise::{Int8, activations};
use crate::kernels::matvec::formats::{format, types_with_kernels};
use crate::kernels::moe::Activations;
use crate::kernels::moe::down::Down;
use crate::kernels::moe::gate_up::GateUp;
use crate::kernels::moe::router::Router;
use crate::kernels::outputs::Outputs;
use crate::kernels::planes::Repacked;

pub fn cases() -> Vec<Case> {
    routers().into_iter().chain(entries()).chain(cancelling_entries()).chain(types()).chain(shapes()).collect()
}

// ---- router ---------------------------------------------------------------------------------------------------------

/// Not what the models have, so that one that is baked in would show.
const EPSILON: f32 = 0.02;

/// Shared memory of a block, as all GPUs have it.
const SHARED_BYTES: u32 = 99 << 10;

/// Few experts and many, widths beyond what a warp has in flight, equal logits, one row on several blocks.
pub fn routers() -> Vec<Case> {
    // (width, experts, top, rows in the buffers, rows in the chunk, blocks a row)
    let shapes = [
        (64, 4, 2, 3, 2, 1),
        (1060, 40, 8, 1, 1, 3),
        (96, 128, 8, 2, 2, 1),
        (96, 20, 4, 21, 19, 1),
        (1060, 20, 4, 9, 7, 1),
        (96, 128, 8, 1, 1, 16),
        (96, 20, 4, 7, 6, 3),
        (32, 3, 3, 1, 1, 1),
    ];
    shapes
        .into_iter()
        .map(|(width, experts, top, rows, active, blocks)| {
            routing(Router { epsilon: EPSILON, ..Router::new(width, experts, top) }, rows, active, blocks)
        })
        .collect()
}

/// Routers that end attention's part and write what both halves of the mixture read.
pub fn entries() -> Vec<Case> {
    let of = |width, experts, top, outputs| Router {
        epsilon: EPSILON,
        input_forms: Some(outputs),
        prefetch_record: true,
        max_cluster: 16,
        ..Router::new(width, experts, top)
    };
    let (floats, bf16, int8) = (Outputs::FLOATS, Outputs::BF16, Outputs::INT8);
    vec![
        routing(of(64, 4, 2, int8), 1, 1, 1),
        routing(of(1056, 40, 8, int8.and(floats)), 1, 1, 5),
        routing(of(1056, 40, 8, bf16.and(floats)), 1, 1, 2),
        routing(of(96, 16, 4, bf16.and(int8).and(floats)), 3, 2, 1),
        routing(of(96, 16, 4, bf16.and(floats)), 35, 31, 1),
        routing(of(96, 16, 4, Outputs::F16), 5, 4, 2),
        routing(of(96, 16, 4, int8), 5, 5, 2),
        // Two experts to a warp.
        routing(of(96, 20, 4, bf16), 35, 31, 2),
        routing(of(1056, 40, 8, bf16), 20, 20, 3),
        // Eleven warps, each with whole chunks of a row, in three blocks.
        routing(of(1408, 24, 4, int8.and(floats)), 1, 1, 3),
        routing(of(1408, 24, 4, int8), 2, 2, 3),
    ]
}

/// The same where a channel of the residual is thousands of times the rest, and the update cancels it.
pub fn cancelling_entries() -> Vec<Case> {
    let router = Router { epsilon: EPSILON, input_forms: Some(Outputs::FLOATS), ..Router::new(96, 16, 4) };
    let of = |size, blocks| routing_after(router, 1, 1, blocks, Some(size));
    [5_000.0, 20_000.0, 50_000.0].into_iter().flat_map(|size| [of(size, 1), of(size, 3)]).collect()
}

/// The massive channel.
const MASSIVE: usize = 40;

/// `1 / rms` of a row.
fn inverse_rms(x: &[f32]) -> f64 {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    1.0 / (mean + f64::from(EPSILON)).sqrt()
}

/// What an entry is given and writes besides the routing: `x` are the rows after the residual.
fn entered(
    mut case: Case,
    outputs: Outputs,
    x: &[f32],
    [rows, active, width]: [usize; 3],
    (update, post): (Vec<f32>, Vec<f32>),
    close: Bound,
    random: &mut Random,
) -> Case {
    let unwritten = |per: usize| active * width / per..rows * width / per;
    case = case.buffer("rows_update", update).buffer("norms_post", post);
    case = case.expect("residual", x.to_vec(), close).except(unwritten(1));
    for half in ["dense", "expert"] {
        let norm = random.floats(width, 0.5, 1.5);
        let of_row = |x: &[f32]| -> Vec<f32> {
            let factor = inverse_rms(x);
            x.iter().zip(&norm).map(|(x, norm)| (f64::from(*x) * factor * f64::from(*norm)) as f32).collect()
        };
        let normed: Vec<f32> = x.chunks_exact(width).flat_map(of_row).collect();
        case = case.buffer(&format!("norms_{half}"), norm);
        let name = |form: &str| format!("{half}_out_{form}");
        case = match outputs.floats {
            true => case.expect(&name("floats"), normed.clone(), close).except(unwritten(1)),
            false => case.buffer(&name("floats"), Vec::<f32>::new()),
        };
        case = match outputs.bf16 {
            true => {
                let rounded: Vec<BF16> = normed.iter().map(|x| BF16::from_f32(*x)).collect();
                let near = Bound::Within { absolute: 1e-3, relative: 0.01 };
                case.expect(&name("rounded"), rounded, near).except(unwritten(1))
            }
            false => case.buffer(&name("rounded"), Vec::<BF16>::new()),
        };
        case = match outputs.f16 {
            true => {
                let halves: Vec<F16> = normed.iter().map(|x| F16::from_f32(*x)).collect();
                let near = Bound::Within { absolute: 1e-3, relative: 0.01 };
                case.expect(&name("halves"), halves, near).except(unwritten(1))
            }
            false => case.buffer(&name("halves"), Vec::<F16>::new()),
        };
        case = match outputs.int8 {
            true => {
                let int8 = Int8::of(&normed);
                let codes: Vec<i8> = (0..normed.len()).map(|i| int8.code(i)).collect();
                // A value beside a tie may go either way.
                let one = Bound::Within { absolute: 1.0, relative: 0.0 };
                case.expect(&name("codes"), codes, one)
                    .except(unwritten(1))
                    .expect(&name("scales"), int8.scales, close)
                    .except(unwritten(32))
                    .expect(&name("sums"), int8.sums, Bound::Within { absolute: 3.0, relative: 0.0 })
                    .except(unwritten(32))
            }
            false => {
                let case = case.buffer(&name("codes"), Vec::<i8>::new()).buffer(&name("scales"), Vec::<f32>::new());
                case.buffer(&name("sums"), Vec::<i32>::new())
            }
        };
    }
    case
}

/// The parameters of a router that is no entry.
fn without_entry(mut case: Case) -> Case {
    for floats in ["norms_post", "norms_dense", "norms_expert", "rows_update", "residual"] {
        case = case.buffer(floats, Vec::<f32>::new());
    }
    for half in ["dense", "expert"] {
        case = case.buffer(&format!("{half}_out_floats"), Vec::<f32>::new());
        case = case.buffer(&format!("{half}_out_rounded"), Vec::<BF16>::new());
        case = case.buffer(&format!("{half}_out_halves"), Vec::<F16>::new());
        case = case.buffer(&format!("{half}_out_codes"), Vec::<i8>::new());
        case = case.buffer(&format!("{half}_out_scales"), Vec::<f32>::new());
        case = case.buffer(&format!("{half}_out_sums"), Vec::<i32>::new());
    }
    case
}

fn routing(router: Router, rows: usize, active: usize, blocks: u32) -> Case {
    routing_after(router, rows, active, blocks, None)
}

/// `massive`: the size of a channel that comes with the first row and that the update cancels.
fn routing_after(router: Router, rows: usize, active: usize, blocks: u32, massive: Option<f32>) -> Case {
    // Blocks are clusters where there are as many as the router asks for.
    let router =
        Router { max_cluster: if blocks == router.cluster_blocks() { router.max_cluster } else { 1 }, ..router };
    let (width, experts, top) = (router.width as usize, router.experts as usize, router.top as usize);
    let mut random = Random::new((width * experts) as u64);
    let mut matrix = random.floats(experts * width, -1.0, 1.0);
    // The last expert is the first one again: wherever they are chosen, the lower comes first.
    matrix.copy_within(0..width, (experts - 1) * width);
    let mut scale = random.floats(width, 0.5, 30.0);
    let mut x = random.floats(rows * width, -3.0, 3.0);
    // The first row points where the twins do, so that both are chosen.
    for i in 0..width {
        x[i] = matrix[i] / scale[i];
    }
    // What is routed: the rows, or their sum with a normed update.
    let mut update = random.floats(rows * width, -2.0, 2.0);
    let mut post = random.floats(width, 0.5, 1.5);
    if let Some(size) = massive {
        (update[MASSIVE], post[MASSIVE], scale[MASSIVE]) = (9.0, size / 4.0, 1.0);
        x[MASSIVE] -= (f64::from(update[MASSIVE]) * inverse_rms(&update[..width]) * f64::from(post[MASSIVE])) as f32;
    }
    let given = x.clone();
    if router.input_forms.is_some() {
        for (x, update) in x.chunks_exact_mut(width).zip(update.chunks_exact(width)) {
            let factor = inverse_rms(update);
            for i in 0..width {
                x[i] = (f64::from(x[i]) + f64::from(update[i]) * factor * f64::from(post[i])) as f32;
            }
        }
    }

    let (mut logits, mut ids, mut weights) =
        (vec![0.0f32; rows * experts], vec![0u32; rows * top], vec![0.0; rows * top]);
    for (row, x) in x.chunks_exact(width).enumerate().take(active) {
        let factor = inverse_rms(x) / (width as f64).sqrt();
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

    // Beside what sums of f32 are off by, what an f32 as large as the massive channel is.
    let off = 2e-5 + massive.unwrap_or(0.0) * 2e-7;
    let close = Bound::Within { absolute: off, relative: off };
    // So many that all blocks may be clusters; or so few that a block has four rows, where there are so many, and a warp
    // two experts, where there are more.
    let all_blocks = rows as u32 * router.split_blocks();
    let multiprocessors = match router.max_cluster {
        1 => all_blocks.div_ceil(if rows > 16 { 16 } else { 4 }),
        _ => all_blocks * 2,
    };
    let (name, instance, grid) = match blocks {
        1 => {
            let tile = router.many_rows(rows as u32, 1, SHARED_BYTES);
            ("", router.instance(tile), [(rows as u32).div_ceil(tile), 1, 1])
        }
        _ => {
            let instance = router.split_instance(rows as u32, multiprocessors);
            (
                if router.max_cluster > 1 { "cluster, " } else { "split, " },
                instance,
                [(rows as u32).div_ceil(router.split_rows(rows as u32, multiprocessors)), blocks, 1],
            )
        }
    };
    let mut name = format!("{name}{top} of {experts} experts, {active} of {rows} rows of {width}, {blocks} blocks");
    if let Some(size) = massive {
        name += &format!(", a channel of {size} cancelled");
    }
    let mut case = Case::new(name, instance.expect("any router fits"))
        .grid(grid)
        .buffer("router", matrix)
        .buffer("norms_scale", scale)
        .buffer("rows_x", given)
        .buffer("rows_state", vec![0, active as u32, 0])
        .buffer("routing_logits", vec![0.0f32; rows * experts])
        .expect("routing_logits", logits, close);
    if blocks == 0 {
        case = case.buffer("routing_ids", vec![0u32; rows * top]).buffer("routing_shares", vec![0.0f32; rows * top]);
    } else {
        let counters = vec![0u32; grid[0] as usize];
        case = case.buffer("routing_counter", counters.clone()).expect("routing_counter", counters, Bound::Exact);
        case = match router.input_forms {
            Some(outputs) => entered(case, outputs, &x, [rows, active, width], (update, post), close, &mut random),
            None => without_entry(case),
        };
    }
    let unwritten = active * top..rows * top;
    let case = case.expect("routing_ids", ids, Bound::Exact).except(unwritten.clone());
    case.expect("routing_shares", weights, close).except(unwritten)
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
    fn random(dtype: DType, height: usize, k: usize, top: usize, rows: [usize; 2], vectors: usize) -> Self {
        Self::of(3 + top, dtype, height, k, top, rows, vectors)
    }

    /// One matrix that every row goes to.
    fn dense(dtype: DType, height: usize, k: usize, rows: [usize; 2]) -> Self {
        Self::of(1, dtype, height, k, 1, rows, rows[0])
    }

    fn of(
        count: usize,
        dtype: DType,
        height: usize,
        k: usize,
        top: usize,
        [rows, active]: [usize; 2],
        vectors: usize,
    ) -> Self {
        let planes = random_planes(dtype, count * height, k, (height * k) as u64 + dtype as u64);
        let matrix = Repacked { dtype, rows: count * height, k, planes };
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

    /// The activations of a first product, by the slot they come through.
    fn arriving(&self, case: Case, slot: &str, from: Activations) -> Case {
        let int8 = Int8::of(&self.x);
        let name = |what: &str| format!("{slot}_{what}");
        match from {
            Activations::F32 => case.buffer(&name("x"), self.x.clone()),
            Activations::Int8 => case
                .buffer(&name("xq"), int8.codes)
                .buffer(&name("xscale"), int8.scales)
                .buffer(&name("xsum"), int8.sums),
        }
    }

    /// The weights as the dense half's.
    fn beside(&self, mut case: Case) -> Case {
        for (plane, bytes) in &self.matrix.planes {
            let side = format!("dense_side_{}", plane.name);
            let param = if plane.name == "codes" { "codes_dense" } else { side.as_str() };
            case = case.buffer(param, Data::new(plane.element(), bytes.clone()));
        }
        case
    }

    /// Everything but the activations; `ids` is what the kernel calls the choice.
    fn weights(&self, name: &str, ids: &str, instance: gemma4c_dsl::Instance) -> Case {
        let Self { matrix, count, top, rows, active, .. } = self;
        let name =
            format!("{name}, {}, {top} of {count} experts, {active} of {rows} rows of {}", matrix.dtype, matrix.k);
        let mut case = Case::new(name, instance);
        for (plane, bytes) in &matrix.planes {
            let param = if plane.name == "codes" { "codes_experts".to_owned() } else { format!("side_{}", plane.name) };
            case = case.buffer(&param, Data::new(plane.element(), bytes.clone()));
        }
        case.buffer(ids, self.ids.clone()).buffer("state", vec![0, *active as u32, 0])
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// `gelu(gate) * up` of each pair of a row and a choice, and how exact it can be.
fn gated(experts: &Experts, hidden: usize) -> (Vec<f32>, Bound) {
    let Experts { top, rows, active, .. } = *experts;
    let mut expected = vec![0.0f32; rows * top * hidden];
    let (mut size, mut largest) = (0.0f64, 1.0f64);
    for (pair, expert) in experts.ids.iter().enumerate().take(active * top) {
        for output in 0..hidden {
            let (gate, gate_size) = experts.product(*expert, output, pair / top);
            let (up, up_size) = experts.product(*expert, hidden + output, pair / top);
            expected[pair * hidden + output] = (gelu(gate) * up) as f32;
            size = size.max(gate_size).max(up_size);
            largest = largest.max(gate.abs()).max(up.abs());
        }
    }
    // The gate's error is multiplied by up, and up's by the gate.
    let error = 2.0 * error_of_sums(experts.matrix.dtype);
    (expected, Bound::Within { absolute: (size * error * largest) as f32, relative: 1e-5 })
}

pub(super) fn gate_up(gate_up: GateUp, rows: [usize; 2]) -> Case {
    let (hidden, top, dense) = (gate_up.hidden as usize, gate_up.top as usize, gate_up.dense as usize);
    let experts = Experts::random(gate_up.dtype, 2 * hidden, gate_up.k as usize, top, rows, rows[0]);
    let (expected, bound) = gated(&experts, hidden);
    let unwritten = rows[1] * top * hidden..rows[0] * top * hidden;
    let name = format!("{hidden} hidden from {:?}, {dense} beside", gate_up.from);
    let case = experts.weights(&name, "ids", gate_up.instance().expect("a shape that fits"));
    let case = experts.arriving(case, "arrive", gate_up.from).grid(gate_up.grid(rows[0] as u32));
    let case = match dense {
        0 => case.buffer("codes_dense", Vec::<U32x4>::new()).buffer("dense_out", Vec::<f32>::new()),
        _ => {
            let half = Experts::dense(gate_up.dtype, 2 * dense, gate_up.k as usize, rows);
            let (expected, bound) = gated(&half, dense);
            let case = half.arriving(half.beside(case), "dense_arrive", gate_up.from);
            case.expect("dense_out", expected, bound).except(rows[1] * dense..rows[0] * dense)
        }
    };
    case.expect("out", expected, bound).except(unwritten)
}

pub(super) fn down(down: Down, rows: [usize; 2]) -> Case {
    let (outputs, top, dense) = (down.outputs as usize, down.top as usize, down.dense as usize);
    let experts = Experts::random(down.dtype, outputs, down.k as usize, top, rows, rows[0] * top);
    let mut random = Random::new(outputs as u64);
    let shares = random.floats(rows[0] * top, 0.05, 0.5);
    let scales = random.floats(experts.count, 0.5, 1.5);
    let mut expected = vec![0.0f32; rows[0] * outputs];
    let mut size = 0.0f64;
    for row in 0..rows[1] {
        for output in 0..outputs {
            let (mut sum, mut sum_size) = (0.0, 0.0);
            for j in row * top..(row + 1) * top {
                let (product, product_size) = experts.product(experts.ids[j], output, j);
                let factor = f64::from(shares[j]) * f64::from(scales[experts.ids[j] as usize]);
                (sum, sum_size) = (sum + factor * product, sum_size + factor * product_size);
            }
            expected[row * outputs + output] = sum as f32;
            size = size.max(sum_size);
        }
    }
    let error = error_of_sums(experts.matrix.dtype);
    let bound = |size: f64| Bound::Within { absolute: (size * error) as f32, relative: 1e-5 };
    let unwritten = rows[1] * outputs..rows[0] * outputs;
    let name = format!("{outputs} outputs, {dense} beside");
    let case = experts.weights(&name, "choice_ids", down.instance(rows[0] as u32).expect("a shape that fits"));
    let case = case.buffer("x", experts.x.clone()).grid(down.grid(rows[0] as u32));
    let case = match dense {
        0 => case
            .buffer("codes_dense", Vec::<U32x4>::new())
            .buffer("dense_x", Vec::<f32>::new())
            .buffer("dense_out", Vec::<f32>::new()),
        _ => {
            let half = Experts::dense(down.dtype, outputs, dense, rows);
            let of = |at: usize| half.product(0, at % outputs, at / outputs);
            let products: Vec<(f64, f64)> = (0..rows[0] * outputs).map(of).collect();
            let size = products.iter().fold(0.0, |size: f64, (_, of)| size.max(*of));
            half.beside(case)
                .buffer("dense_x", half.x.clone())
                .expect("dense_out", products.iter().map(|(sum, _)| *sum as f32).collect::<Vec<_>>(), bound(size))
                .except(unwritten.clone())
        }
    };
    let case = case.buffer("choice_shares", shares).buffer("choice_scales", scales);
    case.scalar("outputs", down.outputs).expect("out", expected, bound(size)).except(unwritten)
}

/// Every type: gate and up, and down, with a dense half.
pub fn types() -> Vec<Case> {
    let of = |dtype: DType| {
        let from = if format(dtype).integer { Activations::Int8 } else { Activations::F32 };
        let up =
            GateUp { dtype, hidden: 5, k: 256, top: 2, from, dense: 7, prefetch_record: true, multiprocessors: 132 };
        let back = Down { dtype, outputs: 18, k: 256, top: 2, dense: 256, prefetch_choice: true, multiprocessors: 132 };
        [gate_up(up, [1, 1]), down(back, [1, 1])]
    };
    types_with_kernels().flat_map(of).collect()
}

/// Widths beyond what is in flight at once, more outputs than warps, several rows, rows past the end, activations
/// quantised on arrival.
pub fn shapes() -> Vec<Case> {
    use Activations::{F32, Int8};
    let up = |dtype, hidden, k, top, from, dense| GateUp {
        dtype,
        hidden,
        k,
        top,
        from,
        dense,
        prefetch_record: false,
        multiprocessors: 132,
    };
    let back = |dtype, outputs, k, top, dense| Down {
        dtype,
        outputs,
        k,
        top,
        dense,
        prefetch_choice: false,
        multiprocessors: 132,
    };
    vec![
        gate_up(up(DType::Q4_0, 3, 3168, 1, F32, 0), [1, 1]),
        gate_up(up(DType::Q8_0, 35, 96, 3, Int8, 40), [3, 2]),
        gate_up(up(DType::Q8_0, 1400, 32, 2, F32, 300), [1, 1]),
        gate_up(up(DType::F32, 2, 544, 2, F32, 0), [2, 2]),
        down(back(DType::Q8_0, 3, 704, 8, 0), [1, 1]),
        down(back(DType::Q5_0, 18, 96, 3, 32), [3, 2]),
        down(back(DType::Q4_0, 2000, 32, 2, 64), [1, 1]),
        down(back(DType::BF16, 17, 96, 8, 64), [2, 2]),
        // The loads before the wait, for a row that is not there, too.
        down(Down { prefetch_choice: true, ..back(DType::Q8_0, 40, 704, 2, 2112) }, [2, 1]),
    ]
}
