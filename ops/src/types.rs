//! What a value is: an element type, a symbolic row count and a width. And what the keys and values of a layer are.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::CacheId;

/// What one row of a value is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// `width` token ids; of a text one.
    Token,
    F32,
    /// `width` pairs of (expert, weight), best first, of so many experts.
    Routing {
        experts: u32,
    },
    /// The state of a KV cache after this chunk's append; its rows are the context, not the chunk.
    Kv(CacheId),
}

/// How many rows a value has. The numbers are known only when the plan runs; the kind decides what may be combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RowCount {
    /// One row for every token of the chunk.
    Chunk,
    /// One row for every token whose logits are asked for.
    Asked,
    /// Of a tower: one row for every patch of the picture, or for every frame of the sound.
    Patches,
    /// Of a tower: one row for every two frames of the sound.
    Halves,
    /// Of a tower: one row for every soft token that it makes.
    Soft,
}

impl RowCount {
    /// The most rows in a pass of so many tokens, or patches, of which so many are asked for, or soft tokens made.
    pub const fn most(self, chunk: u32, asked: u32) -> u32 {
        match self {
            RowCount::Chunk | RowCount::Patches => chunk,
            RowCount::Halves => chunk.div_ceil(2),
            RowCount::Asked | RowCount::Soft => asked,
        }
    }
}

/// The KV cache of one layer: state that outlives a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The layer that writes it.
    pub layer: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// How many positions a query sees, itself included; `None` sees all.
    pub window: Option<u32>,
}

impl Cache {
    /// Width of a row of keys, and of a row of values.
    pub const fn width(&self) -> u32 {
        self.kv_heads * self.head_dim
    }
}

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    pub elem: Elem,
    pub rows: RowCount,
    pub width: u32,
}

impl Type {
    pub const fn f32(rows: RowCount, width: u32) -> Type {
        Type { elem: Elem::F32, rows, width }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = match self.rows {
            RowCount::Chunk => "rows",
            RowCount::Asked => "asked",
            RowCount::Patches => "patches",
            RowCount::Halves => "halves",
            RowCount::Soft => "soft",
        };
        match self.elem {
            Elem::Token if self.width == 1 => write!(f, "token[{rows}]"),
            Elem::Token => write!(f, "token[{rows}, {}]", self.width),
            Elem::F32 => write!(f, "f32[{rows}, {}]", self.width),
            Elem::Routing { experts } => write!(f, "routing[{rows}, {} of {experts}]", self.width),
            Elem::Kv(_) => write!(f, "kv[context, {}]", self.width),
        }
    }
}
