//! Opens a model in whatever files it comes, and says of its tensors what their names mean beyond their type: where the
//! factor of a tensor is, and which matrices may be quantised.

use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::{Float, Recipe};
use gemma4c_plan::{Piece, Span};

use crate::checkpoint::{self, CheckpointError};
use crate::gguf::{Gguf, GgufError, Header, TensorInfo};

/// Why a model's files cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Opens a GGUF file, or a checkpoint by its folder or by one of its files.
pub fn open(path: &Path) -> Result<Gguf, OpenError> {
    let model = if checkpoint::is_checkpoint(path) { checkpoint::open(path)? } else { Gguf::open(path)? };
    Ok(model.with_changed(with_factor)?)
}

/// Types that floats can be quantised to on the way to where they are used.
pub const QUANTISED: [DType; 2] = [DType::Q4_0, DType::Q8_0];

/// The same model with its matrices of floats quantised while they are loaded; how many there are. Tables and the LM
/// head are never narrower than 8 bits. What quantisers leave alone, this does: vectors, the router, and the projection
/// of per-layer embeddings.
pub fn quantised(model: Gguf, to: DType) -> Result<(Gguf, usize), OpenError> {
    let is_changed = |tensor: &TensorInfo| as_floats(tensor).is_some() && is_for_quantisers(tensor);
    let count = model.tensors().iter().filter(|tensor| is_changed(tensor)).count();
    let changed = model.with_changed(|_, tensor| {
        let pieces = as_floats(tensor).filter(|_| is_for_quantisers(tensor));
        let to = if TABLES.contains(&&*tensor.name) { DType::Q8_0 } else { to };
        Ok(pieces.map(|pieces| TensorInfo::made(tensor.name.to_string(), tensor.dims(), to, pieces)))
    })?;
    Ok((changed, count))
}

/// Rows are looked up in these, and the LM head's are multiplied.
const TABLES: [&str; 3] = ["token_embd.weight", "per_layer_token_embd.weight", "output.weight"];
/// Matrices that quantisers leave alone.
const UNQUANTISED: [&str; 2] = ["ffn_gate_inp.weight", "per_layer_model_proj.weight"];
/// Values of a block of what floats are quantised to.
const BLOCK: u64 = 32;

fn is_for_quantisers(tensor: &TensorInfo) -> bool {
    let is_left = UNQUANTISED.iter().any(|end| tensor.name.ends_with(end));
    tensor.dims().len() > 1 && tensor.name.ends_with(".weight") && !is_left && tensor.dims()[0].is_multiple_of(BLOCK)
}

/// The pieces of a tensor of floats as they would be quantised; `None` of any other.
fn as_floats(tensor: &TensorInfo) -> Option<Vec<Piece>> {
    if tensor.pieces.is_empty() {
        let from = Float::of(tensor.dtype().ok()?)?;
        let rows = tensor.dims()[1..].iter().product();
        let inputs = vec![Span { file: tensor.file as u32, offset: tensor.offset, bytes: tensor.len }];
        return Some(vec![Piece { rows, recipe: Recipe::Quantise { from }, inputs }]);
    }
    let of_piece = |piece: &Piece| {
        let from = match piece.recipe {
            Recipe::Copy => Float::of(tensor.dtype().ok()?)?,
            Recipe::Widen { from } => from,
            _ => return None,
        };
        Some(Piece { recipe: Recipe::Quantise { from }, ..piece.clone() })
    };
    tensor.pieces.iter().map(of_piece).collect()
}

/// The factors of experts' down projections are multiplied with the experts' weights, as other files' scales are.
const MULTIPLIED_LATER: &str = "ffn_down_exps.weight";

/// A tensor whose blocks have their factor in a tensor of its own, with the factor.
fn with_factor(file: &Header, tensor: &TensorInfo) -> Result<Option<TensorInfo>, GgufError> {
    let dtype = tensor.dtype();
    let Some(dtype) = dtype.ok().filter(|dtype| dtype.layout().file_bytes < dtype.layout().bytes) else {
        return Ok(None);
    };
    if !tensor.pieces.is_empty() {
        return Ok(None);
    }
    let dims = tensor.dims();
    let all: u64 = dims[1..].iter().product();
    let name = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
    let factors = file.tensor(&format!("{name}.scale")).filter(|_| !tensor.name.ends_with(MULTIPLIED_LATER));
    let blocks = |first: u64, rows: u64| {
        let bytes = tensor.len / all.max(1);
        Span { file: tensor.file as u32, offset: tensor.offset + first * bytes, bytes: rows * bytes }
    };
    let recipe = Recipe::Factored { has_factor: factors.is_some() };
    let pieces = match factors {
        None => vec![Piece { rows: all, recipe, inputs: vec![blocks(0, all)] }],
        Some(factors) => {
            let count = factors.dims()[0];
            let fits = factors.dims().len() == 1 && (count == 1 || dims.len() == 3 && count == dims[2]);
            if !fits || factors.dtype().ok() != Some(DType::F32) {
                return Err(GgufError::Factors { tensor: factors.name.to_string(), dims: factors.dims().to_vec() });
            }
            let rows = all / count;
            let factor = |at: u64| Span { file: factors.file as u32, offset: factors.offset + 4 * at, bytes: 4 };
            let piece = |at: u64| Piece { rows, recipe, inputs: vec![blocks(at * rows, rows), factor(at)] };
            (0..count).map(piece).collect()
        }
    };
    Ok(Some(TensorInfo::made(tensor.name.to_string(), dims, dtype, pieces)))
}
