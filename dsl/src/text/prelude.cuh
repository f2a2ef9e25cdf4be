
struct F16 { u16 bits; };
struct BF16 { u16 bits; };
struct __align__(8) U32x2 { u32 x, y; };
struct __align__(16) U32x4 { u32 x, y, z, w; };
struct __align__(16) I32x4 { i32 x, y, z, w; };
struct __align__(8) F32x2 { f32 x, y; };
struct __align__(16) F32x4 { f32 x, y, z, w; };

__device__ __forceinline__ U32x2 u32x2(u32 x, u32 y) { return U32x2{x, y}; }
__device__ __forceinline__ U32x4 u32x4(u32 x, u32 y, u32 z, u32 w) { return U32x4{x, y, z, w}; }
__device__ __forceinline__ I32x4 i32x4(i32 x, i32 y, i32 z, i32 w) { return I32x4{x, y, z, w}; }
__device__ __forceinline__ F32x2 f32x2(f32 x, f32 y) { return F32x2{x, y}; }
__device__ __forceinline__ F32x4 f32x4(f32 x, f32 y, f32 z, f32 w) { return F32x4{x, y, z, w}; }

// Constant data: read on the non-coherent path.
template <class T> struct weights {
    const T* at;
    template <class I> __device__ __forceinline__ T operator[](I index) const { return read_constant(at + index); }
    template <class I> __device__ __forceinline__ weights operator+(I by) const { return weights{at + by}; }
};

template <class T, u32 N, class V> __device__ __forceinline__ void fill(T (&registers)[N], V value) {
    #pragma unroll
    for (u32 i = 0; i < N; ++i) registers[i] = value;
}

// ---- conversions ----

__device__ __forceinline__ f32 to_f32(f32 x) { return x; }
__device__ __forceinline__ f32 to_f32(F16 x) { return half_to_float(x.bits); }
__device__ __forceinline__ f32 to_f32(BF16 x) { return bits_as<f32>((u32)x.bits << 16); }

template <class T> __device__ __forceinline__ T from_f32(f32 x);
template <> __device__ __forceinline__ f32 from_f32<f32>(f32 x) { return x; }
template <> __device__ __forceinline__ F16 from_f32<F16>(f32 x) { return F16{float_to_half(x)}; }
template <> __device__ __forceinline__ BF16 from_f32<BF16>(f32 x) { return BF16{float_to_bfloat(x)}; }

__device__ __forceinline__ u32 to_bits(f32 x) { return bits_as<u32>(x); }
__device__ __forceinline__ u16 to_bits(F16 x) { return x.bits; }
__device__ __forceinline__ u16 to_bits(BF16 x) { return x.bits; }

// The parameter is as wide as the type: a literal or a narrower value converts.
template <class T> struct bits_of { typedef u16 type; };
template <> struct bits_of<f32> { typedef u32 type; };
template <class T> __device__ __forceinline__ T from_bits(typename bits_of<T>::type bits) { return bits_as<T>(bits); }

// ---- constants ----

#define F32_INFINITY (bits_as<f32>(0x7f800000u))
#define F32_NEG_INFINITY (bits_as<f32>(0xff800000u))
#define F32_NAN (bits_as<f32>(0x7fc00000u))
#define F32_MAX 3.40282347e+38f
#define F32_MIN (-3.40282347e+38f)
#define F32_EPSILON 1.1920929e-7f
#define U32_MAX 0xffffffffu
#define I32_MAX 2147483647
#define I32_MIN (-2147483647 - 1)
#define U64_MAX 0xffffffffffffffffull

// ---- methods ----

// The second operand takes the first one's type, so that a literal may stand there.
template <class T> struct same { typedef T type; };

template <class T> __device__ __forceinline__ T min(T a, typename same<T>::type b) { return b < a ? b : a; }
template <class T> __device__ __forceinline__ T max(T a, typename same<T>::type b) { return a < b ? b : a; }
__device__ __forceinline__ f32 min(f32 a, f32 b) { return ::fminf(a, b); }
__device__ __forceinline__ f32 max(f32 a, f32 b) { return ::fmaxf(a, b); }
template <class T> __device__ __forceinline__ T clamp(T x, typename same<T>::type low, typename same<T>::type high) {
    return x < low ? low : (high < x ? high : x);
}
__device__ __forceinline__ i32 abs(i32 x) { return x < 0 ? -x : x; }
__device__ __forceinline__ f32 abs(f32 x) { return ::fabsf(x); }

__device__ __forceinline__ f32 sqrt(f32 x) { return ::sqrtf(x); }
__device__ __forceinline__ f32 mul_add(f32 x, f32 a, f32 b) { return ::fmaf(x, a, b); }
__device__ __forceinline__ f32 floor(f32 x) { return ::floorf(x); }
__device__ __forceinline__ f32 ceil(f32 x) { return ::ceilf(x); }
__device__ __forceinline__ f32 trunc(f32 x) { return ::truncf(x); }
__device__ __forceinline__ f32 round(f32 x) { return ::roundf(x); }
__device__ __forceinline__ f32 round_ties_even(f32 x) { return ::rintf(x); }
__device__ __forceinline__ bool is_nan(f32 x) { return x != x; }
__device__ __forceinline__ f32 exp(f32 x) { return ::expf(x); }
__device__ __forceinline__ f32 exp2(f32 x) { return ::exp2f(x); }
__device__ __forceinline__ f32 ln(f32 x) { return ::logf(x); }
__device__ __forceinline__ f32 log2(f32 x) { return ::log2f(x); }
__device__ __forceinline__ f32 powf(f32 x, f32 y) { return ::powf(x, y); }
__device__ __forceinline__ f32 tanh(f32 x) { return ::tanhf(x); }
__device__ __forceinline__ f32 sin(f32 x) { return ::sinf(x); }
__device__ __forceinline__ f32 cos(f32 x) { return ::cosf(x); }

// Signed overflow is undefined in C++: the sum is taken unsigned.
template <class T> struct unsigned_of { typedef T type; };
template <> struct unsigned_of<i32> { typedef u32 type; };
template <> struct unsigned_of<i64> { typedef u64 type; };
template <class T> __device__ __forceinline__ T wrapping_add(T a, typename same<T>::type b) {
    typedef typename unsigned_of<T>::type U;
    return (T)((U)a + (U)b);
}
template <class T> __device__ __forceinline__ T wrapping_sub(T a, typename same<T>::type b) {
    typedef typename unsigned_of<T>::type U;
    return (T)((U)a - (U)b);
}
template <class T> __device__ __forceinline__ T wrapping_mul(T a, typename same<T>::type b) {
    typedef typename unsigned_of<T>::type U;
    return (T)((U)a * (U)b);
}
template <class T> __device__ __forceinline__ typename unsigned_of<T>::type abs_diff(T a, typename same<T>::type b) {
    typedef typename unsigned_of<T>::type U;
    return a < b ? (U)b - (U)a : (U)a - (U)b;
}
template <class T> __device__ __forceinline__ T div_ceil(T a, typename same<T>::type b) { return a / b + (a % b != 0); }
__device__ __forceinline__ u32 rotate_left(u32 x, u32 by) { return x << (by & 31) | x >> (-by & 31); }
__device__ __forceinline__ u32 rotate_right(u32 x, u32 by) { return x >> (by & 31) | x << (-by & 31); }
__device__ __forceinline__ u32 count_ones(u32 x) { return count_ones_of_word(x); }
__device__ __forceinline__ u32 leading_zeros(u32 x) { return leading_zeros_of_word(x); }
__device__ __forceinline__ u32 trailing_zeros(u32 x) { return trailing_zeros_of_word(x); }

// These are for u32: another width would convert silently and mean something else.
template <class T> u32 rotate_left(T, u32) = delete;
template <class T> u32 rotate_right(T, u32) = delete;
template <class T> u32 count_ones(T) = delete;
template <class T> u32 leading_zeros(T) = delete;
template <class T> u32 trailing_zeros(T) = delete;
