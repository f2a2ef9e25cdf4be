//! Words that blocks of one launch send each other: a word is its own flag. The memory is zero
//! before that; a sender writes a word that is not zero, once, and a receiver reads until it is there. Nothing else is
//! ordered by it.
//!
//! A receiver waits for a block that runs: whoever sends does so before it waits for anybody, and is among the first
//! blocks of the grid, which the GPU starts first.

use super::rows::{intrinsic, row};
use crate::elements::{Element, U32x4};
use crate::sim::FaultKind;
use crate::sim::memory::{KernelIndex, Readable, Regs, Weights, Writable};
use crate::sim::shadow::Touch;
use crate::sim::thread::{Cause, Stop, StopScope, Thread};

/// Sends a word that is not zero.
#[track_caller]
pub fn send(memory: impl Writable<Element = u32>, index: impl KernelIndex, word: u32) {
    let thread = Thread::current();
    if word == 0 {
        thread.raise(FaultKind::Packet, thread.line(), "sends a word of zero, which is none".to_string());
    }
    let index = index.value();
    let raw = memory.raw_mut();
    if raw.get_by::<u32>(index, Touch::RelaxedRead) != 0 {
        let message = format!("sends word {index}, which is there: nobody has cleared it since it was sent");
        thread.raise(FaultKind::Packet, thread.line(), message);
    }
    raw.set_by(index, Touch::Atomic, word);
}

row! {
    /// Sends a word that is not zero.
    Thread send
    cuda "
template <class I> __device__ __forceinline__ void send(u32* memory, I index, u32 word) {
    asm volatile(\"st.relaxed.gpu.u32 [%0], %1;\" :: \"l\"(memory + index), \"r\"(word) : \"memory\");
}"
    host "template <class I> inline void send(u32* memory, I index, u32 word) { memory[index] = word; }"
}

/// Neighbouring words, four at a time, when all of them are there. The first one's index is a multiple of 4.
#[track_caller]
pub fn receive(memory: impl Writable<Element = u32>, index: impl KernelIndex, words: &mut Regs<U32x4>) {
    let thread = Thread::current();
    let (raw, index, fours) = (memory.raw_mut(), index.value(), words.values_mut());
    let count = 4 * fours.len() as i64;
    let word = |i: i64| raw.get_by::<u32>(index + i, Touch::RelaxedRead);
    let what = || format!("words {index} to {}, which somebody sends", index + count - 1);
    thread.wait_until(Cause::Threads, "receive", thread.line(), what, || (0..count).all(|i| word(i) != 0));
    for (four, i) in fours.iter_mut().zip((0..count).step_by(4)) {
        *four = U32x4 { x: word(i), y: word(i + 1), z: word(i + 2), w: word(i + 3) };
    }
}

row! {
    /// Neighbouring words, four at a time, when all of them are there. The first one's index is a multiple of 4.
    Thread receive needs [others_run]
    cuda "
template <class I, u32 COUNT> __device__ __forceinline__ void receive(u32* memory, I index, U32x4 (&words)[COUNT]) {
    bool missing;
    do {
        missing = false;
        // All are asked for before one is looked at.
        #pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
            asm volatile(\"ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];\" : \"=r\"(words[i].x), \"=r\"(words[i].y), \"=r\"(words[i].z), \"=r\"(words[i].w) : \"l\"(memory + index + i * 4) : \"memory\");
        #pragma unroll
        for (u32 i = 0; i < COUNT; ++i) missing |= words[i].x == 0 || words[i].y == 0 || words[i].z == 0 || words[i].w == 0;
    } while (missing);
}"
    host "
template <class I, u32 COUNT> inline void receive(u32* memory, I index, U32x4 (&words)[COUNT]) {
    volatile u32* at = memory + index;
    for (u32 i = 0, again = 0; i < 4 * COUNT; again = 1) {
        if (at[i] == 0) others_run(again);
        else ++i;
    }
    for (u32 i = 0; i < COUNT; ++i) words[i] = U32x4{at[i * 4], at[i * 4 + 1], at[i * 4 + 2], at[i * 4 + 3]};
}"
}

intrinsic! {
    /// Lets other threads run, in the host text, whose thread waits for words.
    Thread fn others_run(again: u32) {
        let thread = Thread::current();
        *thread.awaits.borrow_mut() = "words that somebody sends".to_string();
        let scope = StopScope::Event { by: Cause::Threads, again: again == 1 };
        thread.suspend(Stop { scope, operation: "receive", line: None });
    }
    cuda ""
}

/// Brings weights to the L2 cache, for a load that is not ready to be issued.
#[track_caller]
pub fn prefetch<T: Element>(memory: Weights<T>, index: impl KernelIndex) {
    memory.raw().check_bounds(index.value(), 1);
}

row! {
    /// Brings weights to the L2 cache, for a load that is not ready to be issued.
    Thread prefetch
    cuda "template <class T, class I> __device__ __forceinline__ void prefetch(weights<T> memory, I index) { asm volatile(\"prefetch.global.L2 [%0];\" :: \"l\"(memory.at + index)); }"
    host "template <class T, class I> inline void prefetch(weights<T> memory, I index) {}"
}
