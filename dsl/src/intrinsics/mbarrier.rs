//! mbarriers: barriers in shared memory with phases, at which threads, their `cp_async` copies and bulk copies arrive.
//! Threads arrive and wait on any GPU; copies arrive on Hopper and later.
//!
//! `let full = shared::<u64>(STAGES);` holds them. One thread makes each with `mbarrier_init`, then executes
//! `fence_proxy_async` if bulk copies will use it, and a `barrier()` follows. A phase ends when `count` threads have
//! arrived and all bytes that they announced have come. A thread that waits names the parity of the phase: 0 for the
//! first, 1 for the second, 0 for the third. Parity 1 of a fresh barrier is over. A thread that waits for one phase
//! waits for each that follows.

use super::asynchronous::{cp_async_commit, cp_async_wait};
use super::rows::{intrinsic, row};
use crate::sim::mbarrier;
use crate::sim::memory::{KernelIndex, Readable, Shared};
use crate::sim::shadow::Touch;
use crate::sim::thread::Thread;

/// Makes a barrier for `count` arrivals a phase.
#[track_caller]
pub fn mbarrier_init(barriers: Shared<u64>, index: impl KernelIndex, count: u32) {
    let thread = Thread::current();
    let address = barriers.raw().at::<u64>(index.value(), Touch::Write) as usize;
    mbarrier::init(thread, thread.line(), address, count);
}

row! {
    /// Makes a barrier for `count` arrivals a phase.
    Thread mbarrier_init needs [mbarrier_init_at]
    cuda "
template <class I> __device__ __forceinline__ void mbarrier_init(u64* barriers, I index, u32 count) {
    asm volatile(\"mbarrier.init.shared::cta.b64 [%0], %1;\" :: \"r\"((u32)__cvta_generic_to_shared(barriers + index)), \"r\"(count) : \"memory\");
}"
    host "template <class I> inline void mbarrier_init(u64* barriers, I index, u32 count) { mbarrier_init_at((u64)(barriers + index), count); }"
}

intrinsic! {
    /// `mbarrier_init` of the host text, by address.
    Thread fn mbarrier_init_at(address: u64, count: u32) { mbarrier::init(Thread::current(), None, address as usize, count) }
    cuda ""
}

/// Arrives: what this thread did before is ordered before what follows a wait for the phase.
#[track_caller]
pub fn mbarrier_arrive(barriers: Shared<u64>, index: impl KernelIndex) {
    mbarrier_arrive_expect(barriers, index, 0);
}

row! {
    /// Arrives: what this thread did before is ordered before what follows a wait for the phase.
    Thread mbarrier_arrive needs [mbarrier_arrive_at]
    cuda "
template <class I> __device__ __forceinline__ void mbarrier_arrive(u64* barriers, I index) {
    asm volatile(\"{\\n.reg .b64 state;\\nmbarrier.arrive.shared::cta.b64 state, [%0];\\n}\" :: \"r\"((u32)__cvta_generic_to_shared(barriers + index)) : \"memory\");
}"
    host "template <class I> inline void mbarrier_arrive(u64* barriers, I index) { mbarrier_arrive_at((u64)(barriers + index), 0); }"
}

/// Arrives, and announces `bytes` bytes of bulk copies that the phase waits for as well.
#[track_caller]
pub fn mbarrier_arrive_expect(barriers: Shared<u64>, index: impl KernelIndex, bytes: u32) {
    let thread = Thread::current();
    let address = barriers.raw().at::<u64>(index.value(), Touch::Atomic) as usize;
    mbarrier::arrive(thread, thread.line(), address, bytes);
}

row! {
    /// Arrives, and announces `bytes` bytes of bulk copies that the phase waits for as well.
    Thread mbarrier_arrive_expect since 90 needs [mbarrier_arrive_at]
    cuda "
template <class I> __device__ __forceinline__ void mbarrier_arrive_expect(u64* barriers, I index, u32 bytes) {
    asm volatile(\"{\\n.reg .b64 state;\\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\\n}\" :: \"r\"((u32)__cvta_generic_to_shared(barriers + index)), \"r\"(bytes) : \"memory\");
}"
    host "template <class I> inline void mbarrier_arrive_expect(u64* barriers, I index, u32 bytes) { mbarrier_arrive_at((u64)(barriers + index), bytes); }"
}

/// Arrives once the `cp_async` copies that this thread has started are complete; they need no group. One of the
/// barrier's `count` arrivals.
#[track_caller]
pub fn cp_async_arrive(barriers: Shared<u64>, index: impl KernelIndex) {
    cp_async_commit();
    cp_async_wait(0);
    mbarrier_arrive_expect(barriers, index, 0);
}

row! {
    /// Arrives once the `cp_async` copies that this thread has started are complete; they need no group. One of the
    /// barrier's `count` arrivals.
    Thread cp_async_arrive since 90 needs [mbarrier_arrive_at]
    cuda "
template <class I> __device__ __forceinline__ void cp_async_arrive(u64* barriers, I index) {
    asm volatile(\"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\" :: \"r\"((u32)__cvta_generic_to_shared(barriers + index)) : \"memory\");
}"
    host "template <class I> inline void cp_async_arrive(u64* barriers, I index) { mbarrier_arrive_at((u64)(barriers + index), 0); }"
}

intrinsic! {
    /// An arrival of the host text, by address.
    Thread fn mbarrier_arrive_at(address: u64, bytes: u32) { mbarrier::arrive(Thread::current(), None, address as usize, bytes) }
    cuda ""
}

/// Waits for the end of the phase of this parity; what its arrivals and copies did is visible after.
#[track_caller]
pub fn mbarrier_wait(barriers: Shared<u64>, index: impl KernelIndex, parity: u32) {
    let thread = Thread::current();
    let address = barriers.raw().at::<u64>(index.value(), Touch::RelaxedRead) as usize;
    mbarrier::wait(thread, thread.line(), address, parity);
}

row! {
    /// Waits for the end of the phase of this parity; what its arrivals and copies did is visible after.
    Thread mbarrier_wait needs [mbarrier_wait_at]
    cuda "
template <class I> __device__ __forceinline__ void mbarrier_wait(u64* barriers, I index, u32 parity) {
    u32 address = (u32)__cvta_generic_to_shared(barriers + index), done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile(\"{\\n.reg .pred over;\\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\\nselp.u32 %0, 1, 0, over;\\n}\" : \"=r\"(done) : \"r\"(address), \"r\"(parity) : \"memory\");
#else
        asm volatile(\"{\\n.reg .pred over;\\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\\nselp.u32 %0, 1, 0, over;\\n}\" : \"=r\"(done) : \"r\"(address), \"r\"(parity) : \"memory\");
#endif
    } while (done == 0);
}"
    host "template <class I> inline void mbarrier_wait(u64* barriers, I index, u32 parity) { mbarrier_wait_at((u64)(barriers + index), parity); }"
}

intrinsic! {
    /// `mbarrier_wait` of the host text, by address.
    Thread fn mbarrier_wait_at(address: u64, parity: u32) { mbarrier::wait(Thread::current(), None, address as usize, parity) }
    cuda ""
}
