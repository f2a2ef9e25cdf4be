//! Gathers, and operations that no pass has fused: each a launch of its own, plainly and in f32.

use gemma4c_dsl::{ElementType, Filled};
use gemma4c_graph::{CacheId, Elem, Form as ValueForm, Group, NodeId, Op, PerLayerInputs, Product, WeightId};
use gemma4c_plan::cuda::{Form, Range, Region};

use super::error::LowerError;
use super::launch::{Int8Span, Span};
use super::phase::{PhaseBuilder, Place, RoutingPlace, Work};
use crate::kernels::matvec::slots;
use crate::kernels::plain::{experts, map, product, rope, rows};
use crate::kernels::product::{round_rows, round_rows_instance};
use crate::kernels::tower::sound;
use crate::kernels::values::value_arguments;
use crate::kernels::{gather, norm, per_layer, quantise, tower};
use crate::passes::product_of;

const ALONE: &str = "not fused: the plain kernel";

/// Rows of f32 that are read and written.
fn values_work(rows: u32, width: u32) -> Work {
    Work { bytes: rows as u64 * width as u64 * 8, flops: 0 }
}

impl PhaseBuilder<'_, '_> {
    /// Rows of a table, by token.
    pub fn gather(&mut self, group: &Group, table: WeightId, factor: f32) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let out = self.gathered(node, table, factor, group)?;
        self.record_output(node, Form::F32, out);
        Ok(())
    }

    fn gathered(&mut self, node: NodeId, table: WeightId, factor: f32, group: &Group) -> Result<Span, LowerError> {
        let w = self.graph().weight(table);
        let (dtype, width, vocabulary) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32);
        let rows = self.rows_of(group);
        let instance = gather::instance(dtype)?;
        let out = self.alloc_value(node, Form::F32, rows);
        let arguments = gather::gather::Arguments {
            tokens: self.tokens(),
            out,
            width,
            vocabulary,
            scale: factor,
            token_stride: self.token_stride(),
        }
        .with_slot(gather::gather::slot::value, value_arguments(dtype, self.common.weights.blocks(table)));
        let bytes = rows as u64 * dtype.row_bytes(width as u64).unwrap_or(0);
        let grid = gather::grid(&instance, width, rows);
        self.launch(instance, grid, arguments, &group.nodes, Work { bytes, flops: 0 }, "rows by token")?;
        Ok(out)
    }

    /// The per-layer inputs of each token, for all layers.
    pub fn per_layer_inputs(&mut self, group: &Group, of: &PerLayerInputs) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let rows = self.rows_of(group);
        let layers = self.graph().node(node).ty.width / of.width;
        let w = self.graph().weight(of.table);
        let (dtype, vocabulary) = (w.dtype, w.dim(1) as u32);
        let instance = per_layer::inputs(of.width, dtype)?;
        let out = self.alloc_value(node, Form::F32, rows);
        let table = self.common.weights.blocks(of.table);
        let arguments = per_layer::per_layer_inputs::Arguments {
            projected: self.floats(of.projected)?.start,
            rows: per_layer::TokenRowsArguments { tokens: self.tokens(), stride: self.token_stride() },
            weight: self.common.weights.floats(of.norm)?,
            out,
            layers,
            vocabulary,
            scales: per_layer::InputScalesArguments {
                projected: of.projected_scale,
                gathered: of.row_scale,
                out: of.out_scale,
            },
            epsilon: of.eps,
        };
        let arguments = arguments.with_slot(per_layer::per_layer_inputs::slot::value, value_arguments(dtype, table));
        let width = layers as u64 * of.width as u64;
        let bytes = rows as u64 * (width * 8 + dtype.row_bytes(width).unwrap_or(0));
        let grid = per_layer::grid(&instance, layers, rows);
        let why = "norm, table row and sum for all layers";
        self.launch(instance, grid, arguments, &group.nodes, Work { bytes, flops: 0 }, why)?;
        self.record_output(node, Form::F32, out);
        Ok(())
    }

    /// An operation that no pass has touched.
    pub fn single(&mut self, group: &Group) -> Result<(), LowerError> {
        let id = group.nodes[0];
        let node = self.graph().node(id);
        let x = node.inputs.first().copied();
        match node.op {
            // Views, which launch nothing, are groups of another kind.
            Op::Tokens
            | Op::Columns { .. }
            | Op::Patches { .. }
            | Op::Hidden { .. }
            | Op::BorrowKv { .. }
            | Op::Concat
            | Op::Candidates { .. } => Err(LowerError::NoValue { node: self.graph().full_name(id) }),
            Op::PlaceSoft
            | Op::AxisRows { .. }
            | Op::SubMean { .. }
            | Op::GridMean { .. }
            | Op::GridRope { .. }
            | Op::HalvingConv { .. }
            | Op::CausalConv { .. }
            | Op::NearAttention { .. }
            | Op::FullAttention { .. } => self.of_patches(group, id),
            Op::AddConstant { term } => self.map(group, x, tower::then_plus::Arguments { term }),
            Op::AddWeight { weight } => {
                let (term, terms) = self.terms(weight)?;
                self.map(group, x, tower::then_plus_weight::Arguments { term, terms })
            }
            Op::AtLeast { weight } => {
                let (low, lows) = self.terms(weight)?;
                self.map(group, x, tower::then_at_least::Arguments { low, lows })
            }
            Op::AtMost { weight } => {
                let (high, highs) = self.terms(weight)?;
                self.map(group, x, tower::then_at_most::Arguments { high, highs })
            }
            Op::Sigmoid => self.map(group, x, Filled::alone(sound::then_sigmoid::DEF)),
            Op::Relu => self.map(group, x, Filled::alone(sound::then_relu::DEF)),
            Op::GatherText { .. } | Op::SpreadTokens { .. } | Op::AttentionBefore { .. } => {
                Err(LowerError::OnCpuAlone { node: self.graph().full_name(id), op: node.op.name() })
            }
            Op::Gather { table } => self.gather(group, table, 1.0),
            Op::MatMul { .. } => match product_of(self.graph(), group) {
                Some(product) if self.common.can.exact => self.exact_product(group, &product),
                Some(product) if self.schedule.is_int8_row(group) => self.decoded_product(group, &product),
                Some(product) => self.product_of_many_rows(group, &product),
                None => Err(LowerError::NoValue { node: self.graph().full_name(id) }),
            },
            // The kernels of one row know no picture: its rows are not asked for alone.
            Op::AttentionAhead { .. } if self.is_one_row(group) => {
                Err(LowerError::OnCpuAlone { node: self.graph().full_name(id), op: node.op.name() })
            }
            Op::Attention { .. } | Op::AttentionAhead { .. } => self.attention(group, id),
            Op::TakeAsked => self.take_asked(group, id),
            Op::RmsNorm { weight, group: length, eps } => self.plain_norm(group, id, weight, length, eps),
            Op::Scale { factor } => self.map(group, x, slots::then_scale::Arguments { scale: factor }),
            Op::Gelu => self.map(group, x, Filled::alone(slots::then_gelu::DEF)),
            Op::Softcap { cap } => self.map(group, x, slots::then_softcap::Arguments { cap }),
            Op::MulWeight { weight } => {
                // It may repeat within a row, whose length is a multiple of its own.
                let (vector, length) = self.terms(weight)?;
                if length == 1 {
                    self.map(group, x, slots::then_scale_by::Arguments { scale: vector })
                } else {
                    self.map(group, x, map::then_times_weight::Arguments { weight: vector, width: length })
                }
            }
            Op::Add => {
                let addend = self.whole_rows(node.inputs[1])?;
                self.map(group, x, slots::then_add::Arguments { addend })
            }
            Op::Mul => {
                let by = self.floats(node.inputs[1])?;
                let width = node.ty.width;
                if by.stride == width || self.rows_of(group) == 1 {
                    self.map(group, x, slots::then_times::Arguments { by: by.start })
                } else {
                    let part = map::then_times_part::Arguments { part: by.start, width, stride: by.stride };
                    self.map(group, x, part)
                }
            }
            Op::Rope { head_dim, base, factors } => self.rotation(group, id, head_dim, base, factors),
            Op::KvAppend { cache } => self.kv_append(group, id, cache),
            Op::TokenMatMul { weight } => self.token_scores(id, weight),
            Op::Route { top_k } if self.drafter_places().is_some() => self.closest_groups(id, top_k),
            Op::Route { top_k } => self.top_k_softmax(group, id, top_k),
            Op::Narrow { weight, factor } => self.narrow(group, id, weight, factor),
            Op::Widen { weight } => self.widen(group, id, weight),
            Op::ExpertMatMul { weight, first, len } => self.plain_expert_product(group, id, weight, first..first + len),
            Op::ExpertSum { scale } => {
                let x = self.whole_rows(node.inputs[0])?;
                let of_experts = self.has_sorted(node.inputs[1]);
                let why = if of_experts { "many rows: a row's choices come together in their order" } else { ALONE };
                self.expert_sum(group, id, x, node.inputs[1], scale, why)
            }
        }
    }

    /// The asked row of a chunk.
    fn take_asked(&mut self, group: &Group, id: NodeId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let (width, state) = (node.ty.width, self.state(group));
        let work = values_work(self.rows_of(group), width);
        let x = self.whole_rows(node.inputs[0])?;
        let out = self.alloc_value(id, Form::F32, 1);
        let arguments = rows::take_row::Arguments { x, asked: state, out, width };
        self.launch(rows::take()?, rows::take_grid(width), arguments, &[id], work, "the asked row")?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// A norm of `length` values at a time.
    fn plain_norm(
        &mut self,
        group: &Group,
        id: NodeId,
        weight: Option<WeightId>,
        length: u32,
        eps: f32,
    ) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let (rows, width) = (self.rows_of(group), node.ty.width);
        let work = values_work(rows, width);
        let x = self.whole_rows(node.inputs[0])?;
        let by = match weight {
            Some(weight) => self.common.weights.floats(weight)?,
            None => Span::Unused,
        };
        let out = self.alloc_value(id, Form::F32, rows);
        let arguments = norm::rms_norm_plain::Arguments { x, weight: by, out, width: length, epsilon: eps };
        let grid = [rows * (width / length), 1, 1];
        self.launch(norm::plain(weight.is_some())?, grid, arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// Heads rotated by their rows' positions.
    fn rotation(
        &mut self,
        group: &Group,
        id: NodeId,
        head_dim: u32,
        base: f32,
        factors: Option<WeightId>,
    ) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let (rows, width, state) = (self.rows_of(group), node.ty.width, self.state(group));
        let work = values_work(rows, width);
        let x = self.whole_rows(node.inputs[0])?;
        let angles = gemma4c_graph::Heads { dim: head_dim, base, factors, eps: 0.0, q: None, kv: None };
        let inverse_frequencies = self.frequencies(&angles)?;
        let out = self.alloc_value(id, Form::F32, rows);
        let heads = width / head_dim;
        let arguments = rope::rope::Arguments {
            x,
            inverse_frequencies,
            state,
            out,
            heads,
            dim: head_dim,
            record_stride: self.record_stride(group),
        };
        let grid = rope::grid(heads, head_dim, rows);
        self.launch(rope::rotation()?, grid, arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// Keys and values of the rows into their cache, or its stage.
    fn kv_append(&mut self, group: &Group, id: NodeId, cache: CacheId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let (rows, width, state) = (self.rows_of(group), node.ty.width, self.state(group));
        let work = values_work(rows, width);
        let (k, v) = (self.whole_rows(node.inputs[0])?, self.whole_rows(node.inputs[1])?);
        let place = self.store_place(group, cache)?;
        let (record_stride, dim) = (self.record_stride(group), self.graph().cache(cache).head_dim);
        let kv = place.view_mut();
        let arguments = rows::kv_store::Arguments { k, v, state, record_stride, width, dim, kv };
        let instance = rows::store(self.common.can.kv)?;
        self.launch(instance, rows::store_grid(width, rows), arguments, &[id], work, ALONE)?;
        self.record_stage(id, cache);
        Ok(())
    }

    /// The experts of each row, and their weights.
    fn top_k_softmax(&mut self, group: &Group, id: NodeId, top_k: u32) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let rows = self.rows_of(group);
        let work = values_work(rows, node.ty.width);
        let logits = self.whole_rows(node.inputs[0])?;
        let Elem::Routing { experts: count } = node.ty.elem else {
            return Err(LowerError::NoValue { node: self.graph().full_name(id) });
        };
        let pairs = rows as u64 * top_k as u64 * 4;
        let place = RoutingPlace { ids: self.buffer(pairs), weights: self.buffer(pairs) };
        let arguments = experts::top_k_softmax::Arguments { logits, ids: place.ids, weights: place.weights };
        self.launch(experts::choice(count, top_k)?, [rows, 1, 1], arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::Experts, place.ids);
        self.bind_routing(id, place);
        Ok(())
    }

    /// A matrix of the experts that each row has chosen, straight from the file's blocks.
    fn plain_expert_product(
        &mut self,
        group: &Group,
        id: NodeId,
        weight: WeightId,
        outputs: std::ops::Range<u32>,
    ) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let (rows, width) = (self.rows_of(group), node.ty.width);
        let (x, routing) = (self.whole_rows(node.inputs[0])?, self.routing(node.inputs[1])?);
        let w = self.graph().weight(weight);
        let (dtype, k, height) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32);
        let top = width / outputs.len() as u32;
        // One row for all choices, or one for each.
        let pairs_a_row = if self.graph().node(node.inputs[0]).ty.width == k { top } else { 1 };
        let out = self.alloc_value(id, Form::F32, rows);
        let arguments = experts::expert_product::Arguments {
            x,
            ids: routing.ids,
            state: self.row_count(group),
            out,
            matrix: experts::ExpertRowsArguments { k, height, first: outputs.start, outputs: outputs.len() as u32 },
            top,
            pairs_a_row,
        };
        let values = value_arguments(dtype, self.common.weights.blocks(weight));
        let arguments = arguments.with_slot(experts::expert_product::slot::value, values);
        let flops = 2 * rows as u64 * width as u64 * k as u64;
        let work = Work { bytes: flops / 2, flops };
        let grid = experts::product_grid(outputs.len() as u32, top, rows);
        self.launch(experts::product(dtype)?, grid, arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// The results of a row's experts, weighed and added in the order they were chosen in.
    pub fn expert_sum(
        &mut self,
        group: &Group,
        node: NodeId,
        x: Span,
        routing: NodeId,
        scale: Option<WeightId>,
        why: &str,
    ) -> Result<(), LowerError> {
        let (rows, state, width) = (self.rows_of(group), self.row_count(group), self.graph().node(node).ty.width);
        let (place, top) = (self.routing(routing)?, self.graph().node(routing).ty.width);
        let expert_scale = match scale {
            Some(weight) => self.common.weights.floats(weight)?,
            None => Span::Unused,
        };
        let out = self.alloc_value(node, Form::F32, rows);
        let RoutingPlace { ids, weights } = place;
        let arguments = experts::expert_sum::Arguments { x, ids, weights, expert_scale, state, out, width, top };
        let work = Work { bytes: rows as u64 * width as u64 * 4 * (top as u64 + 1), flops: 0 };
        let grid = experts::sum_grid(width, rows);
        self.launch(experts::sum(scale.is_some())?, grid, arguments, &[node], work, why)?;
        self.record_output(node, Form::F32, out);
        Ok(())
    }

    /// An element-wise function over a value's rows.
    fn map(&mut self, group: &Group, x: Option<NodeId>, function: impl Into<Filled<Span>>) -> Result<(), LowerError> {
        let function = function.into();
        let id = group.nodes[group.nodes.len() - 1];
        let (rows, width) = (self.rows_of(group), self.graph().node(id).ty.width);
        let x = x.ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(id) })?;
        let from = self.floats(x)?;
        let out = self.alloc_value(id, Form::F32, rows);
        let x_stride = if rows == 1 { width } else { from.stride };
        let instance = map::instance(&[function.function])?;
        let arguments =
            map::map::Arguments { x: from.start, out, width, x_stride }.with_slot(map::map::slot::chain, function);
        let work = values_work(rows, width);
        self.launch(instance, map::grid(width, rows), arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// A weight vector as wide as a row, or of one element, and its length.
    fn terms(&mut self, weight: WeightId) -> Result<(Span, u32), LowerError> {
        let length = self.graph().weight(weight).dim(0) as u32;
        Ok((self.common.weights.floats(weight)?, length))
    }

    /// A value that is part of another.
    pub fn view(&mut self, id: NodeId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        match node.op {
            Op::Tokens | Op::BorrowKv { .. } | Op::Candidates { .. } => Ok(()),
            Op::Hidden { .. } | Op::Concat => self.drafters_view(id),
            Op::Patches { width } => {
                let missing = || LowerError::NoValue { node: self.graph().full_name(id) };
                let offset = self.common.tower.ok_or_else(missing)?.patches;
                let bytes = self.rows() as u64 * width as u64 * 4;
                let start = Span::Fixed(Range { region: Region::Arena, offset, bytes });
                self.bind_location(id, Form::F32, Place { start, stride: width, part: None });
                Ok(())
            }
            Op::Columns { first, .. } => {
                let whole = self.floats(node.inputs[0])?;
                let start = whole.start.skip(first as u64 * 4);
                let one_row = self.rows_of(self.fused().group(id)) == 1;
                let start = if one_row { start.take(node.ty.width as u64 * 4) } else { start };
                self.bind_location(id, Form::F32, Place { start, ..whole });
                Ok(())
            }
            Op::TakeAsked => {
                let row = self.floats(node.inputs[0])?;
                self.bind_location(id, Form::F32, row);
                Ok(())
            }
            _ => Err(LowerError::NoValue { node: self.graph().full_name(id) }),
        }
    }

    /// A value in another form, where its producer could not write that.
    pub fn convert(&mut self, group: &Group, node: NodeId, form: ValueForm) -> Result<(), LowerError> {
        let (rows, width, state) = (self.rows_of(group), self.graph().node(node).ty.width, self.row_count(group));
        let from = self.floats(node)?;
        let bytes = rows as u64 * width as u64 * 4;
        let work = Work { bytes: bytes * 2, flops: 0 };
        let blocks = [(bytes / 4).div_ceil(2048).clamp(1, 1024) as u32, 1, 1];
        match form {
            ValueForm::F32 => {
                let out = self.alloc_value(node, Form::F32, rows);
                let arguments = map::map::Arguments { x: from.start, out, width, x_stride: from.stride };
                let why = "its reader takes whole rows";
                self.launch(map::instance(&[])?, map::grid(width, rows), arguments, &[], work, why)
            }
            ValueForm::BF16 | ValueForm::F16 => {
                let (form, to, why) = match form {
                    ValueForm::F16 => (Form::F16, ElementType::F16, "its producer writes no f16"),
                    _ => (Form::BF16, ElementType::BF16, "its producer writes no bf16"),
                };
                let out = self.alloc_value(node, form, rows);
                let x = self.whole_rows(node)?.take(bytes);
                let arguments = round_rows::Arguments { x, state, out, width };
                self.launch(round_rows_instance(to)?, blocks, arguments, &[], work, why)
            }
            ValueForm::Int8 => {
                let out = self.alloc_value(node, Form::Int8, rows);
                let x = self.whole_rows(node)?.take(bytes);
                let Int8Span { codes: xq, scales: xscale, sums: xsum } = Int8Span::of(out, bytes / 4);
                let arguments = quantise::quantise::Arguments { x, state, xq, xscale, xsum };
                self.launch(quantise::instance(width)?, blocks, arguments, &[], work, "its producer writes no int8")
            }
        }
    }

    /// A product in f32 over the file's blocks: the reference lowering.
    pub fn exact_product(&mut self, group: &Group, of: &Product) -> Result<(), LowerError> {
        let rows = self.rows_of(group);
        let no_matrix = || LowerError::NoValue { node: self.graph().full_name(group.anchor()) };
        let [id] = of.matmuls[..] else { return Err(no_matrix()) };
        let weight = self.graph().node(id).op.weight().ok_or_else(no_matrix)?;
        let w = self.graph().weight(weight);
        let (dtype, k, outputs) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32);
        let x = self.whole_rows(of.input)?;
        let out = self.alloc_value(id, Form::F32, rows);
        let values = value_arguments(dtype, self.common.weights.blocks(weight));
        let arguments = product::matmul_exact::Arguments { x, out, k, outputs }
            .with_slot(product::matmul_exact::slot::value, values);
        let flops = 2 * rows as u64 * outputs as u64 * k as u64;
        let work = Work { bytes: w.bytes().unwrap_or(0), flops };
        let grid = product::grid(outputs, rows);
        self.launch(product::instance(dtype)?, grid, arguments, &group.nodes, work, "exact: f32")?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }
}
