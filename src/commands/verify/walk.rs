//! A pass over a model on a device, launch by launch.
//!
//! Every range that a launch writes is filled with ones before it, so that a result can only come from this launch.

use std::collections::HashSet;

use anyhow::Result;
use gemma4c_plan::ValueIndex;
use gemma4c_plan::cuda::{PhaseKind, RECORD_WORDS, Range, Region, Segment};
use gemma4c_runtime::{Backend, Pick, Run, argmax};

use super::compare::{self, Difference, Rerouted};
use super::drift::Drift;
use super::limits;
use super::meaning::{Content, Left, Meaning};
use super::numbers::Fault;
use super::reference::{Reference, Rows};

/// What a step left, beside what it should have.
pub struct Finding {
    /// Of the plan's phases.
    pub phase: usize,
    pub step: usize,
    pub value: ValueIndex,
    pub content: Content,
    /// Of the first of the step's rows.
    pub position: u32,
    pub outcome: Outcome,
    pub limit: f64,
}

pub enum Outcome {
    Numbers(Difference),
    Experts(Rerouted),
    Fault(Fault),
}

impl Finding {
    /// The error as a fraction of its limit: more than 1 is too much.
    pub fn share(&self) -> f64 {
        match &self.outcome {
            Outcome::Numbers(difference) => difference.share(self.limit),
            Outcome::Experts(rerouted) => rerouted.regret / self.limit,
            Outcome::Fault(_) => f64::INFINITY,
        }
    }

    pub fn is_bad(&self) -> bool {
        self.share() > 1.0
    }
}

/// The errors of a pass in which every step worked on what the steps before it had left.
pub struct Together {
    pub phase: usize,
    pub position: u32,
    /// Layers, their errors and limits.
    pub layers: Vec<(u32, f64, f64)>,
    /// The logits' error and limit.
    pub logits_error: (f64, f64),
    /// As the device left them.
    pub logits: Vec<f32>,
    /// Rows for which experts were chosen that the CPU has not.
    pub rerouted: usize,
}

impl Together {
    /// Whether its logits are these, to the bit.
    pub fn has_logits(&self, logits: &[f32]) -> bool {
        let same = self.logits.iter().zip(logits).all(|(a, b)| a.to_bits() == b.to_bits());
        same && self.logits.len() == logits.len()
    }

    /// Without what would be a megabyte of a large vocabulary.
    pub fn without_logits(&self) -> Together {
        let Together { phase, position, logits_error, rerouted, .. } = *self;
        Together { phase, position, layers: self.layers.clone(), logits_error, logits: Vec::new(), rerouted }
    }
}

/// A device that is led through passes.
pub struct Walk<'a> {
    pub meaning: &'a Meaning<'a>,
    pub backend: &'a mut dyn Backend,
    /// Every limit is multiplied by this.
    pub tolerance: f64,
    /// What noise does to the model.
    pub drift: &'a Drift,
}

impl Walk<'_> {
    /// Runs every step of a phase on the CPU's values, and says how each did. Memory and caches are left as the CPU
    /// would have left them.
    pub fn alone(&mut self, phase_index: usize, pass: &Reference) -> Result<Vec<Finding>> {
        let phase = &self.meaning.program.phases[phase_index];
        self.stage(pass)?;
        let mut findings = Vec::new();
        // The values that are the CPU's by now.
        let mut right: HashSet<ValueIndex> = HashSet::new();
        for step in 0..phase.steps.len() {
            let left = self.meaning.left(phase, step, pass)?;
            self.launch(phase_index, step, &left)?;
            let mut made = Vec::new();
            for place in &left {
                let bytes = self.read(&place.parts)?;
                let outcome = self.judge(place, pass, &bytes)?;
                let limit = limits::alone(place.content, self.meaning.rounding(place.value, &right)) * self.tolerance;
                let (value, content, position) = (place.value, place.content, pass.position(place.rows));
                findings.push(Finding { phase: phase_index, step, value, content, position, outcome, limit });
                self.put_right(place, pass)?;
                made.push(place.value);
            }
            right.extend(made);
            right.extend(phase.steps[step].nodes.iter().filter(|node| self.meaning.is_cache(**node)));
        }
        Ok(findings)
    }

    fn judge(&self, place: &Left, pass: &Reference, bytes: &[u8]) -> Result<Outcome> {
        let program = &self.meaning.plan.program;
        Ok(match place.content {
            Content::Experts => {
                let routing = pass.routing(self.meaning.plan, place.value, place.rows)?;
                Outcome::Experts(compare::routes(&routing, &words(bytes)))
            }
            Content::Numbers(numbers) => {
                let (expected, found) = (pass.rows(program, place.value, place.rows)?, numbers.decode(bytes));
                match found.fault {
                    Some(fault) => Outcome::Fault(fault),
                    None => Outcome::Numbers(compare::compare(expected, &found, self.meaning.width(place.value))),
                }
            }
        })
    }

    /// Writes the CPU's values to a range.
    fn put_right(&mut self, place: &Left, pass: &Reference) -> Result<()> {
        let bytes = match place.content {
            Content::Experts => {
                let routing = pass.routing(self.meaning.plan, place.value, place.rows)?;
                routing.ids.iter().flat_map(|id| id.to_le_bytes()).collect()
            }
            Content::Numbers(numbers) => {
                numbers.encode(pass.rows(&self.meaning.plan.program, place.value, place.rows)?)
            }
        };
        let mut from = 0;
        for part in &place.parts {
            let to = from + part.bytes as usize;
            self.backend.write(*part, &bytes[from..to])?;
            from = to;
        }
        Ok(())
    }

    /// Runs a phase on what its own steps leave, and says how the layers' outputs did.
    pub fn together(&mut self, phase_index: usize, pass: &Reference) -> Result<Together> {
        let program = &self.meaning.plan.program;
        let phase = &self.meaning.program.phases[phase_index];
        self.stage(pass)?;
        let mut rerouted: HashSet<usize> = HashSet::new();
        let mut layers: Vec<(u32, f64, f64)> = Vec::new();
        let (mut logits, mut logits_error) = (Vec::new(), (f64::INFINITY, 0.0));
        for step in 0..phase.steps.len() {
            let mut left = self.meaning.left(phase, step, pass)?;
            left.retain(|place| self.tells_of_depth(place));
            self.launch(phase_index, step, &left)?;
            for place in &left {
                let bytes = self.read(&place.parts)?;
                // The asked row is the last of its pass.
                let first_row = pass.tokens.len() - pass.count(place.rows);
                let Content::Numbers(numbers) = place.content else {
                    let routing = pass.routing(self.meaning.plan, place.value, place.rows)?;
                    rerouted.extend(compare::routes(&routing, &words(&bytes)).rows.iter().map(|row| row + first_row));
                    continue;
                };
                let (expected, found) = (pass.rows(program, place.value, place.rows)?, numbers.decode(&bytes).values);
                let error = compare::together(expected, &found);
                let last = layers.last().map_or(0, |(layer, ..)| *layer);
                let layer = self.meaning.layer_output(place.value);
                let (rows, drift) = (pass.count(place.rows), self.drift.of(place.value, pass.position));
                let limit =
                    limits::together(layer.unwrap_or(last), rows, self.meaning.is_exact, drift) * self.tolerance;
                match layer {
                    Some(layer) if layers.iter().all(|(known, ..)| *known != layer) => {
                        layers.push((layer, error, limit));
                    }
                    Some(_) => {}
                    None => (logits, logits_error) = (found, (error, limit)),
                }
            }
        }
        let (position, rerouted) = (pass.position, rerouted.len());
        Ok(Together { phase: phase_index, position, layers, logits_error, logits, rerouted })
    }

    /// Layers' outputs, the logits, and where rows part ways.
    fn tells_of_depth(&self, place: &Left) -> bool {
        let is_output = place.value == self.meaning.plan.program.output;
        match place.content {
            Content::Experts => true,
            Content::Numbers(_) => is_output || self.meaning.layer_output(place.value).is_some(),
        }
    }

    /// The tokens that the device picks after a pass, by the largest logit and as the only candidate of a sample, and
    /// the one that the logits say.
    pub fn picks(&mut self, ran: &Together, pass: &Reference) -> Result<([u32; 2], u32)> {
        let places = &self.meaning.program.places;
        let end = self.meaning.program.phases[ran.phase].steps.len();
        let next = pass.position + pass.tokens.len() as u32;
        let rows = self.meaning.program.decode_rows();
        let place = arena(places.history + 4 * (next % places.history_len) as u64 * rows as u64, 4);
        self.write(places.suppress, &vec![u32::MAX; places.suppress_len as usize])?;
        let mut picked = [u32::MAX; 2];
        for (picked, pick) in picked.iter_mut().zip([Pick::Largest, Pick::Sampled]) {
            self.stage(pass)?;
            self.backend.write(place, &[0xff; 4])?;
            self.backend.run(Run { phase: ran.phase, steps: (end, end), pick })?;
            *picked = words(&self.read(&[place])?)[0];
        }
        Ok((picked, argmax(&ran.logits).unwrap_or(u32::MAX)))
    }

    /// Runs one step after filling its outputs with ones.
    fn launch(&mut self, phase: usize, step: usize, left: &[Left]) -> Result<()> {
        for part in left.iter().flat_map(|place| &place.parts) {
            self.backend.write(*part, &vec![0xff; part.bytes as usize])?;
        }
        Ok(self.backend.run(Run { phase, steps: (step, step + 1), pick: Pick::None })?)
    }

    /// Writes a pass's tokens and positions to the device: as a chunk with its last row asked for, and its first as the
    /// decoded row.
    fn stage(&mut self, pass: &Reference) -> Result<()> {
        let places = self.meaning.program.places;
        let rows = pass.tokens.len() as u32;
        // Temperature, top-k, top-p and the seed.
        let settings = [1.0f32.to_bits(), 1, 1.0f32.to_bits(), 0, 0];
        let record = |position: u32, rows: u32, token: u32| -> Vec<u32> {
            let mut words = vec![position, rows, token, 0, position + rows];
            words.extend(settings);
            words.resize(RECORD_WORDS as usize, 0);
            words
        };
        self.write(places.tokens, &pass.tokens)?;
        self.write(places.rows, &record(pass.position, 1, pass.tokens[0]))?;
        self.write(places.chunk, &record(pass.position, rows, pass.tokens[0]))?;
        let prefill = self.meaning.program.phases.iter().filter(|phase| phase.kind == PhaseKind::Prefill);
        let most = prefill.map(|phase| phase.rows).max().unwrap_or(rows);
        self.write(places.segments, &Segment::words(&[Segment::alone(pass.position, rows, 0)], most))?;
        self.write(places.asked, &record(pass.position(Rows::Asked), 1, rows - 1))
    }

    fn write(&mut self, offset: u64, words: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(self.backend.write(arena(offset, bytes.len() as u64), &bytes)?)
    }

    fn read(&mut self, parts: &[Range]) -> Result<Vec<u8>> {
        let mut bytes = vec![0; parts.iter().map(|part| part.bytes as usize).sum()];
        let mut rest = &mut bytes[..];
        for part in parts {
            let (now, later) = rest.split_at_mut(part.bytes as usize);
            self.backend.read(*part, now)?;
            rest = later;
        }
        Ok(bytes)
    }
}

fn arena(offset: u64, bytes: u64) -> Range {
    Range { region: Region::Arena, offset, bytes }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
