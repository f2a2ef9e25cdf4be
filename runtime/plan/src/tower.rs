//! Towers: programs that make soft tokens of pictures, which then stand in a sequence in place of tokens.
//!
//! A tower's program is like the text's, over other rows: patches for a chunk's tokens, soft tokens for the asked ones. It has no
//! caches, since a picture is read in one pass.

use serde::{Deserialize, Serialize};

use crate::list::at_most;
use crate::program::{Program, ValueIndex};

/// Most towers a plan may have.
pub const MOST_TOWERS: usize = 4;

/// One tower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tower {
    /// What its values are found under: `vision`.
    pub name: String,
    /// From patches to soft tokens. [`Program::chunk`] is the most patches of a picture, [`Program::asked`] the most soft tokens.
    pub program: Program,
    /// Pixels along a patch.
    pub patch: u32,
    /// Patches along the square that one soft token stands for.
    pub pool: u32,
    pub tokens: MediaTokens,
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub stages: Vec<Stage>,
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

impl Tower {
    /// Numbers of a patch: its pixels, of three channels.
    pub const fn patch_width(&self) -> u32 {
        3 * self.patch * self.patch
    }
}
