//! A picture or a sound that a request attaches.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::soft::{Patches, TowerLimits};

/// A picture or a sound, as its tower reads it, in a prompt. A copy shares what it holds.
#[derive(Clone)]
pub struct Attachment {
    /// Index of the tower in the plan.
    pub tower: usize,
    /// Where its first soft token stands; from there on the prompt has a placeholder for each.
    pub position: u32,
    values: Arc<[f32]>,
    columns: u32,
    rows: u32,
    /// Of everything that its soft tokens depend on.
    pub(super) hash: [u64; 4],
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Attachment { tower, position, columns, rows, .. } = self;
        write!(f, "Attachment({columns} x {rows} of tower {tower} at {position})")
    }
}

impl Attachment {
    /// Its hash takes some milliseconds: one is made where nobody waits for it.
    pub fn new(tower: usize, position: u32, patches: Patches<'_>) -> Attachment {
        let Patches { values, columns, rows } = patches;
        let mut hasher = blake3::Hasher::new();
        hasher.update(
            &[(tower as u64).to_le_bytes(), (u64::from(columns) << 32 | u64::from(rows)).to_le_bytes()].concat(),
        );
        // Bytes of a few thousand numbers at a time: there is no second copy of all.
        for values in values.chunks(4096) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
        let words = hasher.finalize();
        let word = |index: usize| words.as_bytes().as_chunks::<8>().0[index];
        let hash = [0, 1, 2, 3].map(|index| u64::from_le_bytes(word(index)));
        Attachment { tower, position, values: values.into(), columns, rows, hash }
    }

    /// The same at another place.
    pub fn at(self, position: u32) -> Attachment {
        Attachment { position, ..self }
    }

    pub fn patches(&self) -> Patches<'_> {
        Patches { values: &self.values, columns: self.columns, rows: self.rows }
    }

    /// Its soft tokens' positions. Only of one that was checked.
    pub(super) fn positions(&self, towers: &[TowerLimits]) -> Range<usize> {
        let soft = towers[self.tower].medium.soft(u64::from(self.columns) * u64::from(self.rows));
        self.position as usize..self.position as usize + soft as usize
    }
}
