//! An allocator that knows how much its thread holds, for tests that bound what hostile input can make a reader
//! allocate.
//!
//! A test binary takes it in with `#[path] mod` and sets it as its `#[global_allocator]`. Counts are per thread, so
//! that tests running side by side do not see each other; memory freed on another thread than its own is counted wrong.
//! While nobody measures, nothing is counted: test binaries are not optimised, and all their allocations come here.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct CountingAllocator;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Calls of [`peak_during`] that have not ended, on any thread.
static MEASURING: AtomicUsize = AtomicUsize::new(0);

struct Measurement;

impl Measurement {
    fn start() -> Measurement {
        MEASURING.fetch_add(1, Ordering::Relaxed);
        Measurement
    }
}

impl Drop for Measurement {
    fn drop(&mut self) {
        MEASURING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What `work` returns, and the most bytes it held at a time beyond what was held before.
pub fn peak_during<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let _measurement = Measurement::start();
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as usize)
}

fn count(change: isize) {
    if MEASURING.load(Ordering::Relaxed) == 0 {
        return;
    }
    // A thread that is being torn down has no counters any more, and nothing to measure.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged. Counting touches only thread-local cells that need
// neither allocation nor a destructor, so it cannot come back here.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those the system's allocator asks for; so below.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // While the bytes move, both the old and the new ones may be held.
        count(new_size as isize);
        count(-(layout.size() as isize));
        // SAFETY: as in `alloc`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
