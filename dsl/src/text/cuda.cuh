// Types and functions of the kernel language, for CUDA. Compiled with --fmad=false: a product and a sum fuse where the
// kernel says mul_add, and nowhere else.

namespace gemma4c {

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;

#define DYNAMIC_SHARED(bytes) extern __shared__ __align__(128) u8 dynamic_shared[]
#define SWIZZLED_SHARED(bytes) extern __shared__ __align__(1024) u8 dynamic_shared[]
#define CLUSTER_SHARED(bytes, blocks) DYNAMIC_SHARED(bytes)

template <class To, class From> __device__ __forceinline__ To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the sizes differ");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// A read of memory that nobody writes while the kernel runs: the non-coherent path.
template <class T> __device__ __forceinline__ T read_constant(const T* at) {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "an access of 1 to 16 bytes");
    if constexpr (sizeof(T) == 1) {
        u32 raw;
        asm("ld.global.nc.u8 %0, [%1];" : "=r"(raw) : "l"(at));
        return bits_as<T>((u8)raw);
    } else if constexpr (sizeof(T) == 2) {
        u16 raw;
        asm("ld.global.nc.u16 %0, [%1];" : "=h"(raw) : "l"(at));
        return bits_as<T>(raw);
    } else if constexpr (sizeof(T) == 4) {
        u32 raw;
        asm("ld.global.nc.u32 %0, [%1];" : "=r"(raw) : "l"(at));
        return bits_as<T>(raw);
    } else if constexpr (sizeof(T) == 8) {
        u64 raw;
        asm("ld.global.nc.u64 %0, [%1];" : "=l"(raw) : "l"(at));
        return bits_as<T>(raw);
    } else {
        struct __align__(16) { u32 x, y, z, w; } raw;
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at));
        return bits_as<T>(raw);
    }
}

__device__ __forceinline__ f32 half_to_float(u16 bits) {
    f32 value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 float_to_half(f32 value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 float_to_bfloat(f32 value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u32 count_ones_of_word(u32 x) { return __popc(x); }
__device__ __forceinline__ u32 leading_zeros_of_word(u32 x) { return __clz(x); }
__device__ __forceinline__ u32 trailing_zeros_of_word(u32 x) { return x == 0 ? 32 : __ffs(x) - 1; }
