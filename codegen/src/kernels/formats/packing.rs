//! Planes of low-bit types that are more than fields or bits moved: words put together from several fields of a block.
//!
//! A unit of these types has 8 bytes of codes. The grid types have indices and signs there, or signs in the plane
//! `high`. Signs are a word: bit j of byte i is that of value `4 j + i`, so that one shift has those of four values at
//! the upper ends of its bytes. Where a file keeps seven signs of eight, the word has room for four other bits, at 25,
//! 27, 29 and 31.

use gemma4c_blocks::{Codes, DType};
use gemma4c_dsl::prelude::*;

/// Which words: what they are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Sixteen scales of 6 bits less 32, a byte each.
    ScalesQ3K,
    /// A group's indices, then its signs.
    CodesIQ2XXS,
    /// Eight groups' scales, four bits each.
    ScalesIQ2XXS,
    /// The lower bytes of a group's indices, then its signs, with the ninth bits in their room.
    CodesIQ2XS,
    /// The lower bytes of a group's indices, then its signs.
    CodesIQ2S,
    /// Of each group the upper bits of its indices, and two scales of four bits.
    ScalesIQ2S,
    /// A group's signs, with its scale in their room.
    SignsIQ3XXS,
    /// Of each group the upper bits of its indices, and its scale: twice the field plus one.
    ScalesIQ3S,
}

/// The last `Packing::…` of [`packed_word`].
const KINDS: [Packing; 8] = [
    Packing::ScalesQ3K,
    Packing::CodesIQ2XXS,
    Packing::ScalesIQ2XXS,
    Packing::CodesIQ2XS,
    Packing::CodesIQ2S,
    Packing::ScalesIQ2S,
    Packing::SignsIQ3XXS,
    Packing::ScalesIQ3S,
];

impl Packing {
    /// Its number for [`packed_word`].
    pub fn number(self) -> u32 {
        KINDS.iter().position(|kind| *kind == self).unwrap_or_default() as u32
    }

    /// Words of a block of 256 values.
    pub const fn words(self) -> usize {
        match self {
            Packing::ScalesQ3K | Packing::ScalesIQ2S | Packing::ScalesIQ3S => 4,
            Packing::ScalesIQ2XXS => 1,
            Packing::SignsIQ3XXS => 8,
            Packing::CodesIQ2XXS | Packing::CodesIQ2XS | Packing::CodesIQ2S => 16,
        }
    }

    /// What a block gives.
    pub fn pack(self, block: &[u8]) -> Vec<u8> {
        let word = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        let signs = |of: &dyn Fn(usize) -> u32| (0..32).fold(0, |word, v| word | of(v) << (v % 4 * 8 + v / 4));
        let sevens = |from: u32| signs(&|v| if v % 8 == 7 { 0 } else { from >> (v / 8 * 7 + v % 8) & 1 });
        let room = |bits: u32| (0..4).fold(0, |word, l| word | (bits >> l & 1) << (25 + 2 * l));
        let bytes_of_words = |words: Vec<u32>| words.into_iter().flat_map(u32::to_le_bytes).collect();
        let groups = 0..8usize;
        match self {
            Packing::ScalesQ3K => {
                let low = |k: usize| block[96 + k % 8] >> (k / 8 * 4) & 15;
                let high = |k: usize| block[104 + k % 4] >> (k / 4 * 2) & 3;
                (0..16).map(|k| (low(k) | high(k) << 4).wrapping_sub(32)).collect()
            }
            Packing::CodesIQ2XXS => {
                bytes_of_words(groups.flat_map(|g| [word(2 + 8 * g), sevens(word(6 + 8 * g))]).collect())
            }
            Packing::ScalesIQ2XXS => {
                bytes_of_words(vec![groups.fold(0, |all, g| all | word(6 + 8 * g) >> 28 << (4 * g))])
            }
            Packing::CodesIQ2XS => {
                let entry = |g: usize, l: usize| {
                    u32::from(u16::from_le_bytes([block[2 + 8 * g + 2 * l], block[3 + 8 * g + 2 * l]]))
                };
                let all = |g: usize, of: &dyn Fn(u32) -> u32, step: usize| {
                    (0..4).fold(0, |word, l| word | of(entry(g, l)) << (step * l))
                };
                let low = |g| all(g, &|entry| entry & 255, 8);
                let high = |g| sevens(all(g, &|entry| entry >> 9, 7)) | room(all(g, &|entry| entry >> 8 & 1, 1));
                bytes_of_words(groups.flat_map(|g| [low(g), high(g)]).collect())
            }
            Packing::CodesIQ2S => {
                let all_signs = |g: usize| signs(&|v| word(34 + 4 * g) >> v & 1);
                bytes_of_words(groups.flat_map(|g| [word(2 + 4 * g), all_signs(g)]).collect())
            }
            Packing::ScalesIQ2S => groups.flat_map(|g| [block[66 + g], block[74 + g]]).collect(),
            Packing::SignsIQ3XXS => {
                let of_group = |g: usize| sevens(word(66 + 4 * g)) | room(word(66 + 4 * g) >> 28);
                bytes_of_words(groups.map(of_group).collect())
            }
            Packing::ScalesIQ3S => {
                let scale = |g: usize| 2 * (block[106 + g / 2] >> (g % 2 * 4) & 15) + 1;
                groups.flat_map(|g| [block[66 + g], scale(g)]).collect()
            }
        }
    }
}

/// What a group of the planes of a grid type says of value `i` of its 32: the magnitude with its sign.
pub fn grid_code(dtype: DType, codes: &[u8], high: &[u8], scales: &[u8], i: usize) -> i32 {
    let Codes::Grid { grid, .. } = dtype.layout().codes else { return 0 };
    let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let entry = i / grid.len;
    let upper = match dtype {
        DType::IQ2XS => word(&codes[4..]) >> (25 + 2 * entry) & 1,
        DType::IQ2S => u32::from(scales[0]) >> (2 * entry) & 3,
        DType::IQ3S => u32::from(scales[0]) >> entry & 1,
        _ => 0,
    };
    let index = usize::from(codes[entry]) | (upper as usize) << 8;
    let signs = if grid.len == 8 { word(&codes[4..]) } else { word(high) };
    let sign = |v: usize| signs >> (v % 4 * 8 + v / 4) & 1;
    let seven_of_eight = !matches!(dtype, DType::IQ2S | DType::IQ3S);
    let negative = match seven_of_eight && i % 8 == 7 {
        true => (i - 7..i).map(sign).sum::<u32>() % 2,
        false => sign(i),
    };
    let magnitude = i32::from(grid.values[index * grid.len + i % grid.len]);
    if negative == 1 { -magnitude } else { magnitude }
}

/// The odd number that scales value `i` of a group, group `group` of its block.
pub fn odd_scale(dtype: DType, high: &[u8], scales: &[u8], group: usize, i: usize) -> f32 {
    let nibble = |byte: u8, index: usize| byte >> (4 * index) & 15;
    let field = match dtype {
        DType::IQ2XXS => nibble(scales[group / 2], group % 2),
        DType::IQ2XS => nibble(scales[0], i / 16),
        DType::IQ2S => nibble(scales[1], i / 16),
        DType::IQ3XXS => (0..4).fold(0, |bits, l| bits | (high[3] >> (1 + 2 * l) & 1) << l),
        _ => return f32::from(scales[1]),
    };
    f32::from(2 * field + 1)
}

// ---- on a GPU -------------------------------------------------------------------------------------------------------

#[device]
pub fn block_word(block: Weights<u8>, at: u32) -> u32 {
    load::<u16>(block, at) as u32 | (load::<u16>(block, at + 2) as u32) << 16
}

/// A word of signs of 32 values, of which bit i of `from` is that of value i.
#[device]
pub fn sign_word(from: u32) -> u32 {
    let mut word = 0u32;
    #[unroll]
    for v in 0u32..32 {
        word = word | (from >> v & 1) << (v % 4 * 8 + v / 4);
    }
    word
}

/// Four times seven bits, in bytes.
#[device]
pub fn sevens_in_bytes(from: u32) -> u32 {
    from & 0x7f | (from & 0x3f80) << 1 | (from & 0x1fc000) << 2 | (from & 0xfe00000) << 3
}

/// Four bits in the room that a word of signs has.
#[device]
pub fn in_room(bits: u32) -> u32 {
    (bits & 1) << 25 | (bits & 2) << 26 | (bits & 4) << 27 | (bits & 8) << 28
}

/// Both words of a group of IQ2XS: lower bytes of its indices, then its signs and the ninth bits.
#[device]
pub fn packed_iq2_xs(block: Weights<u8>, group: u32, second: bool) -> u32 {
    let mut lower = 0u32;
    let mut ninth = 0u32;
    let mut signs = 0u32;
    #[unroll]
    for l in 0u32..4 {
        let entry = load::<u16>(block, 2 + group * 8 + l * 2) as u32;
        lower = lower | (entry & 255) << (8 * l);
        ninth = ninth | (entry >> 8 & 1) << l;
        signs = signs | entry >> 9 << (8 * l);
    }
    if second { sign_word(signs) | in_room(ninth) } else { lower }
}

/// A 6-bit scale of Q3_K less 32, as a byte.
#[device]
pub fn scale_q3_k(block: Weights<u8>, k: u32) -> u32 {
    let low = block[96 + k % 8] as u32 >> (k / 8 * 4) & 15;
    let high = block[104 + k % 4] as u32 >> (k / 4 * 2) & 3;
    (low | high << 4).wrapping_sub(32) & 255
}

/// The upper bits and the scales of a group of IQ2S or IQ3S.
#[device]
pub fn scales_of_group(block: Weights<u8>, group: u32, of_32: bool) -> u32 {
    let mut scales = block[74 + group] as u32;
    if of_32 {
        scales = 2 * (block[106 + group / 2] as u32 >> (group % 2 * 4) & 15) + 1;
    }
    block[66 + group] as u32 | scales << 8
}

/// Word `at` of a block, by the number of its packing.
#[device]
pub fn packed_word<const KIND: u32>(block: Weights<u8>, at: u32) -> u32 {
    let mut word = 0u32;
    if KIND == 0 {
        #[unroll]
        for i in 0u32..4 {
            word = word | scale_q3_k(block, at * 4 + i) << (8 * i);
        }
    }
    if KIND == 1 {
        let from = block_word(block, 2 + at * 4);
        word = if at % 2 == 0 { from } else { sign_word(sevens_in_bytes(from)) };
    }
    if KIND == 2 {
        #[unroll]
        for group in 0u32..8 {
            word = word | block_word(block, 6 + group * 8) >> 28 << (4 * group);
        }
    }
    if KIND == 3 {
        word = packed_iq2_xs(block, at / 2, at % 2 == 1);
    }
    if KIND == 4 {
        let signs = at % 2 == 1;
        let from = block_word(block, if signs { 34 } else { 2 } + at / 2 * 4);
        word = if signs { sign_word(from) } else { from };
    }
    if KIND == 5 || KIND == 7 {
        word = scales_of_group(block, at * 2, KIND == 7) | scales_of_group(block, at * 2 + 1, KIND == 7) << 16;
    }
    if KIND == 6 {
        let from = block_word(block, 66 + at * 4);
        word = sign_word(sevens_in_bytes(from)) | in_room(from >> 28);
    }
    word
}
