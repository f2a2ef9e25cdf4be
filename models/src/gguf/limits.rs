//! How much a file may claim: what is beyond is refused before anything is allocated for it.

/// At most this many metadata keys, tensors, and layers: many times what any model has, and few enough that a
/// hostile file cannot make the tables large.
pub const MAX_ENTRIES: u64 = 65_536;

/// Dimensions of a tensor, at most.
pub const MAX_DIMS: usize = 4;
