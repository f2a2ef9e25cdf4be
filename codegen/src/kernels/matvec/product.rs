//! A matrix-vector product as plans ask for it: its type and sizes, how its activations arrive, what becomes of its results. From that follow its launch shape and its instance.

use gemma4c_blocks::DType;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use super::adapter::{Adapted, words_of};
use super::formats::format;
use super::{matvec, slots};
use crate::kernels::NORM_EPSILON;

/// How the activations arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prologue {
    /// Quantised by an earlier kernel: integer formats alone.
    Int8,
    /// f32; integer formats quantise them.
    Plain,
    /// The RMS norm of f32.
    Norm,
    /// A residual that is still to take a layer's normed part, and its scale if the product is `scaled`.
    Residual,
    /// The RMS norm of such a residual.
    ResidualNorm,
}

impl Prologue {
    pub fn adds_residual(self) -> bool {
        matches!(self, Self::Residual | Self::ResidualNorm)
    }

    pub fn is_normed(self) -> bool {
        matches!(self, Self::Norm | Self::ResidualNorm)
    }
}

/// A product: everything that decides its instance.
#[derive(Clone, Debug)]
pub struct Product {
    pub dtype: DType,
    /// Values that come out.
    pub outputs: u32,
    /// Values of a row.
    pub k: u32,
    /// The matrix has two rows for each output: all the first ones, then all the second. They are joined by GeGLU.
    pub geglu: bool,
    pub prologue: Prologue,
    /// The residual of the prologue is multiplied by a weight of one element.
    pub scaled: bool,
    /// What it takes is the sum of two normed branches: the halves of a mixture.
    pub branches: bool,
    /// The residual of the prologue is left in memory: by one product of those that compute it.
    pub leaves_residual: bool,
    /// The activations are the residual itself or an embedding: no norm has damped massive channels. Integer formats quantise
    /// them with fine codes.
    pub unbounded: bool,
    /// The result is left as int8, by blocks that have whole groups of it.
    pub leaves_int8: bool,
    /// Of an int8 input, the values behind the whole groups, which arrive as floats.
    pub loose: u32,
    /// Of the prologue's norms.
    pub epsilon: f32,
    /// Applied in order to each output.
    pub epilogue: Vec<&'static DeviceDef>,
    /// What adapters add to its matrices.
    pub adapted: Option<Pairs>,
}

/// The pairs of a product's matrices, in the order of the matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairs {
    /// A multiple of 16.
    pub rank: u32,
    /// Rows of each matrix, and whether it has a pair; three at most, of which one has.
    pub matrices: Vec<(u32, bool)>,
    /// Each row has those of its sequence's seat.
    pub seated: bool,
}

impl Pairs {
    /// Numbers between the halves.
    pub fn narrow_values(&self) -> u32 {
        self.rank * self.matrices.iter().filter(|(_, has)| *has).count() as u32
    }

    /// Words that its blocks send each other, of a product of rows of `k` values.
    pub fn words(&self, k: u32) -> u32 {
        self.narrow_values() * words_of(k)
    }

    /// The first row of that matrix; all rows, where there are not so many.
    pub fn start(&self, matrix: usize) -> u32 {
        self.matrices.iter().take(matrix).map(|(rows, _)| rows).sum()
    }

    /// A bit for each matrix that has a pair.
    pub fn has(&self) -> u32 {
        self.matrices.iter().enumerate().map(|(at, (_, has))| u32::from(*has) << at).sum()
    }

    fn config(of: Option<&Pairs>) -> Adapted {
        let Some(of) = of else { return Adapted { RANK: 0, EACH: 1, HAS: 0, SECOND: 0, THIRD: 0 } };
        let values = of.narrow_values();
        let lanes = if values.is_multiple_of(32) { 32 } else { 16 };
        Adapted { RANK: of.rank, EACH: values / lanes, HAS: of.has(), SECOND: of.start(1), THIRD: of.start(2) }
    }
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
    /// Outputs of a block in whole int8 groups; 0 where all warps share out all outputs.
    pub share: u32,
}

impl LaunchShape {
    /// Outputs behind the whole groups of all blocks, which these share out one by one and leave as floats.
    pub fn loose(&self, outputs: u32) -> u32 {
        if self.share > 0 { outputs.saturating_sub(self.blocks * self.share) } else { 0 }
    }

    /// `32 lanes, 4 rows, 3 ahead, 132 blocks of 20 warps`.
    pub fn describe(&self) -> String {
        let LaunchShape { lanes, rows, depth, warps, blocks, share } = self;
        let each = if *share > 0 { format!(" with {share} outputs each") } else { String::new() };
        format!("{lanes} lanes, {rows} rows, {depth} ahead, {blocks} blocks of {warps} warps{each}")
    }
}

/// Fours of activations on their way to a thread, where it need not hold all of them.
const MOST_PIECES: u32 = 5;

impl Product {
    pub fn new(dtype: DType, outputs: u32, k: u32, prologue: Prologue) -> Self {
        let epsilon = NORM_EPSILON;
        let (geglu, scaled, branches, leaves_residual) = (false, false, false, prologue.adds_residual());
        let unbounded = prologue == Prologue::Residual;
        let (epilogue, leaves_int8, loose) = (Vec::new(), false, 0);
        Self {
            dtype,
            outputs,
            k,
            geglu,
            prologue,
            scaled,
            branches,
            leaves_residual,
            unbounded,
            leaves_int8,
            loose,
            epsilon,
            epilogue,
            adapted: None,
        }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> u64 {
        u64::from(self.outputs) * if self.geglu { 2 } else { 1 }
    }

    fn join(&self) -> Vec<&'static DeviceDef> {
        if self.geglu { vec![slots::geglu::DEF] } else { vec![] }
    }

    /// Fours of activations that a thread holds at once: all of its own where there is a norm.
    pub fn pieces(&self, shape: LaunchShape) -> u32 {
        let own = (self.k / 4).div_ceil(shape.warps * 32);
        if self.prologue.adds_residual() || self.prologue.is_normed() { own } else { own.min(MOST_PIECES) }
    }

    /// Two lanes share a block of 32 values, and add their dots as integers.
    pub fn is_joined(&self) -> bool {
        format(self.dtype).joined && !self.unbounded
    }

    /// The order of its sums is the one that tensor cores can keep.
    pub fn is_stretched(&self) -> bool {
        format(self.dtype).integer && !self.unbounded
    }

    /// Warps have whole sets of rows, and the words beside a row's units are as far from those of the next row as its units are. Joined lanes, of Q8_0, have few loads to an address, and gain nothing.
    fn is_even(&self, shape: LaunchShape) -> bool {
        let outputs = 32 / shape.lanes * if self.geglu { shape.rows / 2 } else { shape.rows };
        let format = format(self.dtype);
        // Units from a lane's step to its next, too.
        let step = if self.is_stretched() { 8 } else { shape.lanes };
        !self.is_joined()
            && self.outputs.is_multiple_of(outputs)
            && (self.k / format.unit).is_multiple_of(format.units_beside)
            && step.is_multiple_of(format.units_beside)
    }

    /// A whole row is on its way to its lanes, and of half of its steps some lanes have none.
    fn is_ragged(&self, shape: LaunchShape) -> bool {
        let units = self.k / format(self.dtype).unit;
        let steps = units.div_ceil(shape.lanes);
        let full = (units - (steps * (shape.lanes - 8)).min(units)) / 8;
        self.is_stretched() && shape.depth == steps && full * 2 <= steps
    }

    /// The fast kernel, launched on `[shape.blocks]`.
    pub fn instance(&self, shape: LaunchShape) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        let (ready, residual) = (self.prologue == Prologue::Int8, self.prologue.adds_residual());
        let (normed, branches) = (self.prologue.is_normed(), residual && self.branches);
        matvec::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            SUMMED: format.summed,
            LANES: shape.lanes,
            ROWS: shape.rows,
            DEPTH: shape.depth,
            WARPS: shape.warps,
            PIECES: self.pieces(shape),
            PAIRED: self.geglu,
            READY: ready,
            RESIDUAL: residual,
            BRANCHED: branches,
            NORMED: normed,
            FINE: self.unbounded && format.integer,
            STRETCHED: self.is_stretched(),
            JOINED: self.is_joined(),
            SHARES_ROWS: self.is_joined() && shape.rows.is_multiple_of(2),
            SHARE: shape.share,
            SPREADS: shape.loose(self.outputs) > 0,
            LOOSE: self.loose,
            EVEN: self.is_even(shape),
            RAGGED: self.is_even(shape) && self.is_ragged(shape),
            EPSILON: self.epsilon,
            A: Pairs::config(self.adapted.as_ref()),
            side: format.side,
            dot: match (self.is_joined(), self.unbounded) {
                (true, _) => format.lane_dot,
                (false, true) => format.fine_dot,
                (false, false) => format.dot,
            },
            two_dots: format.two_dots,
            ready: if ready { slots::ready_codes::DEF } else { slots::no_part::DEF },
            ready_group: if ready { slots::ready_scale::DEF } else { slots::no_group::DEF },
            input: if ready && self.loose == 0 { slots::no_four::DEF } else { slots::four_of::DEF },
            update: if residual { slots::four_of::DEF } else { slots::no_four::DEF },
            branch: if branches { slots::four_of::DEF } else { slots::no_four::DEF },
            scale: if residual && self.scaled { vec![slots::scaled_by::DEF] } else { vec![] },
            residual: if residual && self.leaves_residual { vec![slots::leave_residual::DEF] } else { vec![] },
            join: self.join(),
            epilogue: self.epilogue.clone(),
            keep: if self.leaves_int8 { vec![slots::leave_codes::DEF] } else { vec![] },
        }
        .build()
    }
}
