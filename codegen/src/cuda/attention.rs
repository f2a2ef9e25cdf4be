//! From raw heads to the mixed values: for one row by splitting the keys, for many rows on tensor cores.

use gemma4c_dsl::ElementType;
use gemma4c_graph::{CacheId, Elem, Group, Heads, NodeId, Op};
use gemma4c_plan::cuda::{Form, KvType, Range, Region};

use super::choice::Choice;
use super::launch::Arg;
use super::phase::{PhaseBuilder, Work, int8_arguments};
use super::{LowerError, Pass};
use crate::kernels::attention::Attention;
use crate::kernels::attention::step::StepOut;
use crate::kernels::heads;
use crate::kernels::outputs::Outputs;

impl PhaseBuilder<'_, '_> {
    pub fn kv_element(&self) -> ElementType {
        match self.common.kv {
            KvType::F16 => ElementType::F16,
            KvType::BF16 => ElementType::BF16,
            KvType::F32 => ElementType::F32,
        }
    }

    /// Keys and values of a cache.
    pub fn cache(&self, cache: CacheId) -> (Arg, Arg) {
        let (offset, bytes) = self.common.caches[cache.index()];
        let half = |offset| Arg::Fixed(Range { region: Region::Kv, offset, bytes: bytes / 2 });
        (half(offset), half(offset + bytes / 2))
    }

    fn attention_of(&self, cache: CacheId, heads: u32) -> Attention {
        let c = self.graph().cache(cache);
        Attention {
            head_dim: c.head_dim,
            kv_heads: c.kv_heads,
            group: heads / c.kv_heads,
            window: c.window,
            capacity: self.common.capacity(c),
            kv: self.kv_element(),
            shared_bytes: self.common.shared_bytes,
            cluster: self.common.cluster,
            multiprocessors: self.common.target.multiprocessors,
        }
    }

    /// The angles a position turns each pair of a head by.
    pub fn frequencies(&mut self, of: &Heads) -> Result<Arg, LowerError> {
        let factors = match of.factors {
            Some(weight) => Some((self.common.read)(weight)?),
            None => None,
        };
        let values = heads::inverse_frequencies(of.dim, of.base as f64, factors.as_deref());
        let name = format!("angles of heads of {}, base {}", of.dim, of.base);
        Ok(self.common.weights.constant(&name, values))
    }

    pub fn heads(&mut self, group: &Group, of: &Heads) -> Result<(), LowerError> {
        let rows = self.rows_of(group);
        let frequencies = self.frequencies(of)?;
        let (state, width) = (self.state(group), |node: NodeId| self.graph().node(node).ty.width);
        let (q_heads, kv_heads) =
            (of.q.map_or(0, |q| width(q.out) / of.dim), of.kv.map_or(0, |kv| width(kv.k) / of.dim));
        let kind = heads::Heads { dim: of.dim, q: q_heads, kv: kv_heads, cache: self.kv_element() };
        if let Some((at, attention)) = self.one_launch(group, of) {
            return self.attention_step(group, of, at, attention);
        }
        let (mut q, mut q_weight, mut q_stride, mut q_out) = (Arg::Unused, Arg::Unused, 0, Arg::Unused);
        if let Some(queries) = of.q {
            let raw = self.floats(queries.raw)?;
            (q, q_stride) = (raw.start, raw.stride);
            q_weight = self.common.weights.floats(queries.weight)?;
            q_out = self.alloc_value(queries.out, Form::F32, rows);
        }
        let (mut k, mut v, mut k_weight, mut k_cache, mut v_cache) =
            (Arg::Unused, Arg::Unused, Arg::Unused, Arg::Unused, Arg::Unused);
        let (mut k_stride, mut v_stride, mut capacity) = (0, 0, 1);
        if let Some(kv) = of.kv {
            let (keys, values) = (self.floats(kv.k)?, self.floats(kv.v)?);
            (k, v, k_stride, v_stride) = (keys.start, values.start, keys.stride, values.stride);
            k_weight = self.common.weights.floats(kv.k_weight)?;
            (k_cache, v_cache) = self.cache(kv.cache);
            capacity = self.common.capacity(self.graph().cache(kv.cache));
        }
        let arguments = [
            ("q", q),
            ("k", k),
            ("v", v),
            ("q_weight", q_weight),
            ("k_weight", k_weight),
            ("inverse_frequencies", frequencies),
            ("state", state),
            ("q_out", q_out),
            ("k_cache", k_cache),
            ("v_cache", v_cache),
            ("q_stride", Arg::U32(q_stride)),
            ("k_stride", Arg::U32(k_stride)),
            ("v_stride", Arg::U32(v_stride)),
            ("capacity", Arg::U32(capacity)),
            ("epsilon", Arg::F32(of.eps)),
        ];
        let values = (q_heads + 2 * kv_heads) as u64 * of.dim as u64 * rows as u64;
        let work = Work { bytes: values * 4, flops: 0 };
        self.launch(kind.instance()?, kind.grid(rows), &arguments, &group.nodes, work, "norms, rotation and store")?;
        if let Some(queries) = of.q {
            self.record_output(queries.out, Form::F32, q_out);
        }
        Ok(())
    }

    /// The attention that a row's queries go to, if heads and attention can be one launch: its group and node.
    fn one_launch(&self, group: &Group, of: &Heads) -> Option<(usize, NodeId)> {
        if !self.common.steps || !self.is_one_row(group) {
            return None;
        }
        let user = self.fused.sole_user(of.q?.out)?;
        let at = self.groups.iter().position(|group| group.nodes.contains(&user))?;
        matches!(self.graph().node(user).op, Op::Attention { .. }).then_some((at, user))
    }

    /// One row: from raw heads to the mixed values in one launch.
    fn attention_step(&mut self, group: &Group, of: &Heads, at: usize, node: NodeId) -> Result<(), LowerError> {
        let (Some(queries), Op::Attention { heads }, &[_, kv]) =
            (of.q, self.graph().node(node).op, &self.graph().node(node).inputs[..])
        else {
            return Err(LowerError::NoValue { node: self.graph().full_name(node) });
        };
        let Elem::Kv(cache) = self.graph().node(kv).ty.elem else {
            return Err(LowerError::NoValue { node: self.graph().full_name(kv) });
        };
        let layer = self.attention_of(cache, heads);
        let (k_cache, v_cache) = self.cache(cache);
        let (mut k, mut v, mut k_weight) = (Arg::Unused, Arg::Unused, Arg::Unused);
        if let Some(own) = of.kv {
            (k, v) = (self.floats(own.k)?.start, self.floats(own.v)?.start);
            k_weight = self.common.weights.floats(own.k_weight)?;
        }
        let wanted = self.wanted(node);
        let (form, out) =
            if wanted.int8 && !wanted.floats { (Form::Int8, StepOut::Int8) } else { (Form::F32, StepOut::Floats) };
        let result = self.alloc_value(node, form, 1);
        let width = layer.heads() as u64 * layer.head_dim as u64;
        let [extrema, values, counters] = match layer.step_values_len() {
            0 => [Arg::Unused; 3],
            values => [
                self.buffer(layer.step_extrema_len() * 8),
                self.buffer(values * 4),
                self.common.counters().take(layer.step_counters_len() * 4),
            ],
        };
        let mut arguments = vec![
            ("q", self.floats(queries.raw)?.start),
            ("k", k),
            ("v", v),
            ("q_weight", self.common.weights.floats(queries.weight)?),
            ("k_weight", k_weight),
            ("inverse_frequencies", self.frequencies(of)?),
            ("state", self.state(group)),
            ("k_cache", k_cache),
            ("v_cache", v_cache),
            ("extrema", extrema),
            ("values", values),
            ("counters", counters),
            ("window", Arg::U32(layer.window_scalar())),
            ("segment", Arg::U32(layer.segment())),
            ("grouped", Arg::U32(layer.grouped())),
            ("capacity", Arg::U32(layer.capacity)),
            ("epsilon", Arg::F32(of.eps)),
        ];
        match form {
            Form::Int8 => arguments.extend(int8_arguments(result, width, ["keep_xq", "keep_xscale", "keep_xsum"])),
            _ => arguments.push(("keep_out", result)),
        }
        let bytes = self.visible_bytes(cache);
        let work = Work { bytes, flops: bytes / self.common.kv.bytes() * layer.group as u64 * 2 };
        let merge = match layer.peers() {
            1 if layer.splits() == 1 => "no merge".to_owned(),
            1 => "merged through memory".to_owned(),
            peers => format!("merged in clusters of {peers} blocks"),
        };
        let (splits, keys) = (layer.splits(), layer.segment());
        let why = format!("one row: heads, {splits} splits of {keys} keys at a time, {merge}: one launch");
        let why = Choice::because(why).over("three launches: heads, splits, merge");
        let nodes = [&group.nodes[..], &[node]].concat();
        self.applied(Pass::AttentionStep, group);
        match layer.peers() {
            1 if layer.splits() > 1 => self.refused(Pass::Clusters, group, "the GPU has none, or none so large"),
            1 => self.refused(Pass::Clusters, group, "one block sees all"),
            _ => self.applied(Pass::Clusters, group),
        }
        self.launch(layer.step(of.kv.is_some(), out)?, layer.step_grid(), &arguments, &nodes, work, why)?;
        self.record_output(node, form, result);
        self.mark_done(at);
        Ok(())
    }

    pub fn attention(&mut self, group: &Group, node: NodeId) -> Result<(), LowerError> {
        let (Op::Attention { heads }, &[q, kv]) = (self.graph().node(node).op, &self.graph().node(node).inputs[..])
        else {
            return Err(LowerError::NoValue { node: self.graph().full_name(node) });
        };
        let Elem::Kv(cache) = self.graph().node(kv).ty.elem else {
            return Err(LowerError::NoValue { node: self.graph().full_name(kv) });
        };
        let layer = self.attention_of(cache, heads);
        if self.is_one_row(group) {
            self.split_attention(group, node, q, cache, layer)
        } else {
            self.flash(group, node, q, cache, layer)
        }
    }

    /// One row: the keys are shared out among blocks, whose partial results are merged.
    fn split_attention(
        &mut self,
        group: &Group,
        node: NodeId,
        q: NodeId,
        cache: CacheId,
        layer: Attention,
    ) -> Result<(), LowerError> {
        let (state, (k, v)) = (self.state(group), self.cache(cache));
        let query = self.floats(q)?.start;
        let extrema = self.buffer(layer.extrema_len(1) * 8);
        let values = self.buffer(layer.values_len(1) * 4);
        let arguments = [
            ("q", query),
            ("k", k),
            ("v", v),
            ("state", state),
            ("extrema", extrema),
            ("values", values),
            ("window", Arg::U32(layer.window_scalar())),
            ("segment", Arg::U32(layer.segment())),
            ("capacity", Arg::U32(layer.capacity)),
        ];
        let width = layer.heads() as u64 * layer.head_dim as u64;
        let bytes = self.visible_bytes(cache);
        let work = Work { bytes, flops: bytes / self.common.kv.bytes() * layer.group as u64 * 2 };
        let why = format!("one row: {} splits of the keys", layer.splits());
        self.launch(layer.decode()?, layer.decode_grid(1), &arguments, &group.nodes, work, why)?;
        let mut arguments =
            vec![("extrema", extrema), ("values", values), ("state", state), ("splits", Arg::U32(layer.splits()))];
        let wants_int8 = self.wanted(node).int8 && !self.wanted(node).floats;
        let form = if wants_int8 { Form::Int8 } else { Form::F32 };
        let out = self.alloc_value(node, form, 1);
        let instance = if wants_int8 {
            arguments.extend(int8_arguments(out, width, ["xq", "xscale", "xsum"]));
            layer.combine_int8()?
        } else {
            arguments.push(("out", out));
            layer.combine()?
        };
        let work = Work { bytes: layer.values_len(1) * 4, flops: 0 };
        self.launch(instance, layer.combine_grid(1), &arguments, &group.nodes, work, "merges the splits")?;
        self.record_output(node, form, out);
        Ok(())
    }

    /// Many rows: on tensor cores, or plainly where the cache is f32.
    fn flash(
        &mut self,
        group: &Group,
        node: NodeId,
        q: NodeId,
        cache: CacheId,
        layer: Attention,
    ) -> Result<(), LowerError> {
        let (rows, state, (k, v)) = (self.rows, self.state(group), self.cache(cache));
        let query = self.floats(q)?.start;
        // The product that reads it takes bf16; only the plain kernel cannot leave that.
        let rounded = self.common.kv != KvType::F32 && self.wanted(node) == Outputs::BF16;
        let (form, element) = if rounded { (Form::BF16, ElementType::BF16) } else { (Form::F32, ElementType::F32) };
        let out = self.alloc_value(node, form, rows);
        let arguments = [
            ("q", query),
            ("k", k),
            ("v", v),
            ("state", state),
            ("out", out),
            ("group", Arg::U32(layer.group)),
            ("window", Arg::U32(layer.window_scalar())),
            ("capacity", Arg::U32(layer.capacity)),
        ];
        let width = layer.heads() as u64 * layer.head_dim as u64;
        let seen = layer.window.unwrap_or(u32::MAX).min(rows).div_ceil(2) as u64;
        let bytes = rows as u64 * width * 8 + self.visible_bytes(cache);
        let work = Work { bytes, flops: 4 * rows as u64 * width * seen };
        match layer.flash(element)? {
            Some(flash) => {
                let why = format!("many rows: tensor cores, tiles of {} rows", flash.rows);
                let grid = flash.grid(&layer, rows);
                self.launch(flash.instance, grid, &arguments, &group.nodes, work, why)?;
            }
            None => {
                let why = "keys and values in f32: the plain kernel";
                self.launch(layer.plain()?, [layer.heads(), rows, 1], &arguments, &group.nodes, work, why)?;
            }
        }
        self.record_output(node, form, out);
        Ok(())
    }
}
