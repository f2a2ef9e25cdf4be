//! An adapter for a seat of a plan: its pairs as the matrices that the plan has reserved, or refused by the name of the
//! first tensor that no seat holds.
//!
//! This knows the plan and no model's file: a plan may be all that is there. Values are rounded to bf16, with each
//! pair's own factor in its B.

use std::path::Path;
use std::sync::Arc;

use gemma4c_blocks::DType;
use gemma4c_blocks::decode::decode_row;
use gemma4c_graph::{Builder, WeightId};
use gemma4c_plan::{Plan, SeatWeights, Seats};
use half::bf16;

use super::error::{AdapterError, Fault};
use super::part::Part;
use super::shape;
use super::types::{Adapter, Half, Pair};
use super::{Stored, read};
use crate::checkpoint::shown;

/// The ends of the names of reserved weights, behind the name of the tensor that they adapt: A's, then B's.
pub(super) const BANKS: [&str; 2] = [".seats_a", ".seats_b"];

/// The matrices of a layer that seats hold adapters of.
pub(super) const SEATED: [&str; 7] = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];

/// Whether a weight of such a name is reserved for the adapters of seats.
pub fn is_reserved(name: &str) -> bool {
    BANKS.iter().any(|end| name.ends_with(end))
}

/// Declares room for the adapters of all seats in the products that are built from here on: of each layer A's halves, and
/// behind them B's, so that those of matrices that read the same are neighbours.
pub fn reserve(seats: Seats, layers: usize, g: &mut Builder) {
    for layer in 0..layers {
        let name = |matrix: &str| format!("blk.{layer}.{matrix}.weight");
        let matrices: Vec<(WeightId, String, [u64; 2])> = SEATED
            .iter()
            .filter_map(|matrix| {
                let (id, weight) = g.find_weight(&name(matrix))?;
                Some((id, weight.name.clone(), [weight.dim(0), weight.dim(1)]))
            })
            .collect();
        let (rank, count) = (seats.rank.into(), seats.count.into());
        let mut bank = |half: usize| -> Vec<WeightId> {
            let dims =
                |[inputs, outputs]: [u64; 2]| if half == 0 { [inputs, rank, count] } else { [rank, outputs, count] };
            let of =
                |(_, name, shape): &(_, String, _)| g.weight(&(name.clone() + BANKS[half]), DType::BF16, &dims(*shape));
            matrices.iter().map(of).collect()
        };
        let (of_a, of_b) = (bank(0), bank(1));
        for ((matrix, ..), (a, b)) in matrices.iter().zip(of_a.into_iter().zip(of_b)) {
            g.adapt_by_seat(*matrix, a, b);
        }
    }
}

/// What makes an adapter ready for a seat: its path in, its matrices or a message out.
pub type OpenAdapter = Arc<dyn Fn(&Path) -> Result<SeatWeights, String> + Send + Sync>;

/// A plan's seats, as an adapter must fit them.
#[derive(Clone, Debug)]
pub struct Seating {
    seats: Seats,
    banks: Vec<Bank>,
    /// The plan's other tensors, for messages.
    others: Vec<String>,
    layers: u32,
    /// Layers with keys of their own.
    with_keys: Vec<u32>,
}

/// One of the reserved weights.
#[derive(Clone, Debug)]
struct Bank {
    target: String,
    /// 0 for A.
    half: usize,
    /// Columns and rows of one seat's matrix.
    shape: [u64; 2],
}

impl Seating {
    /// `None` of a plan without seats.
    pub fn of(plan: &Plan) -> Option<Seating> {
        let bank = |weight: &gemma4c_plan::Weight| {
            let of = |half: usize| Some((half, weight.name.strip_suffix(BANKS[half])?.to_owned()));
            let (half, target) = of(0).or_else(|| of(1))?;
            Some(Bank { target, half, shape: [weight.dim(0), weight.dim(1)] })
        };
        let others = plan.weights.iter().filter(|weight| !weight.is_reserved()).map(|weight| weight.name.clone());
        Some(Seating {
            seats: plan.model.seats?,
            banks: plan.reserved().map(|(_, weight)| bank(weight)).collect::<Option<_>>()?,
            others: others.collect(),
            layers: plan.model.layers,
            with_keys: plan.program.caches.iter().map(|cache| cache.layer).collect(),
        })
    }

    /// As a function that reads and prepares what is at a path.
    pub fn opener(self) -> OpenAdapter {
        Arc::new(move |path| self.prepare(path).map_err(|error| error.to_string()))
    }

    /// The adapter at a path: a GGUF file, a folder of PEFT, or one of its two files.
    pub fn prepare(&self, path: &Path) -> Result<SeatWeights, AdapterError> {
        let adapter = match read(path)? {
            Stored::Gguf(stored) => stored.adapter(),
            Stored::Peft(stored) => stored.adapter(None)?,
        };
        self.fill(&adapter).map_err(AdapterError::within(adapter.path_of_tensors()))
    }

    fn fill(&self, adapter: &Adapter) -> Result<SeatWeights, Fault> {
        // All of it is looked at before anything is converted.
        for pair in &adapter.pairs {
            self.check(adapter, pair)?;
        }
        let matrix = |bank: &Bank| {
            let mut out = vec![0; 2 * (bank.shape[0] * bank.shape[1]) as usize];
            let pair = adapter.pairs.iter().find(|pair| pair.target == bank.target);
            pair.map_or(Ok(()), |pair| convert(adapter, pair, bank, &mut out)).map(|()| out)
        };
        let matrices = self.banks.iter().map(matrix).collect::<Result<_, _>>()?;
        Ok(SeatWeights { pairs: adapter.pairs.len() as u32, matrices })
    }

    /// Whether a pair has a place and fits it.
    fn check(&self, adapter: &Adapter, pair: &Pair) -> Result<(), Fault> {
        let bank = |half: usize| self.banks.iter().find(|bank| bank.target == pair.target && bank.half == half);
        let [Some(a), Some(b)] = [bank(0), bank(1)] else {
            return Err(Fault::tensor(&pair.a.called, self.why_not(&pair.target)));
        };
        let ([inputs, rank, of_a], [_, outputs, of_b]) = (dims(adapter, &pair.a)?, dims(adapter, &pair.b)?);
        let model = format!("and {} of the model is {:?}", pair.target, [a.shape[0], b.shape[1]]);
        let misfits = [(&pair.a, inputs, a.shape[0], "inputs"), (&pair.b, outputs, b.shape[1], "outputs")];
        for (half, found, expected, what) in misfits {
            if found != expected {
                return Err(Fault::tensor(&half.called, format!("has {found} {what}, {model}")));
            }
        }
        if of_a != 1 || of_b != 1 {
            return Err(Fault::tensor(&pair.a.called, format!("is for {of_a} experts, {model}")));
        }
        if rank == 0 || !pair.factor.is_finite() {
            return Err(Fault::tensor(&pair.a.called, format!("has rank {rank} and is multiplied by {}", pair.factor)));
        }
        match rank > u64::from(self.seats.rank) {
            true => {
                let most = self.seats.rank;
                let why = format!("has rank {rank}, and the plan's seats take {most} at most: compile it with --rank");
                Err(Fault::tensor(&pair.a.called, why))
            }
            false => Ok(()),
        }
    }

    /// Why there is no place for a pair.
    fn why_not(&self, target: &str) -> String {
        let layer = target.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = layer.and_then(|(layer, rest)| Some((layer.parse::<u32>().ok()?, rest)));
        if let Some((layer, _)) = layer.filter(|(layer, _)| *layer >= self.layers) {
            return format!("is for layer {layer}: the model has {}, counted from 0", self.layers);
        }
        match layer {
            Some((layer, "attn_k.weight" | "attn_v.weight")) if !self.with_keys.contains(&layer) => {
                format!("is for layer {layer}, which has no keys of its own")
            }
            Some((layer, "attn_v.weight")) => {
                format!("is for layer {layer}, which has no value projection: its values are its keys")
            }
            _ if Part::of(target) != Part::Text
                || target.contains("_exps.")
                || self.others.iter().any(|it| it == target) =>
            {
                let held = SEATED.join(", ");
                format!("changes {}, and a seat holds {held} alone: compile the adapter in with --lora", shown(target))
            }
            _ => format!("is for {}, which the model does not have", shown(target)),
        }
    }
}

fn dims(adapter: &Adapter, half: &Half) -> Result<[u64; 3], Fault> {
    let tensor = adapter.file.tensor(&half.tensor).ok_or_else(|| Fault::tensor(&half.called, "is missing"))?;
    shape::matrix(&half.called, tensor.dims())
}

/// Writes a half of a pair to a seat's matrix, which has room for more rows (of A) or columns (of B).
fn convert(adapter: &Adapter, pair: &Pair, bank: &Bank, out: &mut [u8]) -> Result<(), Fault> {
    let (half, factor) = if bank.half == 0 { (&pair.a, 1.0) } else { (&pair.b, pair.factor) };
    let unread = |why: String| Fault::tensor(&half.called, why);
    let tensor = adapter.file.tensor(&half.tensor).ok_or_else(|| unread("is missing".into()))?;
    let dtype = tensor.dtype().map_err(|error| unread(error.to_string()))?;
    let bytes = adapter.file.bytes(tensor).map_err(|error| unread(error.to_string()))?;
    let [columns, ..] = shape::matrix(&half.called, tensor.dims())?;
    let row_bytes = dtype.row_bytes(columns).ok_or_else(|| unread("has rows of no whole blocks".into()))?;
    let mut values = vec![0.0; columns as usize];
    let rows = bytes.chunks_exact(row_bytes as usize).zip(out.chunks_exact_mut(2 * bank.shape[0] as usize));
    for (number, (row, to)) in rows.enumerate() {
        decode_row(dtype, row, &mut values);
        for (column, (value, to)) in values.iter().zip(to.as_chunks_mut::<2>().0).enumerate() {
            let rounded = bf16::from_f32(value * factor);
            if !rounded.is_finite() {
                let at = format!("value {column} of row {number}");
                return Err(unread(format!("is no number or too large: {at}, times {factor}")));
            }
            *to = rounded.to_le_bytes();
        }
    }
    Ok(())
}
