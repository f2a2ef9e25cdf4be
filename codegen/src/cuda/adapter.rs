//! What adapters add: each half of a pair a launch of its own, or both with the product of decoded rows that they change.
//!
//! Where pairs lie is asked here alone: in the banks of all seats, or with the weights of the plan.

use gemma4c_blocks::DType;
use gemma4c_dsl::Filled;
use gemma4c_graph::{Group, Kind, NodeId, Op, Pair, Product, WeightId};
use gemma4c_plan::cuda::{Form, PhaseKind, Range, Region, SEAT_WORDS};

use super::error::LowerError;
use super::launch::{Int8Span, Span};
use super::phase::{PhaseBuilder, Work};
use crate::kernels::adapter::{
    Arriving, SeatedRowsArguments, WideBankArguments, WidePlacesArguments, change_arguments, decoded_instance,
    narrow_decoded, narrow_grid, narrow_instance, narrow_rows, narrow_tiles, sixteen_codes, sixteen_floats,
    sixteen_halves, tiles_grid, tiles_instance, widen_grid, widen_instance, widen_rows,
};
use crate::kernels::geglu::StridedRowsArguments;
use crate::kernels::matvec::Pairs;
use crate::kernels::matvec::adapter::AdapterPlacesArguments;
use crate::kernels::matvec::formats::format;
use crate::kernels::rows::prepare::NarrowedRowsArguments;
use crate::kernels::values::value_arguments;
use crate::passes::{narrows_by_tiles, product_of, weight_of};

const ALONE: &str = "an adapter's, by itself";

impl PhaseBuilder<'_, '_> {
    /// `factor * A x`.
    pub fn narrow(&mut self, group: &Group, id: NodeId, weight: WeightId, factor: f32) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let w = self.graph().weight(weight);
        let (dtype, k, rank, seated) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32, w.dims.len() == 3);
        let rows = self.rows_of(group);
        if narrows_by_tiles(self.schedule, &self.common.can, group) {
            let (a, x) = (self.halves_of_pairs(&[weight])?, self.location(node.inputs[0], Form::BF16)?.start);
            let out = self.alloc_value(id, Form::F32, rows);
            let of = self.seated_rows(group, seated)?;
            let arguments = narrow_tiles::Arguments { a, x, rows: of, out, k, rank, count: rows, factor };
            let products = rows as u64 * rank as u64 * k as u64;
            let work = Work { bytes: (rank as u64 + rows as u64) * k as u64 * 2, flops: 2 * products };
            let why = "an adapter's, on tensor cores";
            self.launch(tiles_instance(seated)?, tiles_grid(rank, rows), arguments, &[id], work, why)?;
            self.record_output(id, Form::F32, out);
            return Ok(());
        }
        let x = self.whole_rows(node.inputs[0])?;
        let out = self.alloc_value(id, Form::F32, rows);
        let arguments = narrow_rows::Arguments { x, rows: self.seated_rows(group, seated)?, out, k, rank, factor };
        let values = value_arguments(dtype, self.half_of_pair(weight));
        let products = rows as u64 * rank as u64 * k as u64;
        let work = Work { bytes: rank as u64 * k as u64 * 2 + rows as u64 * k as u64 * 4, flops: 2 * products };
        let instance = narrow_instance(dtype, seated)?;
        let arguments = arguments.with_slot(narrow_rows::slot::value, values);
        self.launch(instance, narrow_grid(rank, rows), arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// `y + B x`.
    pub fn widen(&mut self, group: &Group, id: NodeId, weight: WeightId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let w = self.graph().weight(weight);
        let (dtype, rank, outputs, seated) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32, w.dims.len() == 3);
        let count = self.rows_of(group);
        let y = self.floats(node.inputs[0])?;
        let x = self.whole_rows(node.inputs[1])?;
        let out = self.alloc_value(id, Form::F32, count);
        let y = StridedRowsArguments { values: y.start, stride: y.stride };
        let arguments = widen_rows::Arguments { y, x, rows: self.seated_rows(group, seated)?, out, outputs, count };
        let (dtype, b) = match self.common.can.exact || self.schedule.soft_rows.is_some() {
            true => (dtype, self.half_of_pair(weight)),
            // Where the products of decoded rows read it.
            false => (DType::BF16, self.halves_of_pairs(&[weight])?),
        };
        let values = value_arguments(dtype, b);
        let products = count as u64 * rank as u64 * outputs as u64;
        let work = Work { bytes: (rank as u64 * 2 + count as u64 * 8) * outputs as u64, flops: 2 * products };
        let instance = widen_instance(dtype, rank, seated)?;
        let arguments = arguments.with_slot(widen_rows::slot::value, values);
        self.launch(instance, widen_grid(outputs, count), arguments, &[id], work, ALONE)?;
        self.record_output(id, Form::F32, out);
        Ok(())
    }

    /// The pairs that a product takes with its matrices.
    pub fn pairs(&mut self, of: &Product) -> Result<Option<PairPlaces>, LowerError> {
        let graph = self.graph();
        let halves = |pair: &Pair| match (graph.node(pair.narrow).op, graph.node(pair.widen).op) {
            (Op::Narrow { weight: a, factor }, Op::Widen { weight: b }) => Some((a, b, factor)),
            _ => None,
        };
        let all: Vec<(WeightId, WeightId, f32)> = of.adapted.iter().flatten().filter_map(halves).collect();
        let Some((first, _, strength)) = all.first().copied() else { return Ok(None) };
        let dims = &graph.weight(first).dims;
        let width = |id: &NodeId| graph.node(*id).ty.width;
        let matrices = of.matmuls.iter().map(width).zip(of.adapted.iter().map(Option::is_some)).collect();
        let pairs = Pairs { rank: dims[1] as u32, matrices, seated: dims.len() == 3 };
        let seats = dims.get(2).copied().unwrap_or(1) as u32;
        let (of_a, of_b): (Vec<WeightId>, Vec<WeightId>) = all.iter().map(|(a, b, _)| (*a, *b)).unzip();
        let a = self.halves_of_pairs(&of_a)?;
        let b = self.halves_of_pairs(&of_b)?;
        Ok(Some(PairPlaces { pairs, a, b, seats, strength }))
    }

    /// What a product of one row takes for them, and where its blocks send each other what lies between the halves.
    pub fn adapter_places(
        &mut self,
        group: &Group,
        of: &Product,
        pairs: Option<PairPlaces>,
    ) -> Result<AdapterPlacesArguments<Span>, LowerError> {
        let Some(PairPlaces { a, b, seats, strength, pairs }) = pairs else {
            let [a, b, words, spent, seat] = [Span::Unused; 5];
            let (spent_words, seats) = (0, 0);
            return Ok(AdapterPlacesArguments { a, b, words, spent, spent_words, seat, seats });
        };
        if self.packets.is_empty() {
            self.packets = self.packets_of_phase()?;
        }
        let no_value = || LowerError::NoValue { node: self.graph().full_name(of.matmuls[0]) };
        let at = self.packets.iter().position(|(known, _)| *known == of.matmuls[0]).ok_or_else(no_value)?;
        let before = (at + self.packets.len() - 1) % self.packets.len();
        let ((_, words), (_, spent)) = (self.packets[at], self.packets[before]);
        let seat = self.row_seats(group, &pairs, strength)?;
        let spent_words = spent.fixed().map_or(0, |range| (range.bytes / 4) as u32);
        Ok(AdapterPlacesArguments { a, b, words, spent, spent_words, seat, seats })
    }

    /// What lies between the halves of the pairs that a product of decoded rows takes.
    pub fn narrow_rows_of(&mut self, group: &Group, of: NodeId) -> Result<(), LowerError> {
        let owner = self.fused().group(of).clone();
        let graph = self.graph();
        let no_value = || LowerError::NoValue { node: graph.full_name(of) };
        let product = product_of(graph, &owner).ok_or_else(no_value)?;
        let Some(places) = self.pairs(&product)? else { return Err(no_value()) };
        let wide = wide_bank(Some(&places));
        let PairPlaces { pairs, a, seats, strength, .. } = places;
        let (rows, k) = (self.rows_of(group), self.graph().node(product.input).ty.width);
        let prepared = self.prepared.get(&of).copied();
        let dtype = weight_of(self.graph(), &product).map(|weight| self.graph().weight(weight).dtype);
        let integer = dtype.is_some_and(|dtype| format(dtype).integer);
        let (arriving, x): (Arriving, Filled<Span>) = if self.schedule.is_gemm(&owner) {
            let (form, _) = self.gemm_operands(&owner, product.input, weight_of(self.graph(), &product));
            let x = self.location(product.input, form)?.start;
            match form {
                Form::F16 => (Arriving::F16, sixteen_halves::Arguments { x }.into()),
                _ => (Arriving::BF16, sixteen_halves::Arguments { x }.into()),
            }
        } else if integer {
            let (Int8Span { codes: xq, scales: xscale, .. }, in_panels) = match prepared {
                Some(prepared) => (prepared.int8, prepared.in_panels),
                None => {
                    let in_panels = self.schedule.is_in_tiles(product.input);
                    let held = if in_panels { rows.next_multiple_of(8) } else { rows };
                    let x = self.location(product.input, Form::Int8)?.start;
                    (Int8Span::of(x, held as u64 * k as u64), in_panels)
                }
            };
            (Arriving::Codes { in_panels }, sixteen_codes::Arguments { xq, xscale }.into())
        } else {
            let (x, stride) = match prepared {
                Some(prepared) => (prepared.floats, k),
                None => self.floats(product.input).map(|place| (place.start, place.stride))?,
            };
            (Arriving::Floats, sixteen_floats::Arguments { x, stride }.into())
        };
        let factor = prepared.filter(|_| product.norm.is_some_and(|norm| norm.next.is_some())).map(|rows| rows.factor);
        let values = pairs.narrow_values();
        let out = self.buffer(rows as u64 * values as u64 * 4);
        let row_seats = self.row_seats(&owner, &pairs, strength)?;
        let arguments =
            narrow_decoded::Arguments { a, row_seats, wide, factor: factor.unwrap_or_default(), out, seats };
        let arguments = arguments.with_slot(narrow_decoded::slot::sixteen, x);
        let instance = decoded_instance(&pairs, k, arriving, factor.is_some())?;
        let products = rows as u64 * values as u64 * k as u64;
        let work = Work { bytes: values as u64 * k as u64 * 2 + rows as u64 * k as u64, flops: 2 * products };
        let why = format!("{rows} rows: what lies between the halves of adapters");
        self.launch(instance, [values / 16, rows, 1], arguments, &[], work, why.as_str())?;
        self.narrowed.insert(of, [out, row_seats]);
        Ok(())
    }

    /// Where the launch that prepares a product's rows leaves what lies between the halves.
    pub fn narrowed_rows(
        &mut self,
        group: &Group,
        of: NodeId,
        pairs: Option<PairPlaces>,
    ) -> Result<NarrowedRowsArguments<Span>, LowerError> {
        let Some(PairPlaces { pairs, a, seats, strength, .. }) = pairs else {
            let [a, row_seats, out] = [Span::Unused; 3];
            return Ok(NarrowedRowsArguments { a, row_seats, out, seats: 0 });
        };
        let out = self.buffer(self.rows_of(group) as u64 * pairs.narrow_values() as u64 * 4);
        let row_seats = self.row_seats(group, &pairs, strength)?;
        self.narrowed.insert(of, [out, row_seats]);
        Ok(NarrowedRowsArguments { a, row_seats, out, seats })
    }

    /// What a product of decoded rows takes to add what adapters change.
    pub fn change(&self, of: &Product, pairs: Option<PairPlaces>) -> Result<Option<Filled<Span>>, LowerError> {
        let Some(PairPlaces { pairs, b, seats, .. }) = pairs else { return Ok(None) };
        let no_value = || LowerError::NoValue { node: self.graph().full_name(of.matmuls[0]) };
        let [narrow, row_seats] = *self.narrowed.get(&of.matmuls[0]).ok_or_else(no_value)?;
        let places = WidePlacesArguments {
            b,
            narrow,
            row_seats,
            values: pairs.narrow_values(),
            rank: pairs.rank,
            seats,
            has: pairs.has(),
            second: pairs.start(1),
            third: pairs.start(2),
            rows: pairs.start(3),
        };
        Ok(Some(change_arguments(&pairs, places)))
    }

    /// Words for each product of the phase that takes adapters with it, by its first matrix. They are its own, and zero
    /// between the launches.
    fn packets_of_phase(&mut self) -> Result<Vec<(NodeId, Span)>, LowerError> {
        let graph = self.graph();
        let mut all = Vec::new();
        for group in self.schedule.ordered() {
            let Kind::Product(product) = &group.kind else { continue };
            let rank = |pair: &Pair| graph.node(pair.narrow).ty.width;
            let matrices = product.adapted.iter().map(|pair| (0, pair.is_some())).collect();
            let Some(first) = product.adapted.iter().flatten().next() else { continue };
            let pairs = Pairs { rank: rank(first), matrices, seated: false };
            let words = pairs.words(graph.node(product.input).ty.width);
            let span = self.common.packets(words)?;
            all.push((product.matmuls[0], span));
        }
        Ok(all)
    }

    /// Which seats a group's rows have.
    fn seated_rows(&self, group: &Group, seated: bool) -> Result<SeatedRowsArguments<Span>, LowerError> {
        if !seated {
            return Ok(SeatedRowsArguments { state: Span::Unused, seats: Span::Unused, segments: 0 });
        }
        if self.record_stride(group) > 0 {
            let seats = self.entries_of_rows(group)?;
            return Ok(SeatedRowsArguments { state: Span::Unused, seats, segments: 0 });
        }
        let seats = self.entries(group, 0, self.common.kv_layout.slots)?;
        Ok(SeatedRowsArguments { state: self.state(group), seats, segments: 1 })
    }

    /// An entry for each decoded row of a group, or for the asked one: its seat, or the only pair there is.
    fn row_seats(&mut self, group: &Group, pairs: &Pairs, strength: f32) -> Result<Span, LowerError> {
        if pairs.seated {
            return self.entries_of_rows(group);
        }
        let rows = self.rows_of(group) as usize;
        let entries = [f32::from_bits(1), strength].repeat(rows);
        Ok(self.common.weights.constant(&format!("the pair of {rows} rows at {strength}"), entries))
    }

    fn entries_of_rows(&self, group: &Group) -> Result<Span, LowerError> {
        let (slots, decoded) = (self.common.kv_layout.slots, self.common.decode_rows);
        match self.kind() {
            PhaseKind::Decode => self.entries(group, slots, self.rows()),
            _ => self.entries(group, slots + decoded, 1),
        }
    }

    /// So many entries of the table of seats.
    fn entries(&self, group: &Group, first: u32, count: u32) -> Result<Span, LowerError> {
        let at = self.common.places.seat_entry(first).filter(|_| self.drafter_places().is_none());
        let without_seats = || LowerError::OnCpuAlone { node: self.graph().full_name(group.anchor()), op: "narrow" };
        let bytes = u64::from(count * SEAT_WORDS) * 4;
        Ok(Span::Fixed(Range { region: Region::Arena, offset: at.ok_or_else(without_seats)?, bytes }))
    }

    /// Where those of several pairs are, one behind the other, in bf16.
    fn halves_of_pairs(&mut self, weights: &[WeightId]) -> Result<Span, LowerError> {
        let banks: Option<Vec<Range>> =
            weights.iter().map(|weight| self.common.weights.bank(*weight)?.fixed()).collect();
        let Some(banks) = banks else { return self.common.weights.rounded(weights, &mut self.common.kernels) };
        let bytes = banks.iter().map(|bank| bank.bytes).sum();
        match banks.windows(2).all(|pair| pair[0].offset + pair[0].bytes == pair[1].offset) {
            true => Ok(Span::Fixed(Range { bytes, ..banks[0] })),
            false => Err(LowerError::NoValue { node: "banks of adapters that are neighbours".into() }),
        }
    }

    /// Where a matrix of an adapter is: that of all seats, or one that was loaded.
    fn half_of_pair(&mut self, weight: WeightId) -> Span {
        let bank = self.common.weights.bank(weight);
        bank.unwrap_or_else(|| self.common.weights.blocks(weight))
    }
}

/// Where both halves of a product's pairs are.
pub struct PairPlaces {
    pub pairs: Pairs,
    a: Span,
    b: Span,
    seats: u32,
    strength: f32,
}

/// The second halves, for a launch before the product that reads them.
pub fn wide_bank(of: Option<&PairPlaces>) -> WideBankArguments<Span> {
    let Some(PairPlaces { pairs, b, seats, .. }) = of else {
        return WideBankArguments { b: Span::Unused, seats: 0, has: 0, second: 0, third: 0, rows: 0 };
    };
    WideBankArguments {
        b: *b,
        seats: *seats,
        has: pairs.has(),
        second: pairs.start(1),
        third: pairs.start(2),
        rows: pairs.start(3),
    }
}
