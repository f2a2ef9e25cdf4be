//! Queries, keys and values of patches, from their product to the tiles that [`warpgroups`](super::warpgroups) multiplies: bounds, head norms, rotation by column
//! and row, and one rounding to bf16, so that attention copies what it reads as it lies.
//!
//! Queries and keys lie in tiles of 128 patches by 64 values of a head, values on their side, in tiles of a head's values by 64 patches. Both are swizzled as wgmma
//! reads them: the 16-byte piece `p` of a line `r` lies in the place of piece `p ^ r % 8`. A head is filled up with zeros to a multiple of 16; what lies beyond that in
//! a tile is left alone, since nobody multiplies it. Patches beyond those in use are zeros up to the end of their 128.
//!
//! Queries are multiplied by log2(e): attention takes powers of two.

// A kernel has no constants of Rust's library.
#![allow(clippy::approx_constant)]

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::clipped::bounded4;
use crate::kernels::heads::{cos_sin, rotated};

/// Norms, rotates and rounds 64 patches of one head. The grid is (heads, 64s of patches, 3): queries, keys, values. Rows of the product are `stride` values apart;
/// `blocks` are the 128s of patches that there is room for.
#[kernel(block = 128)]
pub fn patch_heads<const D: u32, const PADDED: u32, const TILES: u32, const VALUES: u32>(
    q: Input<f32>,
    k: Input<f32>,
    v: Input<f32>,
    q_weight: Weights<f32>,
    k_weight: Weights<f32>,
    q_low: Weights<f32>,
    q_high: Weights<f32>,
    k_low: Weights<f32>,
    k_high: Weights<f32>,
    v_low: Weights<f32>,
    v_high: Weights<f32>,
    inverse_frequencies: Weights<f32>,
    grid: Input<u32>,
    q_out: Output<BF16>,
    k_out: Output<BF16>,
    v_out: Output<BF16>,
    stride: u32,
    blocks: u32,
    epsilon: f32,
) {
    require!(D % 4 == 0 && PADDED % 16 == 0 && PADDED >= D && PADDED <= TILES * 64 && VALUES >= D);
    let tile = shared::<f32>(64 * (D + 1));
    let factors = shared::<f32>(64);
    let head = block_idx();
    let first = block_idx_y() * 64;
    let which = block_idx_z();
    let count = grid[1u32];
    let columns = grid[2u32];
    // The whole block leaves: no patch of its 128 is in use.
    if first / 128 * 128 >= count {
        return;
    }
    let x = if which == 0 {
        q
    } else if which == 1 {
        k
    } else {
        v
    };
    let weight = if which == 0 { q_weight } else { k_weight };
    let low = if which == 0 {
        q_low[0u32]
    } else if which == 1 {
        k_low[0u32]
    } else {
        v_low[0u32]
    };
    let high = if which == 0 {
        q_high[0u32]
    } else if which == 1 {
        k_high[0u32]
    } else {
        v_high[0u32]
    };
    let scale = if which == 0 { 1.442695f32 } else { 1.0f32 };

    // All loads of a thread are under way at once; rows are a value longer than a head, so that threads of neighbouring rows read different banks.
    #[unroll]
    for i in (0..16 * D).by(128) {
        let at = (i + thread_idx()) * 4;
        let row = at / D;
        let patch = first + row;
        if at < 64 * D {
            let mut four = F32x4::ZERO;
            if patch < count {
                four = load::<F32x4>(x, patch as u64 * stride as u64 + (head * D + at % D) as u64);
                four = bounded4(four, low, high);
            }
            let to = row * (D + 1) + at % D;
            tile[to] = four.x;
            tile[to + 1] = four.y;
            tile[to + 2] = four.z;
            tile[to + 3] = four.w;
        }
    }
    barrier();

    // Two threads take a row's squares.
    let own_row = thread_idx() / 2 * (D + 1) + thread_idx() % 2 * (D / 2);
    let mut squares = 0.0f32;
    #[unroll]
    for i in 0..D / 2 {
        squares = tile[own_row + i].mul_add(tile[own_row + i], squares);
    }
    squares = squares + shfl_xor(squares, 1);
    if thread_idx() % 2 == 0 {
        factors[thread_idx() / 2] = rsqrt(squares / D as f32 + epsilon) * scale;
    }
    barrier();

    if which == 2 {
        for i in (thread_idx()..D * 8).by(128) {
            let line = i / 8;
            let piece = i % 8;
            let mut eight = regs(0.0f32, 8);
            #[unroll]
            for e in 0u32..8 {
                eight[e] = tile[(piece * 8 + e) * (D + 1) + line] * factors[piece * 8 + e];
            }
            let packed = u32x4(
                pack_bf16(eight[0], eight[1]),
                pack_bf16(eight[2], eight[3]),
                pack_bf16(eight[4], eight[5]),
                pack_bf16(eight[6], eight[7]),
            );
            let block = head * blocks * 2 + first / 64;
            store(v_out, (block * VALUES + line) as u64 * 64 + ((piece ^ line % 8) * 8) as u64, packed);
        }
        return;
    }

    // A thread turns a pair in its place.
    for i in (thread_idx()..64 * (D / 2)).by(128) {
        let row = i / (D / 2);
        let pair = i % (D / 2);
        let half = pair / (D / 4);
        let turn = pair % (D / 4);
        let patch = first + row;
        let at = if half == 0 { patch % columns } else { patch / columns };
        let from = row * (D + 1) + half * (D / 2) + turn;
        let value = half * (D / 2) + turn;
        let near = tile[from] * factors[row] * weight[value];
        let far = tile[from + D / 4] * factors[row] * weight[value + D / 4];
        let turned = rotated(near, far, cos_sin(at as f32 * inverse_frequencies[turn]));
        tile[from] = turned.x;
        tile[from + D / 4] = turned.y;
    }
    barrier();
    let out = if which == 0 { q_out } else { k_out };
    for i in (thread_idx()..64 * (PADDED / 8)).by(128) {
        let row = i / (PADDED / 8);
        let piece = i % (PADDED / 8);
        let mut eight = U32x4::ZERO;
        if piece * 8 + 8 <= D {
            let from = row * (D + 1) + piece * 8;
            eight = u32x4(
                pack_bf16(tile[from], tile[from + 1]),
                pack_bf16(tile[from + 2], tile[from + 3]),
                pack_bf16(tile[from + 4], tile[from + 5]),
                pack_bf16(tile[from + 6], tile[from + 7]),
            );
        }
        let block = (head * blocks + first / 128) * TILES + piece / 8;
        let line = first % 128 + row;
        store(out, block as u64 * 8192 + (line * 64 + (piece % 8 ^ line % 8) * 8) as u64, eight);
    }
}

/// How the tiles of a head are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadTiles {
    pub dim: u32,
}

impl HeadTiles {
    /// Heads that the kernels take.
    pub fn of(dim: u32) -> Option<HeadTiles> {
        (dim.is_multiple_of(8) && (8..=128).contains(&dim)).then_some(HeadTiles { dim })
    }

    /// Values of a head that are multiplied.
    pub fn padded(&self) -> u32 {
        self.dim.next_multiple_of(16)
    }

    /// Tiles of 64 values.
    pub fn tiles(&self) -> u32 {
        self.dim.div_ceil(64)
    }

    /// Lines of a tile of values: as many columns as a product has.
    pub fn values(&self) -> u32 {
        self.dim.next_multiple_of(32)
    }

    /// 128s of so many patches.
    pub fn blocks(patches: u32) -> u32 {
        patches.div_ceil(128)
    }

    /// bf16 values of the queries, or of the keys, of so many patches.
    pub fn query_values(&self, heads: u32, patches: u32) -> u64 {
        u64::from(heads) * u64::from(Self::blocks(patches)) * u64::from(self.tiles()) * 8192
    }

    /// The same of the values.
    pub fn value_values(&self, heads: u32, patches: u32) -> u64 {
        u64::from(heads) * u64::from(Self::blocks(patches)) * 128 * u64::from(self.values())
    }

    /// A [`patch_heads`].
    pub fn instance(&self) -> Result<Instance, InstanceError> {
        patch_heads::Chosen { D: self.dim, PADDED: self.padded(), TILES: self.tiles(), VALUES: self.values() }.build()
    }

    /// Its grid.
    pub fn grid(heads: u32, patches: u32) -> [u32; 3] {
        [heads, 2 * Self::blocks(patches), 3]
    }
}
