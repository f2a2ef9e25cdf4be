//! mbarriers: counters in shared memory that threads and asynchronous copies arrive at, phase after phase.
//!
//! A phase ends when as many threads have arrived as the barrier was made for, and as many bytes have come as they said
//! would. What the arriving threads did and knew, and what the copies wrote, is ordered before what a thread does after
//! it has waited for the phase. A copy comes as late as it can: when somebody looks whether its phase has ended. Until
//! then nobody may touch its target.
//!
//! The state is kept beside the memory, by address, so that the host's text can share it.

use super::fault::{FaultKind, Line};
use super::known::Known;
use super::pending::{Flight, Mbarrier};
use super::region::Region;
use super::shadow::ASYNCHRONOUS;
use super::thread::{Cause, Thread};
use std::collections::BTreeMap;

/// Bytes that a phase may expect.
const MOST_BYTES: i64 = (1 << 20) - 1;

/// Makes the barrier at `address`, in its phase 0.
pub(crate) fn init(thread: &Thread, line: Line, address: usize, count: u32) {
    if count == 0 || count >= 1 << 20 {
        thread.raise(FaultKind::Mbarrier, line, format!("an mbarrier for {count} arrivals: 1 to 1,048,575"));
    }
    let barrier = Mbarrier {
        count,
        pending: count,
        bytes: 0,
        phase: 0,
        gathered: Known::default(),
        published: Known::default(),
        waited: BTreeMap::new(),
        flights: Vec::new(),
        made: (thread.index, thread.launch().clock.get()),
    };
    let old = thread.block().mbarriers.borrow_mut().insert(address, barrier);
    if old.is_some_and(|old| !old.flights.is_empty() || old.pending < old.count) {
        thread.raise(FaultKind::Mbarrier, line, "makes an mbarrier again that is in use".into());
    }
}

/// Does something with the barrier at `address`, if it was made.
fn with<R>(thread: &Thread, line: Line, address: usize, work: impl FnOnce(&mut Mbarrier) -> R) -> R {
    let mut all = thread.block().mbarriers.borrow_mut();
    match all.get_mut(&address) {
        Some(barrier) => work(barrier),
        None => {
            drop(all);
            thread.raise(FaultKind::Mbarrier, line, "uses an mbarrier that mbarrier_init has not made".into())
        }
    }
}

/// One arrival, which announces `bytes` bytes.
pub(crate) fn arrive(thread: &Thread, line: Line, address: usize, bytes: u32) {
    let known = thread.knowledge();
    let refused = with(thread, line, address, |barrier| {
        if barrier.pending == 0 {
            return Some(format!(
                "arrives at an mbarrier at which all {} of its phase {} have",
                barrier.count, barrier.phase
            ));
        }
        barrier.bytes += i64::from(bytes);
        if barrier.bytes > MOST_BYTES {
            return Some(format!(
                "announces {} bytes in one phase of an mbarrier: {MOST_BYTES} at most",
                barrier.bytes
            ));
        }
        barrier.pending -= 1;
        barrier.gathered.join(&known);
        barrier.settle();
        None
    });
    if let Some(message) = refused {
        thread.raise(FaultKind::Mbarrier, line, message);
    }
}

/// `bytes` bytes of a copy have come.
pub(crate) fn complete(thread: &Thread, line: Line, address: usize, bytes: usize) {
    with(thread, line, address, |barrier| {
        barrier.bytes -= bytes as i64;
        barrier.settle();
    });
}

/// Waits for the end of the phase with this parity: the running one, or the one before it.
pub(crate) fn wait(thread: &Thread, line: Line, address: usize, parity: u32) {
    if parity > 1 {
        thread.raise(FaultKind::Mbarrier, line, format!("waits for a phase of parity {parity}: it is 0 or 1"));
    }
    let what = || with(thread, line, address, |barrier| barrier.missing());
    thread.wait_until(Cause::Threads, "mbarrier_wait", line, what, || {
        land(thread, line, address);
        with(thread, line, address, |barrier| barrier.phase % 2 != parity)
    });
    let (missed, known) = with(thread, line, address, |barrier| {
        let waited = barrier.waited.entry(thread.index).or_default();
        // A fresh barrier's phase before the first is over: producers start by waiting for it.
        let missed = (*waited > 0 && *waited % 2 == parity && barrier.phase > *waited + 1).then_some(*waited);
        *waited = barrier.phase;
        (missed, barrier.published.clone())
    });
    if let Some(phase) = missed {
        let message = format!(
            "waits for phase {phase} of an mbarrier when the next has ended too: it was used again without a wait"
        );
        thread.raise(FaultKind::Mbarrier, line, message);
    }
    thread.learns(&known);
}

/// Starts a copy of `data` to `at` in a shared array, which the barrier at `address` will count.
pub(crate) fn start_copy(thread: &Thread, line: Line, address: usize, target: &Region, at: usize, data: Vec<u8>) {
    let fences = &thread.block().proxy_fences;
    if thread.launch().checks {
        let (maker, time) = with(thread, line, address, |barrier| barrier.made);
        if time >= fences[maker as usize].get() {
            let message = format!("thread {maker} has made the copy's mbarrier without fence_proxy_async() since");
            thread.raise(FaultKind::MissingFence, line, message);
        }
    }
    if let Some(shadow) = &target.shadow {
        shadow.borrow_mut().depart(at, data.len(), line);
    }
    with(thread, line, address, |barrier| barrier.flights.push(Flight { target, at, data, line }));
}

/// The copies that the barrier counts come.
#[allow(unsafe_code)]
fn land(thread: &Thread, line: Line, address: usize) {
    let flights = with(thread, line, address, |barrier| std::mem::take(&mut barrier.flights));
    for flight in flights {
        // SAFETY: the array belongs to the running cluster; bounds were checked when the copy started.
        let target = unsafe {
            let target = &*flight.target;
            std::ptr::copy_nonoverlapping(flight.data.as_ptr(), target.base.add(flight.at), flight.data.len());
            target
        };
        let engine = ASYNCHRONOUS | thread.block().linear;
        if let Some(shadow) = &target.shadow {
            let now = thread.launch().tick();
            shadow.borrow_mut().arrive(flight.at, flight.data.len(), engine, now, flight.line);
            with(thread, line, address, |barrier| barrier.gathered.thread(engine, now + 1));
            thread.launch().tick();
        }
        complete(thread, line, address, flight.data.len());
    }
}

/// The line of a copy that nobody has waited for.
pub(crate) fn unfinished(barriers: &BTreeMap<usize, Mbarrier>) -> Option<Line> {
    barriers.values().flat_map(|barrier| &barrier.flights).map(|flight| flight.line).next()
}
