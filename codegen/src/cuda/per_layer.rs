//! What a layer does with its per-layer input, for one row: gate and projection in one launch, where GPUs have clusters.

use gemma4c_graph::{Epilogue, Group, Kind, NodeId, Norm, Op, Product, Residual};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::launch::Arg;
use super::phase::{PhaseBuilder, Work};
use super::{LowerError, Pass};
use crate::kernels::per_layer::step::{MOST_PEERS, Step};

impl PhaseBuilder<'_, '_> {
    /// The gate, which computes the residual before it itself, and the projection after it, if they can be one launch; `false` where
    /// they cannot.
    pub fn per_layer_step(
        &mut self,
        group: &Group,
        gate: &Product,
        norm: &Norm,
        stream: Arg,
    ) -> Result<bool, LowerError> {
        if !self.common.per_layer_steps {
            return Ok(false);
        }
        let Some((slice, residual, projection)) = self.gate_and_projection(gate, norm) else { return Ok(false) };
        let weight_of = |node: NodeId| self.graph().node(node).op.weight();
        let (Some(gate_weight), Some(weight)) = (weight_of(gate.matmuls[0]), weight_of(projection)) else {
            return Ok(false);
        };
        let (of_gate, of_projection) = (self.graph().weight(gate_weight), self.graph().weight(weight));
        let step = Step {
            gate: of_gate.dtype,
            projection: of_projection.dtype,
            width: of_gate.dim(0) as u32,
            inputs: of_gate.dim(1) as u32,
            peers: self.common.cluster.min(MOST_PEERS),
            epsilon: norm.eps,
        };
        let fits = (of_projection.dim(0), of_projection.dim(1)) == (of_gate.dim(1), of_gate.dim(0));
        let refusal = if fits { step.refusal() } else { Some("its projection does not lead back to the stream") };
        if let Some(why) = refusal {
            self.refused(Pass::PerLayerStep, group, why);
            return Ok(false);
        }

        let gate_matrix = self.common.weights.matrix(&[gate_weight], &mut self.common.kernels)?;
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        self.count_int8(&group.nodes, gate_matrix.dtype);
        self.count_int8(&[projection], matrix.dtype);
        let mut arguments = matrix.arguments();
        arguments.extend(gate_matrix.arguments().into_iter().map(|(name, argument)| (gates_own(name), argument)));
        let out = self.alloc_value(projection, Form::F32, 1);
        arguments.extend([
            ("post_norm", self.common.weights.floats(residual.post)?),
            ("x", self.floats(residual.stream)?.start),
            ("update", self.floats(norm.input)?.start),
            ("by", self.operand(slice)?.start),
            ("stream", stream),
            ("out", out),
        ]);
        let nodes = [self.nodes_of(norm), group.nodes.clone(), vec![projection]].concat();
        let (width, bytes) = (step.width as u64, gate_matrix.bytes() + matrix.bytes());
        let work = Work { bytes: bytes + width * 8, flops: 4 * width * step.inputs as u64 };
        let why = format!("one row: gate and projection in a cluster of {} blocks", step.peers);
        let why = Choice::because(why).over("two launches");
        self.launch(step.instance()?, step.grid(), &arguments, &nodes, work, why)?;
        self.record_output(residual.sum, Form::F32, stream);
        self.record_output(projection, Form::F32, out);
        self.applied(Pass::PerLayerStep, group);
        if let Some(at) = self.groups.iter().position(|group| group.nodes.contains(&projection)) {
            self.mark_done(at);
        }
        Ok(true)
    }

    /// The slice of a layer's input, the residual and the projection, if the product is a per-layer gate and nobody else reads it.
    fn gate_and_projection(&self, gate: &Product, norm: &Norm) -> Option<(NodeId, Residual, NodeId)> {
        let [Epilogue { node: gelu, .. }, Epilogue { node: gated, operand: Some(slice) }] = gate.epilogue[..] else {
            return None;
        };
        let is_gate = self.graph().node(gelu).op == Op::Gelu && self.graph().node(gated).op == Op::Mul;
        let residual = norm.residual.filter(|residual| residual.branch.is_none() && residual.scale.is_none())?;
        let projection = self.fused.sole_user(gated)?;
        let alone = match &self.fused.group(projection).kind {
            Kind::Single => matches!(self.graph().node(projection).op, Op::MatMul { .. }),
            Kind::Product(product) => product.matmuls == [projection] && product.epilogue.is_empty() && !product.geglu,
            _ => false,
        };
        (is_gate && alone && norm.next.is_none() && gate.matmuls.len() == 1).then_some((slice, residual, projection))
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
