//! The arithmetic of the CPU backend: plain functions on slices, one file a family.
//!
//! Promise to every caller: the result for a row is bitwise the same whatever other rows are in the call, however many
//! threads run, on whichever CPU. It holds because each sum has one order, fixed by the shape alone (see [`lanes`]),
//! and because nothing calls the system's maths library where it could differ (see [`math`]). Threads and register
//! tiles only decide who computes a value, never how.
//!
//! What is not here: shape checks with friendly errors. A plan is checked when it is loaded; a slice of the wrong
//! length is a fault of the executor and panics.

pub mod adapter;
pub mod attention;
pub mod candidates;
pub mod elementwise;
pub mod gather;
pub mod grid;
mod lanes;
mod math;
pub mod matmul;
pub mod moe;
pub mod norm;
mod parallel;
mod prefetch;
mod product;
pub mod rope;
pub mod rows;
pub mod sound;
#[cfg(test)]
mod testing;
mod tiles;

/// Compiles each function once for every vector width worth having and picks at run time.
///
/// Everything such a function calls must be `#[inline(always)]`, or it is compiled for the baseline. On x86-64 without
/// FMA `mul_add` is a library call: slow, and accepted, since it keeps the bits equal on every CPU.
macro_rules! vectorised {
    ($($item:item)*) => {
        $(
            #[multiversion::multiversion(targets(
                "x86_64+avx512f+avx512bw+avx512vl+avx512dq+avx2+fma",
                "x86_64+avx2+fma"
            ))]
            $item
        )*
    };
}
pub(crate) use vectorised;
