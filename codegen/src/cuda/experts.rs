//! A mixture's router and the products of the experts it chose.

use gemma4c_graph::{Elem, Group, NodeId, Router, WeightId};
use gemma4c_plan::cuda::Form;

use super::LowerError;
use super::launch::Arg;
use super::phase::{PhaseBuilder, RoutingPlace, Work, int8_arguments};
use crate::kernels::matvec::formats::format;
use crate::kernels::moe::Activations;
use crate::kernels::moe::down::Down;
use crate::kernels::moe::gate_up::GateUp;
use crate::kernels::moe::router;

impl PhaseBuilder<'_, '_> {
    /// How many experts there are, and how many a row goes to.
    fn experts(&self, routing: NodeId) -> (u32, u32) {
        let ty = self.graph().node(routing).ty;
        match ty.elem {
            Elem::Routing { experts } => (experts, ty.width),
            _ => (0, 0),
        }
    }

    pub fn router(&mut self, group: &Group, of: &Router) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let (rows, state) = (self.rows_of(group), self.state(group));
        let (experts, top) = self.experts(node);
        let width = self.graph().node(of.input).ty.width;
        let kind = router::Router { epsilon: of.eps, ..router::Router::new(width, experts, top) };
        if of.factor != 1.0 / (width as f32).sqrt() && of.factor != (width as f32).powf(-0.5) {
            return Err(LowerError::NoValue {
                node: format!("{}: a factor of {}", self.graph().full_name(node), of.factor),
            });
        }
        let pairs = rows as u64 * top as u64 * 4;
        let place = RoutingPlace { ids: self.buffer(pairs), weights: self.buffer(pairs) };
        let logits = self.buffer(rows as u64 * experts as u64 * 4);
        let counter = self.common.counters();
        let arguments = [
            ("router", self.common.weights.floats(of.weight)?),
            ("scale", self.common.weights.floats(of.scale)?),
            ("x", self.floats(of.input)?.start),
            ("state", state),
            ("logits", logits),
            ("counter", counter.take(4)),
            ("ids", place.ids),
            ("weights", place.weights),
        ];
        let work =
            Work { bytes: experts as u64 * width as u64 * 4, flops: 2 * rows as u64 * experts as u64 * width as u64 };
        let (instance, grid, why) = match rows {
            1 => (kind.split_instance()?, [kind.split_blocks(), 1, 1], "one row: experts shared out among blocks"),
            _ => (kind.instance()?, [1, rows, 1], "many rows: a block each"),
        };
        self.launch(instance, grid, &arguments, &group.nodes, work, why)?;
        self.leaves(node, Form::Experts, place.ids);
        self.keep_routing(node, place);
        Ok(())
    }

    pub fn expert_gate_up(
        &mut self,
        group: &Group,
        weight: WeightId,
        input: NodeId,
        routing: NodeId,
    ) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let (rows, state, place) = (self.rows_of(group), self.state(group), self.routing(routing)?);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let (experts, top) = self.experts(routing);
        let hidden = (matrix.rows / experts as u64 / 2) as u32;
        let integer = format(matrix.dtype).integer;
        let from = if integer { Activations::Int8 } else { Activations::F32 };
        let to = if integer && hidden.is_multiple_of(32) { Activations::Int8 } else { Activations::F32 };
        let kind = GateUp { dtype: matrix.dtype, hidden, k: matrix.k, top, from, to };
        let mut arguments = matrix.arguments();
        self.arrive(group, input, from, rows as u64 * matrix.k as u64, &mut arguments)?;
        let form = if to == Activations::Int8 { Form::Int8 } else { Form::F32 };
        let out = self.make(node, form, rows);
        match to {
            Activations::Int8 => {
                let elements = rows as u64 * top as u64 * hidden as u64;
                arguments.extend(int8_arguments(out, elements, ["leave_xq", "leave_xscale", "leave_xsum"]));
            }
            Activations::F32 => arguments.push(("leave_out", out)),
        }
        arguments.extend([("ids", place.ids), ("state", state), ("outputs", Arg::U32(hidden))]);
        let of_row = matrix.bytes() / experts as u64 * top as u64;
        let flops = 2 * rows as u64 * top as u64 * 2 * hidden as u64 * matrix.k as u64;
        let work = Work { bytes: of_row * rows as u64, flops };
        let grid = kind.grid(rows);
        self.launch(kind.instance()?, grid, &arguments, &group.nodes, work, "a product for each row and expert")?;
        self.leaves(node, form, out);
        Ok(())
    }

    pub fn expert_down(
        &mut self,
        group: &Group,
        weight: WeightId,
        scale: Option<WeightId>,
        input: NodeId,
        routing: NodeId,
    ) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let (rows, state, place) = (self.rows_of(group), self.state(group), self.routing(routing)?);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let (experts, top) = self.experts(routing);
        let outputs = (matrix.rows / experts as u64) as u32;
        let from = if self.has(input, Form::Int8) { Activations::Int8 } else { Activations::F32 };
        let kind = Down { dtype: matrix.dtype, outputs, k: matrix.k, top, from, epilogue: Vec::new() };
        let scale = match scale {
            Some(weight) => self.common.weights.floats(weight)?,
            None => self.common.weights.constant("an expert's factor", vec![1.0; experts as usize]),
        };
        let mut arguments = matrix.arguments();
        self.arrive(group, input, from, rows as u64 * top as u64 * matrix.k as u64, &mut arguments)?;
        let out = self.make(node, Form::F32, rows);
        arguments.extend([
            ("expert_scale", scale),
            ("ids", place.ids),
            ("weights", place.weights),
            ("state", state),
            ("out", out),
            ("outputs", Arg::U32(outputs)),
        ]);
        let of_row = matrix.bytes() / experts as u64 * top as u64;
        let flops = 2 * rows as u64 * top as u64 * outputs as u64 * matrix.k as u64;
        let work = Work { bytes: of_row * rows as u64, flops };
        let grid = kind.grid(rows);
        self.launch(kind.instance()?, grid, &arguments, &group.nodes, work, "all choices of a row come together")?;
        self.leaves(node, Form::F32, out);
        Ok(())
    }

    /// Activations of an expert's product, in the form it takes.
    fn arrive(
        &mut self,
        group: &Group,
        input: NodeId,
        from: Activations,
        elements: u64,
        arguments: &mut Vec<(&'static str, Arg)>,
    ) -> Result<(), LowerError> {
        match from {
            Activations::Int8 => {
                let x = self.form(group, input, Form::Int8)?;
                let names = ["arrive_xq", "arrive_xscale", "arrive_xsum"];
                arguments.extend(int8_arguments(x.start, elements, names));
            }
            Activations::F32 => arguments.push(("arrive_x", self.floats(input)?.start)),
        }
        Ok(())
    }
}
