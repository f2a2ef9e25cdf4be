//! The texts that every source starts with: a platform's own names, then the prelude that CUDA and the host share.

/// What CUDA's compiler brings, under the names of the prelude. No header is included: NVRTC has none.
pub const CUDA: &str = include_str!("cuda.cuh");

/// The same for the host's C++ compiler.
pub const HOST: &str = include_str!("host.h");

/// Types, and the methods of Rust's numbers as functions.
pub const PRELUDE: &str = include_str!("prelude.cuh");
