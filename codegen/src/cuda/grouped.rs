//! The experts of many rows: rows sorted by expert, products on tensor cores over all rows of an expert, results summed row by
//! row in the order of its choices.
//!
//! Each expert that is chosen is read once, whatever the number of rows, where a product for each pair of a row and an expert
//! would read it for each: so there is no number of rows from two on for which that would be better.
//!
//! All phases of a plan multiply alike, over bf16 copies of the experts or over their streams. For few rows streams are smaller
//! and so faster, but the two kernels round sums differently, and a row's result must not depend on the chunk it came in.

use gemma4c_dsl::ElementType;
use gemma4c_graph::{Group, NodeId, WeightId};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::launch::Arg;
use super::phase::{PhaseBuilder, Work};
use super::products::EVERY_PRODUCT;
use super::{LowerError, Pass};
use crate::kernels::moe::group::Grouping;
use crate::kernels::outputs::Outputs;
use crate::kernels::product::wgmma::WgmmaProduct;
use crate::kernels::product::{Product, Tile};

/// The pairs of rows and experts, sorted, and cut into groups of one height.
#[derive(Clone, Copy, Debug)]
pub struct Sorted {
    order: Arg,
    groups: Arg,
    most_groups: u32,
}

impl Sorted {
    /// What both kinds of products take, besides their weights.
    fn arguments(&self, x: Arg, state: Arg, out: Arg, outputs: u32, k: u32) -> [(&'static str, Arg); 7] {
        let (outputs, k) = (Arg::U32(outputs), Arg::U32(k));
        [
            ("x", x),
            ("groups", self.groups),
            ("order", self.order),
            ("state", state),
            ("out", out),
            ("outputs", outputs),
            ("k", k),
        ]
    }
}

/// A product of sorted rows.
struct ExpertProduct {
    weight: WeightId,
    routing: NodeId,
    x: Arg,
    /// Pairs that share a row of x.
    share: u32,
}

/// The most pairs of an expert, on average, for which a tile is of one warpgroup: beyond, two share what they read.
const MOST_FOR_ONE_WARPGROUP: u32 = 48;

impl PhaseBuilder<'_, '_> {
    /// Gate and up of the chosen experts, joined.
    pub fn grouped_gate_up(
        &mut self,
        group: &Group,
        weight: WeightId,
        input: NodeId,
        routing: NodeId,
    ) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let (rows, (_, top)) = (self.rows, self.experts(routing));
        let x = self.form(group, input, Form::BF16)?.start;
        let of = ExpertProduct { weight, routing, x, share: top };
        let all = self.graph().weight(weight).dim(1) as u32;
        let gated = WgmmaProduct { out: ElementType::BF16, geglu: true, pairs: top, epilogue: Vec::new() };
        if self.wanted(node) == Outputs::BF16
            && let Some(out) =
                self.by_warpgroups(group, &of, gated, &group.nodes, |b| b.alloc_value(node, Form::BF16, rows))?
        {
            self.record_output(node, Form::BF16, out);
            return Ok(());
        }
        let pairs = rows * top;
        let raw = self.buffer(pairs as u64 * all as u64 * 4);
        self.over_streams(group, &of, raw, &group.nodes)?;
        self.joined(group, pairs, raw, all / 2, raw.skip(all as u64 * 2), [all, all])
    }

    /// Down of the chosen experts, and their weighted sum.
    pub fn grouped_down(
        &mut self,
        group: &Group,
        weight: WeightId,
        scale: Option<WeightId>,
        input: NodeId,
        routing: NodeId,
    ) -> Result<(), LowerError> {
        let (down, node) = (group.nodes[0], group.nodes[group.nodes.len() - 1]);
        let rows = self.rows;
        let x = self.form(group, input, Form::BF16)?.start;
        let of = ExpertProduct { weight, routing, x, share: 1 };
        let plain = WgmmaProduct { out: ElementType::F32, geglu: false, pairs: 1, epilogue: Vec::new() };
        let each = match self.by_warpgroups(group, &of, plain, &[down], |b| b.alloc_value(down, Form::F32, rows))? {
            Some(out) => out,
            None => {
                let out = self.alloc_value(down, Form::F32, rows);
                self.over_streams(group, &of, out, &[down])?;
                out
            }
        };
        self.record_output(down, Form::F32, each);

        let why = "many rows: a row's choices come together in their order";
        self.expert_sum(group, node, each, routing, scale, why)
    }

    /// The pairs sorted by expert, in groups of a height: by the first who asks.
    fn sorted(&mut self, group: &Group, routing: NodeId, height: u32) -> Result<Sorted, LowerError> {
        if let Some(sorted) = self.sorts.get(&(routing, height)) {
            return Ok(*sorted);
        }
        let (experts, top) = self.experts(routing);
        let pairs = self.rows * top;
        let grouping = Grouping { experts, height, pairs };
        let most_groups = grouping.most_groups();
        let order = self.buffer(pairs as u64 * 4);
        let groups = self.buffer((1 + most_groups as u64) * 16);
        let arguments = [
            ("ids", self.routing(routing)?.ids),
            ("state", self.state(group)),
            ("order", order),
            ("groups", groups),
            ("top", Arg::U32(top)),
        ];
        let why = format!("{} rows sorted by expert, in groups of {height}", self.rows);
        let work = Work { bytes: pairs as u64 * 8, flops: 0 };
        self.launch(grouping.instance()?, [experts, 1, 1], &arguments, &[], work, why)?;
        let sorted = Sorted { order, groups, most_groups };
        self.sorts.insert((routing, height), sorted);
        Ok(sorted)
    }

    /// The product over bf16 copies of the experts, and what it made; nothing where there are none, or where the shape does not
    /// allow it.
    fn by_warpgroups(
        &mut self,
        group: &Group,
        of: &ExpertProduct,
        wgmma: WgmmaProduct,
        nodes: &[NodeId],
        make: impl FnOnce(&mut Self) -> Arg,
    ) -> Result<Option<Arg>, LowerError> {
        let (experts, top) = self.experts(of.routing);
        let (pairs, w) = (self.rows * top, self.graph().weight(of.weight));
        let (k, all) = (w.dim(0) as u32, w.dim(1) as u32);
        let outputs = if wgmma.geglu { all / 2 } else { all };
        if let Err(why) = self.common.wgmma_experts {
            // Where no product has them, experts are not another refusal.
            let all = if self.common.wgmma.is_err() { EVERY_PRODUCT } else { "all experts of many rows" };
            self.common.tally.refused(Pass::Bf16Copies, vec![all.into()], why);
            return Ok(None);
        }
        let height = if pairs <= experts * MOST_FOR_ONE_WARPGROUP { 64 } else { 128 };
        // An expert's last group is half full, on average.
        let groups = pairs / height + experts.min(pairs).div_ceil(2);
        let Some(tile) = wgmma.choose_grouped(groups, height, outputs, k, &self.common.target) else {
            self.refused(Pass::Bf16Copies, group, "its sizes are no multiples of what they take");
            return Ok(None);
        };
        self.applied(Pass::Bf16Copies, group);
        let copy = self.common.weights.rounded(&[of.weight], &mut self.common.kernels)?;
        let sorted = self.sorted(group, of.routing, height)?;
        let out = make(self);
        let mut arguments = vec![("weights", copy)];
        arguments.extend(sorted.arguments(of.x, self.state(group), out, outputs, k));
        let read = all as u64 * k as u64 * 2 * experts.min(pairs) as u64;
        let work = work(read, pairs, all, outputs, k, wgmma.out.size() as u64);
        let why = format!(
            "{pairs} pairs of a row and an expert, sorted: warpgroups over a bf16 copy, tiles of {height} x {}",
            tile.columns
        );
        let why = Choice::because(why).over("tensor cores over streams");
        let grid = wgmma.grouped_grid(tile, sorted.most_groups, outputs, self.common.target.multiprocessors);
        self.launch(wgmma.instance(tile)?, grid, &arguments, nodes, work, why)?;
        Ok(Some(out))
    }

    /// The product over the experts' streams.
    fn over_streams(
        &mut self,
        group: &Group,
        of: &ExpertProduct,
        out: Arg,
        nodes: &[NodeId],
    ) -> Result<(), LowerError> {
        let (experts, top) = self.experts(of.routing);
        let matrix = self.common.weights.matrix(&[of.weight], &mut self.common.kernels)?;
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "rows are not whole groups of 32 values"));
        }
        let (pairs, outputs) = (self.rows * top, (matrix.rows / experts as u64) as u32);
        let tile = Tile::for_groups(pairs, experts);
        let product =
            Product { dtype: matrix.dtype, k: matrix.k, out: ElementType::F32, pairs: of.share, epilogue: Vec::new() };
        let sorted = self.sorted(group, of.routing, tile.rows)?;
        let mut arguments = matrix.arguments();
        arguments.extend(sorted.arguments(of.x, self.state(group), out, outputs, matrix.k));
        let read = matrix.bytes() / experts as u64 * experts.min(pairs) as u64;
        let work = work(read, pairs, outputs, outputs, matrix.k, 4);
        let why = format!(
            "{pairs} pairs of a row and an expert, sorted: tensor cores over streams, tiles of {} x {}",
            tile.rows, tile.columns
        );
        let no_wgmma = self.common.wgmma_experts.err().unwrap_or("its sizes are no multiples of what they take");
        let why = Choice::because(why).over(format!("warpgroups over a bf16 copy: {no_wgmma}"));
        let grid = [sorted.most_groups, outputs.div_ceil(tile.columns), 1];
        self.launch(product.instance(tile)?, grid, &arguments, nodes, work, why)
    }
}

/// What a product of pairs costs: the weights that are read, all activations, and what is stored of the results.
fn work(weights: u64, pairs: u32, outputs: u32, stored: u32, k: u32, stored_bytes: u64) -> Work {
    let activations = pairs as u64 * (k as u64 * 2 + stored as u64 * stored_bytes);
    Work { bytes: weights + activations, flops: 2 * pairs as u64 * outputs as u64 * k as u64 }
}
