//! Tensor cores: matrix fragments loaded from shared memory, and products of a warp.
//!
//! Fragments are PTX's. For `mma.m16n8`, with `g = lane / 4` and `t = lane % 4`: the accumulator's `x, y` are row `g`,
//! columns `2t, 2t + 1`, and `z, w` are row `g + 8`. Operand A's words are (row `g`, first half of k), (row `g + 8`,
//! first half), (row `g`, second half), (row `g + 8`, second half), each holding the `2t…` (16-bit) or `4t…` (8-bit)
//! elements of its half; operand B's two words are column `g`, first and second half of k.

use super::rows::{intrinsic, row};
use crate::sim::memory::{KernelIndex, Readable, Shared};
use crate::sim::thread::{LANE_WORDS, Thread};
use crate::{BF16, Element, F16, F32x4, Float, I32x4, U32x2, U32x4};

/// Word `index` of the row that `lane` brought.
fn half_of(lanes: &[[u32; LANE_WORDS]; 32], lane: usize, half: usize) -> u32 {
    lanes[lane][half / 2] >> (16 * (half % 2)) & 0xffff
}

/// What `ldmatrix` gives a lane of matrix `matrix`, whose rows lanes `8 * matrix …` brought.
fn fragment(lanes: &[[u32; LANE_WORDS]; 32], matrix: usize, lane: usize, transposed: bool) -> u32 {
    let (g, t) = (lane / 4, lane % 4);
    if transposed {
        half_of(lanes, 8 * matrix + 2 * t, g) | half_of(lanes, 8 * matrix + 2 * t + 1, g) << 16
    } else {
        lanes[8 * matrix + g][t]
    }
}

#[track_caller]
fn ldmatrix(operation: &'static str, row: U32x4, matrices: usize, transposed: bool) -> [u32; 4] {
    let thread = Thread::current();
    let lane = thread.lane();
    thread.warp_collective(operation, thread.line(), &[row.x, row.y, row.z, row.w], |lanes| {
        std::array::from_fn(|m| if m < matrices { fragment(lanes, m, lane, transposed) } else { 0 })
    })
}

/// The row this lane is asked to bring: lanes beyond `8 * matrices` bring none.
#[track_caller]
fn own_row<T: Element>(tile: Shared<T>, index: i64, matrices: usize) -> U32x4 {
    if Thread::current().lane() < 8 * matrices { tile.raw().get(index) } else { U32x4::ZERO }
}

intrinsic! {
    /// The exchange behind `ldmatrix`: this lane's row in, its fragments out.
    Warp fn ldmatrix_exchange(row: U32x4, matrices: u32, transposed: bool) -> U32x4 {
        let [x, y, z, w] = ldmatrix("ldmatrix", row, matrices as usize, transposed);
        U32x4 { x, y, z, w }
    }
    cuda "return row;"
}

macro_rules! ldmatrix_rows {
    ($($doc:literal $name:ident $matrices:literal $transposed:literal $output:ident [$($field:ident)*] $cuda:literal $host:literal)*) => { $(
        #[doc = $doc]
        ///
        /// Lane `8 m + r` gives in `index` the element at which row `r` of matrix `m` starts, 16 bytes of it.
        #[track_caller]
        pub fn $name<T: Element>(tile: Shared<T>, index: impl KernelIndex) -> $output {
            let row = own_row(tile, index.value(), $matrices);
            let words = ldmatrix(stringify!($name), row, $matrices, $transposed);
            ldmatrix_output!(words $output $($field)*)
        }

        row! {
            #[doc = $doc]
            Warp $name needs [ldmatrix_exchange, super::ids::lane_id]
            cuda $cuda
            host $host
        }
    )* };
}

macro_rules! ldmatrix_output {
    ($words:ident u32) => {
        $words[0]
    };
    ($words:ident U32x2 $($field:ident)*) => {
        U32x2 { x: $words[0], y: $words[1] }
    };
    ($words:ident U32x4 $($field:ident)*) => {
        U32x4 { x: $words[0], y: $words[1], z: $words[2], w: $words[3] }
    };
}

ldmatrix_rows! {
    "One 8 x 8 matrix of 16-bit elements." ldmatrix_x1 1 false u32 []
    "template <class T, class I> __device__ __forceinline__ u32 ldmatrix_x1(const T* tile, I index) {
    u32 out;
    asm volatile(\"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\" : \"=r\"(out) : \"r\"((u32)__cvta_generic_to_shared(tile + index)) : \"memory\");
    return out;
}"
    "template <class T, class I> inline u32 ldmatrix_x1(const T* tile, I index) { return ldmatrix_exchange(lane_id() < 8 ? *(const U32x4*)(tile + index) : U32x4{}, 1, false).x; }"

    "Two 8 x 8 matrices of 16-bit elements." ldmatrix_x2 2 false U32x2 [x y]
    "template <class T, class I> __device__ __forceinline__ U32x2 ldmatrix_x2(const T* tile, I index) {
    U32x2 out;
    asm volatile(\"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\" : \"=r\"(out.x), \"=r\"(out.y) : \"r\"((u32)__cvta_generic_to_shared(tile + index)) : \"memory\");
    return out;
}"
    "template <class T, class I> inline U32x2 ldmatrix_x2(const T* tile, I index) { U32x4 out = ldmatrix_exchange(lane_id() < 16 ? *(const U32x4*)(tile + index) : U32x4{}, 2, false); return U32x2{out.x, out.y}; }"

    "Four 8 x 8 matrices of 16-bit elements." ldmatrix_x4 4 false U32x4 [x y z w]
    "template <class T, class I> __device__ __forceinline__ U32x4 ldmatrix_x4(const T* tile, I index) {
    U32x4 out;
    asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\" : \"=r\"(out.x), \"=r\"(out.y), \"=r\"(out.z), \"=r\"(out.w) : \"r\"((u32)__cvta_generic_to_shared(tile + index)) : \"memory\");
    return out;
}"
    "template <class T, class I> inline U32x4 ldmatrix_x4(const T* tile, I index) { return ldmatrix_exchange(*(const U32x4*)(tile + index), 4, false); }"

    "Two 8 x 8 matrices of 16-bit elements, each transposed." ldmatrix_x2_trans 2 true U32x2 [x y]
    "template <class T, class I> __device__ __forceinline__ U32x2 ldmatrix_x2_trans(const T* tile, I index) {
    U32x2 out;
    asm volatile(\"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\" : \"=r\"(out.x), \"=r\"(out.y) : \"r\"((u32)__cvta_generic_to_shared(tile + index)) : \"memory\");
    return out;
}"
    "template <class T, class I> inline U32x2 ldmatrix_x2_trans(const T* tile, I index) { U32x4 out = ldmatrix_exchange(lane_id() < 16 ? *(const U32x4*)(tile + index) : U32x4{}, 2, true); return U32x2{out.x, out.y}; }"

    "Four 8 x 8 matrices of 16-bit elements, each transposed." ldmatrix_x4_trans 4 true U32x4 [x y z w]
    "template <class T, class I> __device__ __forceinline__ U32x4 ldmatrix_x4_trans(const T* tile, I index) {
    U32x4 out;
    asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\" : \"=r\"(out.x), \"=r\"(out.y), \"=r\"(out.z), \"=r\"(out.w) : \"r\"((u32)__cvta_generic_to_shared(tile + index)) : \"memory\");
    return out;
}"
    "template <class T, class I> inline U32x4 ldmatrix_x4_trans(const T* tile, I index) { return ldmatrix_exchange(*(const U32x4*)(tile + index), 4, true); }"
}

/// Most values of k that one product has.
const MOST_DEPTH: usize = 32;

/// Row `line` of A, or column `line` of B: eight words, gathered from those of all lanes. `value` takes a part of one.
#[inline(always)]
fn operand<V: Copy + Default, const PER_WORD: usize>(
    lanes: &[[u32; LANE_WORDS]; 32],
    a: bool,
    line: usize,
    value: impl Fn(u32, usize) -> V + Copy,
) -> [V; MOST_DEPTH] {
    let mut values = [V::default(); MOST_DEPTH];
    for (number, values) in values[..8 * PER_WORD].chunks_exact_mut(PER_WORD).enumerate() {
        let (half, t) = (number / 4, number % 4);
        let word = if a { lanes[line % 8 * 4 + t][2 * half + line / 8] } else { lanes[line * 4 + t][4 + half] };
        for (part, out) in values.iter_mut().enumerate() {
            *out = value(word, part);
        }
    }
    values
}

/// Each sum takes its products in the order of k. The four of a lane are taken together, since each waits for its last
/// addition.
#[track_caller]
fn mma<S: Copy, V: Copy + Default, const PER_WORD: usize>(
    operation: &'static str,
    a: U32x4,
    b: U32x2,
    mut sums: [S; 4],
    value: impl Fn(u32, usize) -> V + Copy,
    add: impl Fn(S, V, V) -> S,
) -> [S; 4] {
    let thread = Thread::current();
    let (g, t) = (thread.lane() / 4, thread.lane() % 4);
    thread.warp_collective(operation, thread.line(), &[a.x, a.y, a.z, a.w, b.x, b.y], |lanes| {
        let rows = [g, g + 8].map(|row| operand::<V, PER_WORD>(lanes, true, row, value));
        let columns = [2 * t, 2 * t + 1].map(|column| operand::<V, PER_WORD>(lanes, false, column, value));
        for k in 0..8 * PER_WORD {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = add(*sum, rows[i / 2][k], columns[i % 2][k]);
            }
        }
        sums
    })
}

/// The product of two such floats is exact in f32, and sums are rounded once: the order within the 16 is of no account,
/// as on Hopper (measured: of 2,097,152 sums of 1,024 products none changed when lanes had other values of the same 16).
#[track_caller]
fn float_mma(operation: &'static str, a: U32x4, b: U32x2, c: F32x4, float: impl Fn(u16) -> f32 + Copy) -> F32x4 {
    let value = |word: u32, half: usize| float((word >> (16 * half)) as u16);
    let sums = [c.x, c.y, c.z, c.w].map(f64::from);
    let add = |sum: f64, a: f32, b: f32| sum + f64::from(a * b);
    let [x, y, z, w] = mma::<f64, f32, 2>(operation, a, b, sums, value, add).map(|sum| sum as f32);
    F32x4 { x, y, z, w }
}

/// A signed byte of a word.
fn signed_byte(word: u32, byte: usize) -> i32 {
    i32::from((word >> (8 * byte)) as i8)
}

intrinsic! {
    /// `c + a · b`: 16 x 16 times 16 x 8 of bf16, summed in f32. The GPU's order of additions is not specified: the
    /// last bits differ.
    Warp fn mma_m16n8k16_bf16(a: U32x4, b: U32x2, c: F32x4) -> F32x4 {
        float_mma("mma_m16n8k16_bf16", a, b, c, |bits| BF16::from_bits(bits).to_f32())
    }
    cuda "
    F32x4 d;
    asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\"
        : \"=f\"(d.x), \"=f\"(d.y), \"=f\"(d.z), \"=f\"(d.w)
        : \"r\"(a.x), \"r\"(a.y), \"r\"(a.z), \"r\"(a.w), \"r\"(b.x), \"r\"(b.y), \"f\"(c.x), \"f\"(c.y), \"f\"(c.z), \"f\"(c.w));
    return d;"
}

intrinsic! {
    /// `c + a · b`: 16 x 16 times 16 x 8 of f16, summed in f32. The GPU's order of additions is not specified.
    Warp fn mma_m16n8k16_f16(a: U32x4, b: U32x2, c: F32x4) -> F32x4 {
        float_mma("mma_m16n8k16_f16", a, b, c, |bits| F16::from_bits(bits).to_f32())
    }
    cuda "
    F32x4 d;
    asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\"
        : \"=f\"(d.x), \"=f\"(d.y), \"=f\"(d.z), \"=f\"(d.w)
        : \"r\"(a.x), \"r\"(a.y), \"r\"(a.z), \"r\"(a.w), \"r\"(b.x), \"r\"(b.y), \"f\"(c.x), \"f\"(c.y), \"f\"(c.z), \"f\"(c.w));
    return d;"
}

intrinsic! {
    /// `c + a · b`: 16 x 16 times 16 x 8 of signed bytes, summed in i32, exactly. A's words are rows `g` and `g + 8`,
    /// B's is column `g`.
    Warp fn mma_m16n8k16_s8(a: U32x2, b: u32, c: I32x4) -> I32x4 {
        // The second half of k, of which there is none, is zeros.
        let (a, b) = (U32x4 { x: a.x, y: a.y, z: 0, w: 0 }, U32x2 { x: b, y: 0 });
        let sums = [c.x, c.y, c.z, c.w];
        let [x, y, z, w] =
            mma::<i32, i32, 4>("mma_m16n8k16_s8", a, b, sums, signed_byte, |sum, a, b| sum.wrapping_add(a * b));
        I32x4 { x, y, z, w }
    }
    cuda "
    I32x4 d;
    asm volatile(\"mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};\"
        : \"=r\"(d.x), \"=r\"(d.y), \"=r\"(d.z), \"=r\"(d.w)
        : \"r\"(a.x), \"r\"(a.y), \"r\"(b), \"r\"(c.x), \"r\"(c.y), \"r\"(c.z), \"r\"(c.w));
    return d;"
}

intrinsic! {
    /// `c + a · b`: 16 x 32 times 32 x 8 of signed bytes, summed in i32, exactly.
    Warp fn mma_m16n8k32_s8(a: U32x4, b: U32x2, c: I32x4) -> I32x4 {
        let sums = [c.x, c.y, c.z, c.w];
        let [x, y, z, w] =
            mma::<i32, i32, 4>("mma_m16n8k32_s8", a, b, sums, signed_byte, |sum, a, b| sum.wrapping_add(a * b));
        I32x4 { x, y, z, w }
    }
    cuda "
    I32x4 d;
    asm volatile(\"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\"
        : \"=r\"(d.x), \"=r\"(d.y), \"=r\"(d.z), \"=r\"(d.w)
        : \"r\"(a.x), \"r\"(a.y), \"r\"(a.z), \"r\"(a.w), \"r\"(b.x), \"r\"(b.y), \"r\"(c.x), \"r\"(c.y), \"r\"(c.z), \"r\"(c.w));
    return d;"
}
