//! The memory as loading leaves it, computed on the host: what a plan with its weights in it has in its file.
//!
//! A region is written from its first byte to its last, a few megabytes at a time, so that a model of any size passes
//! through little memory. Which bytes a kernel that loads would write is computed here plainly, from the tables that
//! the kernels came from; tests hold the two together.

use std::borrow::Cow;
use std::io::{self, Write};

use gemma4c_blocks::{DType, Layout, Plane};
use gemma4c_dsl::InstanceError;
use gemma4c_plan::cuda::{CudaProgram, LoadPart, Range, Region};
use gemma4c_plan::{Weight, WeightId};
use rayon::prelude::*;

use crate::kernels::formats::packing::Packing;
use crate::kernels::planes::{Content, GROUP, place_in_quads};
use crate::kernels::repack::repacks;

/// Bytes that are computed before they are written.
const BATCH: u64 = 16 << 20;

/// Why a region cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error(transparent)]
    Io(#[from] io::Error),
    // What follows are faults of the compiler, not of its input.
    #[error("internal: {tensor} is loaded by {kernel}, which makes nothing known of {dtype}")]
    Kernel { tensor: String, dtype: DType, kernel: String },
    #[error("internal: {tensor} is at {at} of {region:?}, where something else is")]
    Overlap { tensor: String, at: u64, region: Region },
    #[error("{0}")]
    Tensor(String),
    #[error("internal: {0}")]
    Instance(#[from] InstanceError),
}

/// What some bytes of a region are.
enum Piece<'p> {
    /// Floats of the compiler.
    Constant(&'p [f32]),
    /// Whole rows of a tensor, and what becomes of each.
    Rows { weight: WeightId, rows: u64, made: Made },
}

/// What becomes of a row of blocks.
#[derive(Clone, Debug)]
enum Made {
    /// Itself.
    Blocks,
    /// Its part of a plane.
    Plane(Repack),
}

/// Writes a region as loading leaves it, up to where it ends; what nothing is loaded to is zero. `tensor` gives a
/// tensor's bytes, or says why it has none.
pub fn write_region<'b>(
    program: &CudaProgram,
    weights: &[Weight],
    region: Region,
    tensor: &dyn Fn(WeightId) -> Result<Cow<'b, [u8]>, String>,
    out: &mut dyn Write,
) -> Result<(), ImageError> {
    let mut pieces = pieces(program, weights, region)?;
    pieces.sort_by_key(|(to, ..)| to.offset);
    let mut at = 0;
    for (to, name, piece) in &pieces {
        if to.offset < at {
            return Err(ImageError::Overlap { tensor: (*name).to_owned(), at: to.offset, region });
        }
        write_zeros(to.offset - at, out)?;
        match piece {
            Piece::Constant(values) => {
                out.write_all(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())?;
            }
            Piece::Rows { weight, rows, made } => {
                let blocks = tensor(*weight).map_err(ImageError::Tensor)?;
                write_rows(&blocks, *rows, to.bytes, made, out)?;
            }
        }
        at = to.offset + to.bytes;
    }
    let end = if region == Region::Weights { program.loaded_bytes() } else { program.memory.of(region) };
    Ok(write_zeros(end.saturating_sub(at), out)?)
}

fn pieces<'p>(
    program: &'p CudaProgram,
    weights: &'p [Weight],
    region: Region,
) -> Result<Vec<(Range, &'p str, Piece<'p>)>, ImageError> {
    let mut pieces = Vec::new();
    for constant in program.constants.iter().filter(|constant| constant.to.region == region) {
        pieces.push((constant.to, constant.name.as_str(), Piece::Constant(&constant.values)));
    }
    for load in &program.loads {
        let weight = &weights[load.weight.index()];
        for part in &load.parts {
            let (to, made) = match part {
                LoadPart::Copy { to } => (*to, Made::Blocks),
                LoadPart::Kernel { kernel, to, .. } => {
                    (*to, made_by(&program.kernels[*kernel as usize].instance, weight)?)
                }
            };
            if to.region == region {
                pieces.push((to, weight.name.as_str(), Piece::Rows { weight: load.weight, rows: load.rows, made }));
            }
        }
    }
    Ok(pieces)
}

/// What a kernel writes for a tensor, known by the kernel's full name.
fn made_by(instance: &str, weight: &Weight) -> Result<Made, ImageError> {
    let dtype = weight.dtype;
    if let Some(repack) = repacks(dtype)?.iter().find(|repack| repack.instance.to_string() == instance) {
        return Ok(Made::Plane(Repack::new(dtype.layout(), repack.plane.content)));
    }
    Err(ImageError::Kernel { tensor: weight.name.clone(), dtype, kernel: instance.to_owned() })
}

fn write_zeros(mut count: u64, out: &mut dyn Write) -> io::Result<()> {
    const ZEROS: [u8; 4096] = [0; 4096];
    while count > 0 {
        let some = count.min(ZEROS.len() as u64);
        out.write_all(&ZEROS[..some as usize])?;
        count -= some;
    }
    Ok(())
}

/// `to_bytes` that `rows` rows of blocks become, batch by batch, each on all cores.
fn write_rows(blocks: &[u8], rows: u64, to_bytes: u64, made: &Made, out: &mut dyn Write) -> Result<(), ImageError> {
    if let Made::Blocks = made {
        return Ok(out.write_all(blocks)?);
    }
    let from_row = blocks.len() / rows.max(1) as usize;
    let to_row = (to_bytes / rows.max(1)) as usize;
    let batch = (BATCH / to_row.max(1) as u64).clamp(1, rows.max(1)) as usize;
    let mut made_rows = vec![0u8; batch * to_row];
    for blocks in blocks.chunks(batch * from_row) {
        let made_rows = &mut made_rows[..blocks.len() / from_row * to_row];
        made_rows.par_chunks_mut(to_row).zip(blocks.par_chunks(from_row)).for_each(|(to, from)| made.row(from, to));
        out.write_all(made_rows)?;
    }
    Ok(())
}

/// The plane of a matrix: its rows, of so many bytes each.
#[doc(hidden)]
pub fn repacked_plane(
    blocks: &[u8],
    rows: usize,
    layout: &Layout,
    content: Content,
    row_bytes: usize,
) -> Result<Vec<u8>, ImageError> {
    let mut out = Vec::new();
    let made = Made::Plane(Repack::new(layout, content));
    write_rows(blocks, rows as u64, (rows * row_bytes) as u64, &made, &mut out)?;
    Ok(out)
}

impl Made {
    fn row(&self, from: &[u8], to: &mut [u8]) {
        match self {
            Made::Blocks => to.copy_from_slice(from),
            Made::Plane(repack) => repack.row(from, to),
        }
    }
}

/// How a plane is filled from blocks.
#[derive(Clone, Debug)]
struct Repack {
    block_bytes: usize,
    /// Bytes of the plane for one block.
    bytes: usize,
    how: How,
}

#[derive(Clone, Debug)]
enum How {
    /// They are next to each other in the block.
    Copy { from: usize },
    /// Bits that move, one element after the other.
    Bits { mask: u8, moves: Vec<Move> },
    /// The same of unsigned floats, without their upper bit; what would be no number is zero.
    Unsigned { from: usize },
    /// Eight scales and minima of 6 bits each.
    Packed6 { at: usize },
    /// Eight scales of 4 and 2 bits, less 32.
    Split6 { high: usize, low: usize },
    /// Words put together from several fields.
    Packed(Packing),
}

/// From a byte and a place in it to another.
#[derive(Clone, Copy, Debug)]
struct Move {
    from: u16,
    from_shift: u8,
    to: u16,
    to_shift: u8,
}

impl Move {
    /// That of element `i`, to a byte and a place in it of its group.
    fn of(i: usize, plane: Plane, to: (usize, usize)) -> Move {
        let (from, from_shift) = plane.locate(i);
        let group_bytes = GROUP * plane.bits / 8;
        Move {
            from: from as u16,
            from_shift: from_shift as u8,
            to: (i / GROUP * group_bytes + to.0) as u16,
            to_shift: to.1 as u8,
        }
    }
}

impl Repack {
    fn new(layout: &Layout, content: Content) -> Repack {
        let (bytes, how) = match content {
            Content::Verbatim => (layout.bytes, How::Copy { from: 0 }),
            Content::Halves { offset, count } => (2 * count, How::Copy { from: offset }),
            Content::Bytes { offset, count } => (count, How::Copy { from: offset }),
            Content::UnsignedFloats { offset, count } => (count, How::Unsigned { from: offset }),
            Content::Packed(packing) => (4 * packing.words(), How::Packed(packing)),
            Content::Packed6 { packed } => (layout.len / GROUP * 2, How::Packed6 { at: packed }),
            Content::Split6 { high, low } => (layout.len / GROUP, How::Split6 { high, low }),
            Content::Quads { from } => {
                let moves = (0..layout.len).map(|i| Move::of(i, from, place_in_quads(i % GROUP))).collect();
                (layout.len / 2, How::Bits { mask: 15, moves })
            }
            Content::Bits { from, to } => {
                let moves: Vec<Move> = (0..layout.len).map(|i| Move::of(i, from, to.locate(i % GROUP))).collect();
                let stays = |m: &Move| m.from == m.to + from.offset as u16 && m.from_shift == m.to_shift;
                let how = match moves.iter().all(stays) {
                    true => How::Copy { from: from.offset },
                    false => How::Bits { mask: ((1u32 << from.bits) - 1) as u8, moves },
                };
                (layout.len * to.bits / 8, how)
            }
        };
        Repack { block_bytes: layout.bytes, bytes, how }
    }

    fn row(&self, from: &[u8], to: &mut [u8]) {
        for (block, to) in from.chunks_exact(self.block_bytes).zip(to.chunks_exact_mut(self.bytes)) {
            match &self.how {
                How::Copy { from } => to.copy_from_slice(&block[*from..*from + self.bytes]),
                How::Bits { mask, moves } => {
                    to.fill(0);
                    for m in moves {
                        to[m.to as usize] |= (block[m.from as usize] >> m.from_shift & mask) << m.to_shift;
                    }
                }
                How::Unsigned { from } => {
                    for (to, code) in to.iter_mut().zip(&block[*from..]) {
                        *to = if code & 0x7f == 0x7f { 0 } else { code & 0x7f };
                    }
                }
                How::Packed(packing) => to.copy_from_slice(&packing.pack(block)),
                How::Packed6 { at } => {
                    let s = &block[*at..at + 12];
                    for (k, pair) in to.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                        *pair = match k < 4 {
                            true => [s[k] & 63, s[k + 4] & 63],
                            false => [s[k + 4] & 15 | s[k - 4] >> 6 << 4, s[k + 4] >> 4 | s[k] >> 6 << 4],
                        };
                    }
                }
                How::Split6 { high, low } => {
                    let high = u16::from_le_bytes([block[*high], block[high + 1]]);
                    for (k, scale) in to.iter_mut().enumerate() {
                        let upper = (high >> (2 * k) & 3) as u8;
                        *scale = (block[low + k / 2] >> (4 * (k % 2)) & 15 | upper << 4).wrapping_sub(32);
                    }
                }
            }
        }
    }
}
