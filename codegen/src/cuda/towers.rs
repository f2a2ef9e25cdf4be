//! A tower's phases: from the patches of a picture to its soft tokens, for pictures up to several sizes.

use gemma4c_graph::passes::{self, Goal};
use gemma4c_graph::{Group, NodeId, Op, RowCount};
use gemma4c_plan::cuda::{Form, Phase, RECORD_WORDS, Range, Region, TowerPlaces};

use super::common::{Common, index_of_values};
use super::error::LowerError;
use super::launch::Span;
use super::model::{TowerGraph, TowerMedium};
use super::phase::{PhaseBuilder, Work};
use super::reports::Reports;
use crate::kernels::heads::inverse_frequencies;
use crate::kernels::tower::{self, flash, sound};
use crate::passes::{self as target_passes, PhaseRows};

/// Soft tokens of the pictures that phases are compiled for, below the most that the tower takes.
const OF_PICTURES: [u32; 4] = [70, 140, 280, 560];
/// The same of sounds: two and a half, five and ten seconds.
const OF_SOUNDS: [u32; 3] = [63, 125, 250];

/// "tower 280": a picture of so many soft tokens, at most; "sound 250".
fn phase_name(medium: TowerMedium, soft: u32) -> String {
    format!("{} {soft}", medium.name())
}

/// Where a picture is put, and what becomes of it. `reserve` gives a place for so many words.
pub fn places(tower: &TowerGraph<'_>, reserve: &mut impl FnMut(u64) -> u64) -> TowerPlaces {
    let (patches, soft) = (tower.meaning.chunk as u64, tower.meaning.asked as u64);
    let width = tower.graph.output.map_or(0, |id| tower.graph.node(id).ty.width as u64);
    TowerPlaces {
        grids: reserve(2 * RECORD_WORDS as u64),
        patches: reserve(patches * tower.patch_width as u64),
        soft: reserve(soft * width),
    }
}

/// The phases of a tower.
pub fn phases(
    common: &mut Common<'_>,
    tower: &TowerGraph<'_>,
    places: TowerPlaces,
    disabled: &[String],
    base: u64,
    reports: &mut Reports,
) -> Result<Vec<Phase>, LowerError> {
    let of_text = std::mem::replace(&mut common.value_index, index_of_values(tower.meaning));
    common.tower = Some(places);
    let (fused, of_graph) = passes::fuse(tower.graph, Goal::Tower, disabled);
    let most = tower.meaning.asked;
    let mut phases = Vec::new();
    let (sizes, each) = match tower.medium {
        TowerMedium::Picture { pool } => (&OF_PICTURES[..], pool * pool),
        TowerMedium::Sound { frames } => (&OF_SOUNDS[..], frames),
    };
    for soft in sizes.iter().copied().filter(|soft| *soft < most).chain([most]) {
        let rows = PhaseRows::Tower { patches: soft * each, soft };
        let (schedule, of_target) = target_passes::schedule(fused.clone(), rows, &common.can, disabled);
        reports.add_tower(tower.medium.name(), of_graph.clone(), of_target);
        let mut builder = PhaseBuilder::new(common, &schedule);
        let end = builder.lower()?;
        phases.push(builder.finish(phase_name(tower.medium, soft), end, base)?);
    }
    common.value_index = of_text;
    common.tower = None;
    Ok(phases)
}

impl PhaseBuilder<'_, '_> {
    /// An operation that only patches and soft tokens have.
    pub fn of_patches(&mut self, group: &Group, id: NodeId) -> Result<(), LowerError> {
        let node = self.graph().node(id);
        let (rows, width) = (self.rows_of(group), node.ty.width);
        let own = self.grid(node.ty.rows);
        let mut work = Work { bytes: rows as u64 * width as u64 * 8, flops: 0 };
        let inputs = node.inputs.iter().map(|input| self.whole_rows(*input)).collect::<Result<Vec<_>, _>>()?;
        let out = self.alloc_value(id, Form::F32, rows);
        match node.op {
            Op::AxisRows { table, axis } => {
                let length = self.graph().weight(table).dim(1) as u32;
                let table = self.common.weights.floats(table)?;
                let arguments = tower::axis_rows::Arguments { table, grid: own, out, width, length, axis };
                let instance = tower::axis_rows_instance()?;
                self.launch(instance, tower::grid(width, rows), arguments, &[id], work, "rows by coordinate")?;
            }
            Op::GridRope { head_dim: dim, base } => {
                let frequencies = inverse_frequencies(dim / 2, base as f64, None);
                let name = format!("angles of halves of heads of {dim}, base {base}");
                let inverse_frequencies = self.common.weights.constant(&name, frequencies);
                let (x, heads) = (inputs[0], width / dim);
                let arguments = tower::grid_rope::Arguments { x, inverse_frequencies, grid: own, out, heads, dim };
                let blocks = tower::grid(width / 2, rows);
                self.launch(tower::rope_instance()?, blocks, arguments, &[id], work, "angles by coordinate")?;
            }
            Op::GridMean { side } => {
                let grid = self.grid(RowCount::Patches);
                let arguments = tower::grid_mean::Arguments { x: inputs[0], grid, squares: own, out, width, side };
                let blocks = tower::grid(width, rows);
                self.launch(tower::mean_instance()?, blocks, arguments, &[id], work, "a soft token a row")?;
            }
            Op::SubMean { group } => {
                let arguments = tower::sub_mean::Arguments { x: inputs[0], out, width: group };
                let blocks = [rows * (width / group), 1, 1];
                self.launch(tower::sub_mean_instance()?, blocks, arguments, &[id], work, "a warp a group of values")?;
            }
            Op::HalvingConv { weight, channels } if channels * 9 <= sound::MOST_TAPS => {
                let input = self.graph().node(node.inputs[0]).ty;
                let columns = input.width / channels;
                let blocks = [columns.div_ceil(2), rows, 1];
                let outputs = width / blocks[0];
                let weight = self.common.weights.floats(weight)?;
                let (grid, halvings) = (self.grid(RowCount::Patches), u32::from(input.rows == RowCount::Halves));
                let x = inputs[0];
                let arguments = sound::halving_conv::Arguments { x, weight, grid, out, columns, outputs, halvings };
                work.flops = 18 * channels as u64 * rows as u64 * width as u64;
                self.launch(sound::halving(channels * 9)?, blocks, arguments, &[id], work, "a warp a place")?;
            }
            Op::CausalConv { weight } => {
                let taps = self.graph().weight(weight).dim(0) as u32;
                let weight = self.common.weights.floats(weight)?;
                let arguments = sound::causal_conv::Arguments { x: inputs[0], weight, out, width, taps };
                self.launch(sound::causal()?, tower::grid(width, rows), arguments, &[id], work, "a thread a value")?;
            }
            Op::NearAttention { heads, reach, cap, weight } if reach <= sound::LONGEST_REACH => {
                let [q, k, v] = inputs[..] else {
                    return Err(LowerError::NoValue { node: self.graph().full_name(id) });
                };
                let by_distance = self.common.weights.by_distance(weight, reach, &mut self.common.kernels)?;
                let arguments = sound::near_attention::Arguments { q, k, v, by_distance, out, reach, cap };
                let instance = sound::near(width / heads)?;
                self.launch(instance, [heads, rows, 1], arguments, &[id], work, "a warp a row and head")?;
            }
            Op::FullAttention { heads } => {
                work.flops = 4 * rows as u64 * rows as u64 * width as u64;
                let [q, k, v] = inputs[..] else {
                    return Err(LowerError::NoValue { node: self.graph().full_name(id) });
                };
                let dim = width / heads;
                let fast = if self.common.can.exact { None } else { flash::instance(dim)? };
                match fast {
                    Some(instance) => {
                        let arguments = flash::attention_patches::Arguments { q, k, v, grid: own, out };
                        let why = "all patches see all: tensor cores, tiles of 64 patches";
                        self.launch(instance, flash::grid(heads, rows), arguments, &[id], work, why)?;
                    }
                    None => {
                        let arguments = tower::full_attention::Arguments { q, k, v, grid: own, out };
                        let why = "all patches see all: the plain kernel";
                        self.launch(tower::attention_instance(dim)?, [heads, rows, 1], arguments, &[id], work, why)?;
                    }
                }
            }
            Op::PlaceSoft => {
                let missing = || LowerError::OnCpuAlone { node: self.graph().full_name(id), op: node.op.name() };
                let places = self.common.places.soft.ok_or_else(missing)?;
                let arena = |offset, bytes| Span::Fixed(Range { region: Region::Arena, offset, bytes });
                let arguments = tower::place_soft::Arguments {
                    x: inputs[0],
                    soft: arena(places.rows, rows as u64 * width as u64 * 4),
                    ahead: arena(places.ahead, rows as u64 * 4),
                    out,
                    width,
                };
                let blocks = tower::grid(width, rows);
                self.launch(
                    tower::place_soft_instance()?,
                    blocks,
                    arguments,
                    &[id],
                    work,
                    "soft tokens in their places",
                )?;
            }
            _ => return Err(LowerError::OnCpuAlone { node: self.graph().full_name(id), op: node.op.name() }),
        }
        self.record_output(id, Form::F32, out);
        Ok(())
    }
}
