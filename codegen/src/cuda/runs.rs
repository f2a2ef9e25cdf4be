//! Runs of products in one launch: their list, their place in the exchange, and what they leave in memory.

use gemma4c_graph::{Graph, Group, Kind, NodeId, Op, Product, Residual, WeightId};
use gemma4c_plan::cuda::{Form, Range, Region};

use super::LowerError;
use super::choice::Choice;
use super::launch::{Int8Span, Span};
use super::phase::{PhaseBuilder, Work};
use crate::kernels::NORM_EPSILON;
use crate::kernels::run::list::{Arrives, COUNTER_WORDS, Leaves, MOST_OPS, Op as Listed, Run};
use crate::kernels::run::product_run;
use crate::passes::persistent::residual_of;
use crate::passes::product_of;

/// Words that the runs of a graph take at most: their counters, and the vectors of one of them.
pub fn most_words(graph: &Graph) -> u64 {
    let is = |wanted: fn(&Op) -> bool| graph.nodes.iter().filter(move |node| wanted(&node.op));
    let attentions = is(|op| matches!(op, Op::Attention { .. })).count() as u64;
    let widest = is(|op| matches!(op, Op::MatMul { .. }))
        .filter(|node| graph.output.is_none_or(|output| graph.node(output).ty.width != node.ty.width))
        .map(|node| node.ty.width as u64)
        .max()
        .unwrap_or(0);
    attentions * COUNTER_WORDS as u64 + MOST_OPS as u64 / 2 * widest * 2
}

impl PhaseBuilder<'_, '_> {
    /// Products behind each other in one launch.
    pub fn run(&mut self, group: &Group, parts: &[Group]) -> Result<(), LowerError> {
        let missing = |builder: &Self| LowerError::NoValue { node: builder.graph().full_name(group.anchor()) };
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Err(missing(self)) };
        let start = product_of(self.graph(), first).ok_or_else(|| missing(self))?;
        let input = Int8Span::of(self.location(start.input, Form::Int8)?.start, {
            self.graph().node(start.input).ty.width as u64
        });
        let residuals: Vec<Residual> = parts.iter().filter_map(residual_of).collect();
        let (Some(before), Some(after)) = (residuals.first(), residuals.last()) else { return Err(missing(self)) };
        let x = self.floats(before.before)?.start;
        let sum = self.alloc_value(after.sum, Form::F32, 1);

        let (mut ops, mut epsilon, mut by) = (Vec::new(), NORM_EPSILON, Span::Unused);
        let (mut bytes, mut flops, mut dtype) = (0, 0, None);
        let mut listed = |builder: &mut Self, weights: &[WeightId], arrives, leaves, residual: Option<NodeId>| {
            let matrix = builder.common.weights.matrix(weights, &mut builder.common.kernels)?;
            let offset = |span: Span| span.fixed().map_or(0, |range| range.offset);
            let outputs = (matrix.rows / if leaves == Leaves::Codes { 2 } else { 1 }) as u32;
            bytes += matrix.bytes();
            flops += 2 * matrix.rows * matrix.k as u64;
            dtype = Some(matrix.dtype);
            ops.push(Listed {
                arrives,
                leaves,
                k: matrix.k,
                outputs,
                codes: offset(matrix.codes()),
                scales: offset(matrix.plane("scales")),
                leaves_residual: residual == Some(after.sum),
            });
            Ok::<(), LowerError>(())
        };
        for (number, part) in parts.iter().enumerate() {
            let is_last = number + 1 == parts.len();
            if let Kind::PerLayerStep { gate, slice, residual, projection } = &part.kind {
                by = self.operand(*slice)?.start;
                let post = self.weight_offset(residual.post)?;
                let scale = residual.scale.map(|scale| self.weight_offset(scale)).transpose()?;
                let weights = self.weights_of(gate);
                epsilon = gate.norm.map_or(epsilon, |norm| norm.eps);
                listed(self, &weights, Arrives::Residual { post, scale }, Leaves::Gated, Some(residual.sum))?;
                let weights = self.weights_of(&Product::new(*projection, vec![*projection]));
                let leaves = if is_last { Leaves::Memory } else { Leaves::Floats };
                listed(self, &weights, Arrives::Floats, leaves, None)?;
                continue;
            }
            let of = product_of(self.graph(), part).ok_or_else(|| missing(self))?;
            let weights = self.weights_of(&of);
            let residual = of.norm.and_then(|norm| norm.residual);
            let arrives = match (&of.norm, residual) {
                (Some(norm), Some(residual)) => {
                    epsilon = norm.eps;
                    let next = norm.next.and_then(|(_, weight)| weight).ok_or_else(|| missing(self))?;
                    let (post, next) = (self.weight_offset(residual.post)?, self.weight_offset(next)?);
                    let scale = residual.scale.map(|scale| self.weight_offset(scale)).transpose()?;
                    Arrives::Norm { post, next, scale }
                }
                _ if number == 0 => Arrives::Int8,
                _ => Arrives::Codes,
            };
            let leaves = match of.geglu {
                true => Leaves::Codes,
                false if is_last => Leaves::Memory,
                false => Leaves::Floats,
            };
            listed(self, &weights, arrives, leaves, residual.map(|residual| residual.sum))?;
        }
        let dtype = dtype.ok_or_else(|| missing(self))?;
        let width = self.graph().node(after.sum).ty.width;
        let target = &self.common.can.target;
        let (multiprocessors, shared_bytes) = (target.multiprocessors, target.shared_bytes_per_block);
        let run = Run { dtype, width, epsilon, ops, multiprocessors, shared_bytes };
        let shape = run.shape().ok_or_else(|| missing(self))?;

        let (out, last_product) = match &last.kind {
            Kind::PerLayerStep { projection, .. } => (self.alloc_value(*projection, Form::F32, 1), None),
            _ => {
                let of = product_of(self.graph(), last).ok_or_else(|| missing(self))?;
                let outputs = run.ops.last().map_or(0, |op| op.outputs);
                (self.product_output(last, &of, outputs, 1), Some(of))
            }
        };
        let words = run.list(shape).into_iter().map(f32::from_bits).collect();
        let number = self.common.runs;
        self.common.runs += 1;
        let list = self.common.weights.constant(&format!("products of run {number}"), words);
        let all = Span::Fixed(Range { region: Region::Weights, offset: 0, bytes: self.common.weights.device_bytes });
        let runs = self.graph().nodes.iter().filter(|node| matches!(node.op, Op::Attention { .. })).count() as u32;
        let (offset, bytes_there) = self.common.exchange;
        let exchange = Span::Fixed(Range { region: Region::Arena, offset, bytes: bytes_there });
        let counted = runs as u64 * COUNTER_WORDS as u64 * 4;
        let counters = exchange.skip(number as u64 * COUNTER_WORDS as u64 * 4).take(COUNTER_WORDS as u64 * 4);
        let packets = exchange.skip(counted).take(run.exchange_words() as u64 * 4);
        let arguments = product_run::Arguments {
            list,
            weights: all,
            floats: all,
            xq: input.codes,
            xscale: input.scales,
            xsum: input.sums,
            x,
            by,
            residual: sum,
            out,
            exchange: packets,
            counters,
            ops: run.ops.len() as u32,
            run: number,
            runs,
        };
        let why = format!(
            "{} products: the weights of the next are on their way while the grid exchanges a vector; {} blocks, {} stages of {} KiB",
            run.ops.len(),
            shape.blocks,
            shape.stages,
            shape.stage_words / 256,
        );
        let why = Choice::because(why).over("a launch each");
        self.launch(run.instance(shape)?, [shape.blocks, 1, 1], arguments, &group.nodes, Work { bytes, flops }, why)?;
        self.record_output(after.sum, Form::F32, sum);
        match (&last.kind, last_product) {
            (Kind::PerLayerStep { projection, .. }, _) => self.record_output(*projection, Form::F32, out),
            (_, Some(of)) => self.record_product_outputs(last, &of, out),
            _ => {}
        }
        Ok(())
    }

    /// Where a weight of floats starts, in bytes.
    fn weight_offset(&mut self, weight: WeightId) -> Result<u64, LowerError> {
        Ok(self.common.weights.floats(weight)?.fixed().map_or(0, |range| range.offset))
    }
}
