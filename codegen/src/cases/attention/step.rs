//! Cases of the decode step's attention in one launch: what `heads.rs`, `decode.rs` and `combine.rs` do one after the
//! other.
//!
//! Expected values are the definition's, in f64. Int8 codes have no tolerance, so those cases have queries of zero:
//! every visible position weighs the same, and the mean of a power of two of 16-bit floats is exact.

use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, F16, F32x2, Float};
use gemma4c_plan::cuda::KvType;

use super::{Scene, cache, cache_data, layer};
use crate::cases::heads::rotated;
use crate::cases::norm::normed;
use crate::cases::quantise::Int8;
use crate::kernels::attention::step::{Early, StepOut, groups};
use crate::kernels::attention::{Attention, SHARED_BYTES};
use crate::kernels::heads::{Heads, inverse_frequencies};

pub(super) const EPSILON: f32 = 1e-6;

/// The new key may be off by a step of its type, and its score with it.
pub(super) const BOUND: Bound = Bound::Within { absolute: 1e-3, relative: 1e-3 };

/// A layer that decodes a row, and the row's projections.
#[derive(Clone, Debug)]
pub struct Step {
    /// With the queries and the caches as they are after the norms, RoPE and the store.
    pub scene: Scene,
    /// The layer has keys and values of its own.
    pub own: bool,
    /// Splits that are merged at once.
    pub grouped: u32,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub q_weight: Vec<f32>,
    pub k_weight: Vec<f32>,
    pub frequencies: Vec<f32>,
    /// The new key and value before they are rounded.
    pub new: [Vec<f32>; 2],
}

impl Step {
    pub fn new(scene: Scene, own: bool) -> Self {
        let Attention { head_dim, kv_heads, .. } = scene.layer;
        let mut random = Random::new(u64::from(scene.position) * 31 + u64::from(head_dim));
        let width = (kv_heads * head_dim) as usize;
        let q = random.floats(scene.q.len(), -3.0, 3.0);
        let (k, v) = (random.floats(width, -30.0, 30.0), random.floats(width, -0.1, 0.1));
        // Scores of up to ten or so.
        let q_weight = random.floats(head_dim as usize, 0.05, 0.3);
        let k_weight = random.floats(head_dim as usize, -1.0, 1.0);
        let frequencies = inverse_frequencies(head_dim, 1e4, None);
        let grouped = scene.splits;
        Self { scene, own, grouped, q, k, v, q_weight, k_weight, frequencies, new: Default::default() }.prepared()
    }

    /// With every score zero.
    fn without_queries(mut self) -> Self {
        self.q.fill(0.0);
        self.prepared()
    }

    /// The values are the keys' projection.
    fn values_are_keys(mut self) -> Self {
        self.v.clone_from(&self.k);
        self.prepared()
    }

    /// With the scene's queries and new row made from the projections.
    pub(super) fn prepared(mut self) -> Self {
        let Attention { head_dim, kv, .. } = self.scene.layer;
        let (dim, position) = (head_dim as usize, self.scene.position);
        let turned = |head: &[f32], weight: &[f32]| rotated(&normed(head, Some(weight)), position, &self.frequencies);
        self.scene.q = self.q.chunks(dim).flat_map(|head| turned(head, &self.q_weight)).collect();
        if self.own {
            let row = self.scene.paging.row(position);
            let keys: Vec<f32> = self.k.chunks(dim).flat_map(|head| turned(head, &self.k_weight)).collect();
            let values: Vec<f32> = self.v.chunks(dim).flat_map(|head| normed(head, None)).collect();
            for (cache, new) in [(&mut self.scene.k, &keys), (&mut self.scene.v, &values)] {
                cache[row..row + new.len()].copy_from_slice(new);
                cache::round(kv, dim, &mut cache[row..row + new.len()]);
            }
            self.new = [keys, values];
        }
        self
    }

    /// A cache before the store: what the new row will replace is not a number.
    fn cache_before(&self, after: &[f32]) -> Data {
        cache_data(&self.scene.layer, &self.before(after))
    }

    /// Keys and values after the store, for a cache to round.
    pub(super) fn after(&self) -> [Vec<f32>; 2] {
        let mut after = [self.scene.k.clone(), self.scene.v.clone()];
        let row = self.scene.paging.row(self.scene.position);
        for (cache, new) in after.iter_mut().zip(&self.new) {
            cache[row..row + new.len()].copy_from_slice(new);
        }
        after
    }

    pub(super) fn before(&self, after: &[f32]) -> Vec<f32> {
        let Attention { head_dim, kv_heads, .. } = self.scene.layer;
        let mut before = after.to_vec();
        if self.own {
            let width = (kv_heads * head_dim) as usize;
            before[self.scene.paging.row(self.scene.position)..][..width].fill(f32::NAN);
        }
        before
    }

    /// With the projections, and the cache before them; `heads` and `kv` are what the kernel calls these.
    fn projections(&self, case: Case, heads: &str, kv: [&str; 3]) -> Case {
        let [k_cache, v_cache, kv] = kv;
        let own = |values: &[f32]| if self.own { values.to_vec() } else { Vec::new() };
        case.buffer(&format!("{heads}q"), self.q.clone())
            .buffer(&format!("{heads}k"), own(&self.k))
            .buffer(&format!("{heads}v"), own(&self.v))
            .buffer(&format!("{heads}q_weight"), self.q_weight.clone())
            .buffer(&format!("{heads}k_weight"), own(&self.k_weight))
            .buffer(&format!("{heads}inverse_frequencies"), self.frequencies.clone())
            .scalar(&format!("{heads}q_stride"), 0u32)
            .scalar(&format!("{heads}k_stride"), 0u32)
            .scalar(&format!("{heads}v_stride"), 0u32)
            .scalar(&format!("{heads}epsilon"), EPSILON)
            .buffer("state", self.scene.state())
            .buffer(k_cache, self.cache_before(&self.scene.k))
            .buffer(v_cache, self.cache_before(&self.scene.v))
            .buffer(&format!("{kv}pages"), self.scene.paging.pages.clone())
            .scalar(&format!("{kv}window"), self.scene.layer.window_scalar())
            .scalar(&format!("{kv}capacity"), self.scene.paging.rows)
            .scalar(&format!("{kv}max_pages"), self.scene.paging.entries)
            .scalar(&format!("{kv}page_stride"), self.scene.paging.stride_in_elements(&self.scene.layer))
    }

    /// The launch, without what becomes of it.
    fn launch(&self, name: &str, out: StepOut) -> Case {
        let Scene { layer, splits, segment, .. } = &self.scene;
        let own = if self.own { "" } else { ", cache of another layer" };
        // Both ways of launching it have cases.
        let early = if out == StepOut::Partials { Early::Nothing } else { Early::Caches };
        let instance = layer.step(self.own, early, out).expect("heads of whole tiles");
        let each = groups(*splits, self.grouped) + layer.peers();
        let counters = vec![0u32; (layer.kv_heads * each) as usize];
        let case = Case::new(format!("step{name}, {}{own}", self.scene.name), instance)
            .grid([layer.kv_heads, *splits, 1])
            .buffer("parts_counters", counters.clone())
            .scalar("segment", *segment)
            .scalar("grouped", self.grouped)
            .expect("parts_counters", counters, Bound::Exact);
        let case = self.projections(case, "heads_", ["kv_k", "kv_v", "kv_"]);
        // Rows that nobody sees are not numbers, before and after.
        let [k, v] = self.after().map(|values| cache_data(layer, &values));
        let bound = cache::bound(layer.kv);
        case.expect("kv_k", k, bound).expect("kv_v", v, bound)
    }

    fn scratch(&self, case: Case) -> Case {
        let Scene { layer, splits, .. } = &self.scene;
        let slots = (layer.heads() * (splits + groups(*splits, self.grouped))) as usize;
        case.buffer("parts_extrema", vec![F32x2 { x: f32::NAN, y: f32::NAN }; slots])
            .buffer("parts_values", vec![f32::NAN; slots * layer.head_dim as usize])
    }

    pub fn floats_case(&self) -> Case {
        let out = self.scene.oracle();
        self.scratch(self.launch("", StepOut::Floats)).expect("write_out", out, BOUND)
    }

    pub fn int8_case(&self) -> Case {
        let int8 = Int8::of(&self.scene.oracle());
        self.scratch(self.launch(", int8", StepOut::Int8))
            .expect("write_xq", int8.codes, Bound::Exact)
            .expect("write_xscale", int8.scales, Bound::Exact)
            .expect("write_xsum", int8.sums, Bound::Exact)
    }

    pub fn bf16_case(&self) -> Case {
        let out: Vec<BF16> = self.scene.oracle().into_iter().map(BF16::from_f32).collect();
        let bound = Bound::Within { absolute: 1e-3, relative: 1.0 / 128.0 };
        self.scratch(self.launch(", bf16", StepOut::Bf16)).expect("write_out", out, bound)
    }

    pub fn f16_case(&self) -> Case {
        let out: Vec<F16> = self.scene.oracle().into_iter().map(F16::from_f32).collect();
        let bound = Bound::Within { absolute: 1e-3, relative: 1.0 / 1024.0 };
        self.scratch(self.launch(", f16", StepOut::F16)).expect("write_out", out, bound)
    }

    pub fn partials_case(&self) -> Case {
        let (mut extrema, mut values) = self.scene.partials();
        let dim = self.scene.layer.head_dim as usize;
        let empty: Vec<usize> = (0..extrema.len()).filter(|&at| extrema[at].y == 0.0).collect();
        // The room for groups stays as it is.
        let groups = (self.scene.layer.heads() * groups(self.scene.splits, self.grouped)) as usize;
        extrema.extend(vec![F32x2 { x: f32::NAN, y: f32::NAN }; groups]);
        values.extend(vec![f32::NAN; groups * dim]);
        let case = self.scratch(self.launch(", partials", StepOut::Partials));
        let kv = self.scene.layer.kv;
        let of_split = if kv == KvType::Q8_0 { super::split_bound(kv) } else { BOUND };
        let mut case = case.expect("parts_extrema", extrema, BOUND).expect("parts_values", values, of_split);
        for at in empty {
            case = case.except(at * dim..(at + 1) * dim);
        }
        case
    }

    /// The kernels of many rows that the step stands for, without expected values: the norms, RoPE and the store.
    pub fn heads_case(&self) -> Case {
        let Attention { head_dim: dim, kv_heads, kv: cache, .. } = self.scene.layer;
        let kv = if self.own { kv_heads } else { 0 };
        let heads = Heads { dim, q: self.scene.layer.heads(), kv, cache };
        let case = Case::new("heads", heads.instance().expect("two warps are a block"))
            .grid(heads.grid(1))
            .scalar("record_stride", 16u32)
            .expect("q_out", self.scene.q.clone(), BOUND);
        self.projections(case, "raw_", ["kv_k", "kv_v", "kv_"])
    }

    /// The splits, over what the heads left.
    pub fn splits_case(&self, q: Data, k: Data, v: Data) -> Case {
        let Scene { layer, splits, segment, .. } = &self.scene;
        let slots = (layer.heads() * splits) as usize;
        Case::new("splits", layer.decode().expect("heads of whole tiles"))
            .grid([layer.kv_heads, *splits, 1])
            .buffer("q", q)
            .buffer("kv_k", k)
            .buffer("kv_v", v)
            .buffer("state", self.scene.state())
            .buffer("kv_pages", self.scene.paging.pages.clone())
            .scalar("kv_window", layer.window_scalar())
            .scalar("segment", *segment)
            .scalar("kv_capacity", self.scene.paging.rows)
            .scalar("record_stride", 16u32)
            .scalar("kv_max_pages", self.scene.paging.entries)
            .scalar("kv_page_stride", self.scene.paging.stride_in_elements(&self.scene.layer))
            .expect("extrema", vec![F32x2::default(); slots], BOUND)
            .expect("values", vec![0.0f32; slots * layer.head_dim as usize], BOUND)
            .except(0..slots * layer.head_dim as usize)
    }

    /// The merge, over what the splits left.
    pub fn merge_case(&self, out: StepOut, extrema: Data, values: Data) -> Case {
        let layer = &self.scene.layer;
        let width = (layer.heads() * layer.head_dim) as usize;
        let instance = if out == StepOut::Int8 { layer.combine_int8() } else { layer.combine() };
        let case = Case::new("merge", instance.expect("heads of whole slices"))
            .grid(layer.combine_grid(1))
            .buffer("extrema", extrema)
            .buffer("values", values)
            .buffer("state", self.scene.state())
            .scalar("record_stride", 16u32)
            .scalar("splits", self.scene.splits);
        if out == StepOut::Int8 {
            case.expect("xq", vec![0u32; width / 4], BOUND).expect("xscale", vec![0.0f32; width / 32], BOUND).expect(
                "xsum",
                vec![0i32; width / 32],
                BOUND,
            )
        } else {
            case.expect("out", vec![0.0f32; width], BOUND)
        }
    }

    /// The step with queries that matter: what is compared with the kernels above, bit by bit.
    pub fn case(&self, out: StepOut) -> Case {
        let width = (self.scene.layer.heads() * self.scene.layer.head_dim) as usize;
        let case = self.scratch(self.launch("", out));
        match out {
            StepOut::Int8 => case
                .expect("write_xq", vec![0u32; width / 4], BOUND)
                .expect("write_xscale", vec![0.0f32; width / 32], BOUND)
                .expect("write_xsum", vec![0i32; width / 32], BOUND),
            StepOut::Bf16 => case.expect("write_out", vec![BF16::from_f32(0.0); width], BOUND),
            StepOut::F16 => case.expect("write_out", vec![F16::from_f32(0.0); width], BOUND),
            StepOut::Floats => case.expect("write_out", vec![0.0f32; width], BOUND),
            StepOut::Partials => case,
        }
    }
}

pub fn steps() -> Vec<Step> {
    use KvType::{BF16, F16, F32, Fp8, Q8_0};
    let small = layer(128, 2, F16);
    let windowed = |window, capacity| Attention { window: Some(window), capacity, ..small };
    let clustered = |layer| Attention { cluster: 16, shared_bytes: SHARED_BYTES[0], ..layer };
    let step = |name, layer, position| Step::new(Scene::new(name, layer, position, 1), true);
    let shared = |name, layer, position| Step::new(Scene::new(name, layer, position, 1), false);
    let split = |step: Step, splits, grouped| Step { scene: step.scene.splits(splits), grouped, ..step };
    let long = Attention { capacity: 2000, ..layer(128, 1, F16) };
    let two_heads = Attention { kv_heads: 2, ..layer(256, 4, BF16) };
    vec![
        step("position 0", small, 0),
        step("a segment's last position", small, 63),
        step("a segment's first position", small, 64),
        shared("position 0", small, 0),
        shared("a segment's first position", small, 64),
        step("window just full", windowed(40, 44), 39),
        step("window moved by one", windowed(40, 44), 40),
        step("ring wrapped", windowed(40, 44), 137),
        step("ring wrapping at the new row", windowed(40, 44), 132),
        step("ring as long as the window", windowed(64, 64), 200),
        step("window of one", windowed(1, 3), 7),
        step("V is the raw K", small, 50).values_are_keys(),
        split(step("1200 keys in 18 splits", Attention { capacity: 1200, ..small }, 1199), 18, 18),
        split(step("more splits than segments of the window", windowed(40, 44), 90), 7, 7),
        split(shared("fewer splits than segments of the window", windowed(180, 199), 350), 2, 2),
        split(step("a group", Attention { capacity: 640, ..small }, 190), 10, 3),
        split(step("two groups", Attention { capacity: 640, ..small }, 192), 10, 3),
        split(step("groups that take turns", Attention { capacity: 640, ..small }, 639), 7, 3),
        step("one head, f32", layer(128, 1, F32), 40),
        step("three heads, empty splits", Attention { capacity: 512, ..layer(128, 3, BF16) }, 33),
        step("E2B sliding", Attention { window: Some(48), capacity: 50, ..layer(256, 8, F16) }, 77),
        shared("E2B sliding", Attention { window: Some(48), capacity: 50, ..layer(256, 8, F16) }, 77),
        step("E4B sliding", Attention { window: Some(48), capacity: 50, ..two_heads }, 60),
        step("12B sliding", Attention { kv_heads: 2, window: Some(64), ..layer(256, 2, F32) }, 70),
        step("E2B full", layer(512, 8, BF16), 70),
        shared("E4B full", Attention { kv_heads: 2, ..layer(512, 4, F16) }, 34),
        step("12B full", layer(512, 16, F16), 35).values_are_keys(),
        step("E2B full, tiles of a segment", Attention { shared_bytes: SHARED_BYTES[0], ..layer(512, 8, F16) }, 70),
        step("12B full, tiles of a segment", Attention { shared_bytes: SHARED_BYTES[0], ..layer(512, 16, BF16) }, 35),
        step("full, f32", layer(512, 4, F32), 20),
        step("a cluster, one block of it sees anything", clustered(windowed(180, 200)), 50),
        step("a cluster, two blocks of it see anything", clustered(windowed(180, 200)), 70),
        step("a cluster, window full", clustered(windowed(180, 200)), 350),
        shared("a cluster, window full", clustered(windowed(180, 200)), 350),
        step("a cluster, f32", clustered(Attention { kv: F32, ..windowed(100, 128) }), 300),
        step("four clusters, one block of the first sees anything", clustered(long), 63),
        step("four clusters, the second has begun", clustered(long), 8 * 64),
        step("four clusters, the last is half full", clustered(long), 28 * 64 - 1),
        shared("four clusters, all in use", clustered(long), 31 * 64 - 5),
        split(step("two clusters that take turns", clustered(long), 31 * 64 - 5), 16, 16),
        step("q8_0, position 0", Attention { kv: Q8_0, ..small }, 0),
        step("q8_0, a segment's first position", Attention { kv: Q8_0, ..small }, 64),
        shared("q8_0, a segment's first position", Attention { kv: Q8_0, ..small }, 64),
        step("q8_0, ring wrapping at the new row", Attention { kv: Q8_0, ..windowed(40, 44) }, 132),
        split(step("q8_0, groups that take turns", Attention { capacity: 640, kv: Q8_0, ..small }, 639), 7, 3),
        step("q8_0, 12B full", layer(512, 16, Q8_0), 35).values_are_keys(),
        step(
            "q8_0, E2B full, tiles of a segment",
            Attention { shared_bytes: SHARED_BYTES[0], ..layer(512, 8, Q8_0) },
            70,
        ),
        step("q8_0, a cluster, window full", clustered(Attention { kv: Q8_0, ..windowed(180, 200) }), 350),
        step("fp8, window moved by one", Attention { kv: Fp8, ..windowed(40, 44) }, 40),
        step("fp8, four clusters, the second has begun", clustered(Attention { kv: Fp8, ..long }), 8 * 64),
        step("fp8, E4B sliding", Attention { kv: Fp8, window: Some(48), capacity: 50, ..two_heads }, 60),
        step("clusters, E4B sliding", clustered(Attention { window: Some(130), capacity: 150, ..two_heads }), 140),
    ]
}

/// Steps that see a power of two of positions.
fn even_steps() -> Vec<Step> {
    let small = layer(128, 2, KvType::F16);
    let wide = Attention { capacity: 128, ..small };
    let sliding = Attention { window: Some(64), capacity: 70, kv_heads: 2, ..layer(256, 4, KvType::BF16) };
    let step = |name, layer, position, own| Step::new(Scene::new(name, layer, position, 1), own).without_queries();
    vec![
        step("position 0", small, 0, true),
        step("128 positions", wide, 127, true),
        step("64 positions", small, 63, false),
        step("a window of 64, ring wrapped", sliding, 150, true),
    ]
}

pub fn cases() -> Vec<Case> {
    let steps = steps();
    let floats = steps.iter().map(Step::floats_case);
    let partials = steps.iter().filter(|step| step.scene.layer.head_dim == 128).map(Step::partials_case);
    let halves = steps.first().map(|step| [step.bf16_case(), step.f16_case()]).into_iter().flatten();
    floats.chain(partials).chain(halves).chain(even_steps().iter().map(Step::int8_case)).collect()
}
