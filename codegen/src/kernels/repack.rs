//! GGUF blocks to planes, on the device: one launch a plane, once, when a model is loaded.
//!
//! What a plane is made of is data ([`planes::Content`]); each kind of content has one kernel, and the numbers of a
//! format are its compile-time parameters. Blocks are aligned to 2 bytes, so they are read byte by byte: the upload is
//! slower than that. Floats stay as they are and need no kernel. A launch repacks whole rows; to fill part of a matrix
//! it is given the rest of the plane, from those rows on.

use gemma4c_blocks::{DType, Layout};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::formats::packing::packed_word;
use super::planes::{Content, GROUP, WeightPlane, planes};
use super::values::{packed6, plane_bits};

/// Threads of a block. A thread writes one element of its kernel's `out`.
pub const BLOCK_THREADS: u32 = 256;

/// The bits of every element, from their place in a block (FROM) to their place in a group of 32 (TO): see `Plane` of
/// the block formats. One thread gathers the bits of one word.
#[kernel(block = THREADS)]
pub fn repack_plane<
    const THREADS: u32,
    const LEN: u32,
    const BYTES: u32,
    const BITS: u32,
    const FROM_AT: u32,
    const FROM_RUN: u32,
    const TO_RUN: u32,
>(
    blocks: Weights<u8>,
    out: Output<u32>,
    count: u32,
) {
    let at = block_idx() * THREADS + thread_idx();
    if at < count {
        let group = at / BITS;
        let block = blocks.offset((group / (LEN / 32)) as u64 * BYTES as u64);
        let first = group % (LEN / 32) * 32;
        let mut word = 0u32;
        #[unroll]
        for shift in (0..32u32).by(BITS) {
            let byte = at % BITS * 4 + shift / 8;
            let i = byte / TO_RUN * (TO_RUN * 8 / BITS) + shift % 8 / BITS * TO_RUN + byte % TO_RUN;
            word = word | plane_bits(block, first + i, FROM_AT, BITS, FROM_RUN) << shift;
        }
        out[at] = word;
    }
}

/// The nibbles of every element, in words with four of a group's first half and four of its second: see `Quads` of the
/// planes. One thread gathers a word.
#[kernel(block = THREADS)]
pub fn repack_quads<const THREADS: u32, const LEN: u32, const BYTES: u32, const FROM_AT: u32, const FROM_RUN: u32>(
    blocks: Weights<u8>,
    out: Output<u32>,
    count: u32,
) {
    let at = block_idx() * THREADS + thread_idx();
    if at < count {
        let group = at / 4;
        let block = blocks.offset((group / (LEN / 32)) as u64 * BYTES as u64);
        let first = group % (LEN / 32) * 32 + at % 4 * 4;
        let mut word = 0u32;
        #[unroll]
        for i in 0u32..8 {
            word = word | plane_bits(block, first + i / 4 * 16 + i % 4, FROM_AT, 4, FROM_RUN) << (i * 4);
        }
        out[at] = word;
    }
}

/// COUNT neighbouring 16-bit fields of every block.
#[kernel(block = THREADS)]
pub fn repack_halves<const THREADS: u32, const BYTES: u32, const AT: u32, const COUNT: u32>(
    blocks: Weights<u8>,
    out: Output<u16>,
    count: u32,
) {
    let at = block_idx() * THREADS + thread_idx();
    if at < count {
        let block = blocks.offset((at / COUNT) as u64 * BYTES as u64);
        out[at] = load::<u16>(block, AT + at % COUNT * 2);
    }
}

/// The 6-bit scale and minimum of every group of 32, as two bytes.
#[kernel(block = THREADS)]
pub fn repack_packed6<const THREADS: u32, const BYTES: u32, const AT: u32>(
    blocks: Weights<u8>,
    out: Output<u16>,
    count: u32,
) {
    let at = block_idx() * THREADS + thread_idx();
    if at < count {
        let pair = packed6(blocks.offset((at / 8) as u64 * BYTES as u64), AT, at % 8);
        out[at] = (pair.x | pair.y << 8) as u16;
    }
}

/// The 6-bit scale of every group of 32, less 32.
#[kernel(block = THREADS)]
pub fn repack_split6<const THREADS: u32, const BYTES: u32, const LOW_AT: u32, const HIGH_AT: u32>(
    blocks: Weights<u8>,
    out: Output<u8>,
    count: u32,
) {
    let at = block_idx() * THREADS + thread_idx();
    if at < count {
        let block = blocks.offset((at / 8) as u64 * BYTES as u64);
        let k = at % 8;
        let low = block[LOW_AT + k / 2] as u32 >> (4 * (k % 2)) & 15;
        let high = load::<u16>(block, HIGH_AT) as u32 >> (2 * k) & 3;
        out[at] = ((low | high << 4) as i32 - 32) as u8;
    }
}

/// COUNT neighbouring bytes of every block. Where they are UNSIGNED floats, e4m3, without the upper bit, which counts for
/// nothing; the code that would be no number stands for zero.
#[kernel(block = THREADS)]
pub fn repack_bytes<const THREADS: u32, const BYTES: u32, const AT: u32, const COUNT: u32, const UNSIGNED: bool>(
    blocks: Weights<u8>,
    out: Output<u8>,
    count: u32,
) {
    let at = block_idx() * THREADS + thread_idx();
    if at < count {
        let block = blocks.offset((at / COUNT) as u64 * BYTES as u64);
        let mut byte = block[AT + at % COUNT] as u32;
        if UNSIGNED {
            byte = if byte % 128 == 127 { 0 } else { byte % 128 };
        }
        out[at] = byte as u8;
    }
}

fn repacked_bytes(block_bytes: u32, offset: usize, count: usize, unsigned: bool) -> Result<Instance, InstanceError> {
    let (at, count) = (offset as u32, count as u32);
    repack_bytes::Chosen { THREADS: BLOCK_THREADS, BYTES: block_bytes, AT: at, COUNT: count, UNSIGNED: unsigned }
        .build()
}

/// Words put together from several fields of a block: those of the packing KIND, of which a block of 256 values has WORDS.
#[kernel(block = THREADS)]
pub fn repack_words<const THREADS: u32, const BYTES: u32, const WORDS: u32, const KIND: u32>(
    blocks: Weights<u8>,
    out: Output<u32>,
    count: u32,
) {
    let at = block_idx() * THREADS + thread_idx();
    if at < count {
        out[at] = packed_word(blocks.offset((at / WORDS) as u64 * BYTES as u64), at % WORDS);
    }
}

/// How one plane of a type is filled: `instance` on `[count.div_ceil(BLOCK_THREADS)]` blocks, with `count` elements of
/// its `out`.
#[derive(Clone, Debug)]
pub struct Repack {
    pub plane: WeightPlane,
    pub instance: Instance,
    /// Bytes of an element of `out`.
    element_bytes: usize,
}

impl Repack {
    /// Elements of `out` that `rows` rows of `k` values fill: the kernel's `count`.
    pub fn count(&self, rows: u64, k: u64) -> u64 {
        rows * (k / self.plane.per as u64) * self.plane.bytes as u64 / self.element_bytes as u64
    }
}

/// One launch for each plane of the type; none for floats.
pub fn repacks(dtype: DType) -> Result<Vec<Repack>, InstanceError> {
    let made = planes(dtype).into_iter().filter_map(|plane| repack(dtype.layout(), plane).transpose());
    made.collect()
}

fn repack(layout: &Layout, plane: WeightPlane) -> Result<Option<Repack>, InstanceError> {
    let bytes = layout.bytes as u32;
    let (instance, element_bytes) = match plane.content {
        Content::Verbatim => return Ok(None),
        Content::Bits { from, to } => {
            let plane = repack_plane::Chosen {
                THREADS: BLOCK_THREADS,
                BYTES: bytes,
                LEN: layout.len as u32,
                BITS: from.bits as u32,
                FROM_AT: from.offset as u32,
                FROM_RUN: from.run as u32,
                TO_RUN: to.run as u32,
            };
            (plane.build()?, 4)
        }
        Content::Quads { from } => {
            let quads = repack_quads::Chosen {
                THREADS: BLOCK_THREADS,
                BYTES: bytes,
                LEN: layout.len as u32,
                FROM_AT: from.offset as u32,
                FROM_RUN: from.run as u32,
            };
            (quads.build()?, 4)
        }
        Content::Halves { offset, count } => {
            let halves =
                repack_halves::Chosen { THREADS: BLOCK_THREADS, BYTES: bytes, AT: offset as u32, COUNT: count as u32 };
            (halves.build()?, 2)
        }
        Content::Bytes { offset, count } => (repacked_bytes(bytes, offset, count, false)?, 1),
        Content::UnsignedFloats { offset, count } => (repacked_bytes(bytes, offset, count, true)?, 1),
        Content::Packed(packing) => {
            let (words, kind) = (packing.words() as u32, packing.number());
            (repack_words::Chosen { THREADS: BLOCK_THREADS, BYTES: bytes, WORDS: words, KIND: kind }.build()?, 4)
        }
        Content::Packed6 { packed } => {
            (repack_packed6::Chosen { THREADS: BLOCK_THREADS, BYTES: bytes, AT: packed as u32 }.build()?, 2)
        }
        Content::Split6 { high, low } => (
            repack_split6::Chosen { THREADS: BLOCK_THREADS, BYTES: bytes, LOW_AT: low as u32, HIGH_AT: high as u32 }
                .build()?,
            1,
        ),
    };
    debug_assert!(layout.len.is_multiple_of(GROUP));
    Ok(Some(Repack { plane, instance, element_bytes }))
}
