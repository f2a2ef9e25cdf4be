//! The experts of several decoded rows, gathered by who chose them: an expert's weights are read once for all rows that
//! chose it.
//!
//! Few rows choose the same expert: of 32 rows that go to 8 of 128 experts each, two or three. So a task is an expert,
//! up to HEIGHT of its rows and some of its outputs: a unit of weights that has arrived is multiplied by each of these
//! rows in turn, on CUDA cores, which takes no longer than its bytes do. Every row has the bits it has alone: the lanes
//! that share an output, the order of their units and the tree of their sums are those of the kernels of one row.
//!
//! Which rows chose which expert every block finds out for itself ([`gather`]), in less time than a launch takes. A row
//! is a bit of an expert's word, so a block has 32 rows at most; more are the grid's y.
//!
//! The dense half of a mixture comes along for few rows, as it does for one. More rows have it as [products of their
//! own](crate::kernels::rows), on tensor cores: all rows go to it, so CUDA cores would take longer than its bytes.

pub mod down;
pub mod gate_up;

use gemma4c_dsl::InstanceError;
use gemma4c_dsl::prelude::*;

use super::UnitFormat;
use super::group::Grouping;
use crate::kernels::matvec::parts::part_at;

/// Rows of a task, the kernels' HEIGHT. An expert that more rows chose is read again.
const TASK_ROWS: u32 = 4;
/// Rows of a block: a row is a bit of a word.
const MOST_ROWS: u32 = 32;
/// Rows with which the dense half comes along, at most.
pub const MOST_DENSE_ROWS: u32 = 16;
/// Warps of a block, which is alone on its SM.
const BLOCK_WARPS: u32 = 16;

/// Why there is no kernel for gathered experts. Each names what is wrong with them.
#[derive(Debug, thiserror::Error)]
pub enum GatheredError {
    #[error("gathered experts: rows of {width} values are not whole groups of 32")]
    Width { width: u32 },
    #[error("gathered experts: {experts} of them are more than a block has threads to list them")]
    Experts { experts: u32 },
    #[error(transparent)]
    Instance(#[from] InstanceError),
}

/// Whether a block can list the experts, and all of these widths are whole groups.
fn check(experts: u32, widths: [u32; 3]) -> Result<(), GatheredError> {
    if experts > BLOCK_WARPS * 32 {
        return Err(GatheredError::Experts { experts });
    }
    match widths.into_iter().find(|width| !width.is_multiple_of(32)) {
        Some(width) => Err(GatheredError::Width { width }),
        None => Ok(()),
    }
}

/// The rows of a block, and the tasks that they make.
#[config]
pub struct GatheredTile {
    /// Of the model.
    pub EXPERTS: u32,
    /// Rows of a block, at most.
    pub ROWS: u32,
    /// Rows of a task, at most.
    pub HEIGHT: u32,
    /// The most groups of rows with the same expert.
    pub GROUPS: u32,
    pub WARPS: u32,
}

impl GatheredTile {
    fn of(experts: u32, top: u32, rows: u32) -> Self {
        let groups = most_groups(experts, top, rows);
        Self { EXPERTS: experts, ROWS: rows, HEIGHT: TASK_ROWS, GROUPS: groups, WARPS: BLOCK_WARPS }
    }
}

/// Rows of activations as words: int8 codes with a scale and a sum for each 32, or floats.
#[view]
pub struct ActivationRows {
    pub words: Input<u32>,
    pub scales: Input<f32>,
    pub sums: Input<i32>,
}

/// The rows of a block that chose the same expert, HEIGHT of them at most.
#[registers]
pub struct Gathered {
    pub expert: u32,
    /// How many rows they are.
    pub count: u32,
    /// Their numbers within the block, a byte each; those of rows that are not there are 0.
    pub rows: u32,
    /// The numbers of their pairs of a row and a choice, one after the other, 16 bits each.
    pub low_pairs: u32,
    pub high_pairs: u32,
}

#[device]
pub fn gathered_at(groups: Shared<U32x4>, index: u32) -> Gathered {
    let entry = groups[index];
    Gathered { expert: entry.x & 0xffff, count: entry.x >> 16, rows: entry.y, low_pairs: entry.z, high_pairs: entry.w }
}

/// The number of the pair of a row and a choice that is the `i`-th of a task, by [`Gathered::low_pairs`] and
/// [`Gathered::high_pairs`].
#[device]
pub fn pair_of(low_pairs: u32, high_pairs: u32, i: u32) -> u32 {
    let word = if i < 2 { low_pairs } else { high_pairs };
    word >> (i % 2 * 16) & 0xffff
}

/// Lists the experts that a block's rows chose, in order, each with its rows, HEIGHT of them at a time; gives the
/// length of that list. `chosen` keeps the choices, `masks` who made them. A collective of the block, with a barrier at
/// its end.
#[device]
pub fn gather<const EXPERTS: u32, const TOP: u32, const HEIGHT: u32, const WARPS: u32>(
    first_row: u32,
    rows: u32,
    ids: Input<u32>,
    chosen: Shared<u32>,
    masks: Shared<u32>,
    of_warps: Shared<u32>,
    groups: Shared<U32x4>,
) -> u32 {
    require!(HEIGHT <= 4 && EXPERTS <= WARPS * 32 && EXPERTS < 65536);
    for expert in (thread_idx()..EXPERTS).by(WARPS * 32) {
        masks[expert] = 0;
    }
    for pair in (thread_idx()..rows * TOP).by(WARPS * 32) {
        chosen[pair] = ids[first_row * TOP + pair];
    }
    barrier();
    for pair in (thread_idx()..rows * TOP).by(WARPS * 32) {
        // A row of what is not a number may name an expert twice. Its bit must not be added twice: it would become
        // another row's.
        let mut again = false;
        for before in pair / TOP * TOP..pair {
            again = again || chosen[before] == chosen[pair];
        }
        if !again {
            atomic_add(masks, chosen[pair], 1u32 << (pair / TOP));
        }
    }
    barrier();
    let mut mask = 0u32;
    if thread_idx() < EXPERTS {
        mask = masks[thread_idx()];
    }
    let own = mask.count_ones().div_ceil(HEIGHT);
    // Tasks of the experts up to this one, of this warp's.
    let mut through = own;
    #[unroll]
    for level in 0u32..5 {
        let distance = 1u32 << level;
        let before = shfl_idx(through, lane_id().max(distance) - distance);
        if lane_id() >= distance {
            through = through + before;
        }
    }
    if lane_id() == 31 {
        of_warps[warp_id()] = through;
    }
    barrier();
    let mut all = 0u32;
    let mut at = through - own;
    #[unroll]
    for warp in 0..WARPS {
        let of_warp = of_warps[warp];
        all = all + of_warp;
        at = at + if warp < warp_id() { of_warp } else { 0 };
    }
    while mask != 0 {
        let mut count = 0u32;
        let mut rows_of = 0u32;
        let mut low_pairs = 0u32;
        let mut high_pairs = 0u32;
        #[unroll]
        for i in 0..HEIGHT {
            if mask != 0 {
                let row = mask.trailing_zeros();
                mask = mask & (mask - 1);
                let mut pair = row * TOP;
                for j in 0..TOP {
                    if chosen[row * TOP + j] == thread_idx() {
                        pair = row * TOP + j;
                    }
                }
                count = count + 1;
                rows_of = rows_of | row << (i * 8);
                if i < 2 {
                    low_pairs = low_pairs | pair << (i % 2 * 16);
                } else {
                    high_pairs = high_pairs | pair << (i % 2 * 16);
                }
            }
        }
        groups[at] = u32x4(thread_idx() | count << 16, rows_of, low_pairs, high_pairs);
        at = at + 1;
    }
    barrier();
    all
}

/// Issues the copies of `vectors` vectors of `k` activations to shared memory, from vector `first` on. They are there
/// after `cp_async_wait()` and a barrier.
#[device]
pub fn stage_vectors<const F: UnitFormat, const WARPS: u32>(
    k: u32,
    first: u32,
    vectors: u32,
    x: ActivationRows,
    words: Shared<u32>,
    scales: Shared<U32x2>,
) {
    let parts = if F.INTEGER { k / 16 } else { k / 4 };
    #[unroll(4)]
    for piece in (thread_idx()..vectors * parts).by(WARPS * 32) {
        let to = piece / parts * (parts * 4) + part_at(piece % parts, k / F.UNIT);
        cp_async16(words, to, x.words, first * (parts * 4) + piece * 4);
    }
    cp_async_commit();
    if F.INTEGER {
        #[unroll(4)]
        for group in (thread_idx()..vectors * (k / 32)).by(WARPS * 32) {
            let from = first * (k / 32) + group;
            scales[group] = u32x2(x.scales[from].to_bits(), x.sums[from] as u32);
        }
    }
}

/// The word and the group in shared memory with which vector `vector` of `k` activations starts.
#[device]
pub fn first_word<const INTEGER: bool>(k: u32, vector: u32) -> u32 {
    vector * if INTEGER { k / 4 } else { k }
}

#[device]
pub fn first_group<const INTEGER: bool>(k: u32, vector: u32) -> u32 {
    vector * if INTEGER { k / 32 } else { 0 }
}

/// Two sums over `lanes` lanes each, in the order of [`lanes_sum`](crate::kernels::matvec::lanes_sum): the first lane
/// gets the one, the lane halfway the other. Half of the lanes go on with the one, half with the other, so that two
/// sums take the shuffles of one.
#[device]
pub fn twin_sums(lanes: u32, first: f32, second: f32) -> f32 {
    let has_first = lane_id() % lanes < lanes / 2;
    let kept = if has_first { first } else { second };
    let given = if has_first { second } else { first };
    let mut sum = kept + shfl_xor(given, lanes / 2);
    let mut mask = lanes / 4;
    #[unroll]
    while mask > 0 {
        sum = sum + shfl_xor(sum, mask);
        mask = mask / 2;
    }
    sum
}

/// Words of shared memory that a vector of activations takes.
fn vector_words(integer: bool, k: u32) -> u32 {
    if integer { k / 4 + k / 32 * 2 } else { k }
}

/// Rows of a block, each with so many bytes of activations: as many as shared memory holds beside what else there is,
/// and no more than there are.
fn block_rows(rows: u32, row_bytes: u32, beside: u32, shared_bytes: u32) -> u32 {
    let held = shared_bytes.saturating_sub(beside) / row_bytes.max(1);
    held.min(MOST_ROWS).min(rows).max(1)
}

/// Tasks' entries, at most.
fn most_groups(experts: u32, top: u32, rows: u32) -> u32 {
    Grouping { experts, height: TASK_ROWS, pairs: rows * top }.most_groups()
}

/// Bytes of shared memory that [`gather`] takes, and a little for alignment.
fn gather_bytes(experts: u32, top: u32, rows: u32) -> u32 {
    rows * top * 4 + experts * 4 + BLOCK_WARPS * 4 + most_groups(experts, top, rows) * 16 + 512
}
