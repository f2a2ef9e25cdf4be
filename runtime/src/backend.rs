//! What can run the launches of a plan: a GPU, or whatever stands in for one.
//!
//! A backend has memory that can be written and read by range, launches that run in order, and a few words at a time
//! that are copied back asynchronously. Which tokens go through which phases, in which chunks, is decided once for all
//! backends, by the engine's device.

use std::any::Any;

use gemma4c_plan::cuda::Range;

use crate::error::RuntimeError;
pub use crate::runs::{Pick, Run};

/// Bytes of a device's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// What the plan says it allocates.
    pub planned: u64,
    /// In use now and free before the plan was opened, by whichever process; with what the driver takes for kernels and
    /// graphs.
    pub taken: u64,
}

/// The memory and the launches of a plan that was loaded: its regions hold weights and constants, the rest is zero.
///
/// Ranges are the caller's promise to lie in their regions, as a checked plan's do.
pub trait Backend {
    /// The device's name, for a person.
    fn name(&self) -> String;

    /// Itself, for whoever knows what it is and wants more of it than this interface has.
    fn concrete(&mut self) -> Option<&mut dyn Any> {
        None
    }

    /// Copies bytes to the start of a range, after everything queued before.
    fn write(&mut self, to: Range, bytes: &[u8]) -> Result<(), RuntimeError>;

    /// The same of floats.
    fn write_floats(&mut self, to: Range, values: &[f32]) -> Result<(), RuntimeError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.write(to, &bytes)
    }

    /// Copies a range out, once everything queued is done. `bytes` is as long as the range.
    fn read(&mut self, from: Range, bytes: &mut [u8]) -> Result<(), RuntimeError>;

    /// Queues launches.
    fn run(&mut self, run: Run) -> Result<(), RuntimeError>;

    /// Queues several runs, each behind the one before: as one replay where the backend is ready for that.
    fn run_all(&mut self, runs: &[Run]) -> Result<(), RuntimeError> {
        runs.iter().try_for_each(|run| self.run(*run))
    }

    /// Queues the copy of words to the host, at most as many as the plan decodes rows. They must not change until they
    /// are received.
    fn send_back(&mut self, from: Range) -> Result<(), RuntimeError>;

    /// Waits for the oldest words that were sent and not yet received.
    fn receive(&mut self) -> Result<Vec<u32>, RuntimeError>;

    /// Copies a range to another that does not overlap it, after everything queued before.
    fn copy(&mut self, from: Range, to: Range) -> Result<(), RuntimeError>;

    /// Makes host memory of so many bytes ready, to which ranges can be saved; once, before anything is.
    fn reserve_tier(&mut self, bytes: u64) -> Result<(), RuntimeError>;

    /// Copies a range to that memory, after everything queued before.
    fn save(&mut self, from: Range, at: u64) -> Result<(), RuntimeError>;

    /// Copies as many bytes back as the range has, after everything queued before.
    fn load(&mut self, at: u64, to: Range) -> Result<(), RuntimeError>;

    /// What it has taken of the device's memory; `None` where that is not a device's own.
    fn memory(&self) -> Result<Option<MemoryUse>, RuntimeError> {
        Ok(None)
    }

    /// Waits until everything queued is done.
    fn wait(&mut self) -> Result<(), RuntimeError>;
}
