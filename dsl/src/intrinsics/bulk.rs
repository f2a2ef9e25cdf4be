//! Bulk copies: one thread moves a piece of memory, and an engine does it while the threads go on. Hopper and later.
//!
//! `bulk_load` brings global memory to shared memory and ends a phase of an mbarrier; its target may be touched after a
//! wait for that phase. Addresses and sizes are multiples of 16 bytes.
//!
//! The engine belongs to the async proxy: what threads wrote to shared memory becomes visible to it after
//! `fence_proxy_async` in the writing thread, then a barrier. What it wrote is visible to threads and to wgmma after
//! the wait, without a fence.

use super::rows::{intrinsic, row};
use crate::Element;
use crate::sim::FaultKind;
use crate::sim::mbarrier;
use crate::sim::memory::{KernelIndex, Raw, Readable, Shared};
use crate::sim::shadow::Touch;
use crate::sim::thread::Thread;

/// Checks one end of a copy of `count` elements and notes the access; gives the byte of the region and the bytes.
#[track_caller]
fn end<T: Element>(raw: Raw<T>, index: i64, count: u32, touch: Touch) -> (usize, usize) {
    let thread = Thread::current();
    let bytes = count as usize * size_of::<T>();
    let at = raw.check_bounds(index, count as usize);
    let address = raw.region().base as usize + at;
    if bytes == 0 || !bytes.is_multiple_of(16) || !address.is_multiple_of(16) {
        let name = &raw.region().name;
        let message = format!("a bulk copy of {bytes} bytes at byte {at} of `{name}`: both are multiples of 16");
        thread.raise(FaultKind::Misaligned, thread.line(), message);
    }
    raw.region().access(index, at as i64, bytes, touch);
    (at, bytes)
}

/// Starts to copy `count` elements from element `from` of global memory to element `to` of a shared array. The barrier
/// counts the bytes.
#[track_caller]
#[allow(clippy::too_many_arguments)]
pub fn bulk_load<T: Element, M: Readable<Element = T>>(
    target: Shared<T>,
    to: impl KernelIndex,
    source: M,
    from: impl KernelIndex,
    count: u32,
    barriers: Shared<u64>,
    barrier: impl KernelIndex,
) {
    let thread = Thread::current();
    let (_, bytes) = end(source.raw(), from.value(), count, Touch::Read);
    let data = source.raw().content(from.value(), count as usize);
    let at = target.raw().check_bounds(to.value(), count as usize);
    thread.require_fenced(target.raw().region(), at, bytes, "copies to", thread.line());
    end(target.raw(), to.value(), count, Touch::Write);
    let address = barriers.raw().at::<u64>(barrier.value(), Touch::Atomic) as usize;
    mbarrier::start_copy(thread, thread.line(), address, target.raw().region(), at, data);
}

row! {
    /// Starts to copy `count` elements from global to shared memory. The barrier counts the bytes.
    Thread bulk_load since 90 needs [bulk_come]
    cuda "
template <class T, class I, class J, class K> __device__ __forceinline__ void bulk_load(T* target, I to, const T* source, J from, u32 count, u64* barriers, K barrier) {
    asm volatile(\"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\" :: \"r\"((u32)__cvta_generic_to_shared(target + to)), \"l\"(source + from), \"r\"(count * (u32)sizeof(T)), \"r\"((u32)__cvta_generic_to_shared(barriers + barrier)) : \"memory\");
}
template <class T, class I, class J, class K> __device__ __forceinline__ void bulk_load(T* target, I to, weights<T> source, J from, u32 count, u64* barriers, K barrier) {
    bulk_load(target, to, source.at, from, count, barriers, barrier);
}"
    host "
template <class T, class I, class J, class K> inline void bulk_load(T* target, I to, const T* source, J from, u32 count, u64* barriers, K barrier) {
    memcpy(target + to, source + from, count * sizeof(T));
    bulk_come((u64)(barriers + barrier), count * (u32)sizeof(T));
}
template <class T, class I, class J, class K> inline void bulk_load(T* target, I to, weights<T> source, J from, u32 count, u64* barriers, K barrier) { bulk_load(target, to, source.at, from, count, barriers, barrier); }"
}

intrinsic! {
    /// The end of a copy of the host text.
    Thread fn bulk_come(address: u64, bytes: u32) { mbarrier::complete(Thread::current(), None, address as usize, bytes as usize) }
    cuda ""
}
