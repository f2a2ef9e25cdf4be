//! Prompts through the prefill phases: the segments of a chunk, and the rows of it that are asked for.
//!
//! With one asked row a phase is run as a whole. Of several, each runs the asked part by itself.

use gemma4c_plan::cuda::{PhaseKind, SEGMENT_ROWS, Segment, record};

use super::{Awaited, BackendDevice, Shape};
use crate::RuntimeError;
use crate::backend::{Pick, Run};
use crate::engine::device::{AskedRow, Chunk, Picked};
use crate::soft::SoftRows;

impl BackendDevice {
    /// Chunks of prompts as the segments of one, which goes through the smallest phase that takes it.
    pub(super) fn queue_chunk(&mut self, chunks: &[Chunk<'_>], asked: &[AskedRow]) -> Result<(), RuntimeError> {
        let (mut tokens, mut segments, mut soft) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks {
            // A free row has a token like any other.
            tokens.resize(tokens.len().next_multiple_of(SEGMENT_ROWS as usize), 0);
            let (first_row, rows) = (tokens.len() as u32, chunk.tokens.len() as u32);
            segments.push(Segment { position: chunk.position, rows, first_row, slot: chunk.slot });
            soft.extend(chunk.soft.iter().map(|rows| SoftRows { first: rows.first + first_row as usize, ..*rows }));
            tokens.extend_from_slice(chunk.tokens);
        }
        let rows = tokens.len() as u32;
        let takes_it = |shape: &Shape| shape.kind == PhaseKind::Prefill && shape.rows >= rows;
        let phase = self.phases.iter().position(takes_it);
        let phase = phase.ok_or_else(|| RuntimeError::Backend(format!("no phase of the plan reads {rows} tokens")))?;
        let Shape { asked_from, steps, rows: phase_rows, .. } = self.phases[phase];
        self.place_soft(&soft, &mut tokens, phase_rows)?;
        self.write(self.places.tokens, &tokens)?;
        self.write(self.places.chunk, &self.record(0, rows, 0, 0))?;
        self.write(self.places.segments, &Segment::words(&segments, phase_rows))?;
        let trunk = Run { phase, steps: (0, asked_from), pick: Pick::None };
        self.latest_chunk = Some((phase, segments.clone()));
        match asked {
            [] => {
                self.run(trunk, 1)?;
                self.results.push_back(Awaited::Done);
                Ok(())
            }
            [one] => {
                self.write_asked(one, &segments[one.chunk], 0)?;
                let pick = self.pick_for(&[one.picking]);
                self.run_rows(Run { phase, steps: (0, steps), pick }, &[one.picking], self.places.asked)
            }
            several => {
                let is_masked = several.iter().any(|row| row.picking.masked);
                if is_masked || several.iter().filter(|row| row.picking.token).count() as u32 > self.history_rows {
                    let count = several.len();
                    return Err(RuntimeError::Backend(format!("{count} rows of one chunk cannot be asked for")));
                }
                self.backend.run(trunk)?;
                self.ask(several)
            }
        }
    }

    /// Asked rows of the latest chunk, which was queued without them, one after the other. Each leaves its token in its
    /// own word of the same entry of the history, and its logits where the next one's will be. Their result is one.
    pub(crate) fn ask(&mut self, asked: &[AskedRow]) -> Result<(), RuntimeError> {
        let (phase, segments) = self.latest_chunk.clone().ok_or_else(|| RuntimeError::Backend("no chunk".into()))?;
        let Shape { asked_from, steps, .. } = self.phases[phase];
        let (mut columns, mut picked, mut all) = (0, false, Vec::with_capacity(asked.len()));
        for row in asked {
            self.write_asked(row, &segments[row.chunk], columns)?;
            let pick = self.pick_for(&[row.picking]);
            self.backend.run(Run { phase, steps: (asked_from, steps), pick })?;
            all.push(if row.picking.logits { self.read_logits(0)? } else { Vec::new() });
            columns += u32::from(row.picking.token);
            picked |= pick != Pick::None;
        }
        if columns > 0 {
            self.send_back(columns, picked)?;
        }
        let result = match asked.iter().all(|row| row.picking.token && !row.picking.logits) {
            true => Awaited::Tokens(columns),
            false => {
                let mut tokens = if columns > 0 { self.read_tokens()? } else { Vec::new() }.into_iter();
                let mut of = |row: &AskedRow| if row.picking.token { tokens.next() } else { None };
                let picked = asked.iter().zip(all);
                let picked = picked.map(|(row, logits)| Picked { token: of(row).unwrap_or(u32::MAX), logits });
                Awaited::Read(picked.collect())
            }
        };
        self.results.push_back(result);
        Ok(())
    }

    fn write_asked(&mut self, asked: &AskedRow, segment: &Segment, column: u32) -> Result<(), RuntimeError> {
        let Segment { position, first_row, slot, .. } = *segment;
        self.entered[0] = Some((slot, position + asked.row));
        let mut words = self.record(position + asked.row, 1, first_row + asked.row, slot);
        self.settings(&mut words, &asked.picking);
        words[record::COLUMN] = column;
        self.write_row_seats(self.history_rows, 1, [slot].into_iter())?;
        self.write(self.places.asked, &words)
    }
}
