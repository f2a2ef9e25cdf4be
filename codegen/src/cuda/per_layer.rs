//! What a layer does with its per-layer input, for one row: gate and projection in one launch, where GPUs have
//! clusters.

use gemma4c_graph::{Group, NodeId, Product, Residual};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::error::LowerError;
use super::phase::{PhaseBuilder, Work};
use crate::kernels::geglu::StridedRowsArguments;
use crate::kernels::per_layer::step::{ResidualRowsArguments, per_layer_step as kernel};
use crate::passes::per_layer_step;

impl PhaseBuilder<'_, '_> {
    /// The gate, which computes the residual before it itself, and the projection after it.
    pub fn per_layer_step(
        &mut self,
        group: &Group,
        gate: &Product,
        slice: NodeId,
        residual: &Residual,
        projection: NodeId,
    ) -> Result<(), LowerError> {
        let no_kernel = || LowerError::NoValue { node: self.graph().full_name(projection) };
        let step = per_layer_step::step(self.schedule, &self.common.can, gate, projection).map_err(|_| no_kernel())?;
        let weight_of = |node: NodeId| self.graph().node(node).op.weight().ok_or_else(no_kernel);
        let (gate_weight, weight) = (weight_of(gate.matmuls[0])?, weight_of(projection)?);
        let norm = gate.norm.ok_or_else(no_kernel)?;
        let gate_matrix = self.common.weights.matrix(&[gate_weight], &mut self.common.kernels)?;
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        let rows = self.rows_of(group);
        let sum = self.alloc_value(residual.sum, Form::F32, rows);
        let out = self.alloc_value(projection, Form::F32, rows);
        let by = self.operand(slice)?;
        let arguments = kernel::Arguments {
            gate_codes: gate_matrix.codes(),
            codes: matrix.codes(),
            post_norm: self.common.weights.floats(residual.post)?,
            rows: ResidualRowsArguments {
                x: self.floats(residual.before)?.start,
                update: self.floats(norm.input)?.start,
            },
            by: StridedRowsArguments { values: by.start, stride: by.stride },
            residual: sum,
            out,
        };
        let arguments = arguments
            .with_slot(kernel::slot::gate_side, gate_matrix.side())
            .with_slot(kernel::slot::side, matrix.side());
        let (width, bytes) = (step.width as u64, gate_matrix.bytes() + matrix.bytes());
        let (each, flops) = (rows as u64 * width, 4 * width * step.inputs as u64);
        let work = Work { bytes: bytes + each * 8, flops: rows as u64 * flops };
        let why = format!("one row: gate and projection in a cluster of {} blocks", step.cluster_size);
        let why = Choice::because(why).over("two launches");
        self.launch(step.instance()?, step.grid(rows), arguments, &group.nodes, work, why)?;
        self.record_output(residual.sum, Form::F32, sum);
        self.record_output(projection, Form::F32, out);
        Ok(())
    }
}
