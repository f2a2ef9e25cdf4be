//! The experts of several decoded rows, gathered by who chose them.

use gemma4c_dsl::{Instance, LaunchArguments};
use gemma4c_graph::{Group, NodeId, WeightId};
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

impl PhaseBuilder<'_, '_> {
    /// Gate and up: what they leave is rounded, where down takes that.
    pub fn gathered_gate_up(
        &mut self,
        group: &Group,
        weight: WeightId,
        input: NodeId,
        routing: NodeId,
        node: NodeId,
    ) -> Result<(), LowerError> {
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
            rows,
            quantised,
            multiprocessors: self.common.can.target.multiprocessors,
            shared_bytes: self.common.can.target.shared_bytes_per_block,
        };
        let form = if quantised { Form::Int8 } else { Form::F32 };
        let out = self.alloc_value(node, form, rows);
        let results = rows as u64 * top as u64 * hidden as u64;
        let left = if quantised { Int8Span::of(out, results) } else { Int8Span::default() };
        let (x, scales) = self.gathered_activations(input, &matrix, rows as u64 * matrix.k as u64)?;
        let arguments = gathered_geglu::Arguments {
            codes: matrix.codes(),
            x,
            xscale: scales.scales,
            xsum: scales.sums,
            ids: place.ids,
            out: if quantised { Span::Unused } else { out },
            out_xq: left.codes,
            out_xscale: left.scales,
            out_xsum: left.sums,
            rows,
        };
        let arguments = arguments.with_slot(gathered_geglu::slot::side, matrix.side());
        let work = self.expert_work(&matrix, experts, rows * top, None);
        self.launch_gathered(kind.instance()?, kind.grid(), arguments, group, work)?;
        self.record_output(node, form, out);
        Ok(())
    }

    /// Down, with the weighted sum of every row's choices.
    pub fn gathered_down(
        &mut self,
        group: &Group,
        (weight, scale): (WeightId, Option<WeightId>),
        input: NodeId,
        routing: NodeId,
        node: NodeId,
    ) -> Result<(), LowerError> {
        let (rows, place) = (self.rows_of(group), self.routing(routing)?);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let (experts, top) = experts_of(self.graph(), routing);
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "an expert's rows are not whole groups of 32"));
        }
        let outputs = (matrix.rows / experts as u64) as u32;
        let kind = GatheredDown {
            dtype: matrix.dtype,
            outputs,
            k: matrix.k,
            experts,
            top,
            rows,
            multiprocessors: self.common.can.target.multiprocessors,
            shared_bytes: self.common.can.target.shared_bytes_per_block,
        };
        let expert_scale = self.expert_scale(scale, experts)?;
        let values = rows as u64 * top as u64 * matrix.k as u64;
        let (x, scales) = self.gathered_activations(input, &matrix, values)?;
        let products = self.buffer(rows as u64 * top as u64 * outputs as u64 * 4);
        let out = self.alloc_value(node, Form::F32, rows);
        let arguments = gathered_down::Arguments {
            codes: matrix.codes(),
            expert_scale,
            x,
            xscale: scales.scales,
            xsum: scales.sums,
            ids: place.ids,
            weights: place.weights,
            products,
            out,
            outputs,
            rows,
        };
        let arguments = arguments.with_slot(gathered_down::slot::side, matrix.side());
        let work = self.expert_work(&matrix, experts, rows * top, None);
        self.launch_gathered(kind.instance()?, kind.grid(), arguments, group, work)?;
        self.record_output(node, Form::F32, out);
        Ok(())
    }

    /// The activations as the kernels take them: codes, or floats; and what belongs to codes.
    fn gathered_activations(
        &self,
        input: NodeId,
        matrix: &Matrix,
        values: u64,
    ) -> Result<(Span, Int8Span), LowerError> {
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
        work: Work,
    ) -> Result<(), LowerError> {
        let why = Choice::because(format!("{} rows: experts gathered by who chose them", self.rows_of(group)));
        self.launch(instance, grid, arguments, &group.nodes, work, why.over("an expert read by every row that chose it"))
    }
}
