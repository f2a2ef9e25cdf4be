// Types and functions of the kernel language, for the host's compiler. GPU threads are coroutines of one OS thread, which
// the simulator runs; what needs the other threads calls back into it.

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define DYNAMIC_SHARED(bytes) \
    extern const u64 shared_stride = 0; \
    __align__(128) static thread_local u8 dynamic_shared[(bytes) + 1]
#define SWIZZLED_SHARED(bytes) \
    extern const u64 shared_stride = 0; \
    __align__(1024) static thread_local u8 dynamic_shared[(bytes) + 1]
#define __cluster_dims__(...)
// The blocks of a cluster run side by side: each has a piece of its own, aligned for swizzled tiles, and the others are a stride away.
#define CLUSTER_SHARED(bytes, blocks) \
    extern const u64 shared_stride = ((bytes) + 1024) / 1024 * 1024; \
    __align__(1024) static thread_local u8 cluster_shared[blocks][((bytes) + 1024) / 1024 * 1024]; \
    static const struct { u8* operator+(u32 at) const { return cluster_shared[cluster_rank()] + at; } } dynamic_shared = {}

namespace gemma4c {

typedef uint8_t u8;
typedef int8_t i8;
typedef uint16_t u16;
typedef int16_t i16;
typedef uint32_t u32;
typedef int32_t i32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;

template <class To, class From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the sizes differ");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// Bytes from a block's shared memory to that of the next in its cluster: the instance says.
extern const u64 shared_stride;

template <class T> inline T read_constant(const T* at) { return *at; }

inline f32 half_to_float(u16 bits) {
    u32 sign = (u32)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 31) return bits_as<f32>(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return bits_as<f32>(sign | bits_as<u32>((f32)fraction * 0x1p-24f));
    return bits_as<f32>(sign | (exponent + 112) << 23 | fraction << 13);
}

inline u16 float_to_half(f32 value) {
    u32 bits = bits_as<u32>(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000u) return (u16)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (u16)(sign | 0x7c00);
    // Below the smallest normal half the spacing is fixed: adding a power of two rounds to it.
    if (magnitude < 0x38800000u) return (u16)(sign | (bits_as<u32>(bits_as<f32>(magnitude) + 0.5f) - 0x3f000000u));
    u32 rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return (u16)(sign | ((rounded - 0x38000000u) >> 13));
}

inline u16 float_to_bfloat(f32 value) {
    u32 bits = bits_as<u32>(value);
    if ((bits & 0x7fffffff) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline u32 count_ones_of_word(u32 x) { return __builtin_popcount(x); }
inline u32 leading_zeros_of_word(u32 x) { return x == 0 ? 32 : __builtin_clz(x); }
inline u32 trailing_zeros_of_word(u32 x) { return x == 0 ? 32 : __builtin_ctz(x); }
