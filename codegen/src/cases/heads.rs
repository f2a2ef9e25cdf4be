//! Cases of the heads: GQA ratios of the models, layers without KV, K as V, pages of a window, positions up to the longest
//! context, rows beyond those in use.

use gemma4c_dsl::harness::{Bound, Case, Random};
use gemma4c_plan::cuda::{KvType, SEGMENT_ROWS, Segment};

use super::cache;
use super::norm::normed;
use crate::kernels::heads::{Heads, inverse_frequencies};

/// Positions of a page of a full layer.
const FULL_ROWS: u32 = 192;

#[derive(Clone, Copy)]
struct Shape {
    heads: Heads,
    /// Rows of the launch, and how many of them are in use.
    rows: (usize, usize),
    position: u32,
    /// Of a page of a window; `None`: a full layer.
    window_rows: Option<u32>,
    k_is_v: bool,
    /// A second segment, in the other slot: its rows and its position.
    second: Option<(usize, u32)>,
}

impl Shape {
    /// Position and slot of a row; `None` where it is free.
    fn place(&self, row: usize) -> Option<(u32, u32)> {
        let first = SEGMENT_ROWS as usize;
        match self.second {
            Some((rows, position)) if (first..first + rows).contains(&row) => {
                Some((position + (row - first) as u32, 0))
            }
            _ => (row < self.rows.1).then_some((self.position + row as u32, 1)),
        }
    }

    fn state(&self) -> Vec<u32> {
        let mut segments = vec![Segment::alone(self.position, self.rows.1 as u32, 1)];
        let second = |(rows, position)| Segment { position, rows: rows as u32, first_row: SEGMENT_ROWS, slot: 0 };
        segments.extend(self.second.map(second));
        Segment::words(&segments, self.rows.0 as u32)
    }
}

/// NeoX rotation by f32 angles, in f64.
pub fn rotated(head: &[f32], position: u32, frequencies: &[f32]) -> Vec<f32> {
    let half = head.len() / 2;
    let mut out = head.to_vec();
    for (i, frequency) in frequencies.iter().enumerate() {
        let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
        let (x, y) = (f64::from(head[i]), f64::from(head[i + half]));
        out[i] = (x * cos - y * sin) as f32;
        out[i + half] = (y * cos + x * sin) as f32;
    }
    out
}

/// The rows of a launch inside a buffer with a stride, as the multi-output product leaves them.
fn strided(values: &[f32], width: usize, stride: usize) -> Vec<f32> {
    if width == 0 {
        return Vec::new();
    }
    values.chunks(width).flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(9.0, stride - width))).collect()
}

fn case(name: &str, shape: Shape) -> Case {
    let Shape { heads, rows: (rows, _), position, window_rows, k_is_v, .. } = shape;
    let (dim, q_heads, kv_heads) = (heads.dim as usize, heads.q as usize, heads.kv as usize);
    let mut random = Random::new(u64::from(position) + dim as u64);
    let q = random.floats(rows * q_heads * dim, -3.0, 3.0);
    let k = random.floats(rows * kv_heads * dim, -30.0, 30.0);
    let v = if k_is_v { k.clone() } else { random.floats(rows * kv_heads * dim, -0.1, 0.1) };
    let (q_weight, k_weight) = (random.floats(dim, 0.2, 2.0), random.floats(dim, -1.0, 1.0));
    // Global heads rotate the first quarter of their pairs alone, as the file's factors say.
    let factors: Vec<f32> = (0..dim / 2).map(|i| if i < dim / 8 { 1.0 } else { 1e30 }).collect();
    let frequencies = match dim {
        512 => inverse_frequencies(heads.dim, 1e6, Some(&factors)),
        _ => inverse_frequencies(heads.dim, 1e4, None),
    };

    let at = |row: usize| shape.place(row).map_or(0, |(position, _)| position);
    let turned = |head: &[f32], weight: &[f32], row| rotated(&normed(head, Some(weight)), at(row), &frequencies);
    let q_out: Vec<f32> =
        q.chunks(dim).enumerate().flat_map(|(i, head)| turned(head, &q_weight, i / q_heads)).collect();
    let page_rows = window_rows.unwrap_or(FULL_ROWS);
    // In values, between pages.
    let gap = if heads.cache.is_narrow() { dim } else { 8 };
    let page_stride = page_rows as usize * kv_heads * dim + gap;
    // Pages of two slots, in no order. A window has two, over and over; of a full layer those of the rows exist.
    let first_page = position / page_rows;
    let entries = if window_rows.is_some() { 2 } else { first_page + 2 };
    let mut pages = vec![u32::MAX / 2; 2 * entries as usize];
    for (at, page) in [(first_page, 2), (first_page + 1, 1)] {
        pages[(entries + at % entries) as usize] = page;
    }
    if let Some((_, position)) = shape.second {
        let at = position / page_rows;
        pages[((at + 1) % entries) as usize] = 3;
        pages[(at % entries) as usize] = 0;
    }
    let page = |position: u32, slot: u32| pages[(slot * entries + position / page_rows % entries) as usize] as usize;
    let before = random.floats(4 * page_stride, -1.0, 1.0);
    let (mut k_after, mut v_after) = (before.clone(), before.clone());
    for row in 0..rows {
        let Some((position, slot)) = shape.place(row) else { continue };
        for head in 0..kv_heads {
            let from = (row * kv_heads + head) * dim;
            let to = page(position, slot) * page_stride + ((position % page_rows) as usize * kv_heads + head) * dim;
            k_after[to..to + dim].copy_from_slice(&turned(&k[from..from + dim], &k_weight, row));
            v_after[to..to + dim].copy_from_slice(&normed(&v[from..from + dim], None));
        }
    }

    let (q_width, kv_width) = (q_heads * dim, kv_heads * dim);
    let stride = q_width + 2 * kv_width;
    let (cache, bound) = (|values: &[f32]| cache::data(heads.cache, dim, values), cache::bound(heads.cache));
    let case = Case::new(name, heads.instance().expect("two warps are a block"))
        .grid(heads.grid(rows as u32))
        .buffer("raw_q", strided(&q, q_width, stride))
        .buffer("raw_k", strided(&k, kv_width, stride))
        .buffer("raw_v", strided(&v, kv_width, kv_width.max(1)))
        .buffer("raw_q_weight", q_weight)
        .buffer("raw_k_weight", if kv_heads > 0 { k_weight } else { Vec::new() })
        .buffer("raw_inverse_frequencies", frequencies)
        .buffer("state", shape.state())
        .buffer("kv_pages", pages)
        .buffer("kv_k", cache(&before))
        .buffer("kv_v", cache(&before))
        .scalar("raw_q_stride", stride as u32)
        .scalar("raw_k_stride", stride as u32)
        .scalar("raw_v_stride", kv_width as u32)
        .scalar("kv_capacity", page_rows)
        .scalar("kv_window", window_rows.map_or(u32::MAX, |_| 4))
        .scalar("record_stride", 0u32)
        .scalar("kv_max_pages", entries)
        .scalar("kv_page_stride", cache::elements(heads.cache, dim, page_stride) as u32)
        .scalar("raw_epsilon", 1e-6f32)
        .expect("kv_k", cache(&k_after), bound)
        .expect("kv_v", cache(&v_after), bound)
        .expect("q_out", q_out, Bound::Within { absolute: 3e-6, relative: 4e-6 });
    let free = (0..rows).filter(|row| shape.place(*row).is_none());
    free.fold(case, |case, row| case.except(row * q_width..(row + 1) * q_width))
}

pub fn cases() -> Vec<Case> {
    let heads = |dim, q, kv, cache| Heads { dim, q, kv, cache };
    let shape =
        |heads, position| Shape { heads, rows: (1, 1), position, window_rows: Some(4), k_is_v: false, second: None };
    let paged = |heads, position| Shape { window_rows: None, ..shape(heads, position) };
    let sliding = heads(256, 8, 2, KvType::F16);
    let global = heads(512, 4, 1, KvType::BF16);
    let small = heads(64, 3, 3, KvType::F32);
    vec![
        case("sliding, first position", shape(sliding, 0)),
        case("sliding, ratio 4, the pages used again", shape(sliding, 131_071)),
        case("sliding, a chunk across two pages of a window", Shape { rows: (3, 3), ..shape(sliding, 1022) }),
        case("sliding, no KV of its own", Shape { rows: (2, 2), ..shape(heads(256, 8, 0, KvType::F16), 700) }),
        case("global, the longest context", paged(global, 262_143)),
        case("global, a chunk across two pages", Shape { rows: (3, 3), ..paged(heads(64, 2, 1, KvType::F16), 510) }),
        case("global, V is the raw K", Shape { rows: (2, 2), k_is_v: true, ..paged(global, 5_000) }),
        case("global, no KV of its own", shape(heads(512, 2, 0, KvType::F16), 99_999)),
        case("ratio 1, odd heads, rows left over", Shape { rows: (5, 3), window_rows: Some(7), ..shape(small, 6) }),
        case(
            "q8_0, a chunk across two pages of a window",
            Shape { rows: (3, 3), ..shape(heads(256, 8, 2, KvType::Q8_0), 1022) },
        ),
        case(
            "q8_0, V is the raw K",
            Shape { rows: (2, 2), k_is_v: true, ..paged(heads(512, 4, 1, KvType::Q8_0), 5_000) },
        ),
        case("fp8, a chunk across two pages", Shape { rows: (4, 3), ..paged(heads(64, 2, 1, KvType::Fp8), 510) }),
        case("two segments in windows", Shape { rows: (68, 2), second: Some((3, 2)), ..shape(small, 1022) }),
        case(
            "two segments in pages, fp8",
            Shape { rows: (66, 5), second: Some((2, 300)), ..paged(heads(64, 2, 1, KvType::Fp8), 510) },
        ),
        case("ratio 16, f32 cache", Shape { rows: (2, 1), ..shape(heads(64, 16, 1, KvType::F32), 3) }),
    ]
}
