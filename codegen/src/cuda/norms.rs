//! Residuals and norms as launches of their own: where their readers are not products of one row.

use gemma4c_graph::{Group, NodeId, Norm};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::error::LowerError;
use super::launch::{Int8Span, Span};
use super::phase::{PhaseBuilder, Work};
use crate::kernels::norm;
use crate::kernels::outputs::{OutputRowsArguments, Outputs};

/// A row kernel's result in every wanted form.
#[derive(Default)]
pub struct RowOutputs {
    pub floats: Span,
    pub bf16: Span,
    pub f16: Span,
    pub int8: Int8Span,
    /// Those that are wanted.
    written: Vec<(Form, Span)>,
}

impl RowOutputs {
    /// What a launch gives for them.
    pub fn arguments(&self) -> OutputRowsArguments<Span> {
        OutputRowsArguments {
            floats: self.floats,
            rounded: self.bf16,
            halves: self.f16,
            codes: self.int8.codes,
            scales: self.int8.scales,
            sums: self.int8.sums,
        }
    }
}

impl PhaseBuilder<'_, '_> {
    /// One launch: the residual, and the norm in every form that is wanted.
    pub fn norm(&mut self, group: &Group, of: &Norm) -> Result<(), LowerError> {
        let why = match self.is_one_row(group) {
            true => self.schedule.note(group).unwrap_or("the pass that has products compute it is switched off"),
            false => "many rows: written once",
        };
        let rows = self.rows_of(group);
        let target = of.next.map(|(node, _)| node).or(of.residual.map(|r| r.sum));
        let target = target.ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(of.input) })?;
        let width = self.graph().node(target).ty.width;
        let mut wanted = self.schedule.forms(target);
        if of.next.is_none() {
            // The residual itself is written as floats anyway.
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
                let (out, epsilon) = (outputs.arguments(), of.eps);
                let arguments = norm::rms_norm::Arguments { x: input, weight: next, out, epsilon };
                let weighted = of.next.is_some_and(|(_, weight)| weight.is_some());
                let instance = norm::norm(width, weighted, wanted)?;
                self.launch(instance, [rows, 1, 1], arguments, &group.nodes, Work { bytes, flops: 0 }, why)?;
            }
            Some((residual, sum)) => {
                let h = self.whole_rows(residual.before)?;
                let (values, x_weight, weight) = match residual.branch {
                    Some(branch) => (
                        self.whole_rows(branch.other)?,
                        self.common.weights.floats(branch.weight)?,
                        self.common.weights.floats(branch.other_weight)?,
                    ),
                    None => (Span::Unused, Span::Unused, Span::Unused),
                };
                let scale = match residual.scale {
                    Some(weight) => self.common.weights.floats(weight)?,
                    None => Span::Unused,
                };
                let post = self.common.weights.floats(residual.post)?;
                let arguments = norm::residual_norm::Arguments {
                    h,
                    x: input,
                    branch: norm::ExpertBranchArguments { values, weight, x_weight },
                    norms: norm::ResidualWeightsArguments { post, layer_scale: scale, next },
                    h_out: sum,
                    out: outputs.arguments(),
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
        let mut written = Vec::new();
        let mut place = |has: bool, form: Form| {
            let start = has.then(|| self.alloc_value(node, form, rows));
            written.extend(start.map(|start| (form, start)));
            start
        };
        let (floats, bf16) = (place(wanted.floats, Form::F32), place(wanted.bf16, Form::BF16));
        let f16 = place(wanted.f16, Form::F16);
        let int8 = place(wanted.int8, Form::Int8).map(|start| Int8Span::of(start, elements));
        RowOutputs {
            floats: floats.unwrap_or_default(),
            bf16: bf16.unwrap_or_default(),
            f16: f16.unwrap_or_default(),
            int8: int8.unwrap_or_default(),
            written,
        }
    }

    /// Records that the last launch writes them.
    pub fn record_row_outputs(&mut self, node: NodeId, outputs: &RowOutputs) {
        for (form, start) in &outputs.written {
            self.record_output(node, *form, *start);
        }
    }
}
