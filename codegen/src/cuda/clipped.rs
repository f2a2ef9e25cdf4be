//! A tower's layers as few launches: between clipped products one each, heads and attention of patches by warpgroups.

use gemma4c_dsl::{ElementType, Filled, LaunchArguments};
use gemma4c_graph::{Clip, ClippedGeglu, ClippedNorm, Group, NodeId, Op, PatchHeads, Product, WeightId};
use gemma4c_plan::cuda::Form;

use super::choice::Choice;
use super::error::LowerError;
use super::launch::Span;
use super::phase::{PhaseBuilder, Place, Work};
use crate::kernels::heads::inverse_frequencies;
use crate::kernels::tower::clipped::{
    self, ClipBoundsArguments, ClippedCopiesArguments, ClippedResidualArguments, clipped_geglu, clipped_norm,
};
use crate::kernels::tower::heads::{
    HeadTiles, PatchNormsArguments, PatchProjectionArguments, PatchTilesOutArguments, patch_heads,
};
use crate::kernels::tower::warpgroups::{PatchAttention, PatchTilesArguments, patch_attention};
use crate::kernels::tower::{then_at_least, then_at_most};

impl PhaseBuilder<'_, '_> {
    /// The bounds of a value: infinite where it has none.
    fn bounds(&mut self, clip: Clip) -> Result<ClipBoundsArguments<Span>, LowerError> {
        let mut bound = |weight: Option<WeightId>, name: &str, none: f32| match weight {
            Some(weight) => self.common.weights.floats(weight),
            None => Ok(self.common.weights.constant(name, vec![none])),
        };
        let low = bound(clip.low, "no least value", f32::NEG_INFINITY)?;
        let high = bound(clip.high, "no most value", f32::INFINITY)?;
        Ok(ClipBoundsArguments { low, high })
    }

    /// What a product of several values multiplies: they are stored one after the other.
    pub fn stacked(&self, of: &Product) -> Result<Span, LowerError> {
        match self.stacks.get(&of.input) {
            Some((nodes, place)) if of.inputs().eq(nodes.iter().copied()) => Ok(*place),
            _ => Err(LowerError::NoValue { node: format!("{} among others", self.graph().full_name(of.input)) }),
        }
    }

    pub fn clipped_norm(&mut self, group: &Group, of: &ClippedNorm) -> Result<(), LowerError> {
        let (rows, norm) = (self.rows_of(group), of.norm);
        let width = self.graph().node(norm.input).ty.width;
        let x = self.whole_rows(norm.input)?;
        let entry = self.bounds(of.entry)?;
        let mut exits = [ClipBoundsArguments { low: Span::Unused, high: Span::Unused }; 3];
        for (place, exit) in exits.iter_mut().zip(&of.exits) {
            *place = self.bounds(*exit)?;
        }
        let mut residual = ClippedResidualArguments { before: Span::Unused, weight: Span::Unused, after: Span::Unused };
        if let Some(of) = norm.residual {
            residual.before = self.whole_rows(of.before)?;
            residual.weight = self.common.weights.floats(of.post)?;
            residual.after = self.alloc_value(of.sum, Form::F32, rows);
        }
        let weight = match norm.next {
            Some((_, Some(weight))) => self.common.weights.floats(weight)?,
            _ => Span::Unused,
        };
        let (count, part) = (of.exits.len() as u64, rows as u64 * width as u64);
        let rounded = if count == 0 { Span::Unused } else { self.buffer(count * part * 2) };
        let nodes: Vec<NodeId> = of.exits.iter().map(|exit| exit.out).collect();
        for (at, node) in (0..).zip(&nodes) {
            let start = rounded.skip(at * part * 2).take(part * 2);
            self.bind_location(*node, Form::BF16, Place { start, stride: width, part: None });
        }
        let copies = ClippedCopiesArguments { weight, rounded, part: part as u32 };
        let [first, second, third] = exits;
        let arguments = clipped_norm::Arguments { x, entry, residual, copies, first, second, third, epsilon: norm.eps };
        let work = Work { bytes: part * (4 + 2 * count + if norm.residual.is_some() { 8 } else { 0 }), flops: 0 };
        let why = format!("bounds, residual and norm, and {count} copies within bounds of their own");
        let why = Choice::because(why).over("a launch for each bound");
        let instance = clipped::norm(width, norm.residual.is_some(), count as u32)?;
        self.launch(instance, [rows, 1, 1], arguments, &group.nodes, work, why)?;
        if let Some(of) = norm.residual {
            self.record_output(of.sum, Form::F32, residual.after);
        }
        for (at, node) in (0..).zip(&nodes) {
            self.record_output(*node, Form::BF16, rounded.skip(at * part * 2).take(part * 2));
        }
        if let Some(first) = nodes.first() {
            self.stacks.insert(*first, (nodes.clone(), rounded));
        }
        Ok(())
    }

    pub fn clipped_geglu(&mut self, group: &Group, of: &ClippedGeglu) -> Result<(), LowerError> {
        let (rows, width) = (self.rows_of(group), self.graph().node(of.exit.out).ty.width);
        let rounded = self.has(of.gate, Form::BF16) && self.has(of.up, Form::BF16);
        let (form, element) = if rounded { (Form::BF16, ElementType::BF16) } else { (Form::F32, ElementType::F32) };
        let (gate, up) = (self.location(of.gate, form)?, self.location(of.up, form)?);
        if gate.stride != up.stride || !width.is_multiple_of(4) {
            return Err(LowerError::NoValue { node: self.graph().full_name(of.exit.out) });
        }
        let (gate_bounds, up_bounds) = (self.bounds(of.gate_clip)?, self.bounds(of.up_clip)?);
        let out_bounds = self.bounds(of.exit)?;
        let out = self.alloc_value(of.exit.out, Form::BF16, rows);
        let (stride, gate, up) = (gate.stride, gate.start, up.start);
        let arguments = clipped_geglu::Arguments { gate, up, gate_bounds, up_bounds, out_bounds, out, width, stride };
        let work = Work { bytes: rows as u64 * width as u64 * (2 + 2 * element.size() as u64), flops: 0 };
        let why = Choice::because("gate and up within their bounds, and their product").over("a launch for each bound");
        let grid = [width.div_ceil(1024), rows, 1];
        self.launch(clipped::geglu(element)?, grid, arguments, &group.nodes, work, why)?;
        self.record_output(of.exit.out, Form::BF16, out);
        Ok(())
    }

    pub fn patch_heads(&mut self, group: &Group, of: &PatchHeads) -> Result<(), LowerError> {
        let missing = || LowerError::NoValue { node: self.graph().full_name(group.anchor()) };
        let tiles = HeadTiles::of(of.dim).ok_or_else(missing)?;
        let (rows, width) = (self.rows_of(group), self.graph().node(of.out[0]).ty.width);
        let heads = width / of.dim;
        let raw = [self.floats(of.raw[0])?, self.floats(of.raw[1])?, self.floats(of.raw[2])?];
        if raw.iter().any(|place| place.stride != raw[0].stride) {
            return Err(missing());
        }
        let mut projection = |at: usize| {
            let ClipBoundsArguments { low, high } = self.bounds(of.clips[at])?;
            Ok::<_, LowerError>(PatchProjectionArguments { x: raw[at].start, low, high })
        };
        let (q, k, v) = (projection(0)?, projection(1)?, projection(2)?);
        let frequencies = inverse_frequencies(of.dim / 2, of.base as f64, None);
        let name = format!("angles of halves of heads of {}, base {}", of.dim, of.base);
        let inverse_frequencies = self.common.weights.constant(&name, frequencies);
        let (of_queries, of_values) = (tiles.query_values(heads, rows), tiles.value_values(heads, rows));
        let [q_out, k_out, v_out] = [of_queries, of_queries, of_values].map(|values| self.buffer(values * 2));
        let norms = PatchNormsArguments {
            q_weight: self.common.weights.floats(of.q_weight)?,
            k_weight: self.common.weights.floats(of.k_weight)?,
            inverse_frequencies,
            epsilon: of.eps,
        };
        let (grid, stride) = (self.state(group), raw[0].stride);
        let tiles_out = PatchTilesOutArguments { q: q_out, k: k_out, v: v_out, blocks: HeadTiles::blocks(rows) };
        let arguments = patch_heads::Arguments { q, k, v, norms, grid, tiles: tiles_out, stride };
        let work = Work { bytes: rows as u64 * width as u64 * 18, flops: 0 };
        let why = Choice::because("bounds, norms and rotation of heads, written in tiles for attention by warpgroups")
            .over("a launch for each operation");
        self.launch(tiles.instance()?, HeadTiles::grid(heads, rows), arguments, &group.nodes, work, why)?;
        self.tiles.extend(of.out.into_iter().zip([q_out, k_out, v_out]));
        Ok(())
    }

    pub fn patch_attention(&mut self, group: &Group, id: NodeId, clip: Clip) -> Result<(), LowerError> {
        let missing = || LowerError::NoValue { node: self.graph().full_name(id) };
        let node = self.graph().node(id);
        let Op::FullAttention { heads } = node.op else { return Err(missing()) };
        let (rows, width) = (self.rows_of(group), node.ty.width);
        let tiles = HeadTiles::of(width / heads).ok_or_else(missing)?;
        let place = |at: usize| self.tiles.get(&node.inputs[at]).copied().ok_or_else(missing);
        let of_tiles =
            PatchTilesArguments { q: place(0)?, k: place(1)?, v: place(2)?, blocks: HeadTiles::blocks(rows) };
        let kernel = PatchAttention::choose(tiles, heads, rows, self.common.can.target.multiprocessors);
        let mut epilogue: Vec<Filled<Span>> = Vec::new();
        if let Some(low) = clip.low {
            epilogue.push(then_at_least::Arguments { low: self.common.weights.floats(low)?, lows: 1 }.into());
        }
        if let Some(high) = clip.high {
            epilogue.push(then_at_most::Arguments { high: self.common.weights.floats(high)?, highs: 1 }.into());
        }
        let out = self.alloc_value(clip.out, Form::BF16, rows);
        let instance = kernel.instance(epilogue.iter().map(|filled| filled.function).collect())?;
        let mut arguments: LaunchArguments<Span> =
            patch_attention::Arguments { tiles: of_tiles, grid: self.state(group), out }.into();
        for filled in epilogue {
            arguments = arguments.with_slot(patch_attention::slot::epilogue, filled);
        }
        let flops = 4 * rows as u64 * rows as u64 * width as u64;
        let work = Work { bytes: rows as u64 * width as u64 * 8, flops };
        let why = format!("all patches see all: {} warpgroups of 64 patches a block", kernel.warpgroups);
        let why = Choice::because(why).over("warps, tiles of 64 patches");
        self.launch(instance, kernel.grid(heads, rows), arguments, &group.nodes, work, why)?;
        self.record_output(clip.out, Form::BF16, out);
        Ok(())
    }
}
