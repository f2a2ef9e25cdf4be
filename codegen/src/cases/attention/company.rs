//! Several sequences in one launch of the decode step's attention: each row is what it is alone, and a free row is left
//! alone.

use gemma4c_dsl::F32x2;
use gemma4c_dsl::harness::{Bound, Case, Data};
use gemma4c_plan::cuda::KvType;

use super::step::{BOUND, EPSILON, Step};
use super::{Scene, cache, cache_data, layer};
use crate::kernels::attention::Attention;
use crate::kernels::attention::address::RECORD_WORDS;
use crate::kernels::attention::rows::Sharing;
use crate::kernels::attention::step::{Early, StepOut, groups};

/// Rows of one layer, `None` where a row is free. Each has pages of its own in one cache.
#[derive(Clone, Debug)]
pub struct Company {
    pub name: &'static str,
    pub rows: Vec<Option<Step>>,
}

impl Company {
    /// A row that is there.
    fn any(&self) -> &Step {
        self.rows.iter().flatten().next().expect("a row that is not free")
    }

    /// Values of each row, one behind the other, and not numbers for those that are free.
    fn joined<'a>(&'a self, of: impl Fn(&'a Step) -> &'a [f32]) -> Vec<f32> {
        let len = of(self.any()).len();
        self.rows.iter().flat_map(|row| row.as_ref().map_or(vec![f32::NAN; len], |step| of(step).to_vec())).collect()
    }

    fn cache(&self, of: impl Fn(&Step) -> Vec<f32>) -> Data {
        let len = self.any().scene.paging.values();
        let rows = self.rows.iter().map(|row| row.as_ref().map_or(vec![f32::NAN; len], &of));
        cache_data(&self.any().scene.layer, &rows.collect::<Vec<_>>().concat())
    }

    /// The launch of a block for each split.
    pub fn case(&self, out: StepOut) -> Case {
        let one = self.any();
        let (layer, splits, count) = (&one.scene.layer, one.scene.splits, self.rows.len());
        let instance = layer.step(one.own, Early::Records, out).expect("heads of whole tiles");
        let case = Case::new(format!("step of {count} rows, {}", self.name), instance)
            .grid([layer.kv_heads, splits, count as u32])
            .scalar("grouped", one.grouped);
        self.completed(case)
    }

    /// The launch of fewer blocks, which take several splits each.
    pub fn shared_case(&self, sharing: Sharing) -> Case {
        let one = self.any();
        let (layer, splits, count) = (&one.scene.layer, one.scene.splits, self.rows.len());
        let Sharing { peers, turns, clusters, .. } = sharing;
        let name = format!("{count} rows, {}, {turns} turns of {peers} blocks, {clusters} clusters", self.name);
        let case = Case::new(name, layer.rows(one.own, StepOut::Floats, sharing).expect("heads of whole tiles"))
            .grid(layer.rows_grid(count as u32, sharing))
            .scalar("splits", splits)
            .scalar("clusters", clusters);
        self.completed(case)
    }

    /// With memory, and what the launch does to it.
    fn completed(&self, case: Case) -> Case {
        let one = self.any();
        let Scene { layer, splits, segment, paging, .. } = &one.scene;
        let count = self.rows.len();
        let (mut records, mut pages) = (Vec::new(), Vec::new());
        for (at, row) in self.rows.iter().enumerate() {
            let paging = row.as_ref().map_or(paging, |step| &step.scene.paging).behind(at as u32);
            let (position, used) = row.as_ref().map_or((0, 0), |step| (step.scene.position, 1));
            records.extend(paging.record(position, used));
            pages.extend(paging.pages);
        }
        let each = groups(*splits, one.grouped) + layer.peers();
        let counters = vec![0u32; (layer.kv_heads * each) as usize * count];
        let slots = (layer.heads() * (splits + groups(*splits, one.grouped))) as usize * count;
        let bound = cache::bound(layer.kv);
        assert_eq!(records.len(), count * RECORD_WORDS as usize);
        let case = case
            .buffer("heads_q", self.joined(|step| &step.q))
            .buffer("heads_k", self.joined(|step| &step.k))
            .buffer("heads_v", self.joined(|step| &step.v))
            .buffer("heads_q_weight", one.q_weight.clone())
            .buffer("heads_k_weight", one.k_weight.clone())
            .buffer("heads_inverse_frequencies", one.frequencies.clone())
            .buffer("state", records)
            .buffer("kv_pages", pages)
            .buffer("kv_k", self.cache(|step| step.before(&step.scene.k)))
            .buffer("kv_v", self.cache(|step| step.before(&step.scene.v)))
            .buffer("parts_extrema", vec![F32x2 { x: f32::NAN, y: f32::NAN }; slots])
            .buffer("parts_values", vec![f32::NAN; slots * layer.head_dim as usize])
            .buffer("parts_counters", counters.clone())
            .scalar("kv_window", layer.window_scalar())
            .scalar("segment", *segment)
            .scalar("kv_capacity", paging.rows)
            .scalar("heads_epsilon", EPSILON)
            .scalar("heads_q_stride", one.q.len() as u32)
            .scalar("heads_k_stride", one.k.len() as u32)
            .scalar("heads_v_stride", one.v.len() as u32)
            .scalar("kv_max_pages", paging.entries)
            .scalar("kv_page_stride", paging.stride_in_elements(layer))
            .expect("parts_counters", counters, Bound::Exact)
            .expect("kv_k", self.cache(|step| step.after()[0].clone()), bound)
            .expect("kv_v", self.cache(|step| step.after()[1].clone()), bound);
        let width = (layer.heads() * layer.head_dim) as usize;
        let out: Vec<f32> = self
            .rows
            .iter()
            .flat_map(|row| row.as_ref().map_or(vec![0.0; width], |step| step.scene.oracle()))
            .collect();
        let free = (0..count).filter(|at| self.rows[*at].is_none());
        free.fold(case.expect("write_out", out, BOUND), |case, at| case.except(at * width..(at + 1) * width))
    }
}

/// Steps of one layer at several positions; `None` is free.
fn of(name: &'static str, layer: Attention, positions: &[Option<u32>], [splits, grouped]: [u32; 2]) -> Company {
    company(name, layer, positions, [splits, grouped], true)
}

fn company(
    name: &'static str,
    layer: Attention,
    positions: &[Option<u32>],
    [splits, grouped]: [u32; 2],
    own: bool,
) -> Company {
    // Weights are those of the first: a launch has one layer's.
    let first = Step::new(Scene::new(name, layer, 0, 1), own);
    let step = |position| {
        let mut step = Step::new(Scene::new(name, layer, position, 1).splits(splits), own);
        (step.q_weight, step.k_weight) = (first.q_weight.clone(), first.k_weight.clone());
        Step { grouped, ..step }.prepared()
    };
    Company { name, rows: positions.iter().map(|position| position.map(step)).collect() }
}

pub fn companies() -> Vec<Company> {
    let small = layer(128, 2, KvType::F16);
    let windowed = Attention { window: Some(180), capacity: 200, ..small };
    let clustered = |layer| Attention { cluster: 16, ..layer };
    let long = Attention { capacity: 2000, ..layer(128, 1, KvType::F16) };
    let two_heads = Attention { kv_heads: 2, ..layer(256, 4, KvType::BF16) };
    let own = |layer: &Attention| [layer.splits(), layer.splits()];
    vec![
        of("a window", windowed, &[Some(350), Some(7), None, Some(190)], own(&windowed)),
        of("a window, the first free", windowed, &[None, Some(40)], own(&windowed)),
        of("two heads", two_heads, &[Some(3), Some(90)], own(&two_heads)),
        of("groups of splits", Attention { capacity: 640, ..small }, &[Some(639), None, Some(190), Some(0)], [7, 3]),
        of("a cluster", clustered(windowed), &[Some(350), None, Some(60)], own(&clustered(windowed))),
        of("clusters", clustered(long), &[Some(1990), Some(63), None, Some(700)], own(&clustered(long))),
    ]
}

/// Companies whose blocks take several splits, and how.
pub fn shared_companies() -> Vec<(Company, Sharing)> {
    use KvType::{BF16, F16, F32, Fp8, Q8_0};
    let clustered = |layer| Attention { cluster: 16, ..layer };
    let small = clustered(layer(128, 2, F16));
    // Groups of four splits; with one head, of eight.
    let windowed = |kv| Attention { window: Some(250), capacity: 270, kv, ..small };
    let long = |kv| Attention { capacity: 2000, ..clustered(layer(128, 1, kv)) };
    let two_heads = clustered(Attention { kv_heads: 2, window: Some(250), capacity: 270, ..layer(256, 4, BF16) });
    let wide = clustered(Attention { capacity: 300, ..layer(512, 16, F16) });
    let sharing = |peers, turns, clusters| Sharing { peers, turns, clusters, ahead: false };
    let ahead = |sharing| Sharing { ahead: true, ..sharing };
    let shares = |name, layer: Attention, positions: &[Option<u32>], own, sharing: Sharing| {
        let sharing = Sharing { ahead: sharing.ahead || layer.kv.is_narrow(), ..sharing };
        (company(name, layer, positions, [layer.splits(); 2], own), sharing)
    };
    let window = [Some(600), Some(7), None, Some(190)];
    let deep = [Some(1990), Some(63), None, Some(700)];
    let mut all = vec![
        shares("a window", windowed(F16), &window, true, sharing(1, 4, 1)),
        shares("a window", windowed(F16), &window, true, sharing(2, 2, 1)),
        shares("a window, a tile ahead", windowed(F16), &window, true, ahead(sharing(2, 2, 1))),
        shares("a window of another layer", windowed(F16), &window, false, sharing(1, 4, 1)),
        shares("a window, f32", windowed(F32), &[Some(600), Some(70)], true, sharing(2, 2, 1)),
        shares("a window, q8_0", windowed(Q8_0), &[Some(600), Some(70)], true, sharing(1, 4, 1)),
        shares("a window, fp8", windowed(Fp8), &[Some(600), Some(70)], true, sharing(2, 2, 1)),
        shares("E4B sliding", two_heads, &[Some(400), Some(130)], true, sharing(1, 4, 1)),
        shares("groups", long(F16), &deep, true, sharing(1, 8, 1)),
        shares("groups, a tile ahead", long(F16), &deep, true, ahead(sharing(2, 4, 3))),
        shares("groups of another layer", long(BF16), &deep, false, sharing(4, 2, 2)),
        shares("groups that take turns alone", long(F16), &deep, true, sharing(8, 1, 2)),
        shares("groups, q8_0", long(Q8_0), &deep, true, sharing(1, 8, 2)),
        shares("groups, f32", long(F32), &[Some(1400), None, Some(63)], true, sharing(1, 8, 1)),
        shares("12B full", wide, &[Some(290), Some(130)], true, sharing(1, 5, 1)),
    ];
    // Fewer splits than segments: each has several, and the new row comes after a turn.
    let fewer = company("splits that take turns", long(F16), &deep, [16, 16], true);
    all.extend([sharing(2, 4, 1), sharing(1, 8, 2)].map(|sharing| (fewer.clone(), sharing)));
    all
}

pub fn cases() -> Vec<Case> {
    let shared = shared_companies();
    let shared = shared.iter().map(|(company, sharing)| company.shared_case(*sharing));
    companies().iter().map(|company| company.case(StepOut::Floats)).chain(shared).collect()
}
