//! The experts of many rows: rows sorted by expert, products on tensor cores over all rows of an expert, results summed
//! row by row in the order of its choices.
//!
//! Each expert that is chosen is read once, whatever the number of rows, where a product for each pair of a row and an
//! expert would read it for each: so there is no number of rows from two on for which that would be better.
//!
//! All phases of a plan multiply alike, by warpgroups or by warps: the two round sums differently, and a row's result
//! must not depend on the chunk it came in.

use gemma4c_dsl::ElementType;
use gemma4c_graph::{Group, Kind, NodeId, WeightId};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::error::LowerError;
use super::launch::Span;
use super::phase::{PhaseBuilder, Place, SortedPairs, Work};
use super::products::WarpgroupOperands;
use crate::kernels::moe::group::{Grouping, group_pairs};
use crate::kernels::product::warpgroups::Source;
use crate::kernels::product::{Product, Tile, product};
use crate::passes::{experts_of, warpgroups};

impl PhaseBuilder<'_, '_> {
    /// The pairs of a row and an expert, sorted by expert, in groups of a height.
    pub fn sort_pairs(&mut self, group: &Group, routing: NodeId, height: u32) -> Result<(), LowerError> {
        let (experts, top) = experts_of(self.graph(), routing);
        let pairs = self.rows() * top;
        let grouping = Grouping { experts, height, pairs };
        let most_groups = grouping.most_groups();
        let order = self.buffer(pairs as u64 * 4);
        let groups = self.buffer((1 + most_groups as u64) * 16);
        let (ids, state) = (self.routing(routing)?.ids, self.row_count(group));
        let arguments = group_pairs::Arguments { ids, state, order, groups, top };
        let why = format!("{} rows sorted by expert, in groups of {height}", self.rows());
        let work = Work { bytes: pairs as u64 * 8, flops: 0 };
        self.launch(grouping.instance()?, [experts, 1, 1], arguments, &[], work, why)?;
        self.sorts.insert((routing, height), SortedPairs { order, groups, most_groups });
        Ok(())
    }

    /// Whether the rows of a routing are sorted by expert.
    pub fn has_sorted(&self, routing: NodeId) -> bool {
        self.sorts.keys().any(|(sorted, _)| *sorted == routing)
    }

    /// A product of sorted rows: by warpgroups, or by warps.
    pub fn expert_product(&mut self, group: &Group) -> Result<(), LowerError> {
        let no_value = || LowerError::NoValue { node: self.graph().full_name(group.anchor()) };
        let Kind::ExpertProduct { weight, input, routing, ref matmuls, geglu, height } = group.kind else {
            return Err(no_value());
        };
        let sorted = *self.sorts.get(&(routing, height)).ok_or_else(no_value)?;
        let rows = self.rows();
        let (out, form) = match (geglu, group.last(), &matmuls[..]) {
            (true, Some(joined), _) => (self.alloc_value(joined, Form::BF16, rows), Form::BF16),
            (_, _, &[down]) => (self.alloc_value(down, Form::F32, rows), Form::F32),
            _ => (self.side_by_side(weight, routing, matmuls), Form::F32),
        };
        // Gate and up read one row for all experts of a row; down reads one for each.
        let shares_rows = self.graph().node(input).ty.width as u64 == self.graph().weight(weight).dim(0);
        if self.schedule.is_gemm(group) {
            self.experts_by_gemm(group, (weight, routing, input, geglu), &sorted, height, out)?;
        } else if let Some(source) = self.schedule.source(matmuls[0]) {
            let x = self.location(input, Form::BF16)?.start;
            self.experts_by_warpgroups(group, (weight, routing, geglu), source, &sorted, x, out)?;
        } else {
            let x = self.location(input, Form::BF16)?.start;
            self.experts_by_warps(group, (weight, routing, shares_rows), &sorted, x, out)?;
        }
        match (geglu, group.last(), &matmuls[..]) {
            (true, Some(node), _) => self.record_output(node, form, out),
            (_, _, &[node]) => self.record_output(node, form, out),
            _ => {}
        }
        Ok(())
    }

    /// Memory for gate and up of each pair, one after the other.
    fn side_by_side(&mut self, weight: WeightId, routing: NodeId, matmuls: &[NodeId]) -> Span {
        let all = self.graph().weight(weight).dim(1) as u32;
        let (_, top) = experts_of(self.graph(), routing);
        let out = self.buffer(self.rows() as u64 * top as u64 * all as u64 * 4);
        let mut first = 0u64;
        for id in matmuls {
            let part = self.graph().node(*id).ty.width / top;
            let place = Place { start: out.skip(first * 4), stride: all, part: Some(part) };
            self.bind_location(*id, Form::F32, place);
            first += part as u64;
        }
        out
    }

    fn experts_by_warpgroups(
        &mut self,
        group: &Group,
        (weight, routing, geglu): (WeightId, NodeId, bool),
        source: Source,
        sorted: &SortedPairs,
        x: Span,
        out: Span,
    ) -> Result<(), LowerError> {
        let (experts, top) = experts_of(self.graph(), routing);
        let pairs = self.rows() * top;
        let w = self.graph().weight(weight);
        let (k, all) = (w.dim(0) as u32, w.dim(1) as u32);
        let target = &self.common.can.target;
        let (wgmma, tile, outputs) =
            warpgroups::grouped(self.graph(), weight, routing, self.rows(), geglu, source, target)
                .ok_or_else(|| LowerError::NoValue { node: w.name.clone() })?;
        let (groups, order, state) = (sorted.groups, sorted.order, self.row_count(group));
        let rest =
            WarpgroupOperands { copy: None, x, groups, order, state, out, outputs, k, x_part: 0, part_columns: 0 };
        let (arguments, bytes) = self.by_warpgroups(&[weight], source, tile, rest)?;
        let read = bytes / experts as u64 * experts.min(pairs) as u64;
        let work = work(read, pairs, all, outputs, k, wgmma.out.size() as u64);
        let why =
            format!("{pairs} pairs of a row and an expert, sorted: warpgroups {}, {}", source.words(), tile.words());
        let why = Choice::because(why).over("warps over weight planes");
        let grid = wgmma.grouped_grid(tile, sorted.most_groups, outputs, self.common.can.target.multiprocessors);
        self.launch(wgmma.instance(tile)?, grid, arguments, &group.nodes, work, why)
    }

    fn experts_by_warps(
        &mut self,
        group: &Group,
        (weight, routing, shares_rows): (WeightId, NodeId, bool),
        sorted: &SortedPairs,
        x: Span,
        out: Span,
    ) -> Result<(), LowerError> {
        let (experts, top) = experts_of(self.graph(), routing);
        let matrix = self.common.weights.matrix(&[weight], &mut self.common.kernels)?;
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "rows are not whole groups of 32 values"));
        }
        let (pairs, outputs) = (self.rows() * top, (matrix.rows / experts as u64) as u32);
        let tile = Tile::for_groups(pairs, experts);
        let share = if shares_rows { top } else { 1 };
        let kind =
            Product { dtype: matrix.dtype, k: matrix.k, out: ElementType::F32, pairs: share, epilogue: Vec::new() };
        let arguments = product::Arguments {
            codes: matrix.codes(),
            x,
            groups: sorted.groups,
            order: sorted.order,
            state: self.row_count(group),
            out,
            outputs,
            k: matrix.k,
        };
        let arguments = arguments.with_slot(product::slot::side, matrix.side());
        let read = matrix.bytes() / experts as u64 * experts.min(pairs) as u64;
        let work = work(read, pairs, outputs, outputs, matrix.k, 4);
        let why = format!(
            "{pairs} pairs of a row and an expert, sorted: warps over weight planes, tiles of {} x {}",
            tile.rows, tile.columns
        );
        let none = self.schedule.note(group).unwrap_or("they are switched off");
        let why = Choice::because(why).over(format!("warpgroups: {none}"));
        let grid = [sorted.most_groups, outputs.div_ceil(tile.columns), 1];
        self.launch(kind.instance(tile)?, grid, arguments, &group.nodes, work, why)
    }
}

/// What a product of pairs costs: the weights that are read, all activations, and what is stored of the results.
fn work(weights: u64, pairs: u32, outputs: u32, stored: u32, k: u32, stored_bytes: u64) -> Work {
    let activations = pairs as u64 * (k as u64 * 2 + stored as u64 * stored_bytes);
    Work { bytes: weights + activations, flops: 2 * pairs as u64 * outputs as u64 * k as u64 }
}
