//! The KV cache of one layer, in f32.
//!
//! A ring of rows: position p lies in row `p % capacity`. A global layer's capacity is the context, so nothing is ever
//! overwritten; a sliding layer's is its window plus the longest chunk, since a whole chunk is appended before its first row
//! looks back a window.

use super::aligned::Aligned;

/// Keys and values of one layer: one row a position, one key and one value a head.
#[derive(Debug)]
pub struct KvLayer {
    capacity: usize,
    heads: usize,
    head_dim: usize,
    keys: Aligned,
    values: Aligned,
}

impl KvLayer {
    /// Memory is only reserved: the system hands it out zeroed and page by page as rows are written, so a long context costs
    /// what it holds.
    pub fn new(capacity: usize, heads: usize, head_dim: usize) -> KvLayer {
        let len = capacity * heads * head_dim;
        KvLayer { capacity, heads, head_dim, keys: Aligned::zeros(len), values: Aligned::zeros(len) }
    }

    /// Bytes of a layer of this shape, before it is made.
    pub const fn bytes_for(capacity: usize, heads: usize, head_dim: usize) -> usize {
        2 * size_of::<f32>() * capacity * heads * head_dim
    }

    /// Bytes reserved for rows.
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.capacity, self.heads, self.head_dim)
    }

    /// Positions kept: the latest of those appended.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn heads(&self) -> usize {
        self.heads
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Writes rows at `first_position` and on, over whatever those places held.
    pub fn append(&mut self, first_position: usize, keys: &[f32], values: &[f32]) {
        let width = self.heads * self.head_dim;
        assert!(keys.len() == values.len() && keys.len().is_multiple_of(width));
        assert!(keys.len() <= self.capacity * width, "a chunk longer than the ring would overwrite itself");
        for (i, (key, value)) in keys.chunks_exact(width).zip(values.chunks_exact(width)).enumerate() {
            let at = (first_position + i) % self.capacity * width;
            self.keys.as_mut_slice()[at..at + width].copy_from_slice(key);
            self.values.as_mut_slice()[at..at + width].copy_from_slice(value);
        }
    }

    /// The key of a head at a position that has been appended and not overwritten.
    #[inline(always)]
    pub fn key(&self, position: usize, head: usize) -> &[f32] {
        self.row(self.keys.as_slice(), position, head)
    }

    /// The value of a head at a position that has been appended and not overwritten.
    #[inline(always)]
    pub fn value(&self, position: usize, head: usize) -> &[f32] {
        self.row(self.values.as_slice(), position, head)
    }

    #[inline(always)]
    fn row<'a>(&self, rows: &'a [f32], position: usize, head: usize) -> &'a [f32] {
        let at = (position % self.capacity * self.heads + head) * self.head_dim;
        &rows[at..at + self.head_dim]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_keeps_the_latest_positions() {
        let mut kv = KvLayer::new(5, 2, 3);
        assert_eq!(kv.bytes(), 2 * 4 * 5 * 2 * 3);
        let row = |position: usize, of: f32| (0..6).map(move |i| of + (10 * position + i) as f32).collect::<Vec<_>>();
        for chunk in [0..4, 4..5, 5..9, 9..13] {
            let keys: Vec<f32> = chunk.clone().flat_map(|p| row(p, 0.0)).collect();
            let values: Vec<f32> = chunk.clone().flat_map(|p| row(p, 0.5)).collect();
            kv.append(chunk.start, &keys, &values);
            for position in chunk.end.saturating_sub(5)..chunk.end {
                for head in 0..2 {
                    assert_eq!(kv.key(position, head), &row(position, 0.0)[3 * head..][..3]);
                    assert_eq!(kv.value(position, head), &row(position, 0.5)[3 * head..][..3]);
                }
            }
        }
    }
}
