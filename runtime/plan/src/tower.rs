//! Towers: programs that make soft tokens of pictures and sound, which then stand in a sequence in place of tokens.
//!
//! A tower's program is like the text's, over other rows: patches or frames for a chunk's tokens, soft tokens for the
//! asked ones. It has no caches, since a medium is read in one pass.

use serde::{Deserialize, Serialize};

use crate::list::at_most;
use crate::program::{Program, ValueIndex};

/// Most towers a plan may have.
pub const MOST_TOWERS: usize = 4;

/// One tower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tower {
    /// What its values are found under: `vision`, `audio`.
    pub name: String,
    /// From patches or frames to soft tokens. [`Program::chunk`] is the most of them in a medium, [`Program::asked`]
    /// the most soft tokens.
    pub program: Program,
    pub medium: Medium,
    pub tokens: MediaTokens,
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub stages: Vec<Stage>,
}

/// What a tower reads, and how it is cut into rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Medium {
    Picture {
        /// Pixels along a patch.
        patch: u32,
        /// Patches along the square that one soft token stands for.
        pool: u32,
    },
    /// Sound as frames of log-mel features; the tower halves their number twice, rounded up.
    Mel { bins: u32 },
    /// Sound as frames of so many samples, each a soft token.
    Samples { frame: u32 },
}

impl Medium {
    /// Numbers of a patch (its pixels, of three channels) or of a frame.
    pub const fn row_width(self) -> u32 {
        match self {
            Medium::Picture { patch, .. } => 3 * patch * patch,
            Medium::Mel { bins } => bins,
            Medium::Samples { frame } => frame,
        }
    }

    /// Soft tokens that become of so many patches or frames.
    pub const fn soft(self, rows: u64) -> u64 {
        match self {
            Medium::Picture { pool, .. } => rows / (pool as u64 * pool as u64),
            Medium::Mel { .. } => rows.div_ceil(2).div_ceil(2),
            Medium::Samples { .. } => rows,
        }
    }

    /// Whether it is a picture, whose soft tokens may see each other.
    pub const fn is_picture(self) -> bool {
        matches!(self, Medium::Picture { .. })
    }
}

/// The tokens around a medium in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaTokens {
    /// Comes before the soft tokens.
    pub begin: u32,
    /// Holds the place of one soft token; a chat template writes it once for a whole medium.
    pub placeholder: u32,
    /// Comes after them.
    pub end: u32,
}

/// A value of the tower's program that has a name for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    pub name: String,
    pub value: ValueIndex,
}
