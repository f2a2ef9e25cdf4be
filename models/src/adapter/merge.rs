//! An adapter merged into a model: the matrices that it changes are made with its pairs added while they are loaded, so
//! that no product more is left.
//!
//! Matrices of floats stay what they are, rounded once more. Those in blocks are quantised again ([`merged_type`]):
//! that is another model, a little further from the one that was trained.

use gemma4c_blocks::recipe::{First, Float, Recipe, merged_type};
use gemma4c_graph::Builder;
use gemma4c_plan::{Piece, Span};

use super::apply::{Model, Placed};
use super::error::{AdapterError, Fault};
use super::part::Part;
use super::types::{Adapter, Pair};
use crate::gemma4::Config;
use crate::gguf::{Gguf, TensorInfo};

/// The model with an adapter merged, so many times as strong as its file says. `g` has the model's weights.
pub fn merge(
    model: Gguf,
    (adapter, scale): (&Adapter, f32),
    config: &Config,
    g: &Builder,
) -> Result<Gguf, AdapterError> {
    let within = AdapterError::within(adapter.path_of_tensors());
    let first_file = model.files().len() as u32;
    let mut merged: Vec<TensorInfo> = Vec::new();
    for pair in &adapter.pairs {
        let new = merged_by(&model, first_file, (adapter, pair, scale), config, g).map_err(&within)?;
        if let Some(twice) = new.iter().find(|new| merged.iter().any(|other| other.name == new.name)) {
            return Err(within(Fault::tensor(&pair.a.called, format!("changes {} once more", twice.name))));
        }
        merged.extend(new);
    }
    Ok(model.with_files_of(&adapter.file).with_replaced(merged))
}

/// The tensors that a pair changes. The adapter's files follow the model's, which are `first_file`.
fn merged_by(
    model: &Gguf,
    first_file: u32,
    (adapter, pair, scale): (&Adapter, &Pair, f32),
    config: &Config,
    g: &Builder,
) -> Result<Vec<TensorInfo>, Fault> {
    let refused = |why: String| Fault::tensor(&pair.a.called, why);
    if Part::of(&pair.target) != Part::Text {
        return Err(refused("is of a tower, which cannot be merged: leave --lora-merge".into()));
    }
    let Placed { changed, factor, a, b } = adapter.place(pair, scale, Model::Text(config), g)?;
    let halves = [a.name, b.name].map(|name| adapter.file.tensor(name));
    let [Some(a_stored), Some(b_stored)] = halves else { return Err(refused("is missing".into())) };
    let experts = a.dims.get(2).copied().unwrap_or(1);
    let (rank, outputs) = (a.dims[1], b.dims[1]);
    let second = SmallMatrices::of(a_stored, experts).ok_or_else(|| refused("is not stored as floats".into()))?;
    let first = SmallMatrices::of(b_stored, experts).ok_or_else(|| refused("and its B are not both floats".into()))?;
    let merged = changed.into_iter().map(|(id, first_row)| {
        let name = &g.weight_of(id).name;
        let tensor = model.tensor(name).ok_or_else(|| refused(format!("changes {name}, which is not there")))?;
        let cannot = || {
            let stored = "is stored in a way that nothing can be merged into: leave --lora-merge";
            refused(format!("changes {name}, which {stored}"))
        };
        let base = tensor.dtype().map_err(|_| cannot())?;
        let rows = tensor.dims()[1];
        let own = matrices(tensor, experts).ok_or_else(cannot)?;
        let piece = |(expert, matrix): (u64, Span)| {
            let rows_of_first = (first_row.into(), rows, outputs);
            let (of_first, first) = first.rows(expert, rows_of_first, rank, first_file);
            let second_rows = second.rows(expert, (0, rank, rank), tensor.dims()[0], first_file).0;
            let rank = u32::try_from(rank).map_err(|_| cannot())?;
            let recipe = Recipe::Merged { base, times: factor, rank, second: second.float, first };
            Ok(Piece { rows, recipe, inputs: vec![matrix, second_rows, of_first] })
        };
        let pieces = (0..experts).zip(own).map(piece).collect::<Result<Vec<_>, Fault>>()?;
        let to = merged_type(base);
        match pieces.iter().all(|piece| piece.makes(to, tensor.dims()[0])) {
            true => Ok(TensorInfo::made(name.clone(), tensor.dims(), to, pieces)),
            false => Err(cannot()),
        }
    });
    merged.collect()
}

/// Where the matrices of a tensor lie, one for each expert; `None` where its rows are made of other bytes.
fn matrices(tensor: &TensorInfo, experts: u64) -> Option<Vec<Span>> {
    let dtype = tensor.dtype().ok()?;
    let (columns, rows) = (tensor.dims()[0], tensor.dims()[1]);
    let bytes = dtype.row_bytes(columns)?.checked_mul(rows)?;
    let is_plain = |piece: &Piece| piece.recipe == Recipe::Copy && piece.rows == rows;
    match &tensor.pieces[..] {
        [] => {
            let of = |expert: u64| Span { file: tensor.file as u32, offset: tensor.offset + expert * bytes, bytes };
            Some((0..experts).map(of).collect())
        }
        pieces if pieces.len() as u64 == experts && pieces.iter().all(is_plain) => {
            pieces.iter().map(|piece| piece.inputs.first().copied()).collect()
        }
        _ => None,
    }
}

/// A half of a pair as it is stored: its matrices one after the other, or with columns that take turns.
struct SmallMatrices {
    float: Float,
    step: u32,
    at: Span,
}

impl SmallMatrices {
    fn of(stored: &TensorInfo, experts: u64) -> Option<SmallMatrices> {
        match &stored.pieces[..] {
            [] => {
                let at = Span { file: stored.file as u32, offset: stored.offset, bytes: stored.len };
                Some(SmallMatrices { float: Float::of(stored.dtype().ok()?)?, step: 1, at })
            }
            pieces if pieces.len() as u64 == experts => match (pieces[0].recipe, &pieces[0].inputs[..]) {
                (Recipe::Interleaved { from, of: 0, step, .. }, [at]) if u64::from(step) == experts => {
                    Some(SmallMatrices { float: from, step, at: *at })
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Where `rows` rows of an expert's matrix lie, from row `from` on; it has `all`, of `columns` values each.
    fn rows(&self, expert: u64, (from, rows, all): (u64, u64, u64), columns: u64, first_file: u32) -> (Span, First) {
        let row = columns * u64::from(self.step) * self.float.bytes();
        let (before, of) = if self.step == 1 { (expert * all * row, 0) } else { (0, expert as u32) };
        let span =
            Span { file: first_file + self.at.file, offset: self.at.offset + before + from * row, bytes: rows * row };
        (span, First { from: self.float, of, step: self.step })
    }
}
