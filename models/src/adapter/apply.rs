//! An adapter in a forward pass: each pair is declared beside the tensor that it changes, or refused by name.

use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_graph::{Builder, Delta, Graph, Op, Weight, WeightId};

use super::error::{AdapterError, Fault};
use super::part::Part;
use super::shape;
use super::types::{Adapter, Half, Pair};
use crate::checkpoint::shown;
use crate::gemma4::{Config, Keys};

/// Tables of which rows are taken; the head is one of them where a model has no other.
const TABLES: [&str; 2] = ["token_embd.weight", "per_layer_token_embd.weight"];

/// Gate and up of experts may be stacked in an adapter and apart in a model.
const STACKED: &str = "ffn_gate_up_exps.weight";
const APART: [&str; 2] = ["ffn_gate_exps.weight", "ffn_up_exps.weight"];

/// The tensors that one pair changes, and the row of B that belongs to the first row of each.
pub(super) type Changed = Vec<(WeightId, u32)>;

/// The part of a model whose forward pass is built.
#[derive(Clone, Copy)]
pub enum Model<'a> {
    Text(&'a Config),
    Tower(Part),
}

impl Model<'_> {
    fn part(self) -> Part {
        match self {
            Model::Text(_) => Part::Text,
            Model::Tower(part) => part,
        }
    }
}

/// Declares all pairs for this part for the products that are built from here on: of each adapter so many times as
/// strong as its file says.
pub fn declare(adapters: &[(&Adapter, f32)], model: Model<'_>, g: &mut Builder) -> Result<(), AdapterError> {
    for (adapter, scale) in adapters {
        let within = AdapterError::within(adapter.path_of_tensors());
        for pair in adapter.pairs_of(model.part()) {
            adapter.declare_pair(pair, *scale, model, g).map_err(&within)?;
        }
    }
    Ok(())
}

/// Refuses pairs that are not in the forward pass: of a tensor that is read otherwise than by products, or not at all,
/// nothing would be changed.
pub fn check(adapters: &[(&Adapter, f32)], model: Model<'_>, graph: &Graph) -> Result<(), AdapterError> {
    let is_read_by_products = |name: &str| {
        let weight = graph.weights.iter().position(|weight| weight.name == name);
        let mut readers = graph.nodes.iter().filter(|node| node.op.weight().map(WeightId::index) == weight).peekable();
        let is_product = |op: Op| matches!(op, Op::MatMul { .. } | Op::ExpertMatMul { .. });
        weight.is_some() && readers.peek().is_some() && readers.all(|node| is_product(node.op))
    };
    for (adapter, _) in adapters {
        for pair in adapter.pairs_of(model.part()) {
            let are_apart =
                || apart(&pair.target).is_some_and(|names| names.iter().all(|name| is_read_by_products(name)));
            if !is_read_by_products(&pair.target) && !are_apart() {
                let why = format!("changes {}, which is not only read by products", shown(&pair.target));
                return Err(AdapterError::within(adapter.path_of_tensors())(Fault::tensor(&pair.a.called, why)));
            }
        }
    }
    Ok(())
}

impl Adapter {
    /// Refuses pairs for what the model does not have.
    pub(super) fn check_parts(&self, parts: &[Part]) -> Result<(), AdapterError> {
        let part_of = |pair: &Pair| Part::of(&pair.target);
        let Some(pair) = self.pairs.iter().find(|pair| !parts.contains(&part_of(pair))) else { return Ok(()) };
        let why = match part_of(pair) {
            Part::Audio if parts.contains(&Part::Vision) => {
                "is of a tower for sound, which the projector does not have"
            }
            _ => "is of a tower for pictures or sound: give the model's projector, too (--mmproj)",
        };
        Err(AdapterError::within(self.path_of_tensors())(Fault::tensor(&pair.a.called, why)))
    }

    /// The file that its tensors are in, for messages.
    pub(super) fn path_of_tensors(&self) -> &Path {
        self.file.files().first().map_or(&self.path, |file| &file.path)
    }

    fn declare_pair(&self, pair: &Pair, scale: f32, model: Model<'_>, g: &mut Builder) -> Result<(), Fault> {
        let Placed { changed, factor, a, b } = self.place(pair, scale, model, g)?;
        let [a, b] = [a, b].map(|half| g.weight(half.name, half.dtype, &half.dims));
        for (weight, first) in changed {
            g.adapt(weight, Delta { a, b, factor, first });
        }
        Ok(())
    }

    /// What a pair changes, `scale` times as strong as its file says; its shapes fit.
    pub(super) fn place<'a>(
        &'a self,
        pair: &'a Pair,
        scale: f32,
        model: Model<'_>,
        g: &Builder,
    ) -> Result<Placed<'a>, Fault> {
        let of = |half: &'a Half| {
            let tensor = self.file.tensor(&half.tensor).ok_or_else(|| Fault::tensor(&half.called, "is missing"))?;
            let dims = shape::matrix(&half.called, tensor.dims())?;
            let dtype = tensor.dtype().map_err(|error| Fault::NotAdapter(error.to_string()))?;
            Ok((dims, dtype))
        };
        let ((a_dims, a_type), (b_dims, b_type)) = (of(&pair.a)?, of(&pair.b)?);
        let ([inputs, rank, experts], [_, outputs, _]) = (a_dims, b_dims);
        let (changed, [of_inputs, of_outputs, of_experts]) = changed(pair, model, g)?;
        let model = |what: &[u64]| format!("and {} of the model is {what:?}", pair.target);
        let of_model = [of_inputs, of_outputs, of_experts];
        let shown = if of_experts == 1 { &of_model[..2] } else { &of_model[..] };
        for (half, found, expected, what) in
            [(&pair.a, inputs, of_inputs, "inputs"), (&pair.b, outputs, of_outputs, "outputs")]
        {
            if found != expected {
                return Err(Fault::tensor(&half.called, format!("has {found} {what}, {}", model(shown))));
            }
        }
        if experts != of_experts {
            return Err(Fault::tensor(&pair.a.called, format!("is for {experts} experts, {}", model(shown))));
        }
        let whole = |dims: [u64; 3]| if of_experts == 1 { dims[..2].to_vec() } else { dims.to_vec() };
        let factor = pair.factor * scale;
        if rank == 0 || !factor.is_finite() {
            return Err(Fault::tensor(&pair.a.called, format!("is multiplied by {factor}")));
        }
        let a = PlacedHalf { name: &pair.a.tensor, dtype: a_type, dims: whole(a_dims) };
        let b = PlacedHalf { name: &pair.b.tensor, dtype: b_type, dims: whole(b_dims) };
        Ok(Placed { changed, factor, a, b })
    }
}

/// A pair and what it changes.
pub(super) struct Placed<'a> {
    pub changed: Changed,
    pub factor: f32,
    pub a: PlacedHalf<'a>,
    pub b: PlacedHalf<'a>,
}

/// A half as the model has it: a matrix, or one for each expert.
pub(super) struct PlacedHalf<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub dims: Vec<u64>,
}

/// What a pair changes, and the dimensions of all of it together.
fn changed(pair: &Pair, model: Model<'_>, g: &Builder) -> Result<(Changed, [u64; 3]), Fault> {
    let refused = |why: String| Err(Fault::tensor(&pair.a.called, why));
    if TABLES.contains(&pair.target.as_str()) {
        return refused(format!("changes {}, a table of embeddings, which is not supported", pair.target));
    }
    if let Some((id, weight)) = g.find_weight(&pair.target) {
        return match of_matrix(weight) {
            Some(dims) => Ok((vec![(id, 0)], dims)),
            None => refused(format!("changes {}, which is no matrix: only products are adapted", pair.target)),
        };
    }
    let apart = apart(&pair.target).map(|names| names.map(|name| g.find_weight(&name)));
    if let Some([Some((gate, weight)), Some((up, _))]) = apart
        && let Some([inputs, outputs, experts]) = of_matrix(weight)
    {
        return Ok((vec![(gate, 0), (up, outputs as u32)], [inputs, 2 * outputs, experts]));
    }
    match model {
        Model::Text(config) => refused(absent(&pair.target, config)),
        Model::Tower(_) => refused(format!("is for {}, which the projector does not have", shown(&pair.target))),
    }
}

/// The names of gate and up where the model has them apart.
fn apart(target: &str) -> Option<[String; 2]> {
    let layer = target.strip_suffix(STACKED)?;
    Some(APART.map(|name| format!("{layer}{name}")))
}

fn of_matrix(weight: &Weight) -> Option<[u64; 3]> {
    match *weight.dims {
        [inputs, outputs] => Some([inputs, outputs, 1]),
        [inputs, outputs, experts] => Some([inputs, outputs, experts]),
        _ => None,
    }
}

/// Why the model's forward pass has no such tensor.
fn absent(target: &str, config: &Config) -> String {
    let of_layer = target.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((Ok(number), rest)) = of_layer.map(|(layer, rest)| (layer.parse::<usize>(), rest)) else {
        return format!("is for {}, which the model does not have", shown(target));
    };
    let Some(layer) = config.layers.get(number) else {
        return format!("is for layer {number}: the model has {}, counted from 0", config.layers.len());
    };
    match (rest, layer.attention.keys) {
        ("attn_k.weight" | "attn_v.weight", Keys::SharedWith { donor }) => {
            format!("is for layer {number}, which has no keys of its own: it takes those of layer {donor}")
        }
        ("attn_v.weight", Keys::ValuesFromKeys) => {
            format!("is for layer {number}, which has no value projection: its values are its keys")
        }
        _ => format!("is for {}, which the model does not have", shown(target)),
    }
}
