//! Cases of products in one launch: a layer's, by one block, which exchanges vectors with itself; and by several, which the host's text cannot
//! run (it has one copy of shared memory), so that they are for the simulator and a GPU.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Random};

use super::matvec::{gelu, oracle, random_planes, rms_norm, rounded};
use super::quantise::{Int8, activations};
use crate::kernels::NORM_EPSILON;
use crate::kernels::planes::Repacked;
use crate::kernels::run::list::{Arrives, COUNTER_WORDS, Leaves, Op, Run, RunShape};

/// All weights of a run, as they lie in memory.
#[derive(Default)]
struct Weights {
    bytes: Vec<u8>,
}

impl Weights {
    fn place(&mut self, bytes: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(256), 0);
        self.bytes.extend_from_slice(bytes);
        (self.bytes.len() - bytes.len()) as u64
    }

    fn floats(&mut self, values: &[f32]) -> u64 {
        self.place(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// A matrix of random planes, and its offsets.
    fn matrix(&mut self, dtype: DType, rows: usize, k: usize, seed: u64) -> (Repacked, [u64; 2]) {
        let planes = random_planes(dtype, rows, k, seed);
        let at = [0, 1].map(|plane| self.place(&planes[plane].1));
        (Repacked { dtype, rows, k, planes }, at)
    }
}

/// A layer of an E model: from attention's result to the next layer's queries, keys and values. Widths leave warps and teams over.
pub fn layer(dtype: DType, blocks: u32) -> Case {
    const WIDTH: usize = 160;
    const MIXED: usize = 96;
    const HIDDEN: usize = 224;
    const INPUTS: usize = 32;
    const HEADS: usize = 77;
    let (mut all, mut random) = (Weights::default(), Random::new(dtype as u64 + 5));
    let mut norm = |all: &mut Weights| {
        let weights = random.floats(WIDTH, 0.5, 1.5);
        (all.floats(&weights), weights)
    };
    let (out, out_at) = all.matrix(dtype, WIDTH, MIXED, 1);
    let (gate_up, gate_up_at) = all.matrix(dtype, 2 * HIDDEN, WIDTH, 2);
    let (down, down_at) = all.matrix(dtype, WIDTH, HIDDEN, 3);
    let (gate, gate_at) = all.matrix(dtype, INPUTS, WIDTH, 4);
    let (projection, projection_at) = all.matrix(dtype, WIDTH, INPUTS, 5);
    let (heads, heads_at) = all.matrix(dtype, HEADS, WIDTH, 6);
    let (posts, nexts) = ([norm(&mut all), norm(&mut all), norm(&mut all)], [norm(&mut all), norm(&mut all)]);
    let scale = all.floats(&[0.75]);
    let op = |arrives, leaves, k: usize, outputs: usize, at: [u64; 2]| Op {
        arrives,
        leaves,
        k: k as u32,
        outputs: outputs as u32,
        codes: at[0],
        scales: at[1],
        leaves_residual: false,
    };
    let normed =
        |number: usize, post: usize, scale| Arrives::Norm { post: posts[post].0, next: nexts[number].0, scale };
    let run = Run {
        dtype,
        width: WIDTH as u32,
        epsilon: NORM_EPSILON,
        ops: vec![
            op(Arrives::Int8, Leaves::Floats, MIXED, WIDTH, out_at),
            op(normed(0, 0, None), Leaves::Codes, WIDTH, HIDDEN, gate_up_at),
            op(Arrives::Codes, Leaves::Floats, HIDDEN, WIDTH, down_at),
            op(Arrives::Residual { post: posts[1].0, scale: None }, Leaves::Gated, WIDTH, INPUTS, gate_at),
            op(Arrives::Floats, Leaves::Floats, INPUTS, WIDTH, projection_at),
            Op { leaves_residual: true, ..op(normed(1, 2, Some(scale)), Leaves::Memory, WIDTH, HEADS, heads_at) },
        ],
        multiprocessors: blocks,
        shared_bytes: 64 << 10,
    };
    let shape = RunShape { blocks, stages: 8, stage_words: 1024, ahead: 2 };

    let (mixed, x) = (activations(MIXED, 7), activations(WIDTH, 8));
    let by = Random::new(9).floats(INPUTS, -2.0, 2.0);
    let product = |matrix: &Repacked, x: &[f32], unbounded: bool| -> Vec<f32> {
        oracle(matrix, &rounded(dtype, x, unbounded)).into_iter().map(|(value, _)| value as f32).collect()
    };
    let add = |x: &[f32], update: &[f32], post: usize, scale: f32| -> Vec<f32> {
        let update = rms_norm(update, &posts[post].1, NORM_EPSILON);
        x.iter().zip(update).map(|(x, update)| (x + update) * scale).collect()
    };
    let first = add(&x, &product(&out, &mixed, false), 0, 1.0);
    let both = product(&gate_up, &rms_norm(&first, &nexts[0].1, NORM_EPSILON), false);
    let join = |(gate, up): (&f32, &f32)| (gelu(f64::from(*gate)) * f64::from(*up)) as f32;
    let hidden: Vec<f32> = both[..HIDDEN].iter().zip(&both[HIDDEN..]).map(join).collect();
    let second = add(&first, &product(&down, &hidden, false), 1, 1.0);
    let gated: Vec<f32> = product(&gate, &second, true).iter().zip(&by).map(|(gate, by)| join((gate, by))).collect();
    let third = add(&second, &product(&projection, &gated, false), 2, 0.75);
    let expected = product(&heads, &rms_norm(&third, &nexts[1].1, NORM_EPSILON), false);

    let words: Vec<u32> =
        all.bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
    let floats: Vec<f32> = words.iter().map(|word| f32::from_bits(*word)).collect();
    let int8 = Int8::of(&mixed);
    let codes: Vec<u32> = int8.codes;
    let list = run.list(shape);
    let instance = run.instance(shape).expect("a run of small products");
    // A code that rounds the other way is a 127th of its group's largest value; there are few of them.
    let size = expected.iter().map(|value| value.abs()).fold(0.0, f32::max);
    let close = |size: f32| Bound::Within { absolute: size * 0.02, relative: 0.0 };
    Case::new(format!("{dtype}, a layer of six products, {blocks} blocks"), instance)
        .grid([blocks, 1, 1])
        .buffer("list", list)
        .buffer("weights", words)
        .buffer("floats", floats)
        .buffer("xq", codes)
        .buffer("xscale", int8.scales)
        .buffer("xsum", int8.sums)
        .buffer("x", x)
        .buffer("by", by)
        .buffer("exchange", vec![0u32; run.exchange_words() as usize])
        .buffer("counters", vec![0u32; COUNTER_WORDS as usize])
        .scalar("ops", run.ops.len() as u32)
        .scalar("run", 0u32)
        .scalar("runs", 1u32)
        .expect("residual", third.clone(), close(third.iter().map(|value| value.abs()).fold(0.0, f32::max)))
        .expect("out", expected, close(size))
}

pub fn cases() -> Vec<Case> {
    [DType::Q8_0, DType::Q4_0, DType::Q4_1].map(|dtype| layer(dtype, 1)).into()
}

/// The same by several blocks: not for the host's text.
pub fn of_several_blocks() -> Vec<Case> {
    [(DType::Q8_0, 3), (DType::Q4_0, 2)].map(|(dtype, blocks)| layer(dtype, blocks)).into()
}
