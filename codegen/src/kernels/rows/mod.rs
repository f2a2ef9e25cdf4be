//! Matrix products of 2 to 128 rows that read the weights once, and give every row exactly the bits that it has alone.
//!
//! What [`matvec`](crate::kernels::matvec) computes for one row is the specification. A weight row of an integer type is four stretches of blocks of 32 values; a stretch has four or eight sums, by the block's number modulo that, to which it adds its blocks in
//! order, one fused multiply-add a block. Products of several rows keep that order for every row, so a sequence's logits do not depend on its company.
//!
//! A product is two launches. [`prepare`] norms and quantises each row as a block of the one-row product does. Then the product
//! itself: [`cores`] on CUDA cores, for every type, or [`tiles`] on int8 tensor cores, for every integer type ([`steps`] where there are no mbarriers). The dense half of a mixture, whose order is by lanes, has [`stream`] and [`mma`]. All take rows that are not in use for ordinary ones. Results are f32, row by row.

pub mod cores;
pub mod formats;
pub mod mma;
pub mod prepare;
mod product;
pub mod rounded;
pub mod shape;
pub mod stages;
pub mod steps;
pub mod stream;
pub mod stretches;
pub mod sums;
pub mod tiles;
pub mod tiling;
pub mod warp_tile;

use gemma4c_blocks::DType;
use gemma4c_dsl::{Filled, Instance, InstanceError, LaunchArguments, SlotKey};

use crate::kernels::adapter;
use crate::kernels::matvec::formats::{format, side_arguments};
use crate::kernels::matvec::{LaunchShape, slots};
use crate::kernels::planes::planes;
use crate::target::Target;
use formats::TensorFormat;
pub use product::{Product, SumOrder};
pub use shape::Shape;

/// What a product reads and writes besides the planes of its weights. A kernel leaves alone what its instance does not have.
#[derive(Clone, Copy, Debug)]
pub struct Given<M> {
    /// int8 codes `[rows][k]` (of [`prepare`] for tensor cores: panels of eight rows), or f32 whose rows are [`Given::x_stride`] apart.
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
    /// f32 `[rows][outputs]`; or panels of codes, scales and sums.
    pub out: M,
    pub to_codes: M,
    pub to_scales: M,
    pub to_sums: M,
    /// What stands for memory that an instance does not have.
    pub unused: M,
    /// Values between two rows of f32 activations; int8 ones are `k` apart.
    pub x_stride: u32,
    /// Values between two rows of what an epilogue multiplies by or adds.
    pub by_stride: u32,
}

/// Why there is no kernel for a product. Each names what is wrong with it.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    #[error("a product of {rows} rows: rows of {k} values are not whole groups of 32")]
    Width { rows: u32, k: u32 },
    #[error("a product of no rows")]
    NoRows,
    #[error("int8 tensor cores do not multiply {dtype}")]
    Floats { dtype: DType },
    #[error("tensor cores do not multiply {dtype} by activations with fine codes")]
    FineCodes { dtype: DType },
    #[error("a mixture's dense half adds {dtype} in halves of a block, which tensor cores do not")]
    HalfBlocks { dtype: DType },
    #[error("only tiles of joined outputs on tensor cores, with mbarriers, leave int8, whole groups of 32 of them")]
    Panels,
    #[error("tiles are for the order of a matrix-vector product, not of a mixture's dense half")]
    Order,
    #[error(transparent)]
    Instance(#[from] InstanceError),
}

impl Product {
    fn check(&self) -> Result<(), RowsError> {
        match (self.rows, self.one.k) {
            (0, _) => Err(RowsError::NoRows),
            (rows, k) if !k.is_multiple_of(32) => Err(RowsError::Width { rows, k }),
            _ => Ok(()),
        }
    }

    /// The kernel that makes the activations for a product of that shape, launched on [`Product::prepare_grid`]; `None` where the product reads them as they arrive.
    /// `one` is the shape of the product of one row.
    pub fn prepare(&self, one: LaunchShape, shape: Shape) -> Result<Option<Instance>, RowsError> {
        self.check()?;
        let residual = self.one.prologue.adds_residual();
        let (normed, branches) = (self.is_normed(), residual && self.one.branches);
        if !self.is_prepared() {
            return Ok(None);
        }
        let prologue = prepare::RowPrologue {
            K: self.one.k,
            WARPS: one.warps,
            PIECES: self.one.pieces(one),
            RESIDUAL: residual,
            BRANCHED: branches,
            NORMED: normed,
            EPSILON: self.one.epsilon,
        };
        let form =
            prepare::PreparedForm { INTEGER: self.is_integer(), FINE: self.is_fine(), PANELS: shape.takes_panels() };
        let (values, rank) = self.one.adapted.as_ref().map_or((0, 0), |pairs| (pairs.narrow_values(), pairs.rank));
        let instance = prepare::prepare_rows::Chosen {
            R: prologue,
            F: form,
            N: prepare::Narrowed { VALUES: values, RANK: rank, UNIT: 16 },
            input: slots::four_of::DEF,
            update: if residual { slots::four_of::DEF } else { slots::no_four::DEF },
            branch: if branches { slots::four_of::DEF } else { slots::no_four::DEF },
            scale: if residual && self.one.scaled { vec![slots::scaled_by::DEF] } else { vec![] },
            residual: if residual && self.one.leaves_residual { vec![slots::leave_residual::DEF] } else { vec![] },
        }
        .build()?;
        Ok(Some(instance))
    }

    /// Blocks of that kernel: one a row, and with adapters one for each 16 numbers between their halves.
    pub fn prepare_grid(&self) -> [u32; 3] {
        let values = self.one.adapted.as_ref().map_or(0, |pairs| pairs.narrow_values());
        [self.rows, 1 + values / 16, 1]
    }

    /// How it is launched on a GPU, in words too: the reason, and what was next.
    pub fn choose(&self, target: &Target) -> (Shape, String, String) {
        let (shape, next) = shape::choose(self, target);
        let reason = format!("{} rows: {}", self.rows, shape.describe());
        (shape, reason, next.map(|next| next.describe()).unwrap_or_default())
    }

    pub fn instance(&self, shape: Shape) -> Result<Instance, RowsError> {
        self.check()?;
        let format = format(self.one.dtype);
        let join = if self.one.geglu { vec![slots::geglu::DEF] } else { vec![] };
        let change = self.one.adapted.iter().map(adapter::change_of_rows).collect();
        match (shape, TensorFormat::of(self.one.dtype)) {
            (shape, _) if self.leaves_panels && !shape.can_leave_panels(self.one.outputs) => Err(RowsError::Panels),
            (Shape::Tiles(_), _) if self.order != SumOrder::Matvec => Err(RowsError::Order),
            (Shape::Tensor(_) | Shape::Tiles(_), Some(_)) if self.is_fine() => {
                Err(RowsError::FineCodes { dtype: self.one.dtype })
            }
            (Shape::Tensor(_), Some(tensor)) if tensor.parts == 2 && !self.is_joined() => {
                Err(RowsError::HalfBlocks { dtype: self.one.dtype })
            }
            (Shape::Tensor(shape), Some(tensor)) => {
                let pieces = self.one.k / 32 * tensor.parts;
                let epilogue = self.one.epilogue.clone();
                // The two kernels have the same parameters.
                macro_rules! chosen {
                    ($kernel:path, $copiers:expr) => {{
                        use $kernel as kernel;
                        kernel::Chosen {
                            K: self.one.k,
                            PARTS: tensor.parts,
                            PIECES: pieces,
                            HALVES: tensor.halves,
                            MINIMUM: tensor.minimum,
                            SUMS: tensor.sums(),
                            SHARING: tensor.sharing(pieces),
                            SCALES: tensor.scales,
                            SUPERS: tensor.supers,
                            HIGH: tensor.high,
                            PERIOD: tensor.period,
                            LANES: shape.lanes,
                            CLASSES: shape.lanes / tensor.parts,
                            WARPS: shape.warps,
                            COPIERS: $copiers,
                            TILE: shape.tile,
                            COLUMNS: shape.columns,
                            STAGES: shape.stages,
                            RESIDENT: shape.resident,
                            PANELS: self.takes_panels(),
                            PAIRED: self.one.geglu,
                            FACTORED: self.is_normed(),
                            SEPARATE: self.order == SumOrder::Down,
                            bytes: tensor.bytes,
                            start: vec![tensor.start],
                            whole: tensor.whole,
                            factors: vec![tensor.factors],
                            join,
                            epilogue,
                        }
                        .build()
                    }};
                }
                let instance = match shape.copiers {
                    0 => chosen!(mma::rows_mma, shape.warps * 32),
                    copiers => chosen!(stream::rows_stream, copiers * 32),
                };
                instance.map_err(RowsError::from)
            }
            (Shape::Tiles(shape), Some(tensor)) => {
                let pieces = self.one.k / 32 * tensor.parts;
                let epilogue = self.one.epilogue.clone();
                // The two kernels have the same parameters but for ROUNDED.
                macro_rules! chosen {
                    ($kernel:path, $copiers:expr $(, $own:ident: $value:expr)?) => {{
                        use $kernel as kernel;
                        kernel::Chosen {
                            K: self.one.k,
                            PARTS: tensor.parts,
                            PIECES: pieces,
                            HALVES: tensor.halves,
                            MINIMUM: tensor.minimum,
                            SHARING: tensor.sharing(pieces),
                            SCALES: tensor.scales,
                            SUPERS: tensor.supers,
                            HIGH: tensor.high,
                            PERIOD: tensor.period,
                            CLASSES: tensor.classes,
                            STRETCH: tiling::stretch(self.one.k, tensor.classes),
                            OWN: shape.own,
                            STEP: shape.step,
                            GROUPS: shape.groups,
                            SPLITS: shape.splits,
                            EIGHTS: shape.eights,
                            COPIERS: $copiers,
                            STAGES: shape.stages,
                            RESIDENT: shape.resident,
                            PANELS: shape.panels,
                            PAIRED: self.one.geglu,
                            FACTORED: self.is_normed(),
                            $($own: $value,)?
                            bytes: tensor.bytes,
                            start: vec![tensor.start],
                            whole: tensor.whole,
                            factors: vec![tensor.factors],
                            change,
                            join,
                            epilogue,
                        }
                        .build()
                    }};
                }
                let instance = match shape.copiers {
                    0 => chosen!(steps::rows_tiles_in_steps, shape.warps() * 32),
                    copiers => chosen!(tiles::rows_tiles, copiers * 32, ROUNDED: self.leaves_panels),
                };
                instance.map_err(RowsError::from)
            }
            (Shape::Tensor(_) | Shape::Tiles(_), None) => Err(RowsError::Floats { dtype: self.one.dtype }),
            (Shape::Cores(shape), _) => cores::rows_matvec::Chosen {
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
                STRETCHED: self.one.is_stretched() && self.order == SumOrder::Matvec,
                SEPARATE: self.order == SumOrder::Down,
                JOINED: self.is_joined(),
                side: format.side,
                dot: match (self.is_joined(), self.is_fine()) {
                    (true, _) => format.lane_dot,
                    (false, true) => format.fine_dot,
                    (false, false) => format.dot,
                },
                change,
                join,
                epilogue: self.one.epilogue.clone(),
            }
            .build()
            .map_err(RowsError::from),
        }
    }

    pub fn grid(&self, shape: Shape) -> [u32; 3] {
        let (blocks, tile) = match shape {
            Shape::Cores(shape) => (shape.blocks, shape.tile),
            Shape::Tensor(shape) => (shape.blocks, shape.tile),
            Shape::Tiles(shape) => (shape.blocks, shape.tile()),
        };
        [blocks, self.rows.div_ceil(tile), 1]
    }

    /// The launch's arguments. `plane` gives a plane of the weights by its name, `epilogue` is what the functions after the product take.
    pub fn arguments<M: Copy>(
        &self,
        shape: Shape,
        given: Given<M>,
        plane: impl Fn(&'static str) -> M,
        (change, epilogue): (Option<Filled<M>>, Vec<Filled<M>>),
    ) -> LaunchArguments<M> {
        let Given { x, xscale, xsum, fine, fine_sums, factor, out, to_codes, to_scales, to_sums, unused, .. } = given;
        let Given { x_stride, by_stride, .. } = given;
        let (outputs, rows, codes) = (self.one.outputs, self.rows, plane("codes"));
        let (arguments, slot) = match shape {
            Shape::Tensor(_) | Shape::Tiles(_) => {
                let known =
                    |name| if planes(self.one.dtype).iter().any(|p| p.name == name) { plane(name) } else { unused };
                let (high, scales, supers) = (known("high"), known("scales"), known("supers"));
                macro_rules! arguments {
                    ($kernel:path $(, $own:ident)*) => {{
                        use $kernel as kernel;
                        let arguments = kernel::Arguments {
                            codes,
                            high,
                            scales,
                            supers,
                            x,
                            xscale,
                            xsum,
                            factor,
                            out,
                            $($own,)*
                            outputs,
                            rows,
                            by_stride,
                        };
                        (arguments.into(), kernel::slot::epilogue)
                    }};
                }
                match shape {
                    Shape::Tensor(shape) if shape.copiers == 0 => arguments!(mma::rows_mma),
                    Shape::Tensor(_) => arguments!(stream::rows_stream),
                    Shape::Tiles(shape) if shape.copiers == 0 => arguments!(steps::rows_tiles_in_steps),
                    _ => arguments!(tiles::rows_tiles, to_codes, to_scales, to_sums),
                }
            }
            Shape::Cores(_) => {
                let x_stride = if self.is_integer() { self.one.k / 4 } else { x_stride };
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
                let side = side_arguments(self.one.dtype, plane);
                (arguments.with_slot(cores::rows_matvec::slot::side, side), cores::rows_matvec::slot::epilogue)
            }
        };
        let of_change = SlotKey { kernel: slot.kernel, ..cores::rows_matvec::slot::change };
        let filled = epilogue.into_iter().map(|filled| (slot, filled)).chain(change.map(|filled| (of_change, filled)));
        filled.fold(arguments, |arguments: LaunchArguments<M>, (slot, filled)| arguments.with_slot(slot, filled))
    }
}
