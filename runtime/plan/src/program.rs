//! The CPU program of a plan: values with their offsets in the arena, and steps in order.
//!
//! One step is one node of the unfused graph, with the same operation. Weights are places in [`crate::Plan::weights`],
//! caches in [`Program::caches`].

use gemma4c_ops::{self as ops, CacheId, Elem, Op, RowCount, Type};
use serde::{Deserialize, Serialize};

use crate::kv::KvType;
use crate::list::at_most;

/// Index into [`Program::values`].
pub type ValueIndex = u32;

/// What a value's rows hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Tokens,
    /// f32 rows in the arena, from byte `offset`, rows back to back.
    Floats {
        offset: u64,
    },
    /// Which of `experts` a row goes to, and their weights; kept beside the arena.
    Routing {
        experts: u32,
    },
    /// A cache after its append.
    Kv {
        cache: CacheId,
    },
}

/// One value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    pub name: String,
    pub kind: Kind,
    pub rows: RowCount,
    pub width: u32,
}

impl Value {
    /// What the shape rules say of it: all but where it lies.
    pub fn ty(&self) -> Type {
        let elem = match self.kind {
            Kind::Tokens => Elem::Token,
            Kind::Floats { .. } => Elem::F32,
            Kind::Routing { experts } => Elem::Routing { experts },
            Kind::Kv { cache } => Elem::Kv(cache),
        };
        Type { elem, rows: self.rows, width: self.width }
    }
}

/// Keys and values of one layer: `capacity` rows of `kv_heads * head_dim` f32 each. With a window it is a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    pub layer: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub window: Option<u32>,
    pub capacity: u32,
}

impl Cache {
    /// What the shape rules say of it: all but how long it is.
    pub(crate) const fn shape(&self) -> ops::Cache {
        let Cache { layer, kv_heads, head_dim, window, .. } = *self;
        ops::Cache { layer, kv_heads, head_dim, window }
    }

    /// Bytes of its keys and values; `None` on overflow.
    pub fn bytes(&self) -> Option<u64> {
        let row = (self.kv_heads as u64).checked_mul(self.head_dim as u64)?.checked_mul(2 * 4)?;
        row.checked_mul(self.capacity as u64)
    }
}

/// One step: `values[output] = op(values[inputs])`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    pub op: Op,
    #[serde(deserialize_with = "at_most::<4, _, _>")]
    pub inputs: Vec<ValueIndex>,
    pub output: ValueIndex,
}

/// The steps of a CPU plan, of one of its towers, whose rows are patches and soft tokens in place of tokens, or of its
/// drafter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Positions a sequence may have.
    pub context: u32,
    /// Rows of one pass, at most.
    pub chunk: u32,
    /// Rows of one pass with logits, at most.
    pub asked: u32,
    pub arena_bytes: u64,
    /// What keys and values are rounded to when they are appended: an 8-bit type, or F32 for not at all. Caches are f32
    /// either way.
    pub kv: KvType,
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub caches: Vec<Cache>,
    #[serde(deserialize_with = "at_most::<65536, _, _>")]
    pub values: Vec<Value>,
    #[serde(deserialize_with = "at_most::<65536, _, _>")]
    pub steps: Vec<Step>,
    /// The logits.
    pub output: ValueIndex,
}

impl Program {
    /// Most rows a value can have.
    pub const fn max_rows(&self, rows: RowCount) -> u32 {
        rows.most(self.chunk, self.asked)
    }

    /// Whether soft tokens of a picture see each other, so that one pass must have all of them.
    pub fn sees_ahead(&self) -> bool {
        self.steps.iter().any(|step| matches!(step.op, Op::AttentionAhead { .. }))
    }

    /// Bytes of all keys and values at full context; `None` on overflow.
    pub fn cache_bytes(&self) -> Option<u64> {
        self.caches.iter().try_fold(0u64, |sum, cache| sum.checked_add(cache.bytes()?))
    }
}
