//! Several sequences in one launch of the decode step's attention: each row is what it is alone, and a free row is left alone.

use gemma4c_dsl::F32x2;
use gemma4c_dsl::harness::{Bound, Case, Data};
use gemma4c_plan::cuda::KvType;

use super::step::{BOUND, EPSILON, Step};
use super::{Scene, cache, cache_data, layer};
use crate::kernels::attention::Attention;
use crate::kernels::attention::address::RECORD_WORDS;
use crate::kernels::attention::step::{StepOut, groups};

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

    /// The launch, with what it does to the caches.
    pub fn case(&self, out: StepOut) -> Case {
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
        let case = Case::new(
            format!("step of {count} rows, {}", self.name),
            layer.step(one.own, out).expect("heads of whole tiles"),
        );
        let case = case
            .grid([layer.kv_heads, *splits, count as u32])
            .buffer("q", self.joined(|step| &step.q))
            .buffer("k", self.joined(|step| &step.k))
            .buffer("v", self.joined(|step| &step.v))
            .buffer("q_weight", one.q_weight.clone())
            .buffer("k_weight", one.k_weight.clone())
            .buffer("inverse_frequencies", one.frequencies.clone())
            .buffer("state", records)
            .buffer("pages", pages)
            .buffer("k_cache", self.cache(|step| step.before(&step.scene.k)))
            .buffer("v_cache", self.cache(|step| step.before(&step.scene.v)))
            .buffer("extrema", vec![F32x2 { x: f32::NAN, y: f32::NAN }; slots])
            .buffer("values", vec![f32::NAN; slots * layer.head_dim as usize])
            .buffer("counters", counters.clone())
            .scalar("window", layer.window_scalar())
            .scalar("segment", *segment)
            .scalar("grouped", one.grouped)
            .scalar("capacity", layer.page_rows())
            .scalar("epsilon", EPSILON)
            .scalar("q_stride", one.q.len() as u32)
            .scalar("k_stride", one.k.len() as u32)
            .scalar("v_stride", one.v.len() as u32)
            .scalar("max_pages", paging.max_pages)
            .scalar("page_stride", paging.stride_in_elements(layer))
            .expect("counters", counters, Bound::Exact)
            .expect("k_cache", self.cache(|step| step.after()[0].clone()), bound)
            .expect("v_cache", self.cache(|step| step.after()[1].clone()), bound);
        let width = (layer.heads() * layer.head_dim) as usize;
        let out: Vec<f32> = self
            .rows
            .iter()
            .flat_map(|row| row.as_ref().map_or(vec![0.0; width], |step| step.scene.oracle()))
            .collect();
        let free = (0..count).filter(|at| self.rows[*at].is_none());
        free.fold(case.expect("keep_out", out, BOUND), |case, at| case.except(at * width..(at + 1) * width))
    }
}

/// Steps of one layer at several positions; `None` is free.
fn of(name: &'static str, layer: Attention, positions: &[Option<u32>], [splits, grouped]: [u32; 2]) -> Company {
    // Weights are those of the first: a launch has one layer's.
    let first = Step::new(Scene::new(name, layer, 0, 1), true);
    let step = |position| {
        let mut step = Step::new(Scene::new(name, layer, position, 1).splits(splits), true);
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

pub fn cases() -> Vec<Case> {
    companies().iter().map(|company| company.case(StepOut::Floats)).collect()
}
