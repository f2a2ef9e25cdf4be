//! Matrix products: for one row over weight planes, with the norm before them and what follows them; for many rows on
//! tensor cores.

use gemma4c_dsl::{ElementType, Filled, LaunchArguments, SlotKey};
use gemma4c_graph::{Epilogue, Group, NodeId, Norm, Op, Product, WeightId};
use gemma4c_plan::cuda::Form;

use super::adapter::PairPlaces;
use super::choice::{self, Choice};
use super::error::LowerError;
use super::launch::{Int8Span, MixedSpan, Span};
use super::phase::{PhaseBuilder, Place, Work};
use super::weights::Matrix;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::matvec::slot;
use crate::kernels::matvec::{self, Prologue, slots};
use crate::kernels::outputs::Outputs;
use crate::kernels::product::decoding::product_decoding;
use crate::kernels::product::fed::product_fed;
use crate::kernels::product::team::product_team;
use crate::kernels::product::tiles::product_tiles;
use crate::kernels::product::warpgroups::{Source, WgmmaTile};
use crate::kernels::product::wgmma::product_wgmma;
use crate::kernels::product::widen;
use crate::kernels::product::{self, Tile};
use crate::kernels::{geglu, per_layer};
use crate::passes::forms::writes_int8;
use crate::passes::readers::is_unbounded;
use crate::passes::widened::runs_concurrently;
use crate::passes::{multiplies_exactly, product_of, warpgroups};

/// How the activations of a decoded row's product arrive.
pub struct Arrival {
    pub prologue: Prologue,
    /// Weights of the prologue's norms.
    pub update_norm: Span,
    pub branch_norm: Span,
    pub post_norm: Span,
    pub next_norm: Span,
    /// What the slots of `matvec`'s prologue take.
    pub slots: Vec<(SlotKey, Filled<Span>)>,
}

impl Arrival {
    fn without_norms(prologue: Prologue, slots: Vec<(SlotKey, Filled<Span>)>) -> Arrival {
        let (update_norm, branch_norm, post_norm, next_norm) = Default::default();
        Arrival { prologue, update_norm, branch_norm, post_norm, next_norm, slots }
    }
}

/// A product of decoded rows, and what it takes.
pub struct Decoded {
    /// The product of each row, as one row has it.
    pub choice: matvec::Product,
    pub matrix: Matrix,
    pub arrival: Arrival,
    pub epilogue: Vec<Filled<Span>>,
    /// The residual that it writes for others.
    pub residual_out: Option<(NodeId, Span)>,
    /// Both halves of what adapters add.
    pub pairs: Option<PairPlaces>,
}

/// What a product by warpgroups takes besides its weights.
pub struct WarpgroupOperands {
    /// The weights as bf16 where a launch has just made them so.
    pub copy: Option<Span>,
    pub x: Span,
    /// Sorted pairs, where rows are pairs of a row and an expert.
    pub groups: Span,
    pub order: Span,
    pub state: Span,
    pub out: Span,
    /// Values of a row that are stored.
    pub outputs: u32,
    pub k: u32,
    /// Values from one matrix of x to the next, and the columns that each has; 0 where there is one.
    pub x_part: u32,
    pub part_columns: u32,
}

impl PhaseBuilder<'_, '_> {
    pub fn weights_of(&self, product: &Product) -> Vec<WeightId> {
        product.matmuls.iter().filter_map(|id| self.graph().node(*id).op.weight()).collect()
    }

    pub fn no_kernel(&self, group: &Group, matrix: &Matrix, why: &str) -> LowerError {
        let names: Vec<&str> = group
            .nodes
            .iter()
            .filter_map(|id| self.graph().node(*id).op.weight())
            .map(|w| self.graph().weight(w).name.as_str())
            .collect();
        LowerError::NoKernel {
            tensor: names.join(", "),
            dtype: matrix.dtype,
            shape: format!("{} x {}", matrix.rows, matrix.k),
            phase: self.phase_name(),
            why: why.to_owned(),
        }
    }

    /// A product of decoded rows, or of the asked one, with the norm before it where it has taken that over.
    pub fn decoded_product(&mut self, group: &Group, of: &Product) -> Result<(), LowerError> {
        if self.rows_of(group) > 1 { self.product_of_rows(group, of) } else { self.product_of_one_row(group, of) }
    }

    /// What decides a decoded row's product: its numbers are the same however many rows there are.
    pub fn decoded(&mut self, group: &Group, of: &Product) -> Result<Decoded, LowerError> {
        let weights = self.weights_of(of);
        let matrix = self.common.weights.matrix(&weights, &mut self.common.kernels)?;
        let integer = format(matrix.dtype).integer;
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "rows are not whole groups of 32 values"));
        }
        let unbounded = is_unbounded(self.graph(), of.input);
        // The owner of a residual writes it for others; who computes it once more does not.
        let residual = of.norm.and_then(|norm| norm.residual);
        let written = residual.filter(|residual| group.nodes.contains(&residual.sum));
        let rows = self.rows_of(group);
        let sum = written.map(|residual| match self.find(residual.sum, Form::F32) {
            // The helper before the product has made it.
            Some(place) => place.start,
            None => self.alloc_value(residual.sum, Form::F32, rows),
        });
        let mut loose = 0;
        let arrival = match &of.norm {
            Some(norm) => self.arrival_through_norm(norm, sum)?,
            None if integer
                && !unbounded
                && let Some((place, floats)) = self.find_int8(of.input) =>
            {
                loose = floats;
                let x = MixedSpan::of(place.start, rows as u64 * matrix.k as u64, loose as u64);
                let codes = slots::ready_codes::Arguments { xq: x.whole.codes };
                let scales = slots::ready_scale::Arguments { xscale: x.whole.scales, xsum: x.whole.sums };
                let mut filled = vec![(slot::ready, codes.into()), (slot::ready_group, scales.into())];
                if loose > 0 {
                    filled.push((slot::input, slots::four_of::Arguments { x: x.loose }.into()));
                }
                Arrival::without_norms(Prologue::Int8, filled)
            }
            None => {
                let x = slots::four_of::Arguments { x: self.floats(of.input)?.start };
                Arrival::without_norms(Prologue::Plain, vec![(slot::input, x.into())])
            }
        };
        let outputs = (matrix.rows / if of.geglu { 2 } else { 1 }) as u32;
        let epilogue = self.epilogue(group, &of.epilogue)?;
        let pairs = self.pairs(of)?;
        let choice = matvec::Product {
            adapted: pairs.as_ref().map(|places| places.pairs.clone()),
            geglu: of.geglu,
            scaled: residual.is_some_and(|residual| residual.scale.is_some()),
            branches: residual.is_some_and(|residual| residual.branch.is_some()),
            leaves_residual: written.is_some(),
            leaves_int8: writes_int8(self.schedule, &self.common.can, group, of),
            loose,
            unbounded,
            epsilon: of.norm.map_or(crate::kernels::NORM_EPSILON, |norm| norm.eps),
            epilogue: epilogue.iter().map(|filled| filled.function).collect(),
            ..matvec::Product::new(matrix.dtype, outputs, matrix.k, arrival.prologue)
        };
        let residual_out = written.zip(sum).map(|(residual, sum)| (residual.sum, sum));
        Ok(Decoded { choice, matrix, arrival, epilogue, residual_out, pairs })
    }

    fn product_of_one_row(&mut self, group: &Group, of: &Product) -> Result<(), LowerError> {
        let Decoded { choice, matrix, arrival, epilogue, residual_out, pairs } = self.decoded(group, of)?;
        let (shape, mut why) = choice::product(&choice, &self.common.can.target);
        let (outputs, loose) = (choice.outputs, shape.loose(choice.outputs));
        let form = match choice.leaves_int8 {
            true if loose > 0 => Form::Mixed { loose },
            true => Form::Int8,
            false => Form::F32,
        };
        if of.norm.is_some() {
            why.reason += "; every block computes the norm before it, which is a launch less";
        }
        if loose > 0 {
            why.reason += &format!("; all blocks share out the last {loose} outputs, which are written as floats");
        }
        let out = match (form, group.last()) {
            (Form::Int8 | Form::Mixed { .. }, Some(joined)) => self.alloc_value(joined, form, 1),
            _ => self.product_output(group, of, outputs, 1),
        };
        let mut arguments: LaunchArguments<Span> = matvec::matvec::Arguments {
            codes: matrix.codes(),
            update_norm: arrival.update_norm,
            branch_norm: arrival.branch_norm,
            post_norm: arrival.post_norm,
            next_norm: arrival.next_norm,
            out: match form {
                Form::Int8 => Span::Unused,
                Form::Mixed { .. } => MixedSpan::of(out, outputs as u64, loose as u64).loose,
                _ => out,
            },
            rows: outputs,
            adapter: self.adapter_places(group, of, pairs)?,
        }
        .with_slot(slot::side, matrix.side());
        let of_epilogue = epilogue.into_iter().map(|filled| (slot::epilogue, filled));
        for (slot, filled) in arrival.slots.into_iter().chain(of_epilogue) {
            arguments = arguments.with_slot(slot, filled);
        }
        if choice.leaves_int8 {
            let Int8Span { codes, scales, sums } = MixedSpan::of(out, outputs as u64, loose as u64).whole;
            let kept = slots::leave_codes::Arguments { xq: codes, xscale: scales, xsum: sums };
            arguments = arguments.with_slot(slot::keep, kept);
        }
        let work = Work { bytes: matrix.bytes() + matrix.k as u64 * 4, flops: 2 * matrix.rows * matrix.k as u64 };
        // What it computes once more comes first: a value is compared where its owner writes it.
        let nodes = [&group.recomputes[..], &group.nodes[..]].concat();
        self.launch(choice.instance(shape)?, [shape.blocks, 1, 1], arguments, &nodes, work, why)?;
        if let Some((residual, sum)) = residual_out {
            self.record_output(residual, Form::F32, sum);
        }
        match (form, group.last()) {
            (Form::Int8 | Form::Mixed { .. }, Some(joined)) => self.record_output(joined, form, out),
            _ => self.record_product_outputs(group, of, out),
        }
        Ok(())
    }

    fn arrival_through_norm(&mut self, norm: &Norm, sum: Option<Span>) -> Result<Arrival, LowerError> {
        let next = match norm.next {
            Some((_, Some(weight))) => Some(self.common.weights.floats(weight)?),
            _ => None,
        };
        let input = slots::four_of::Arguments { x: self.floats(norm.input)?.start };
        let next_norm = next.unwrap_or_default();
        let Some(residual) = norm.residual else {
            let arrival = Arrival::without_norms(Prologue::Norm, vec![(slot::input, input.into())]);
            return Ok(Arrival { next_norm, ..arrival });
        };
        let x = slots::four_of::Arguments { x: self.floats(residual.before)?.start };
        let mut filled: Vec<(SlotKey, Filled<Span>)> = vec![(slot::input, x.into()), (slot::update, input.into())];
        let (mut update_norm, mut branch_norm) = Default::default();
        if let Some(branch) = residual.branch {
            filled.push((slot::branch, slots::four_of::Arguments { x: self.floats(branch.other)?.start }.into()));
            update_norm = self.common.weights.floats(branch.weight)?;
            branch_norm = self.common.weights.floats(branch.other_weight)?;
        }
        let post_norm = self.common.weights.floats(residual.post)?;
        if let Some(out) = sum {
            filled.push((slot::residual, slots::leave_residual::Arguments { out }.into()));
        }
        if let Some(weight) = residual.scale {
            let weight = self.common.weights.floats(weight)?;
            filled.push((slot::scale, slots::scaled_by::Arguments { weight }.into()));
        }
        let prologue = if next.is_some() { Prologue::ResidualNorm } else { Prologue::Residual };
        Ok(Arrival { prologue, update_norm, branch_norm, post_norm, next_norm, slots: filled })
    }

    pub fn epilogue(&self, group: &Group, epilogue: &[Epilogue]) -> Result<Vec<Filled<Span>>, LowerError> {
        let filled = |Epilogue { node, operand }: &Epilogue| match (self.graph().node(*node).op, operand) {
            (Op::Gelu, _) => Ok(Filled::alone(slots::then_gelu::DEF)),
            (Op::Scale { factor }, _) => Ok(slots::then_scale::Arguments { scale: factor }.into()),
            (Op::Softcap { cap }, _) => Ok(slots::then_softcap::Arguments { cap }.into()),
            (Op::Mul, Some(operand)) => Ok(slots::then_times::Arguments { by: self.operand(*operand)?.start }.into()),
            _ => Err(LowerError::NoValue { node: self.graph().full_name(group.nodes[0]) }),
        };
        epilogue.iter().map(filled).collect()
    }

    /// Another operand of a group: a value, or a slice of one that the group has taken over.
    pub fn operand(&self, node: NodeId) -> Result<Place, LowerError> {
        match self.graph().node(node).op {
            Op::Columns { first, len } if !self.has(node, Form::F32) => {
                let whole = self.floats(self.graph().node(node).inputs[0])?;
                let rows_after = |place: Place| place.start.skip(first as u64 * 4);
                let one_row = self.rows_of(self.fused().group(node)) == 1;
                let start = if one_row { rows_after(whole).take(len as u64 * 4) } else { rows_after(whole) };
                Ok(Place { start, stride: whole.stride, part: None })
            }
            _ => self.floats(node),
        }
    }

    /// Memory for a product's result: of several matrices side by side, each node a part of every row.
    pub fn product_output(&mut self, group: &Group, of: &Product, outputs: u32, rows: u32) -> Span {
        let result = match (of.epilogue.last(), of.geglu) {
            (Some(last), _) => Some(last.node),
            (None, true) => group.nodes.last().copied(),
            (None, false) => (of.matmuls.len() == 1).then(|| of.results()[0]),
        };
        if let Some(node) = result {
            return self.alloc_value(node, Form::F32, rows);
        }
        self.parts_of_rows(of, Form::F32, outputs, rows)
    }

    /// Memory for the results of several matrices, each a part of every row.
    fn parts_of_rows(&mut self, of: &Product, form: Form, outputs: u32, rows: u32) -> Span {
        let size = if form == Form::BF16 { 2 } else { 4 };
        let out = self.buffer(outputs as u64 * rows as u64 * size);
        let mut first = 0u64;
        for id in &of.results() {
            let width = self.graph().node(*id).ty.width as u64;
            let part = out.skip(first * size);
            let start = if rows == 1 { part.take(width * size) } else { part };
            self.bind_location(*id, form, Place { start, stride: outputs, part: None });
            first += width;
        }
        out
    }

    pub fn record_product_outputs(&mut self, group: &Group, of: &Product, out: Span) {
        if of.epilogue.is_empty() && !of.geglu && of.matmuls.len() > 1 {
            // Side by side: each a part of every row.
            let rows = self.rows_of(group) as u64;
            for id in &of.results() {
                if let Ok(place) = self.floats(*id) {
                    let width = self.graph().node(*id).ty.width as u64;
                    let elements = (rows - 1) * place.stride as u64 + width;
                    self.record_output(*id, Form::F32, place.start.take(elements * 4));
                }
            }
            return;
        }
        if let Some(last) = of.epilogue.last().map(|e| e.node).or(group.nodes.last().copied()) {
            self.record_output(last, Form::F32, out);
        }
    }

    /// The product of many rows: by warpgroups, or by warps where the GPU or the shape does not allow that.
    pub fn product_of_many_rows(&mut self, group: &Group, of: &Product) -> Result<(), LowerError> {
        if multiplies_exactly(self.schedule, &self.common.can, of) {
            return self.exact_product(group, of);
        }
        if self.schedule.is_gemm(group) {
            return self.gemm_product(group, of);
        }
        let x = match of.others.is_empty() {
            true => self.location(of.input, Form::BF16)?.start,
            false => self.stacked(of)?,
        };
        let weights = self.weights_of(of);
        if let Some(source) = self.schedule.source(of.matmuls[0]) {
            return self.product_by_warpgroups(group, of, &weights, source, x);
        }
        let rows = self.rows_of(group);
        let matrix = self.common.weights.matrix(&weights, &mut self.common.kernels)?;
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "rows are not whole groups of 32 values"));
        }
        let outputs = matrix.rows as u32;
        let tile = Tile::choose(rows, outputs, self.common.can.target.multiprocessors);
        let (dtype, k) = (matrix.dtype, matrix.k);
        let choice = product::Product { dtype, k, out: ElementType::F32, pairs: 0, epilogue: Vec::new() };
        let out = self.product_output(group, of, outputs, rows);
        let arguments = product::product::Arguments {
            codes: matrix.codes(),
            x,
            groups: Span::Unused,
            order: Span::Unused,
            state: self.row_count(group),
            out,
            outputs,
            k,
        };
        let arguments = arguments.with_slot(product::product::slot::side, matrix.side());
        let bytes = matrix.bytes() + rows as u64 * (k as u64 * 2 + outputs as u64 * 4);
        let work = Work { bytes, flops: 2 * rows as u64 * matrix.rows * k as u64 };
        let why = format!("{rows} rows: warps over weight planes, tiles of {} x {}", tile.rows, tile.columns);
        let none = self.schedule.note(group).unwrap_or("they are switched off");
        let why = Choice::because(why).over(format!("warpgroups: {none}"));
        self.launch(choice.instance(tile)?, tile.grid(rows, outputs), arguments, &group.nodes, work, why)?;
        self.record_product_outputs(group, of, out);
        Ok(())
    }

    fn product_by_warpgroups(
        &mut self,
        group: &Group,
        of: &Product,
        weights: &[WeightId],
        source: Source,
        x: Span,
    ) -> Result<(), LowerError> {
        let rows = self.rows_of(group);
        let k = self.graph().weight(weights[0]).dim(0) as u32;
        let all: u64 = weights.iter().map(|w| self.graph().weight(*w).dim(1)).sum();
        let (mut kind, tile, stored) =
            warpgroups::dense(self.graph(), of, of.geglu, rows, source, &self.common.can.target)
                .ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(of.matmuls[0]) })?;
        let rounded = !of.geglu && self.schedule.forms(of.matmuls[0]) == Outputs::BF16;
        let out = match (of.geglu, group.last()) {
            (true, Some(joined)) => self.alloc_value(joined, Form::BF16, rows),
            _ if rounded => {
                kind.out = ElementType::BF16;
                self.parts_of_rows(of, Form::BF16, stored, rows)
            }
            _ => self.product_output(group, of, stored, rows),
        };
        let state = self.row_count(group);
        let (groups, order, x_part) = (Span::Unused, Span::Unused, if kind.part_columns > 0 { rows * k } else { 0 });
        let part_columns = kind.part_columns;
        let copy = self.widened.get(&of.matmuls[0]).copied();
        let rest = WarpgroupOperands { copy, x, groups, order, state, out, outputs: stored, k, x_part, part_columns };
        let (arguments, read) = self.by_warpgroups(weights, source, tile, rest)?;
        let bytes = read + rows as u64 * (k as u64 * 2 + stored as u64 * 4);
        let work = Work { bytes, flops: 2 * rows as u64 * all * k as u64 };
        let from = if copy.is_some() { "over weights that a launch before dequantised" } else { source.words() };
        let why = format!("{rows} rows: warpgroups {from}, {}", tile.words());
        let why = Choice::because(why).over("warps over weight planes");
        let grid = kind.grid(tile, rows, stored, self.common.can.target.multiprocessors);
        self.launch(kind.instance(tile)?, grid, arguments, &group.nodes, work, why)?;
        match (of.geglu, group.last()) {
            (true, Some(joined)) => self.record_output(joined, Form::BF16, out),
            // Rows of bf16 with gaps are not compared with their meaning: what is computed from them is.
            _ if rounded => {}
            _ => self.record_product_outputs(group, of, out),
        }
        Ok(())
    }

    /// The arguments of a product by warpgroups, and the bytes of all weights that it may read.
    pub fn by_warpgroups(
        &mut self,
        weights: &[WeightId],
        source: Source,
        tile: WgmmaTile,
        rest: WarpgroupOperands,
    ) -> Result<(LaunchArguments<Span>, u64), LowerError> {
        let WarpgroupOperands { copy, x, groups, order, state, out, outputs, k, x_part, part_columns } = rest;
        let matrix = self.common.weights.matrix(weights, &mut self.common.kernels)?;
        Ok(match source {
            Source::Copy if tile.bulk => {
                let weights = self.copy_of(weights, copy)?;
                let arguments = product_tiles::Arguments { weights, x, k, state, out, outputs };
                (arguments.into(), matrix.rows * k as u64 * 2)
            }
            Source::Copy => {
                let weights = self.copy_of(weights, copy)?;
                let arguments = product_wgmma::Arguments {
                    weights,
                    x,
                    groups,
                    order,
                    state,
                    out,
                    outputs,
                    k,
                    x_part,
                    part_columns,
                };
                (arguments.into(), matrix.rows * k as u64 * 2)
            }
            Source::Planes(_) if tile.is_fed() => {
                let codes = matrix.codes();
                let arguments = product_fed::Arguments { codes, x, groups, order, state, out, outputs, k };
                (arguments.with_slot(product_fed::slot::side, matrix.side()), matrix.bytes())
            }
            Source::Planes(_) if tile.team > 0 => {
                let codes = matrix.codes();
                let arguments = product_team::Arguments { codes, x, groups, order, state, out, outputs, k };
                (arguments.with_slot(product_team::slot::side, matrix.side()), matrix.bytes())
            }
            Source::Planes(_) => {
                let codes = matrix.codes();
                let arguments = product_decoding::Arguments { codes, x, groups, order, state, out, outputs, k };
                (arguments.with_slot(product_decoding::slot::side, matrix.side()), matrix.bytes())
            }
        })
    }

    /// Weights as bf16: what a launch has just made, or the copy that the plan keeps.
    fn copy_of(&mut self, weights: &[WeightId], copy: Option<Span>) -> Result<Span, LowerError> {
        copy.map_or_else(|| self.common.weights.rounded(weights, &mut self.common.kernels), Ok)
    }

    /// Dequantises the weights of a product to bf16, in memory that is free again after the product: concurrently with
    /// the launches before it where there are not too many of them.
    pub fn widen_weights(&mut self, of: NodeId) -> Result<(), LowerError> {
        let owner = self.fused().group(of).clone();
        let no_value = || LowerError::NoValue { node: self.graph().full_name(of) };
        let product = product_of(self.graph(), &owner).ok_or_else(no_value)?;
        let weights = self.weights_of(&product);
        let matrix = self.common.weights.matrix(&weights, &mut self.common.kernels)?;
        let units = widen::units(matrix.dtype, matrix.rows, matrix.k as u64)
            .ok_or_else(|| self.no_kernel(&owner, &matrix, "it has too many values to be dequantised by one launch"))?;
        let values = matrix.rows * matrix.k as u64;
        let is_concurrent = runs_concurrently(values);
        let (out, grid) = if is_concurrent {
            let multiprocessors = self.common.can.target.multiprocessors;
            (self.buffer_in_turn(values * 2), widen::grid_beside(matrix.dtype, units, multiprocessors))
        } else {
            (self.buffer(values * 2), widen::grid(matrix.dtype, units))
        };
        let arguments = widen::widen::Arguments { codes: matrix.codes(), out, units }
            .with_slot(widen::widen::slot::side, matrix.side());
        let work = Work { bytes: matrix.bytes() + values * 2, flops: 0 };
        let way = if is_concurrent { ", concurrently with the launches before it" } else { "" };
        let rows = self.rows_of(&owner);
        let why = format!("{rows} rows: dequantised to bf16 ahead of the product, which is faster than in it{way}");
        let why = Choice::because(why).over("dequantising in the product");
        self.launch(widen::instance(matrix.dtype)?, grid, arguments, &[], work, why)?;
        if is_concurrent {
            self.fork_last_launch();
        }
        self.widened.insert(of, out);
        Ok(())
    }

    /// `gelu(gate) * up` of many rows, after the product that made them.
    pub fn geglu(&mut self, group: &Group, gate: NodeId, up: NodeId) -> Result<(), LowerError> {
        let node = group.last().ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(gate) })?;
        let (gate, up) = (self.floats(gate)?, self.floats(up)?);
        let outputs = if self.schedule.forms(node).bf16 { Outputs::BF16 } else { Outputs::FLOATS };
        // Of experts a row has several, one after the other.
        let all = self.graph().node(node).ty.width;
        let width = gate.part.unwrap_or(all);
        let rows = self.rows_of(group) * (all / width);
        let instance = if gate.stride == up.stride { geglu::instance(outputs)? } else { per_layer::gate(outputs)? };
        let grid = geglu::grid(&instance, width, rows);
        let out = self.row_outputs(node, outputs, self.rows_of(group));
        let arguments = geglu::geglu::Arguments {
            gate: geglu::StridedRowsArguments { values: gate.start, stride: gate.stride },
            up: geglu::StridedRowsArguments { values: up.start, stride: up.stride },
            out: out.arguments(),
            width,
        };
        let work = Work { bytes: rows as u64 * width as u64 * 10, flops: 0 };
        self.launch(instance, grid, arguments, &group.nodes, work, "many rows: after the product")?;
        self.record_row_outputs(node, &out);
        Ok(())
    }
}
