//! Keys and values in 8 bits: how a head's row lies in the cache, how it is made, copied, and widened to f16.
//!
//! The cache is counted in words of 16 bits (its element type is F16, whatever they hold). A head is its codes in order, two to a word; then, if
//! SCALED, an f16 scale for each 32 values; then nothing up to a multiple of 16 bytes. So a head is one run of 16-byte copies, and rows
//! and pages differ from those of 16 bits in their length alone. The roundings are those of `gemma4c_blocks::narrow`, bit by bit.
//!
//! Codes come to shared memory as they lie in memory. Decoded rows widen them in registers (`codes.rs`). Chunks (`flash.rs`) widen a tile
//! once for all of their rows, into the tile that the tensor cores read.
//!
//! Two slots have what differs between types: `narrow` makes a lane's code and the scale of its warp's 32 values (code | scale << 16), `widen` makes
//! eight f16 of eight codes (in x and y) and their scale: the lower half of a word is for the even ones, the upper half for the odd ones. Kernels for
//! wider caches leave both empty.

use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::prelude::*;
use gemma4c_plan::cuda::KvType;

/// Of int8: the group is the warp's 32 values, one a lane. What is not finite makes the scale so. A collective of the warp.
#[device]
pub fn narrow_q8_0(bits: u32) -> u32 {
    // As integers, magnitudes are ordered like the floats, and NaN is above all of them: it is not lost in a maximum.
    let largest = f32::from_bits(warp_max(bits & 0x7fff_ffff));
    let scale = pack_f16(largest / 127.0, 0.0);
    let stored = f16_lo(scale);
    let per_unit = if stored > 0.0 { recip(stored) } else { 0.0 };
    let code = round_to_i32(f32::from_bits(bits) * per_unit).clamp(-127, 127);
    code as u32 & 0xff | scale << 16
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

/// Elements of one head's row in the cache.
#[device]
pub fn head_len<const NARROW: bool, const SCALED: bool>(dim: u32) -> u32 {
    let words = dim / 2 + if SCALED { dim / 32 } else { 0 };
    if NARROW { (words + 7) / 8 * 8 } else { dim }
}

/// A lane's value and its neighbour's as a word of the cache (lower half, of even lanes), and the scale of the warp's values (upper
/// half). A collective of the warp.
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

/// One value of a head, for kernels that are not in a hurry.
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

/// Starts to copy the codes of a tile's keys, positions `at..end` of one head, and behind them those of its values, as
/// [`super::decode::copy_tile`] does of wider ones. A thread counts keys and places on as it goes: a head's length is no power of two, and
/// dividing by it takes longer than the copies.
#[device]
pub fn copy_both<
    const D: u32,
    const KEYS: u32,
    const THREADS: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    codes: Shared<KV>,
    keys: Input<KV>,
    values: Input<KV>,
    at: u32,
    end: u32,
    stored: u32,
    kv_row: u32,
    capacity: u32,
) {
    let len = head_len(D);
    let first = at % capacity;
    let mut key = thread_idx() * 8 / len;
    let mut place = thread_idx() * 8 % len;
    #[unroll]
    for start in (0..KEYS * head_len(D)).by(THREADS * 8) {
        let to = start + thread_idx() * 8;
        let row = first + key;
        let wrapped = if row < capacity { row } else { row - capacity };
        if at + key < end.min(stored) {
            cp_async16(codes, to, keys, wrapped * kv_row + place);
            cp_async16(codes, KEYS * len + to, values, wrapped * kv_row + place);
        } else if at + key >= end && key < KEYS {
            store(codes, to, U32x4::ZERO);
            store(codes, KEYS * len + to, U32x4::ZERO);
        }
        place = place + THREADS * 8 % len;
        key = key + THREADS * 8 / len;
        if place >= len {
            place = place - len;
            key = key + 1;
        }
    }
}

/// Puts the codes of a position that the cache does not hold into their place in a tile.
#[device]
pub fn patch_codes<const D: u32, const THREADS: u32, const NARROW: bool, const SCALED: bool, KV: Float>(
    codes: Shared<KV>,
    row: Shared<KV>,
    place: u32,
) {
    let to = codes.offset(place * head_len(D));
    for i in (thread_idx() * 8..D / 2).by(THREADS * 8) {
        store(to, i, load::<U32x4>(row, i));
    }
    if SCALED && thread_idx() < D / 32 {
        store(to, D / 2 + thread_idx(), load::<u16>(row, D / 2 + thread_idx()));
    }
}

/// A tile of f16, rows eight elements apart more than they are long, of its codes. A thread widens eight values at a time: neighbours
/// then write 16 bytes beside each other.
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
