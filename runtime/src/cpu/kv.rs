//! Keys and values of all layers for many sequences, in f32; rounded, where a plan's keys and values have 8 bits.
//!
//! They are on pages of one size, as on a GPU (`gemma4c_plan::cuda::KvLayout`): a page has some positions of one
//! sequence, of all sliding layers or of all full ones, and a sequence has a table of its pages for each kind. Those of
//! the sliding layers are used over and over: they hold the window and the longest chunk, since a whole chunk is
//! appended before its first row looks back a window.

use gemma4c_plan::cuda::{KvCache, KvLayout, KvShape, KvType, Paging};
use gemma4c_plan::{Cache, Plan};

use super::aligned::Aligned;

/// Keys and values of some layers: one row a position, one key and one value a head.
#[derive(Debug)]
pub struct KvMemory {
    floats: Aligned,
    /// Floats of a page.
    page: usize,
    layers: Vec<KvLayer>,
}

/// Where the rows of a layer are on a page.
#[derive(Clone, Copy, Debug)]
struct KvLayer {
    /// In floats.
    keys: usize,
    values: usize,
    rows: usize,
    heads: usize,
    head_dim: usize,
    /// What rows are rounded to as they are appended.
    kv: KvType,
}

/// Where one sequence's rows lie in layers of a kind.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// The pages that it has.
    pub table: &'a [u32],
    /// After so many of them the first is used again.
    pub entries: usize,
}

/// One sequence's keys and values in a layer.
#[derive(Clone, Copy, Debug)]
pub struct KvView<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    /// Floats of a page.
    page: usize,
    /// Rows of a page.
    rows: usize,
    heads: usize,
    head_dim: usize,
    pages: Pages<'a>,
}

/// How the keys and values of a plan are divided into pages on a CPU.
pub fn layout(plan: &Plan) -> KvLayout {
    let shape = |cache: &Cache| KvShape {
        window: cache.window,
        kept: cache.capacity,
        row_bytes: KvType::F32.row_bytes(cache.kv_heads, cache.head_dim),
    };
    KvLayout::divide(&plan.program.caches.iter().map(shape).collect::<Vec<_>>(), plan.program.context)
}

impl KvMemory {
    /// Memory is only reserved: the system hands it out zeroed and piece by piece as rows are written, so a long
    /// context costs what it holds. `caches` are those of the layout, which are rounded as a GPU that keeps them in
    /// this type.
    pub fn new(layout: &KvLayout, caches: &[Cache], pages: usize, kv: KvType) -> KvMemory {
        let float = size_of::<f32>();
        let layer = |(place, cache): (&KvCache, &Cache)| KvLayer {
            keys: place.keys as usize / float,
            values: place.values as usize / float,
            rows: layout.paging(place).rows as usize,
            heads: cache.kv_heads as usize,
            head_dim: cache.head_dim as usize,
            kv,
        };
        let layers = layout.caches.iter().zip(caches).map(layer).collect();
        let page = layout.page_bytes as usize / float;
        KvMemory { floats: Aligned::zeros(pages * page), page, layers }
    }

    /// One layer alone, with so many pages of so many rows.
    #[cfg(test)]
    pub fn of_layer(pages: usize, rows: usize, heads: usize, head_dim: usize) -> KvMemory {
        let values = rows * heads * head_dim;
        let layer = KvLayer { keys: 0, values, rows, heads, head_dim, kv: KvType::F32 };
        KvMemory { floats: Aligned::zeros(2 * pages * values), page: 2 * values, layers: vec![layer] }
    }

    /// The same, whose rows are rounded as a GPU that keeps them in this type.
    #[cfg(test)]
    fn rounded_to(mut self, kv: KvType) -> KvMemory {
        self.layers.iter_mut().for_each(|layer| layer.kv = kv);
        self
    }

    pub fn view<'a>(&'a self, layer: usize, pages: Pages<'a>) -> KvView<'a> {
        let KvLayer { keys, values, rows, heads, head_dim, .. } = self.layers[layer];
        let floats = self.floats.as_slice();
        KvView { keys: &floats[keys..], values: &floats[values..], page: self.page, rows, heads, head_dim, pages }
    }

    /// Writes rows of a sequence at `first_position` and on, over whatever those places held.
    pub fn append(&mut self, layer: usize, pages: Pages<'_>, first_position: usize, keys: &[f32], values: &[f32]) {
        let KvLayer { keys: keys_at, values: values_at, rows, heads, head_dim, kv } = self.layers[layer];
        let width = heads * head_dim;
        assert!(keys.len() == values.len() && keys.len().is_multiple_of(width));
        let kept = pages.entries.saturating_mul(rows).saturating_mul(width);
        assert!(keys.len() <= kept, "a chunk longer than its pages would overwrite itself");
        let floats = self.floats.as_mut_slice();
        for (i, (key, value)) in keys.chunks_exact(width).zip(values.chunks_exact(width)).enumerate() {
            let (page, row) = pages.place(first_position + i, rows);
            for (at, of) in [(keys_at, key), (values_at, value)] {
                let to = &mut floats[page * self.page + at + row * width..][..width];
                to.copy_from_slice(of);
                round_row(kv, head_dim, to);
            }
        }
    }

    /// Copies a page over another.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        let (from, to) = (self.of_page(from), self.of_page(to));
        self.floats.as_mut_slice().copy_within(from, to.start);
    }

    pub fn page(&self, page: u32) -> &[f32] {
        &self.floats.as_slice()[self.of_page(page)]
    }

    pub fn page_mut(&mut self, page: u32) -> &mut [f32] {
        let page = self.of_page(page);
        &mut self.floats.as_mut_slice()[page]
    }

    fn of_page(&self, page: u32) -> std::ops::Range<usize> {
        page as usize * self.page..(page as usize + 1) * self.page
    }
}

impl<'a> Pages<'a> {
    /// Of layers that are paged like this.
    pub fn of(table: &'a [u32], paging: Paging) -> Pages<'a> {
        Pages { table, entries: paging.entries as usize }
    }

    /// The page and the row there that have a position.
    #[inline(always)]
    fn place(&self, position: usize, rows: usize) -> (usize, usize) {
        let entry = position / rows;
        // A division takes as long as many products.
        let entry = if entry < self.entries { entry } else { entry % self.entries };
        (self.table[entry] as usize, position % rows)
    }
}

impl<'a> KvView<'a> {
    /// Rows that were never appended anywhere: position p is row p of both.
    pub fn of_rows(keys: &'a [f32], values: &'a [f32], heads: usize, head_dim: usize) -> KvView<'a> {
        let rows = keys.len() / (heads * head_dim);
        KvView { keys, values, page: 0, rows, heads, head_dim, pages: Pages { table: &[0], entries: 1 } }
    }

    pub fn heads(&self) -> usize {
        self.heads
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Whether the `reach` latest positions before `end` are there, if all were appended.
    pub fn has_room_for(&self, reach: usize, end: usize) -> bool {
        let kept = self.pages.entries * self.rows;
        reach <= kept && end.min(kept) <= self.pages.table.len() * self.rows
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
    fn head(&self, floats: &'a [f32], position: usize, head: usize) -> &'a [f32] {
        let (page, row) = self.pages.place(position, self.rows);
        let at = page * self.page + (row * self.heads + head) * self.head_dim;
        &floats[at..at + self.head_dim]
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

    fn ring(table: &[u32]) -> Pages<'_> {
        Pages { table, entries: table.len() }
    }

    fn row(position: usize, of: f32) -> impl Iterator<Item = f32> {
        (0..6).map(move |i| of + (10 * position + i) as f32)
    }

    fn append(kv: &mut KvMemory, pages: Pages<'_>, chunk: std::ops::Range<usize>, of: f32) {
        let keys: Vec<f32> = chunk.clone().flat_map(|p| row(p, of)).collect();
        let values: Vec<f32> = chunk.clone().flat_map(|p| row(p, of + 0.5)).collect();
        kv.append(0, pages, chunk.start, &keys, &values);
    }

    fn holds(kv: &KvMemory, pages: Pages<'_>, positions: std::ops::Range<usize>, of: f32) -> bool {
        let view = kv.view(0, pages);
        positions.flat_map(|p| [(p, 0), (p, 1)]).all(|(p, head)| {
            let part = |of| row(p, of).skip(3 * head).take(3);
            view.key(p, head).iter().copied().eq(part(of)) && view.value(p, head).iter().copied().eq(part(of + 0.5))
        })
    }

    #[test]
    fn rows_in_8_bits_are_rounded_once_and_head_by_head() {
        let row = |of: f32| (0..128).map(|i| of * ((i * 29 % 61) as f32 - 30.0)).collect::<Vec<f32>>();
        for kv in [KvType::Q8_0, KvType::Fp8] {
            let mut layer = KvMemory::of_layer(1, 4, 2, 64).rounded_to(kv);
            layer.append(0, ring(&[0]), 3, &[row(0.11), row(0.7)].concat(), &[row(0.013), row(1e5)].concat());
            for (position, key, value) in [(3, 0.11, 0.013), (4, 0.7, 1e5)] {
                for head in 0..2 {
                    let view = layer.view(0, ring(&[0]));
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
    fn the_pages_of_a_window_keep_the_latest_positions() {
        let mut kv = KvMemory::of_layer(5, 3, 2, 3);
        let (one, other) = (ring(&[4, 1]), ring(&[0, 2]));
        for chunk in [0..4, 4..5, 5..9, 9..13] {
            append(&mut kv, one, chunk.clone(), 0.0);
            // The neighbour is at another place of its own.
            append(&mut kv, other, chunk.start + 2..chunk.end + 2, 0.25);
            assert!(holds(&kv, one, chunk.end.saturating_sub(6)..chunk.end, 0.0));
        }
        assert!(kv.view(0, one).has_room_for(6, 100) && !kv.view(0, one).has_room_for(7, 100));
        [(4, 0), (1, 2)].into_iter().for_each(|(from, to)| kv.copy_page(from, to));
        assert!(holds(&kv, other, 7..13, 0.0));
        // A short sequence has fewer pages than a window.
        let short = Pages { table: &[3], entries: 2 };
        append(&mut kv, short, 0..3, 0.5);
        assert!(holds(&kv, short, 0..3, 0.5));
        assert!(kv.view(0, short).has_room_for(3, 3) && !kv.view(0, short).has_room_for(3, 4));
    }

    #[test]
    fn a_table_names_the_pages_of_a_sequence() {
        let mut kv = KvMemory::of_layer(4, 4, 2, 3);
        let (one, other) = (ring(&[3, 0, 1]), ring(&[2]));
        append(&mut kv, one, 0..3, 0.0);
        append(&mut kv, other, 0..4, 0.25);
        append(&mut kv, one, 3..11, 0.0);
        assert!(holds(&kv, one, 0..11, 0.0) && holds(&kv, other, 0..4, 0.25));
        let saved = kv.page(0).to_vec();
        append(&mut kv, ring(&[0]), 0..4, 0.25);
        assert!(!holds(&kv, one, 4..8, 0.0));
        kv.page_mut(2).copy_from_slice(&saved);
        assert!(holds(&kv, ring(&[3, 2, 1]), 0..11, 0.0));
    }
}
