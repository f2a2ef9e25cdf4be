//! The stacks of simulated threads: kept for the next cluster, and each at another place of a page.
//!
//! Stacks are mapped in whole pages. If all of them started at the end of a page, what the threads of a block touch at
//! each switch would fall into the same few sets of the CPU's first cache, and every switch would miss it.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::cell::{Cell, RefCell};

/// Threads that run side by side, beyond which no cluster starts. Each has a stack of its own, and a process may have
/// some 30,000 of those.
pub(crate) const RESIDENT_THREADS: usize = 7168;

/// Address space of a stack; pages are committed as they are touched.
const STACK_BYTES: usize = 256 * 1024;

const PAGE_BYTES: usize = 4096;
/// From one stack's start in its page to the next one's: an odd number of cache lines, so that all of a page's have
/// their turn.
const STEP_BYTES: usize = 13 * 64;

/// The stack of one thread.
pub(crate) struct ThreadStack {
    memory: DefaultStack,
    /// Bytes at its start that are left out.
    skipped: usize,
}

// SAFETY: the default stack has the guard page; less than a page of its many is left out, in whole cache lines, which
// keeps it aligned.
#[allow(unsafe_code)]
unsafe impl Stack for ThreadStack {
    fn base(&self) -> StackPointer {
        let base = self.memory.base();
        StackPointer::new(base.get() - self.skipped).unwrap_or(base)
    }

    fn limit(&self) -> StackPointer {
        self.memory.limit()
    }
}

thread_local! {
    /// Stacks of threads that have returned.
    static SPARE: RefCell<Vec<ThreadStack>> = const { RefCell::new(Vec::new()) };
    static MADE: Cell<usize> = const { Cell::new(0) };
}

/// A stack that nobody uses.
pub(crate) fn take() -> ThreadStack {
    SPARE.with_borrow_mut(Vec::pop).unwrap_or_else(|| {
        let number = MADE.replace(MADE.get() + 1);
        let memory = DefaultStack::new(STACK_BYTES).expect("address space for a coroutine's stack");
        ThreadStack { memory, skipped: number * STEP_BYTES % PAGE_BYTES }
    })
}

/// As many are kept as most launches need.
pub(crate) fn put_back(stacks: impl Iterator<Item = ThreadStack>) {
    SPARE.with_borrow_mut(|spare| {
        spare.extend(stacks);
        spare.truncate(RESIDENT_THREADS);
    });
}
