//! Gathers, and operations that no pass has fused: each a launch of its own, plainly and in f32.

use gemma4c_dsl::DeviceDef;
use gemma4c_graph::{Elem, Form as ValueForm, Group, NodeId, Op, PerLayerInputs, Product, WeightId};
use gemma4c_plan::cuda::Form;

use super::LowerError;
use super::launch::Arg;
use super::phase::{PhaseBuilder, Place, RoutingPlace, Work, int8_arguments};
use crate::kernels::matvec::slots;
use crate::kernels::plain::{experts, map, product, rope, rows};
use crate::kernels::product::round_rows_instance;
use crate::kernels::{gather, kv_element, norm, per_layer, quantise};
use crate::passes::product_of;

const ALONE: &str = "not fused: the plain kernel";

impl PhaseBuilder<'_, '_> {
    /// Rows of a table, by token.
    pub fn gather(&mut self, group: &Group, table: WeightId, factor: f32) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let out = self.gathered(node, table, factor, group)?;
        self.record_output(node, Form::F32, out);
        Ok(())
    }

    fn gathered(&mut self, node: NodeId, table: WeightId, factor: f32, group: &Group) -> Result<Arg, LowerError> {
        let w = self.graph().weight(table);
        let (dtype, width, vocabulary) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32);
        let rows = self.rows_of(group);
        let instance = gather::instance(dtype)?;
        let out = self.alloc_value(node, Form::F32, rows);
        let arguments = [
            ("tokens", self.tokens()),
            ("value_tensor", self.common.weights.blocks(table)),
            ("out", out),
            ("width", Arg::U32(width)),
            ("vocabulary", Arg::U32(vocabulary)),
            ("scale", Arg::F32(factor)),
        ];
        let bytes = rows as u64 * dtype.row_bytes(width as u64).unwrap_or(0);
        let grid = gather::grid(&instance, width, rows);
        self.launch(instance, grid, &arguments, &group.nodes, Work { bytes, flops: 0 }, "rows by token")?;
        Ok(out)
    }

    /// What all layers are told of each token.
    pub fn per_layer_inputs(&mut self, group: &Group, of: &PerLayerInputs) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let rows = self.rows_of(group);
        let layers = self.graph().node(node).ty.width / of.width;
        let w = self.graph().weight(of.table);
        let (dtype, vocabulary) = (w.dtype, w.dim(1) as u32);
        let instance = per_layer::inputs(of.width, dtype)?;
        let out = self.alloc_value(node, Form::F32, rows);
        let arguments = [
            ("projected", self.floats(of.projected)?.start),
            ("tokens", self.tokens()),
            ("value_tensor", self.common.weights.blocks(of.table)),
            ("weight", self.common.weights.floats(of.norm)?),
            ("out", out),
            ("layers", Arg::U32(layers)),
            ("vocabulary", Arg::U32(vocabulary)),
            ("projected_scale", Arg::F32(of.projected_scale)),
            ("gathered_scale", Arg::F32(of.row_scale)),
            ("out_scale", Arg::F32(of.out_scale)),
            ("epsilon", Arg::F32(of.eps)),
        ];
        let width = layers as u64 * of.width as u64;
        let bytes = rows as u64 * (width * 8 + dtype.row_bytes(width).unwrap_or(0));
        let grid = per_layer::grid(&instance, layers, rows);
        let why = "norm, table row and sum for all layers";
        self.launch(instance, grid, &arguments, &group.nodes, Work { bytes, flops: 0 }, why)?;
        self.record_output(node, Form::F32, out);
        Ok(())
    }

    /// An operation that no pass has touched.
    pub fn single(&mut self, group: &Group) -> Result<(), LowerError> {
        let id = group.nodes[0];
        let node = self.graph().node(id);
        let (rows, width, state) = (self.rows_of(group), node.ty.width, self.state(group));
        let work = Work { bytes: rows as u64 * width as u64 * 8, flops: 0 };
        let x = node.inputs.first().copied();
        let pointwise = |function: &'static DeviceDef| vec![function];
        match node.op {
            Op::Tokens | Op::Columns { .. } => self.view(id),
            Op::Gather { table } => self.gather(group, table, 1.0),
            Op::MatMul { .. } => match product_of(self.graph(), group) {
                Some(product) if self.common.can.exact => self.exact_product(group, &product),
                Some(product) if self.is_one_row(group) => self.product_of_one_row(group, &product),
                Some(product) => self.product_of_many_rows(group, &product),
                None => Err(LowerError::NoValue { node: self.graph().full_name(id) }),
            },
            Op::Attention { .. } => self.attention(group, id),
            Op::TakeAsked => {
                let from = self.whole_rows(node.inputs[0])?;
                let out = self.alloc_value(id, Form::F32, 1);
                let arguments = [("x", from), ("asked", state), ("out", out), ("width", Arg::U32(width))];
                self.launch(rows::take()?, rows::take_grid(width), &arguments, &[id], work, "the asked row")?;
                self.record_output(id, Form::F32, out);
                Ok(())
            }
            Op::RmsNorm { weight, group: length, eps } => {
                let x = self.whole_rows(node.inputs[0])?;
                let weight_arg = match weight {
                    Some(weight) => self.common.weights.floats(weight)?,
                    None => Arg::Unused,
                };
                let out = self.alloc_value(id, Form::F32, rows);
                let arguments = [
                    ("x", x),
                    ("weight", weight_arg),
                    ("out", out),
                    ("width", Arg::U32(length)),
                    ("epsilon", Arg::F32(eps)),
                ];
                let grid = [rows * (width / length), 1, 1];
                self.launch(norm::plain(weight.is_some())?, grid, &arguments, &[id], work, ALONE)?;
                self.record_output(id, Form::F32, out);
                Ok(())
            }
            Op::Scale { factor } => {
                self.map(group, x, pointwise(slots::then_scale::DEF), &[("chain_scale", Arg::F32(factor))])
            }
            Op::Gelu => self.map(group, x, pointwise(slots::then_gelu::DEF), &[]),
            Op::Softcap { cap } => {
                self.map(group, x, pointwise(slots::then_softcap::DEF), &[("chain_cap", Arg::F32(cap))])
            }
            Op::MulWeight { weight } => {
                let vector = self.common.weights.floats(weight)?;
                if self.graph().weight(weight).dims == [1] {
                    self.map(group, x, pointwise(slots::then_scale_by::DEF), &[("chain_scale", vector)])
                } else {
                    let arguments = [("chain_weight", vector), ("chain_width", Arg::U32(width))];
                    self.map(group, x, pointwise(map::then_times_weight::DEF), &arguments)
                }
            }
            Op::Add => {
                let addend = self.whole_rows(node.inputs[1])?;
                self.map(group, x, pointwise(slots::then_add::DEF), &[("chain_addend", addend)])
            }
            Op::Mul => {
                let by = self.floats(node.inputs[1])?;
                if by.stride == width || rows == 1 {
                    self.map(group, x, pointwise(slots::then_times::DEF), &[("chain_by", by.start)])
                } else {
                    let arguments = [
                        ("chain_part", by.start),
                        ("chain_width", Arg::U32(width)),
                        ("chain_stride", Arg::U32(by.stride)),
                    ];
                    self.map(group, x, pointwise(map::then_times_part::DEF), &arguments)
                }
            }
            Op::Rope { head_dim, base, factors } => {
                let x = self.whole_rows(node.inputs[0])?;
                let angles = gemma4c_graph::Heads { dim: head_dim, base, factors, eps: 0.0, q: None, kv: None };
                let frequencies = self.frequencies(&angles)?;
                let out = self.alloc_value(id, Form::F32, rows);
                let heads = width / head_dim;
                let arguments = [
                    ("x", x),
                    ("inverse_frequencies", frequencies),
                    ("state", state),
                    ("out", out),
                    ("heads", Arg::U32(heads)),
                    ("dim", Arg::U32(head_dim)),
                ];
                let grid = rope::grid(heads, head_dim, rows);
                self.launch(rope::rotation()?, grid, &arguments, &[id], work, ALONE)?;
                self.record_output(id, Form::F32, out);
                Ok(())
            }
            Op::KvAppend { cache } => {
                let (k, v) = (self.whole_rows(node.inputs[0])?, self.whole_rows(node.inputs[1])?);
                let (k_cache, v_cache) = self.cache(cache);
                let arguments = [
                    ("k", k),
                    ("v", v),
                    ("state", state),
                    ("k_cache", k_cache),
                    ("v_cache", v_cache),
                    ("width", Arg::U32(width)),
                    ("capacity", Arg::U32(self.common.can.capacity(self.graph().cache(cache)))),
                ];
                let instance = rows::store(kv_element(self.common.can.kv))?;
                self.launch(instance, rows::store_grid(width, rows), &arguments, &[id], work, ALONE)
            }
            Op::Route { top_k } => {
                let logits = self.whole_rows(node.inputs[0])?;
                let Elem::Routing { experts: count } = node.ty.elem else {
                    return Err(LowerError::NoValue { node: self.graph().full_name(id) });
                };
                let pairs = rows as u64 * top_k as u64 * 4;
                let place = RoutingPlace { ids: self.buffer(pairs), weights: self.buffer(pairs) };
                let arguments = [("logits", logits), ("ids", place.ids), ("weights", place.weights)];
                self.launch(experts::choice(count, top_k)?, [rows, 1, 1], &arguments, &[id], work, ALONE)?;
                self.record_output(id, Form::Experts, place.ids);
                self.bind_routing(id, place);
                Ok(())
            }
            Op::ExpertMatMul { weight, part } => {
                let (x, routing) = (self.whole_rows(node.inputs[0])?, self.routing(node.inputs[1])?);
                let w = self.graph().weight(weight);
                let (dtype, k, height) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32);
                let top = width / part.len;
                // One row for all choices, or one for each.
                let pairs_a_row = if self.graph().node(node.inputs[0]).ty.width == k { top } else { 1 };
                let out = self.alloc_value(id, Form::F32, rows);
                let arguments = [
                    ("x", x),
                    ("ids", routing.ids),
                    ("state", state),
                    ("out", out),
                    ("k", Arg::U32(k)),
                    ("height", Arg::U32(height)),
                    ("first", Arg::U32(part.first)),
                    ("outputs", Arg::U32(part.len)),
                    ("top", Arg::U32(top)),
                    ("pairs_a_row", Arg::U32(pairs_a_row)),
                    ("value_tensor", self.common.weights.blocks(weight)),
                ];
                let flops = 2 * rows as u64 * width as u64 * k as u64;
                let work = Work { bytes: flops / 2, flops };
                let grid = experts::product_grid(part.len, top, rows);
                self.launch(experts::product(dtype)?, grid, &arguments, &[id], work, ALONE)?;
                self.record_output(id, Form::F32, out);
                Ok(())
            }
            Op::ExpertSum { scale } => {
                let x = self.whole_rows(node.inputs[0])?;
                let of_experts = self.has_sorted(node.inputs[1]);
                let why = if of_experts { "many rows: a row's choices come together in their order" } else { ALONE };
                self.expert_sum(group, id, x, node.inputs[1], scale, why)
            }
        }
    }

    /// The results of a row's experts, weighed and added in the order they were chosen in.
    pub fn expert_sum(
        &mut self,
        group: &Group,
        node: NodeId,
        x: Arg,
        routing: NodeId,
        scale: Option<WeightId>,
        why: &str,
    ) -> Result<(), LowerError> {
        let (rows, state, width) = (self.rows_of(group), self.state(group), self.graph().node(node).ty.width);
        let (place, top) = (self.routing(routing)?, self.graph().node(routing).ty.width);
        let scale_arg = match scale {
            Some(weight) => self.common.weights.floats(weight)?,
            None => Arg::Unused,
        };
        let out = self.alloc_value(node, Form::F32, rows);
        let arguments = [
            ("x", x),
            ("ids", place.ids),
            ("weights", place.weights),
            ("expert_scale", scale_arg),
            ("state", state),
            ("out", out),
            ("width", Arg::U32(width)),
            ("top", Arg::U32(top)),
        ];
        let work = Work { bytes: rows as u64 * width as u64 * 4 * (top as u64 + 1), flops: 0 };
        let grid = experts::sum_grid(width, rows);
        self.launch(experts::sum(scale.is_some())?, grid, &arguments, &[node], work, why)?;
        self.record_output(node, Form::F32, out);
        Ok(())
    }

    /// An element-wise chain over a value's rows.
    fn map(
        &mut self,
        group: &Group,
        x: Option<NodeId>,
        chain: Vec<&'static DeviceDef>,
        more: &[(&'static str, Arg)],
    ) -> Result<(), LowerError> {
        let id = group.nodes[group.nodes.len() - 1];
        let (rows, width) = (self.rows_of(group), self.graph().node(id).ty.width);
        let x = x.ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(id) })?;
        let from = self.floats(x)?;
        let out = self.alloc_value(id, Form::F32, rows);
        let mut arguments = vec![
            ("x", from.start),
            ("out", out),
            ("width", Arg::U32(width)),
            ("x_stride", Arg::U32(if rows == 1 { width } else { from.stride })),
        ];
        arguments.extend(more);
        let work = Work { bytes: rows as u64 * width as u64 * 8, flops: 0 };
        self.launch(map::instance(&chain)?, map::grid(width, rows), &arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// A value that lies within another.
    pub fn view(&mut self, id: NodeId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        match node.op {
            Op::Tokens => Ok(()),
            Op::Columns { first, .. } => {
                let whole = self.floats(node.inputs[0])?;
                let start = whole.start.skip(first as u64 * 4);
                let one_row = self.is_one_row(self.fused().group(id));
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

    /// A value in another form, where its producer could not leave that.
    pub fn convert(&mut self, group: &Group, node: NodeId, form: ValueForm) -> Result<(), LowerError> {
        let (rows, width, state) = (self.rows_of(group), self.graph().node(node).ty.width, self.state(group));
        let from = self.floats(node)?;
        let bytes = rows as u64 * width as u64 * 4;
        let work = Work { bytes: bytes * 2, flops: 0 };
        let blocks = [(bytes / 4).div_ceil(2048).clamp(1, 1024) as u32, 1, 1];
        match form {
            ValueForm::F32 => {
                let out = self.alloc_value(node, Form::F32, rows);
                let stride = Arg::U32(from.stride);
                let arguments = [("x", from.start), ("out", out), ("width", Arg::U32(width)), ("x_stride", stride)];
                let why = "its reader takes whole rows";
                self.launch(map::instance(&[])?, map::grid(width, rows), &arguments, &[], work, why)
            }
            ValueForm::BF16 => {
                let out = self.alloc_value(node, Form::BF16, rows);
                let x = self.whole_rows(node)?.take(bytes);
                let arguments = [("x", x), ("state", state), ("out", out), ("width", Arg::U32(width))];
                self.launch(round_rows_instance()?, blocks, &arguments, &[], work, "no producer leaves bf16")
            }
            ValueForm::Int8 => {
                let out = self.alloc_value(node, Form::Int8, rows);
                let mut arguments = vec![("x", self.whole_rows(node)?.take(bytes)), ("state", state)];
                arguments.extend(int8_arguments(out, bytes / 4, ["xq", "xscale", "xsum"]));
                self.launch(quantise::instance(width)?, blocks, &arguments, &[], work, "no producer leaves int8")
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
        let arguments = [
            ("x", x),
            ("out", out),
            ("k", Arg::U32(k)),
            ("outputs", Arg::U32(outputs)),
            ("value_tensor", self.common.weights.blocks(weight)),
        ];
        let flops = 2 * rows as u64 * outputs as u64 * k as u64;
        let work = Work { bytes: w.bytes().unwrap_or(0), flops };
        let grid = product::grid(outputs, rows);
        self.launch(product::instance(dtype)?, grid, &arguments, &group.nodes, work, "exact: f32")?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }
}
