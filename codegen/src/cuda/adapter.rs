//! The halves of an adapter's pair, each a launch of its own.

use gemma4c_graph::{Group, NodeId, WeightId};
use gemma4c_plan::cuda::Form;

use super::error::LowerError;
use super::launch::Span;
use super::phase::{PhaseBuilder, Work};
use crate::kernels::adapter::{
    SeatedRowsArguments, narrow_grid, narrow_instance, narrow_rows, widen_grid, widen_instance, widen_rows,
};
use crate::kernels::geglu::StridedRowsArguments;
use crate::kernels::values::value_arguments;

const ALONE: &str = "an adapter's, by itself";

impl PhaseBuilder<'_, '_> {
    /// `factor * A x`.
    pub fn narrow(&mut self, group: &Group, id: NodeId, weight: WeightId, factor: f32) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let w = self.graph().weight(weight);
        let (dtype, k, rank, seated) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32, w.dims.len() == 3);
        let rows = self.rows_of(group);
        let x = self.whole_rows(node.inputs[0])?;
        let out = self.alloc_value(id, Form::F32, rows);
        let arguments = narrow_rows::Arguments { x, rows: self.seated_rows(group, seated)?, out, k, rank, factor };
        let values = value_arguments(dtype, self.half_of_pair(weight));
        let products = rows as u64 * rank as u64 * k as u64;
        let work = Work { bytes: rank as u64 * k as u64 * 2 + rows as u64 * k as u64 * 4, flops: 2 * products };
        let instance = narrow_instance(dtype, seated)?;
        let arguments = arguments.with_slot(narrow_rows::slot::value, values);
        self.launch(instance, narrow_grid(rank, rows), arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// `y + B x`.
    pub fn widen(&mut self, group: &Group, id: NodeId, weight: WeightId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let w = self.graph().weight(weight);
        let (dtype, rank, outputs, seated) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32, w.dims.len() == 3);
        let count = self.rows_of(group);
        let y = self.floats(node.inputs[0])?;
        let x = self.whole_rows(node.inputs[1])?;
        let out = self.alloc_value(id, Form::F32, count);
        let y = StridedRowsArguments { values: y.start, stride: y.stride };
        let arguments = widen_rows::Arguments { y, x, rows: self.seated_rows(group, seated)?, out, outputs, count };
        let values = value_arguments(dtype, self.half_of_pair(weight));
        let products = count as u64 * rank as u64 * outputs as u64;
        let work = Work { bytes: (rank as u64 * 2 + count as u64 * 8) * outputs as u64, flops: 2 * products };
        let instance = widen_instance(dtype, rank, seated)?;
        let arguments = arguments.with_slot(widen_rows::slot::value, values);
        self.launch(instance, widen_grid(outputs, count), arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// Whose rows a group's are, where they have seats.
    fn seated_rows(&self, group: &Group, seated: bool) -> Result<SeatedRowsArguments<Span>, LowerError> {
        if !seated {
            return Ok(SeatedRowsArguments { state: Span::Unused, seats: Span::Unused, stride: 0 });
        }
        let without_seats = || LowerError::OnCpuAlone { node: self.graph().full_name(group.anchor()), op: "narrow" };
        let seats = self.seats().ok_or_else(without_seats)?;
        Ok(SeatedRowsArguments { state: self.state(group), seats, stride: self.record_stride(group) })
    }

    /// Where a matrix of an adapter is: that of all seats, or one that was loaded.
    fn half_of_pair(&mut self, weight: WeightId) -> Span {
        let bank = self.common.weights.bank(weight);
        bank.unwrap_or_else(|| self.common.weights.blocks(weight))
    }
}
