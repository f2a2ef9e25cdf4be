//! The KV cache of one layer, in f32; rounded, where a plan's keys and values have 8 bits.
//!
//! A ring of rows: position p lies in row `p % capacity`. A global layer's capacity is the context, so nothing is ever
//! overwritten; a sliding layer's is its window plus the longest chunk, since a whole chunk is appended before its first row
//! looks back a window.

use gemma4c_plan::cuda::KvType;

use super::aligned::Aligned;

/// Keys and values of one layer: one row a position, one key and one value a head.
#[derive(Debug)]
pub struct KvLayer {
    capacity: usize,
    heads: usize,
    head_dim: usize,
    /// What rows are rounded to as they are appended.
    kv: KvType,
    keys: Aligned,
    values: Aligned,
}

impl KvLayer {
    /// Memory is only reserved: the system hands it out zeroed and page by page as rows are written, so a long context costs
    /// what it holds.
    pub fn new(capacity: usize, heads: usize, head_dim: usize) -> KvLayer {
        let len = capacity * heads * head_dim;
        let (keys, values) = (Aligned::zeros(len), Aligned::zeros(len));
        KvLayer { capacity, heads, head_dim, kv: KvType::F32, keys, values }
    }

    /// The same layer, whose rows are rounded as a GPU that keeps them in this type.
    pub fn rounded_to(self, kv: KvType) -> KvLayer {
        KvLayer { kv, ..self }
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
            for rows in [&mut self.keys, &mut self.values] {
                round_row(self.kv, self.head_dim, &mut rows.as_mut_slice()[at..at + width]);
            }
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

/// Rounds a row that has just been stored, head by head.
fn round_row(kv: KvType, head_dim: usize, row: &mut [f32]) {
    if kv.is_narrow() {
        row.chunks_exact_mut(head_dim).for_each(|head| kv.round_head(head));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_in_8_bits_are_rounded_once_and_head_by_head() {
        let row = |of: f32| (0..128).map(|i| of * ((i * 29 % 61) as f32 - 30.0)).collect::<Vec<f32>>();
        for kv in [KvType::Q8_0, KvType::Fp8] {
            let mut layer = KvLayer::new(4, 2, 64).rounded_to(kv);
            layer.append(3, &[row(0.11), row(0.7)].concat(), &[row(0.013), row(1e5)].concat());
            for (position, key, value) in [(3, 0.11, 0.013), (4, 0.7, 1e5)] {
                for head in 0..2 {
                    for (found, of) in [(layer.key(position, head), key), (layer.value(position, head), value)] {
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
