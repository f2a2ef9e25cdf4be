//! The type of a node's output from its operation and its inputs' types. The only place that knows the shape rules.

use crate::graph::{Graph, Weight, WeightId};
use crate::op::Op;
use crate::types::{Elem, Rows, Type};

/// A node that does not type-check, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {why}")]
pub struct TypeError {
    pub op: &'static str,
    pub why: String,
}

/// Infers the type of `op` applied to values of types `inputs`. The ids in `op` must exist in `graph`.
pub fn infer(graph: &Graph, op: &Op, inputs: &[Type]) -> Result<Type, TypeError> {
    let fail = |why: String| Err(TypeError { op: op.name(), why });
    if inputs.len() != op.arity() {
        return fail(format!("takes {} inputs, was given {}", op.arity(), inputs.len()));
    }
    // Every input of most operations is a row of f32; the exceptions are checked in their own arms.
    let x = inputs.first().copied().unwrap_or(Type::f32(Rows::Chunk, 0));
    let wants_f32 = !matches!(op, Op::Tokens | Op::Gather { .. } | Op::GatherText { .. } | Op::Candidates { .. });
    if wants_f32 && x.elem != Elem::F32 {
        return fail(format!("needs f32 rows, was given {x}"));
    }
    match *op {
        Op::Tokens => Ok(Type { elem: Elem::Token, rows: Rows::Chunk, width: 1 }),
        Op::Gather { table } => {
            if x.elem != Elem::Token || x.width != 1 {
                return fail(format!("needs tokens, was given {x}"));
            }
            Ok(Type::f32(x.rows, matrix_inputs(graph, op, table)?))
        }
        Op::Patches { width } => match width {
            0 => fail("a patch has no pixels".into()),
            _ => Ok(Type::f32(Rows::Patches, width)),
        },
        Op::Hidden { width } => match width {
            0 => fail("a hidden state has no values".into()),
            _ => Ok(Type::f32(Rows::Chunk, width)),
        },
        Op::BorrowKv { cache } => {
            Ok(Type { elem: Elem::Kv(cache), rows: Rows::Chunk, width: graph.cache(cache).width() })
        }
        Op::GatherText { table, pad } => {
            if x.elem != Elem::Token || x.width != 1 {
                return fail(format!("needs tokens, was given {x}"));
            }
            let (width, w) = (matrix_inputs(graph, op, table)?, graph.weight(table));
            if pad as u64 >= w.dim(1) {
                return fail(format!("{} {:?} has no row {pad}", w.name, w.dims));
            }
            Ok(Type::f32(x.rows, width))
        }
        Op::PlaceSoft => match x.rows {
            Rows::Chunk => Ok(x),
            _ => fail(format!("soft tokens stand among the tokens of a chunk, not in {x}")),
        },
        Op::AxisRows { table, axis } => {
            let w = graph.weight(table);
            if w.dims.len() != 3 || axis as u64 >= w.dim(2) {
                return fail(format!("{} {:?} has no table for axis {axis}", w.name, w.dims));
            }
            Ok(Type::f32(Rows::Patches, narrow(op, w, w.dim(0))?))
        }
        Op::TakeAsked => match x.rows {
            Rows::Chunk => Ok(Type { rows: Rows::Asked, ..x }),
            Rows::Asked => fail("its input holds only the asked rows already".into()),
            Rows::Patches | Rows::Halves | Rows::Soft => fail(format!("nobody asks for rows of {x}")),
        },
        Op::Columns { first, len } => match first.checked_add(len) {
            Some(end) if len > 0 && end <= x.width => Ok(Type { width: len, ..x }),
            _ => fail(format!("{len} from {first} on are not in rows {} wide", x.width)),
        },
        Op::Concat => match x.width.checked_add(inputs[1].width) {
            Some(width) if inputs[1].elem == Elem::F32 && inputs[1].rows == x.rows => Ok(Type { width, ..x }),
            _ => fail(format!("{x} and {} are not parts of the same rows", inputs[1])),
        },
        Op::Candidates { each } => match (x.elem, x.width.checked_mul(each)) {
            (Elem::Routing { .. }, Some(width @ 1..)) => Ok(Type { elem: Elem::Token, width, ..x }),
            _ => fail(format!("needs a routing to groups of {each} tokens, was given {x}")),
        },
        Op::SpreadTokens { width } => {
            let tokens = Type { elem: Elem::Token, ..x };
            match inputs[1] == tokens && width >= x.width {
                true => Ok(Type { width, ..x }),
                false => fail(format!("cannot spread {x} of {} over a vocabulary of {width}", inputs[1])),
            }
        }
        Op::TokenMatMul { weight } => {
            let (w, tokens) = (graph.weight(weight), inputs[1]);
            if tokens.elem != Elem::Token || tokens.rows != x.rows {
                return fail(format!("needs the tokens of the same rows, was given {tokens}"));
            }
            if w.dims.len() != 2 || w.dim(0) != x.width as u64 {
                return fail(format!("{} {:?} does not fit rows {} wide", w.name, w.dims, x.width));
            }
            Ok(Type { width: tokens.width, ..x })
        }
        Op::MatMul { weight } => {
            let w = graph.weight(weight);
            if w.dims.len() != 2 || w.dim(0) != x.width as u64 {
                return fail(format!("{} {:?} does not fit rows {} wide", w.name, w.dims, x.width));
            }
            Ok(Type { width: narrow(op, w, w.dim(1))?, ..x })
        }
        Op::ExpertMatMul { weight, part } => {
            let (w, (slots, experts)) = (graph.weight(weight), routing(op, x, inputs[1])?);
            let fits = w.dim(0) == x.width as u64 || w.dim(0).checked_mul(slots as u64) == Some(x.width as u64);
            if w.dims.len() != 3 || w.dim(2) != experts as u64 || !fits {
                let of = format!("rows {} wide, {slots} of {experts} experts", x.width);
                return fail(format!("{} {:?} does not fit {of}", w.name, w.dims));
            }
            if part.len == 0 || part.first as u64 + part.len as u64 > w.dim(1) {
                let (len, first) = (part.len, part.first);
                return fail(format!("{} has {} rows an expert, not {len} from {first} on", w.name, w.dim(1)));
            }
            Ok(Type { width: narrow(op, w, part.len as u64 * slots as u64)?, ..x })
        }
        Op::RmsNorm { weight, group, .. } => {
            if group == 0 || !x.width.is_multiple_of(group) {
                return fail(format!("groups of {group} do not divide rows {} wide", x.width));
            }
            if let Some(w) = weight.map(|w| graph.weight(w)).filter(|w| w.dims != [group as u64]) {
                return fail(format!("{} {:?} is not a vector of {group}", w.name, w.dims));
            }
            Ok(x)
        }
        Op::Route { top_k } => {
            if top_k == 0 || top_k > x.width {
                return fail(format!("cannot choose {top_k} of {} experts", x.width));
            }
            Ok(Type { elem: Elem::Routing { experts: x.width }, width: top_k, ..x })
        }
        Op::ExpertSum { scale } => {
            let (slots, experts) = routing(op, x, inputs[1])?;
            if let Some(w) = scale.map(|w| graph.weight(w)).filter(|w| w.dims != [experts as u64]) {
                return fail(format!("{} {:?} is not a vector of {experts}", w.name, w.dims));
            }
            if !x.width.is_multiple_of(slots) {
                return fail(format!("rows {} wide are not {slots} equal slots", x.width));
            }
            Ok(Type { width: x.width / slots, ..x })
        }
        Op::GridMean { side } => match (x.rows, side) {
            (Rows::Patches, 1..) => Ok(Type { rows: Rows::Soft, ..x }),
            _ => fail(format!("squares of {side} by {side} patches cannot be taken of {x}")),
        },
        Op::Add | Op::Mul => {
            if inputs[0] != inputs[1] {
                return fail(format!("{} and {} differ", inputs[0], inputs[1]));
            }
            Ok(x)
        }
        Op::SubMean { group } => match group > 0 && x.width.is_multiple_of(group) {
            true => Ok(x),
            false => fail(format!("groups of {group} do not divide rows {} wide", x.width)),
        },
        Op::Scale { .. } | Op::AddConstant { .. } | Op::Gelu | Op::Sigmoid | Op::Relu | Op::Softcap { .. } => Ok(x),
        Op::MulWeight { weight } => {
            let w = graph.weight(weight);
            match w.dims.len() == 1 && w.dim(0) > 0 && (x.width as u64).is_multiple_of(w.dim(0)) {
                true => Ok(x),
                false => fail(format!("{} {:?} does not fit rows {} wide", w.name, w.dims, x.width)),
            }
        }
        Op::HalvingConv { weight, channels } => {
            let w = graph.weight(weight);
            let rows = match x.rows {
                Rows::Patches => Rows::Halves,
                Rows::Halves => Rows::Soft,
                _ => return fail(format!("{x} are not halved")),
            };
            if channels == 0 || !x.width.is_multiple_of(channels) {
                return fail(format!("rows {} wide are not columns of {channels} channels", x.width));
            }
            if w.dims.len() != 2 || w.dim(0) != 9 * channels as u64 || w.dim(1) == 0 {
                return fail(format!("{} {:?} is not 3 by 3 taps of {channels} channels", w.name, w.dims));
            }
            let columns = (x.width / channels).div_ceil(2) as u64;
            Ok(Type { rows, width: narrow(op, w, w.dim(1).saturating_mul(columns))?, ..x })
        }
        Op::CausalConv { weight } => {
            let w = graph.weight(weight);
            if x.rows != Rows::Soft {
                return fail(format!("{x} do not follow each other in time"));
            }
            match w.dims.len() == 2 && w.dim(0) > 0 && w.dim(1) == x.width as u64 {
                true => Ok(x),
                false => fail(format!("{} {:?} is not taps for rows {} wide", w.name, w.dims, x.width)),
            }
        }
        Op::NearAttention { heads, reach, cap, weight } => {
            let w = graph.weight(weight);
            if inputs.iter().any(|input| *input != x) {
                return fail(format!("{}, {} and {} differ", inputs[0], inputs[1], inputs[2]));
            }
            if heads == 0 || !x.width.is_multiple_of(heads) || !x.width.is_multiple_of(2) || x.width < 4 {
                return fail(format!("{heads} heads do not divide rows {} wide, or these have no two halves", x.width));
            }
            if x.rows != Rows::Soft {
                return fail(format!("{x} do not follow each other in time"));
            }
            if reach == 0 || cap.is_nan() || cap <= 0.0 {
                return fail(format!("a reach of {reach} and a cap of {cap} leave nothing to see"));
            }
            match w.dims == [x.width as u64; 2] {
                true => Ok(x),
                false => fail(format!("{} {:?} does not fit rows {} wide", w.name, w.dims, x.width)),
            }
        }
        Op::AddWeight { weight } | Op::AtLeast { weight } | Op::AtMost { weight } => {
            let w = graph.weight(weight);
            if w.dims.len() != 1 || (w.dim(0) != 1 && w.dim(0) != x.width as u64) {
                return fail(format!("{} {:?} does not fit rows {} wide", w.name, w.dims, x.width));
            }
            Ok(x)
        }
        Op::Rope { head_dim, factors, .. } => {
            if matches!(x.rows, Rows::Patches | Rows::Halves | Rows::Soft) {
                return fail(format!("{x} have no position in a sequence"));
            }
            if !head_dim.is_multiple_of(2) {
                return fail(format!("a head of {head_dim} has no two halves to rotate"));
            }
            if head_dim == 0 || !x.width.is_multiple_of(head_dim) {
                return fail(format!("heads of {head_dim} do not divide rows {} wide", x.width));
            }
            if let Some(w) = factors.map(|w| graph.weight(w)).filter(|w| w.dims != [head_dim as u64 / 2]) {
                return fail(format!("{} {:?} is not a vector of {}", w.name, w.dims, head_dim / 2));
            }
            Ok(x)
        }
        Op::KvAppend { cache } => {
            let (geometry, want) = (graph.cache(cache), Type::f32(Rows::Chunk, graph.cache(cache).width()));
            if inputs != [want, want] {
                return fail(format!(
                    "the cache of layer {} takes {want}, not {} and {}",
                    geometry.layer, x, inputs[1]
                ));
            }
            Ok(Type { elem: Elem::Kv(cache), ..want })
        }
        Op::Attention { heads } | Op::AttentionAhead { heads } | Op::AttentionBefore { heads } => {
            let Elem::Kv(cache) = inputs[1].elem else {
                return fail(format!("needs a cache, was given {}", inputs[1]));
            };
            let c = graph.cache(cache);
            if matches!(op, Op::AttentionBefore { .. }) && c.window == Some(1) {
                return fail("a window of 1 has nothing before a row's own position".into());
            }
            if c.kv_heads == 0 || !heads.is_multiple_of(c.kv_heads) || heads.checked_mul(c.head_dim) != Some(x.width) {
                let (kv_heads, dim) = (c.kv_heads, c.head_dim);
                return fail(format!(
                    "{heads} heads of {dim} over {kv_heads} kv heads do not fit rows {} wide",
                    x.width
                ));
            }
            Ok(x)
        }
        Op::GridRope { head_dim, .. } => {
            if head_dim == 0 || !head_dim.is_multiple_of(4) {
                return fail(format!("a head of {head_dim} has no four quarters to rotate"));
            }
            if !x.width.is_multiple_of(head_dim) {
                return fail(format!("heads of {head_dim} do not divide rows {} wide", x.width));
            }
            if x.rows != Rows::Patches {
                return fail(format!("only patches lie in a grid, not {x}"));
            }
            Ok(x)
        }
        Op::FullAttention { heads } => {
            if inputs.iter().any(|input| *input != x) {
                return fail(format!("{}, {} and {} differ", inputs[0], inputs[1], inputs[2]));
            }
            if heads == 0 || !x.width.is_multiple_of(heads) {
                return fail(format!("{heads} heads do not divide rows {} wide", x.width));
            }
            if x.rows != Rows::Patches {
                return fail(format!("only patches see each other, not {x}"));
            }
            Ok(x)
        }
    }
}

/// How many experts a row goes to, and of how many; `routing` must belong to the same rows as `x`.
fn routing(op: &Op, x: Type, routing: Type) -> Result<(u32, u32), TypeError> {
    match routing.elem {
        Elem::Routing { experts } if routing.rows == x.rows => Ok((routing.width, experts)),
        _ => {
            let why = format!("needs the routing of the same rows, was given {routing}");
            Err(TypeError { op: op.name(), why })
        }
    }
}

fn matrix_inputs(graph: &Graph, op: &Op, table: WeightId) -> Result<u32, TypeError> {
    let w = graph.weight(table);
    if w.dims.len() != 2 {
        return Err(TypeError { op: op.name(), why: format!("{} {:?} is not a matrix", w.name, w.dims) });
    }
    narrow(op, w, w.dim(0))
}

fn narrow(op: &Op, w: &Weight, width: u64) -> Result<u32, TypeError> {
    let too_wide = |_| TypeError { op: op.name(), why: format!("{} {:?} is too large", w.name, w.dims) };
    u32::try_from(width).map_err(too_wide)
}
