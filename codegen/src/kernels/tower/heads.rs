//! Queries, keys and values of patches, from their product to the tiles that [`warpgroups`](super::warpgroups)
//! multiplies: bounds, head norms, rotation by column and row, and one rounding to bf16. Attention then copies the
//! tiles as they are.
//!
//! A tile of queries or keys is 128 patches by 64 values of a head. A tile of values is transposed: a head's values by
//! 64 patches. Both have wgmma's 128-byte swizzle: 16-byte vector `p` of line `r` is stored in place `p ^ r % 8`. A
//! head is padded with zeros to a multiple of 16 values. What a tile has beyond that is not written, since nothing
//! multiplies it. Patches that are not in use are zeros up to the end of their 128.
//!
//! Queries are multiplied by log2(e): attention takes powers of two.

// A kernel has no constants of Rust's library.
#![allow(clippy::approx_constant)]

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::clipped::bounded4;
use crate::kernels::heads::{cos_sin, rotated};

/// A head of D values in tiles. PADDED: D up to a multiple of 16. TILES: tiles of queries or keys side by side, 64
/// values each. VALUES: lines of a tile of values, as many columns as its product has.
#[config]
pub struct PatchTiling {
    pub D: u32,
    pub PADDED: u32,
    pub TILES: u32,
    pub VALUES: u32,
}

/// Queries, keys or values as their product wrote them, and the bounds of that product's result, one element each.
#[view]
pub struct PatchProjection {
    x: Input<f32>,
    low: Weights<f32>,
    high: Weights<f32>,
}

/// What norms and rotates queries and keys. Values have a norm without a weight, and no rotation.
#[view]
pub struct PatchNorms {
    q_weight: Weights<f32>,
    k_weight: Weights<f32>,
    inverse_frequencies: Weights<f32>,
    epsilon: f32,
}

/// The tiles of all heads, with capacity for `blocks` 128s of patches.
#[view]
pub struct PatchTilesOut {
    q: Output<BF16>,
    k: Output<BF16>,
    v: Output<BF16>,
    blocks: u32,
}

/// 64 patches of a head in shared memory, from patch `first` on. Rows of `values` are a value longer than a head, so
/// that threads of neighbouring rows read different banks. `factors`: the norm's, one for each row.
#[view]
pub struct PatchRows {
    values: Shared<f32>,
    factors: Shared<f32>,
    first: u32,
}

/// Reads 64 patches of a head within their bounds, `count` patches being in use; the others are zeros. Rows of `from`
/// are `stride` values apart.
#[device]
pub fn load_patches<const D: u32>(to: PatchRows, from: PatchProjection, count: u32, stride: u32) {
    let low = from.low[0u32];
    let high = from.high[0u32];
    // All loads of a thread are in flight at once.
    #[unroll]
    for i in (0..16 * D).by(128) {
        let at = (i + thread_idx()) * 4;
        let row = at / D;
        let patch = to.first + row;
        if at < 64 * D {
            let mut four = F32x4::ZERO;
            if patch < count {
                four = load::<F32x4>(from.x, patch as u64 * stride as u64 + (block_idx() * D + at % D) as u64);
                four = bounded4(four, low, high);
            }
            let place = row * (D + 1) + at % D;
            to.values[place] = four.x;
            to.values[place + 1] = four.y;
            to.values[place + 2] = four.z;
            to.values[place + 3] = four.w;
        }
    }
}

/// The factor of each row's RMS norm, times `scale`. Two threads take a row's squares.
#[device]
pub fn patch_factors<const D: u32>(rows: PatchRows, epsilon: f32, scale: f32) {
    let half_row = thread_idx() / 2 * (D + 1) + thread_idx() % 2 * (D / 2);
    let mut squares = 0.0f32;
    #[unroll]
    for i in 0..D / 2 {
        squares = rows.values[half_row + i].mul_add(rows.values[half_row + i], squares);
    }
    squares = squares + shfl_xor(squares, 1);
    if thread_idx() % 2 == 0 {
        rows.factors[thread_idx() / 2] = rsqrt(squares / D as f32 + epsilon) * scale;
    }
}

/// Normed values to their tile, transposed.
#[device]
pub fn write_value_tile<const D: u32, const VALUES: u32>(rows: PatchRows, out: Output<BF16>, blocks: u32) {
    for i in (thread_idx()..D * 8).by(128) {
        let line = i / 8;
        let vector = i % 8;
        let mut eight = regs(0.0f32, 8);
        #[unroll]
        for e in 0u32..8 {
            eight[e] = rows.values[(vector * 8 + e) * (D + 1) + line] * rows.factors[vector * 8 + e];
        }
        let packed = u32x4(
            pack_bf16(eight[0], eight[1]),
            pack_bf16(eight[2], eight[3]),
            pack_bf16(eight[4], eight[5]),
            pack_bf16(eight[6], eight[7]),
        );
        let tile = block_idx() * blocks * 2 + rows.first / 64;
        store(out, (tile * VALUES + line) as u64 * 64 + ((vector ^ line % 8) * 8) as u64, packed);
    }
}

/// Norms and rotates in place: the first half of a head by the patch's column, the second by its row in a grid of
/// `columns`. A thread takes a pair.
#[device]
pub fn rotate_patches<const D: u32>(
    rows: PatchRows,
    weight: Weights<f32>,
    inverse_frequencies: Weights<f32>,
    columns: u32,
) {
    for i in (thread_idx()..64 * (D / 2)).by(128) {
        let row = i / (D / 2);
        let pair = i % (D / 2);
        let half = pair / (D / 4);
        let turn = pair % (D / 4);
        let patch = rows.first + row;
        let at = if half == 0 { patch % columns } else { patch / columns };
        let from = row * (D + 1) + half * (D / 2) + turn;
        let value = half * (D / 2) + turn;
        let near = rows.values[from] * rows.factors[row] * weight[value];
        let far = rows.values[from + D / 4] * rows.factors[row] * weight[value + D / 4];
        let turned = rotated(near, far, cos_sin(at as f32 * inverse_frequencies[turn]));
        rows.values[from] = turned.x;
        rows.values[from + D / 4] = turned.y;
    }
}

/// Queries or keys to their tiles, padded with zeros.
#[device]
pub fn write_query_tile<const T: PatchTiling>(rows: PatchRows, out: Output<BF16>, blocks: u32) {
    for i in (thread_idx()..64 * (T.PADDED / 8)).by(128) {
        let row = i / (T.PADDED / 8);
        let vector = i % (T.PADDED / 8);
        let mut eight = U32x4::ZERO;
        if vector * 8 + 8 <= T.D {
            let from = row * (T.D + 1) + vector * 8;
            eight = u32x4(
                pack_bf16(rows.values[from], rows.values[from + 1]),
                pack_bf16(rows.values[from + 2], rows.values[from + 3]),
                pack_bf16(rows.values[from + 4], rows.values[from + 5]),
                pack_bf16(rows.values[from + 6], rows.values[from + 7]),
            );
        }
        let tile = (block_idx() * blocks + rows.first / 128) * T.TILES + vector / 8;
        let line = rows.first % 128 + row;
        store(out, tile as u64 * 8192 + (line * 64 + (vector % 8 ^ line % 8) * 8) as u64, eight);
    }
}

/// Norms, rotates and rounds 64 patches of one head. The grid is (heads, 64s of patches, 3): queries, keys, values.
/// Rows of the product are `stride` values apart.
#[kernel(block = 128)]
pub fn patch_heads<const T: PatchTiling>(
    q: PatchProjection,
    k: PatchProjection,
    v: PatchProjection,
    norms: PatchNorms,
    grid: Input<u32>,
    tiles: PatchTilesOut,
    stride: u32,
) {
    require!(T.D % 4 == 0 && T.PADDED % 16 == 0 && T.PADDED >= T.D && T.PADDED <= T.TILES * 64 && T.VALUES >= T.D);
    let values = shared::<f32>(64 * (T.D + 1));
    let factors = shared::<f32>(64);
    let rows = PatchRows { values, factors, first: block_idx_y() * 64 };
    let which = block_idx_z();
    let count = grid[1u32];
    // The whole block returns: no patch of its 128 is in use.
    if rows.first / 128 * 128 >= count {
        return;
    }
    let source = if which == 0 {
        q
    } else if which == 1 {
        k
    } else {
        v
    };
    load_patches(rows, source, count, stride);
    barrier();
    patch_factors(rows, norms.epsilon, if which == 0 { 1.442695f32 } else { 1.0f32 });
    barrier();
    if which == 2 {
        write_value_tile(rows, tiles.v, tiles.blocks);
        return;
    }
    rotate_patches(
        rows,
        if which == 0 { norms.q_weight } else { norms.k_weight },
        norms.inverse_frequencies,
        grid[2u32],
    );
    barrier();
    write_query_tile(rows, if which == 0 { tiles.q } else { tiles.k }, tiles.blocks);
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

    /// For kernels.
    pub fn tiling(&self) -> PatchTiling {
        PatchTiling { D: self.dim, PADDED: self.padded(), TILES: self.tiles(), VALUES: self.values() }
    }

    /// A [`patch_heads`].
    pub fn instance(&self) -> Result<Instance, InstanceError> {
        patch_heads::Chosen { T: self.tiling() }.build()
    }

    /// Its grid.
    pub fn grid(heads: u32, patches: u32) -> [u32; 3] {
        [heads, 2 * Self::blocks(patches), 3]
    }
}
