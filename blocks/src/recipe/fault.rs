//! Why rows cannot be made.

/// A scale that no trained weight has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BadScale {
    /// Of the rows that were made, the one that has it.
    pub row: usize,
    /// The first column that it is for.
    pub column: usize,
    pub scale: f32,
}

/// Why rows cannot be made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    BadScale(BadScale),
    /// The recipe does not make such rows, or its inputs have other lengths.
    Misfit,
}
