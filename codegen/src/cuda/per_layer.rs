//! What a layer does with its per-layer input, for one row: gate and projection in one launch, where GPUs have clusters.

use gemma4c_graph::{Group, NodeId, Product, Residual};
use gemma4c_plan::cuda::Form;

use super::LowerError;
use super::choice::Choice;
use super::phase::{PhaseBuilder, Work};
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
        let stream = self.alloc_value(residual.sum, Form::F32, 1);
        let mut arguments = matrix.arguments();
        arguments.extend(gate_matrix.arguments().into_iter().map(|(name, argument)| (gates_own(name), argument)));
        let out = self.alloc_value(projection, Form::F32, 1);
        arguments.extend([
            ("post_norm", self.common.weights.floats(residual.post)?),
            ("x", self.floats(residual.stream)?.start),
            ("update", self.floats(norm.input)?.start),
            ("by", self.operand(slice)?.start),
            ("residual", stream),
            ("out", out),
        ]);
        let (width, bytes) = (step.width as u64, gate_matrix.bytes() + matrix.bytes());
        let work = Work { bytes: bytes + width * 8, flops: 4 * width * step.inputs as u64 };
        let why = format!("one row: gate and projection in a cluster of {} blocks", step.peers);
        let why = Choice::because(why).over("two launches");
        self.launch(step.instance()?, step.grid(), &arguments, &group.nodes, work, why)?;
        self.record_output(residual.sum, Form::F32, stream);
        self.record_output(projection, Form::F32, out);
        Ok(())
    }
}

/// An argument of a matrix, as the gate's slots call it.
fn gates_own(name: &'static str) -> &'static str {
    match name {
        "side_high" => "gate_side_high",
        "side_scales" => "gate_side_scales",
        "side_supers" => "gate_side_supers",
        _ => "gate_codes",
    }
}
