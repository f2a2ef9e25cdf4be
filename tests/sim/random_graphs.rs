//! Random small graphs, with passes switched on and off at random: the launches that come out compute what the graph
//! means.
//!
//! The graphs are made of the blocks that models have, but in any order, number and mixture of types, with intermediate
//! values read once or several times: what the passes merge, refuse, cut and recompute is what they were not written
//! for. The meaning is the graph's own, node by node in f32 on the CPU. More graphs: `PROPTEST_CASES=200`.

use std::io::Write;

use crate::common::Place;
use crate::simulated::{Distance, Feed};
use gemma4c::simulate;
use gemma4c_blocks::DType;
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_codegen::cuda::simulate::Simulator;
use gemma4c_codegen::cuda::{self, LowerError, Options, SoftTokens};
use gemma4c_codegen::passes::optional;
use gemma4c_codegen::target::Target;
use gemma4c_graph::{Builder, Cache, Graph, Part, Value, WeightId};
use gemma4c_plan::cuda::{Code, Cuda, Image, KvType};
use gemma4c_plan::fingerprint::{FileBytes, fingerprint};
use gemma4c_plan::{Model, ModelFile, Plan, Sampling, Target as For, Weight};
use gemma4c_runtime::{Asked, ModelLocation, Session};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const WIDTH: u32 = 64;
const VOCABULARY: u32 = 96;
const CONTEXT: u32 = 64;
const CHUNK: u32 = 4;
const HEAD_DIM: u32 = 256;
const EPS: f32 = 1e-6;

/// What a layer adds to the residual.
#[derive(Clone, Debug)]
enum Block {
    /// Products of one value, multiplied or added together; the last may have an epilogue.
    Products {
        types: Vec<DType>,
        multiply: bool,
        epilogue: u8,
    },
    /// `down(gelu(gate) * up)`; the gate may be read once more.
    Gated {
        gate: DType,
        up: DType,
        down: DType,
        read_again: bool,
    },
    /// A gate by a slice of a wider product, and a projection.
    Slice {
        dtype: DType,
        first: bool,
    },
    Attention {
        types: Vec<DType>,
        kv_heads: u32,
        group: u32,
        window: Option<u32>,
        keys_are_values: bool,
    },
    /// All experts are chosen, so that rounding changes no choice.
    Experts {
        dtype: DType,
        dense: Option<DType>,
        stacked: bool,
    },
}

#[derive(Clone, Debug)]
struct Layer {
    block: Block,
    /// The norm before it: none, without weights, with.
    before: u8,
    after: bool,
    scaled: bool,
}

#[derive(Clone, Debug)]
struct Recipe {
    layers: Vec<Layer>,
    disabled: Vec<bool>,
    kv: KvType,
    softcap: bool,
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::Q8_0, DType::Q4_0, DType::Q4_0, DType::BF16, DType::F32])
}

fn block() -> impl Strategy<Value = Block> {
    let types = |count| prop::collection::vec(dtype(), count);
    prop_oneof![
        (types(1..4), any::<bool>(), 0u8..4).prop_map(|(types, multiply, epilogue)| Block::Products {
            types,
            multiply,
            epilogue
        }),
        (dtype(), any::<bool>(), dtype(), any::<bool>()).prop_map(|(gate, same, down, again)| {
            let up = if same { gate } else { DType::Q8_0 };
            Block::Gated { gate, up, down, read_again: again && !same }
        }),
        (dtype(), any::<bool>()).prop_map(|(dtype, first)| Block::Slice { dtype, first }),
        (types(4..5), 1u32..3, 1u32..3, any::<bool>(), any::<bool>()).prop_map(
            |(types, kv_heads, group, window, keys_are_values)| {
                let window = window.then_some(3);
                Block::Attention { types, kv_heads, group, window, keys_are_values }
            }
        ),
        (dtype(), prop::option::of(dtype()), any::<bool>()).prop_map(|(dtype, dense, stacked)| Block::Experts {
            dtype,
            dense,
            stacked
        }),
    ]
}

fn recipe() -> impl Strategy<Value = Recipe> {
    let layer = (block(), 0u8..3, any::<bool>(), any::<bool>()).prop_map(|(block, before, after, scaled)| Layer {
        block,
        before,
        after,
        scaled,
    });
    let disabled = prop::collection::vec(prop::bool::weighted(0.25), optional().count());
    let kv = prop::sample::select(vec![KvType::F16, KvType::BF16, KvType::F32]);
    (prop::collection::vec(layer, 1..4), disabled, kv, any::<bool>())
        .prop_map(|(layers, disabled, kv, softcap)| Recipe { layers, disabled, kv, softcap })
}

/// A builder that names every node, and makes up weights.
struct Maker {
    g: Builder,
    weights: u32,
    nodes: u32,
}

impl Maker {
    fn weight(&mut self, dtype: DType, dims: &[u64]) -> WeightId {
        self.weights += 1;
        self.g.weight(&format!("w{}", self.weights), dtype, dims)
    }

    fn node(&mut self, make: impl FnOnce(&mut Builder) -> Value) -> Value {
        self.nodes += 1;
        let mark = self.g.mark();
        let value = make(&mut self.g);
        self.g.bind(mark, &format!("n{}", self.nodes), 0);
        value
    }

    fn matmul(&mut self, x: Value, dtype: DType, outputs: u32) -> Value {
        let k = self.g.width(x) as u64;
        let weight = self.weight(dtype, &[k, outputs as u64]);
        self.node(|g| g.matmul(weight, x))
    }

    fn norm(&mut self, x: Value, weighted: bool) -> Value {
        let width = self.g.width(x) as u64;
        let weight = weighted.then(|| self.weight(DType::F32, &[width]));
        self.node(|g| g.rms_norm(x, weight, EPS))
    }

    fn heads(&mut self, x: Value, weighted: bool) -> Value {
        let weight = weighted.then(|| self.weight(DType::F32, &[HEAD_DIM as u64]));
        self.node(|g| g.group_norm(x, weight, HEAD_DIM, EPS))
    }

    fn gated(&mut self, x: Value, gate: DType, up: DType, hidden: u32) -> (Value, Value) {
        let gate = self.matmul(x, gate, hidden);
        let up = self.matmul(x, up, hidden);
        let activated = self.node(|g| g.gelu(gate));
        (self.node(|g| g.mul(activated, up)), gate)
    }

    /// What a block makes of normed rows `x` of the residual `h`.
    fn block(&mut self, block: &Block, layer: u32, h: Value, x: Value) -> Value {
        match block {
            Block::Products { types, multiply, epilogue } => {
                let mut parts: Vec<Value> = types.iter().map(|dtype| self.matmul(x, *dtype, WIDTH)).collect();
                let last = parts.pop().expect("one product at least");
                let last = match epilogue {
                    1 => self.node(|g| g.scale(last, 0.5)),
                    2 => self.node(|g| g.gelu(last)),
                    3 => self.node(|g| g.softcap(last, 2.0)),
                    _ => last,
                };
                parts.into_iter().fold(last, |all, part| match multiply {
                    true => self.node(|g| g.mul(all, part)),
                    false => self.node(|g| g.add(all, part)),
                })
            }
            Block::Gated { gate, up, down, read_again } => {
                let (product, gate) = self.gated(x, *gate, *up, 96);
                let out = self.matmul(product, *down, WIDTH);
                match read_again {
                    true => {
                        let again = self.matmul(gate, *down, WIDTH);
                        self.node(|g| g.add(out, again))
                    }
                    false => out,
                }
            }
            Block::Slice { dtype, first } => {
                let wide = self.matmul(h, DType::BF16, 2 * 32);
                let gate = self.matmul(h, *dtype, 32);
                let activated = self.node(|g| g.gelu(gate));
                let own = self.node(|g| g.columns(wide, if *first { 0 } else { 32 }, 32));
                let product = self.node(|g| g.mul(activated, own));
                self.matmul(product, *dtype, WIDTH)
            }
            Block::Attention { types, kv_heads, group, window, keys_are_values } => {
                let (heads, kv_heads, window) = (kv_heads * group, *kv_heads, *window);
                let cache = self.g.cache(Cache { layer, kv_heads, head_dim: HEAD_DIM, window });
                let q_raw = self.matmul(x, types[0], heads * HEAD_DIM);
                let k_raw = self.matmul(x, types[1], kv_heads * HEAD_DIM);
                let v_raw = if *keys_are_values { k_raw } else { self.matmul(x, types[2], kv_heads * HEAD_DIM) };
                let (q, k, v) = (self.heads(q_raw, true), self.heads(k_raw, true), self.heads(v_raw, false));
                let q = self.node(|g| g.rope(q, HEAD_DIM, 1e4, None));
                let k = self.node(|g| g.rope(k, HEAD_DIM, 1e4, None));
                let kv = self.node(|g| g.kv_append(cache, k, v));
                let mixed = self.node(|g| g.attention(q, kv, heads));
                self.matmul(mixed, types[3], WIDTH)
            }
            Block::Experts { dtype, dense, stacked } => self.experts(h, x, *dtype, *dense, *stacked),
        }
    }

    fn experts(&mut self, h: Value, x: Value, dtype: DType, dense: Option<DType>, stacked: bool) -> Value {
        let (count, hidden) = (4u32, 64u32);
        let dense = dense.map(|dtype| {
            let (product, _) = self.gated(x, dtype, dtype, 96);
            let out = self.matmul(product, dtype, WIDTH);
            self.norm(out, true)
        });
        let normed = self.norm(h, false);
        let scale = self.weight(DType::F32, &[WIDTH as u64]);
        let weighted = self.node(|g| g.mul_weight(normed, scale));
        let scaled = self.node(|g| g.scale(weighted, (WIDTH as f32).powf(-0.5)));
        let logits = self.matmul(scaled, DType::F32, count);
        let routing = self.node(|g| g.route(logits, count));
        let input = self.norm(h, true);
        let (k, n, e) = (WIDTH as u64, hidden as u64, count as u64);
        let first = Part { first: 0, len: hidden };
        let (gate, up) = if stacked {
            let both = self.weight(dtype, &[k, 2 * n, e]);
            ((both, first), (both, Part { first: hidden, len: hidden }))
        } else {
            ((self.weight(dtype, &[k, n, e]), first), (self.weight(dtype, &[k, n, e]), first))
        };
        let gate = self.node(|g| g.expert_matmul(gate.0, gate.1, input, routing));
        let up = self.node(|g| g.expert_matmul(up.0, up.1, input, routing));
        let activated = self.node(|g| g.gelu(gate));
        let product = self.node(|g| g.mul(activated, up));
        let down = self.weight(dtype, &[n, k, e]);
        let down = self.node(|g| g.expert_matmul(down, Part { first: 0, len: WIDTH }, product, routing));
        let factors = self.weight(DType::F32, &[e]);
        let sum = self.node(|g| g.expert_sum(down, routing, Some(factors)));
        match dense {
            Some(dense) => {
                let sum = self.norm(sum, true);
                self.node(|g| g.add(dense, sum))
            }
            None => sum,
        }
    }
}

fn graph(recipe: &Recipe) -> Graph {
    let mut m = Maker { g: Builder::new(), weights: 0, nodes: 0 };
    let table = m.weight(DType::Q8_0, &[WIDTH as u64, VOCABULARY as u64]);
    let tokens = m.node(|g| g.tokens());
    let rows = m.node(|g| g.gather(table, tokens));
    let mut h = m.node(|g| g.scale(rows, 8.0));
    for (index, layer) in recipe.layers.iter().enumerate() {
        m.g.set_layer(Some(index as u32));
        let x = if layer.before == 0 { h } else { m.norm(h, layer.before == 2) };
        let made = m.block(&layer.block, index as u32, h, x);
        let update = if layer.after { m.norm(made, true) } else { made };
        h = m.node(|g| g.add(h, update));
        if layer.scaled {
            let factor = m.weight(DType::F32, &[1]);
            h = m.node(|g| g.mul_weight(h, factor));
        }
    }
    m.g.set_layer(None);
    let asked = m.node(|g| g.take_asked(h));
    let normed = m.norm(asked, true);
    let mut logits = m.matmul(normed, DType::Q8_0, VOCABULARY);
    if recipe.softcap {
        logits = m.node(|g| g.softcap(logits, 4.0));
    }
    m.g.output(logits);
    m.g.finish().expect("a well-formed graph")
}

/// Splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From -1 to 1.
    fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Bytes of a tensor: matrices keep the size of what they are multiplied by, vectors are about 1.
fn bytes(weight: &gemma4c_graph::Weight, random: &mut Random) -> Vec<u8> {
    let elements: u64 = weight.dims.iter().product();
    let size = 1.7 / (weight.dim(0) as f32).sqrt();
    let value = |random: &mut Random| match weight.dims.len() {
        1 => 1.0 + 0.3 * random.signed(),
        _ => size * random.signed(),
    };
    let half = |value: f32| half::f16::from_f32(value).to_le_bytes();
    match weight.dtype {
        DType::F32 => (0..elements).flat_map(|_| value(random).to_le_bytes()).collect(),
        DType::BF16 => (0..elements).flat_map(|_| half::bf16::from_f32(value(random)).to_le_bytes()).collect(),
        DType::Q8_0 => {
            let block = |random: &mut Random| {
                let codes = (0..32).map(|_| (random.next() % 255) as u8).collect::<Vec<_>>();
                [half(size / 127.0).to_vec(), codes.iter().map(|code| code.wrapping_sub(127)).collect()].concat()
            };
            (0..elements / 32).flat_map(|_| block(random)).collect()
        }
        DType::Q4_0 => {
            let block = |random: &mut Random| {
                [half(size / 8.0).to_vec(), (0..16).map(|_| random.next() as u8).collect()].concat()
            };
            (0..elements / 32).flat_map(|_| block(random)).collect()
        }
        other => unreachable!("{other} is not among the types of a recipe"),
    }
}

/// The logits of a few tokens, by the launches and by the graph's own meaning; and whether activations were rounded.
fn compare(recipe: &Recipe) -> Result<(), String> {
    let graph = graph(recipe);
    let mut random = Random(7);
    let tensors: Vec<Vec<u8>> = graph.weights.iter().map(|weight| bytes(weight, &mut random)).collect();
    let names: Vec<&str> = optional().collect();
    let disabled: Vec<String> =
        names.iter().zip(&recipe.disabled).filter(|(_, off)| **off).map(|(name, _)| name.to_string()).collect();
    let rounded = !disabled.iter().any(|name| name == "int8") || recipe.kv != KvType::F32;

    let limits = Limits { context: CONTEXT, chunk: CHUNK, asked: 1, kv: recipe.kv };
    let program = cpu::lower(&graph, limits).map_err(|e| e.to_string())?;
    // So few SMs that warps have several rounds, and the simulator little to do.
    let target = Target { multiprocessors: 2, ..Target::find("h200").expect("a GPU of the table").clone() };
    let (sequences, snapshots, kv) = (1, Some(0), recipe.kv);
    let verified = 1;
    let options =
        Options { verified, context: CONTEXT, chunk: CHUNK, kv, sequences, snapshots, target, vram: None, disabled };
    let read = |id: WeightId| -> Result<Vec<f32>, LowerError> {
        Ok(tensors[id.index()].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let lowered = cuda::lower(
        cuda::Model {
            graph: &graph,
            meaning: &program,
            weights: &graph.weights,
            soft: SoftTokens::NONE,
            drafter: None,
        },
        &options,
        &read,
    )
    .map_err(|error| format!("no launches: {error}"))?;

    let place = Place::new();
    let all = tensors.concat();
    std::fs::write(place.path("weights.bin"), &all).expect("a file of weights");
    let starts = tensors.iter().scan(0u64, |next, tensor| {
        let start = *next;
        *next += tensor.len() as u64;
        Some(start)
    });
    let weights: Vec<Weight> = std::iter::zip(&graph.weights, starts.zip(&tensors))
        .map(|(weight, (offset, tensor))| Weight {
            name: weight.name.clone(),
            dtype: weight.dtype,
            dims: weight.dims.clone(),
            file: 0,
            offset,
            bytes: tensor.len() as u64,
            pieces: vec![],
        })
        .collect();
    let spans = weights.iter().map(|weight| (0, weight.offset, weight.bytes));
    let fingerprint = fingerprint(&[FileBytes { bytes: &all, header_len: 0 }], spans).expect("a whole file");
    let code = vec![Code { source: "// not compiled\n".into(), image: Image(vec![0]) }; lowered.program.kernels.len()];
    let mut simulator = Simulator::new(&lowered.program, lowered.instances);
    simulator.load(&lowered.program, |weight| &tensors[weight.index()]).map_err(|error| error.to_string())?;
    let plan = Plan {
        model: Model {
            architecture: "gemma4".into(),
            name: None,
            files: vec![ModelFile { path: "weights.bin".into(), bytes: all.len() as u64, header_bytes: 0 }],
            fingerprint,
            layers: recipe.layers.len() as u32,
            hidden: WIDTH,
            vocab_size: VOCABULARY,
            trained_context: CONTEXT,
            adapters: Vec::new(),
            seats: None,
        },
        target: For::Cuda,
        weights,
        program,
        cuda: Some(Cuda { program: lowered.program, code }),
        others: Vec::new(),
        vocab: None,
        sampling: Sampling::default(),
        embedded: None,
        towers: Vec::new(),
        drafter: None,
        report: String::new(),
    };
    let tokens: Vec<u32> = (0..CHUNK + 3).map(|i| (i * 29 + 5) % VOCABULARY).collect();
    // A whole chunk, a part of one, and a token alone.
    let feed = Feed { tokens: &tokens, pieces: vec![CHUNK as usize, 2], asked: Asked::Last };
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    let expected = feed.rows(&mut Session::on_cpu(plan.clone(), &location).map_err(|error| error.to_string())?);
    let ours = feed.rows(&mut simulate::session(plan, simulator, None).map_err(|error| error.to_string())?);
    let (mut all, mut size) = (Distance::default(), Distance::default());
    for ((at, ours), (of, expected)) in ours.iter().zip(&expected) {
        assert_eq!(at, of);
        all = all.and(Distance::of(ours, expected));
        size = size.and(Distance::of(expected, &vec![0.0; expected.len()]));
    }
    let share = all.rms() / size.rms().max(1e-3);
    let limit = if rounded { 0.1 } else { 1e-4 };
    if share <= limit { Ok(()) } else { Err(format!("off by {share:.5} of the logits, {limit} allowed")) }
}

#[test]
fn fused_graphs_compute_what_they_mean() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(60);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 60, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let checked = std::cell::Cell::new(0);
    let outcome = runner.run(&recipe(), |recipe| {
        checked.set(checked.get() + 1);
        compare(&recipe).map_err(|wrong| {
            let off: Vec<&str> =
                optional().zip(&recipe.disabled).filter(|(_, off)| **off).map(|(name, _)| name).collect();
            TestCaseError::fail(format!("{wrong}; without {}", off.join(", ")))
        })
    });
    writeln!(std::io::stderr(), "{} random graphs", checked.get()).expect("stderr takes a message");
    outcome.unwrap_or_else(|wrong| panic!("{wrong}"));
}
