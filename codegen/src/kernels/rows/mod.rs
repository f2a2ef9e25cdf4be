//! Matrix products of 2 to 128 rows that read the weights once, and give every row exactly the bits that it has alone.
//!
//! What [`matvec`](crate::kernels::matvec) computes for one row is the specification: LANES lanes take the units of a weight row in turn, each adds
//! its units in order, one fused multiply-add a unit, and a tree adds the lanes. Products of several rows keep that order for every row,
//! so a sequence's logits do not depend on its company.
//!
//! A product is two launches. [`prepare`] norms and quantises each row as a block of the one-row product does, with its warps. Then the product
//! itself: [`cores`] on CUDA cores, for every type. Both take rows that are not in use for ordinary ones. Results are f32, row by row.

pub mod cores;
pub mod prepare;

use gemma4c_dsl::{Filled, Instance, InstanceError, LaunchArguments};

use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::shape::LaunchShape;
use crate::kernels::matvec::{self, Prologue, slots};
use crate::target::Target;

/// A product of several rows: everything that decides its instances.
#[derive(Clone, Debug)]
pub struct Product {
    /// The product as one row has it, on the same GPU: its lanes and warps decide the bits. Whether it leaves int8 counts for that alone:
    /// several rows always leave f32.
    pub one: matvec::Product,
    pub rows: u32,
}

/// How a product of several rows is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Cores(cores::Shape),
}

/// What a product reads and writes besides the planes of its weights. A kernel leaves alone what its instance does not have.
#[derive(Clone, Copy, Debug)]
pub struct Given<M> {
    /// The weights' plane `codes`.
    pub codes: M,
    /// int8 codes `[rows][k]`, or f32 whose rows are [`Given::x_stride`] apart: of [`prepare`], or as they arrive.
    pub x: M,
    /// f32 `[rows][k / 32]`, of integer types.
    pub xscale: M,
    /// i32 `[rows][k / 32]`, of integer types.
    pub xsum: M,
    /// int8 `[rows][2][k]`, of unbounded activations.
    pub fine: M,
    /// i32 `[rows][k / 32]`, of unbounded activations.
    pub fine_sums: M,
    /// f32 `[rows]`, where there is a norm.
    pub factor: M,
    /// f32 `[rows][outputs]`.
    pub out: M,
    /// Values between two rows of f32 activations; int8 ones are `k` apart.
    pub x_stride: u32,
    /// Values between two rows of what an epilogue multiplies by or adds.
    pub by_stride: u32,
}

impl Product {
    fn is_integer(&self) -> bool {
        format(self.one.dtype).integer
    }

    /// Whether its activations have fine codes.
    pub fn is_fine(&self) -> bool {
        self.one.unbounded && self.is_integer() && self.one.prologue != Prologue::Int8
    }

    /// Whether results are multiplied by a norm's factor.
    pub fn is_normed(&self) -> bool {
        matches!(self.one.prologue, Prologue::Norm | Prologue::ResidualNorm)
    }

    /// The kernel that makes the activations, launched on `[rows, 1, 1]`; `None` where the product reads them as they arrive. `one` is the shape
    /// of the product of one row.
    pub fn prepare(&self, one: LaunchShape) -> Result<Option<Instance>, InstanceError> {
        let residual = self.one.prologue.adds_residual();
        let (normed, branches) = (self.is_normed(), residual && self.one.branches);
        let as_it_arrives = match self.one.prologue {
            Prologue::Int8 => true,
            Prologue::Plain => !self.is_integer(),
            _ => false,
        };
        if as_it_arrives {
            return Ok(None);
        }
        let instance = prepare::prepare_rows::Chosen {
            K: self.one.k,
            INTEGER: self.is_integer(),
            WARPS: one.warps,
            PIECES: self.one.pieces(one),
            RESIDUAL: residual,
            BRANCHED: branches,
            NORMED: normed,
            FINE: self.is_fine(),
            EPSILON: self.one.epsilon,
            input: slots::four_of::DEF,
            update: if residual { slots::four_of::DEF } else { slots::no_four::DEF },
            branch: if branches { slots::four_of::DEF } else { slots::no_four::DEF },
            scale: if residual && self.one.scaled { vec![slots::scaled_by::DEF] } else { vec![] },
            residual: if residual && self.one.leaves_residual { vec![slots::leave_residual::DEF] } else { vec![] },
        }
        .build()?;
        Ok(Some(instance))
    }

    /// How it is launched on a GPU, in words too: the reason, and what was next.
    pub fn choose(&self, target: &Target) -> (Shape, String, String) {
        let one = self.one.shape(target.multiprocessors);
        let shape = cores::Shape::choose(self, one, target);
        let reason = format!("{} rows: {}", self.rows, shape.describe());
        (Shape::Cores(shape), reason, String::new())
    }

    pub fn instance(&self, shape: Shape) -> Result<Instance, InstanceError> {
        let format = format(self.one.dtype);
        let join = if self.one.geglu { vec![slots::geglu::DEF] } else { vec![] };
        let Shape::Cores(shape) = shape;
        cores::rows_matvec::Chosen {
            K: self.one.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            LANES: shape.lanes,
            ROWS: shape.weight_rows,
            DEPTH: shape.depth,
            WARPS: shape.warps,
            TILE: shape.tile,
            PAIRED: self.one.geglu,
            FACTORED: self.is_normed(),
            FINE: self.is_fine(),
            side: format.side,
            dot: format.dot,
            join,
            epilogue: self.one.epilogue.clone(),
        }
        .build()
    }

    pub fn grid(&self, shape: Shape) -> [u32; 3] {
        let Shape::Cores(shape) = shape;
        [shape.blocks, self.rows.div_ceil(shape.tile), 1]
    }

    /// The launch's arguments. `side` is what the type's side function takes, `epilogue` what the functions after the product take.
    pub fn arguments<M: Copy>(
        &self,
        shape: Shape,
        given: Given<M>,
        side: Filled<M>,
        epilogue: Vec<Filled<M>>,
    ) -> LaunchArguments<M> {
        let Given { codes, x, xscale, xsum, fine, fine_sums, factor, out, x_stride, by_stride } = given;
        let (outputs, rows) = (self.one.outputs, self.rows);
        let x_stride = if self.is_integer() { self.one.k / 4 } else { x_stride };
        let Shape::Cores(_) = shape;
        let arguments = cores::rows_matvec::Arguments {
            codes,
            x,
            xscale,
            xsum,
            fine,
            fine_sums,
            factor,
            out,
            outputs,
            rows,
            x_stride,
            by_stride,
        };
        let arguments = arguments.with_slot(cores::rows_matvec::slot::side, side);
        epilogue
            .into_iter()
            .fold(arguments, |arguments, filled| arguments.with_slot(cores::rows_matvec::slot::epilogue, filled))
    }
}
