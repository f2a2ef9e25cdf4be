//! Products of decoded rows with 16-bit operands: of rows, and of pairs of a row and an expert, sorted by expert.

use gemma4c_dsl::{ElementType, Filled, LaunchArguments};
use gemma4c_graph::{Group, NodeId, Product, WeightId};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::error::LowerError;
use super::launch::Span;
use super::phase::{PhaseBuilder, SortedPairs, Work};
use super::weights::Matrix;
use crate::kernels::gemm::warpgroups::gemm_warpgroups;
use crate::kernels::gemm::warps::gemm;
use crate::kernels::gemm::{Gemm, GemmRowsArguments, GemmWeightsArguments, Shape};
use crate::kernels::outputs::Outputs;
use crate::passes::{experts_of, takes_f16, weight_of};

/// Blocks of a cluster, at most.
const MOST_CLUSTER_BLOCKS: u32 = 8;

impl PhaseBuilder<'_, '_> {
    /// A product of decoded rows.
    pub fn gemm_product(&mut self, group: &Group, of: &Product) -> Result<(), LowerError> {
        let weights = self.weights_of(of);
        let matrix = self.gemm_matrix(group, &weights)?;
        let (rows, k) = (self.rows_of(group), matrix.k);
        let outputs = matrix.rows as u32 / if of.geglu { 2 } else { 1 };
        let (form, operands) = self.gemm_operands(group, of.input, weight_of(self.graph(), of));
        let x = self.location(of.input, form)?.start;
        let rounded = group.last().filter(|last| self.schedule.forms(*last) == Outputs::BF16);
        let (out, element) = match rounded {
            Some(last) => (self.alloc_value(last, Form::BF16, rows), ElementType::BF16),
            None => (self.product_output(group, of, outputs, rows), ElementType::F32),
        };
        let filled = self.epilogue(group, &of.epilogue)?;
        let pairs = self.pairs(of)?;
        let kind = Gemm {
            dtype: matrix.dtype,
            operands,
            outputs,
            k,
            geglu: of.geglu,
            pairs: 0,
            out: element,
            epilogue: filled.iter().map(|filled| filled.function).collect(),
            adapted: pairs.as_ref().map(|places| places.pairs.clone()),
        };
        let change = self.change(of, pairs)?;
        let by = of.epilogue.iter().find_map(|epilogue| epilogue.operand);
        let by_stride = by.map_or(Ok(0), |operand| self.operand(operand).map(|place| place.stride))?;
        let places = GemmRowsArguments { x, groups: Span::Unused, order: Span::Unused, count: rows };
        let shape = kind.shape(rows, self.gemm_cluster(), &self.common.can.target);
        let bytes = matrix.bytes() + rows as u64 * (k as u64 * 2 + outputs as u64 * element.size() as u64);
        let work = Work { bytes, flops: 2 * rows as u64 * matrix.rows * k as u64 };
        let why = format!("{rows} rows: {}", shape.describe(kind.slices()));
        let arguments = gemm_arguments(&matrix, places, out, (&kind, shape), (change, filled, by_stride));
        let grid = kind.grid(shape, rows);
        self.launch(kind.instance(shape)?, grid, arguments, &group.nodes, work, Choice::because(why))?;
        match rounded {
            Some(last) => self.record_output(last, Form::BF16, out),
            None => self.record_product_outputs(group, of, out),
        }
        Ok(())
    }

    /// Experts' products of sorted pairs.
    pub fn experts_by_gemm(
        &mut self,
        group: &Group,
        (weight, routing, input, geglu): (WeightId, NodeId, NodeId, bool),
        sorted: &SortedPairs,
        height: u32,
        out: Span,
    ) -> Result<(), LowerError> {
        let (experts, top) = experts_of(self.graph(), routing);
        let matrix = self.gemm_matrix(group, &[weight])?;
        let (form, operands) = self.gemm_operands(group, input, Some(weight));
        let x = self.location(input, form)?.start;
        let (rows, k) = (self.rows_of(group), matrix.k);
        let of_expert = (matrix.rows / experts as u64) as u32;
        let outputs = if geglu { of_expert / 2 } else { of_expert };
        // Gate and up read one row for all experts of a row; down reads one for each.
        let shares_rows = self.graph().node(input).ty.width == k;
        let kind = Gemm {
            dtype: matrix.dtype,
            operands,
            outputs,
            k,
            geglu,
            pairs: if shares_rows { top } else { 1 },
            out: if geglu { ElementType::BF16 } else { ElementType::F32 },
            epilogue: Vec::new(),
            adapted: None,
        };
        let places = GemmRowsArguments { x, groups: sorted.groups, order: sorted.order, count: 0 };
        let shape = kind.shape(height, self.gemm_cluster(), &self.common.can.target);
        let pairs = rows * top;
        let read = matrix.bytes() / experts as u64 * experts.min(pairs) as u64;
        let moved = pairs as u64 * (k as u64 * 2 + outputs as u64 * kind.out.size() as u64);
        let work = Work { bytes: read + moved, flops: 2 * pairs as u64 * of_expert as u64 * k as u64 };
        let why = format!("{pairs} pairs of a row and an expert, sorted: {}", shape.describe(kind.slices()));
        let arguments = gemm_arguments(&matrix, places, out, (&kind, shape), (None, Vec::new(), 0));
        let grid = kind.grid_of_tiles(shape, sorted.most_groups);
        self.launch(kind.instance(shape)?, grid, arguments, &group.nodes, work, Choice::because(why))
    }

    /// The form in which a product takes its activations, and what it multiplies.
    pub fn gemm_operands(&self, group: &Group, input: NodeId, weight: Option<WeightId>) -> (Form, ElementType) {
        match takes_f16(self.schedule, &self.common.can, group, input, weight) {
            true => (Form::F16, ElementType::F16),
            false => (Form::BF16, ElementType::BF16),
        }
    }

    fn gemm_matrix(&mut self, group: &Group, weights: &[WeightId]) -> Result<Matrix, LowerError> {
        let matrix = self.common.weights.matrix(weights, &mut self.common.kernels)?;
        match matrix.k.is_multiple_of(32) {
            true => Ok(matrix),
            false => Err(self.no_kernel(group, &matrix, "rows are not whole groups of 32 values")),
        }
    }

    fn gemm_cluster(&self) -> u32 {
        self.common.can.cluster.min(MOST_CLUSTER_BLOCKS)
    }
}

fn gemm_arguments(
    matrix: &Matrix,
    rows: GemmRowsArguments<Span>,
    out: Span,
    (of, shape): (&Gemm, Shape),
    (change, epilogue, by_stride): (Option<Filled<Span>>, Vec<Filled<Span>>, u32),
) -> LaunchArguments<Span> {
    let scales = if of.is_scaled() { matrix.plane("scales") } else { Span::Unused };
    let weights = GemmWeightsArguments { codes: matrix.codes(), scales };
    let (outputs, k) = (of.outputs, of.k);
    // Two kernels with the same slots.
    macro_rules! filled {
        ($kernel:ident, $arguments:expr) => {{
            let arguments: LaunchArguments<Span> = match of.is_scaled() {
                true => $arguments.into(),
                false => $arguments.with_slot($kernel::slot::side, matrix.side()),
            };
            let change = change.into_iter().map(|filled| ($kernel::slot::change, filled));
            let all = change.chain(epilogue.into_iter().map(|filled| ($kernel::slot::epilogue, filled)));
            all.fold(arguments, |arguments, (slot, filled)| arguments.with_slot(slot, filled))
        }};
    }
    if shape.resident == 0 {
        let arguments = gemm::Arguments { weights, rows, out, outputs, by_stride, k };
        filled!(gemm, arguments)
    } else {
        let GemmRowsArguments { x, order, count: rows, .. } = rows;
        let arguments = gemm_warpgroups::Arguments { weights, x, k, order, rows, out, outputs, by_stride };
        filled!(gemm_warpgroups, arguments)
    }
}
