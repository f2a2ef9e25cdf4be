//! NVIDIA GPUs through the driver library alone.
//!
//! Below, a thin, safe layer over `cudarc`'s raw one: devices, memory, modules, launches and graphs of them. What it
//! adds is ownership (memory and modules are freed, and never outlive their device) and errors that name the call. What
//! it leaves out on purpose: streams beyond one for launches and one for copies, events per buffer, and anything that
//! allocates behind the caller's back. Above it, [`CudaBackend`]: a plan, loaded and replayed.

mod backend;
mod cublaslt;
mod device;
mod graph;
mod green;
mod launch;
mod load;
mod load_image;
mod mailbox;
mod pinned;
mod profile;
mod regions;
mod stamps;
mod streams;
mod words;

pub use backend::{CudaBackend, OnGpu, Opened};
pub use cublaslt::{CublasLt, CublasLtError, Shape};
pub use device::{Buffer, CudaError, Device};
pub use graph::{Graph, GraphBuilder, Node};
pub use launch::{Argument, Function, Launch, Module};
pub use pinned::Pinned;
pub use profile::Profile;
pub use stamps::{Chained, Span};
pub use streams::{Event, Stream};
