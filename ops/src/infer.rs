//! The type of an operation's output from its inputs' types. The only place that knows the shape rules: a graph is
//! built and verified by them, and a plan's steps are held to them.

use crate::ids::{CacheId, WeightId};
use crate::op::Op;
use crate::types::{Cache, Elem, RowCount, Type};

/// An operation that does not type-check, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {why}")]
pub struct TypeError {
    pub op: &'static str,
    pub why: String,
}

/// What the rules need of a stored tensor.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub name: &'a str,
    /// Fastest first: a matrix is `[inputs, outputs]`, stacked experts `[inputs, outputs, experts]`.
    pub dims: &'a [u64],
}

impl Tensor<'_> {
    /// Dimension `i`; 1 beyond the last.
    fn dim(&self, i: usize) -> u64 {
        self.dims.get(i).copied().unwrap_or(1)
    }

    fn is_vector(&self, len: u32) -> bool {
        self.dims == [len as u64]
    }

    fn is_matrix(&self) -> bool {
        self.dims.len() == 2
    }

    /// A width that follows from its dimensions.
    fn width(&self, width: u64) -> Rule<u32> {
        u32::try_from(width).map_err(|_| format!("{} {:?} is too large", self.name, self.dims))
    }
}

/// The tables that the ids in an operation are places of.
pub trait Declared {
    fn weight(&self, id: WeightId) -> Tensor<'_>;
    fn cache(&self, id: CacheId) -> Cache;
}

/// Infers the type of `op` applied to values of types `inputs`. The ids in `op` must exist.
pub fn infer(declared: &impl Declared, op: &Op, inputs: &[Type]) -> Result<Type, TypeError> {
    let fail = |why: String| TypeError { op: op.name(), why };
    if inputs.len() != op.arity() {
        return Err(fail(format!("takes {} inputs, was given {}", op.arity(), inputs.len())));
    }
    // Every input of most operations is a row of f32; the exceptions are checked in their own arms.
    let x = inputs.first().copied().unwrap_or(Type::f32(RowCount::Chunk, 0));
    let wants_f32 = !matches!(op, Op::Tokens | Op::Gather { .. } | Op::GatherText { .. } | Op::Candidates { .. });
    if wants_f32 && x.elem != Elem::F32 {
        return Err(fail(format!("needs f32 rows, was given {x}")));
    }
    Applied { declared, inputs, x }.output(op).map_err(fail)
}

/// What a rule gives, or why it does not hold.
type Rule<T> = Result<T, String>;

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Rule<()> {
    if holds { Ok(()) } else { Err(why()) }
}

/// An operation's inputs, as many as it takes.
struct Applied<'a, D> {
    declared: &'a D,
    inputs: &'a [Type],
    /// The first of them.
    x: Type,
}

impl<D: Declared> Applied<'_, D> {
    fn output(&self, op: &Op) -> Rule<Type> {
        let x = self.x;
        match *op {
            Op::Tokens => Ok(Type { elem: Elem::Token, rows: RowCount::Chunk, width: 1 }),
            Op::Patches { width: 0 } => Err("a patch has no pixels".into()),
            Op::Patches { width } => Ok(Type::f32(RowCount::Patches, width)),
            Op::Hidden { width: 0 } => Err("a hidden state has no values".into()),
            Op::Hidden { width } => Ok(Type::f32(RowCount::Chunk, width)),
            Op::BorrowKv { cache } => Ok(self.kv(cache)),
            Op::Gather { table } => self.gather(table),
            Op::GatherText { table, pad } => {
                let (ty, w) = (self.gather(table)?, self.declared.weight(table));
                ensure((pad as u64) < w.dim(1), || format!("{} {:?} has no row {pad}", w.name, w.dims))?;
                Ok(ty)
            }
            Op::PlaceSoft => match x.rows {
                RowCount::Chunk => Ok(x),
                _ => Err(format!("soft tokens stand among the tokens of a chunk, not in {x}")),
            },
            Op::AxisRows { table, axis } => {
                let w = self.declared.weight(table);
                let has_axis = w.dims.len() == 3 && (axis as u64) < w.dim(2);
                ensure(has_axis, || format!("{} {:?} has no table for axis {axis}", w.name, w.dims))?;
                Ok(Type::f32(RowCount::Patches, w.width(w.dim(0))?))
            }
            Op::TakeAsked => match x.rows {
                RowCount::Chunk => Ok(Type { rows: RowCount::Asked, ..x }),
                RowCount::Asked => Err("its input holds only the asked rows already".into()),
                RowCount::Patches | RowCount::Halves | RowCount::Soft => Err(format!("nobody asks for rows of {x}")),
            },
            Op::Columns { first, len } => match first.checked_add(len) {
                Some(end) if len > 0 && end <= x.width => Ok(Type { width: len, ..x }),
                _ => Err(format!("{len} from {first} on are not in rows {} wide", x.width)),
            },
            Op::Concat => match x.width.checked_add(self.inputs[1].width) {
                Some(width) if self.inputs[1] == Type::f32(x.rows, self.inputs[1].width) => Ok(Type { width, ..x }),
                _ => Err(format!("{x} and {} are not parts of the same rows", self.inputs[1])),
            },
            Op::Candidates { each } => match (x.elem, x.width.checked_mul(each)) {
                (Elem::Routing { .. }, Some(width @ 1..)) => Ok(Type { elem: Elem::Token, width, ..x }),
                _ => Err(format!("needs a routing to groups of {each} tokens, was given {x}")),
            },
            Op::SpreadTokens { width } => match self.inputs[1] == (Type { elem: Elem::Token, ..x }) && width >= x.width
            {
                true => Ok(Type { width, ..x }),
                false => Err(format!("cannot spread {x} of {} over a vocabulary of {width}", self.inputs[1])),
            },
            Op::MatMul { weight } => {
                let w = self.matrix_of_rows(weight)?;
                Ok(Type { width: w.width(w.dim(1))?, ..x })
            }
            Op::Narrow { weight, factor } => self.narrow(weight, factor),
            Op::Widen { weight } => self.widen(weight),
            Op::ExpertMatMul { weight, first, len } => self.expert_matmul(weight, first, len),
            Op::TokenMatMul { weight } => {
                let tokens = self.inputs[1];
                let is_tokens = tokens.elem == Elem::Token && tokens.rows == x.rows;
                ensure(is_tokens, || format!("needs the tokens of the same rows, was given {tokens}"))?;
                self.matrix_of_rows(weight)?;
                Ok(Type { width: tokens.width, ..x })
            }
            Op::HalvingConv { weight, channels } => self.halving_conv(weight, channels),
            Op::CausalConv { weight } => {
                let w = self.declared.weight(weight);
                self.follow_in_time()?;
                let are_taps = w.is_matrix() && w.dim(0) > 0 && w.dim(1) == x.width as u64;
                ensure(are_taps, || format!("{} {:?} is not taps for rows {} wide", w.name, w.dims, x.width))?;
                Ok(x)
            }
            Op::RmsNorm { weight, group, .. } => {
                self.divides("groups of", group)?;
                self.optional_vector(weight, group)?;
                Ok(x)
            }
            Op::SubMean { group } => self.divides("groups of", group),
            Op::Route { top_k } => {
                ensure((1..=x.width).contains(&top_k), || format!("cannot choose {top_k} of {} experts", x.width))?;
                Ok(Type { elem: Elem::Routing { experts: x.width }, width: top_k, ..x })
            }
            Op::ExpertSum { scale } => {
                let (slots, experts) = self.routing()?;
                self.optional_vector(scale, experts)?;
                let are_slots = slots > 0 && x.width.is_multiple_of(slots);
                ensure(are_slots, || format!("rows {} wide are not {slots} equal slots", x.width))?;
                Ok(Type { width: x.width / slots, ..x })
            }
            Op::GridMean { side } => match (x.rows, side) {
                (RowCount::Patches, 1..) => Ok(Type { rows: RowCount::Soft, ..x }),
                _ => Err(format!("squares of {side} by {side} patches cannot be taken of {x}")),
            },
            Op::Add | Op::Mul => {
                ensure(x == self.inputs[1], || format!("{x} and {} differ", self.inputs[1]))?;
                Ok(x)
            }
            Op::Scale { .. } | Op::AddConstant { .. } | Op::Gelu | Op::Sigmoid | Op::Relu | Op::Softcap { .. } => Ok(x),
            Op::MulWeight { weight } => {
                let repeats = |w: Tensor<'_>| w.dim(0) > 0 && (x.width as u64).is_multiple_of(w.dim(0));
                self.fits_rows(weight, |w| w.dims.len() == 1 && repeats(w))
            }
            Op::AddWeight { weight } | Op::AtLeast { weight } | Op::AtMost { weight } => {
                self.fits_rows(weight, |w| w.is_vector(1) || w.is_vector(x.width))
            }
            Op::Rope { head_dim, factors, .. } => {
                let has_position = matches!(x.rows, RowCount::Chunk | RowCount::Asked);
                ensure(has_position, || format!("{x} have no position in a sequence"))?;
                let is_even = head_dim.is_multiple_of(2);
                ensure(is_even, || format!("a head of {head_dim} has no two halves to rotate"))?;
                self.divides("heads of", head_dim)?;
                self.optional_vector(factors, head_dim / 2)?;
                Ok(x)
            }
            Op::GridRope { head_dim, .. } => {
                let has_quarters = head_dim > 0 && head_dim.is_multiple_of(4);
                ensure(has_quarters, || format!("a head of {head_dim} has no four quarters to rotate"))?;
                self.divides("heads of", head_dim)?;
                ensure(x.rows == RowCount::Patches, || format!("only patches lie in a grid, not {x}"))?;
                Ok(x)
            }
            Op::KvAppend { cache } => {
                let (layer, want) = (self.declared.cache(cache).layer, Type { elem: Elem::F32, ..self.kv(cache) });
                let fits = self.inputs == [want, want];
                ensure(fits, || format!("the cache of layer {layer} takes {want}, not {x} and {}", self.inputs[1]))?;
                Ok(self.kv(cache))
            }
            Op::Attention { heads } | Op::AttentionAhead { heads } => self.attention(heads, false),
            Op::AttentionBefore { heads } => self.attention(heads, true),
            Op::FullAttention { heads } => {
                self.are_alike()?;
                let divides = heads > 0 && x.width.is_multiple_of(heads);
                ensure(divides, || format!("{heads} heads do not divide rows {} wide", x.width))?;
                ensure(x.rows == RowCount::Patches, || format!("only patches see each other, not {x}"))?;
                Ok(x)
            }
            Op::NearAttention { heads, reach, cap, weight } => {
                self.are_alike()?;
                let has_halves = x.width.is_multiple_of(2) && x.width >= 4;
                ensure(heads > 0 && x.width.is_multiple_of(heads) && has_halves, || {
                    format!("{heads} heads do not divide rows {} wide, or these have no two halves", x.width)
                })?;
                self.follow_in_time()?;
                let sees = reach > 0 && cap > 0.0;
                ensure(sees, || format!("a reach of {reach} and a cap of {cap} leave nothing to see"))?;
                self.fits_rows(weight, |w| w.dims == [x.width as u64; 2])
            }
        }
    }

    fn gather(&self, table: WeightId) -> Rule<Type> {
        let (x, w) = (self.x, self.declared.weight(table));
        ensure(x.elem == Elem::Token && x.width == 1, || format!("needs tokens, was given {x}"))?;
        ensure(w.is_matrix(), || format!("{} {:?} is not a matrix", w.name, w.dims))?;
        Ok(Type::f32(x.rows, w.width(w.dim(0))?))
    }

    fn expert_matmul(&self, weight: WeightId, first: u32, len: u32) -> Rule<Type> {
        let (x, w, (slots, experts)) = (self.x, self.declared.weight(weight), self.routing()?);
        let fits = w.dim(0) == x.width as u64 || w.dim(0).checked_mul(slots as u64) == Some(x.width as u64);
        ensure(w.dims.len() == 3 && w.dim(2) == experts as u64 && fits, || {
            let of = format!("rows {} wide, {slots} of {experts} experts", x.width);
            format!("{} {:?} does not fit {of}", w.name, w.dims)
        })?;
        let has_rows = len > 0 && first as u64 + len as u64 <= w.dim(1);
        ensure(has_rows, || format!("{} has {} rows an expert, not {len} from {first} on", w.name, w.dim(1)))?;
        Ok(Type { width: w.width(len as u64 * slots as u64)?, ..x })
    }

    fn halving_conv(&self, weight: WeightId, channels: u32) -> Rule<Type> {
        let (x, w) = (self.x, self.declared.weight(weight));
        let rows = match x.rows {
            RowCount::Patches => RowCount::Halves,
            RowCount::Halves => RowCount::Soft,
            _ => return Err(format!("{x} are not halved")),
        };
        let are_columns = channels > 0 && x.width.is_multiple_of(channels);
        ensure(are_columns, || format!("rows {} wide are not columns of {channels} channels", x.width))?;
        let are_taps = w.is_matrix() && w.dim(0) == 9 * channels as u64 && w.dim(1) > 0;
        ensure(are_taps, || format!("{} {:?} is not 3 by 3 taps of {channels} channels", w.name, w.dims))?;
        let columns = (x.width / channels).div_ceil(2) as u64;
        Ok(Type { rows, width: w.width(w.dim(1).saturating_mul(columns))?, ..x })
    }

    fn attention(&self, heads: u32, is_before: bool) -> Rule<Type> {
        let x = self.x;
        let Elem::Kv(cache) = self.inputs[1].elem else {
            return Err(format!("needs a cache, was given {}", self.inputs[1]));
        };
        let Cache { kv_heads, head_dim, window, .. } = self.declared.cache(cache);
        let sees = !is_before || window != Some(1);
        ensure(sees, || "a window of 1 has nothing before a row's own position".into())?;
        let share = kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads.checked_mul(head_dim) == Some(x.width);
        ensure(share, || {
            format!("{heads} heads of {head_dim} over {kv_heads} kv heads do not fit rows {} wide", x.width)
        })?;
        Ok(x)
    }

    /// A cache as a value.
    fn kv(&self, cache: CacheId) -> Type {
        Type { elem: Elem::Kv(cache), rows: RowCount::Chunk, width: self.declared.cache(cache).width() }
    }

    /// How many experts a row goes to, and of how many; the routing must belong to the same rows.
    fn routing(&self) -> Rule<(u32, u32)> {
        let routing = self.inputs[1];
        match routing.elem {
            Elem::Routing { experts } if routing.rows == self.x.rows => Ok((routing.width, experts)),
            _ => Err(format!("needs the routing of the same rows, was given {routing}")),
        }
    }

    /// Parts of `len` values divide a row.
    fn divides(&self, parts: &str, len: u32) -> Rule<Type> {
        let divides = len > 0 && self.x.width.is_multiple_of(len);
        ensure(divides, || format!("{parts} {len} do not divide rows {} wide", self.x.width))?;
        Ok(self.x)
    }

    fn optional_vector(&self, weight: Option<WeightId>, len: u32) -> Rule<()> {
        match weight.map(|id| self.declared.weight(id)).filter(|w| !w.is_vector(len)) {
            Some(w) => Err(format!("{} {:?} is not a vector of {len}", w.name, w.dims)),
            None => Ok(()),
        }
    }

    /// Rows that a weight leaves as wide as they are.
    fn fits_rows(&self, weight: WeightId, fits: impl Fn(Tensor<'_>) -> bool) -> Rule<Type> {
        let w = self.declared.weight(weight);
        ensure(fits(w), || format!("{} {:?} does not fit rows {} wide", w.name, w.dims, self.x.width))?;
        Ok(self.x)
    }

    /// A matrix that a row can be multiplied by.
    fn matrix_of_rows(&self, weight: WeightId) -> Rule<Tensor<'_>> {
        self.fits_rows(weight, |w| w.is_matrix() && w.dim(0) == self.x.width as u64)?;
        Ok(self.declared.weight(weight))
    }

    fn narrow(&self, weight: WeightId, factor: f32) -> Rule<Type> {
        ensure(factor.is_finite(), || format!("{factor} is no factor"))?;
        let w = self.half_of_pair(weight, self.x.width)?;
        Ok(Type { width: w.width(w.dim(1))?, ..self.x })
    }

    fn widen(&self, weight: WeightId) -> Rule<Type> {
        let (x, narrow) = (self.x, self.inputs[1]);
        let w = self.half_of_pair(weight, narrow.width)?;
        let fits = w.dim(1) == x.width as u64 && narrow == Type { width: narrow.width, ..x };
        ensure(fits, || format!("{} {:?} does not widen {narrow} to {x}", w.name, w.dims))?;
        Ok(x)
    }

    /// One half of an adapter's pair, or that of every seat, which rows so wide can be multiplied by. Positions say whose
    /// seat a row has.
    fn half_of_pair(&self, weight: WeightId, width: u32) -> Rule<Tensor<'_>> {
        let (x, w) = (self.x, self.declared.weight(weight));
        let fits =
            (w.is_matrix() || w.dims.len() == 3) && w.dim(0) == width as u64 && w.dims.iter().all(|dim| *dim > 0);
        ensure(fits, || format!("{} {:?} does not fit rows {width} wide", w.name, w.dims))?;
        let has_sequence = w.is_matrix() || matches!(x.rows, RowCount::Chunk | RowCount::Asked);
        ensure(has_sequence, || format!("{x} are of no sequence, which would have a seat"))?;
        Ok(w)
    }

    fn are_alike(&self) -> Rule<()> {
        let alike = self.inputs.iter().all(|input| *input == self.x);
        ensure(alike, || format!("{}, {} and {} differ", self.inputs[0], self.inputs[1], self.inputs[2]))
    }

    fn follow_in_time(&self) -> Rule<()> {
        ensure(self.x.rows == RowCount::Soft, || format!("{} do not follow each other in time", self.x))
    }
}
