//! `wgmma`: asynchronous matrix products of whole warpgroups (128 threads), which only Hopper has.
//!
//! Both operands are bf16 tiles in shared memory, k innermost, 64 values (128 bytes) a row, with the 128-byte swizzle:
//! the 16-byte piece `p` of row `r` is stored in the place of piece `p ^ r % 8`. A tile starts at a multiple of 1024
//! bytes; an operand starts `16 s` values into a tile's rows for step `s` along k. Products read shared memory and
//! update their accumulator at any time between start and wait: no thread may touch either meanwhile. The simulator
//! reads operands as late as the wait, and hides the accumulator until then.
//!
//! The left operand may lie in registers instead: of a thread `w`, `g`, `t` as below, a pair of bf16 each, rows `16 w +
//! g` and `+ 8` of columns `2 t` and `2 t + 1`, then both rows of columns `+ 8`. Registers must keep their values until
//! the wait; the simulator reads them at the start.
//!
//! The accumulator of a thread, with `g = lane / 4`, `t = lane % 4` and `w` its warp in the warpgroup: `sums[4 j …]`
//! are (row `16 w + g`, column `8 j + 2 t`), the next column, and the same two of row `+ 8`.
//!
//! Where the right operand's columns are innermost (`wgmma_b16_held_across`), a tile has 64 columns to a row of 128
//! bytes, a row for each k, with the same swizzle; further columns are in further tiles, `panel` values apart.
//!
//! Writes to shared memory by ordinary stores and `cp_async` become visible to wgmma (the async proxy) after
//! `fence_proxy_async` in the writing thread, then a barrier.

use super::rows::{intrinsic, row};
use crate::elements::{Element, ElementType, F16, Float};
use crate::sim::FaultKind;
use crate::sim::memory::{Readable, Regs, Shared};
use crate::sim::pending::{Operands, Product, Tile, WARPGROUP};
use crate::sim::region::Region;
use crate::sim::shadow::Touch;
use crate::sim::thread::{Stop, StopScope, Thread};
use crate::{BF16, U32x4};
use std::rc::Rc;

/// Values of k in one product.
const DEPTH: usize = 16;
/// Rows of the left operand.
const ROWS: usize = 64;
/// Bytes of a tile's row.
const ROW_BYTES: usize = 128;
/// Bytes after which the swizzle starts over.
const PATTERN_BYTES: usize = 1024;
/// Recent products whose operands stay cached for the warpgroup's slower threads.
const KEPT: usize = 16;

/// Where a tile's byte lies, both counted from a multiple of 1024.
fn swizzled(at: usize) -> usize {
    at ^ (at / ROW_BYTES % 8) << 4
}

/// The sum of a thread's accumulator and the product of two operands.
fn accumulate(sums: &mut [f32], thread: &Thread, operands: &Operands) {
    let in_group = thread.index as usize % WARPGROUP;
    let (warp, g, t) = (in_group / 32, in_group % 32 / 4, in_group % 4);
    fn line(values: &[f32], line: usize) -> &[f32; DEPTH] {
        values[line * DEPTH..].first_chunk().expect("a whole line")
    }
    let rows = [0, 8].map(|below| line(&operands.left, 16 * warp + g + below));
    // Four sums together, since each waits for its last addition. As in `float_mma`, the order within a product is of no
    // account: a product of two 16-bit floats is exact in f32, and their sum is rounded once.
    for (eight, sums) in sums.chunks_exact_mut(4).enumerate() {
        let columns = [0, 1].map(|right| line(&operands.right, eight * 8 + 2 * t + right));
        let mut exact = [0, 1, 2, 3].map(|at| f64::from(sums[at]));
        for k in 0..DEPTH {
            for (at, sum) in exact.iter_mut().enumerate() {
                *sum += f64::from(rows[at / 2][k] * columns[at % 2][k]);
            }
        }
        for (sum, exact) in sums.iter_mut().zip(exact) {
            *sum = exact as f32;
        }
    }
}

/// The operands of a product. The first thread of the warpgroup that needs them reads them for all.
fn operands(thread: &Thread, number: u32, read: impl FnOnce() -> Operands) -> Rc<Operands> {
    let mut recent = thread.warpgroup().operands.borrow_mut();
    if let Some((_, operands)) = recent.iter().find(|(of, _)| *of == number) {
        return Rc::clone(operands);
    }
    let operands = Rc::new(read());
    recent.push_back((number, Rc::clone(&operands)));
    if recent.len() > KEPT {
        recent.pop_front();
    }
    operands
}

/// Leaves a thread's part of a left operand in registers for its warpgroup.
fn hold(thread: &Thread, number: u32, words: [u32; 4]) {
    let mut held = thread.warpgroup().held.borrow_mut();
    held.entry(number).or_insert_with(|| vec![[0; 4]; WARPGROUP])[thread.index as usize % WARPGROUP] = words;
    // Nobody is further behind than the products that may be on their way.
    while held.len() > KEPT {
        held.pop_first();
    }
}

/// A left operand that lies in registers, 16 values to a line.
fn held_lines(thread: &Thread, number: u32, widen: fn(u16) -> f32) -> Vec<f32> {
    let held = thread.warpgroup().held.borrow();
    let words = held.get(&number).expect("all threads have left their part");
    let value = |row: usize, k: usize| {
        let lane = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
        let word = words[lane][k / 8 * 2 + row % 16 / 8];
        widen((word >> (k % 2 * 16)) as u16)
    };
    (0..ROWS * DEPTH).map(|at| value(at / DEPTH, at % DEPTH)).collect()
}

/// The number that a 16-bit float of a type is.
fn widened<T: Element>() -> fn(u16) -> f32 {
    match T::TYPE {
        ElementType::F16 => |bits| F16::from_bits(bits).to_f32(),
        _ => |bits| BF16::from_bits(bits).to_f32(),
    }
}

/// Operand lines of 16 values. `piece` gives the 16 bytes at a place of the tile after the swizzle.
fn lines(count: usize, at: usize, widen: fn(u16) -> f32, mut piece: impl FnMut(usize) -> [u16; 8]) -> Vec<f32> {
    let places = (0..count * 2).map(|half| swizzled(at + half / 2 * ROW_BYTES + half % 2 * 16));
    places.flat_map(|place| piece(place).map(widen)).collect()
}

/// The same where columns are innermost: 16 bytes are eight columns of one k.
fn lines_across(
    count: usize,
    at: usize,
    panel: usize,
    widen: fn(u16) -> f32,
    mut piece: impl FnMut(usize) -> [u16; 8],
) -> Vec<f32> {
    let mut lines = vec![0.0; count * DEPTH];
    for (eight, k) in (0..count / 8).flat_map(|eight| (0..DEPTH).map(move |k| (eight, k))) {
        let place = swizzled(at + eight / 8 * panel + k * ROW_BYTES + eight % 8 * 16);
        for (column, bits) in piece(place).into_iter().enumerate() {
            lines[(eight * 8 + column) * DEPTH + k] = widen(bits);
        }
    }
    lines
}

impl Tile {
    #[allow(unsafe_code)]
    fn region(&self) -> &Region {
        // SAFETY: a tile is made from a handle of the running launch, which owns the region.
        unsafe { &*self.region }
    }

    /// Reads an operand with all checks: bounds, races, and that its writers have fenced it.
    #[allow(unsafe_code)]
    #[track_caller]
    fn read(&self, thread: &Thread, count: usize) -> Vec<f32> {
        let region = self.region();
        let piece = |place: usize| {
            let address = region.access((place / 2) as i64, place as i64, 16, Touch::Read);
            thread.require_fenced(region, place, 16, "multiplies", thread.line());
            // SAFETY: `access` has checked the bounds; shared arrays are aligned to far more than 16 bytes.
            unsafe { *address.cast::<[u16; 8]>() }
        };
        match self.panel {
            None => lines(count, self.at, self.widen, piece),
            Some(panel) => lines_across(count, self.at, panel, self.widen, piece),
        }
    }
}

/// Where an operand starts, if it may start there.
#[track_caller]
fn tile_at<T: Element>(thread: &Thread, handle: Shared<T>, panel: Option<usize>) -> Tile {
    let raw = handle.raw();
    let at = raw.first_byte();
    let within = if panel.is_some() { 1 } else { ROW_BYTES };
    let starts = usize::try_from(at).is_ok_and(|at| at % 32 == 0 && at % PATTERN_BYTES < within);
    if !starts || !thread.launch().instance.def.launch.dynamic_shared {
        let message = format!(
            "`{}`, byte {at}: an operand of wgmma starts in the first row of a pattern of 1024 bytes, at a multiple of 16 values, in dynamic shared memory",
            raw.region().name
        );
        thread.raise(FaultKind::Misaligned, thread.line(), message);
    }
    Tile { region: raw.region, at: at as usize, panel, widen: widened::<T>() }
}

/// Starts `sums += left · rightᵀ`: 64 x 16 times 16 x columns, twice as many columns as `sums` has registers, a
/// multiple of
/// 32. The GPU's order of additions within the 16 is not specified, but does not depend on the columns.
#[track_caller]
pub fn wgmma_bf16(sums: &mut Regs<f32>, left: Shared<BF16>, right: Shared<BF16>) {
    let thread = Thread::current();
    let (left, right) = (tile_at(thread, left, None), tile_at(thread, right, None));
    start(thread, "wgmma_bf16", sums, Some(left), right);
}

/// The same of either 16-bit float with the left operand in registers, four words a thread, and the right one from
/// value `at` of a tile on. `at` is a constant: products that differ in nothing else share a descriptor.
#[track_caller]
pub fn wgmma_b16_held<T: Float>(sums: &mut Regs<f32>, left: U32x4, right: Shared<T>, at: u32) {
    let thread = Thread::current();
    let number = thread.products.borrow().started;
    hold(thread, number, [left.x, left.y, left.z, left.w]);
    start(thread, "wgmma_b16_held", sums, None, tile_at(thread, right.offset(at), None));
}

/// The same as `wgmma_bf16` of either 16-bit float.
#[track_caller]
pub fn wgmma_b16<T: Float>(sums: &mut Regs<f32>, left: Shared<T>, right: Shared<T>) {
    let thread = Thread::current();
    let (left, right) = (tile_at(thread, left, None), tile_at(thread, right, None));
    start(thread, "wgmma_b16", sums, Some(left), right);
}

/// Starts `sums += left · right` of either 16-bit float: the left operand in registers, the right one with its columns
/// innermost, 64 to a tile, tiles `panel` values apart.
#[track_caller]
pub fn wgmma_b16_held_across<T: Float>(sums: &mut Regs<f32>, left: U32x4, right: Shared<T>, panel: u32) {
    let thread = Thread::current();
    let bytes = panel as usize * 2;
    if !sums.values_mut().len().is_multiple_of(32) || !bytes.is_multiple_of(PATTERN_BYTES) {
        let message = "a right operand across has whole tiles of 64 columns, at multiples of 1024 bytes".to_owned();
        thread.raise(FaultKind::Misaligned, thread.line(), message);
    }
    let number = thread.products.borrow().started;
    hold(thread, number, [left.x, left.y, left.z, left.w]);
    start(thread, "wgmma_b16_held_across", sums, None, tile_at(thread, right, Some(bytes)));
}

#[track_caller]
fn start(thread: &Thread, operation: &'static str, sums: &mut Regs<f32>, left: Option<Tile>, right: Tile) {
    let line = thread.line();
    let columns = sums.values_mut().len() * 2;
    if columns == 0 || !columns.is_multiple_of(32) || columns > 256 {
        thread.raise(
            FaultKind::OutOfBounds,
            line,
            format!("a product of {columns} columns: 32 to 256, a multiple of 32"),
        );
    }
    thread.suspend(Stop { scope: StopScope::Warpgroup, operation, line });
    let mut products = thread.products.borrow_mut();
    if !products.fenced {
        thread.raise(FaultKind::MissingFence, line, "multiplies without wgmma_fence() since the last wait".into());
    }
    // The GPU may read its operands now: what is not there yet, or not visible, is a fault.
    if (thread.index as usize).is_multiple_of(WARPGROUP) && thread.launch().checks {
        if let Some(left) = left {
            left.read(thread, ROWS);
        }
        right.read(thread, columns);
    }
    if products.is_idle() {
        products.sums = sums.values_mut().to_vec();
        sums.values_mut().fill(f32::NAN);
    } else if products.sums.len() * 2 != columns {
        thread.raise(
            FaultKind::UnfinishedProduct,
            line,
            "another accumulator's products are still on their way".into(),
        );
    }
    let number = products.started;
    products.started += 1;
    products.line = line;
    products.open.push(Product { number, left, right });
}

row! {
    /// Starts `sums += left · rightᵀ`: 64 x 16 times 16 x columns, twice as many columns as `sums` has registers, a
    /// multiple of
    /// 32. The GPU's order of additions within the 16 is not specified, but does not depend on the columns.
    Warpgroup wgmma_bf16 since 90 needs [wgmma_at_once]
    cuda "
__device__ __forceinline__ u64 swizzled_tile(const BF16* tile) {
    // Address, (unused here), 1024 bytes from eight rows to the next eight, swizzle of 128 bytes.
    u32 address = (u32)__cvta_generic_to_shared(tile);
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
#define WGMMA_NAMES_0 \"%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15\"
#define WGMMA_NAMES_1 \"%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31\"
#define WGMMA_NAMES_2 \"%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47\"
#define WGMMA_NAMES_3 \"%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63\"
#define WGMMA_NAMES_4 \"%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79\"
#define WGMMA_NAMES_5 \"%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95\"
#define WGMMA_NAMES_6 \"%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111\"
#define WGMMA_NAMES_7 \"%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127\"
#define WGMMA_SUMS(at) \"+f\"(sums[at + 0]), \"+f\"(sums[at + 1]), \"+f\"(sums[at + 2]), \"+f\"(sums[at + 3]), \"+f\"(sums[at + 4]), \"+f\"(sums[at + 5]), \"+f\"(sums[at + 6]), \"+f\"(sums[at + 7]), \"+f\"(sums[at + 8]), \"+f\"(sums[at + 9]), \"+f\"(sums[at + 10]), \"+f\"(sums[at + 11]), \"+f\"(sums[at + 12]), \"+f\"(sums[at + 13]), \"+f\"(sums[at + 14]), \"+f\"(sums[at + 15])
#define WGMMA(columns, names, first, second, ...) asm volatile(\"wgmma.mma_async.sync.aligned.m64n\" #columns \"k16.f32.bf16.bf16 {\" names \"}, %\" #first \", %\" #second \", 1, 1, 1, 0, 0;\" : __VA_ARGS__ : \"l\"(left_tile), \"l\"(right_tile))
template <u32 COUNT> __device__ __forceinline__ void wgmma_bf16(f32 (&sums)[COUNT], const BF16* left, const BF16* right) {
    static_assert(COUNT % 16 == 0 && COUNT <= 128, \"a product has 32 to 256 columns, a multiple of 32\");
    u64 left_tile = swizzled_tile(left), right_tile = swizzled_tile(right);
    if constexpr (COUNT == 16) WGMMA(32, WGMMA_NAMES_0, 16, 17, WGMMA_SUMS(0));
    else if constexpr (COUNT == 32) WGMMA(64, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1, 32, 33, WGMMA_SUMS(0), WGMMA_SUMS(16));
    else if constexpr (COUNT == 48) WGMMA(96, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2, 48, 49, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32));
    else if constexpr (COUNT == 64) WGMMA(128, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3, 64, 65, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48));
    else if constexpr (COUNT == 80) WGMMA(160, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4, 80, 81, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64));
    else if constexpr (COUNT == 96) WGMMA(192, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5, 96, 97, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80));
    else if constexpr (COUNT == 112) WGMMA(224, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5 \", \" WGMMA_NAMES_6, 112, 113, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80), WGMMA_SUMS(96));
    else if constexpr (COUNT == 128) WGMMA(256, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5 \", \" WGMMA_NAMES_6 \", \" WGMMA_NAMES_7, 128, 129, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80), WGMMA_SUMS(96), WGMMA_SUMS(112));
}"
    host "template <u32 COUNT> inline void wgmma_bf16(f32 (&sums)[COUNT], const BF16* left, const BF16* right) { wgmma_at_once((u64)sums, COUNT, (u64)left, (u64)right); }"
}

row! {
    /// The same of either 16-bit float with the left operand in registers, four words a thread, and the right one from
    /// value `at` of a tile on.
    Warpgroup wgmma_b16_held since 90 needs [wgmma_bf16, wgmma_held_at_once]
    cuda "
#define WGMMA_HELD(type, columns, names, a, b, c, d, second, ...) asm volatile(\"wgmma.mma_async.sync.aligned.m64n\" #columns \"k16.f32.\" type \".\" type \" {\" names \"}, {%\" #a \", %\" #b \", %\" #c \", %\" #d \"}, %\" #second \", 1, 1, 1, 0;\" : __VA_ARGS__ : \"r\"(left.x), \"r\"(left.y), \"r\"(left.z), \"r\"(left.w), \"l\"(right_tile))
#define WGMMA_HELD_OF(element, type) \\
template <u32 COUNT> __device__ __forceinline__ void wgmma_b16_held(f32 (&sums)[COUNT], U32x4 left, const element* right, u32 at) { \\
    static_assert(COUNT % 16 == 0 && COUNT <= 128, \"a product has 32 to 256 columns, a multiple of 32\"); \\
    u64 right_tile = (u64)((u32)swizzled_tile((const BF16*)right) + at / 8) | (u64)0x40000040 << 32; \\
    if constexpr (COUNT == 16) WGMMA_HELD(type, 32, WGMMA_NAMES_0, 16, 17, 18, 19, 20, WGMMA_SUMS(0)); \\
    else if constexpr (COUNT == 32) WGMMA_HELD(type, 64, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1, 32, 33, 34, 35, 36, WGMMA_SUMS(0), WGMMA_SUMS(16)); \\
    else if constexpr (COUNT == 48) WGMMA_HELD(type, 96, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2, 48, 49, 50, 51, 52, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32)); \\
    else if constexpr (COUNT == 64) WGMMA_HELD(type, 128, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3, 64, 65, 66, 67, 68, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48)); \\
    else if constexpr (COUNT == 80) WGMMA_HELD(type, 160, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4, 80, 81, 82, 83, 84, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64)); \\
    else if constexpr (COUNT == 96) WGMMA_HELD(type, 192, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5, 96, 97, 98, 99, 100, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80)); \\
    else if constexpr (COUNT == 112) WGMMA_HELD(type, 224, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5 \", \" WGMMA_NAMES_6, 112, 113, 114, 115, 116, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80), WGMMA_SUMS(96)); \\
    else if constexpr (COUNT == 128) WGMMA_HELD(type, 256, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5 \", \" WGMMA_NAMES_6 \", \" WGMMA_NAMES_7, 128, 129, 130, 131, 132, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80), WGMMA_SUMS(96), WGMMA_SUMS(112)); \\
}
WGMMA_HELD_OF(BF16, \"bf16\")
WGMMA_HELD_OF(F16, \"f16\")"
    host "
template <u32 COUNT> inline void wgmma_b16_held(f32 (&sums)[COUNT], U32x4 left, const BF16* right, u32 at) { wgmma_held_at_once((u64)sums, COUNT, left.x, left.y, left.z, left.w, (u64)(right + at), true); }
template <u32 COUNT> inline void wgmma_b16_held(f32 (&sums)[COUNT], U32x4 left, const F16* right, u32 at) { wgmma_held_at_once((u64)sums, COUNT, left.x, left.y, left.z, left.w, (u64)(right + at), false); }"
}

row! {
    /// The same as `wgmma_bf16` of either 16-bit float.
    Warpgroup wgmma_b16 since 90 needs [wgmma_bf16, wgmma_b16_at_once]
    cuda "
#define WGMMA_OF(type, columns, names, first, second, ...) asm volatile(\"wgmma.mma_async.sync.aligned.m64n\" #columns \"k16.f32.\" type \".\" type \" {\" names \"}, %\" #first \", %\" #second \", 1, 1, 1, 0, 0;\" : __VA_ARGS__ : \"l\"(left_tile), \"l\"(right_tile))
template <u32 COUNT> __device__ __forceinline__ void wgmma_b16(f32 (&sums)[COUNT], const BF16* left, const BF16* right) { wgmma_bf16(sums, left, right); }
template <u32 COUNT> __device__ __forceinline__ void wgmma_b16(f32 (&sums)[COUNT], const F16* left, const F16* right) {
    static_assert(COUNT == 16 || COUNT == 32 || COUNT == 64 || COUNT == 128, \"a product of f16 has 32, 64, 128 or 256 columns\");
    u64 left_tile = swizzled_tile((const BF16*)left), right_tile = swizzled_tile((const BF16*)right);
    if constexpr (COUNT == 16) WGMMA_OF(\"f16\", 32, WGMMA_NAMES_0, 16, 17, WGMMA_SUMS(0));
    else if constexpr (COUNT == 32) WGMMA_OF(\"f16\", 64, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1, 32, 33, WGMMA_SUMS(0), WGMMA_SUMS(16));
    else if constexpr (COUNT == 64) WGMMA_OF(\"f16\", 128, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3, 64, 65, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48));
    else WGMMA_OF(\"f16\", 256, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5 \", \" WGMMA_NAMES_6 \", \" WGMMA_NAMES_7, 128, 129, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80), WGMMA_SUMS(96), WGMMA_SUMS(112));
}"
    host "
template <u32 COUNT> inline void wgmma_b16(f32 (&sums)[COUNT], const BF16* left, const BF16* right) { wgmma_b16_at_once((u64)sums, COUNT, (u64)left, (u64)right, true); }
template <u32 COUNT> inline void wgmma_b16(f32 (&sums)[COUNT], const F16* left, const F16* right) { wgmma_b16_at_once((u64)sums, COUNT, (u64)left, (u64)right, false); }"
}

row! {
    /// Starts `sums += left · right` of either 16-bit float: the left operand in registers, the right one with its
    /// columns innermost, 64 to a tile, tiles `panel` values apart.
    Warpgroup wgmma_b16_held_across since 90 needs [wgmma_bf16, wgmma_across_at_once]
    cuda "
__device__ __forceinline__ u64 swizzled_across(const void* tile, u32 panel) {
    // Address, from 64 columns to the next, 1024 bytes from eight values of k to the next eight, swizzle of 128 bytes.
    u32 address = (u32)__cvta_generic_to_shared(tile);
    return (u64)((address & 0x3ffff) >> 4) | (u64)(panel * 2 >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
#define WGMMA_ACROSS(type, columns, names, a, b, c, d, second, ...) asm volatile(\"wgmma.mma_async.sync.aligned.m64n\" #columns \"k16.f32.\" type \".\" type \" {\" names \"}, {%\" #a \", %\" #b \", %\" #c \", %\" #d \"}, %\" #second \", 1, 1, 1, 1;\" : __VA_ARGS__ : \"r\"(left.x), \"r\"(left.y), \"r\"(left.z), \"r\"(left.w), \"l\"(right_tile))
#define WGMMA_ACROSS_OF(element, type) \\
template <u32 COUNT> __device__ __forceinline__ void wgmma_b16_held_across(f32 (&sums)[COUNT], U32x4 left, const element* right, u32 panel) { \\
    static_assert(COUNT == 32 || COUNT == 64 || COUNT == 128, \"a product across has 64, 128 or 256 columns\"); \\
    u64 right_tile = swizzled_across(right, panel); \\
    if constexpr (COUNT == 32) WGMMA_ACROSS(type, 64, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1, 32, 33, 34, 35, 36, WGMMA_SUMS(0), WGMMA_SUMS(16)); \\
    else if constexpr (COUNT == 64) WGMMA_ACROSS(type, 128, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3, 64, 65, 66, 67, 68, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48)); \\
    else WGMMA_ACROSS(type, 256, WGMMA_NAMES_0 \", \" WGMMA_NAMES_1 \", \" WGMMA_NAMES_2 \", \" WGMMA_NAMES_3 \", \" WGMMA_NAMES_4 \", \" WGMMA_NAMES_5 \", \" WGMMA_NAMES_6 \", \" WGMMA_NAMES_7, 128, 129, 130, 131, 132, WGMMA_SUMS(0), WGMMA_SUMS(16), WGMMA_SUMS(32), WGMMA_SUMS(48), WGMMA_SUMS(64), WGMMA_SUMS(80), WGMMA_SUMS(96), WGMMA_SUMS(112)); \\
}
WGMMA_ACROSS_OF(BF16, \"bf16\")
WGMMA_ACROSS_OF(F16, \"f16\")"
    host "
template <u32 COUNT> inline void wgmma_b16_held_across(f32 (&sums)[COUNT], U32x4 left, const BF16* right, u32 panel) { wgmma_across_at_once((u64)sums, COUNT, left.x, left.y, left.z, left.w, (u64)right, panel, true); }
template <u32 COUNT> inline void wgmma_b16_held_across(f32 (&sums)[COUNT], U32x4 left, const F16* right, u32 panel) { wgmma_across_at_once((u64)sums, COUNT, left.x, left.y, left.z, left.w, (u64)right, panel, false); }"
}

/// A product on addresses of the host text, which passes its own registers, and tiles of its shared memory.
#[allow(unsafe_code)]
fn multiply_at(
    thread: &Thread,
    sums: *mut f32,
    count: usize,
    left: Option<usize>,
    (right, panel): (usize, Option<usize>),
    widen: fn(u16) -> f32,
) {
    let number = thread.products.borrow().started;
    thread.products.borrow_mut().started += 1;
    // SAFETY: the text's shared memory is aligned to the pattern, and its tiles are whole.
    let piece = |place: usize| unsafe { *(place as *const [u16; 8]) };
    let read = || Operands {
        left: left.map_or_else(|| held_lines(thread, number, widen), |left| lines(ROWS, left, widen, piece)),
        right: match panel {
            None => lines(count * 2, right, widen, piece),
            Some(panel) => lines_across(count * 2, right, panel, widen, piece),
        },
    };
    let operands = operands(thread, number, read);
    // SAFETY: the text gives the length of its own array.
    accumulate(unsafe { std::slice::from_raw_parts_mut(sums, count) }, thread, &operands);
}

intrinsic! {
    /// A product that is done when it returns, on addresses: what the host text of `wgmma_bf16` is made of.
    Warpgroup fn wgmma_at_once(sums: u64, count: u32, left: u64, right: u64) {
        let thread = Thread::current();
        thread.suspend(Stop { scope: StopScope::Warpgroup, operation: "wgmma_bf16", line: thread.line() });
        let widen = widened::<BF16>();
        multiply_at(thread, sums as *mut f32, count as usize, Some(left as usize), (right as usize, None), widen);
    }
    cuda ""
}

intrinsic! {
    /// The same of `wgmma_b16`.
    Warpgroup fn wgmma_b16_at_once(sums: u64, count: u32, left: u64, right: u64, bf: bool) {
        let thread = Thread::current();
        thread.suspend(Stop { scope: StopScope::Warpgroup, operation: "wgmma_b16", line: thread.line() });
        let widen = if bf { widened::<BF16>() } else { widened::<F16>() };
        multiply_at(thread, sums as *mut f32, count as usize, Some(left as usize), (right as usize, None), widen);
    }
    cuda ""
}

intrinsic! {
    /// The same of `wgmma_b16_held_across`.
    Warpgroup fn wgmma_across_at_once(sums: u64, count: u32, a: u32, b: u32, c: u32, d: u32, right: u64, panel: u32, bf: bool) {
        let thread = Thread::current();
        let number = thread.products.borrow().started;
        hold(thread, number, [a, b, c, d]);
        thread.suspend(Stop { scope: StopScope::Warpgroup, operation: "wgmma_b16_held_across", line: thread.line() });
        let widen = if bf { widened::<BF16>() } else { widened::<F16>() };
        let right = (right as usize, Some(panel as usize * 2));
        multiply_at(thread, sums as *mut f32, count as usize, None, right, widen);
    }
    cuda ""
}

intrinsic! {
    /// The same of `wgmma_b16_held`.
    Warpgroup fn wgmma_held_at_once(sums: u64, count: u32, a: u32, b: u32, c: u32, d: u32, right: u64, bf: bool) {
        let thread = Thread::current();
        let number = thread.products.borrow().started;
        hold(thread, number, [a, b, c, d]);
        thread.suspend(Stop { scope: StopScope::Warpgroup, operation: "wgmma_b16_held", line: thread.line() });
        let widen = if bf { widened::<BF16>() } else { widened::<F16>() };
        multiply_at(thread, sums as *mut f32, count as usize, None, (right as usize, None), widen);
    }
    cuda ""
}

/// Puts the accumulator's registers in order before the first product, and before the next one after the kernel touched
/// them.
#[track_caller]
pub fn wgmma_fence(_sums: &mut Regs<f32>) {
    let thread = Thread::current();
    thread.suspend(Stop {
        scope: StopScope::Warp { orders_memory: false },
        operation: "wgmma_fence",
        line: thread.line(),
    });
    thread.products.borrow_mut().fenced = true;
}

row! {
    /// Puts the accumulator's registers in order before the first product, and before the next one after the kernel
    /// touched them.
    Warpgroup wgmma_fence since 90
    cuda "
template <u32 COUNT> __device__ __forceinline__ void wgmma_fence(f32 (&sums)[COUNT]) {
    #pragma unroll
    for (u32 i = 0; i < COUNT; ++i) asm volatile(\"\" : \"+f\"(sums[i]) :: \"memory\");
    asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");
}"
    host "template <u32 COUNT> inline void wgmma_fence(f32 (&)[COUNT]) {}"
}

/// Closes the group of the products started since the last one.
#[track_caller]
pub fn wgmma_commit() {
    let thread = Thread::current();
    thread.suspend(Stop {
        scope: StopScope::Warp { orders_memory: false },
        operation: "wgmma_commit",
        line: thread.line(),
    });
    let mut products = thread.products.borrow_mut();
    let group = std::mem::take(&mut products.open);
    products.groups.push_back(group);
}

row! {
    /// Closes the group of the products started since the last one.
    Warpgroup wgmma_commit since 90
    cuda "__device__ __forceinline__ void wgmma_commit() { asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\"); }"
    host "inline void wgmma_commit() {}"
}

/// Waits until at most `pending` groups of products are still on their way; `pending` is a constant, 0 or 1. `sums` may
/// be touched after a wait for all of them.
#[track_caller]
pub fn wgmma_wait(pending: u32, sums: &mut Regs<f32>) {
    let thread = Thread::current();
    thread.suspend(Stop {
        scope: StopScope::Warp { orders_memory: false },
        operation: "wgmma_wait",
        line: thread.line(),
    });
    let mut products = thread.products.borrow_mut();
    let products = &mut *products;
    let was_idle = products.is_idle();
    while products.groups.len() > pending as usize {
        for Product { number, left, right } in products.groups.pop_front().unwrap_or_default() {
            let columns = products.sums.len() * 2;
            let read = || Operands {
                left: left.map_or_else(|| held_lines(thread, number, right.widen), |left| left.read(thread, ROWS)),
                right: right.read(thread, columns),
            };
            accumulate(&mut products.sums, thread, &operands(thread, number, read));
        }
    }
    if !was_idle && products.is_idle() {
        sums.values_mut().copy_from_slice(&products.sums);
        products.fenced = false;
    }
}

row! {
    /// Waits until at most `pending` groups of products are still on their way; `pending` is a constant, 0 or 1. `sums`
    /// may be touched after a wait for all of them.
    Warpgroup wgmma_wait since 90
    cuda "
template <u32 COUNT> __device__ __forceinline__ void wgmma_wait(u32 pending, f32 (&sums)[COUNT]) {
    // The operand of the instruction is part of it: the branch folds away.
    if (pending == 0) asm volatile(\"wgmma.wait_group.sync.aligned 0;\" ::: \"memory\");
    else asm volatile(\"wgmma.wait_group.sync.aligned 1;\" ::: \"memory\");
    // Nothing that reads the accumulator moves above the wait.
    #pragma unroll
    for (u32 i = 0; i < COUNT; ++i) asm volatile(\"\" : \"+f\"(sums[i]) :: \"memory\");
}"
    host "template <u32 COUNT> inline void wgmma_wait(u32, f32 (&)[COUNT]) {}"
}

/// Makes this thread's writes to shared memory visible to products and bulk copies (the async proxy), once a barrier
/// has passed.
pub fn fence_proxy_async() {
    let thread = Thread::current();
    // Writes of the same tick stay before the fence.
    thread.block().proxy_fences[thread.index as usize].set(thread.launch().tick());
}

row! {
    /// Makes this thread's writes to shared memory visible to products and bulk copies (the async proxy), once a
    /// barrier has passed.
    Thread fence_proxy_async since 90
    cuda "__device__ __forceinline__ void fence_proxy_async() { asm volatile(\"fence.proxy.async.shared::cta;\" ::: \"memory\"); }"
    host "inline void fence_proxy_async() {}"
}
