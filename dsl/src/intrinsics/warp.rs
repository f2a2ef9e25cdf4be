//! Barriers, shuffles, votes and reductions. All lanes of a warp, or all threads of a block, take part at the same
//! line.

use super::ids::{block_dim, lane_id, thread_idx};
use super::rows::{intrinsic, row};
use crate::passing::SlotValue;
use crate::sim::FaultKind;
use crate::sim::thread::{Stop, StopScope, Thread};

intrinsic! {
    /// Waits for all threads of the block; what they wrote before is visible after.
    Block fn barrier() {
        let thread = Thread::current();
        thread.suspend(Stop { scope: StopScope::Block, operation: "barrier", line: thread.line() });
    }
    cuda "__syncthreads();"
}

intrinsic! {
    /// Waits for all threads of the block's first `warps` warps; what they wrote before is visible to them after. The
    /// other warps go on.
    Warp fn barrier_of(warps: u32) {
        let thread = Thread::current();
        let (line, threads) = (thread.line(), warps * 32);
        if threads == 0 || threads > thread.launch().threads || thread.index >= threads {
            let message = format!("`barrier_of({warps})` by thread {} of {}", thread.index, thread.launch().threads);
            thread.raise(FaultKind::Divergence, line, message);
        }
        thread.suspend(Stop { scope: StopScope::Part { threads }, operation: "barrier_of", line });
    }
    cuda "asm volatile(\"bar.sync 1, %0;\" :: \"r\"(warps * 32) : \"memory\");"
}

intrinsic! {
    /// Waits for all lanes of the warp; what they wrote before is visible after. Shuffles do not order memory.
    Warp fn warp_barrier() {
        let thread = Thread::current();
        let scope = StopScope::Warp { orders_memory: true };
        thread.suspend(Stop { scope, operation: "warp_barrier", line: thread.line() });
    }
    cuda "__syncwarp();"
}

/// What a shuffle may carry: one word.
pub trait Word: SlotValue {}
impl Word for u32 {}
impl Word for i32 {}
impl Word for f32 {}

#[track_caller]
fn shuffle<T: Word>(operation: &'static str, value: T, source: impl FnOnce(usize) -> usize) -> T {
    let thread = Thread::current();
    let words = value.into_words();
    let lane = thread.lane();
    thread.warp_collective(operation, thread.line(), &words[..1], |lanes| {
        T::from_words([lanes[source(lane) % 32][0], 0, 0, 0])
    })
}

/// The value of the lane whose number differs in the bits of `mask`.
#[track_caller]
pub fn shfl_xor<T: Word>(value: T, mask: u32) -> T {
    shuffle("shfl_xor", value, |lane| lane ^ mask as usize)
}

row! {
    /// The value of the lane whose number differs in the bits of `mask`.
    Warp shfl_xor needs [shuffle_word, lane_id]
    cuda "template <class T> __device__ __forceinline__ T shfl_xor(T value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }"
    host "template <class T> inline T shfl_xor(T value, u32 mask) { return bits_as<T>(shuffle_word(bits_as<u32>(value), lane_id() ^ mask)); }"
}

/// The value of lane `lane`.
#[track_caller]
pub fn shfl_idx<T: Word>(value: T, lane: u32) -> T {
    shuffle("shfl_idx", value, |_| lane as usize)
}

row! {
    /// The value of lane `lane`.
    Warp shfl_idx needs [shuffle_word]
    cuda "template <class T> __device__ __forceinline__ T shfl_idx(T value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }"
    host "template <class T> inline T shfl_idx(T value, u32 lane) { return bits_as<T>(shuffle_word(bits_as<u32>(value), lane)); }"
}

intrinsic! {
    /// A word of lane `source`: what the host text of the shuffles is made of.
    Warp fn shuffle_word(value: u32, source: u32) -> u32 { shuffle("shuffle_word", value, |_| source as usize) }
    cuda "return __shfl_sync(0xffffffffu, value, source);"
}

intrinsic! {
    /// One bit a lane, lane 0 lowest: where `condition` holds.
    Warp fn ballot(condition: bool) -> u32 {
        let thread = Thread::current();
        thread.warp_collective("ballot", thread.line(), &[condition.into()], |lanes| {
            lanes.iter().enumerate().fold(0, |mask, (lane, words)| mask | words[0] << lane)
        })
    }
    cuda "return __ballot_sync(0xffffffffu, condition);"
}

intrinsic! {
    /// `condition` holds in some lane.
    Warp fn warp_any(condition: bool) -> bool {
        let thread = Thread::current();
        thread.warp_collective("warp_any", thread.line(), &[condition.into()], |lanes| lanes.iter().any(|w| w[0] != 0))
    }
    cuda "return __any_sync(0xffffffffu, condition);"
}

intrinsic! {
    /// `condition` holds in every lane.
    Warp fn warp_all(condition: bool) -> bool {
        let thread = Thread::current();
        thread.warp_collective("warp_all", thread.line(), &[condition.into()], |lanes| lanes.iter().all(|w| w[0] != 0))
    }
    cuda "return __all_sync(0xffffffffu, condition);"
}

/// A number that warps reduce.
pub trait Reduce: Word {
    #[doc(hidden)]
    fn sum(self, other: Self) -> Self;
    #[doc(hidden)]
    fn larger(self, other: Self) -> Self;
}

macro_rules! reduce {
    ($($ty:ident)*) => { $(impl Reduce for $ty {
        fn sum(self, other: Self) -> Self { self + other }
        fn larger(self, other: Self) -> Self { self.max(other) }
    })* };
}
reduce!(u32 i32 f32);

/// The tree of `shfl_xor` over 16, 8, 4, 2, 1: every lane gets the same bits, because addition commutes.
fn butterfly<T: Word>(mut values: [T; 32], combine: fn(T, T) -> T) -> T {
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            values[lane] = combine(values[lane], values[lane + distance]);
        }
    }
    values[0]
}

#[track_caller]
fn reduce_warp<T: Word>(operation: &'static str, value: T, combine: fn(T, T) -> T) -> T {
    let thread = Thread::current();
    let word = thread.warp_reduction(operation, thread.line(), value.into_words()[0], |lanes| {
        butterfly(lanes.map(|words| T::from_words([words[0], 0, 0, 0])), combine).into_words()[0]
    });
    T::from_words([word, 0, 0, 0])
}

/// The sum over the warp's lanes, by a tree that every executor shares.
#[track_caller]
pub fn warp_sum<T: Reduce>(value: T) -> T {
    reduce_warp("warp_sum", value, T::sum)
}

row! {
    /// The sum over the warp's lanes, by a tree that every executor shares.
    Warp warp_sum needs [shfl_xor]
    cuda "
template <class T> __device__ __forceinline__ T warp_sum(T value) {
    #pragma unroll
    for (u32 mask = 16; mask > 0; mask >>= 1) value = value + shfl_xor(value, mask);
    return value;
}"
    host same
}

/// The largest over the warp's lanes.
#[track_caller]
pub fn warp_max<T: Reduce>(value: T) -> T {
    reduce_warp("warp_max", value, T::larger)
}

row! {
    /// The largest over the warp's lanes.
    Warp warp_max needs [shfl_xor]
    cuda "
template <class T> __device__ __forceinline__ T warp_max(T value) {
    #pragma unroll
    for (u32 mask = 16; mask > 0; mask >>= 1) value = max(value, shfl_xor(value, mask));
    return value;
}"
    host same
}

intrinsic! {
    /// The largest word over the warp's lanes, in one instruction: [`warp_max`] takes five shuffles.
    Warp fn warp_largest(value: u32) -> u32 { reduce_warp("warp_largest", value, u32::max) }
    cuda "return __reduce_max_sync(0xffffffffu, value);"
}

#[track_caller]
fn reduce_block<T: Word>(operation: &'static str, value: T, combine: fn(T, T) -> T) -> T {
    let thread = Thread::current();
    let word = thread.block_collective(operation, thread.line(), value.into_words()[0], |words| {
        let warps = words.chunks_exact(32).map(|lanes| {
            let lanes: [T; 32] = std::array::from_fn(|lane| T::from_words([lanes[lane], 0, 0, 0]));
            butterfly(lanes, combine)
        });
        warps.reduce(combine).map_or(0, |result| result.into_words()[0])
    });
    T::from_words([word, 0, 0, 0])
}

/// The sum over the block: each warp's tree, then the warps in order. Holds two barriers.
#[track_caller]
pub fn block_sum<T: Reduce>(value: T) -> T {
    reduce_block("block_sum", value, T::sum)
}

row! {
    /// The sum over the block: each warp's tree, then the warps in order. Holds two barriers.
    Block block_sum needs [warp_sum, barrier, thread_idx, block_dim]
    cuda "
template <class T> __device__ __forceinline__ T block_sum(T value) {
    __shared__ T partial[32];
    value = warp_sum(value);
    barrier();
    if (thread_idx() % 32 == 0) partial[thread_idx() / 32] = value;
    barrier();
    T sum = partial[0];
    for (u32 warp = 1; warp < block_dim() / 32; ++warp) sum = sum + partial[warp];
    return sum;
}"
    host same
}

/// The largest over the block. Holds two barriers.
#[track_caller]
pub fn block_max<T: Reduce>(value: T) -> T {
    reduce_block("block_max", value, T::larger)
}

row! {
    /// The largest over the block. Holds two barriers.
    Block block_max needs [warp_max, barrier, thread_idx, block_dim]
    cuda "
template <class T> __device__ __forceinline__ T block_max(T value) {
    __shared__ T partial[32];
    value = warp_max(value);
    barrier();
    if (thread_idx() % 32 == 0) partial[thread_idx() / 32] = value;
    barrier();
    T largest = partial[0];
    for (u32 warp = 1; warp < block_dim() / 32; ++warp) largest = max(largest, partial[warp]);
    return largest;
}"
    host same
}
