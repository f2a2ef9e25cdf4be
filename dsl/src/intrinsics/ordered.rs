//! Accesses to global memory that other blocks make at the same time: relaxed ones, and counters with release and acquire.
//!
//! A relaxed access is whole, up to 16 bytes, and orders nothing. `atomic_add_release` publishes what its thread did, and what the thread
//! knows of others by barriers, to whoever reads the sum with `atomic_load_acquire` or `atomic_wait_acquire`: data written before
//! the one may be read after the other. A block may wait for another only if both are resident; the launch must see to that.
//!
//! In the simulator, a thread that reads the same value from the same place again lets the others run. If all that are left do so, it
//! is a deadlock. The host's text has one copy of shared memory, so there only kernels without any can wait for other blocks.

use super::rows::{intrinsic, row};
use crate::Element;
use crate::sim::memory::{InOut, KernelIndex, Output, Raw};
use crate::sim::shadow::Touch;
use crate::sim::thread::{Cause, Thread};

/// Global memory that may be written with relaxed accesses.
pub trait RelaxedWritable: Copy {
    type Element: Element;
    #[doc(hidden)]
    fn relaxed(self) -> Raw<Self::Element>;
}

impl<T: Element> RelaxedWritable for Output<T> {
    type Element = T;
    fn relaxed(self) -> Raw<T> {
        self.0
    }
}

impl<T: Element> RelaxedWritable for InOut<T> {
    type Element = T;
    fn relaxed(self) -> Raw<T> {
        self.0
    }
}

/// Reads whole what other blocks may write meanwhile. Orders nothing.
#[track_caller]
pub fn atomic_load_relaxed<V: Element>(memory: InOut<impl Element>, index: impl KernelIndex) -> V {
    const { assert!(matches!(size_of::<V>(), 4 | 8 | 16), "a relaxed access is of 4, 8 or 16 bytes") };
    polled(memory.0, index.value())
}

#[track_caller]
fn polled<V: Element, T: Element>(raw: Raw<T>, index: i64) -> V {
    let thread = Thread::current();
    let value: V = raw.get_by(index, Touch::RelaxedRead);
    let content = raw.content(index, size_of::<V>() / size_of::<T>());
    let bits = content.iter().fold(0u64, |bits, byte| bits.rotate_left(5) ^ u64::from(*byte));
    thread.polls("atomic_load_relaxed", thread.line(), raw.address(index), bits);
    value
}

row! {
    /// Reads whole what other blocks may write meanwhile, 4, 8 or 16 bytes. Orders nothing.
    Thread atomic_load_relaxed needs [poll_again]
    cuda "
template <class V, class T, class I> __device__ __forceinline__ V atomic_load_relaxed(const T* memory, I index) {
    static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, \"a relaxed access is of 4, 8 or 16 bytes\");
    const T* at = memory + index;
    if constexpr (sizeof(V) == 4) {
        u32 raw;
        asm volatile(\"ld.relaxed.gpu.global.b32 %0, [%1];\" : \"=r\"(raw) : \"l\"(at) : \"memory\");
        return bits_as<V>(raw);
    } else if constexpr (sizeof(V) == 8) {
        u64 raw;
        asm volatile(\"ld.relaxed.gpu.global.b64 %0, [%1];\" : \"=l\"(raw) : \"l\"(at) : \"memory\");
        return bits_as<V>(raw);
    } else {
        struct __align__(16) { u64 low, high; } raw;
        asm volatile(\"{\\n.reg .b128 both;\\nld.relaxed.gpu.global.b128 both, [%2];\\nmov.b128 {%0, %1}, both;\\n}\" : \"=l\"(raw.low), \"=l\"(raw.high) : \"l\"(at) : \"memory\");
        return bits_as<V>(raw);
    }
}"
    host "
template <class V, class T, class I> inline V atomic_load_relaxed(const T* memory, I index) {
    V value = *(const V*)(memory + index);
    u8 bytes[sizeof(V)];
    memcpy(bytes, &value, sizeof(V));
    u64 bits = 0;
    for (u8 byte : bytes) bits = (bits << 5 | bits >> 59) ^ byte;
    poll_again((u64)(memory + index), bits);
    return value;
}"
}

intrinsic! {
    /// A place was read that other blocks write: what the host text of polling loads calls.
    Thread fn poll_again(address: u64, bits: u64) {
        let thread = Thread::current();
        thread.polls("atomic_load", thread.line(), address as usize, bits);
    }
    cuda ""
}

/// Writes whole what other blocks may read meanwhile. Orders nothing.
#[track_caller]
pub fn atomic_store_relaxed<V: Element>(memory: impl RelaxedWritable, index: impl KernelIndex, value: V) {
    const { assert!(matches!(size_of::<V>(), 4 | 8 | 16), "a relaxed access is of 4, 8 or 16 bytes") };
    memory.relaxed().set_by(index.value(), Touch::Atomic, value);
}

row! {
    /// Writes whole what other blocks may read meanwhile, 4, 8 or 16 bytes. Orders nothing.
    Thread atomic_store_relaxed
    cuda "
template <class T, class I, class V> __device__ __forceinline__ void atomic_store_relaxed(T* memory, I index, V value) {
    static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, \"a relaxed access is of 4, 8 or 16 bytes\");
    T* at = memory + index;
    if constexpr (sizeof(V) == 4) {
        asm volatile(\"st.relaxed.gpu.global.b32 [%0], %1;\" :: \"l\"(at), \"r\"(bits_as<u32>(value)) : \"memory\");
    } else if constexpr (sizeof(V) == 8) {
        asm volatile(\"st.relaxed.gpu.global.b64 [%0], %1;\" :: \"l\"(at), \"l\"(bits_as<u64>(value)) : \"memory\");
    } else {
        struct __align__(16) halves { u64 low, high; };
        halves raw = bits_as<halves>(value);
        asm volatile(\"{\\n.reg .b128 both;\\nmov.b128 both, {%1, %2};\\nst.relaxed.gpu.global.b128 [%0], both;\\n}\" :: \"l\"(at), \"l\"(raw.low), \"l\"(raw.high) : \"memory\");
    }
}"
    host "template <class T, class I, class V> inline void atomic_store_relaxed(T* memory, I index, V value) { *(V*)(memory + index) = value; }"
}

/// Adds to a counter. What this thread did before, and knows of others, is ordered before what follows an acquire of the sum.
#[track_caller]
pub fn atomic_add_release(counter: InOut<u32>, index: impl KernelIndex, value: u32) {
    let thread = Thread::current();
    thread.releases(counter.0.address(index.value()));
    counter.0.update(index.value(), |old| old.wrapping_add(value));
}

row! {
    /// Adds to a counter. What this thread did before, and knows of others, is ordered before what follows an acquire of
    /// the sum.
    Thread atomic_add_release
    cuda "
template <class I> __device__ __forceinline__ void atomic_add_release(u32* counter, I index, u32 value) {
    asm volatile(\"red.release.gpu.global.add.u32 [%0], %1;\" :: \"l\"(counter + index), \"r\"(value) : \"memory\");
}"
    host "template <class I> inline void atomic_add_release(u32* counter, I index, u32 value) { counter[index] += value; }"
}

/// Reads a counter. What was published by the releases that made its value is ordered before what follows.
#[track_caller]
pub fn atomic_load_acquire(counter: InOut<u32>, index: impl KernelIndex) -> u32 {
    let thread = Thread::current();
    let value: u32 = counter.0.get_by(index.value(), Touch::RelaxedRead);
    let place = counter.0.address(index.value());
    thread.acquires(place);
    thread.polls("atomic_load_acquire", thread.line(), place, value.into());
    value
}

row! {
    /// Reads a counter. What was published by the releases that made its value is ordered before what follows.
    Thread atomic_load_acquire needs [poll_again]
    cuda "
template <class I> __device__ __forceinline__ u32 atomic_load_acquire(const u32* counter, I index) {
    u32 value;
    asm volatile(\"ld.acquire.gpu.global.u32 %0, [%1];\" : \"=r\"(value) : \"l\"(counter + index) : \"memory\");
    return value;
}"
    host "template <class I> inline u32 atomic_load_acquire(const u32* counter, I index) { u32 value = counter[index]; poll_again((u64)(counter + index), value); return value; }"
}

/// Waits until a counter is at least `value`, then orders as `atomic_load_acquire` does.
#[track_caller]
pub fn atomic_wait_acquire(counter: InOut<u32>, index: impl KernelIndex, value: u32) {
    let (thread, index) = (Thread::current(), index.value());
    let line = thread.line();
    // Noted at the kernel's line, before the wait and after it.
    let _: u32 = counter.0.get_by(index, Touch::RelaxedRead);
    let read = || counter.0.content(index, 1).iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
    let name = &counter.0.region().name;
    let what = || format!("`{name}[{index}]` to be at least {value} (it was {} when the wait began)", read());
    thread.wait_until(Cause::Threads, "atomic_wait_acquire", line, what, || read() >= value);
    let _: u32 = counter.0.get_by(index, Touch::RelaxedRead);
    thread.acquires(counter.0.address(index));
}

row! {
    /// Waits until a counter is at least `value`, then orders as `atomic_load_acquire` does.
    Thread atomic_wait_acquire needs [atomic_load_acquire]
    cuda "
template <class I> __device__ __forceinline__ void atomic_wait_acquire(const u32* counter, I index, u32 value) {
    while (atomic_load_acquire(counter, index) < value) {}
}"
    host "template <class I> inline void atomic_wait_acquire(const u32* counter, I index, u32 value) { while (atomic_load_acquire(counter, index) < value) {} }"
}
