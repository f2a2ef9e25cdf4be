//! Pairs of a rank that a GPU's kernels take: whole groups of 16 values, of experts of 32, whose products are those of
//! any matrix. What is added to A and to B are zeros, so that the product is the same.

use gemma4c_blocks::recipe::{Float, Recipe};
use gemma4c_plan::{Piece, Span};

use super::shape;
use super::types::{Adapter, Pair};
use crate::gguf::TensorInfo;

/// Values that are read together.
const GROUP: u64 = 16;
const GROUP_OF_EXPERTS: u64 = 32;

impl Adapter {
    /// The same with ranks that are whole groups.
    pub fn padded(self) -> Adapter {
        let Adapter { path, file, pairs } = self;
        let of_pair = |pair: &Pair| {
            let [a, b] = [&pair.a, &pair.b].map(|half| file.tensor(&half.tensor));
            let (a, b) = (a?, b?);
            Some(padded(a, b).unwrap_or_else(|| [a.clone(), b.clone()]))
        };
        let tensors = pairs.iter().filter_map(of_pair).flatten().collect();
        Adapter { path, file: file.with_tensors(tensors), pairs }
    }
}

/// Both halves with zeros, if that is needed.
fn padded(a: &TensorInfo, b: &TensorInfo) -> Option<[TensorInfo; 2]> {
    // Rows of A may be blocks; those of B, which are as long as the rank, would be whole groups if they were.
    let (a_type, of_b) = (a.dtype().ok()?, b.dtype().ok().and_then(Float::of)?);
    let [inputs, rank, experts] = shape::matrix(&a.name, a.dims()).ok()?;
    let [_, outputs, _] = shape::matrix(&b.name, b.dims()).ok()?;
    let whole = rank.next_multiple_of(if experts == 1 { GROUP } else { GROUP_OF_EXPERTS });
    if whole == rank {
        return None;
    }
    let own_rows = a_type.row_bytes(inputs)?.checked_mul(rank)?;
    let of_expert = |expert: u64| {
        let span = Span { file: a.file as u32, offset: a.offset + expert * own_rows, bytes: own_rows };
        let own = Piece { rows: rank, recipe: Recipe::Copy, inputs: vec![span] };
        [own, Piece { rows: whole - rank, recipe: Recipe::Zeros, inputs: Vec::new() }]
    };
    let a_pieces = (0..experts).flat_map(of_expert).collect();
    let columns = u32::try_from(rank).ok()?;
    let b_pieces = match b.pieces.is_empty() {
        true => {
            let span = Span { file: b.file as u32, offset: b.offset, bytes: b.len };
            let recipe = Recipe::Interleaved { from: of_b, of: 0, step: 1, columns };
            vec![Piece { rows: outputs.checked_mul(experts)?, recipe, inputs: vec![span] }]
        }
        // Experts that take turns have their own number of columns already, and zeros follow.
        false => b.pieces.clone(),
    };
    let dims = |columns: u64, rows: u64| if experts == 1 { vec![columns, rows] } else { vec![columns, rows, experts] };
    let a_new = TensorInfo::made(a.name.to_string(), &dims(inputs, whole), a_type, a_pieces);
    let b_new = TensorInfo::made(b.name.to_string(), &dims(whole, outputs), of_b.dtype(), b_pieces);
    Some([a_new, b_new])
}
