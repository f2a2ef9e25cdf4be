//! From a graph to what a plan holds, and from CUDA C to machine code.
//!
//! - `cpu` lowers a graph to the steps of a CPU plan, one a node;
//! - `passes` are the passes that ask what a GPU's kernels can do, after those of the graph;
//! - `cuda` lowers a graph to the launches of a GPU plan, and compiles them;
//! - `kernels` is the library of kernels, one family a file, `cases` what each must do, `families` the table of both,
//!   and `resources` what an instance takes of an SM;
//! - `measured` is what was measured on which GPU, as data that the constants of rules are taken from;
//! - `arch` is the list of GPU architectures, `target` the table of GPUs: the facts kernels are chosen by;
//! - `nvrtc` finds NVIDIA's run-time compiler, calls it and keeps what it made.
//!
//! No model is known here (a graph is all that comes in) and nothing runs here: no GPU and no driver is touched.

pub mod arch;
pub mod cases;
pub mod cpu;
pub mod cuda;
pub mod families;
pub mod kernels;
pub mod measured;
pub mod nvrtc;
pub mod passes;
pub mod resources;
pub mod stamps;
pub mod target;
