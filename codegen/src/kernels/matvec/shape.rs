//! How a product is spread over a GPU: a pure function of its type and shape, so that results never depend on load.
//!
//! Every combination of lanes, rows, depth and blocks is scored, and the best one taken. What counts: bytes on their way in a
//! multiprocessor (memory answers after about a microsecond under load), lanes that have no unit at the end of a row, and
//! multiprocessors that wait for the last one.

use gemma4c_blocks::DType;

use super::formats::format;
use crate::kernels::streams::{Stream, streams};

/// Bytes of a unit: its codes, and its part of the other streams.
fn unit_bytes(dtype: DType) -> f64 {
    let a_value = |stream: &Stream| stream.bytes as f64 / stream.per as f64;
    streams(dtype).iter().map(a_value).sum::<f64>() * f64::from(format(dtype).unit)
}

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

/// Threads of a multiprocessor that a product takes. The rest is for the kernel that follows, whose first loads are to be on
/// their way before this one ends.
const THREADS: u32 = 640;
/// Bytes on their way in a multiprocessor, beyond which more do not help.
const ENOUGH_BYTES: f64 = 65536.0;
/// Registers of a lane for units on their way: what is left of 128 after addresses, sums and activations.
const AHEAD_REGISTERS: u32 = 44;

/// The shape of a product of `outputs` values (of twice as many rows, if `paired`) of `k` values each, for a GPU of that many
/// multiprocessors.
pub fn launch_shape(dtype: DType, outputs: u32, k: u32, paired: bool, multiprocessors: u32) -> LaunchShape {
    let format = format(dtype);
    let work = Work {
        units: (k / format.unit).max(1),
        unit_bytes: unit_bytes(dtype),
        outputs,
        paired,
        multiprocessors: multiprocessors.max(1),
    };
    let most_ahead = AHEAD_REGISTERS / (4 + format.side_words);
    let mut best = LaunchShape { lanes: 32, rows: 2, depth: 1, warps: 4, blocks: work.multiprocessors };
    let mut best_score = 0.0;
    for lanes in [32, 16, 8] {
        for rows in if paired { &[2, 4][..] } else { &[2, 4, 1][..] }.iter().copied() {
            // More depth than a row has steps would only load its last unit again.
            for depth in 1..=(most_ahead / rows).min(work.units.div_ceil(lanes)) {
                for warps in [8, 4] {
                    for resident in 1..=THREADS / (warps * 32) {
                        let shape = work.fill(LaunchShape { lanes, rows, depth, warps, blocks: 0 }, resident);
                        let score = work.score(shape);
                        if score > best_score {
                            (best, best_score) = (shape, score);
                        }
                    }
                }
            }
        }
    }
    best
}

/// What a product has to do.
struct Work {
    /// Of a row.
    units: u32,
    unit_bytes: f64,
    outputs: u32,
    paired: bool,
    multiprocessors: u32,
}

impl Work {
    /// Steps of whole warps that make all outputs.
    fn tiles(&self, shape: LaunchShape) -> u32 {
        let lane_outputs = if self.paired { shape.rows / 2 } else { shape.rows };
        self.outputs.div_ceil(32 / shape.lanes * lane_outputs).max(1)
    }

    /// The shape with as many blocks as there is work for, at most `resident` a multiprocessor.
    fn fill(&self, shape: LaunchShape, resident: u32) -> LaunchShape {
        let blocks = self.tiles(shape).div_ceil(shape.warps).min(self.multiprocessors * resident);
        LaunchShape { blocks, ..shape }
    }

    /// The share of the memory's speed to be hoped for.
    fn score(&self, shape: LaunchShape) -> f64 {
        let LaunchShape { lanes, rows, depth, warps, blocks } = shape;
        let multiprocessors = f64::from(self.multiprocessors);
        // Loads past a row's end cost an instruction, not bandwidth.
        let steps = self.units.div_ceil(lanes * depth) * lanes * depth;
        let full_lanes = f64::from(self.units) / f64::from(steps);
        let issue = 0.7 + 0.3 * full_lanes;

        let tiles = self.tiles(shape);
        let busiest = blocks.div_ceil(self.multiprocessors) * warps * tiles.div_ceil(blocks * warps);
        let balance = f64::from(tiles) / multiprocessors / f64::from(busiest);

        let threads = f64::from(blocks * warps * 32) / multiprocessors;
        let on_their_way = threads * f64::from(rows * depth) * self.unit_bytes * full_lanes;
        let flight = (on_their_way / ENOUGH_BYTES).min(1.0);

        // Activations and addresses are shared by the rows of a lane; a sum over more lanes takes more shuffles.
        let instructions = (1.0 - 0.05 / f64::from(rows)) * (1.0 - 0.002 * f64::from(lanes.ilog2()));
        issue * balance * flight * instructions
    }
}
