//! Asynchronous copies from global to shared memory (`cp.async`). A copy is complete once its `cp.async` group has been
//! waited for, and visible to the other threads after the next barrier. The simulator completes it no earlier than
//! that.

use super::rows::row;
use crate::Element;
use crate::sim::memory::{KernelIndex, Readable, Shared, Writable};
use crate::sim::pending::AsyncCopy;
use crate::sim::shadow::Touch;
use crate::sim::thread::Thread;

/// Starts to copy 16 bytes, from element `from` of global memory to element `to` of a shared array.
#[track_caller]
pub fn cp_async16<T: Element, M: Readable<Element = T>>(
    target: Shared<T>,
    to: impl KernelIndex,
    source: M,
    from: impl KernelIndex,
) {
    let thread = Thread::current();
    let data: crate::U32x4 = source.raw().get(from.value());
    let raw = target.raw_mut();
    let address = raw.at::<crate::U32x4>(to.value(), Touch::Write) as usize;
    let words = [data.x, data.y, data.z, data.w];
    let mut bytes = [0; 16];
    for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    let at = address - raw.region().base as usize;
    thread.open_copies.borrow_mut().push(AsyncCopy {
        target: raw.region,
        at,
        data: bytes,
        len: 16,
        line: thread.line(),
    });
}

row! {
    /// Starts to copy 16 bytes, from element `from` of global memory to element `to` of a shared array.
    Thread cp_async16
    cuda "
template <class T, class I, class J> __device__ __forceinline__ void cp_async16(T* target, I to, const T* source, J from) {
    u32 address = (u32)__cvta_generic_to_shared(target + to);
    asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16;\" :: \"r\"(address), \"l\"(source + from) : \"memory\");
}
template <class T, class I, class J> __device__ __forceinline__ void cp_async16(T* target, I to, weights<T> source, J from) {
    cp_async16(target, to, source.at, from);
}"
    host "
template <class T, class I, class J> inline void cp_async16(T* target, I to, const T* source, J from) { *(U32x4*)(target + to) = *(const U32x4*)(source + from); }
template <class T, class I, class J> inline void cp_async16(T* target, I to, weights<T> source, J from) { cp_async16(target, to, source.at, from); }"
}

/// Starts to copy one element of four bytes, from `from` of global memory to `to` of a shared array: scales and what
/// else does not lie at multiples of 16 bytes.
#[track_caller]
pub fn cp_async4<T: Element, M: Readable<Element = T>>(
    target: Shared<T>,
    to: impl KernelIndex,
    source: M,
    from: impl KernelIndex,
) {
    assert_eq!(size_of::<T>(), 4, "cp_async4 copies elements of four bytes");
    let thread = Thread::current();
    let word: u32 = source.raw().get(from.value());
    let raw = target.raw_mut();
    let address = raw.at::<u32>(to.value(), Touch::Write) as usize;
    let mut data = [0; 16];
    data[..4].copy_from_slice(&word.to_ne_bytes());
    let at = address - raw.region().base as usize;
    thread.open_copies.borrow_mut().push(AsyncCopy { target: raw.region, at, data, len: 4, line: thread.line() });
}

row! {
    /// Starts to copy one element of four bytes, from `from` of global memory to `to` of a shared array.
    Thread cp_async4
    cuda "
template <class T, class I, class J> __device__ __forceinline__ void cp_async4(T* target, I to, const T* source, J from) {
    static_assert(sizeof(T) == 4, \"cp_async4 copies elements of four bytes\");
    u32 address = (u32)__cvta_generic_to_shared(target + to);
    asm volatile(\"cp.async.ca.shared.global [%0], [%1], 4;\" :: \"r\"(address), \"l\"(source + from) : \"memory\");
}
template <class T, class I, class J> __device__ __forceinline__ void cp_async4(T* target, I to, weights<T> source, J from) {
    cp_async4(target, to, source.at, from);
}"
    host "
template <class T, class I, class J> inline void cp_async4(T* target, I to, const T* source, J from) { target[to] = source[from]; }
template <class T, class I, class J> inline void cp_async4(T* target, I to, weights<T> source, J from) { cp_async4(target, to, source.at, from); }"
}

/// Closes the group of the copies started since the last one.
pub fn cp_async_commit() {
    let thread = Thread::current();
    let group = thread.open_copies.take();
    thread.copy_groups.borrow_mut().push_back(group);
}

row! {
    /// Closes the group of the copies started since the last one.
    Thread cp_async_commit
    cuda "__device__ __forceinline__ void cp_async_commit() { asm volatile(\"cp.async.commit_group;\" ::: \"memory\"); }"
    host "inline void cp_async_commit() {}"
}

/// Waits until at most `pending` of this thread's groups are still on their way; `pending` is a constant.
#[allow(unsafe_code)]
pub fn cp_async_wait(pending: u32) {
    let thread = Thread::current();
    while thread.copy_groups.borrow().len() > pending as usize {
        let group = thread.copy_groups.borrow_mut().pop_front().unwrap_or_default();
        for copy in group {
            // SAFETY: the region belongs to the running launch; bounds were checked when the copy started.
            unsafe {
                let region = &*copy.target;
                if region.checked {
                    thread.check(region, copy.at, copy.len, Touch::Write, copy.line);
                }
                std::ptr::copy_nonoverlapping(copy.data.as_ptr(), region.base.add(copy.at), copy.len);
            }
        }
    }
}

row! {
    /// Waits until at most `pending` of this thread's groups are still on their way; `pending` is a constant.
    Thread cp_async_wait
    cuda "
__device__ __forceinline__ void cp_async_wait(u32 pending) {
    // The operand of the instruction is part of it: the branches fold away.
    if (pending == 0) asm volatile(\"cp.async.wait_group 0;\" ::: \"memory\");
    else if (pending == 1) asm volatile(\"cp.async.wait_group 1;\" ::: \"memory\");
    else if (pending == 2) asm volatile(\"cp.async.wait_group 2;\" ::: \"memory\");
    else if (pending == 3) asm volatile(\"cp.async.wait_group 3;\" ::: \"memory\");
    else if (pending == 4) asm volatile(\"cp.async.wait_group 4;\" ::: \"memory\");
    else if (pending == 5) asm volatile(\"cp.async.wait_group 5;\" ::: \"memory\");
    else asm volatile(\"cp.async.wait_group 6;\" ::: \"memory\");
}"
    host "inline void cp_async_wait(u32) {}"
}
