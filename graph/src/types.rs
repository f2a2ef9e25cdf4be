//! What a value is: an element type, a symbolic row count and a width.

use std::fmt;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
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

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    pub elem: Elem,
    pub rows: Rows,
    pub width: u32,
}

impl Type {
    pub const fn f32(rows: Rows, width: u32) -> Type {
        Type { elem: Elem::F32, rows, width }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = match self.rows {
            Rows::Chunk => "rows",
            Rows::Asked => "asked",
            Rows::Patches => "patches",
            Rows::Halves => "halves",
            Rows::Soft => "soft",
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
