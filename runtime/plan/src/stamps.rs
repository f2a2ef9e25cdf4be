//! Where a stamped kernel leaves the times of its blocks: a variable of its module, which the compiler declares and the
//! runtime reads.
//!
//! Stamped kernels are those of `gemma4c profile --chain`. A plan has none.

/// The variable: [`BLOCKS`] blocks, each with its last [`LAUNCHES`] launches in turn, each with [`WORDS`] words of 64
/// bits.
pub const SYMBOL: &str = "gemma4c_stamps";
/// Blocks of a launch that leave their times; those behind them do not.
pub const BLOCKS: usize = 2048;
pub const LAUNCHES: usize = 8;

/// The words of a block in a launch: nanoseconds of the GPU's clock, and last the SM with the blocks of the grid in the
/// upper half.
pub const START: usize = 0;
/// When it had done what it does before its predecessor's end, and began to wait.
pub const ASKED: usize = 1;
/// When it saw that its predecessor had ended.
pub const RELEASED: usize = 2;
/// When its last warp ended.
pub const END: usize = 3;
pub const PLACE: usize = 4;
pub const WORDS: usize = 5;
