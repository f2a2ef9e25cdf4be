//! Packed data: bytes, nibbles and 16-bit floats inside words, and products of four bytes at once.

use super::rows::intrinsic;
use crate::{BF16, F16, Float};

intrinsic! {
    /// Byte `index` of a word, 0 lowest, unsigned.
    Thread fn byte_of(word: u32, index: u32) -> u32 { word >> (8 * index) & 0xff }
    cuda "return (word >> (8 * index)) & 0xffu;"
}

intrinsic! {
    /// Byte `index` of a word, 0 lowest, signed.
    Thread fn signed_byte_of(word: u32, index: u32) -> i32 { i32::from((word >> (8 * index)) as i8) }
    cuda "return (i32)(i8)(word >> (8 * index));"
}

intrinsic! {
    /// Four bits of a word, 0 lowest.
    Thread fn nibble_of(word: u32, index: u32) -> u32 { word >> (4 * index) & 0xf }
    cuda "return (word >> (4 * index)) & 0xfu;"
}

intrinsic! {
    /// The low bytes of four numbers as one word, `a` lowest.
    Thread fn pack_bytes(a: i32, b: i32, c: i32, d: i32) -> u32 { u32::from_le_bytes([a as u8, b as u8, c as u8, d as u8]) }
    cuda "return ((u32)a & 0xffu) | ((u32)b & 0xffu) << 8 | ((u32)c & 0xffu) << 16 | (u32)d << 24;"
}

intrinsic! {
    /// Picks four bytes out of eight: nibble i of `selector` (0 to 7) says which byte of `high:low` becomes byte i. A
    /// table of 16 entries is two of these.
    Thread fn byte_perm(low: u32, high: u32, selector: u32) -> u32 {
        let bytes = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
        u32::from_le_bytes(std::array::from_fn(|i| bytes[(selector >> (4 * i) & 7) as usize]))
    }
    cuda "return __byte_perm(low, high, selector & 0x7777u);"
}

intrinsic! {
    /// Four of eight bytes, by the lower three bits of each of the selector's lowest four nibbles; where a nibble's upper
    /// bit is set, all bits are the byte's upper one.
    Thread fn byte_perm_or_sign(low: u32, high: u32, selector: u32) -> u32 {
        let bytes = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
        u32::from_le_bytes(std::array::from_fn(|i| {
            let byte = bytes[(selector >> (4 * i) & 7) as usize];
            if selector >> (4 * i) & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
        }))
    }
    cuda "u32 picked; asm(\"prmt.b32 %0, %1, %2, %3;\" : \"=r\"(picked) : \"r\"(low), \"r\"(high), \"r\"(selector)); return picked;"
}

intrinsic! {
    /// All bits of each byte as its upper one.
    Thread fn byte_signs(word: u32) -> u32 {
        u32::from_le_bytes(word.to_le_bytes().map(|byte| ((byte as i8) >> 7) as u8))
    }
    cuda "u32 signs; asm(\"prmt.b32 %0, %1, 0, 0xba98;\" : \"=r\"(signs) : \"r\"(word)); return signs;"
}

intrinsic! {
    /// `sum` plus the four products of signed bytes.
    Thread fn dp4a(a: u32, b: u32, sum: i32) -> i32 {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        (0..4).fold(sum, |sum, i| sum.wrapping_add(i32::from(a[i] as i8) * i32::from(b[i] as i8)))
    }
    cuda "return __dp4a((i32)a, (i32)b, sum);"
}

intrinsic! {
    /// `sum` plus the four products of bytes, of `a` unsigned, of `b` signed.
    Thread fn dp4a_unsigned(a: u32, b: u32, sum: i32) -> i32 {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        (0..4).fold(sum, |sum, i| sum.wrapping_add(i32::from(a[i]) * i32::from(b[i] as i8)))
    }
    cuda "
    i32 result;
    asm(\"dp4a.u32.s32 %0, %1, %2, %3;\" : \"=r\"(result) : \"r\"(a), \"r\"(b), \"r\"(sum));
    return result;
"
}

intrinsic! {
    /// Four differences of bytes, each modulo 256.
    Thread fn sub_bytes(a: u32, b: u32) -> u32 {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        u32::from_le_bytes(std::array::from_fn(|i| a[i].wrapping_sub(b[i])))
    }
    cuda "return __vsub4(a, b);"
}

intrinsic! {
    /// The lower of two packed bf16.
    Thread fn bf16_lo(pair: u32) -> f32 { f32::from_bits(pair << 16) }
    cuda "return __uint_as_float(pair << 16);"
}

intrinsic! {
    /// The upper of two packed bf16.
    Thread fn bf16_hi(pair: u32) -> f32 { f32::from_bits(pair & 0xffff_0000) }
    cuda "return __uint_as_float(pair & 0xffff0000u);"
}

intrinsic! {
    /// The lower of two packed f16.
    Thread fn f16_lo(pair: u32) -> f32 { F16::from_bits(pair as u16).to_f32() }
    cuda "return to_f32(F16{(u16)pair});"
}

intrinsic! {
    /// The upper of two packed f16.
    Thread fn f16_hi(pair: u32) -> f32 { F16::from_bits((pair >> 16) as u16).to_f32() }
    cuda "return to_f32(F16{(u16)(pair >> 16)});"
}

intrinsic! {
    /// Two floats rounded to bf16, `low` in the lower half.
    Thread fn pack_bf16(low: f32, high: f32) -> u32 {
        u32::from(BF16::from_f32(low).to_bits()) | u32::from(BF16::from_f32(high).to_bits()) << 16
    }
    cuda "u32 pair; asm(\"cvt.rn.bf16x2.f32 %0, %1, %2;\" : \"=r\"(pair) : \"f\"(high), \"f\"(low)); return pair;"
}

intrinsic! {
    /// Two floats rounded to f16, `low` in the lower half.
    Thread fn pack_f16(low: f32, high: f32) -> u32 {
        u32::from(F16::from_f32(low).to_bits()) | u32::from(F16::from_f32(high).to_bits()) << 16
    }
    cuda "u32 pair; asm(\"cvt.rn.f16x2.f32 %0, %1, %2;\" : \"=r\"(pair) : \"f\"(high), \"f\"(low)); return pair;"
}
