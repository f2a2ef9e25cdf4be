//! From a graph to a plan: lowering, kernels, and the compiler that turns their text into machine code.

pub mod arch;
pub mod cpu;
pub mod nvrtc;
