//! The experts of several decoded rows, gathered by who chose them.

use gemma4c_dsl::{Instance, LaunchArguments};
use gemma4c_graph::{Group, Kind, NodeId};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::error::LowerError;
use super::experts::mixture_codes;
use super::launch::{Int8Span, Span};
use super::norms::RowOutputs;
use super::phase::{PhaseBuilder, Work};
use super::weights::Matrix;
use crate::kernels::matvec::formats::format;
use crate::kernels::moe::ExpertChoiceArguments;
use crate::kernels::moe::gathered::ActivationRowsArguments;
use crate::kernels::moe::gathered::down::{DownResultsArguments, GatheredDown, gathered_down};
use crate::kernels::moe::gathered::gate_up::{GatheredGateUp, gathered_geglu};
use crate::kernels::outputs::Outputs;
use crate::passes::experts_of;

impl PhaseBuilder<'_, '_> {
    /// Gate and up, and those of a dense half: the results are rounded, where down takes that.
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
        let forms = if quantised { Outputs::INT8 } else { Outputs::FLOATS };
        let written = self.row_outputs(node, forms, rows);
        let dense_written = beside.as_ref().map(|beside| self.row_outputs(beside.output, forms, rows));
        let values = rows as u64 * matrix.k as u64;
        let dense_input = beside.as_ref().map(|beside| beside.input);
        let arguments = gathered_geglu::Arguments {
            codes: mixture_codes(&matrix, beside.as_ref()),
            x: self.gathered_activations(Some(input), &matrix, values)?,
            dense_x: self.gathered_activations(dense_input, &matrix, values)?,
            ids: place.ids,
            out: written.arguments(),
            dense_out: dense_written.as_ref().map(RowOutputs::arguments).unwrap_or(RowOutputs::default().arguments()),
            rows,
        };
        let mut arguments = arguments.with_slot(gathered_geglu::slot::side, matrix.side());
        if let Some(beside) = &beside {
            arguments = arguments.with_slot(gathered_geglu::slot::dense_side, beside.matrix.side());
        }
        let work = self.expert_work(&matrix, experts, rows * top, beside.as_ref());
        self.launch_gathered(kind.instance()?, kind.grid(), arguments, group, beside.is_some(), work)?;
        self.record_row_outputs(node, &written);
        if let Some((beside, written)) = beside.zip(dense_written) {
            self.record_row_outputs(beside.output, &written);
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
        let dense_input = beside.as_ref().map(|beside| beside.input);
        let products = self.buffer(rows as u64 * top as u64 * outputs as u64 * 4);
        let out = self.alloc_value(node, Form::F32, rows);
        let dense_out = beside.as_ref().map(|beside| self.alloc_value(beside.output, Form::F32, rows));
        let dense_out = dense_out.unwrap_or_default();
        let arguments = gathered_down::Arguments {
            codes: mixture_codes(&matrix, beside.as_ref()),
            x: self.gathered_activations(Some(input), &matrix, values)?,
            dense_x: self.gathered_activations(dense_input, &matrix, rows as u64 * dense as u64)?,
            choice: ExpertChoiceArguments { ids: place.ids, shares: place.weights, scales: expert_scale },
            results: DownResultsArguments { products, out, dense_out },
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

    /// The activations as the kernels take them: codes, or floats; and what belongs to codes.
    fn gathered_activations(
        &self,
        input: Option<NodeId>,
        matrix: &Matrix,
        values: u64,
    ) -> Result<ActivationRowsArguments<Span>, LowerError> {
        let int8 = format(matrix.dtype).integer;
        let (words, Int8Span { scales, sums, .. }) = match input {
            None => Default::default(),
            Some(input) if int8 => {
                let x = Int8Span::of(self.location(input, Form::Int8)?.start, values);
                (x.codes, x)
            }
            Some(input) => (self.whole_rows(input)?, Int8Span::default()),
        };
        Ok(ActivationRowsArguments { words, scales, sums })
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
