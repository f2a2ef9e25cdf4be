//! Tiles of rows by bulk copies through a tensor map: one thread asks for 32 rows of 64 values, and an engine brings
//! them as products of warpgroups read them. Hopper and later.
//!
//! A tile is 32 rows of 128 bytes, swizzled: the 16-byte piece `p` of row `r` lies in the place of piece `p ^ r % 8`.
//! It starts at a multiple of 1024 bytes of shared memory, so that tiles one behind the other are an operand of wgmma.
//! What lies outside the matrix is zero: rows behind the last, and values behind a row's end. An mbarrier counts 4096
//! bytes, whatever is outside.
//!
//! The matrix is a parameter, `Tiles<T>`. A row has as many values as the first scalar behind the parameter says, a
//! multiple of 8; there are as many rows as the parameter's memory holds. On a GPU both are in the tensor map, which
//! whoever launches makes of the same numbers.

use super::rows::{intrinsic, row};
use crate::Element;
use crate::sim::FaultKind;
use crate::sim::mbarrier;
use crate::sim::memory::{KernelIndex, Readable, Shared, Tiles};
use crate::sim::region::Region;
use crate::sim::shadow::Touch;
use crate::sim::thread::Thread;

/// Rows of a tile.
const ROWS: usize = 32;
/// Bytes of a tile's row.
const ROW_BYTES: usize = 128;
/// Bytes of a piece, which the swizzle moves.
const PIECE: usize = 16;
/// Bytes after which the swizzle starts over.
const PATTERN_BYTES: usize = 1024;

/// The values of a row: the first scalar behind the parameter.
fn row_bytes(thread: &Thread, region: &Region) -> usize {
    let launch = thread.launch();
    let at = launch.regions.iter().position(|known| known.as_ref().is_some_and(|known| std::ptr::eq(known, region)));
    let is_scalar = |index: &usize| launch.regions[*index].is_none();
    let width = (at.unwrap_or(0)..launch.regions.len()).find(is_scalar).map_or(0, |index| launch.scalars[index]);
    let bytes = width as usize * region.element.size();
    if bytes == 0 || !bytes.is_multiple_of(PIECE) || !(region.base as usize).is_multiple_of(PIECE) {
        let message = format!("rows of {bytes} bytes of `{}`: they start at multiples of 16", region.name);
        thread.raise(FaultKind::Misaligned, thread.line(), message);
    }
    bytes
}

/// A tile as it will lie in shared memory.
#[allow(unsafe_code)]
#[track_caller]
fn tile(thread: &Thread, region: &Region, column: u32, row: u32) -> Vec<u8> {
    let (width, size) = (row_bytes(thread, region), region.element.size());
    let mut tile = vec![0; ROWS * ROW_BYTES];
    let (first, rows) = (column as usize * size, region.bytes / width);
    for line in (0..ROWS).filter(|line| row as usize + line < rows) {
        for piece in (0..ROW_BYTES / PIECE).filter(|piece| first + (piece + 1) * PIECE <= width) {
            let at = (row as usize + line) * width + first + piece * PIECE;
            let from = region.access((at / size) as i64, at as i64, PIECE, Touch::Read);
            let to = line * ROW_BYTES + (piece ^ (line % 8)) * PIECE;
            // SAFETY: `access` has checked the bounds of the 16 bytes.
            tile[to..to + PIECE].copy_from_slice(unsafe { std::slice::from_raw_parts(from, PIECE) });
        }
    }
    tile
}

/// Starts to copy the tile whose first value is `column` of row `row` to element `to` of a shared array. The barrier
/// counts the bytes.
#[track_caller]
#[allow(clippy::too_many_arguments)]
pub fn tile_load<T: Element>(
    target: Shared<T>,
    to: impl KernelIndex,
    source: Tiles<T>,
    column: u32,
    row: u32,
    barriers: Shared<u64>,
    barrier: impl KernelIndex,
) {
    let thread = Thread::current();
    let data = tile(thread, source.0.region(), column, row);
    let (region, at) = (target.raw(), target.raw().check_bounds(to.value(), data.len() / size_of::<T>()));
    let region = region.region();
    if size_of::<T>() != 2 || !at.is_multiple_of(PATTERN_BYTES) {
        let message =
            format!("a tile at byte {at} of `{}`: 16-bit floats at a multiple of {PATTERN_BYTES} bytes", region.name);
        thread.raise(FaultKind::Misaligned, thread.line(), message);
    }
    thread.require_fenced(region, at, data.len(), "copies to", thread.line());
    region.access(to.value(), at as i64, data.len(), Touch::Write);
    let address = barriers.raw().at::<u64>(barrier.value(), Touch::Atomic) as usize;
    mbarrier::start_copy(thread, thread.line(), address, region, at, data);
}

row! {
    /// Starts to copy the tile whose first value is `column` of row `row` to shared memory. The barrier counts the
    /// bytes.
    Thread tile_load since 90 needs [tile_come]
    cuda "
template <class T> struct __align__(128) tiles { u64 map[16]; };
template <class T, class I, class K> __device__ __forceinline__ void tile_load(T* target, I to, const tiles<T>& source, u32 column, u32 row, u64* barriers, K barrier) {
    asm volatile(\"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];\" :: \"r\"((u32)__cvta_generic_to_shared(target + to)), \"l\"(&source), \"r\"((u32)__cvta_generic_to_shared(barriers + barrier)), \"r\"(column), \"r\"(row) : \"memory\");
}"
    host "
#define __grid_constant__
template <class T> struct tiles { const T* at; };
template <class T, class I, class K> inline void tile_load(T* target, I to, const tiles<T>& source, u32 column, u32 row, u64* barriers, K barrier) {
    tile_come((u64)(target + to), (u64)source.at, column, row, (u64)(barriers + barrier));
}"
}

intrinsic! {
    /// A tile of the host text, which comes at once, by addresses.
    Thread fn tile_come(target: u64, source: u64, column: u32, row: u32, barrier: u64) { arrive_at_once(target as usize, source as usize, column, row, barrier as usize) }
    cuda ""
}

#[allow(unsafe_code)]
fn arrive_at_once(target: usize, source: usize, column: u32, row: u32, barrier: usize) {
    let thread = Thread::current();
    let regions = thread.launch().regions.iter().flatten();
    let Some(region) = regions.into_iter().find(|region| region.base as usize == source) else {
        thread.raise(FaultKind::OutOfBounds, None, "a tile of no parameter".into())
    };
    let data = tile(thread, region, column, row);
    // SAFETY: the text gives a place in its own shared memory, where its Rust meaning has checked that the tile fits.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target as *mut u8, data.len()) };
    mbarrier::complete(thread, None, barrier, data.len());
}
