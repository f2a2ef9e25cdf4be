//! Pictures and sounds on a device: a tower's launches, and its soft tokens in the rows of the next chunk.

use gemma4c_plan::cuda::{CudaProgram, Form, PhaseKind, RECORD_WORDS, TowerPlaces, record};
use gemma4c_plan::{Medium, Plan, RowCount, ValueIndex};

use super::{BackendDevice, arena};
use crate::RuntimeError;
use crate::backend::{Pick, Run};
use crate::cpu::Tap;
use crate::soft::{Patches, SoftRows, TowerLimits};

/// Floats that are read at a time.
const PIECE: usize = 1 << 18;

/// What a device knows of its plan's towers.
pub(super) struct Towers {
    pub(super) limits: Vec<TowerLimits>,
    all: Vec<DeviceTower>,
    /// Width of a soft token.
    width: u32,
    /// Whether the latest chunk had any: its words are still there.
    marked: bool,
}

/// One tower.
struct DeviceTower {
    places: TowerPlaces,
    medium: Medium,
    /// Its phases, as runs count them, with the patches that each takes.
    phases: Vec<(usize, u32)>,
    /// For every step of each phase, what it leaves as f32 or bf16.
    left: Vec<Vec<Vec<Left>>>,
    values: Vec<(String, u32, RowCount)>,
}

#[derive(Clone, Copy)]
struct Left {
    value: ValueIndex,
    form: Form,
    place: gemma4c_plan::cuda::Range,
}

impl Towers {
    pub(super) fn of(plan: &Plan, program: &CudaProgram) -> Towers {
        let mut first = program.phases.len();
        let mut all = Vec::new();
        for (tower, own) in plan.towers.iter().zip(&program.towers) {
            let phases = (first..).zip(own.phases.iter().map(|phase| phase.rows)).collect();
            let left = |step: &gemma4c_plan::cuda::CudaStep| {
                let readable = step.outputs.iter().filter(|output| matches!(output.form, Form::F32 | Form::BF16));
                let is_float = |value| step.outputs.iter().any(|o| o.value == value && o.form == Form::F32);
                let best = readable.filter(|output| output.form == Form::F32 || !is_float(output.value));
                best.map(|output| Left { value: output.value, form: output.form, place: output.place }).collect()
            };
            all.push(DeviceTower {
                places: own.places,
                medium: tower.medium,
                phases,
                left: own.phases.iter().map(|phase| phase.steps.iter().map(left).collect()).collect(),
                values: tower.program.values.iter().map(|v| (v.name.clone(), v.width, v.rows)).collect(),
            });
            first += own.phases.len();
        }
        Towers { limits: TowerLimits::of(plan), all, width: plan.model.hidden, marked: false }
    }
}

impl BackendDevice {
    /// The soft tokens of a medium that the tower takes. A tap is shown every value that the launches write to memory.
    pub(super) fn run_tower(
        &mut self,
        tower: usize,
        patches: Patches<'_>,
        mut tap: Option<&mut Tap<'_>>,
    ) -> Result<Vec<f32>, RuntimeError> {
        let Patches { values: patches, columns, rows } = patches;
        let (count, width) = (columns * rows, self.towers.width);
        let of = self.towers.all.get(tower).ok_or(RuntimeError::NoTower)?;
        let (places, soft) = (of.places, of.medium.soft(count.into()) as u32);
        // Soft tokens of a sound follow each other.
        let soft_columns = if let Medium::Picture { pool, .. } = of.medium { columns / pool } else { soft };
        let which = of.phases.iter().position(|(_, most)| *most >= count);
        let which =
            which.ok_or_else(|| RuntimeError::Backend(format!("no phase of the plan reads {count} patches")))?;
        let phase = of.phases[which].0;
        let mut grids = [0; 2 * RECORD_WORDS as usize];
        for (words, (rows, columns)) in
            grids.chunks_exact_mut(RECORD_WORDS as usize).zip([(count, columns), (soft, soft_columns)])
        {
            (words[record::ROWS], words[record::TOKEN]) = (rows, columns);
        }
        self.write(places.grids, &grids)?;
        self.write_floats(places.patches, patches)?;
        let steps = self.phases[phase].steps;
        debug_assert!(self.phases[phase].kind == PhaseKind::Tower);
        match &mut tap {
            None => self.backend.run(Run { phase, steps: (0, steps), pick: Pick::None })?,
            // A value may lie where a later one will: it is read as soon as it is there.
            Some(tap) => {
                for step in 0..steps {
                    self.backend.run(Run { phase, steps: (step, step + 1), pick: Pick::None })?;
                    for left in self.towers.all[tower].left[which][step].clone() {
                        let (name, width, rows) = self.towers.all[tower].values[left.value as usize].clone();
                        let rows = match rows {
                            RowCount::Soft => soft,
                            RowCount::Halves => count.div_ceil(2),
                            _ => count,
                        } as u64;
                        let of_row = if left.form == Form::BF16 { 2 } else { 4 } * width as u64;
                        // Rows of a wider value have gaps, and are nobody's to see here.
                        let phase_rows = left.place.bytes / of_row;
                        if phase_rows < rows || left.place.bytes % of_row != 0 {
                            continue;
                        }
                        let mut bytes = vec![0; (rows * of_row) as usize];
                        self.backend
                            .read(gemma4c_plan::cuda::Range { bytes: rows * of_row, ..left.place }, &mut bytes)?;
                        let mut values: Vec<f32> = match left.form {
                            Form::BF16 => bytes
                                .as_chunks()
                                .0
                                .iter()
                                .map(|b| f32::from_bits((u16::from_le_bytes(*b) as u32) << 16))
                                .collect(),
                            _ => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                        };
                        tap(&name, width as usize, &mut values);
                    }
                }
            }
        }
        self.read_floats(places.soft, soft as usize * width as usize)
    }

    /// Writes floats without a copy of all of them: a large picture is 31 MB.
    fn write_floats(&mut self, offset: u64, values: &[f32]) -> Result<(), RuntimeError> {
        self.backend.write_floats(arena(offset, 4 * values.len() as u64), values)
    }

    /// Reads floats, a piece at a time that stays in the CPU's caches on its way.
    fn read_floats(&mut self, mut offset: u64, count: usize) -> Result<Vec<f32>, RuntimeError> {
        let mut values = Vec::with_capacity(count);
        let mut bytes = vec![0; 4 * PIECE.min(count)];
        while values.len() < count {
            let bytes = &mut bytes[..4 * PIECE.min(count - values.len())];
            self.backend.read(arena(offset, bytes.len() as u64), bytes)?;
            values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)));
            offset += bytes.len() as u64;
        }
        Ok(values)
    }

    /// Puts the soft tokens of a chunk where its launches look for them, and the padding token in their places.
    pub(super) fn place_soft(
        &mut self,
        soft: &[SoftRows<'_>],
        tokens: &mut [u32],
        phase_rows: u32,
    ) -> Result<(), RuntimeError> {
        let Some(places) = self.places.soft else { return Ok(()) };
        if soft.is_empty() && !self.towers.marked {
            return Ok(());
        }
        self.towers.marked = !soft.is_empty();
        let width = self.towers.width as usize;
        let mut ahead = vec![0; phase_rows as usize];
        for &SoftRows { first, values, ahead: mut left } in soft {
            for row in first..first + values.len() / width {
                (ahead[row], tokens[row]) = (left, places.pad);
                left = left.saturating_sub(1).max(1);
            }
            self.write_floats(places.rows + (first * width * 4) as u64, values)?;
        }
        self.write(places.ahead, &ahead)
    }
}
