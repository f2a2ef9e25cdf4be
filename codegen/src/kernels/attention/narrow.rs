//! Keys and values in 8 bits: the layout of a head's row in the cache, how it is made, copied, and widened to f16.
//!
//! The cache is counted in words of 16 bits (its element type is F16, whatever they hold). A head is its codes in
//! order, two to a word; then, if SCALED, an f16 scale for each 32 values; then nothing up to a multiple of 16 bytes.
//! So a head is one run of 16-byte copies, and rows and pages differ from those of 16 bits in their length alone. The
//! roundings are those of `gemma4c_blocks::narrow`, bit by bit.
//!
//! Codes are in shared memory as they are in the cache. Decoded rows multiply them out of registers (`codes.rs`).
//! Chunks (`flash.rs`) widen a tile once for all of their rows, into the tile that the tensor cores read.
//!
//! Three slots have what differs between types: `narrow` makes a lane's code and the scale of its warp's 32 values
//! (code | scale << 16), `widen` makes eight f16 of eight codes (in x and y) and their scale: the lower half of a word
//! is for the even ones, the upper half for the odd ones. `operands` makes eight f16 of eight codes without their
//! scale, which are what `codes.rs` says. Kernels for wider caches leave them empty.

use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::prelude::*;
use gemma4c_plan::cuda::KvType;

/// Of int8: the group is the warp's 32 values, one a lane. What is not finite makes the scale so. A collective of the
/// warp.
#[device]
pub fn narrow_q8_0(bits: u32) -> u32 {
    // As integers, magnitudes are ordered like the floats, and NaN is above all of them: it is not lost in a maximum.
    let largest = f32::from_bits(warp_largest(bits & 0x7fff_ffff));
    let scale = pack_f16(largest / 127.0, 0.0);
    let stored = f16_lo(scale);
    let per_unit = if stored > 0.0 { recip(stored) } else { 0.0 };
    let code = round_to_i32(f32::from_bits(bits) * per_unit).clamp(-127, 127);
    // Stored as 128 more.
    (code as u32 ^ 0x80) & 0xff | scale << 16
}

/// Of e4m3, which has no scale.
#[device]
pub fn narrow_fp8(bits: u32) -> u32 {
    pack_e4m3(f32::from_bits(bits), 0.0) & 0xff
}

#[device]
pub fn widen_q8_0(eight: U32x4, scale: u32) -> U32x4 {
    let low = widen_int8(eight.x, scale);
    let high = widen_int8(eight.y, scale);
    u32x4(low.x, low.y, high.x, high.y)
}

#[device(fills(eight, scale))]
pub fn widen_fp8(eight: U32x4, scale: u32) -> U32x4 {
    let low = widen_e4m3(eight.x);
    let high = widen_e4m3(eight.y);
    u32x4(low.x, low.y, high.x, high.y)
}

/// Bytes with zeros above them.
#[device]
pub fn operands_q8_0(eight: U32x4) -> U32x4 {
    u32x4(
        byte_perm(eight.x, 0, 0x4140),
        byte_perm(eight.x, 0, 0x4342),
        byte_perm(eight.y, 0, 0x4140),
        byte_perm(eight.y, 0, 0x4342),
    )
}

#[device]
pub fn operands_fp8(eight: U32x4) -> U32x4 {
    let low = widen_e4m3(eight.x);
    let high = widen_e4m3(eight.y);
    u32x4(low.x, low.y, high.x, high.y)
}

/// What fills the slot `narrow`.
pub fn narrow_slot(kv: KvType) -> Vec<&'static DeviceDef> {
    match kv {
        KvType::Q8_0 => vec![narrow_q8_0::DEF],
        KvType::Fp8 => vec![narrow_fp8::DEF],
        _ => vec![],
    }
}

/// What fills the slot `widen`.
pub fn widen_slot(kv: KvType) -> Vec<&'static DeviceDef> {
    match kv {
        KvType::Q8_0 => vec![widen_q8_0::DEF],
        KvType::Fp8 => vec![widen_fp8::DEF],
        _ => vec![],
    }
}

/// What fills the slot `operands`.
pub fn operands_slot(kv: KvType) -> Vec<&'static DeviceDef> {
    match kv {
        KvType::Q8_0 => vec![operands_q8_0::DEF],
        KvType::Fp8 => vec![operands_fp8::DEF],
        _ => vec![],
    }
}

/// Elements of one head's row in a tile of codes: 32 bytes more than its codes, where scales are. Rows are eight banks
/// apart then, so that lanes that read four or eight of them meet in none.
#[device]
pub fn code_row<const D: u32>() -> u32 {
    D / 2 + 16
}

/// Elements of one head's row in the cache.
#[device]
pub fn head_len<const NARROW: bool, const SCALED: bool>(dim: u32) -> u32 {
    let words = dim / 2 + if SCALED { dim / 32 } else { 0 };
    if NARROW { (words + 7) / 8 * 8 } else { dim }
}

/// A lane's value and its neighbour's as a word of the cache (lower half, of even lanes), and the scale of the warp's
/// values (upper half). A collective of the warp.
#[device(slots(narrow(bits: u32) -> u32))]
pub fn word_of(value: f32) -> u32 {
    let own = narrow(value.to_bits());
    own & 0xffff_00ff | (shfl_xor(own, 1) & 0xff) << 8
}

/// Stores what [`word_of`] made of value `i` of a head.
#[device]
pub fn store_word<const SCALED: bool, KV: Float>(head: InOut<KV>, dim: u32, i: u32, word: u32) {
    if lane_id() % 2 == 0 {
        store(head, i / 2, word as u16);
    }
    if SCALED && lane_id() == 0 {
        store(head, dim / 2 + i / 32, (word >> 16) as u16);
    }
}

/// The same, to shared memory.
#[device]
pub fn keep_word<const SCALED: bool, KV: Float>(head: Shared<KV>, dim: u32, i: u32, word: u32) {
    if lane_id() % 2 == 0 {
        store(head, i / 2, word as u16);
    }
    if SCALED && lane_id() == 0 {
        store(head, dim / 2 + i / 32, (word >> 16) as u16);
    }
}

/// One value of a head, for kernels whose time does not matter.
#[device(slots(widen(eight: U32x4, scale: u32) -> U32x4))]
pub fn value_at<const NARROW: bool, const SCALED: bool, KV: Float>(head: Input<KV>, dim: u32, i: u32) -> f32 {
    if NARROW {
        let code = load::<u16>(head, i / 2) as u32 >> (i % 2 * 8) & 0xff;
        let mut scale = 0u32;
        if SCALED {
            scale = load::<u16>(head, dim / 2 + i / 32) as u32 * 0x10001;
        }
        return f16_lo(widen(u32x4(code, 0, 0, 0), scale).x);
    }
    head[i].to_f32()
}

/// Issues the copy of 16 bytes of a key's codes, or scales, if the cache has them. Behind the last key they become
/// zero.
#[device]
pub fn copy_vector<KV: Float>(to: Shared<KV>, cache: Input<KV>, from: u32, is_stored: bool, is_behind: bool) {
    if is_stored {
        cp_async16(to, 0u32, cache, from);
    } else if is_behind {
        store(to, 0u32, U32x4::ZERO);
    }
}

/// Issues the copies of the codes of a tile's keys (or values), positions `at..end` of one head, as
/// [`super::split::copy_tile`] does of wider ones, to rows of [`code_row`]. Of most tiles the cache has all keys,
/// contiguously: they are copied without asking for each.
#[device]
pub fn copy_codes<const D: u32, const KEYS: u32, const THREADS: u32, const SCALED: bool, KV: Float>(
    codes: Shared<KV>,
    near: Input<KV>,
    far: Input<KV>,
    at: u32,
    end: u32,
    stored: u32,
    row_len: u32,
    capacity: u32,
) {
    require!(THREADS * 16 % D == 0 && KEYS % (THREADS * 16 / D) == 0 && D <= 512);
    let first = at % capacity;
    // Keys that the cache has; it may lack the last.
    let ready = end.min(stored) - at;
    let at_once = THREADS * 16 / D;
    let key = thread_idx() / (D / 16);
    let place = thread_idx() % (D / 16) * 8;
    // 16 bytes are the scales of 256 values.
    let vectors = (D + 255) / 256;
    if ready == KEYS && first + KEYS <= capacity {
        // Pointers first: what is added to them is one multiplication.
        let from = near.offset((first + key) * row_len + place);
        let to = codes.offset(key * code_row() + place);
        #[unroll]
        for i in 0..KEYS * D / (THREADS * 16) {
            cp_async16(to, i * at_once * code_row(), from, i * at_once * row_len);
        }
        if SCALED {
            #[unroll(1)]
            for i in (thread_idx()..KEYS * vectors).by(THREADS) {
                let scales = D / 2 + i % vectors * 8;
                cp_async16(codes, i / vectors * code_row() + scales, near, (first + i / vectors) * row_len + scales);
            }
        }
    } else {
        #[unroll(1)]
        for i in (0..KEYS).by(THREADS * 16 / D) {
            let row = key + i;
            let page = if first + row < capacity { near } else { far };
            let from = (first + row) % capacity * row_len + place;
            copy_vector(codes.offset(row * code_row() + place), page, from, row < ready, row >= end - at);
        }
        if SCALED {
            #[unroll(1)]
            for i in (thread_idx()..KEYS * vectors).by(THREADS) {
                let scales = D / 2 + i % vectors * 8;
                let row = i / vectors;
                let page = if first + row < capacity { near } else { far };
                let from = (first + row) % capacity * row_len + scales;
                copy_vector(codes.offset(row * code_row() + scales), page, from, row < ready, row >= end - at);
            }
        }
    }
}

/// Puts the codes of a position that the cache does not hold into their place in a tile.
#[device]
pub fn patch_codes<const D: u32, const THREADS: u32, const SCALED: bool, KV: Float>(
    codes: Shared<KV>,
    row: Shared<KV>,
    place: u32,
) {
    let to = codes.offset(place * code_row());
    for i in (thread_idx() * 8..D / 2).by(THREADS * 8) {
        store(to, i, load::<U32x4>(row, i));
    }
    if SCALED && thread_idx() < D / 32 {
        store(to, D / 2 + thread_idx(), load::<u16>(row, D / 2 + thread_idx()));
    }
}

/// A tile of f16, rows eight elements apart more than they are long, of its codes. A thread widens eight values at a
/// time: neighbours then write 16 bytes beside each other.
#[device(slots(widen(eight: U32x4, scale: u32) -> U32x4))]
pub fn widen_tile<
    const D: u32,
    const KEYS: u32,
    const THREADS: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    codes: Shared<KV>,
    tile: Shared<KV>,
) {
    require!(KEYS * D % (THREADS * 8) == 0);
    // From a constant on, so that most of the addresses are, too.
    #[unroll(4)]
    for start in (0..KEYS * D).by(THREADS * 8) {
        let i = start + thread_idx() * 8;
        let head = codes.offset(i / D * head_len(D));
        let eight = load::<U32x2>(head, i % D / 2);
        let mut scale = 0u32;
        if SCALED {
            scale = load::<u16>(head, D / 2 + i % D / 32) as u32 * 0x10001;
        }
        store(tile, i / D * (D + 8) + i % D, widen(u32x4(eight.x, eight.y, 0, 0), scale));
    }
}
