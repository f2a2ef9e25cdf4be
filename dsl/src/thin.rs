//! Units of 8 bytes for kernels that are written for 16: how `Weights<U32x4>` is read where an instance is thin.
//!
//! A kernel reads a plane of codes as elements of 16 bytes, and a type whose units have 8 would need it written again.
//! Instead a function in a slot that knows such units says so (`#[device(thin)]`), and the instance's text has another
//! meaning of that one type: an element is 8 bytes, a load gives them and zeros, and a copy of 16 bytes to shared memory
//! brings them to the first half of its place and leaves the other as it is. Nothing else of a kernel changes, and
//! nothing in the text of an instance that is not thin.
//!
//! Where a thin instance needs another function, `#[device(thin(other))]` on the usual one names it.
//!
//! In the simulator a region does the same (`sim/region.rs`).

/// The pointer: as `weights<T>`, but that it counts 8 bytes.
pub const POINTER: &str = "
// An element is 8 bytes, read as 16.
template <> struct weights<U32x4> {
    const U32x2* at;
    template <class I> __device__ __forceinline__ weights operator+(I by) const { return weights{at + by}; }
};

__device__ __forceinline__ U32x4 with_zeros(U32x2 raw) { return U32x4{raw.x, raw.y, 0, 0}; }
";

/// What reads it: the intrinsic, its text for CUDA, and that for the host.
pub const READERS: [(&str, &str, &str); 4] = [
    ("load", LOAD, LOAD),
    ("load_streamed", LOAD_STREAMED, LOAD_STREAMED),
    ("load_streamed_if", LOAD_STREAMED_IF, LOAD_STREAMED_IF_ON_HOST),
    ("cp_async16", CP_ASYNC16, CP_ASYNC16_ON_HOST),
];

const LOAD: &str = "
template <class V, class I> __device__ __forceinline__ V load(weights<U32x4> memory, I index) { return with_zeros(read_constant(memory.at + index)); }
";
const LOAD_STREAMED: &str = "
template <class V, class I> __device__ __forceinline__ V load_streamed(weights<U32x4> memory, I index) { return with_zeros(load_streamed<U32x2>(weights<U32x2>{memory.at}, index)); }
";
const LOAD_STREAMED_IF: &str = "
template <class V, class I> __device__ __forceinline__ V load_streamed_if(weights<U32x4> memory, I index, bool wanted, V otherwise) {
    const U32x2* at = memory.at + index;
    U32x2 raw = U32x2{otherwise.x, otherwise.y};
    asm(\"{ .reg .pred wanted; setp.ne.u32 wanted, %3, 0; @wanted ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }\"
        : \"+r\"(raw.x), \"+r\"(raw.y) : \"l\"(at), \"r\"((u32)wanted));
    return with_zeros(raw);
}
";
const LOAD_STREAMED_IF_ON_HOST: &str = "
template <class V, class I> inline V load_streamed_if(weights<U32x4> memory, I index, bool wanted, V otherwise) { return wanted ? with_zeros(memory.at[index]) : otherwise; }
";
const CP_ASYNC16: &str = "
template <class I, class J> __device__ __forceinline__ void cp_async16(U32x4* target, I to, weights<U32x4> source, J from) {
    u32 address = (u32)__cvta_generic_to_shared(target + to);
    asm volatile(\"cp.async.ca.shared.global [%0], [%1], 8;\" :: \"r\"(address), \"l\"(source.at + from) : \"memory\");
}
";
const CP_ASYNC16_ON_HOST: &str = "
template <class I, class J> inline void cp_async16(U32x4* target, I to, weights<U32x4> source, J from) { target[to] = with_zeros(source.at[from]); }
";
