//! The pages of a scene's cache: in no order, with gaps between them, and of the second of two slots, so that a kernel
//! that looks anywhere else shows it.

use crate::cases::cache;
use crate::kernels::attention::Attention;
use crate::kernels::attention::address::RECORD_WORDS;

/// Values between two pages. Of 8 bits a whole head, so that it becomes elements.
fn gap(layer: &Attention) -> u32 {
    if layer.kv.is_narrow() { layer.head_dim } else { 64 }
}

/// Positions of a page: of full layers no power of two, of windows that are longer than a page more than one tile.
const FULL_ROWS: u32 = 192;
const WINDOW_ROWS: [u32; 2] = [64, 128];

/// Where the rows of a cache lie.
#[derive(Clone, Debug)]
pub struct Paging {
    pub slot: u32,
    /// Of both slots.
    pub pages: Vec<u32>,
    /// The launch argument `max_pages`: entries of a slot.
    pub entries: u32,
    /// The launch argument `capacity`: rows of a page.
    pub rows: u32,
    /// In values.
    page_stride: u32,
    /// Pages there are.
    count: u32,
    /// Values of a row.
    width: u32,
}

impl Paging {
    pub fn of(layer: &Attention) -> Paging {
        let rows = match layer.window {
            None => FULL_ROWS,
            Some(_) => WINDOW_ROWS[usize::from(layer.capacity > 2 * WINDOW_ROWS[0])],
        };
        let (entries, width) = (layer.capacity.div_ceil(rows), layer.kv_heads * layer.head_dim);
        // The first slot's pages do not exist; the second's are the last first, behind one of somebody else.
        let mut pages = vec![u32::MAX / 2; entries as usize];
        pages.extend((1..=entries).rev());
        let (page_stride, count) = (rows * width + gap(layer), entries + 1);
        Paging { slot: 1, pages, entries, rows, page_stride, count, width }
    }

    /// Positions that are there at once.
    pub fn kept(&self) -> u32 {
        self.rows * self.entries
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
        let page = self.pages[(self.slot * self.entries + position / self.rows % self.entries) as usize];
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
