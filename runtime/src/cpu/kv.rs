//! The KV cache of one layer for many sequences, in f32; rounded, where a plan's keys and values have 8 bits.
//!
//! It is pages of rows. A sliding layer has one page for each sequence, a ring: position p lies in row `p % rows`, and
//! a page has the window plus the longest chunk, since a whole chunk is appended before its first row looks back a
//! window. A global layer's pages are blocks of 256 positions, which a sequence's table names in order.

use gemma4c_plan::cuda::KvType;

use super::aligned::Aligned;

/// Positions in a page of a global layer.
pub const BLOCK_ROWS: usize = 256;

/// Keys and values of one layer: one row a position, one key and one value a head.
#[derive(Debug)]
pub struct KvLayer {
    pages: usize,
    rows: usize,
    heads: usize,
    head_dim: usize,
    /// What rows are rounded to as they are appended.
    kv: KvType,
    keys: Aligned,
    values: Aligned,
}

/// Where one sequence's rows lie in a layer.
#[derive(Clone, Copy, Debug)]
pub enum Pages<'a> {
    /// In one page, over and over.
    Ring(u32),
    /// In these pages, in order.
    Table(&'a [u32]),
}

/// One sequence's keys and values in a layer.
#[derive(Clone, Copy, Debug)]
pub struct KvView<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    /// Rows of a page.
    rows: usize,
    heads: usize,
    head_dim: usize,
    pages: Pages<'a>,
}

impl KvLayer {
    /// Memory is only reserved: the system hands it out zeroed and page by page as rows are written, so a long context
    /// costs what it holds.
    pub fn new(pages: usize, rows: usize, heads: usize, head_dim: usize) -> KvLayer {
        let len = pages * rows * heads * head_dim;
        let (keys, values) = (Aligned::zeros(len), Aligned::zeros(len));
        KvLayer { pages, rows, heads, head_dim, kv: KvType::F32, keys, values }
    }

    /// The same layer, whose rows are rounded as a GPU that keeps them in this type.
    pub fn rounded_to(self, kv: KvType) -> KvLayer {
        KvLayer { kv, ..self }
    }

    /// Bytes of a layer of this shape, before it is made.
    pub const fn bytes_for(pages: usize, rows: usize, heads: usize, head_dim: usize) -> usize {
        2 * size_of::<f32>() * pages * rows * heads * head_dim
    }

    /// Bytes reserved for rows.
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.pages, self.rows, self.heads, self.head_dim)
    }

    pub fn view<'a>(&'a self, pages: Pages<'a>) -> KvView<'a> {
        let KvLayer { rows, heads, head_dim, .. } = *self;
        KvView { keys: self.keys.as_slice(), values: self.values.as_slice(), rows, heads, head_dim, pages }
    }

    /// Writes rows of a sequence at `first_position` and on, over whatever those places held.
    pub fn append(&mut self, pages: Pages<'_>, first_position: usize, keys: &[f32], values: &[f32]) {
        let width = self.heads * self.head_dim;
        assert!(keys.len() == values.len() && keys.len().is_multiple_of(width));
        let is_ring = matches!(pages, Pages::Ring(_));
        assert!(!is_ring || keys.len() <= self.rows * width, "a chunk longer than the ring would overwrite itself");
        for (i, (key, value)) in keys.chunks_exact(width).zip(values.chunks_exact(width)).enumerate() {
            let at = row(pages, self.rows, first_position + i) * width;
            self.keys.as_mut_slice()[at..at + width].copy_from_slice(key);
            self.values.as_mut_slice()[at..at + width].copy_from_slice(value);
            for rows in [&mut self.keys, &mut self.values] {
                round_row(self.kv, self.head_dim, &mut rows.as_mut_slice()[at..at + width]);
            }
        }
    }

    /// Copies a page over another.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        let (from, to) = (self.page(from), self.page(to));
        self.keys.as_mut_slice().copy_within(from.clone(), to.start);
        self.values.as_mut_slice().copy_within(from, to.start);
    }

    /// A page's keys, and its values.
    pub fn read_page(&self, page: u32) -> [&[f32]; 2] {
        let page = self.page(page);
        [&self.keys.as_slice()[page.clone()], &self.values.as_slice()[page]]
    }

    /// The inverse of [`KvLayer::read_page`] on the front of `floats`, whose rest it returns.
    pub fn write_page<'a>(&mut self, page: u32, floats: &'a [f32]) -> &'a [f32] {
        let page = self.page(page);
        let (keys, rest) = floats.split_at(page.len());
        let (values, rest) = rest.split_at(page.len());
        self.keys.as_mut_slice()[page.clone()].copy_from_slice(keys);
        self.values.as_mut_slice()[page].copy_from_slice(values);
        rest
    }

    fn page(&self, page: u32) -> std::ops::Range<usize> {
        let len = self.rows * self.heads * self.head_dim;
        page as usize * len..(page as usize + 1) * len
    }
}

/// The row of a layer that holds a position, in pages of `rows`.
#[inline(always)]
fn row(pages: Pages<'_>, rows: usize, position: usize) -> usize {
    let page = match pages {
        Pages::Ring(page) => page,
        Pages::Table(pages) => pages[position / rows],
    };
    page as usize * rows + position % rows
}

impl<'a> KvView<'a> {
    /// Rows that were never appended anywhere: position p is row p of both.
    pub fn of_rows(keys: &'a [f32], values: &'a [f32], heads: usize, head_dim: usize) -> KvView<'a> {
        let rows = keys.len() / (heads * head_dim);
        KvView { keys, values, rows, heads, head_dim, pages: Pages::Ring(0) }
    }

    pub fn heads(&self) -> usize {
        self.heads
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Whether the `reach` latest positions before `end` are there, if all were appended.
    pub fn has_room_for(&self, reach: usize, end: usize) -> bool {
        match self.pages {
            Pages::Ring(_) => reach <= self.rows,
            Pages::Table(pages) => end <= pages.len() * self.rows,
        }
    }

    /// The key of a head at a position that has been appended and not overwritten.
    #[inline(always)]
    pub fn key(&self, position: usize, head: usize) -> &'a [f32] {
        self.head(self.keys, position, head)
    }

    /// The value of a head at a position that has been appended and not overwritten.
    #[inline(always)]
    pub fn value(&self, position: usize, head: usize) -> &'a [f32] {
        self.head(self.values, position, head)
    }

    #[inline(always)]
    fn head(&self, rows: &'a [f32], position: usize, head: usize) -> &'a [f32] {
        let at = (row(self.pages, self.rows, position) * self.heads + head) * self.head_dim;
        &rows[at..at + self.head_dim]
    }
}

/// Rounds a row that has just been stored, head by head.
fn round_row(kv: KvType, head_dim: usize, row: &mut [f32]) {
    if kv.is_narrow() {
        row.chunks_exact_mut(head_dim).for_each(|head| kv.round_head(head));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(position: usize, of: f32) -> impl Iterator<Item = f32> {
        (0..6).map(move |i| of + (10 * position + i) as f32)
    }

    fn append(kv: &mut KvLayer, pages: Pages<'_>, chunk: std::ops::Range<usize>, of: f32) {
        let keys: Vec<f32> = chunk.clone().flat_map(|p| row(p, of)).collect();
        let values: Vec<f32> = chunk.clone().flat_map(|p| row(p, of + 0.5)).collect();
        kv.append(pages, chunk.start, &keys, &values);
    }

    fn holds(kv: &KvLayer, pages: Pages<'_>, positions: std::ops::Range<usize>, of: f32) -> bool {
        let view = kv.view(pages);
        positions.flat_map(|p| [(p, 0), (p, 1)]).all(|(p, head)| {
            let part = |of| row(p, of).skip(3 * head).take(3);
            view.key(p, head).iter().copied().eq(part(of)) && view.value(p, head).iter().copied().eq(part(of + 0.5))
        })
    }

    #[test]
    fn rows_in_8_bits_are_rounded_once_and_head_by_head() {
        let row = |of: f32| (0..128).map(|i| of * ((i * 29 % 61) as f32 - 30.0)).collect::<Vec<f32>>();
        for kv in [KvType::Q8_0, KvType::Fp8] {
            let mut layer = KvLayer::new(1, 4, 2, 64).rounded_to(kv);
            layer.append(Pages::Ring(0), 3, &[row(0.11), row(0.7)].concat(), &[row(0.013), row(1e5)].concat());
            for (position, key, value) in [(3, 0.11, 0.013), (4, 0.7, 1e5)] {
                for head in 0..2 {
                    let view = layer.view(Pages::Ring(0));
                    for (found, of) in [(view.key(position, head), key), (view.value(position, head), value)] {
                        let mut expected = row(of)[head * 64..][..64].to_vec();
                        kv.round_head(&mut expected);
                        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                        assert!(found.iter().zip(&expected).all(same), "{kv:?} {position} {head}");
                        assert!(expected != row(of)[head * 64..][..64], "{kv:?} rounds");
                    }
                }
            }
        }
    }

    #[test]
    fn a_ring_keeps_the_latest_positions() {
        let mut kv = KvLayer::new(2, 5, 2, 3);
        assert_eq!(kv.bytes(), 2 * 4 * 2 * 5 * 2 * 3);
        for chunk in [0..4, 4..5, 5..9, 9..13] {
            append(&mut kv, Pages::Ring(1), chunk.clone(), 0.0);
            // The neighbour is at another place of its own.
            append(&mut kv, Pages::Ring(0), chunk.start + 2..chunk.end + 2, 0.25);
            assert!(holds(&kv, Pages::Ring(1), chunk.end.saturating_sub(5)..chunk.end, 0.0));
        }
        kv.copy_page(1, 0);
        assert!(holds(&kv, Pages::Ring(0), 8..13, 0.0));
    }

    #[test]
    fn a_table_names_the_pages_of_a_sequence() {
        let mut kv = KvLayer::new(4, 4, 2, 3);
        let (one, other) = (Pages::Table(&[3, 0, 1]), Pages::Table(&[2]));
        append(&mut kv, one, 0..3, 0.0);
        append(&mut kv, other, 0..4, 0.25);
        append(&mut kv, one, 3..11, 0.0);
        assert!(holds(&kv, one, 0..11, 0.0) && holds(&kv, other, 0..4, 0.25));
        assert!(kv.view(one).has_room_for(0, 12) && !kv.view(one).has_room_for(0, 13));
        let saved = kv.read_page(0).concat();
        append(&mut kv, Pages::Table(&[0]), 0..4, 0.25);
        assert!(!holds(&kv, one, 4..8, 0.0));
        assert!(kv.write_page(2, &saved).is_empty());
        assert!(holds(&kv, Pages::Table(&[3, 2, 1]), 0..11, 0.0));
    }
}
