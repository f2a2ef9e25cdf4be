//! Cases of attention: window edges, pages used again, one key, many keys, every ratio of query to key-value heads,
//! splits with nothing to do. Expected values are the definition's, in f64.
//!
//! Scores reach about ±10 here, so an f32 score is off by about 1e-5, and a weight by as much of itself.

pub mod company;
pub mod packed;
pub mod paging;
pub mod stage;
pub mod step;

use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{ElementType, F32x2, Instance};
use gemma4c_plan::cuda::{KvType, Segment};

use super::cache;
use super::quantise::Int8;
use crate::kernels::attention::warpgroups::Block;
use crate::kernels::attention::{Attention, SHARED_BYTES};
use paging::Paging;

const BOUND: Bound = Bound::Within { absolute: 1e-4, relative: 1e-4 };

/// Tensor cores multiply weights rounded to the cache's type: 8 bits of a bf16, 11 of an f16. Values are below 1.
fn flash_bound(coarsest: ElementType) -> Bound {
    let absolute = if coarsest == ElementType::BF16 { 4e-3 } else { 5e-4 };
    Bound::Within { absolute, relative: 1e-3 }
}

/// Of q8_0, decoded rows multiply codes, where the oracle has values rounded to f16; and times a scale weights are f16.
/// Sums of a split are not divided yet.
fn split_bound(kv: KvType) -> Bound {
    if kv == KvType::Q8_0 { Bound::Within { absolute: 5e-3, relative: 1e-3 } } else { BOUND }
}

/// A layer, and the chunk of rows at hand.
#[derive(Clone, Debug)]
pub struct Scene {
    pub name: &'static str,
    pub layer: Attention,
    /// Position of the first row.
    pub position: u32,
    pub rows: u32,
    /// Rows of the launch: those past the chunk's end do nothing.
    pub launched: u32,
    pub splits: u32,
    pub segment: u32,
    pub paging: Paging,
    /// The chunk's own rows are in a stage, and not on pages.
    pub staged: bool,
    /// Soft tokens: for each row of the chunk, how many of its picture come from it on. Empty: none.
    pub ahead: Vec<u32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// What one split leaves of one row's query head.
struct Partial {
    largest: f64,
    total: f64,
    values: Vec<f64>,
}

/// The elements of a layer's cache.
fn cache_data(layer: &Attention, values: &[f32]) -> Data {
    cache::data(layer.kv, layer.head_dim as usize, values)
}

impl Scene {
    pub fn new(name: &'static str, layer: Attention, position: u32, rows: u32) -> Self {
        let mut random = Random::new(u64::from(position) * 977 + u64::from(layer.head_dim * layer.group + rows));
        let paging = Paging::of(&layer);
        let len = paging.values();
        let q = random.floats((rows * layer.heads() * layer.head_dim) as usize, -0.5, 0.5);
        // What nobody sees is not a number: a kernel that looks there shows it.
        let (mut k, mut v) = (vec![f32::NAN; len], vec![f32::NAN; len]);
        let width = (layer.kv_heads * layer.head_dim) as usize;
        for at in visible(&layer, position).start..position + rows {
            let row = paging.row(at);
            for i in row..row + width {
                k[i] = random.float(-1.0, 1.0);
                v[i] = random.float(-1.0, 1.0);
            }
            for values in [&mut k, &mut v] {
                cache::settle(layer.kv, layer.head_dim as usize, &mut values[row..row + width]);
            }
        }
        let (splits, segment) = (layer.splits(), layer.segment());
        Self {
            name,
            layer,
            position,
            rows,
            launched: rows,
            splits,
            segment,
            paging,
            staged: false,
            ahead: Vec::new(),
            q,
            k,
            v,
        }
    }

    fn splits(self, splits: u32) -> Self {
        Self { splits, ..self }
    }

    /// The rows from `first` on are `count` soft tokens of one picture.
    fn picture(mut self, first: usize, count: usize) -> Self {
        self.ahead.resize(self.rows as usize, 0);
        (0..count).for_each(|at| self.ahead[first + at] = (count - at) as u32);
        self
    }

    /// The words that say so.
    fn reach(&self, case: Case) -> Case {
        if self.ahead.is_empty() {
            return case;
        }
        let mut words = self.ahead.clone();
        words.resize(self.launched as usize, 0);
        case.buffer("reach_ahead", words)
    }

    fn launched(self, launched: u32) -> Self {
        let width = (self.layer.heads() * self.layer.head_dim) as usize;
        let mut q = self.q;
        q.resize(launched as usize * width, f32::NAN);
        Self { launched, q, ..self }
    }

    /// Some rows of the chunk as a chunk of their own. The cache does not hold the rows after them yet.
    pub fn part(&self, first: u32, rows: u32) -> Self {
        let width = (self.layer.heads() * self.layer.head_dim) as usize;
        let q = self.q[first as usize * width..][..rows as usize * width].to_vec();
        let mut part = Self { position: self.position + first, rows, launched: rows, q, ..self.clone() };
        let width = (self.layer.kv_heads * self.layer.head_dim) as usize;
        for position in part.position + rows..self.position + self.rows {
            let row = self.paging.row(position);
            part.k[row..row + width].fill(f32::NAN);
            part.v[row..row + width].fill(f32::NAN);
        }
        part
    }

    /// Attention over the visible positions that `chosen` accepts.
    fn partial(&self, row: u32, head: u32, chosen: impl Fn(u32) -> bool) -> Partial {
        let Attention { head_dim, group, .. } = self.layer;
        let (dim, at) = (head_dim as usize, ((row * self.layer.heads() + head) * head_dim) as usize);
        let query = &self.q[at..at + dim];
        let start = |position: u32| self.paging.row(position) + (head / group * head_dim) as usize;
        let score = |position: u32| -> f64 {
            let key = &self.k[start(position)..][..dim];
            query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
        };
        let own = visible(&self.layer, self.position + row);
        let ahead = self.ahead.get(row as usize).map_or(0, |ahead| ahead.saturating_sub(1));
        let positions: Vec<u32> = (own.start..own.end + ahead).filter(|&p| chosen(p)).collect();
        let scores: Vec<f64> = positions.iter().map(|&p| score(p)).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut partial = Partial { largest, total: 0.0, values: vec![0.0; dim] };
        for (position, score) in positions.into_iter().zip(scores) {
            let weight = (score - largest).exp();
            partial.total += weight;
            for (sum, v) in partial.values.iter_mut().zip(&self.v[start(position)..]) {
                *sum += weight * f64::from(*v);
            }
        }
        partial
    }

    /// The attention of all rows.
    fn oracle(&self) -> Vec<f32> {
        let mut out = Vec::new();
        for (row, head) in self.rows_and_heads() {
            let Partial { total, values, .. } = self.partial(row, head, |_| true);
            out.extend(values.into_iter().map(|value| (value / total) as f32));
        }
        out
    }

    fn rows_and_heads(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let heads = self.layer.heads();
        (0..self.rows).flat_map(move |row| (0..heads).map(move |head| (row, head)))
    }

    /// What each split leaves: `extrema` and `values`.
    fn partials(&self) -> (Vec<F32x2>, Vec<f32>) {
        let (mut extrema, mut values) = (Vec::new(), Vec::new());
        for (row, head) in self.rows_and_heads() {
            let first = visible(&self.layer, self.position + row).start;
            for split in 0..self.splits {
                let partial =
                    self.partial(row, head, |position| (position - first) / self.segment % self.splits == split);
                extrema.push(F32x2 { x: partial.largest as f32, y: partial.total as f32 });
                values.extend(partial.values.into_iter().map(|value| value as f32));
            }
        }
        (extrema, values)
    }

    fn rows_of(&self, elements: usize) -> usize {
        elements / self.rows as usize * self.launched as usize
    }

    /// `data` for every launched row: those past the chunk's end stay as they were.
    fn expect(&self, case: Case, param: &str, data: &[f32], bound: Bound) -> Case {
        let mut padded = data.to_vec();
        padded.resize(self.rows_of(data.len()), 0.0);
        let all = padded.len();
        let case = case.expect(param, padded, bound);
        if data.len() < all { case.except(data.len()..all) } else { case }
    }

    /// The records of the chunk, which is one segment.
    fn state(&self) -> Vec<u32> {
        Segment::words(&[Segment::alone(self.position, self.rows, self.paging.slot)], self.launched)
    }

    fn inputs(&self, case: Case) -> Case {
        case.buffer("q", self.q.clone())
            .buffer("kv_k", cache_data(&self.layer, &self.apart(&self.k).1))
            .buffer("kv_v", cache_data(&self.layer, &self.apart(&self.v).1))
            .buffer("state", self.state())
            .buffer("kv_pages", self.paging.pages.clone())
            .scalar("kv_window", self.layer.window_scalar())
            .scalar("kv_capacity", self.paging.rows)
            .scalar("kv_max_pages", self.paging.entries)
            .scalar("kv_page_stride", self.paging.stride_in_elements(&self.layer))
    }

    pub fn plain_case(&self) -> Case {
        let instance = self.layer.plain(!self.ahead.is_empty()).expect("heads of whole warps");
        let case = Case::new(format!("plain, {}", self.name), instance)
            .grid(self.layer.plain_grid(self.launched))
            .scalar("record_stride", 0u32)
            .scalar("group", self.layer.group);
        let case = self.reach(self.stage(case));
        self.expect(self.inputs(case), "out", &self.oracle(), BOUND)
    }

    pub fn decode_case(&self) -> Case {
        let instance = self.layer.decode().expect("heads of whole tiles");
        let (mut extrema, mut values) = self.partials();
        let dim = self.layer.head_dim as usize;
        let empty: Vec<usize> = (0..extrema.len()).filter(|&at| extrema[at].y == 0.0).collect();
        let (written, all) = (extrema.len(), self.rows_of(extrema.len()));
        extrema.resize(all, F32x2::default());
        values.resize(all * dim, 0.0);
        let mut case = Case::new(self.name, instance).grid([self.layer.kv_heads, self.splits, self.launched]);
        case = self.inputs(case).scalar("record_stride", 0u32).scalar("segment", self.segment).expect(
            "extrema",
            extrema,
            split_bound(self.layer.kv),
        );
        if written < all {
            case = case.except(written..all);
        }
        case = case.expect("values", values, split_bound(self.layer.kv));
        for at in empty.into_iter().chain(written..all) {
            case = case.except(at * dim..(at + 1) * dim);
        }
        case
    }

    /// With queries that the cache's type holds exactly: rounding them is the kernel's right, and not what is tested.
    pub fn flash_case(self, tile_rows: u32, tile_keys: u32, columns: u32) -> Case {
        self.flash_case_to(ElementType::F32, tile_rows, tile_keys, columns)
    }

    fn flash_case_to(self, out: ElementType, tile_rows: u32, tile_keys: u32, columns: u32) -> Case {
        let flash = self.layer.flash_tile(out, tile_rows, tile_keys, columns, !self.ahead.is_empty());
        let flash = flash.expect("heads of whole tiles");
        let grid = flash.grid(&self.layer, self.launched);
        self.many_rows_case("flash", flash.instance, grid, out)
    }

    /// The same by one or two warpgroups a block.
    pub fn warpgroups_case(self, block: Block) -> Case {
        self.warpgroups_case_to(ElementType::F32, block)
    }

    fn warpgroups_case_to(self, out: ElementType, block: Block) -> Case {
        let instance = self.layer.warpgroups(block, out, !self.ahead.is_empty()).expect("heads of whole tiles");
        let grid = self.layer.warpgroups_grid(block, self.launched);
        let kernel = match block {
            Block::One => "1 warpgroups",
            Block::Two => "2 warpgroups",
        };
        self.many_rows_case(kernel, instance, grid, out)
    }

    fn many_rows_case(mut self, kernel: &str, instance: Instance, grid: [u32; 3], out: ElementType) -> Case {
        let exact = if self.layer.kv.is_narrow() { KvType::F16 } else { self.layer.kv };
        cache::round(exact, self.layer.head_dim as usize, &mut self.q);
        let case = Case::new(format!("{kernel}, {}, {} out", self.name, out.name()), instance)
            .grid(grid)
            .scalar("group", self.layer.group);
        let case = self.reach(self.stage(case));
        let expected = self.oracle();
        let bound = flash_bound(if out == ElementType::BF16 { out } else { self.layer.element() });
        let (written, all) = (expected.len(), self.rows_of(expected.len()));
        let padded = [expected, vec![0.0; all - written]].concat();
        let case = self.inputs(case).expect(
            "out",
            cache::data(if out == ElementType::BF16 { KvType::BF16 } else { KvType::F32 }, 1, &padded),
            bound,
        );
        if written < all { case.except(written..all) } else { case }
    }

    pub fn combine_case(&self) -> Case {
        let instance = self.layer.combine().expect("heads of whole slices");
        let (mut extrema, mut values) = self.partials();
        // Values of an empty split are never written.
        for (part, values) in extrema.iter().zip(values.chunks_exact_mut(self.layer.head_dim as usize)) {
            if part.y == 0.0 {
                values.fill(f32::NAN);
            }
        }
        extrema.resize(self.rows_of(extrema.len()), F32x2 { x: f32::NAN, y: f32::NAN });
        values.resize(self.rows_of(values.len()), f32::NAN);
        let case = Case::new(format!("{}, combined", self.name), instance)
            .grid(self.layer.combine_grid(self.launched))
            .buffer("extrema", extrema)
            .buffer("values", values)
            .buffer("state", self.state())
            .scalar("record_stride", 0u32)
            .scalar("splits", self.splits);
        self.expect(case, "out", &self.oracle(), BOUND)
    }
}

/// The positions that a query sees.
fn visible(layer: &Attention, position: u32) -> std::ops::Range<u32> {
    let window = layer.window.unwrap_or(u32::MAX);
    (position + 1).saturating_sub(window)..position + 1
}

/// Splits whose merge is exact, so that int8 codes are too: equal largest scores, totals that make a power of two,
/// whole values.
fn combine_int8_case(head_dim: u32, heads: u32, splits: u32, rows: u32) -> Case {
    let [.., shared_bytes] = SHARED_BYTES;
    let layer = Attention {
        head_dim,
        kv_heads: 1,
        group: heads,
        window: None,
        capacity: 32,
        kv: KvType::F16,
        shared_bytes,
        cluster: 1,
        multiprocessors: 132,
    };
    let mut random = Random::new(u64::from(head_dim + splits));
    let dim = head_dim as usize;
    let (mut extrema, mut values, mut out) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rows * heads {
        let mut sums = vec![0.0f32; dim];
        for split in 0..splits {
            if split % 3 == 1 {
                extrema.push(F32x2 { x: f32::NEG_INFINITY, y: 0.0 });
                values.extend(vec![f32::NAN; dim]);
                continue;
            }
            extrema.push(F32x2 { x: 2.5, y: if split == 0 { 0.0 } else { 1.0 } });
            let whole: Vec<f32> = (0..dim).map(|_| random.below(2001) as f32 - 1000.0).collect();
            sums.iter_mut().zip(&whole).for_each(|(sum, value)| *sum += value);
            values.extend(whole);
        }
        // The first split makes the total the next power of two.
        let first = extrema.len() - splits as usize;
        let others = extrema[first..].iter().map(|part| part.y).sum::<f32>();
        let total = (others as u32 + 1).next_power_of_two() as f32;
        extrema[first].y = total - others;
        out.extend(sums.into_iter().map(|sum| sum / total));
    }
    let int8 = Int8::of(&out);
    Case::new(
        format!("int8, {splits} splits, {heads} heads of {head_dim}"),
        layer.combine_int8().expect("whole slices"),
    )
    .grid(layer.combine_grid(rows))
    .buffer("extrema", extrema)
    .buffer("values", values)
    .buffer("state", vec![0, rows, 0, 0])
    .scalar("record_stride", 0u32)
    .scalar("splits", splits)
    .expect("xq", int8.codes, Bound::Exact)
    .expect("xscale", int8.scales, Bound::Exact)
    .expect("xsum", int8.sums, Bound::Exact)
}

fn layer(head_dim: u32, group: u32, kv: KvType) -> Attention {
    let [.., shared_bytes] = SHARED_BYTES;
    Attention {
        head_dim,
        kv_heads: 1,
        group,
        window: None,
        capacity: 96,
        kv,
        shared_bytes,
        cluster: 1,
        multiprocessors: 132,
    }
}

/// One row, or few.
pub fn scenes() -> Vec<Scene> {
    use KvType::{BF16, F16, F32, Fp8, Q8_0};
    let small = layer(128, 2, F16);
    let windowed = |window, capacity| Attention { window: Some(window), capacity, ..small };
    let two_heads = Attention { kv_heads: 2, ..layer(256, 4, BF16) };
    vec![
        Scene::new("one key", small, 0, 1),
        Scene::new("one key of five heads", layer(128, 5, F16), 0, 1),
        Scene::new("window not yet full", windowed(40, 44), 38, 1),
        Scene::new("window just full", windowed(40, 44), 39, 1),
        Scene::new("window moved by one", windowed(40, 44), 40, 1),
        Scene::new("window over four segments", windowed(140, 150), 200, 1),
        Scene::new("ring wrapped", windowed(40, 44), 137, 1),
        Scene::new("ring as long as the window", windowed(64, 64), 200, 1),
        Scene::new("window of one", windowed(1, 3), 7, 1),
        Scene::new("full layer in a ring, wrapped", Attention { window: Some(96), ..small }, 100, 1),
        Scene::new("600 keys in 5 splits", Attention { capacity: 640, ..small }, 599, 1).splits(5),
        Scene::new("600 keys, a segment to a split", Attention { capacity: 608, ..layer(128, 1, F32) }, 599, 1),
        Scene::new("empty splits", Attention { capacity: 512, ..layer(128, 3, BF16) }, 33, 1),
        Scene::new("more splits than segments of the window", windowed(40, 44), 90, 1).splits(7),
        Scene::new("fewer splits than segments of the window", windowed(180, 199), 350, 1).splits(2),
        Scene::new("three rows across a segment", small, 62, 3),
        Scene::new("two of four rows, ring wrapping inside", windowed(40, 44), 43, 2).launched(4),
        Scene::new("E2B sliding", Attention { window: Some(48), capacity: 50, ..layer(256, 8, F16) }, 77, 1),
        Scene::new("E4B sliding", Attention { window: Some(48), capacity: 50, ..two_heads }, 60, 2),
        Scene::new("12B sliding", Attention { kv_heads: 2, window: Some(64), ..layer(256, 2, F32) }, 70, 1),
        Scene::new("E2B full", layer(512, 8, BF16), 70, 1),
        Scene::new("E4B full", Attention { kv_heads: 2, ..layer(512, 4, F16) }, 34, 1),
        Scene::new("12B full", layer(512, 16, F16), 35, 1),
        Scene::new("full, f32", layer(512, 4, F32), 20, 1),
        Scene::new("six heads", layer(128, 6, F16), 50, 1),
        Scene::new("twelve heads", layer(128, 12, BF16), 50, 1),
        Scene::new("q8_0, one key", layer(128, 2, Q8_0), 0, 1),
        Scene::new("q8_0, ring wrapped", Attention { window: Some(140), capacity: 150, ..layer(128, 2, Q8_0) }, 200, 1),
        Scene::new("q8_0, 600 keys in 5 splits", Attention { capacity: 640, ..layer(128, 2, Q8_0) }, 599, 1).splits(5),
        Scene::new(
            "q8_0, E4B sliding",
            Attention { window: Some(48), capacity: 50, kv_heads: 2, ..layer(256, 4, Q8_0) },
            60,
            2,
        ),
        Scene::new("q8_0, 12B full", layer(512, 16, Q8_0), 35, 1),
        Scene::new("fp8, twelve heads", Attention { capacity: 512, ..layer(128, 12, Fp8) }, 150, 1),
        Scene::new("fp8, two heads of 512", Attention { kv_heads: 2, ..layer(512, 4, Fp8) }, 34, 1),
    ]
}

/// Many rows: (scene, rows and keys of a tile, columns of a warp).
fn flash_cases() -> Vec<Case> {
    use KvType::{BF16, F16, Fp8, Q8_0};
    let small = layer(64, 2, BF16);
    let windowed = |window, capacity| Attention { window: Some(window), capacity, ..small };
    let wide = Attention { kv_heads: 2, ..layer(64, 1, F16) };
    let in_teams = |scene: Scene| scene.flash_case(32, 16, 32);
    vec![
        in_teams(Scene::new("one row, one key", small, 0, 1)),
        in_teams(Scene::new("from the start", small, 0, 33)),
        in_teams(Scene::new("a chunk that starts inside a tile", small, 37, 32)),
        in_teams(Scene::new("window edges inside the chunk", windowed(20, 70), 5, 50)),
        in_teams(Scene::new("ring wrapping inside the chunk", windowed(20, 70), 150, 40)),
        in_teams(Scene::new("a picture longer than its window", windowed(20, 96), 7, 50).picture(5, 40)),
        in_teams(Scene::new("a picture in a stage", windowed(20, 64), 150, 40).staged().picture(3, 34).launched(70)),
        Scene::new("a picture, plainly", windowed(6, 64), 30, 20).staged().picture(2, 11).plain_case(),
        in_teams(Scene::new("window of one", windowed(1, 40), 3, 20)),
        in_teams(Scene::new("a stage, ring wrapped", windowed(20, 64), 150, 40).staged()),
        in_teams(Scene::new("a stage from the start", windowed(20, 64), 0, 33).staged()),
        in_teams(Scene::new("a stage, ragged rows, more launched", windowed(33, 80), 90, 35).staged().launched(70)),
        in_teams(Scene::new("ragged rows, more launched", windowed(33, 100), 90, 35).launched(70)),
        Scene::new("f16, two heads", wide, 20, 20).flash_case(16, 32, 64),
        Scene::new("f16, two heads, more launched", wide, 20, 20).launched(40).flash_case_to(
            ElementType::BF16,
            16,
            32,
            64,
        ),
        Scene::new("600 keys", Attention { capacity: 600, ..wide }, 583, 17).flash_case(16, 32, 64),
        Scene::new("E2B sliding", Attention { window: Some(24), ..layer(256, 8, F16) }, 40, 3).flash_case(64, 32, 256),
        Scene::new("12B full", layer(512, 16, BF16), 17, 2).flash_case(32, 16, 256),
        in_teams(Scene::new("q8_0, a chunk inside a tile", layer(64, 2, Q8_0), 37, 32)),
        in_teams(Scene::new(
            "q8_0, ring wrapping inside the chunk",
            Attention { kv: Q8_0, ..windowed(20, 70) },
            150,
            40,
        )),
        Scene::new("q8_0, E2B sliding", Attention { window: Some(24), ..layer(256, 8, Q8_0) }, 40, 3)
            .flash_case(64, 32, 256),
        Scene::new("fp8, 600 keys", Attention { capacity: 600, kv: Fp8, ..wide }, 583, 17).flash_case(16, 32, 64),
    ]
}

/// Many rows by warpgroups: heads that share keys, tiles that end within a query's heads, a head on two blocks or two
/// warpgroups.
fn warpgroups_cases() -> Vec<Case> {
    use Block::{One, Two};
    use KvType::{BF16, F16};
    let small = layer(64, 2, BF16);
    let windowed = |window, capacity| Attention { window: Some(window), capacity, ..small };
    let two_heads = Attention { kv_heads: 2, ..layer(64, 3, F16) };
    let bf16 = ElementType::BF16;
    vec![
        Scene::new("one row, one key", small, 0, 1).warpgroups_case(One),
        Scene::new("a chunk across tiles of rows", small, 37, 59).warpgroups_case(Two),
        Scene::new("three heads of two, more launched", two_heads, 20, 45).launched(130).warpgroups_case(Two),
        Scene::new("window edges inside the chunk", windowed(20, 70), 5, 50).warpgroups_case(One),
        Scene::new("ring wrapping inside the chunk", windowed(80, 140), 250, 50).warpgroups_case_to(bf16, Two),
        Scene::new("a picture longer than its window", windowed(20, 96), 7, 50).picture(5, 40).warpgroups_case(One),
        Scene::new("a picture in a stage", windowed(20, 64), 150, 40)
            .staged()
            .picture(3, 34)
            .launched(70)
            .warpgroups_case(Two),
        Scene::new("a stage as long as a tile", windowed(130, 256), 128, 90).staged().warpgroups_case(Two),
        Scene::new("a stage from the start", windowed(20, 64), 0, 33).staged().warpgroups_case(One),
        Scene::new("600 keys", Attention { capacity: 600, ..two_heads }, 583, 17).warpgroups_case(One),
        Scene::new("heads of 128", Attention { window: Some(40), ..layer(128, 4, F16) }, 40, 9).warpgroups_case(One),
        Scene::new("E2B sliding", Attention { window: Some(24), ..layer(256, 8, F16) }, 40, 9).warpgroups_case(Two),
        Scene::new("12B full", layer(512, 16, F16), 65, 5).warpgroups_case_to(bf16, Two),
        Scene::new("31B full", layer(512, 8, BF16), 65, 9).warpgroups_case(One),
        Scene::new("a chunk across tiles of wide rows", layer(512, 2, F16), 37, 70).warpgroups_case(Two),
    ]
}

/// Many rows on tensor cores.
pub fn cases_of_many_rows() -> Vec<Case> {
    [flash_cases(), warpgroups_cases()].concat()
}

pub fn cases() -> Vec<Case> {
    let scenes = scenes();
    let plain = scenes.iter().filter(|scene| scene.layer.head_dim == 128).map(Scene::plain_case);
    let decode = scenes.iter().map(Scene::decode_case);
    let combine = scenes.iter().map(Scene::combine_case);
    let int8 = [(256, 2, 17, 1), (512, 1, 40, 2), (256, 1, 1, 1)];
    let int8 = int8.into_iter().map(|(head_dim, heads, splits, rows)| combine_int8_case(head_dim, heads, splits, rows));
    plain.chain(decode).chain(combine).chain(int8).collect()
}
