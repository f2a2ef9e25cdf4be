//! `#[kernel]` and `#[device]`: a Rust function in, the same function and its CUDA C text out. `#[registers]`,
//! `#[view]` and `#[config]`: the structs they use.
//!
//! Read top down: [`expand`] drives; [`function`] reads the head and [`heads`] prints it; [`printer`], [`statements`],
//! [`arrays`] and [`expressions`] print the body; [`instrument`] prepares the Rust side; [`rows`] says what a definition
//! holds; [`modules`] derives typed builders; [`registers`], [`view`] and [`config`] are the structs; [`errors`] collects
//! what is refused. The language itself is described in the `gemma4c-dsl` crate, whose names the expansion uses. Nothing
//! here knows a type that the source does not say: the fields of a struct that a function names are rustc's to know.

mod arrays;
mod comments;
mod config;
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
mod rows;
mod scope;
mod statements;
#[cfg(test)]
mod tests;
mod types;
mod view;

pub use config::config;
pub use expand::{device, kernel};
pub use registers::registers;
pub use view::view;
