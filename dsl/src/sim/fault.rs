//! Faults: what the simulator found wrong, said with kernel, thread and source line.

use std::fmt;
use std::panic::Location;

/// A line of a kernel's source; unknown when the text compiled for the host runs.
pub(crate) type Line = Option<&'static Location<'static>>;

/// The kind of mistake, for tests and tables. The sentence is in [`Fault::message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    OutOfBounds,
    Misaligned,
    /// Two threads touched the same memory, one of them wrote, and no barrier stood between.
    Race,
    /// The same between two blocks, which no barrier orders.
    RaceBetweenBlocks,
    /// The same between two launches of a chain: one did not wait for the other.
    RaceBetweenLaunches,
    /// An mbarrier that was not made, was arrived at too often, or whose phase was missed.
    Mbarrier,
    /// Threads wait for something that nobody is left to bring about.
    Deadlock,
    /// Threads of a warp or block did not arrive at the same barrier or collective.
    Divergence,
    UninitialisedShared,
    UnwrittenOutput,
    ReadOfOutput,
    /// An activation was touched before `grid_dependency_wait()`, or a thread ended without it.
    MissingDependencyWait,
    /// An asynchronous copy that nobody waited for, or memory touched before it had ended.
    UnfinishedCopy,
    /// A wgmma that no `wgmma_wait` waited for.
    UnfinishedProduct,
    /// Operands or an accumulator of a wgmma, or memory of a bulk copy, that no fence has ordered.
    MissingFence,
    /// A word sent that is none, or twice.
    Packet,
    /// A Rust panic: integer overflow, division by zero, `require!`.
    Panic,
}

/// A mistake of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    pub kernel: String,
    pub kind: FaultKind,
    pub block: [u32; 3],
    pub thread: u32,
    /// `file:line`, or a note that the host-compiled text was running.
    pub line: String,
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        let block = if (y, z) == (0, 0) { x.to_string() } else { format!("({x}, {y}, {z})") };
        write!(
            f,
            "kernel {}, block {block}, thread {}, {}: {:?}: {}",
            self.kernel, self.thread, self.line, self.kind, self.message
        )
    }
}

impl std::error::Error for Fault {}

pub(crate) fn spelled(line: Line) -> String {
    line.map_or_else(|| "the emitted text".to_string(), |line| format!("{}:{}", line.file(), line.line()))
}
