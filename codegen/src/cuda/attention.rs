//! From raw heads to the mixed values: for one row by splitting the keys, for many rows on tensor cores.

use gemma4c_dsl::{ElementType, Filled, LaunchArguments};
use gemma4c_graph::{CacheId, Elem, Group, Heads, NodeId, Op};
use gemma4c_plan::cuda::{Form, RECORD_WORDS, Range, Region};

use super::choice::Choice;
use super::error::LowerError;
use super::launch::{Int8Span, Span};
use super::memory::CachePlace;
use super::phase::{PartsPlace, PhaseBuilder, Work};
use crate::kernels::attention::Attention;
use crate::kernels::attention::combine::{attention_combine, attention_combine_int8};
use crate::kernels::attention::decode::attention_decode;
use crate::kernels::attention::flash::attention_flash;
use crate::kernels::attention::keep::keep_rows;
use crate::kernels::attention::plain::{attention_plain, picture_end};
use crate::kernels::attention::rows::attention_rows;
use crate::kernels::attention::step::{
    Early, StepOut, attention_step, output_bf16, output_f16, output_floats, output_int8,
};
use crate::kernels::attention::view::{PartialResultsArguments, ProjectionsArguments, StageViewArguments};
use crate::kernels::attention::warpgroups::attention_warpgroups;
use crate::kernels::heads;
use crate::passes::cache_of;

impl PhaseBuilder<'_, '_> {
    /// An attention's cache and geometry.
    fn attention_of(&self, attention: NodeId) -> Result<(CacheId, Attention), LowerError> {
        let (cache, heads) = cache_of(self.graph(), attention)
            .ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(attention) })?;
        let cluster = self.schedule.cluster_of(attention);
        Ok((cache, self.common.can.attention(self.graph(), cache, heads, cluster)))
    }

    /// The records by which an attention looks at keys, and its window. What looks only before its own position looks
    /// from the one before, where the window is one less.
    fn seen_from(&self, group: &Group, node: NodeId, window: u32) -> (Span, u32) {
        match (self.graph().node(node).op, self.drafter_places()) {
            (Op::AttentionBefore { .. }, Some(places)) => {
                let bytes = RECORD_WORDS as u64 * 4;
                let window = if window == u32::MAX { window } else { window - 1 };
                (Span::Fixed(Range { region: Region::Arena, offset: places.before, bytes }), window)
            }
            _ => (self.state(group), window),
        }
    }

    /// The angles a position turns each pair of a head by.
    pub fn frequencies(&mut self, of: &Heads) -> Result<Span, LowerError> {
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
        let kind = heads::Heads { dim: of.dim, q: q_heads, kv: kv_heads, cache: self.common.can.kv };
        let (mut q, mut q_weight, mut q_stride, mut q_out) = (Span::Unused, Span::Unused, 0, Span::Unused);
        if let Some(queries) = of.q {
            let raw = self.floats(queries.raw)?;
            (q, q_stride) = (raw.start, raw.stride);
            q_weight = self.common.weights.floats(queries.weight)?;
            q_out = self.alloc_value(queries.out, Form::F32, rows);
        }
        let (mut k, mut v, mut k_weight) = (Span::Unused, Span::Unused, Span::Unused);
        let (mut k_stride, mut v_stride) = (0, 0);
        // Heads without keys store nothing.
        let mut cache = CachePlace { capacity: 1, max_pages: 1, ..CachePlace::default() };
        if let Some(kv) = of.kv {
            let (keys, values) = (self.floats(kv.k)?, self.floats(kv.v)?);
            (k, v, k_stride, v_stride) = (keys.start, values.start, keys.stride, values.stride);
            k_weight = self.common.weights.floats(kv.k_weight)?;
            cache = self.store_place(group, kv.cache)?;
        }
        let raw = ProjectionsArguments {
            q,
            k,
            v,
            q_weight,
            k_weight,
            inverse_frequencies: frequencies,
            q_stride,
            k_stride,
            v_stride,
            epsilon: of.eps,
        };
        let (record_stride, kv) = (self.record_stride(group), cache.view_mut());
        let arguments = heads::heads::Arguments { raw, state, record_stride, q_out, kv };
        let values = (q_heads + 2 * kv_heads) as u64 * of.dim as u64 * rows as u64;
        let work = Work { bytes: values * 4, flops: 0 };
        self.launch(kind.instance()?, kind.grid(rows), arguments, &group.nodes, work, "norms, rotation and store")?;
        if let Some(queries) = of.q {
            self.record_output(queries.out, Form::F32, q_out);
        }
        if let Some(kv) = of.kv {
            self.record_stage(kv.out, kv.cache);
        }
        Ok(())
    }

    /// Decoded rows: from raw heads to the mixed values in one launch.
    pub fn attention_step(&mut self, group: &Group, of: &Heads, node: NodeId) -> Result<(), LowerError> {
        let queries = of.q.ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(node) })?;
        let (cache, layer) = self.attention_of(node)?;
        let place = self.cache(cache)?;
        let (rows, raw) = (self.rows_of(group), self.floats(queries.raw)?);
        let (mut k, mut v, mut k_weight) = (Span::Unused, Span::Unused, Span::Unused);
        let (mut k_stride, mut v_stride) = (0, 0);
        if let Some(own) = of.kv {
            let (keys, values) = (self.floats(own.k)?, self.floats(own.v)?);
            (k, v, k_stride, v_stride) = (keys.start, values.start, keys.stride, values.stride);
            k_weight = self.common.weights.floats(own.k_weight)?;
        }
        let forms = self.schedule.forms(node);
        let (form, out) = match forms {
            _ if forms.int8 => (Form::Int8, StepOut::Int8),
            _ if forms.bf16 => (Form::BF16, StepOut::Bf16),
            _ if forms.f16 => (Form::F16, StepOut::F16),
            _ => (Form::F32, StepOut::Floats),
        };
        let result = self.alloc_value(node, form, rows);
        let width = layer.heads() as u64 * layer.head_dim as u64 * rows as u64;
        let [extrema, values, counters] = match layer.step_values_len() {
            0 => [Span::Unused; 3],
            values => [
                self.buffer(layer.step_extrema_len() * 8 * rows as u64),
                self.buffer(values * 4 * rows as u64),
                self.common.counters().take(layer.step_counters_len() * 4 * rows as u64),
            ],
        };
        let own = of.kv.is_some();
        let (splits, segment) = (layer.splits(), layer.segment());
        let (q_weight, inverse_frequencies) = (self.common.weights.floats(queries.weight)?, self.frequencies(of)?);
        let (q, q_stride, state, epsilon) = (raw.start, raw.stride, self.state(group), of.eps);
        let heads = ProjectionsArguments {
            q,
            k,
            v,
            q_weight,
            k_weight,
            inverse_frequencies,
            q_stride,
            k_stride,
            v_stride,
            epsilon,
        };
        let kv = place.view_mut();
        let parts = PartialResultsArguments { extrema, values, counters };
        let Int8Span { codes: xq, scales: xscale, sums: xsum } = Int8Span::of(result, width);
        let written: Filled<Span> = match out {
            StepOut::Int8 => output_int8::Arguments { xq, xscale, xsum }.into(),
            StepOut::Bf16 => output_bf16::Arguments { out: result }.into(),
            StepOut::F16 => output_f16::Arguments { out: result }.into(),
            _ => output_floats::Arguments { out: result }.into(),
        };
        let (instance, grid, arguments, how): (_, _, LaunchArguments<Span>, _) = match layer.sharing(rows, own)? {
            Some(sharing) => {
                let clusters = sharing.clusters;
                let arguments = attention_rows::Arguments { heads, state, kv, parts, segment, splits, clusters };
                let arguments = arguments.with_slot(attention_rows::slot::write, written);
                let (blocks, group) = (sharing.peers * clusters, layer.peers());
                let how = format!("{blocks} blocks a head, each {} splits of every {group}", sharing.turns);
                (layer.rows(own, out, sharing)?, layer.rows_grid(rows, sharing), arguments, how)
            }
            None => {
                let grouped = layer.grouped();
                let arguments = attention_step::Arguments { heads, state, kv, parts, segment, grouped };
                let arguments = arguments.with_slot(attention_step::slot::write, written);
                let how = match layer.peers() {
                    1 if splits == 1 => "no merge".to_owned(),
                    1 => "merged through memory".to_owned(),
                    peers => format!("merged in clusters of {peers} blocks"),
                };
                let early = match layer.starts_early() && self.is_settled(&[kv.k, kv.v]) {
                    _ if !self.is_settled(&[state]) => Early::Nothing,
                    true => Early::Caches,
                    false => Early::Records,
                };
                (layer.step(own, early, out)?, layer.step_grid(rows), arguments, how)
            }
        };
        let bytes = self.visible_bytes(cache) * rows as u64;
        let flops = self.visible_values(cache) * rows as u64 * layer.group as u64 * 2;
        let work = Work { bytes, flops };
        let what = if rows == 1 { "one row".to_owned() } else { format!("{rows} rows") };
        let why = format!("{what}: heads, {splits} splits of {segment} keys at a time, {how}: one launch");
        let why = Choice::because(why).over("three launches: heads, splits, merge");
        self.launch(instance, grid, arguments, &group.nodes, work, why)?;
        self.record_output(node, form, result);
        Ok(())
    }

    /// Few rows: the keys of each are shared out among blocks, each of which leaves a partial result.
    pub fn attention_parts(&mut self, group: &Group, node: NodeId) -> Result<(), LowerError> {
        let (cache, layer) = self.attention_of(node)?;
        let (rows, place) = (self.rows_of(group), self.cache(cache)?);
        let (state, window) = self.seen_from(group, node, place.window);
        let query = self.whole_rows(self.graph().node(node).inputs[0])?;
        let extrema = self.buffer(layer.extrema_len(rows) * 8);
        let values = self.buffer(layer.values_len(rows) * 4);
        let arguments = attention_decode::Arguments {
            q: query,
            kv: CachePlace { window, ..place }.view(),
            state,
            extrema,
            values,
            segment: layer.segment(),
            record_stride: self.record_stride(group),
        };
        let bytes = self.visible_bytes(cache) * rows as u64;
        let flops = self.visible_values(cache) * rows as u64 * layer.group as u64 * 2;
        let work = Work { bytes, flops };
        let why = format!("one row: {} splits of the keys", layer.splits());
        self.launch(layer.decode()?, layer.decode_grid(rows), arguments, &[node], work, why)?;
        self.parts.insert(node, PartsPlace { extrema, values });
        Ok(())
    }

    /// The partial results, merged.
    pub fn attention_merge(&mut self, group: &Group, node: NodeId) -> Result<(), LowerError> {
        let (_, layer) = self.attention_of(node)?;
        let PartsPlace { extrema, values } =
            *self.parts.get(&node).ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(node) })?;
        let (rows, splits) = (self.rows_of(group), layer.splits());
        let (state, _) = self.seen_from(group, node, u32::MAX);
        let record_stride = self.record_stride(group);
        let width = layer.heads() as u64 * layer.head_dim as u64 * rows as u64;
        let int8 = self.schedule.forms(node).int8;
        let form = if int8 { Form::Int8 } else { Form::F32 };
        let out = self.alloc_value(node, form, rows);
        let (instance, arguments): (_, LaunchArguments<Span>) = if int8 {
            let Int8Span { codes: xq, scales: xscale, sums: xsum } = Int8Span::of(out, width);
            let arguments =
                attention_combine_int8::Arguments { extrema, values, state, xq, xscale, xsum, splits, record_stride };
            (layer.combine_int8()?, arguments.into())
        } else {
            let arguments = attention_combine::Arguments { extrema, values, state, out, splits, record_stride };
            (layer.combine()?, arguments.into())
        };
        let work = Work { bytes: layer.values_len(rows) * 4, flops: 0 };
        self.launch(instance, layer.combine_grid(rows), arguments, &group.nodes, work, "merges the splits")?;
        self.record_output(node, form, out);
        Ok(())
    }

    /// The last rows of a chunk to the pages of their window.
    pub fn keep_rows(&mut self, group: &Group, append: NodeId) -> Result<(), LowerError> {
        let missing = || LowerError::NoValue { node: self.graph().full_name(append) };
        let Elem::Kv(cache) = self.graph().node(append).ty.elem else { return Err(missing()) };
        let [k_stage, v_stage] = self.stages.get(&cache).copied().ok_or_else(missing)?;
        let place = self.cache(cache)?;
        let layer = self.common.can.attention(self.graph(), cache, self.graph().cache(cache).kv_heads, 1);
        let rows = self.rows();
        let arguments = keep_rows::Arguments {
            k_stage,
            v_stage,
            state: self.state(group),
            kv: place.view_mut(),
            width: layer.row_len(),
            rows,
        };
        let kept = u64::from(rows.min(place.capacity * place.max_pages));
        let bytes = 4 * kept * layer.row_len() as u64 * self.common.can.kv.bytes();
        let why = format!("{} pages of a window: all rows of the chunk have read them", place.max_pages);
        self.launch(layer.keep()?, layer.keep_grid(rows), arguments, &[], Work { bytes, flops: 0 }, why)
    }

    /// Many rows: on tensor cores, by warpgroups where the pass allows, or plainly where the cache is f32.
    pub fn attention(&mut self, group: &Group, node: NodeId) -> Result<(), LowerError> {
        let (cache, layer) = self.attention_of(node)?;
        let (rows, state, place) = (self.rows(), self.state(group), self.cache(cache)?);
        let query = self.whole_rows(self.graph().node(node).inputs[0])?;
        let bf16 = self.schedule.forms(node).bf16;
        let (form, element) = if bf16 { (Form::BF16, ElementType::BF16) } else { (Form::F32, ElementType::F32) };
        let out = self.alloc_value(node, form, rows);
        let (q, kv, group_heads) = (query, place.view(), layer.group);
        let stage = self.stages.get(&cache).copied();
        let [k, v] = stage.unwrap_or_default();
        let stage = StageViewArguments { k, v, is_used: stage.is_some().into() };
        let width = layer.heads() as u64 * layer.head_dim as u64;
        let seen = layer.window.unwrap_or(u32::MAX).min(rows).div_ceil(2) as u64;
        let bytes = rows as u64 * width * 8 + self.visible_bytes(cache);
        let work = Work { bytes, flops: 4 * rows as u64 * width * seen };
        let ahead = matches!(self.graph().node(node).op, Op::AttentionAhead { .. });
        let places = self.common.places.soft.filter(|_| ahead);
        let reach = places.map(|soft| {
            let bytes = rows as u64 * 4;
            picture_end::Arguments { ahead: Span::Fixed(Range { region: Region::Arena, offset: soft.ahead, bytes }) }
        });
        if self.schedule.is_by_warpgroups(node) {
            let block = layer.block_for(rows);
            let instance = layer.warpgroups(block, element, ahead)?;
            let tile = layer.block_rows(block);
            let why = format!("{rows} rows: warpgroups, tiles of {tile} rows by {group_heads} heads on the same keys");
            let why = Choice::because(why).over("warps: their products wait for each other");
            let arguments = attention_warpgroups::Arguments { q, kv, stage, state, out, group: group_heads };
            let arguments: LaunchArguments<Span> = match reach {
                Some(reach) => arguments.with_slot(attention_warpgroups::slot::reach, reach),
                None => arguments.into(),
            };
            self.launch(instance, layer.warpgroups_grid(block, rows), arguments, &group.nodes, work, why)?;
            self.record_output(node, form, out);
            return Ok(());
        }
        match layer.flash(element, ahead)? {
            Some(flash) => {
                let none = self.schedule.note(group).unwrap_or("they are switched off");
                let why = format!("many rows: tensor cores, tiles of {} rows", flash.rows);
                let why = Choice::because(why).over(format!("warpgroups: {none}"));
                let grid = flash.grid(&layer, rows);
                let arguments = attention_flash::Arguments { q, kv, stage, state, out, group: group_heads };
                let arguments: LaunchArguments<Span> = match reach {
                    Some(reach) => arguments.with_slot(attention_flash::slot::reach, reach),
                    None => arguments.into(),
                };
                self.launch(flash.instance, grid, arguments, &group.nodes, work, why)?;
            }
            None => {
                let why = "keys and values in f32: the plain kernel";
                let record_stride = self.record_stride(group);
                let arguments =
                    attention_plain::Arguments { q, kv, stage, state, out, group: group_heads, record_stride };
                let arguments: LaunchArguments<Span> = match reach {
                    Some(reach) => arguments.with_slot(attention_plain::slot::reach, reach),
                    None => arguments.into(),
                };
                self.launch(layer.plain(ahead)?, [layer.heads(), rows, 1], arguments, &group.nodes, work, why)?;
            }
        }
        self.record_output(node, form, out);
        Ok(())
    }
}
