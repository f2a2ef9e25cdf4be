//! `#[kernel]` and `#[device]`, and `#[registers]` for the structs they use: a Rust function in, the same function and its CUDA C text out.
//!
//! Read top down: [`expand`] drives; [`function`] reads the head and [`heads`] prints it; [`printer`], [`statements`], [`arrays`] and [`expressions`] print the
//! body; [`instrument`] prepares the Rust side; [`modules`] derives typed builders; [`errors`] collects what is refused. The language itself is described
//! in the `gemma4c-dsl` crate, whose names the expansion uses. Nothing here knows a type that the source does not say.

mod arrays;
mod comments;
mod effects;
mod errors;
mod expand;
mod expressions;
mod function;
mod heads;
mod instrument;
mod literals;
mod methods;
mod modules;
mod printer;
mod registers;
mod scope;
mod statements;
#[cfg(test)]
mod tests;
mod types;

pub use expand::{device, kernel};
pub use registers::registers;
