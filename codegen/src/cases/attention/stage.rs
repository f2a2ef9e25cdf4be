//! Chunks whose own keys and values are in a stage: attention reads them there and the older ones on their pages, and
//! afterwards the last of them go to the pages.

use gemma4c_dsl::harness::{Bound, Case, Random};
use gemma4c_plan::cuda::KvType;

use super::{Scene, cache_data, layer};
use crate::kernels::attention::Attention;

impl Scene {
    /// With the chunk's own rows in a stage.
    pub(super) fn staged(self) -> Self {
        Self { staged: true, ..self }
    }

    /// The stage of a cache, and the cache without what is in the stage.
    pub(super) fn apart(&self, cache: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let width = (self.layer.kv_heads * self.layer.head_dim) as usize;
        if !self.staged {
            return (Vec::new(), cache.to_vec());
        }
        let (mut stage, mut rest) = (Vec::new(), cache.to_vec());
        for position in self.position..self.position + self.rows {
            let row = self.paging.row(position);
            stage.extend_from_slice(&cache[row..row + width]);
            rest[row..row + width].fill(f32::NAN);
        }
        (stage, rest)
    }

    pub(super) fn stage(&self, case: Case) -> Case {
        case.buffer("stage_k", cache_data(&self.layer, &self.apart(&self.k).0))
            .buffer("stage_v", cache_data(&self.layer, &self.apart(&self.v).0))
            .scalar("stage_is_used", u32::from(self.staged))
    }

    /// The chunk's last rows from a stage to pages that hold other numbers.
    fn keep_case(&self) -> Case {
        let (kept, kv) = (self.paging.kept(), self.layer.kv);
        let width = (self.layer.kv_heads * self.layer.head_dim) as usize;
        let mut random = Random::new(u64::from(self.position));
        // Whole heads have whole groups: what is copied is the same in 8 bits.
        let stages = [(); 2].map(|()| random.floats(self.rows as usize * width, -1.0, 1.0));
        let before = [(); 2].map(|()| random.floats(self.paging.values(), -1.0, 1.0));
        let mut after = before.clone();
        for at in self.rows.saturating_sub(kept)..self.rows {
            let (from, to) = (at as usize * width, self.paging.row(self.position + at));
            for (pages, stage) in after.iter_mut().zip(&stages) {
                pages[to..to + width].copy_from_slice(&stage[from..from + width]);
            }
        }
        let name = format!("keep {} rows at {} in {kept}, {}", self.rows, self.position, kv.name());
        Case::new(name, self.layer.keep().expect("16 bytes of elements"))
            .grid(self.layer.keep_grid(self.launched))
            .buffer("k_stage", cache_data(&self.layer, &stages[0]))
            .buffer("v_stage", cache_data(&self.layer, &stages[1]))
            .buffer("state", self.state())
            .buffer("kv_pages", self.paging.pages.clone())
            .buffer("kv_k", cache_data(&self.layer, &before[0]))
            .buffer("kv_v", cache_data(&self.layer, &before[1]))
            .scalar("rows", self.launched)
            .scalar("width", self.layer.row_len())
            .scalar("kv_capacity", self.paging.rows)
            .scalar("kv_max_pages", self.paging.entries)
            .scalar("kv_page_stride", self.paging.stride_in_elements(&self.layer))
            .scalar("kv_window", self.layer.window_scalar())
            .expect("kv_k", cache_data(&self.layer, &after[0]), Bound::Exact)
            .expect("kv_v", cache_data(&self.layer, &after[1]), Bound::Exact)
    }
}

pub fn cases() -> Vec<Case> {
    let sliding = |capacity, kv| Attention { window: Some(20), capacity, ..layer(128, 2, kv) };
    let plain = [(140, 9, 40), (0, 1, 40), (38, 5, 60)].map(|(position, rows, capacity)| {
        Scene::new("a stage", sliding(capacity, KvType::BF16), position, rows).staged().plain_case()
    });
    let keep = |layer, position, rows, launched| {
        Scene { position, rows, launched, ..Scene::new("some rows", layer, 0, 1) }.keep_case()
    };
    let short = sliding(40, KvType::F16);
    let wide = Attention { kv_heads: 9, ..sliding(30, KvType::F32) };
    let kept = [
        keep(short, 0, 9, 9),
        keep(short, 37, 9, 12),
        keep(short, 137, 90, 128),
        keep(short, 70, 40, 64),
        keep(wide, 28, 5, 5),
        keep(sliding(40, KvType::Q8_0), 37, 50, 50),
    ];
    plain.into_iter().chain(kept).collect()
}
