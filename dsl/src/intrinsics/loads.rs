//! Vector loads and stores: 2, 4, 8 or 16 bytes in one access, from memory of smaller elements. The index counts the
//! memory's own elements; the address must be a multiple of the access.

use super::rows::row;
use crate::elements::{BF16, Element, ElementType, F16, F32x4, Float, U32x2};
use crate::sim::memory::{InOut, Input, KernelIndex, Readable, Weights, Writable};

/// Reads a `V` at element `index`: `load::<U32x4>(weights, i)`.
#[track_caller]
pub fn load<V: Element>(memory: impl Readable, index: impl KernelIndex) -> V {
    memory.raw().get(index.value())
}

row! {
    /// Reads a `V` at element `index`: `load::<U32x4>(weights, i)`.
    Thread load
    cuda "
template <class V, class T, class I> __device__ __forceinline__ V load(const T* memory, I index) { return *(const V*)(memory + index); }
template <class V, class T, class I> __device__ __forceinline__ V load(weights<T> memory, I index) { return read_constant((const V*)(memory.at + index)); }"
    host same
}

/// Memory that may be read with an L1-bypassing load: constants only.
pub trait Streamed: Readable {}
impl<T: Element> Streamed for Weights<T> {}

/// Reads a `V` of weights that nobody will read again: it does not stay in L1.
#[track_caller]
pub fn load_streamed<V: Element>(memory: impl Streamed, index: impl KernelIndex) -> V {
    memory.raw().get(index.value())
}

row! {
    /// Reads a `V` of weights that nobody will read again: it does not stay in L1.
    Thread load_streamed
    cuda "
template <class V, class T, class I> __device__ __forceinline__ V load_streamed(weights<T> memory, I index) {
    const V* at = (const V*)(memory.at + index);
    if constexpr (sizeof(V) == 16) {
        U32x4 raw;
        asm(\"ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\" : \"=r\"(raw.x), \"=r\"(raw.y), \"=r\"(raw.z), \"=r\"(raw.w) : \"l\"(at));
        return bits_as<V>(raw);
    } else if constexpr (sizeof(V) == 8) {
        U32x2 raw;
        asm(\"ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\" : \"=r\"(raw.x), \"=r\"(raw.y) : \"l\"(at));
        return bits_as<V>(raw);
    } else if constexpr (sizeof(V) == 4) {
        u32 raw;
        asm(\"ld.global.nc.L1::no_allocate.u32 %0, [%1];\" : \"=r\"(raw) : \"l\"(at));
        return bits_as<V>(raw);
    } else {
        return read_constant(at);
    }
}"
    host "template <class V, class T, class I> inline V load_streamed(weights<T> memory, I index) { return *(const V*)(memory.at + index); }"
}

/// The same where it is `wanted`, else `otherwise`, and nothing is read. A predicate and no branch, so that the
/// compiler may compute addresses for several of them at once.
#[track_caller]
pub fn load_streamed_if<V: Element>(memory: impl Streamed, index: impl KernelIndex, wanted: bool, otherwise: V) -> V {
    if wanted { memory.raw().get(index.value()) } else { otherwise }
}

row! {
    /// The same where it is `wanted`, else `otherwise`, and nothing is read. A predicate and no branch, so that the
    /// compiler may compute addresses for several of them at once.
    Thread load_streamed_if
    cuda "
template <class V, class T, class I> __device__ __forceinline__ V load_streamed_if(weights<T> memory, I index, bool wanted, V otherwise) {
    static_assert(sizeof(V) == 16, \"16 bytes\");
    const V* at = (const V*)(memory.at + index);
    U32x4 raw = bits_as<U32x4>(otherwise);
    asm(\"{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; @wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }\"
        : \"+r\"(raw.x), \"+r\"(raw.y), \"+r\"(raw.z), \"+r\"(raw.w) : \"l\"(at), \"r\"((u32)wanted));
    return bits_as<V>(raw);
}"
    host "template <class V, class T, class I> inline V load_streamed_if(weights<T> memory, I index, bool wanted, V otherwise) { return wanted ? *(const V*)(memory.at + index) : otherwise; }"
}

/// Reads four neighbouring floats in one access, whatever their type: 8 or 16 bytes.
#[track_caller]
pub fn load_floats4<T: Float>(memory: impl Readable<Element = T>, index: impl KernelIndex) -> F32x4 {
    let raw = memory.raw();
    if T::TYPE == ElementType::F32 {
        return raw.get(index.value());
    }
    let pairs: U32x2 = raw.get(index.value());
    let float = |bits: u32| match T::TYPE {
        ElementType::F16 => F16::from_bits(bits as u16).to_f32(),
        _ => BF16::from_bits(bits as u16).to_f32(),
    };
    F32x4 { x: float(pairs.x), y: float(pairs.x >> 16), z: float(pairs.y), w: float(pairs.y >> 16) }
}

row! {
    /// Reads four neighbouring floats in one access, whatever their type: 8 or 16 bytes.
    Thread load_floats4 needs [load]
    cuda "
template <class T> __device__ __forceinline__ F32x4 floats4_of(U32x2 raw) { return F32x4{to_f32(T{(u16)raw.x}), to_f32(T{(u16)(raw.x >> 16)}), to_f32(T{(u16)raw.y}), to_f32(T{(u16)(raw.y >> 16)})}; }
template <class T, class I> __device__ __forceinline__ F32x4 load_floats4(const T* memory, I index) { return floats4_of<T>(load<U32x2>(memory, index)); }
template <class T, class I> __device__ __forceinline__ F32x4 load_floats4(weights<T> memory, I index) { return floats4_of<T>(load<U32x2>(memory, index)); }
template <class I> __device__ __forceinline__ F32x4 load_floats4(const f32* memory, I index) { return load<F32x4>(memory, index); }
template <class I> __device__ __forceinline__ F32x4 load_floats4(weights<f32> memory, I index) { return load<F32x4>(memory, index); }"
    host same
}

/// What this kernel may also write, for a function that only reads it. What it reads, no other thread writes.
pub fn read_only<T: Element>(memory: InOut<T>) -> Input<T> {
    Input(memory.raw())
}

row! {
    /// What this kernel may also write, for a function that only reads it. What it reads, no other thread writes.
    Thread read_only
    cuda "template <class T> __device__ __forceinline__ const T* read_only(T* memory) { return memory; }"
    host same
}

/// Writes a `V` at element `index`: `store(out, i, f32x4(a, b, c, d))`.
#[track_caller]
pub fn store<V: Element>(memory: impl Writable, index: impl KernelIndex, value: V) {
    memory.raw_mut().set(index.value(), value);
}

row! {
    /// Writes a `V` at element `index`: `store(out, i, f32x4(a, b, c, d))`.
    Thread store
    cuda "template <class T, class I, class V> __device__ __forceinline__ void store(T* memory, I index, V value) { *(V*)(memory + index) = value; }"
    host same
}

/// Writes four neighbouring floats in one access, whatever their type: 8 or 16 bytes.
#[track_caller]
pub fn store_floats4<T: Float>(memory: impl Writable<Element = T>, index: impl KernelIndex, four: F32x4) {
    let raw = memory.raw_mut();
    if T::TYPE == ElementType::F32 {
        return raw.set(index.value(), four);
    }
    let bits = |value: f32| -> u32 {
        match T::TYPE {
            ElementType::F16 => F16::from_f32(value).to_bits().into(),
            _ => BF16::from_f32(value).to_bits().into(),
        }
    };
    let pair = |low, high| bits(low) | bits(high) << 16;
    raw.set(index.value(), U32x2 { x: pair(four.x, four.y), y: pair(four.z, four.w) });
}

row! {
    /// Writes four neighbouring floats in one access, whatever their type: 8 or 16 bytes.
    Thread store_floats4 needs [store]
    cuda "
template <class T> __device__ __forceinline__ u32 bits_of_pair(f32 low, f32 high) { return (u32)from_f32<T>(low).bits | (u32)from_f32<T>(high).bits << 16; }
template <class T, class I> __device__ __forceinline__ void store_floats4(T* memory, I index, F32x4 four) { store(memory, index, U32x2{bits_of_pair<T>(four.x, four.y), bits_of_pair<T>(four.z, four.w)}); }
template <class I> __device__ __forceinline__ void store_floats4(f32* memory, I index, F32x4 four) { store(memory, index, four); }"
    host same
}
