//! Where the rows of a phase have their records, and their tokens.

use gemma4c_graph::{Group, RowCount};
use gemma4c_plan::cuda::{PhaseKind, RECORD_WORDS, Range, Region, SEGMENT_ROWS, SEGMENT_WORDS, record};

use super::launch::Span;
use super::phase::PhaseBuilder;

impl PhaseBuilder<'_, '_> {
    /// The records of the rows that a group works on: those of a chunk's segments, or one for each decoded row.
    pub fn state(&self, group: &Group) -> Span {
        let places = &self.common.places;
        let (offset, words) = match self.kind() {
            _ if self.drafter_places().is_some() => (self.drafter_places().map_or(0, |own| own.record), RECORD_WORDS),
            PhaseKind::Decode => (places.rows, self.rows() * RECORD_WORDS),
            PhaseKind::Prefill if self.schedule.is_asked(group) => (places.asked, RECORD_WORDS),
            PhaseKind::Prefill => (places.segments, self.rows().div_ceil(SEGMENT_ROWS) * SEGMENT_WORDS),
            PhaseKind::Tower => return self.grid(self.graph().node(group.anchor()).ty.rows),
        };
        Span::Fixed(Range { region: Region::Arena, offset, bytes: words as u64 * 4 })
    }

    /// Of a tower: the record of the grid of its patches, or of its soft tokens.
    pub fn grid(&self, rows: RowCount) -> Span {
        let grids = self.common.tower.map_or(0, |places| places.grids);
        let bytes = RECORD_WORDS as u64 * 4;
        let offset = if rows == RowCount::Soft { grids + bytes } else { grids };
        Span::Fixed(Range { region: Region::Arena, offset, bytes })
    }

    /// A record that counts the rows that a group works on, for kernels that know rows by their number alone. All rows
    /// of a decode are computed, and all of a chunk up to its last segment's end, in use or not: nobody reads the
    /// result of a free row.
    pub fn row_count(&mut self, group: &Group) -> Span {
        if self.kind() == PhaseKind::Tower {
            return self.state(group);
        }
        if !self.schedule.decodes && !self.schedule.is_asked(group) {
            let offset = self.common.places.chunk;
            return Span::Fixed(Range { region: Region::Arena, offset, bytes: RECORD_WORDS as u64 * 4 });
        }
        if !self.schedule.decodes || self.rows() == 1 {
            return self.state(group);
        }
        let words = [0, self.rows(), 0, 0].map(f32::from_bits);
        self.common.weights.constant(&format!("{} rows", self.rows()), words.to_vec())
    }

    /// Words from the record of a group's row to that of the next: 0 where they have those of their segments. An asked
    /// row has a record of its own, in which its token's word is no segment's first row.
    pub fn record_stride(&self, group: &Group) -> u32 {
        if self.is_one_row(group) { RECORD_WORDS } else { 0 }
    }

    pub fn kind(&self) -> PhaseKind {
        match (self.schedule.decodes, self.schedule.soft_rows) {
            (true, _) => PhaseKind::Decode,
            (false, None) => PhaseKind::Prefill,
            (false, Some(_)) => PhaseKind::Tower,
        }
    }

    /// The tokens of the chunk's rows, or those in the records of decoded rows.
    pub fn tokens(&self) -> Span {
        let places = &self.common.places;
        let offset = match self.kind() {
            PhaseKind::Decode if self.drafter_places().is_some() => {
                self.drafter_places().map_or(0, |own| own.record) + record::TOKEN as u64 * 4
            }
            PhaseKind::Decode => places.rows + record::TOKEN as u64 * 4,
            PhaseKind::Prefill | PhaseKind::Tower => places.tokens,
        };
        let words = (self.rows() as u64 - 1) * self.token_stride() as u64 + 1;
        Span::Fixed(Range { region: Region::Arena, offset, bytes: words * 4 })
    }

    /// Words from one row's token to the next one's.
    pub fn token_stride(&self) -> u32 {
        match self.kind() {
            PhaseKind::Decode => RECORD_WORDS,
            PhaseKind::Prefill | PhaseKind::Tower => 1,
        }
    }
}
