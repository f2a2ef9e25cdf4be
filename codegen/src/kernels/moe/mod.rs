//! Mixture of experts: the router, and for one row the products of the experts it chose, over repacked weights of any
//! type.
//!
//! The experts' matrices are one tall matrix: expert e's rows start at `e * rows`. Which experts a row goes to is known
//! on the device alone, when the router has ended. Gate and up follow it, so they cannot prefetch those weights: they
//! have many loads in flight at once, and prefetch the weights of the dense half, which comes along. Down reads the
//! choice while gate and up run, and prefetches all of its weights.
//!
//! A mixture is three launches: [`router`] ends attention's part, norms the residual for both halves and chooses;
//! [`gate_up`] gives each choice its hidden values, [`down`] brings all choices of a row back together. Weight formats
//! are those of the matrix-vector product. For several rows these kernels are right, but read an expert once for each
//! row that chose it: decoded rows are [`gathered`], with the same bits. In prefill [`group`] sorts rows by expert, and
//! the products are those of prefill.

pub mod choose;
pub mod down;
pub mod entry;
pub mod gate_up;
pub mod gathered;
pub mod group;
pub mod logits;
pub mod router;
pub mod routing;

use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::formats::Format;
use crate::kernels::quantise::quantise8;

/// A mixture's experts, and the dense half that comes along.
#[config]
pub struct ExpertShape {
    /// Values of a row of an expert's matrix.
    pub K: u32,
    /// Experts that a row goes to.
    pub TOP: u32,
    /// Hidden values of the dense half; 0 where none comes along.
    pub DENSE: u32,
}

/// How weights are stored: units of UNIT values, with 16 bytes of codes each; of INTEGER formats the activations are
/// int8.
#[config]
pub struct UnitFormat {
    pub UNIT: u32,
    pub INTEGER: bool,
}

impl UnitFormat {
    fn of(format: Format) -> Self {
        Self { UNIT: format.unit, INTEGER: format.integer }
    }
}

/// The codes of a mixture's weights: all experts one after the other, and the dense half.
#[view]
pub struct MixtureCodes {
    pub experts: Weights<U32x4>,
    pub dense: Weights<U32x4>,
}

/// The experts that each row goes to.
#[view]
pub struct ExpertChoice {
    pub ids: Input<u32>,
    /// How much a row takes of what each of its experts makes.
    pub shares: Input<f32>,
    /// What multiplies all results of an expert, by its number.
    pub scales: Weights<f32>,
}

/// Activations of the first products, as an earlier kernel wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Integer formats quantise them on arrival.
    F32,
    /// Codes, scales and sums of groups of 32. Only integer formats take them.
    Int8,
}

impl Activations {
    fn arrive(self) -> &'static DeviceDef {
        match self {
            Self::F32 => f32_piece::DEF,
            Self::Int8 => int8_piece::DEF,
        }
    }
}

/// Eight activations, of floats four: codes (x, y), scale (z) and sum (w) that an earlier kernel made.
#[device]
pub fn int8_piece<const INTEGER: bool>(piece: u32, xq: Input<u32>, xscale: Input<f32>, xsum: Input<i32>) -> U32x4 {
    require!(INTEGER);
    let codes = load::<U32x2>(xq, piece * 2);
    u32x4(codes.x, codes.y, xscale[piece / 4].to_bits(), xsum[piece / 4] as u32)
}

/// The same of floats: quantised here, a collective of the warp, or four of them as they are.
#[device]
pub fn f32_piece<const INTEGER: bool>(piece: u32, x: Input<f32>) -> U32x4 {
    if INTEGER {
        quantise8(load::<F32x4>(x, piece * 8), load::<F32x4>(x, piece * 8 + 4))
    } else {
        load::<U32x4>(x, piece * 4)
    }
}

/// There is no dense half.
#[device]
pub fn nothing_beside(unit: u32, more: u32) -> U32x4 {
    U32x4::ZERO
}

/// There is no dense half whose activations could arrive.
#[device]
pub fn nothing_arrives(piece: u32) -> U32x4 {
    U32x4::ZERO
}

/// How tasks, one for a warp at a time, are spread over a GPU: one block for each SM, because every block reads all
/// activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spread {
    warps: u32,
    blocks: u32,
    multiprocessors: u32,
}

/// Warps of a block: for few tasks, so that one each is enough; for many, of which the one that leaves the fewest idle
/// is taken.
const FEW_WARPS: [u32; 2] = [8, 24];
const MANY_WARPS: [u32; 3] = [20, 16, 12];
/// Registers of an SM, those of a lane that are not for units in flight, and the most that are.
const REGISTERS: (u32, u32, u32) = (65536, 50, 60);

impl Spread {
    fn of(tasks: u32, multiprocessors: u32) -> Self {
        let multiprocessors = multiprocessors.max(1);
        let each = tasks.div_ceil(multiprocessors);
        let idle = |warps: &u32| each.div_ceil(*warps) * warps - each;
        let warps = match each {
            _ if each <= FEW_WARPS[1] => each.max(FEW_WARPS[0]),
            _ => MANY_WARPS.into_iter().min_by_key(idle).unwrap_or(MANY_WARPS[0]),
        };
        Self { warps, blocks: tasks.div_ceil(warps).clamp(1, multiprocessors), multiprocessors }
    }

    /// Blocks for `rows` rows.
    fn grid(self, rows: u32) -> [u32; 3] {
        [(2 * self.multiprocessors).div_ceil(rows).min(self.blocks), rows, 1]
    }
}

/// Units of each of a lane's rows that are in flight: as many as registers hold, and no more than a row has.
fn depth(format: Format, rows: u32, units: u32, spread: Spread) -> u32 {
    let registers = (REGISTERS.0 / (spread.warps * 32)).saturating_sub(REGISTERS.1).min(REGISTERS.2);
    (registers / (format.words() * rows)).clamp(1, units.div_ceil(32).max(1))
}
