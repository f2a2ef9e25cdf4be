//! The pages of a scene's cache: in no order, with gaps between them, and of the second of two slots, so that a kernel
//! that looks anywhere else shows it.

use crate::cases::cache;
use crate::kernels::attention::Attention;
use crate::kernels::attention::address::{BLOCK_ROWS, RECORD_WORDS};

/// Values between two pages. Of 8 bits a whole head, so that it becomes elements.
fn gap(layer: &Attention) -> u32 {
    if layer.kv.is_narrow() { layer.head_dim } else { 64 }
}

/// Where the rows of a cache lie.
#[derive(Clone, Debug)]
pub struct Paging {
    pub slot: u32,
    /// Of both slots.
    pub pages: Vec<u32>,
    pub max_pages: u32,
    /// In values.
    page_stride: u32,
    /// Pages there are.
    count: u32,
    /// Rows of a page, and values of a row.
    rows: u32,
    width: u32,
    is_ring: bool,
}

impl Paging {
    pub fn of(layer: &Attention) -> Paging {
        let (rows, width) = (layer.page_rows(), layer.kv_heads * layer.head_dim);
        let is_ring = layer.window.is_some();
        let max_pages = if is_ring { 0 } else { layer.capacity.div_ceil(BLOCK_ROWS) };
        // The first slot's pages do not exist; the second's are the last first, behind one of somebody else.
        let mut pages = vec![u32::MAX / 2; max_pages as usize];
        pages.extend((1..=max_pages).rev());
        let count = if is_ring { 2 } else { max_pages + 1 };
        Paging { slot: 1, pages, max_pages, page_stride: rows * width + gap(layer), count, rows, width, is_ring }
    }

    /// The launch argument `page_stride`.
    pub fn stride_in_elements(&self, layer: &Attention) -> u32 {
        cache::elements(layer.kv, layer.head_dim as usize, self.page_stride as usize) as u32
    }

    /// Values of the cache.
    pub fn values(&self) -> usize {
        (self.count * self.page_stride) as usize
    }

    /// The first value of a position.
    pub fn row(&self, position: u32) -> usize {
        let page = match self.is_ring {
            true => self.slot,
            false => self.pages[(self.slot * self.max_pages + position / BLOCK_ROWS) as usize],
        };
        (page * self.page_stride + position % self.rows * self.width) as usize
    }

    /// The record of a row, or of a chunk.
    pub fn record(&self, position: u32, rows: u32) -> [u32; RECORD_WORDS as usize] {
        let mut record = [0; RECORD_WORDS as usize];
        (record[0], record[1], record[3]) = (position, rows, self.slot);
        record
    }

    /// The same pages behind those of `others` scenes of the same layer, in one cache.
    pub fn behind(&self, others: u32) -> Paging {
        let moved = |page: &u32| if *page > u32::MAX / 4 { *page } else { page + others * self.count };
        let pages = self.pages.iter().map(moved).collect();
        Paging { slot: self.slot + 2 * others, pages, ..self.clone() }
    }
}
