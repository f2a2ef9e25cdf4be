//! Residuals and norms as launches of their own: where their readers are not products of one row.

use gemma4c_graph::{Group, NodeId, Norm};
use gemma4c_plan::cuda::Form;

use super::LowerError;
use super::choice::Choice;
use super::launch::{Int8Span, Span};
use super::phase::{PhaseBuilder, Work};
use crate::kernels::norm;
use crate::kernels::outputs::Outputs;

/// A row kernel's result in every wanted form.
#[derive(Default)]
pub struct RowOutputs {
    pub floats: Span,
    pub bf16: Span,
    pub int8: Int8Span,
    /// Those that are wanted.
    made: Vec<(Form, Span)>,
}

impl PhaseBuilder<'_, '_> {
    /// One launch: the residual, and the norm in every form that is wanted.
    pub fn norm(&mut self, group: &Group, of: &Norm) -> Result<(), LowerError> {
        let why = match self.is_one_row(group) {
            true => self.schedule.note(group).unwrap_or("the pass that leaves it to products is switched off"),
            false => "many rows: written once",
        };
        let rows = self.rows_of(group);
        let target = of.next.map(|(node, _)| node).or(of.residual.map(|r| r.sum));
        let target = target.ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(of.input) })?;
        let width = self.graph().node(target).ty.width;
        let mut wanted = self.schedule.forms(target);
        if of.next.is_none() {
            // The residual itself is left as floats anyway.
            wanted = Outputs { floats: false, ..wanted };
        }
        let input = self.whole_rows(of.input)?;
        let sum = of.residual.map(|residual| (residual, self.alloc_value(residual.sum, Form::F32, rows)));
        let outputs = self.row_outputs(target, wanted, rows);
        let next = match of.next {
            Some((_, Some(weight))) => self.common.weights.floats(weight)?,
            _ => Span::Unused,
        };
        let bytes = rows as u64 * width as u64 * 12;
        let why = Choice::because(why).over("in every block of the products that read it");
        match sum {
            None => {
                let arguments = norm::rms_norm::Arguments {
                    x: input,
                    weight: next,
                    out: outputs.floats,
                    rounded: outputs.bf16,
                    xq: outputs.int8.codes,
                    xscale: outputs.int8.scales,
                    xsum: outputs.int8.sums,
                    epsilon: of.eps,
                };
                let weighted = of.next.is_some_and(|(_, weight)| weight.is_some());
                let instance = norm::norm(width, weighted, wanted)?;
                self.launch(instance, [rows, 1, 1], arguments, &group.nodes, Work { bytes, flops: 0 }, why)?;
            }
            Some((residual, sum)) => {
                let h = self.whole_rows(residual.before)?;
                let unused = (Span::Unused, Span::Unused, Span::Unused);
                let (branch, x_weight, branch_weight) = match residual.branch {
                    Some(branch) => (
                        self.whole_rows(branch.other)?,
                        self.common.weights.floats(branch.weight)?,
                        self.common.weights.floats(branch.other_weight)?,
                    ),
                    None => unused,
                };
                let scale = match residual.scale {
                    Some(weight) => self.common.weights.floats(weight)?,
                    None => Span::Unused,
                };
                let arguments = norm::residual_norm::Arguments {
                    h,
                    x: input,
                    branch,
                    x_weight,
                    branch_weight,
                    weight: self.common.weights.floats(residual.post)?,
                    layer_scale: scale,
                    next_weight: next,
                    h_out: sum,
                    out: outputs.floats,
                    rounded: outputs.bf16,
                    xq: outputs.int8.codes,
                    xscale: outputs.int8.scales,
                    xsum: outputs.int8.sums,
                    epsilon: of.eps,
                };
                let kind = norm::Residual {
                    branches: residual.branch.is_some(),
                    scaled: residual.scale.is_some(),
                    next: of.next.is_some(),
                    outputs: wanted,
                };
                let instance = norm::residual(width, kind)?;
                self.launch(instance, [rows, 1, 1], arguments, &group.nodes, Work { bytes, flops: 0 }, why)?;
                self.record_output(residual.sum, Form::F32, sum);
            }
        }
        self.record_row_outputs(target, &outputs);
        Ok(())
    }

    /// Memory for a row kernel's result in every wanted form.
    pub fn row_outputs(&mut self, node: NodeId, wanted: Outputs, rows: u32) -> RowOutputs {
        let elements = self.graph().node(node).ty.width as u64 * rows as u64;
        let mut made = Vec::new();
        let mut place = |has: bool, form: Form| {
            let start = has.then(|| self.alloc_value(node, form, rows));
            made.extend(start.map(|start| (form, start)));
            start
        };
        let (floats, bf16) = (place(wanted.floats, Form::F32), place(wanted.bf16, Form::BF16));
        let int8 = place(wanted.int8, Form::Int8).map(|start| Int8Span::of(start, elements));
        RowOutputs {
            floats: floats.unwrap_or_default(),
            bf16: bf16.unwrap_or_default(),
            int8: int8.unwrap_or_default(),
            made,
        }
    }

    /// Says that the last launch leaves them.
    pub fn record_row_outputs(&mut self, node: NodeId, outputs: &RowOutputs) {
        for (form, start) in &outputs.made {
            self.record_output(node, *form, *start);
        }
    }
}
