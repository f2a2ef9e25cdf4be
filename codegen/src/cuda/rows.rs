//! Products of several decoded rows: what every block of a row's product does before it multiplies is a launch of its
//! own, then the weights are read once for all rows. A row's bits are those of the product of one row.

use gemma4c_dsl::{LaunchArguments, SlotKey};
use gemma4c_graph::{Group, NodeId, Product};
use gemma4c_plan::cuda::Form;

use super::adapter::wide_bank;
use super::choice::Choice;
use super::error::LowerError;
use super::launch::{Int8Span, Span};
use super::phase::{PhaseBuilder, PreparedRows, Work};
use super::products::{Arrival, Decoded};
use crate::kernels::matvec::formats::format;
use crate::kernels::per_layer::step;
use crate::kernels::rows::prepare::{
    PreparedOutArguments, PrologueNormsArguments, PrologueStridesArguments, prepare_rows,
};
use crate::kernels::rows::{self, Given};
use crate::passes::{per_layer_step, product_of};

impl PhaseBuilder<'_, '_> {
    /// What the product of matrix `of` does before it multiplies: residual, norm and rounding of each row.
    pub fn rows_prologue(&mut self, group: &Group, of: NodeId) -> Result<(), LowerError> {
        let owner = self.fused().group(of).clone();
        let product = self.product_of_group(&owner)?;
        let rows = self.rows_of(group);
        let Decoded { choice, arrival, pairs, .. } = self.decoded(&owner, &product)?;
        let kind = rows::Product::new(choice, rows, self.schedule.sum_order(of));
        let mut one = kind.one.shape(&self.common.can.target);
        if per_layer_step::is_step_of_one_row(self.schedule, &self.common.can, &product) {
            // One row has this norm in another kernel; with as many warps here, though bits no longer depend on them.
            one.warps = step::BLOCK_WARPS;
        }
        let (shape, ..) = kind.choose(&self.common.can.target);
        let Some(instance) = kind.prepare(one, shape)? else {
            return Err(LowerError::NoValue { node: self.graph().full_name(of) });
        };
        let (k, integer) = (kind.one.k as u64, format(kind.one.dtype).integer);
        // Panels are whole.
        let held = if shape.takes_panels() { rows.next_multiple_of(8) } else { rows } as u64;
        let (values, groups) = (held * k, held * k / 32);
        let factor = self.buffer(rows as u64 * 4);
        let mut prepared = PreparedRows { factor, in_panels: shape.takes_panels(), ..PreparedRows::default() };
        if integer {
            prepared.int8 = Int8Span::of(self.buffer(values + groups * 8), values);
        } else {
            prepared.floats = self.buffer(values * 4);
        }
        if kind.is_fine() {
            (prepared.fine, prepared.fine_sums) = (self.buffer(values * 2), self.buffer(groups * 4));
        }
        // Rows of the prologue's inputs may be parts of wider ones.
        let stride = |builder: &Self, node: Option<NodeId>| {
            node.map_or(Ok(0), |node| builder.floats(node).map(|place| place.stride))
        };
        let residual = product.norm.and_then(|norm| norm.residual);
        let input = residual.map(|residual| residual.before).or(product.norm.map(|norm| norm.input));
        let input_stride = stride(self, Some(input.unwrap_or(product.input)))?;
        let update_stride = stride(self, residual.and(product.norm.map(|norm| norm.input)))?;
        let branch = residual.and_then(|residual| residual.branch).map(|branch| branch.other);
        let branch_stride = stride(self, branch)?;
        let Arrival { update_norm, branch_norm, post_norm, next_norm, slots, .. } = arrival;
        let norms =
            PrologueNormsArguments { update: update_norm, branch: branch_norm, post: post_norm, next: next_norm };
        let out = PreparedOutArguments {
            codes: prepared.int8.codes,
            scales: prepared.int8.scales,
            sums: prepared.int8.sums,
            fine: prepared.fine,
            fine_sums: prepared.fine_sums,
            values: prepared.floats,
            factor: if kind.is_normed() { prepared.factor } else { Span::Unused },
        };
        let strides = PrologueStridesArguments { input: input_stride, update: update_stride, branch: branch_stride };
        let wide = wide_bank(pairs.as_ref());
        let narrowed = self.narrowed_rows(&owner, of, pairs)?;
        let mut arguments: LaunchArguments<Span> =
            prepare_rows::Arguments { norms, out, strides, narrowed, wide }.into();
        for (slot, filled) in slots {
            let slot = SlotKey { kernel: prepare_rows::slot::input.kernel, ..slot };
            arguments = arguments.with_slot(slot, filled);
        }
        let work = Work { bytes: values * 9, flops: 0 };
        let why =
            Choice::because(format!("{rows} rows: normed and rounded once")).over("in every block of the product");
        self.launch(instance, kind.prepare_grid(), arguments, &[], work, why)?;
        self.prepared.insert(of, prepared);
        Ok(())
    }

    fn product_of_group(&self, group: &Group) -> Result<Product, LowerError> {
        product_of(self.graph(), group)
            .ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(group.anchor()) })
    }

    /// The product itself.
    pub fn product_of_rows(&mut self, group: &Group, of: &Product) -> Result<(), LowerError> {
        let rows = self.rows_of(group);
        let Decoded { choice, matrix, epilogue, residual_out, pairs, .. } = self.decoded(group, of)?;
        let (outputs, k) = (choice.outputs, choice.k);
        let joined = group.last().filter(|last| self.schedule.is_in_tiles(*last));
        let kind = rows::Product {
            arrives_in_panels: self.schedule.is_in_tiles(of.input),
            leaves_panels: joined.is_some(),
            ..rows::Product::new(choice, rows, self.schedule.sum_order(of.matmuls[0]))
        };
        let in_panels = rows.next_multiple_of(8);
        let (shape, reason, runner_up) = kind.choose(&self.common.can.target);
        let integer = format(matrix.dtype).integer;
        let (prepared, x_stride) = match self.prepared.get(&of.matmuls[0]) {
            Some(prepared) => (*prepared, k),
            None if integer => {
                let x = self.location(of.input, Form::Int8)?.start;
                let held = if kind.arrives_in_panels { in_panels } else { rows };
                (PreparedRows { int8: Int8Span::of(x, held as u64 * k as u64), ..PreparedRows::default() }, k)
            }
            None => {
                let x = self.floats(of.input)?;
                (PreparedRows { floats: x.start, ..PreparedRows::default() }, x.stride)
            }
        };
        let by = of.epilogue.iter().find_map(|epilogue| epilogue.operand);
        let by_stride = by.map_or(Ok(0), |operand| self.operand(operand).map(|place| place.stride))?;
        let (out, to) = match joined {
            Some(joined) => {
                let all = self.alloc_value(joined, Form::Int8, in_panels);
                (Span::Unused, Int8Span::of(all, in_panels as u64 * outputs as u64))
            }
            None => (self.product_output(group, of, outputs, rows), Int8Span::default()),
        };
        let given = Given {
            x: if integer { prepared.int8.codes } else { prepared.floats },
            xscale: prepared.int8.scales,
            xsum: prepared.int8.sums,
            fine: prepared.fine,
            fine_sums: prepared.fine_sums,
            factor: if kind.is_normed() { prepared.factor } else { Span::Unused },
            out,
            to_codes: to.codes,
            to_scales: to.scales,
            to_sums: to.sums,
            unused: Span::Unused,
            x_stride,
            by_stride,
        };
        let arguments = kind.arguments(shape, given, |plane| matrix.plane(plane), (self.change(of, pairs)?, epilogue));
        let (all, of_rows) = (matrix.rows, rows as u64);
        let bytes = matrix.bytes() + of_rows * (k as u64 + outputs as u64 * 4);
        let work = Work { bytes, flops: 2 * of_rows * all * k as u64 };
        let why = Choice::because(reason).over(runner_up);
        let nodes = [&group.recomputes[..], &group.nodes[..]].concat();
        self.launch(kind.instance(shape)?, kind.grid(shape), arguments, &nodes, work, why)?;
        if let Some((residual, sum)) = residual_out {
            self.record_output(residual, Form::F32, sum);
        }
        if joined.is_none() {
            self.record_product_outputs(group, of, out);
        }
        Ok(())
    }
}
