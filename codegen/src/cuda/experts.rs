//! A mixture: its entry with the router, and the products of the experts it chose, with the dense half beside them.

use gemma4c_dsl::{Filled, Instance, LaunchArguments};
use gemma4c_graph::{DenseHalf, Group, Kind, NodeId, Norm, Router, WeightId};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::error::LowerError;
use super::launch::{Int8Span, Span};
use super::norms::RowOutputs;
use super::phase::{PhaseBuilder, RoutingPlace, Work};
use super::weights::Matrix;
use crate::kernels::matvec::formats::format;
use crate::kernels::moe::down::{Down, expert_down};
use crate::kernels::moe::gate_up::{GateUp, expert_geglu};
use crate::kernels::moe::routing::{RouterNormsArguments, RouterRowsArguments, RoutingArguments};
use crate::kernels::moe::{Activations, ExpertChoiceArguments, MixtureCodesArguments, f32_piece, int8_piece, router};
use crate::kernels::outputs::Outputs;
use crate::passes::experts_of;
use crate::target::Target;

/// What a router takes and writes besides its choice, where it begins the mixture: the residual, and both norms of it.
#[derive(Default)]
struct Entry {
    forms: Option<Outputs>,
    update: Span,
    post_norm: Span,
    dense_norm: Span,
    expert_norm: Span,
    residual: Span,
    dense: RowOutputs,
    expert: RowOutputs,
}

/// A dense half that comes along with the experts.
pub struct Beside {
    pub input: NodeId,
    pub output: NodeId,
    pub matrix: Matrix,
}

/// The codes of the experts, and of the dense half if there is one.
pub fn mixture_codes(matrix: &Matrix, beside: Option<&Beside>) -> MixtureCodesArguments<Span> {
    MixtureCodesArguments {
        experts: matrix.codes(),
        dense: beside.map(|beside| beside.matrix.codes()).unwrap_or_default(),
    }
}

impl PhaseBuilder<'_, '_> {
    /// Residual, norms and router in one launch.
    pub fn enter_mixture(
        &mut self,
        group: &Group,
        norm: &Norm,
        (expert, expert_weight): (NodeId, WeightId),
        router: &Router,
    ) -> Result<(), LowerError> {
        let (Some(residual), Some((dense, Some(dense_weight)))) = (norm.residual, norm.next) else {
            return Err(LowerError::NoValue { node: self.graph().full_name(group.anchor()) });
        };
        let rows = self.rows_of(group);
        let forms = self.schedule.forms(dense);
        let entry = Entry {
            forms: Some(forms),
            residual: self.alloc_value(residual.sum, Form::F32, rows),
            dense: self.row_outputs(dense, forms, rows),
            expert: self.row_outputs(expert, forms, rows),
            update: self.floats(norm.input)?.start,
            post_norm: self.common.weights.floats(residual.post)?,
            dense_norm: self.common.weights.floats(dense_weight)?,
            expert_norm: self.common.weights.floats(expert_weight)?,
        };
        let x = self.floats(residual.before)?.start;
        let why = Choice::because("residual, both norms and the choice").over("a launch each");
        self.route(group, router, x, &entry, why)?;
        self.record_output(residual.sum, Form::F32, entry.residual);
        self.record_row_outputs(dense, &entry.dense);
        self.record_row_outputs(expert, &entry.expert);
        Ok(())
    }

    /// A router on its own.
    pub fn router(&mut self, group: &Group, of: &Router) -> Result<(), LowerError> {
        let x = self.floats(of.input)?.start;
        let why = self.schedule.note(group).unwrap_or("the pass that joins it with what comes before is switched off");
        self.route(group, of, x, &Entry::default(), why.into())
    }

    fn route(&mut self, group: &Group, of: &Router, x: Span, entry: &Entry, why: Choice) -> Result<(), LowerError> {
        let is_routing = |id: &NodeId| experts_of(self.graph(), *id).0 > 0;
        let node = group.nodes.iter().copied().find(is_routing).unwrap_or(group.anchor());
        let (rows, state) = (self.rows_of(group), self.row_count(group));
        let (experts, top) = experts_of(self.graph(), node);
        let width = self.graph().node(of.input).ty.width;
        let prefetch_record = self.is_settled(&[state]);
        let kind = router::Router {
            epsilon: of.eps,
            input_forms: entry.forms,
            prefetch_record,
            max_cluster: self.common.can.cluster,
            ..router::Router::new(width, experts, top)
        };
        if of.factor != 1.0 / (width as f32).sqrt() && of.factor != (width as f32).powf(-0.5) {
            return Err(LowerError::NoValue {
                node: format!("{}: a factor of {}", self.graph().full_name(node), of.factor),
            });
        }
        let split = self.is_one_row(group);
        let pairs = rows as u64 * top as u64 * 4;
        let place = RoutingPlace { ids: self.buffer(pairs), weights: self.buffer(pairs) };
        let arguments = router::route::Arguments {
            router: self.common.weights.floats(of.weight)?,
            norms: RouterNormsArguments {
                scale: self.common.weights.floats(of.scale)?,
                post: entry.post_norm,
                dense: entry.dense_norm,
                expert: entry.expert_norm,
            },
            rows: RouterRowsArguments { x, update: entry.update, state },
            routing: RoutingArguments {
                logits: self.buffer(rows as u64 * experts as u64 * 4),
                counter: self.common.counters().take(if split { 4 * rows as u64 } else { 4 }),
                ids: place.ids,
                shares: place.weights,
            },
            residual: entry.residual,
            dense_out: entry.dense.arguments(),
            expert_out: entry.expert.arguments(),
        };
        let activations = rows as u64 * width as u64 * 4;
        let bytes = experts as u64 * width as u64 * 4 + if entry.forms.is_some() { 4 } else { 1 } * activations;
        let work = Work { bytes, flops: 2 * rows as u64 * experts as u64 * width as u64 };
        let Target { multiprocessors, shared_bytes_per_block, .. } = self.common.can.target;
        let (instance, grid, how) = match split {
            true => {
                let grid = kind.split_grid(rows, multiprocessors);
                (kind.split_instance(rows, multiprocessors)?, grid, "decoded rows: experts shared out among blocks")
            }
            false => {
                let tile = kind.many_rows(rows, multiprocessors, shared_bytes_per_block);
                (kind.instance(tile)?, [rows.div_ceil(tile), 1, 1], "many rows: a block for a few")
            }
        };
        let why = Choice { reason: format!("{how}; {}", why.reason), ..why };
        self.launch(instance, grid, arguments, &group.nodes, work, why)?;
        self.record_output(node, Form::Experts, place.ids);
        self.bind_routing(node, place);
        Ok(())
    }

    pub fn beside(&mut self, dense: &Option<DenseHalf>) -> Result<Option<Beside>, LowerError> {
        let Some(DenseHalf { product, out }) = dense else { return Ok(None) };
        let weight_of = |id: &NodeId| self.graph().node(*id).op.weight();
        let weights: Vec<WeightId> = product.matmuls.iter().filter_map(weight_of).collect();
        let matrix = self.common.weights.matrix(&weights, &mut self.common.kernels)?;
        Ok(Some(Beside { input: product.input, output: *out, matrix }))
    }

    /// Gate and up of the chosen experts, and of a dense half.
    pub fn expert_gate_up(&mut self, group: &Group) -> Result<(), LowerError> {
        let Kind::ExpertGateUp { weight, input, routing, out: node, ref dense } = group.kind else {
            return Err(LowerError::NoValue { node: self.graph().full_name(group.anchor()) });
        };
        if self.schedule.is_decoded_together(group) {
            return self.gathered_gate_up(group);
        }
        let beside = self.beside(dense)?;
        let (rows, state, place) = (self.rows_of(group), self.row_count(group), self.routing(routing)?);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let (experts, top) = experts_of(self.graph(), routing);
        let hidden = (matrix.rows / experts as u64 / 2) as u32;
        let inputs = [Some(input), beside.as_ref().map(|beside| beside.input)];
        let is_int8 = inputs.iter().flatten().all(|input| self.has(*input, Form::Int8));
        let from = if format(matrix.dtype).integer && is_int8 { Activations::Int8 } else { Activations::F32 };
        let dense = beside.as_ref().map_or(0, |beside| (beside.matrix.rows / 2) as u32);
        let multiprocessors = self.common.can.target.multiprocessors;
        let prefetch_record = self.is_settled(&[state]);
        let kind =
            GateUp { dtype: matrix.dtype, hidden, k: matrix.k, top, from, dense, prefetch_record, multiprocessors };
        let elements = rows as u64 * matrix.k as u64;
        let out = self.alloc_value(node, Form::F32, rows);
        let dense_out = beside.as_ref().map(|beside| self.alloc_value(beside.output, Form::F32, rows));
        let dense_out = dense_out.unwrap_or_default();
        let arguments = expert_geglu::Arguments {
            codes: mixture_codes(&matrix, beside.as_ref()),
            ids: place.ids,
            state,
            out,
            dense_out,
        };
        let mut arguments = arguments
            .with_slot(expert_geglu::slot::side, matrix.side())
            .with_slot(expert_geglu::slot::arrive, self.arriving(input, from, elements)?);
        if let Some(beside) = &beside {
            arguments = arguments
                .with_slot(expert_geglu::slot::dense_side, beside.matrix.side())
                .with_slot(expert_geglu::slot::dense_arrive, self.arriving(beside.input, from, elements)?);
        }
        let work = self.expert_work(&matrix, experts, rows * top, beside.as_ref());
        self.launch_experts(kind.instance()?, kind.grid(rows), arguments, group, beside.as_ref(), work)?;
        self.record_output(node, Form::F32, out);
        if let Some(beside) = beside {
            self.record_output(beside.output, Form::F32, dense_out);
        }
        Ok(())
    }

    /// Down of the chosen experts with their weighted sum, and of a dense half.
    pub fn expert_down(&mut self, group: &Group) -> Result<(), LowerError> {
        let Kind::ExpertDown { weight, scale, input, routing, out: node, ref dense } = group.kind else {
            return Err(LowerError::NoValue { node: self.graph().full_name(group.anchor()) });
        };
        if self.schedule.is_decoded_together(group) {
            return self.gathered_down(group);
        }
        let beside = self.beside(dense)?;
        let (rows, state, place) = (self.rows_of(group), self.row_count(group), self.routing(routing)?);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let (experts, top) = experts_of(self.graph(), routing);
        let outputs = (matrix.rows / experts as u64) as u32;
        let dense = beside.as_ref().map_or(0, |beside| beside.matrix.k);
        let kind = Down {
            dtype: matrix.dtype,
            outputs,
            k: matrix.k,
            top,
            dense,
            prefetch_choice: self.is_settled(&[state, place.ids, place.weights]),
            multiprocessors: self.common.can.target.multiprocessors,
        };
        let scale = self.expert_scale(scale, experts)?;
        let out = self.alloc_value(node, Form::F32, rows);
        let (dense_x, dense_out) = match &beside {
            Some(beside) => (self.floats(beside.input)?.start, self.alloc_value(beside.output, Form::F32, rows)),
            None => Default::default(),
        };
        let arguments = expert_down::Arguments {
            codes: mixture_codes(&matrix, beside.as_ref()),
            x: self.floats(input)?.start,
            dense_x,
            choice: ExpertChoiceArguments { ids: place.ids, shares: place.weights, scales: scale },
            state,
            out,
            dense_out,
            outputs,
        };
        let mut arguments = arguments.with_slot(expert_down::slot::side, matrix.side());
        if let Some(beside) = &beside {
            arguments = arguments.with_slot(expert_down::slot::dense_side, beside.matrix.side());
        }
        let work = self.expert_work(&matrix, experts, rows * top, beside.as_ref());
        self.launch_experts(kind.instance(rows)?, kind.grid(rows), arguments, group, beside.as_ref(), work)?;
        self.record_output(node, Form::F32, out);
        if let Some(beside) = beside {
            self.record_output(beside.output, Form::F32, dense_out);
        }
        Ok(())
    }

    /// What multiplies each expert's result.
    pub fn expert_scale(&mut self, scale: Option<WeightId>, experts: u32) -> Result<Span, LowerError> {
        match scale {
            Some(weight) => self.common.weights.floats(weight),
            None => Ok(self.common.weights.constant("an expert's factor", vec![1.0; experts as usize])),
        }
    }

    /// What the products of so many pairs of a row and an expert cost: no expert is read twice.
    pub fn expert_work(&self, matrix: &Matrix, experts: u32, pairs: u32, beside: Option<&Beside>) -> Work {
        let of_expert = matrix.rows / experts as u64 * matrix.k as u64;
        let (dense_bytes, dense_flops) =
            beside.map_or((0, 0), |beside| (beside.matrix.bytes(), 2 * beside.matrix.rows * beside.matrix.k as u64));
        Work {
            bytes: matrix.bytes() / experts as u64 * pairs.min(experts) as u64 + dense_bytes,
            flops: 2 * pairs as u64 * of_expert + dense_flops,
        }
    }

    fn launch_experts(
        &mut self,
        instance: Instance,
        grid: [u32; 3],
        arguments: LaunchArguments<Span>,
        group: &Group,
        beside: Option<&Beside>,
        work: Work,
    ) -> Result<(), LowerError> {
        let why = match (beside, self.schedule.note(group)) {
            (Some(_), _) => Choice::because("one row: the chosen experts and the dense half").over("a launch each"),
            (None, None) => "one row: the chosen experts".into(),
            (None, Some(why)) => format!("one row: the chosen experts; {why}").into(),
        };
        self.launch(instance, grid, arguments, &group.nodes, work, why)
    }

    /// Activations of an expert's product, in the form it takes: f32, or codes, scales and sums.
    fn arriving(&self, input: NodeId, from: Activations, elements: u64) -> Result<Filled<Span>, LowerError> {
        Ok(match from {
            Activations::Int8 => {
                let x = Int8Span::of(self.location(input, Form::Int8)?.start, elements);
                int8_piece::Arguments { xq: x.codes, xscale: x.scales, xsum: x.sums }.into()
            }
            Activations::F32 => f32_piece::Arguments { x: self.floats(input)?.start }.into(),
        })
    }
}
