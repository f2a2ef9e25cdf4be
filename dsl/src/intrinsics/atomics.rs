//! Atomic updates of global and shared memory, and the one way in which blocks of a launch may wait for each other's
//! work.

use super::ids::{block_idx_y, thread_idx};
use super::rows::row;
use super::warp::{Reduce, barrier};
use crate::Element;
use crate::sim::memory::{InOut, KernelIndex, Writable};
use crate::sim::thread::Thread;

/// Memory with atomic updates of a number.
pub trait Atomic: Writable<Element: Reduce> {}
impl<M: Writable<Element: Reduce + Element>> Atomic for M {}

/// Adds to an element and gives its old value. The order of additions is not defined: a float sum may differ in its
/// last bits.
#[track_caller]
pub fn atomic_add<M: Atomic>(memory: M, index: impl KernelIndex, value: M::Element) -> M::Element {
    memory.raw_mut().update(index.value(), |old| old.sum(value))
}

row! {
    /// Adds to an element and gives its old value.
    Thread atomic_add
    cuda "template <class T, class I> __device__ __forceinline__ T atomic_add(T* memory, I index, typename same<T>::type value) { return atomicAdd(memory + index, value); }"
    host "template <class T, class I> inline T atomic_add(T* memory, I index, typename same<T>::type value) { T old = memory[index]; memory[index] = old + value; return old; }"
}

/// Counts this block as finished. True in the last of `blocks` to arrive at this element of the counter, which then
/// sees all that the others wrote; the counter is zero again after it. All of them must count alike. A collective of
/// the block; holds two barriers.
#[track_caller]
pub fn last_block_of(counter: InOut<u32>, index: u32, blocks: u32) -> bool {
    let operation = "last_block_of";
    let thread = Thread::current();
    let line = thread.line();
    thread.block_collective(operation, line, 0, |_| 0);
    let mut last = 0;
    if thread.index == 0 {
        last = u32::from(atomic_add(counter, index, 1) + 1 == blocks);
        if last == 1 {
            counter.raw_mut().update(index.into(), |_| 0);
        }
    }
    let last = thread.block_collective(operation, line, last, |words| words[0]) == 1;
    thread.block().after_all_blocks.set(last);
    last
}

row! {
    /// Counts this block as finished. True in the last of `blocks` to arrive at this element of the counter, which then
    /// sees all that the others wrote; the counter is zero again after it.
    Block last_block_of needs [barrier, thread_idx, block_idx_y]
    cuda "
__device__ __forceinline__ bool last_block_of(u32* counter, u32 index, u32 blocks) {
    __shared__ bool last;
    // One thread releases and acquires for all: the barriers order the others before and behind it.
    barrier();
    if (thread_idx() == 0) {
        u32 before;
        asm volatile(\"atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\" : \"=r\"(before) : \"l\"(counter + index) : \"memory\");
        last = before + 1 == blocks;
        if (last) counter[index] = 0;
    }
    barrier();
    return last;
}"
    host "
inline bool last_block_of(u32* counter, u32 index, u32 blocks) {
    // The blocks of a cluster, 16 at most along y, run side by side.
    static thread_local bool lasts[16];
    bool& last = lasts[block_idx_y() % 16];
    barrier();
    if (thread_idx() == 0) {
        counter[index] += 1;
        last = counter[index] == blocks;
        if (last) counter[index] = 0;
    }
    barrier();
    return last;
}"
}
