//! Matrix products: for one row over streams, with the norm before them and what follows them; for many rows on tensor cores.

use gemma4c_blocks::DType;
use gemma4c_dsl::ElementType;
use gemma4c_graph::{Epilogue, Group, NodeId, Norm, Op, Product, WeightId};
use gemma4c_plan::cuda::Form;

use super::choice::{self, Choice};
use super::launch::Arg;
use super::phase::{PhaseBuilder, Place, Work, int8_arguments};
use super::weights::Matrix;
use super::{LowerError, Pass};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::{self, Prologue, slots};
use crate::kernels::outputs::Outputs;
use crate::kernels::product::wgmma::WgmmaProduct;
use crate::kernels::product::{self, Tile};
use crate::kernels::{geglu, per_layer};

/// What bf16 copies are refused at where there are none at all.
pub const EVERY_PRODUCT: &str = "all products of many rows";

/// The weights of a prologue without norms.
const NO_NORMS: [(&str, Arg); 4] = [
    ("update_norm", Arg::Unused),
    ("branch_norm", Arg::Unused),
    ("post_norm", Arg::Unused),
    ("next_norm", Arg::Unused),
];

impl PhaseBuilder<'_, '_> {
    fn weights_of(&self, product: &Product) -> Vec<WeightId> {
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

    /// The product of one row, with the norm before it where it has taken that over.
    pub fn product_of_one_row(
        &mut self,
        group: &Group,
        of: &Product,
        norm: Option<(&Norm, Arg)>,
    ) -> Result<(), LowerError> {
        if self.common.exact {
            return self.exact_product(group, of);
        }
        if norm.is_none() && self.with_experts(group, of)? {
            return Ok(());
        }
        let weights = self.weights_of(of);
        let matrix = self.common.weights.matrix(&weights, &mut self.common.kernels)?;
        let integer = format(matrix.dtype).integer;
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "rows are not whole groups of 32 values"));
        }
        self.count_int8(&group.nodes, matrix.dtype);
        let mut arguments = matrix.arguments();
        let unbounded = self.is_unbounded(of.input);
        let prologue = match norm {
            Some((norm, stream)) => self.norm_prologue(norm, stream, &mut arguments)?,
            None if integer && !unbounded && self.has(of.input, Form::Int8) => {
                let x = self.form(group, of.input, Form::Int8)?;
                let names = ["ready_xq", "ready_group_xscale", "ready_group_xsum"];
                arguments.extend(int8_arguments(x.start, matrix.k as u64, names));
                arguments.extend(NO_NORMS);
                Prologue::Int8
            }
            None => {
                arguments.push(("input_x", self.floats(of.input)?.start));
                arguments.extend(NO_NORMS);
                Prologue::Plain
            }
        };
        let outputs = (matrix.rows / if of.geglu { 2 } else { 1 }) as u32;
        let epilogue = self.epilogue(group, &of.epilogue, &mut arguments)?;
        let choice = matvec::Product {
            geglu: of.geglu,
            scaled: norm.is_some_and(|(norm, _)| norm.residual.is_some_and(|r| r.scale.is_some())),
            branches: norm.is_some_and(|(norm, _)| norm.residual.is_some_and(|r| r.branch.is_some())),
            unbounded,
            epsilon: norm.map_or(crate::kernels::NORM_EPSILON, |(norm, _)| norm.eps),
            epilogue,
            ..matvec::Product::new(matrix.dtype, outputs, matrix.k, prologue)
        };
        let (shape, mut why) = choice::product(&choice, &self.common.target);
        if norm.is_some() {
            why.reason += "; every block computes the norm before it, which is a launch less";
        }
        let out = self.product_output(group, of, outputs, 1);
        arguments.extend([("out", out), ("rows", Arg::U32(outputs))]);
        let nodes: Vec<NodeId> = norm.map_or(Vec::new(), |(norm, _)| self.nodes_of(norm));
        let nodes = [nodes, group.nodes.clone()].concat();
        let work = Work { bytes: matrix.bytes() + matrix.k as u64 * 4, flops: 2 * matrix.rows * matrix.k as u64 };
        self.launch(choice.instance(shape)?, [shape.blocks, 1, 1], &arguments, &nodes, work, why)?;
        if let Some((Norm { residual: Some(residual), .. }, stream)) = norm {
            self.record_output(residual.sum, Form::F32, stream);
        }
        self.record_product_outputs(group, of, out);
        Ok(())
    }

    /// Counts a row's product whose activations are rounded to 8 bits, or says why they are not.
    pub fn count_int8(&mut self, nodes: &[NodeId], dtype: DType) {
        let values = self.names(nodes);
        match format(dtype).integer {
            true => self.common.tally.applied(Pass::Int8, values),
            false => {
                self.common.tally.refused(Pass::Int8, values, "its weights are floats: so are a row's activations")
            }
        }
    }

    /// The nodes that a norm stands for.
    pub fn nodes_of(&self, norm: &Norm) -> Vec<NodeId> {
        let last = norm.next.map(|(node, _)| node).or(norm.residual.map(|r| r.sum));
        last.map_or(Vec::new(), |node| self.fused.group(node).nodes.clone())
    }

    fn norm_prologue(
        &mut self,
        norm: &Norm,
        stream: Arg,
        arguments: &mut Vec<(&'static str, Arg)>,
    ) -> Result<Prologue, LowerError> {
        let next = match norm.next {
            Some((_, Some(weight))) => Some(self.common.weights.floats(weight)?),
            _ => None,
        };
        let input = self.floats(norm.input)?.start;
        arguments.push(("next_norm", next.unwrap_or(Arg::Unused)));
        match norm.residual.and_then(|residual| residual.branch) {
            Some(branch) => arguments.extend([
                ("branch_x", self.floats(branch.other)?.start),
                ("update_norm", self.common.weights.floats(branch.weight)?),
                ("branch_norm", self.common.weights.floats(branch.other_weight)?),
            ]),
            None => arguments.extend([("update_norm", Arg::Unused), ("branch_norm", Arg::Unused)]),
        }
        let Some(residual) = norm.residual else {
            arguments.extend([("input_x", input), ("post_norm", Arg::Unused)]);
            return Ok(Prologue::Norm);
        };
        arguments.extend([
            ("input_x", self.floats(residual.stream)?.start),
            ("update_x", input),
            ("post_norm", self.common.weights.floats(residual.post)?),
            ("stream_out", stream),
        ]);
        if let Some(weight) = residual.scale {
            arguments.push(("scale_weight", self.common.weights.floats(weight)?));
        }
        Ok(if next.is_some() { Prologue::ResidualNorm } else { Prologue::Residual })
    }

    /// A norm whose readers are products of one row: they compute it themselves, and the first leaves the residual stream.
    pub fn absorbed_norm(&mut self, group: &Group, norm: &Norm, products: &[usize]) -> Result<(), LowerError> {
        let stream = match norm.residual {
            Some(residual) => self.alloc_value(residual.sum, Form::F32, 1),
            None => Arg::Unused,
        };
        self.applied(Pass::AbsorbNorms, group);
        for &at in products {
            self.mark_done(at);
            let group = self.groups[at].clone();
            let product = match &group.kind {
                gemma4c_graph::Kind::Product(product) => product.clone(),
                _ => self.single_product(group.nodes[0]),
            };
            if !self.per_layer_step(&group, &product, norm, stream)? {
                self.product_of_one_row(&group, &product, Some((norm, stream)))?;
            }
        }
        Ok(())
    }

    /// A matrix product that no pass has touched.
    pub fn single_product(&self, matmul: NodeId) -> Product {
        let input = self.graph().node(matmul).inputs[0];
        Product { input, matmuls: vec![matmul], geglu: false, epilogue: Vec::new() }
    }

    fn epilogue(
        &mut self,
        group: &Group,
        epilogue: &[Epilogue],
        arguments: &mut Vec<(&'static str, Arg)>,
    ) -> Result<Vec<&'static gemma4c_dsl::DeviceDef>, LowerError> {
        let mut functions = Vec::new();
        for Epilogue { node, operand } in epilogue {
            match (self.graph().node(*node).op, operand) {
                (Op::Gelu, _) => functions.push(slots::then_gelu::DEF),
                (Op::Scale { factor }, _) => {
                    functions.push(slots::then_scale::DEF);
                    arguments.push(("epilogue_scale", Arg::F32(factor)));
                }
                (Op::Softcap { cap }, _) => {
                    functions.push(slots::then_softcap::DEF);
                    arguments.push(("epilogue_cap", Arg::F32(cap)));
                }
                (Op::Mul, Some(operand)) => {
                    functions.push(slots::then_times::DEF);
                    arguments.push(("epilogue_by", self.operand(*operand)?.start));
                }
                _ => return Err(LowerError::NoValue { node: self.graph().full_name(group.nodes[0]) }),
            }
        }
        Ok(functions)
    }

    /// Another operand of a group: a value, or a slice of one that the group has taken over.
    pub fn operand(&self, node: NodeId) -> Result<Place, LowerError> {
        match self.graph().node(node).op {
            Op::Columns { first, len } if !self.has(node, Form::F32) => {
                let whole = self.floats(self.graph().node(node).inputs[0])?;
                let rows_after = |place: Place| place.start.skip(first as u64 * 4);
                let start = if self.rows == 1 { rows_after(whole).take(len as u64 * 4) } else { rows_after(whole) };
                Ok(Place { start, stride: whole.stride })
            }
            _ => self.floats(node),
        }
    }

    /// Memory for a product's result: of several matrices side by side, each node a part of every row.
    fn product_output(&mut self, group: &Group, of: &Product, outputs: u32, rows: u32) -> Arg {
        let result = match (of.epilogue.last(), of.geglu) {
            (Some(last), _) => Some(last.node),
            (None, true) => group.nodes.last().copied(),
            (None, false) => (of.matmuls.len() == 1).then(|| of.matmuls[0]),
        };
        if let Some(node) = result {
            return self.alloc_value(node, Form::F32, rows);
        }
        let out = self.buffer(outputs as u64 * rows as u64 * 4);
        let mut first = 0u64;
        for id in &of.matmuls {
            let width = self.graph().node(*id).ty.width as u64;
            let part = out.skip(first * 4);
            let start = if rows == 1 { part.take(width * 4) } else { part };
            self.bind_location(*id, Form::F32, Place { start, stride: outputs });
            first += width;
        }
        out
    }

    fn record_product_outputs(&mut self, group: &Group, of: &Product, out: Arg) {
        if of.epilogue.is_empty() && !of.geglu && of.matmuls.len() > 1 {
            // Side by side: each a part of every row.
            let rows = self.rows_of(group) as u64;
            for id in &of.matmuls {
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

    /// The product of many rows.
    pub fn product_of_many_rows(&mut self, group: &Group, of: &Product) -> Result<(), LowerError> {
        if self.common.exact {
            return self.exact_product(group, of);
        }
        let x = self.form(group, of.input, Form::BF16)?;
        let (rows, state) = (self.rows, self.state(group));
        let weights = self.weights_of(of);
        let no_wgmma = match self.common.wgmma {
            Ok(()) => match self.wgmma_product(group, of, &weights, x.start, state)? {
                true => return Ok(()),
                false => {
                    let why = "its sizes are no multiples of what they take";
                    self.refused(Pass::Bf16Copies, group, why);
                    why
                }
            },
            Err(why) => {
                self.common.tally.refused(Pass::Bf16Copies, vec![EVERY_PRODUCT.into()], why);
                why
            }
        };
        let matrix = self.common.weights.matrix(&weights, &mut self.common.kernels)?;
        if !matrix.k.is_multiple_of(32) {
            return Err(self.no_kernel(group, &matrix, "rows are not whole groups of 32 values"));
        }
        let outputs = matrix.rows as u32;
        let tile = Tile::choose(rows, outputs, self.common.target.multiprocessors);
        let choice = product::Product {
            dtype: matrix.dtype,
            k: matrix.k,
            out: ElementType::F32,
            pairs: 0,
            epilogue: Vec::new(),
        };
        let plain = Product { geglu: false, epilogue: Vec::new(), ..of.clone() };
        let raw = match of.geglu || !of.epilogue.is_empty() {
            true => self.buffer(outputs as u64 * rows as u64 * 4),
            false => self.product_output(group, &plain, outputs, rows),
        };
        let mut arguments = matrix.arguments();
        arguments.extend([
            ("x", x.start),
            ("groups", Arg::Unused),
            ("order", Arg::Unused),
            ("state", state),
            ("out", raw),
            ("outputs", Arg::U32(outputs)),
            ("k", Arg::U32(matrix.k)),
        ]);
        let bytes = matrix.bytes() + rows as u64 * (matrix.k as u64 * 2 + outputs as u64 * 4);
        let work = Work { bytes, flops: 2 * rows as u64 * matrix.rows * matrix.k as u64 };
        let why = format!("{rows} rows: tensor cores over streams, tiles of {} x {}", tile.rows, tile.columns);
        let why = Choice::because(why).over(format!("warpgroups over a bf16 copy: {no_wgmma}"));
        self.launch(choice.instance(tile)?, tile.grid(rows, outputs), &arguments, &group.nodes, work, why)?;
        self.after_product(group, of, raw, outputs)
    }

    /// What follows a product of many rows that has no place in it.
    fn after_product(&mut self, group: &Group, of: &Product, raw: Arg, outputs: u32) -> Result<(), LowerError> {
        if of.geglu {
            return self.joined(group, self.rows, raw, outputs / 2, raw.skip(outputs as u64 * 2), [outputs; 2]);
        }
        if let [gelu, mul] = &of.epilogue[..]
            && self.graph().node(gelu.node).op == Op::Gelu
            && let Some(operand) = mul.operand
        {
            let slice = self.operand(operand)?;
            return self.joined(group, self.rows, raw, outputs, slice.start, [outputs, slice.stride]);
        }
        if of.epilogue.is_empty() {
            self.record_product_outputs(group, of, raw);
            return Ok(());
        }
        let [matmul] = of.matmuls[..] else {
            let weights = self.weights_of(of);
            let matrix = self.common.weights.matrix(&weights, &mut self.common.kernels)?;
            return Err(self.no_kernel(group, &matrix, "an epilogue of several matrices"));
        };
        self.bind_location(matmul, Form::F32, Place { start: raw, stride: outputs });
        self.record_output(matmul, Form::F32, raw);
        self.epilogue_in_steps(group, of)
    }

    /// The product of many rows by warpgroups, over bf16 copies of the weights; `false` where the shape does not allow it.
    fn wgmma_product(
        &mut self,
        group: &Group,
        of: &Product,
        weights: &[WeightId],
        x: Arg,
        state: Arg,
    ) -> Result<bool, LowerError> {
        let first = self.graph().weight(weights[0]);
        let (rows, k) = (self.rows, first.dim(0) as u32);
        let all: u64 = weights.iter().map(|w| self.graph().weight(*w).dim(1)).sum();
        let outputs = if of.geglu { all as u32 / 2 } else { all as u32 };
        let gated = of.geglu && self.wanted(group.nodes[group.nodes.len() - 1]) == Outputs::BF16;
        let kind = WgmmaProduct {
            out: if gated { ElementType::BF16 } else { ElementType::F32 },
            geglu: gated,
            pairs: 0,
            epilogue: Vec::new(),
        };
        let stored = if gated { outputs } else { all as u32 };
        let Some(tile) = kind.choose(rows, stored, k, &self.common.target) else { return Ok(false) };
        self.applied(Pass::Bf16Copies, group);
        let copy = self.common.weights.rounded(weights, &mut self.common.kernels)?;
        let node = group.nodes[group.nodes.len() - 1];
        let plain = Product { geglu: false, epilogue: Vec::new(), ..of.clone() };
        let raw = match (gated, of.geglu || !of.epilogue.is_empty()) {
            (true, _) => self.alloc_value(node, Form::BF16, rows),
            (false, true) => self.buffer(all * rows as u64 * 4),
            (false, false) => self.product_output(group, &plain, stored, rows),
        };
        let arguments = [
            ("weights", copy),
            ("x", x),
            ("groups", Arg::Unused),
            ("order", Arg::Unused),
            ("state", state),
            ("out", raw),
            ("outputs", Arg::U32(stored)),
            ("k", Arg::U32(k)),
        ];
        let bytes = all * k as u64 * 2 + rows as u64 * (k as u64 * 2 + stored as u64 * 4);
        let work = Work { bytes, flops: 2 * rows as u64 * all * k as u64 };
        let why = format!("{rows} rows: warpgroups over a bf16 copy, tiles of {} x {}", tile.rows(), tile.columns);
        let why = Choice::because(why).over("tensor cores over streams");
        let grid = kind.grid(tile, rows, stored, self.common.target.multiprocessors);
        self.launch(kind.instance(tile)?, grid, &arguments, &group.nodes, work, why)?;
        if gated {
            self.record_output(node, Form::BF16, raw);
        } else {
            self.after_product(group, of, raw, stored)?;
        }
        Ok(true)
    }

    /// `gelu(gate) * up` of many rows, after the product that made them.
    pub fn joined(
        &mut self,
        group: &Group,
        rows: u32,
        gate: Arg,
        width: u32,
        up: Arg,
        [gate_stride, up_stride]: [u32; 2],
    ) -> Result<(), LowerError> {
        let node = group.nodes[group.nodes.len() - 1];
        let wanted = self.wanted(node);
        let outputs = if wanted.bf16 && !wanted.floats { Outputs::BF16 } else { Outputs::FLOATS };
        let instance = if gate_stride == up_stride { geglu::instance(outputs)? } else { per_layer::gate(outputs)? };
        let grid = geglu::grid(&instance, width, rows);
        let form = if outputs == Outputs::BF16 { Form::BF16 } else { Form::F32 };
        let out = self.alloc_value(node, form, self.rows);
        let of = |wanted: Form| if form == wanted { out } else { Arg::Unused };
        let arguments = [
            ("gate", gate),
            ("up", up),
            ("out", of(Form::F32)),
            ("rounded", of(Form::BF16)),
            ("xq", Arg::Unused),
            ("xscale", Arg::Unused),
            ("xsum", Arg::Unused),
            ("width", Arg::U32(width)),
            ("gate_stride", Arg::U32(gate_stride)),
            ("up_stride", Arg::U32(up_stride)),
        ];
        let work = Work { bytes: rows as u64 * width as u64 * 10, flops: 0 };
        self.launch(instance, grid, &arguments, &group.nodes, work, "many rows: after the product")?;
        self.record_output(node, form, out);
        Ok(())
    }
}
