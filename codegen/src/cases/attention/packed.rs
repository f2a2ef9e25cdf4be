//! Chunks of several segments: the rows of each sequence are what they are alone, wherever in the chunk they lie, and
//! free rows write nothing.

use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{ElementType, Instance};
use gemma4c_plan::cuda::{KvType, SEGMENT_ROWS, Segment};

use super::{BOUND, Scene, cache, cache_data, flash_bound, layer};
use crate::kernels::attention::Attention;
use crate::kernels::attention::warpgroups::Block;

/// Scenes of one layer as segments of a chunk, each with pages of its own in one cache.
#[derive(Clone, Debug)]
pub struct Packed {
    pub name: &'static str,
    pub scenes: Vec<Scene>,
    /// Rows of the launch.
    launched: u32,
}

impl Packed {
    /// As many rows are launched as end with the last scene's, and some more.
    pub fn new(name: &'static str, scenes: Vec<Scene>, more: u32) -> Packed {
        let mut packed = Packed { name, scenes, launched: 0 };
        packed.launched = packed.segments().last().map_or(0, |last| last.first_row + last.rows) + more;
        packed
    }

    /// Where the scenes lie.
    pub fn segments(&self) -> Vec<Segment> {
        let mut next = 0;
        let segment = |(at, scene): (usize, &Scene)| {
            let (first_row, slot) = (next, scene.paging.behind(at as u32).slot);
            next = (next + scene.rows).next_multiple_of(SEGMENT_ROWS);
            Segment { position: scene.position, rows: scene.rows, first_row, slot }
        };
        self.scenes.iter().enumerate().map(segment).collect()
    }

    fn layer(&self) -> &Attention {
        &self.scenes[0].layer
    }

    /// Values of the chunk's rows, each `width` of them, and `free` where nobody's are.
    fn rows(&self, width: u32, free: f32, of: impl Fn(&Scene) -> Vec<f32>) -> Vec<f32> {
        let mut all = vec![free; (self.launched * width) as usize];
        for (segment, scene) in self.segments().iter().zip(&self.scenes) {
            let values = of(scene);
            all[(segment.first_row * width) as usize..][..values.len()].copy_from_slice(&values);
        }
        all
    }

    /// Elements of rows that are free, where a row has `width` of them.
    fn free(&self, width: u32) -> Vec<std::ops::Range<usize>> {
        let segments = self.segments();
        let starts = segments.iter().skip(1).map(|next| next.first_row).chain([self.launched]);
        let gap = |(segment, start): (&Segment, u32)| {
            (width * (segment.first_row + segment.rows)) as usize..(width * start) as usize
        };
        segments.iter().zip(starts).map(gap).filter(|gap| !gap.is_empty()).collect()
    }

    /// The caches of all scenes, one behind the other.
    fn cache(&self, of: impl Fn(&Scene) -> Vec<f32>) -> Data {
        cache_data(self.layer(), &self.scenes.iter().flat_map(of).collect::<Vec<_>>())
    }

    /// The pages of all scenes.
    fn tables(&self) -> Vec<u32> {
        (0..).zip(&self.scenes).flat_map(|(at, scene)| scene.paging.behind(at).pages).collect()
    }

    /// With memory. The stage of rows that are free is not numbers.
    fn inputs(&self, case: Case) -> Case {
        let (layer, paging) = (self.layer(), &self.scenes[0].paging);
        let kv_width = layer.kv_heads * layer.head_dim;
        let staged = self.scenes[0].staged;
        let stage = |of: fn(&Scene) -> &[f32]| match staged {
            true => cache_data(layer, &self.rows(kv_width, f32::NAN, |scene| scene.apart(of(scene)).0)),
            false => cache_data(layer, &[]),
        };
        case.buffer("q", self.rows(layer.heads() * layer.head_dim, f32::NAN, |scene| scene.q.clone()))
            .buffer("kv_k", self.cache(|scene| scene.apart(&scene.k).1))
            .buffer("kv_v", self.cache(|scene| scene.apart(&scene.v).1))
            .buffer("stage_k", stage(|scene| &scene.k))
            .buffer("stage_v", stage(|scene| &scene.v))
            .buffer("state", Segment::words(&self.segments(), self.launched))
            .buffer("kv_pages", self.tables())
            .scalar("group", layer.group)
            .scalar("kv_window", layer.window_scalar())
            .scalar("kv_capacity", paging.rows)
            .scalar("kv_max_pages", paging.entries)
            .scalar("kv_page_stride", paging.stride_in_elements(layer))
            .scalar("stage_is_used", u32::from(staged))
    }

    fn expect(&self, case: Case, param: &str, element: KvType, bound: Bound) -> Case {
        let width = self.layer().heads() * self.layer().head_dim;
        let out = self.rows(width, 0.0, Scene::oracle);
        let case = case.expect(param, cache::data(element, 1, &out), bound);
        self.free(width).into_iter().fold(case, Case::except)
    }

    fn plain_case(&self) -> Case {
        let instance = self.layer().plain(false).expect("heads of whole warps");
        let case = Case::new(format!("plain, {}", self.name), instance)
            .grid(self.layer().plain_grid(self.launched))
            .scalar("record_stride", 0u32);
        self.expect(self.inputs(case), "out", KvType::F32, BOUND)
    }

    pub fn flash_case(&self, tile_rows: u32, tile_keys: u32, columns: u32) -> Case {
        let layer = self.layer();
        let flash =
            layer.flash_tile(ElementType::F32, tile_rows, tile_keys, columns, false).expect("heads of whole tiles");
        let grid = flash.grid(layer, self.launched);
        self.many_rows_case("flash", flash.instance, grid)
    }

    pub fn warpgroups_case(&self, block: Block) -> Case {
        let instance = self.layer().warpgroups(block, ElementType::F32, false).expect("heads of whole tiles");
        self.many_rows_case("warpgroups", instance, self.layer().warpgroups_grid(block, self.launched))
    }

    /// With queries that the cache's type holds exactly.
    fn many_rows_case(&self, kernel: &str, instance: Instance, grid: [u32; 3]) -> Case {
        let mut exact = self.clone();
        let kind = if self.layer().kv.is_narrow() { KvType::F16 } else { self.layer().kv };
        let dim = self.layer().head_dim as usize;
        exact.scenes.iter_mut().for_each(|scene| cache::round(kind, dim, &mut scene.q));
        let case = Case::new(format!("{kernel}, {}", self.name), instance).grid(grid);
        exact.expect(exact.inputs(case), "out", KvType::F32, flash_bound(self.layer().element()))
    }

    /// Each segment's last rows from the stage to its pages, which hold other numbers.
    fn keep_case(&self) -> Case {
        let layer = self.layer();
        let (paging, width) = (&self.scenes[0].paging, layer.kv_heads * layer.head_dim);
        // Whole heads have whole groups: what is copied is the same in 8 bits.
        let staged = |scene: &Scene, of: u64| {
            Random::new(u64::from(scene.position) + of).floats((scene.rows * width) as usize, -1.0, 1.0)
        };
        let before = |scene: &Scene| vec![0.5; scene.paging.values()];
        let after = |scene: &Scene, of: u64| {
            let (mut kept, stage) = (before(scene), staged(scene, of));
            for at in scene.rows.saturating_sub(paging.kept())..scene.rows {
                let (from, to) = ((at * width) as usize, scene.paging.row(scene.position + at));
                kept[to..to + width as usize].copy_from_slice(&stage[from..from + width as usize]);
            }
            kept
        };
        let stage = |of| cache_data(layer, &self.rows(width, f32::NAN, |scene| staged(scene, of)));
        Case::new(format!("keep, {}", self.name), layer.keep().expect("16 bytes of elements"))
            .grid(layer.keep_grid(self.launched))
            .buffer("k_stage", stage(1))
            .buffer("v_stage", stage(2))
            .buffer("state", Segment::words(&self.segments(), self.launched))
            .buffer("kv_pages", self.tables())
            .buffer("kv_k", self.cache(before))
            .buffer("kv_v", self.cache(before))
            .scalar("rows", self.launched)
            .scalar("width", layer.row_len())
            .scalar("kv_capacity", paging.rows)
            .scalar("kv_max_pages", paging.entries)
            .scalar("kv_page_stride", paging.stride_in_elements(layer))
            .scalar("kv_window", layer.window_scalar())
            .expect("kv_k", self.cache(|scene| after(scene, 1)), Bound::Exact)
            .expect("kv_v", self.cache(|scene| after(scene, 2)), Bound::Exact)
    }
}

/// A sequence in the middle of its text, another at its start, and one whose window's pages were used again; some with free
/// rows behind them.
pub fn attended() -> Vec<Packed> {
    use KvType::{BF16, F16, Q8_0};
    let windowed = |kv| Attention { window: Some(20), capacity: 64, ..layer(64, 2, kv) };
    let paged = |kv| Attention { capacity: 600, kv_heads: 2, ..layer(64, 1, kv) };
    let staged = |layer, position, rows| Scene::new("a segment", layer, position, rows).staged();
    let scene = |layer, position, rows| Scene::new("a segment", layer, position, rows);
    vec![
        Packed::new(
            "three segments in a stage",
            vec![staged(windowed(BF16), 7, 35), staged(windowed(BF16), 0, 20), staged(windowed(BF16), 150, 33)],
            30,
        ),
        Packed::new("two segments in pages", vec![scene(paged(F16), 0, 17), scene(paged(F16), 250, 20)], 0),
        Packed::new(
            "two segments in a stage, q8_0",
            vec![staged(windowed(Q8_0), 90, 40), staged(windowed(Q8_0), 61, 18)],
            64,
        ),
    ]
}

pub fn cases() -> Vec<Case> {
    use KvType::{BF16, F16, Q8_0};
    let sliding = |capacity, kv| Attention { window: Some(20), capacity, ..layer(128, 2, kv) };
    let staged = |layer, position, rows| Scene::new("a segment", layer, position, rows).staged();
    let scene = |layer, position, rows| Scene::new("a segment", layer, position, rows);
    let plain = [
        Packed::new(
            "two segments in a stage",
            vec![staged(sliding(40, BF16), 140, 9), staged(sliding(40, BF16), 0, 3)],
            2,
        ),
        Packed::new(
            "two segments in pages",
            vec![scene(layer(128, 2, F16), 70, 2), scene(layer(128, 2, F16), 5, 3)],
            0,
        ),
    ];
    let kept = [
        Packed::new(
            "two segments, one longer than its ring",
            vec![staged(sliding(40, F16), 137, 90), staged(sliding(40, F16), 37, 9)],
            20,
        ),
        Packed::new("two segments, q8_0", vec![staged(sliding(40, Q8_0), 3, 5), staged(sliding(40, Q8_0), 30, 41)], 0),
    ];
    let attended = attended();
    let flash = attended.iter().map(|packed| packed.flash_case(32, 16, 32));
    let by_warpgroups = attended.iter().filter(|packed| packed.layer().fits_warpgroups().is_ok());
    let flash = flash.chain(by_warpgroups.map(|packed| packed.warpgroups_case(Block::Two)));
    let plain = plain.iter().map(Packed::plain_case);
    flash.chain(plain).chain(kept.iter().map(Packed::keep_case)).collect()
}
