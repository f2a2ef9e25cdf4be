//! NVIDIA GPUs through the driver library alone: devices, memory, modules, launches and graphs of them.
//!
//! A thin, safe layer over `cudarc`'s raw one. What it adds is ownership (memory and modules are freed, and never outlive
//! their device) and errors that name the call. What it leaves out on purpose: streams beyond the device's one, events per
//! buffer, and anything that allocates behind the caller's back.

mod device;
mod graph;
mod launch;

pub use device::{Buffer, CudaError, Device};
pub use graph::Graph;
pub use launch::{Argument, Function, Launch, Module};
