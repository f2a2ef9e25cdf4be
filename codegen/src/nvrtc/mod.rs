//! NVRTC: CUDA C text in, machine code for one architecture out, with no GPU and no CUDA toolkit needed.
//!
//! [`Toolchain`] is a libnvrtc that was found and loaded; [`Compiler`] adds a cache on disk and compiles many kernels
//! at once. One source text holds one kernel. Texts are assembled elsewhere, launch limits are checked elsewhere, and
//! nothing here talks to the driver.
//!
//! Every compilation passes `--fmad=false`: a product and a sum are contracted where the kernel says so and nowhere
//! else, so that the text means the same here, in the simulator and under the host's compiler.

#[doc(hidden)]
pub mod cache;
mod compiler;
#[doc(hidden)]
pub mod error;
mod find;
mod job;
#[doc(hidden)]
pub mod log;
mod sys;
mod toolchain;

pub use cache::Cache;
pub use compiler::Compiler;
pub use error::{Looked, NvrtcError};
pub use find::{Places, came_with};
pub use job::{Compiled, Cubin, Job, Options, Source};
pub use log::Resources;
pub use sys::Version;
pub use toolchain::Toolchain;
