//! The experts of several decoded rows, gathered by who chose them.

use gemma4c_dsl::{Instance, LaunchArguments};
use gemma4c_graph::{Group, Kind, NodeId};
use gemma4c_plan::cuda::Form;

use super::LowerError;
use super::choice::Choice;
use super::launch::{Int8Span, Span};
use super::phase::{PhaseBuilder, Work};
use super::weights::Matrix;
use crate::kernels::matvec::formats::format;
use crate::kernels::moe::gathered::down::{GatheredDown, gathered_down};
use crate::kernels::moe::gathered::gate_up::{GatheredGateUp, gathered_geglu};
use crate::passes::experts_of;

/// A value that a gathered product leaves, rounded or not.
struct LeftRows {
    form: Form,
    start: Span,
    floats: Span,
    int8: Int8Span,
}

impl PhaseBuilder<'_, '_> {
    /// Gate and up, and those of a dense half: what they leave is rounded, where down takes that.
    pub fn gathered_gate_up(&mut self, group: &Group) -> Result<(), LowerError> {
        let Kind::ExpertGateUp { weight, input, routing, out: node, ref dense } = group.kind else {
            return Err(LowerError::NoValue { node: self.graph().full_name(group.anchor()) });
        };
        let beside = self.beside(dense)?;
        let (rows, place) = (self.rows_of(group), self.routing(routing)?);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let (experts, top) = experts_of(self.graph(), routing);
        let hidden = (matrix.rows / experts as u64 / 2) as u32;
        if !hidden.is_multiple_of(32) || !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "an expert's rows or hidden values are not whole groups of 32"));
        }
        let quantised = self.schedule.forms(node).int8;
        let kind = GatheredGateUp {
            dtype: matrix.dtype,
            hidden,
            k: matrix.k,
            experts,
            top,
            dense: beside.as_ref().map_or(0, |beside| (beside.matrix.rows / 2) as u32),
            rows,
            quantised,
            multiprocessors: self.common.can.target.multiprocessors,
            shared_bytes: self.common.can.target.shared_bytes_per_block,
        };
        let left = self.left_rows(node, quantised, rows);
        let dense_left = beside.as_ref().map(|beside| self.left_rows(beside.output, quantised, rows));
        let values = rows as u64 * matrix.k as u64;
        let (x, int8) = self.gathered_activations(Some(input), &matrix, values)?;
        let (dense_x, dense_int8) = self.gathered_activations(beside.as_ref().map(|b| b.input), &matrix, values)?;
        let of_dense = |of: fn(&LeftRows) -> Span| dense_left.as_ref().map(of).unwrap_or_default();
        let arguments = gathered_geglu::Arguments {
            codes: matrix.codes(),
            dense_codes: beside.as_ref().map(|beside| beside.matrix.codes()).unwrap_or_default(),
            x,
            xscale: int8.scales,
            xsum: int8.sums,
            dense_x,
            dense_xscale: dense_int8.scales,
            dense_xsum: dense_int8.sums,
            ids: place.ids,
            out: left.floats,
            out_xq: left.int8.codes,
            out_xscale: left.int8.scales,
            out_xsum: left.int8.sums,
            dense_out: of_dense(|left| left.floats),
            dense_out_xq: of_dense(|left| left.int8.codes),
            dense_out_xscale: of_dense(|left| left.int8.scales),
            dense_out_xsum: of_dense(|left| left.int8.sums),
            rows,
        };
        let mut arguments = arguments.with_slot(gathered_geglu::slot::side, matrix.side());
        if let Some(beside) = &beside {
            arguments = arguments.with_slot(gathered_geglu::slot::dense_side, beside.matrix.side());
        }
        let work = self.expert_work(&matrix, experts, rows * top, beside.as_ref());
        self.launch_gathered(kind.instance()?, kind.grid(), arguments, group, beside.is_some(), work)?;
        self.record_output(node, left.form, left.start);
        if let Some((beside, left)) = beside.zip(dense_left) {
            self.record_output(beside.output, left.form, left.start);
        }
        Ok(())
    }

    /// Down, with the weighted sum of every row's choices, and that of a dense half.
    pub fn gathered_down(&mut self, group: &Group) -> Result<(), LowerError> {
        let Kind::ExpertDown { weight, scale, input, routing, out: node, ref dense } = group.kind else {
            return Err(LowerError::NoValue { node: self.graph().full_name(group.anchor()) });
        };
        let beside = self.beside(dense)?;
        let (rows, place) = (self.rows_of(group), self.routing(routing)?);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let (experts, top) = experts_of(self.graph(), routing);
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "an expert's rows are not whole groups of 32"));
        }
        let outputs = (matrix.rows / experts as u64) as u32;
        let dense = beside.as_ref().map_or(0, |beside| beside.matrix.k);
        let kind = GatheredDown {
            dtype: matrix.dtype,
            outputs,
            k: matrix.k,
            experts,
            top,
            dense,
            rows,
            multiprocessors: self.common.can.target.multiprocessors,
            shared_bytes: self.common.can.target.shared_bytes_per_block,
        };
        let expert_scale = self.expert_scale(scale, experts)?;
        let values = rows as u64 * top as u64 * matrix.k as u64;
        let (x, int8) = self.gathered_activations(Some(input), &matrix, values)?;
        let dense_input = beside.as_ref().map(|beside| beside.input);
        let (dense_x, dense_int8) = self.gathered_activations(dense_input, &matrix, rows as u64 * dense as u64)?;
        let products = self.buffer(rows as u64 * top as u64 * outputs as u64 * 4);
        let out = self.alloc_value(node, Form::F32, rows);
        let dense_out = beside.as_ref().map(|beside| self.alloc_value(beside.output, Form::F32, rows));
        let dense_out = dense_out.unwrap_or_default();
        let arguments = gathered_down::Arguments {
            codes: matrix.codes(),
            dense_codes: beside.as_ref().map(|beside| beside.matrix.codes()).unwrap_or_default(),
            expert_scale,
            x,
            xscale: int8.scales,
            xsum: int8.sums,
            dense_x,
            dense_xscale: dense_int8.scales,
            dense_xsum: dense_int8.sums,
            ids: place.ids,
            weights: place.weights,
            products,
            out,
            dense_out,
            outputs,
            rows,
        };
        let mut arguments = arguments.with_slot(gathered_down::slot::side, matrix.side());
        if let Some(beside) = &beside {
            arguments = arguments.with_slot(gathered_down::slot::dense_side, beside.matrix.side());
        }
        let work = self.expert_work(&matrix, experts, rows * top, beside.as_ref());
        self.launch_gathered(kind.instance()?, kind.grid(), arguments, group, beside.is_some(), work)?;
        self.record_output(node, Form::F32, out);
        if let Some(beside) = beside {
            self.record_output(beside.output, Form::F32, dense_out);
        }
        Ok(())
    }

    /// Memory for a value that is left as int8, or as floats.
    fn left_rows(&mut self, node: NodeId, quantised: bool, rows: u32) -> LeftRows {
        let form = if quantised { Form::Int8 } else { Form::F32 };
        let start = self.alloc_value(node, form, rows);
        let elements = rows as u64 * self.graph().node(node).ty.width as u64;
        let int8 = if quantised { Int8Span::of(start, elements) } else { Int8Span::default() };
        LeftRows { form, start, floats: if quantised { Span::Unused } else { start }, int8 }
    }

    /// The activations as the kernels take them: codes, or floats; and what belongs to codes.
    fn gathered_activations(
        &self,
        input: Option<NodeId>,
        matrix: &Matrix,
        values: u64,
    ) -> Result<(Span, Int8Span), LowerError> {
        let Some(input) = input else { return Ok(Default::default()) };
        if format(matrix.dtype).integer {
            let x = Int8Span::of(self.location(input, Form::Int8)?.start, values);
            return Ok((x.codes, x));
        }
        Ok((self.whole_rows(input)?, Int8Span::default()))
    }

    fn launch_gathered(
        &mut self,
        instance: Instance,
        grid: [u32; 3],
        arguments: LaunchArguments<Span>,
        group: &Group,
        has_dense: bool,
        work: Work,
    ) -> Result<(), LowerError> {
        let with = if has_dense { ", and the dense half" } else { "" };
        let why = format!("{} rows: experts gathered by who chose them{with}", self.rows_of(group));
        let why = Choice::because(why).over("an expert read by every row that chose it");
        self.launch(instance, grid, arguments, &group.nodes, work, why)
    }
}
