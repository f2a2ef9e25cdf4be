//! How a product is spread over a GPU: a pure function of its type and shape, so that results never depend on load.
//!
//! The rule is short and measured: of some hundred combinations of lanes, rows, depth and blocks for the products of E4B and
//! 31B on an H200, these were the best or within a few per cent of it, alone and in a chain. What counts is bytes on their way
//! in a multiprocessor, since memory answers after about a microsecond under load, and work for every multiprocessor.

use gemma4c_blocks::DType;

use super::formats::format;

/// The compile-time parameters of a product, and its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Lanes that share a row.
    pub lanes: u32,
    /// Rows that a lane works on at once.
    pub rows: u32,
    /// Units of each row that are on their way to a lane.
    pub depth: u32,
    /// Warps of a block.
    pub warps: u32,
    /// Blocks of the grid.
    pub blocks: u32,
}

const WARPS: u32 = 4;
/// Blocks of a multiprocessor, at most: half of its threads. The rest is for the kernel that follows, whose first loads are to
/// be on their way before this one ends.
const RESIDENT: u32 = 6;
/// Warps of a multiprocessor, at least, before a lane takes more rows at once.
const BUSY_WARPS: u32 = 8;
/// Rows of a lane, and units of each on their way: many rows share what they read of the activations, few reach further ahead.
const ROWS_AND_DEPTH: [(u32, u32); 3] = [(4, 3), (2, 4), (1, 7)];
/// Registers of a lane for units on their way: what is left of 128 after addresses, sums and activations.
const AHEAD_REGISTERS: u32 = 60;

/// The shape of a product of `outputs` values (of twice as many rows, if `paired`) of `k` values each, for a GPU of that many
/// multiprocessors.
pub fn launch_shape(dtype: DType, outputs: u32, k: u32, paired: bool, multiprocessors: u32) -> LaunchShape {
    let (format, multiprocessors) = (format(dtype), multiprocessors.max(1));
    let units = (k / format.unit).max(1);
    // A row too short for all lanes of a warp is shared by fewer.
    let lanes = [32, 16].into_iter().find(|lanes| units >= *lanes).unwrap_or(8);
    // Steps of a whole warp that make all outputs.
    let tiles = |rows: u32| {
        let lane_outputs = if paired { rows / 2 } else { rows };
        outputs.div_ceil(32 / lanes * lane_outputs).max(1)
    };
    // A pair is two rows, so it cannot be split further.
    let fewest = if paired { 2 } else { 1 };
    let most_ahead = AHEAD_REGISTERS / (4 + format.side_words);
    // Many rows pay only if each still has several units on its way.
    let fits = |rows: u32| tiles(rows) >= BUSY_WARPS * multiprocessors && 3 * rows <= most_ahead;
    let (rows, reach) =
        ROWS_AND_DEPTH.into_iter().find(|(rows, _)| *rows <= fewest || fits(*rows)).unwrap_or((fewest, 1));
    let (reach, steps) = (reach.min(most_ahead / rows).max(1), units.div_ceil(lanes));
    // A row shorter than that comes in two halves, one on its way while the other is used.
    let depth = if steps >= reach { reach } else { steps.div_ceil(2) };
    let blocks = tiles(rows).div_ceil(WARPS).min(multiprocessors * RESIDENT);
    LaunchShape { lanes, rows, depth, warps: WARPS, blocks }
}
