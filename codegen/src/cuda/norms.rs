//! Residuals and norms as launches of their own: where their readers are not products of one row.

use gemma4c_graph::{Group, NodeId, Norm};
use gemma4c_plan::cuda::Form;

use super::LowerError;
use super::choice::Choice;
use super::launch::Arg;
use super::phase::{PhaseBuilder, Work, int8_arguments};
use crate::kernels::norm;
use crate::kernels::outputs::Outputs;

/// Arguments by name.
type Named = Vec<(&'static str, Arg)>;

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
        let stream = of.residual.map(|residual| (residual, self.alloc_value(residual.sum, Form::F32, rows)));
        let (mut outputs, forms) = self.row_outputs(target, wanted, rows, ["out", "rounded", "xq", "xscale", "xsum"]);
        let next = match of.next {
            Some((_, Some(weight))) => self.common.weights.floats(weight)?,
            _ => Arg::Unused,
        };
        outputs.push(("epsilon", Arg::F32(of.eps)));
        let bytes = rows as u64 * width as u64 * 12;
        let why = Choice::because(why).over("in every block of the products that read it");
        match stream {
            None => {
                outputs.extend([("x", input), ("weight", next)]);
                let weighted = of.next.is_some_and(|(_, weight)| weight.is_some());
                let instance = norm::norm(width, weighted, wanted)?;
                self.launch(instance, [rows, 1, 1], &outputs, &group.nodes, Work { bytes, flops: 0 }, why.clone())?;
            }
            Some((residual, sum)) => {
                let h = self.whole_rows(residual.stream)?;
                let unused = (Arg::Unused, Arg::Unused, Arg::Unused);
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
                    None => Arg::Unused,
                };
                outputs.extend([
                    ("h", h),
                    ("x", input),
                    ("branch", branch),
                    ("x_weight", x_weight),
                    ("branch_weight", branch_weight),
                    ("weight", self.common.weights.floats(residual.post)?),
                    ("layer_scale", scale),
                    ("next_weight", next),
                    ("h_out", sum),
                ]);
                let kind = norm::Residual {
                    branches: residual.branch.is_some(),
                    scaled: residual.scale.is_some(),
                    next: of.next.is_some(),
                    outputs: wanted,
                };
                let instance = norm::residual(width, kind)?;
                self.launch(instance, [rows, 1, 1], &outputs, &group.nodes, Work { bytes, flops: 0 }, why)?;
                self.record_output(residual.sum, Form::F32, sum);
            }
        }
        for (form, start) in forms {
            self.record_output(target, form, start);
        }
        Ok(())
    }

    /// Memory and arguments for a row kernel's result in every wanted form.
    pub fn row_outputs(
        &mut self,
        node: NodeId,
        wanted: Outputs,
        rows: u32,
        names: [&'static str; 5],
    ) -> (Named, Vec<(Form, Arg)>) {
        let [out, rounded, xq, xscale, xsum] = names;
        let elements = self.graph().node(node).ty.width as u64 * rows as u64;
        let mut forms = Vec::new();
        let mut arguments = Vec::new();
        let mut one = |builder: &mut Self, has: bool, form: Form| match has {
            true => {
                let start = builder.alloc_value(node, form, rows);
                forms.push((form, start));
                start
            }
            false => Arg::Unused,
        };
        arguments.push((out, one(self, wanted.floats, Form::F32)));
        arguments.push((rounded, one(self, wanted.bf16, Form::BF16)));
        match one(self, wanted.int8, Form::Int8) {
            Arg::Unused => arguments.extend([(xq, Arg::Unused), (xscale, Arg::Unused), (xsum, Arg::Unused)]),
            start => arguments.extend(int8_arguments(start, elements, [xq, xscale, xsum])),
        }
        (arguments, forms)
    }
}
