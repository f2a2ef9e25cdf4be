//! The decoders the CPU runs: one small type a format, shaped so that the compiler vectorises it.
//!
//! Values come in groups of 32, held in registers, because that is the largest unit all formats share: a block is one
//! group or eight, and plain floats are taken 32 at a time. Whoever multiplies decoded weights can therefore do it
//! without a detour through memory.
//!
//! Every product here is exact in f32: a half-precision factor has 11 significant bits, a group's integer scale at most
//! 7, a code at most 8, and no format's three add up to more than 24. So `scale * code + minimum` is rounded once,
//! whether or not a machine fuses it, and these decoders are bit-equal to [`crate::reference`].

use crate::{DType, layout::IQ4_LEVELS, reference::packed6};

/// Values decoded at a time.
pub const GROUP: usize = 32;

/// A block format whose groups of 32 values can be decoded.
pub trait BlockFormat {
    const DTYPE: DType;
    /// Groups in a block. Float formats count 32 values as a block here, where their layout counts one.
    const GROUPS: usize;
    /// Bytes of those groups.
    const BYTES: usize;

    /// Decodes group `index` of `block`, which is `BYTES` long.
    fn group(block: &[u8], index: usize, out: &mut [f32; GROUP]);

    /// Decodes what a row holds after its last whole block: only rows of floats can hold anything.
    #[inline(always)]
    fn tail(_bytes: &[u8], _out: &mut [f32]) {}
}

/// Evaluates `$body` with `$format` standing for the [`BlockFormat`] of `$dtype`: one monomorphic copy a format.
#[macro_export]
macro_rules! with_format {
    ($dtype:expr, $format:ident => $body:expr) => {
        $crate::with_format!(@arms $dtype, $format, $body,
            F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4K Q5K Q6K IQ4NL IQ4XS)
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
    let (groups, tail) = out.as_chunks_mut::<GROUP>();
    for (block, groups) in blocks.by_ref().zip(groups.chunks_exact_mut(F::GROUPS)) {
        for (index, group) in groups.iter_mut().enumerate() {
            F::group(block, index, group);
        }
    }
    F::tail(blocks.remainder(), tail);
}

/// Half precision to single, exact for every bit pattern but the payload of a NaN.
///
/// Integer arithmetic and one subtraction: no call, no table, no branch, and no denormal operand, which would cost a
/// hundred cycles and is common among the scales of small weights.
#[inline(always)]
pub fn half_to_f32(bits: u16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    let sign = (bits as u32 & 0x8000) << 16;
    let exponent = bits & 0x7c00;
    let shifted = (bits as u32 & 0x7fff) << 13;
    let subnormal = (f32::from_bits(shifted + SMALLEST_NORMAL) - f32::from_bits(SMALLEST_NORMAL)).to_bits();
    let infinity = if exponent == 0x7c00 { REBIAS } else { 0 };
    let magnitude = if exponent == 0 { subnormal } else { shifted + REBIAS + infinity };
    f32::from_bits(magnitude | sign)
}

#[inline(always)]
fn bytes<const N: usize>(block: &[u8], offset: usize) -> &[u8; N] {
    block[offset..].first_chunk().expect("blocks have the length their format states")
}

#[inline(always)]
fn half(block: &[u8], offset: usize) -> f32 {
    half_to_f32(u16::from_le_bytes(*bytes(block, offset)))
}

/// Nibbles in ggml's planar order: byte j holds elements j (low) and j + 16 (high).
#[inline(always)]
fn nibbles(packed: &[u8; 16]) -> [u8; GROUP] {
    let mut codes = [0; GROUP];
    for j in 0..16 {
        codes[j] = packed[j] & 15;
        codes[j + 16] = packed[j] >> 4;
    }
    codes
}

/// Nibbles with bit i of `high` put above nibble i.
#[inline(always)]
fn nibbles_and_bits(packed: &[u8; 16], high: &[u8; 4]) -> [u8; GROUP] {
    let mut codes = nibbles(packed);
    for i in 0..GROUP {
        codes[i] |= (high[i / 8] >> (i % 8) & 1) << 4;
    }
    codes
}

/// `scale * (code - zero)`.
#[inline(always)]
fn scaled(codes: &[u8; GROUP], zero: i32, scale: f32, out: &mut [f32; GROUP]) {
    for i in 0..GROUP {
        out[i] = scale * (codes[i] as i32 - zero) as f32;
    }
}

/// `scale * code + minimum`.
#[inline(always)]
fn affine(codes: &[u8; GROUP], scale: f32, minimum: f32, out: &mut [f32; GROUP]) {
    for i in 0..GROUP {
        out[i] = scale * codes[i] as f32 + minimum;
    }
}

/// `scale * level[code]`.
#[inline(always)]
fn levels(codes: &[u8; GROUP], scale: f32, out: &mut [f32; GROUP]) {
    for i in 0..GROUP {
        out[i] = scale * IQ4_LEVELS[codes[i] as usize & 15] as f32;
    }
}

macro_rules! float_format {
    ($name:ident, $width:literal, $decode:expr) => {
        pub struct $name;

        impl BlockFormat for $name {
            const DTYPE: DType = DType::$name;
            const GROUPS: usize = 1;
            const BYTES: usize = $width * GROUP;

            #[inline(always)]
            fn group(block: &[u8], _index: usize, out: &mut [f32; GROUP]) {
                Self::tail(bytes::<{ $width * GROUP }>(block, 0), out);
            }

            #[inline(always)]
            fn tail(row: &[u8], out: &mut [f32]) {
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
    ($name:ident, $groups:literal groups, $bytes:literal bytes, |$block:ident, $index:ident, $out:ident| $decode:expr) => {
        pub struct $name;

        impl BlockFormat for $name {
            const DTYPE: DType = DType::$name;
            const GROUPS: usize = $groups;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn group($block: &[u8], $index: usize, $out: &mut [f32; GROUP]) {
                $decode
            }
        }
    };
}

block_format!(Q4_0, 1 groups, 18 bytes, |block, _index, out| {
    scaled(&nibbles(bytes(block, 2)), 8, half(block, 0), out);
});

block_format!(Q4_1, 1 groups, 20 bytes, |block, _index, out| {
    affine(&nibbles(bytes(block, 4)), half(block, 0), half(block, 2), out);
});

block_format!(Q5_0, 1 groups, 22 bytes, |block, _index, out| {
    scaled(&nibbles_and_bits(bytes(block, 6), bytes(block, 2)), 16, half(block, 0), out);
});

block_format!(Q5_1, 1 groups, 24 bytes, |block, _index, out| {
    affine(&nibbles_and_bits(bytes(block, 8), bytes(block, 4)), half(block, 0), half(block, 2), out);
});

block_format!(Q8_0, 1 groups, 34 bytes, |block, _index, out| {
    let scale = half(block, 0);
    let codes: &[u8; GROUP] = bytes(block, 2);
    for i in 0..GROUP {
        out[i] = scale * (codes[i] as i8) as f32;
    }
});

block_format!(IQ4NL, 1 groups, 18 bytes, |block, _index, out| {
    levels(&nibbles(bytes(block, 2)), half(block, 0), out);
});

/// The 4-bit codes of group `index` where two neighbouring groups share 32 bytes, the even one in the low nibbles.
#[inline(always)]
fn paired_nibbles(block: &[u8], offset: usize, index: usize) -> [u8; GROUP] {
    let packed: &[u8; GROUP] = bytes(block, offset + GROUP * (index / 2));
    packed.map(|byte| byte >> (4 * (index % 2)) & 15)
}

/// Scale and minimum of a group in the formats that pack eight pairs of 6 bits behind two halves.
#[inline(always)]
fn packed_scale(block: &[u8], index: usize) -> (f32, f32) {
    let (scale, minimum) = packed6(bytes::<12>(block, 4), index);
    (half(block, 0) * scale as f32, -(half(block, 2) * minimum as f32))
}

block_format!(Q4K, 8 groups, 144 bytes, |block, index, out| {
    let (scale, minimum) = packed_scale(block, index);
    affine(&paired_nibbles(block, 16, index), scale, minimum, out);
});

block_format!(Q5K, 8 groups, 176 bytes, |block, index, out| {
    let (scale, minimum) = packed_scale(block, index);
    let mut codes = paired_nibbles(block, 48, index);
    let high: &[u8; GROUP] = bytes(block, 16);
    for i in 0..GROUP {
        codes[i] |= (high[i] >> index & 1) << 4;
    }
    affine(&codes, scale, minimum, out);
});

block_format!(Q6K, 8 groups, 210 bytes, |block, index, out| {
    // Halves of 128 values: 64 bytes of nibbles and 32 of bit pairs each; groups 0 and 1 of a half lie in the low
    // nibbles, 2 and 3 in the high ones.
    let (side, quarter) = (index / 4, index % 4);
    let low: &[u8; GROUP] = bytes(block, 64 * side + GROUP * (quarter % 2));
    let high: &[u8; GROUP] = bytes(block, 128 + GROUP * side);
    let scales: &[u8; 2] = bytes(block, 192 + 2 * index);
    let scale = half(block, 208);
    for (part, scale) in scales.map(|s| scale * (s as i8) as f32).into_iter().enumerate() {
        for i in 16 * part..16 * part + 16 {
            let code = low[i] >> (4 * (quarter / 2)) & 15 | (high[i] >> (2 * quarter) & 3) << 4;
            out[i] = scale * (code as i32 - 32) as f32;
        }
    }
});

block_format!(IQ4XS, 8 groups, 136 bytes, |block, index, out| {
    let high = u16::from_le_bytes(*bytes(block, 2)) >> (2 * index) & 3;
    let low = block[4 + index / 2] >> (4 * (index % 2)) & 15;
    let scale = half(block, 0) * ((high << 4 | low as u16) as i32 - 32) as f32;
    levels(&nibbles(bytes(block, 8 + 16 * index)), scale, out);
});
