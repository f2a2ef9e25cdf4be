//! The decoders the CPU runs: one small type a format, shaped so that the compiler vectorises it.
//!
//! Every product here is exact in f32: a half-precision factor has 11 significant bits, a sub-block's integer scale at
//! most 7, a code at most 8, and no format's three add up to more than 24. So `scale * code + minimum` is rounded once,
//! whether or not a machine fuses it, and these decoders are bit-equal to [`crate::reference`]. Formats whose factor is
//! a single have no minimum: both decoders round the sub-block's scale, and then its product with the code.

use std::hint::black_box;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::grids::{self, Grid};
use crate::layout::{DType, FP4_LEVELS, IQ4_LEVELS};
use crate::narrow::fp8_to_f32;
use crate::reference::{half_of_power, unsigned_fp8};

/// Values in a small block, and in a sub-block (the part of a large block that shares a scale).
const SUB_BLOCK: usize = 32;

/// A block format that can be decoded.
pub trait BlockFormat {
    const DTYPE: DType;
    /// Values decoded at a time: a block's, or 32 of a float format, whose layout has one to a block.
    const LEN: usize;
    /// Bytes of those values.
    const BYTES: usize;

    /// Decodes `LEN` values from `BYTES` bytes.
    fn decode(block: &[u8], out: &mut [f32]);

    /// Decodes what a row holds after its last whole block: only rows of floats can hold anything.
    #[inline(always)]
    fn decode_tail(_bytes: &[u8], _out: &mut [f32]) {}
}

/// Evaluates `$body` with `$format` standing for the [`BlockFormat`] of `$dtype`: one monomorphic copy a format.
#[macro_export]
macro_rules! with_format {
    ($dtype:expr, $format:ident => $body:expr) => {
        $crate::with_format!(@arms $dtype, $format, $body,
            F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K IQ4NL IQ4XS Q2K Q3K IQ2XXS IQ2XS IQ2S IQ3XXS IQ3S
            MXFP4 NVFP4 I2 I4 I4Z I8 F8 F8S)
    };
    // The types of most files, and of all others the same code for `$other`: a copy a format takes long to compile.
    ($dtype:expr, $format:ident => $body:expr, _ => $other:expr) => {
        match $dtype {
            dtype if dtype > $crate::DType::IQ4XS => $other,
            dtype => $crate::with_format!(@some dtype, $format, $body,
                F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K IQ4NL IQ4XS),
        }
    };
    (@some $dtype:expr, $format:ident, $body:expr, $($name:ident)*) => {
        match $dtype {
            $($crate::DType::$name => {
                type $format = $crate::decode::$name;
                $body
            })*
            _ => unreachable!("the types before are all of them"),
        }
    };
    (@arms $dtype:expr, $format:ident, $body:expr, $($name:ident)*) => {
        match $dtype {
            $($crate::DType::$name => {
                type $format = $crate::decode::$name;
                $body
            })*
        }
    };
}

/// Decodes a row of whole blocks into `out`, which takes exactly the row's values.
pub fn decode_row(dtype: DType, row: &[u8], out: &mut [f32]) {
    decode_row_vectorised(dtype, row, out);
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn decode_row_vectorised(dtype: DType, row: &[u8], out: &mut [f32]) {
    with_format!(dtype, F => decode_row_as::<F>(row, out));
}

/// [`decode_row`] for a format known at compile time, to be inlined where wide vectors are enabled.
#[inline(always)]
pub fn decode_row_as<F: BlockFormat>(row: &[u8], out: &mut [f32]) {
    let mut blocks = row.chunks_exact(F::BYTES);
    let mut values = out.chunks_exact_mut(F::LEN);
    for (block, values) in blocks.by_ref().zip(values.by_ref()) {
        F::decode(block, values);
    }
    F::decode_tail(blocks.remainder(), values.into_remainder());
}

/// Half precision to single, exact for every bit pattern but the payload of a NaN; loops over it vectorise.
#[inline(always)]
pub const fn half_to_f32(bits: u16) -> f32 {
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    let exponent = bits & 0x7c00;
    let shifted = (bits as u32 & 0x7fff) << 13;
    // A subnormal becomes the fraction of a normal number, which is then subtracted: a denormal operand would cost a
    // hundred cycles.
    let subnormal = (f32::from_bits(shifted + SMALLEST_NORMAL) - f32::from_bits(SMALLEST_NORMAL)).to_bits();
    let infinity = if exponent == 0x7c00 { REBIAS } else { 0 };
    let magnitude = if exponent == 0 { subnormal } else { shifted + REBIAS + infinity };
    f32::from_bits(magnitude | (bits as u32 & 0x8000) << 16)
}

/// Rebiases a half's exponent, already shifted into place, to a single's.
const REBIAS: u32 = (127 - 15) << 23;

/// Every half as a single.
///
/// A table, for the scale of a block: converting one value with [`half_to_f32`] would be half of the block's work. A
/// look-up is one broadcast load, and the scales of one matrix are so much alike that the few cache lines they use stay
/// in L1.
static SINGLES: [f32; 1 << 16] = {
    let mut singles = [0.0; 1 << 16];
    let mut bits = 0;
    while bits < singles.len() {
        singles[bits] = half_to_f32(bits as u16);
        bits += 1;
    }
    singles
};

/// The half at `offset`.
#[inline(always)]
fn half(block: &[u8], offset: usize) -> f32 {
    SINGLES[u16::from_le_bytes(*bytes(block, offset)) as usize]
}

#[inline(always)]
fn bytes<const N: usize>(block: &[u8], offset: usize) -> &[u8; N] {
    block[offset..].first_chunk().expect("blocks have the length their format states")
}

/// Sets N values from `first` on, as one unit of vector code.
///
/// The fence costs no instruction. It keeps the compiler from vectorising across units and blocks, which would gather
/// bytes one by one.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "the form that vectorises for every format")]
fn set<const N: usize>(out: &mut [f32], first: usize, value: impl Fn(usize) -> f32) {
    let out: &mut [f32; N] = out[first..].first_chunk_mut().expect("as many values as the format states");
    for i in 0..N {
        out[i] = value(i);
    }
    compiler_fence(Ordering::SeqCst);
}

macro_rules! float_format {
    ($name:ident, $width:literal, $decode:expr) => {
        pub struct $name;

        impl BlockFormat for $name {
            const DTYPE: DType = DType::$name;
            const LEN: usize = SUB_BLOCK;
            const BYTES: usize = $width * SUB_BLOCK;

            #[inline(always)]
            fn decode(block: &[u8], out: &mut [f32]) {
                let encoded = block.as_chunks::<$width>().0;
                set::<16>(out, 0, |i| $decode(encoded[i]));
                set::<16>(out, 16, |i| $decode(encoded[i + 16]));
            }

            #[inline(always)]
            fn decode_tail(row: &[u8], out: &mut [f32]) {
                for (value, encoded) in out.iter_mut().zip(row.as_chunks::<$width>().0) {
                    *value = $decode(*encoded);
                }
            }
        }
    };
}

float_format!(F32, 4, f32::from_le_bytes);
float_format!(F16, 2, |b| half_to_f32(u16::from_le_bytes(b)));
float_format!(BF16, 2, |b| f32::from_bits((u16::from_le_bytes(b) as u32) << 16));

macro_rules! block_format {
    ($name:ident, $len:literal values in $bytes:literal bytes, |$block:ident, $out:ident| $decode:expr) => {
        pub struct $name;

        impl BlockFormat for $name {
            const DTYPE: DType = DType::$name;
            const LEN: usize = $len;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn decode($block: &[u8], $out: &mut [f32]) {
                $decode
            }
        }
    };
}

block_format!(Q8_0, 32 values in 34 bytes, |block, out| {
    let scale = half(block, 0);
    let codes: &[u8; 32] = bytes(block, 2);
    set::<32>(out, 0, |i| scale * (codes[i] as i8) as f32);
});

/// 16 bytes of nibbles in ggml's planar order: byte j holds elements j (low) and j + 16 (high). `value(j, nibble)` is
/// the value of element j.
#[inline(always)]
fn planar(packed: &[u8; 16], out: &mut [f32], first: usize, value: impl Fn(usize, u8) -> f32) {
    set::<16>(out, first, |j| value(j, packed[j] & 15));
    set::<16>(out, first + 16, |j| value(j + 16, packed[j] >> 4));
}

block_format!(Q4_0, 32 values in 18 bytes, |block, out| {
    let scale = half(block, 0);
    planar(bytes(block, 2), out, 0, |_, nibble| scale * (nibble as i8 - 8) as f32);
});

block_format!(Q4_1, 32 values in 20 bytes, |block, out| {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    planar(bytes(block, 4), out, 0, |_, nibble| scale * nibble as f32 + minimum);
});

block_format!(Q5_0, 32 values in 22 bytes, |block, out| {
    let scale = half(block, 0);
    let high = u32::from_le_bytes(*bytes(block, 2));
    planar(bytes(block, 6), out, 0, |j, nibble| scale * ((nibble as u32 | (high >> j & 1) << 4) as i32 - 16) as f32);
});

block_format!(Q5_1, 32 values in 24 bytes, |block, out| {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    let high = u32::from_le_bytes(*bytes(block, 4));
    planar(bytes(block, 8), out, 0, |j, nibble| {
        scale * (nibble as u32 | (high >> j & 1) << 4) as i32 as f32 + minimum
    });
});

/// Level `code` of the IQ4 formats: four levels to a word, a word picked by the high bits and shifted by the low ones.
/// A table in memory would be read element by element.
#[inline(always)]
fn level(code: u8) -> f32 {
    level_of(&WORDS_OF_IQ4, code)
}

/// The same of the floats of 4 bits, doubled.
#[inline(always)]
fn fp4(code: u8) -> f32 {
    level_of(&WORDS_OF_FP4, code)
}

const WORDS_OF_IQ4: [u32; 4] = words(&IQ4_LEVELS);
const WORDS_OF_FP4: [u32; 4] = words(&FP4_LEVELS);

const fn words(levels: &[i8; 16]) -> [u32; 4] {
    let mut words = [0; 4];
    let mut i = 0;
    while i < 16 {
        words[i / 4] |= (levels[i] as u8 as u32) << (i % 4 * 8);
        i += 1;
    }
    words
}

#[inline(always)]
fn level_of(words: &[u32; 4], code: u8) -> f32 {
    let code = code as u32;
    let low = if code & 4 == 0 { words[0] } else { words[1] };
    let high = if code & 4 == 0 { words[2] } else { words[3] };
    let word = if code & 8 == 0 { low } else { high };
    (word >> (8 * (code & 3))) as i8 as f32
}

block_format!(IQ4NL, 32 values in 18 bytes, |block, out| {
    let scale = half(block, 0);
    planar(bytes(block, 2), out, 0, |_, nibble| scale * level(nibble));
});

/// Hides where `scales` come from, so that the compiler reads each with a broadcast load instead of shuffling it out of
/// the register they were computed in.
#[inline(always)]
fn in_memory<const N: usize>(scales: &[f32; N]) -> &[f32; N] {
    black_box(scales)
}

block_format!(IQ4XS, 256 values in 136 bytes, |block, out| {
    let factor = half(block, 0);
    let high = u16::from_le_bytes(*bytes(block, 2));
    let low: &[u8; 4] = bytes(block, 4);
    let scales: [f32; 8] = std::array::from_fn(|group| {
        let code = (high >> (2 * group) & 3) << 4 | (low[group / 2] >> (4 * (group % 2)) & 15) as u16;
        factor * (code as i32 - 32) as f32
    });
    for (group, scale) in in_memory(&scales).iter().enumerate() {
        planar(bytes(block, 8 + 16 * group), out, 32 * group, |_, nibble| scale * level(nibble));
    }
});

/// Scales and minima of the eight sub-blocks of a K-quant block: packed, 6 bits each, after two halves.
///
/// The first four pairs lie in the low six bits of eight bytes, the last four in the nibbles of four more and in the
/// two bits left above. All are unpacked at once, as bytes of words.
#[inline(always)]
fn packed_scales(block: &[u8]) -> ([f32; 8], [f32; 8]) {
    let [a, b, c] = [4, 8, 12].map(|at| u32::from_le_bytes(*bytes(block, at)));
    let bytes = |first: u32, last: u32| (first as u64 | (last as u64) << 32).to_le_bytes();
    let scales = bytes(a & 0x3f3f_3f3f, c & 0x0f0f_0f0f | (a >> 6 & 0x0303_0303) << 4);
    let minima = bytes(b & 0x3f3f_3f3f, c >> 4 & 0x0f0f_0f0f | (b >> 6 & 0x0303_0303) << 4);
    let (scale, minimum) = (half(block, 0), half(block, 2));
    (scales.map(|s| scale * s as f32), minima.map(|m| minimum * m as f32))
}

block_format!(Q4K, 256 values in 144 bytes, |block, out| {
    let (scales, minima) = packed_scales(block);
    let (scales, minima) = (in_memory(&scales), in_memory(&minima));
    // Two sub-blocks share 32 bytes: one has the low nibbles, one the high ones.
    for group in 0..8 {
        let (scale, minimum) = (scales[group], minima[group]);
        let packed: &[u8; 32] = bytes(block, 16 + 32 * (group / 2));
        set::<32>(out, 32 * group, |i| scale * (packed[i] >> (4 * (group % 2)) & 15) as f32 - minimum);
    }
});

block_format!(Q5K, 256 values in 176 bytes, |block, out| {
    let (scales, minima) = packed_scales(block);
    let (scales, minima) = (in_memory(&scales), in_memory(&minima));
    let high: &[u8; 32] = bytes(block, 16);
    for group in 0..8 {
        let (scale, minimum) = (scales[group], minima[group]);
        let packed: &[u8; 32] = bytes(block, 48 + 32 * (group / 2));
        set::<32>(out, 32 * group, |i| {
            let code = packed[i] >> (4 * (group % 2)) & 15 | (high[i] >> group & 1) << 4;
            scale * code as f32 - minimum
        });
    }
});

block_format!(Q6K, 256 values in 210 bytes, |block, out| {
    let factor = half(block, 208);
    let scales: &[u8; 16] = bytes(block, 192);
    let scales = scales.map(|scale| factor * (scale as i8) as f32);
    let scales = in_memory(&scales);
    // Halves of 128 values, each 64 bytes of low nibbles and 32 of high bit pairs: byte i of the latter belongs to
    // elements i, i + 32, i + 64 and i + 96.
    for side in 0..2 {
        for part in 0..2 {
            let first = 128 * side + 16 * part;
            let scale = |quarter: usize| scales[first / 16 + 2 * quarter];
            let low: &[u8; 16] = bytes(block, 64 * side + 16 * part);
            let next: &[u8; 16] = bytes(block, 64 * side + 32 + 16 * part);
            let high: &[u8; 16] = bytes(block, 128 + 32 * side + 16 * part);
            let value = |scale: f32, low: u8, high: u8| scale * ((low | high & 0x30) as i8 - 32) as f32;
            set::<16>(out, first, |i| value(scale(0), low[i] & 15, high[i] << 4));
            set::<16>(out, first + 32, |i| value(scale(1), next[i] & 15, high[i] << 2));
            set::<16>(out, first + 64, |i| value(scale(2), low[i] >> 4, high[i]));
            set::<16>(out, first + 96, |i| value(scale(3), next[i] >> 4, high[i] >> 2));
        }
    }
});

block_format!(Q2K, 256 values in 84 bytes, |block, out| {
    let (factor, factor_of_minimum) = (half(block, 80), half(block, 82));
    let packed: &[u8; 16] = bytes(block, 0);
    let scales = packed.map(|both| factor * (both & 15) as f32);
    let minima = packed.map(|both| factor_of_minimum * (both >> 4) as f32);
    let (scales, minima) = (in_memory(&scales), in_memory(&minima));
    for part in 0..16 {
        let (scale, minimum) = (scales[part], minima[part]);
        // 32 bytes have the codes of four groups of 32, two bits each.
        let codes: &[u8; 16] = bytes(block, 16 + 32 * (part / 8) + 16 * (part % 2));
        let shift = part % 8 / 2 * 2;
        set::<16>(out, 16 * part, |i| scale * (codes[i] >> shift & 3) as f32 - minimum);
    }
});

block_format!(Q3K, 256 values in 110 bytes, |block, out| {
    let factor = half(block, 108);
    let packed: &[u8; 12] = bytes(block, 96);
    let scales: [f32; 16] = std::array::from_fn(|k| {
        let code = packed[k % 8] >> (k / 8 * 4) & 15 | (packed[8 + k % 4] >> (k / 4 * 2) & 3) << 4;
        factor * (code as i32 - 32) as f32
    });
    for (part, scale) in in_memory(&scales).iter().enumerate() {
        let low: &[u8; 16] = bytes(block, 32 + 32 * (part / 8) + 16 * (part % 2));
        let high: &[u8; 16] = bytes(block, 16 * (part % 2));
        let (shift, bit) = (part % 8 / 2 * 2, part / 2);
        set::<16>(out, 16 * part, |i| scale * ((low[i] >> shift & 3 | (high[i] >> bit & 1) << 2) as i8 - 4) as f32);
    }
});

/// The factor of each sub-block of 32 of a grid format, and where its parts lie, are the format's own; what a point of
/// the grid becomes is not: LEN magnitudes with a sign each.
#[inline(always)]
fn signed_point<const LEN: usize>(grid: &Grid, point: usize, signs: u8, scale: f32, out: &mut [f32], first: usize) {
    let magnitudes: &[u8; LEN] = bytes(grid.values, point * LEN);
    for i in 0..LEN {
        let value = scale * magnitudes[i] as f32;
        out[first + i] = if signs >> i & 1 == 1 { -value } else { value };
    }
}

/// Seven signs, and the eighth that makes their number even.
#[inline(always)]
fn eight_signs(seven: u32) -> u8 {
    let seven = seven & 127;
    (seven | (seven.count_ones() & 1) << 7) as u8
}

#[inline(always)]
fn word(block: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(*bytes(block, offset))
}

block_format!(IQ2XXS, 256 values in 66 bytes, |block, out| {
    let factor = half(block, 0);
    for group in 0..8 {
        let (points, signs) = (word(block, 2 + 8 * group).to_le_bytes(), word(block, 6 + 8 * group));
        let scale = factor * (2 * (signs >> 28) + 1) as f32 * 0.125;
        for (l, point) in points.into_iter().enumerate() {
            let signs = eight_signs(signs >> (7 * l));
            signed_point::<8>(&grids::IQ2_XXS, point.into(), signs, scale, out, 32 * group + 8 * l);
        }
    }
});

block_format!(IQ2XS, 256 values in 74 bytes, |block, out| {
    let factor = half(block, 0);
    for entry in 0..32 {
        let both = u16::from_le_bytes(*bytes(block, 2 + 2 * entry));
        let scale = block[66 + entry / 4] >> (entry % 4 / 2 * 4) & 15;
        let scale = factor * (2 * scale + 1) as f32 * 0.125;
        let signs = eight_signs((both >> 9).into());
        signed_point::<8>(&grids::IQ2_XS, (both & 511).into(), signs, scale, out, 8 * entry);
    }
});

block_format!(IQ2S, 256 values in 82 bytes, |block, out| {
    let factor = half(block, 0);
    for entry in 0..32 {
        let high = (block[66 + entry / 4] >> (entry % 4 * 2) & 3) as usize;
        let scale = block[74 + entry / 4] >> (entry % 4 / 2 * 4) & 15;
        let scale = factor * (2 * scale + 1) as f32 * 0.125;
        let point = block[2 + entry] as usize | high << 8;
        signed_point::<8>(&grids::IQ2_S, point, block[34 + entry], scale, out, 8 * entry);
    }
});

block_format!(IQ3XXS, 256 values in 98 bytes, |block, out| {
    let factor = half(block, 0);
    for group in 0..8 {
        let (points, signs): (&[u8; 8], u32) = (bytes(block, 2 + 8 * group), word(block, 66 + 4 * group));
        let scale = factor * (2 * (signs >> 28) + 1) as f32 * 0.25;
        for (e, point) in points.iter().enumerate() {
            let signs = eight_signs(signs >> (e / 2 * 7)) >> (e % 2 * 4);
            signed_point::<4>(&grids::IQ3_XXS, (*point).into(), signs, scale, out, 32 * group + 4 * e);
        }
    }
});

block_format!(IQ3S, 256 values in 110 bytes, |block, out| {
    let factor = half(block, 0);
    for entry in 0..64 {
        let high = (block[66 + entry / 8] >> (entry % 8) & 1) as usize;
        let scale = block[106 + entry / 16] >> (entry / 8 % 2 * 4) & 15;
        let scale = factor * (2 * scale + 1) as f32;
        let signs = block[74 + entry / 2] >> (entry % 2 * 4);
        let point = block[2 + entry] as usize | high << 8;
        signed_point::<4>(&grids::IQ3_S, point, signs, scale, out, 4 * entry);
    }
});

block_format!(MXFP4, 32 values in 17 bytes, |block, out| {
    let scale = half_of_power(block[0]);
    planar(bytes(block, 1), out, 0, |_, nibble| scale * fp4(nibble));
});

block_format!(NVFP4, 64 values in 40 bytes, |block, out| {
    let factor = f32::from_bits(word(block, 0));
    for part in 0..4 {
        let scale = factor * (unsigned_fp8(block[4 + part]) * 0.5);
        let packed: &[u8; 8] = bytes(block, 8 + 8 * part);
        set::<8>(out, 16 * part, |j| scale * fp4(packed[j] & 15));
        set::<8>(out, 16 * part + 8, |j| scale * fp4(packed[j] >> 4));
    }
});

/// The bfloat16 at `offset`.
#[inline(always)]
fn brain(block: &[u8], offset: usize) -> f32 {
    f32::from_bits((u16::from_le_bytes(*bytes(block, offset)) as u32) << 16)
}

block_format!(I2, 32 values in 10 bytes, |block, out| {
    let scale = brain(block, 0);
    let codes: &[u8; 8] = bytes(block, 2);
    for quarter in 0..4 {
        set::<8>(out, 8 * quarter, |i| scale * ((codes[i] >> (2 * quarter) & 3) as i8 - 2) as f32);
    }
});

block_format!(I4, 32 values in 18 bytes, |block, out| {
    let scale = brain(block, 0);
    planar(bytes(block, 2), out, 0, |_, nibble| scale * (nibble as i8 - 8) as f32);
});

block_format!(I4Z, 32 values in 20 bytes, |block, out| {
    let scale = brain(block, 0);
    let zero = scale * u16::from_le_bytes(*bytes(block, 2)) as f32;
    planar(bytes(block, 4), out, 0, |_, nibble| scale * nibble as f32 - zero);
});

block_format!(I8, 32 values in 34 bytes, |block, out| {
    let scale = brain(block, 0);
    let codes: &[u8; 32] = bytes(block, 2);
    set::<32>(out, 0, |i| scale * (codes[i] as i8) as f32);
});

/// Every e4m3 as a single.
static FP8: [f32; 256] = {
    let mut singles = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        singles[code] = fp8_to_f32(code as u8);
        code += 1;
    }
    singles
};

block_format!(F8, 32 values in 34 bytes, |block, out| {
    let scale = brain(block, 0);
    let codes: &[u8; 32] = bytes(block, 2);
    set::<32>(out, 0, |i| scale * FP8[codes[i] as usize]);
});

block_format!(F8S, 32 values in 36 bytes, |block, out| {
    let scale = f32::from_bits(word(block, 0));
    let codes: &[u8; 32] = bytes(block, 4);
    set::<32>(out, 0, |i| scale * FP8[codes[i] as usize]);
});
