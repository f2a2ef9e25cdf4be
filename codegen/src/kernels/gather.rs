//! Rows of an embedding table: gathered by token, decoded and scaled, straight from the file's blocks.
//!
//! Only the rows of the tokens at hand are read, so a table stays in its GGUF layout. One kernel decodes every block
//! format: the format is [`Layout`], spelled out as compile-time parameters, and the kernel's arithmetic is that of
//! [`gemma4c_blocks::reference`], so the values are the same bits. A thread takes one value: neighbours share the bytes
//! of their block, and nothing here is worth more than the latency of one read.

use gemma4c_blocks::{Codes, DType, Layout, Minimum, Plane, Scale};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceBuilder, InstanceError};

/// Blocks for `rows` rows of `width` values.
pub fn grid(instance: &Instance, width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(instance.block()), rows, 1]
}

/// The bits of element `i` in a plane: see `Plane` of the block formats.
#[device]
pub fn plane_bits(block: Weights<u8>, i: u32, at: u32, bits: u32, run: u32, span: u32) -> u32 {
    let byte = block[at + run * (i / span) + i % run] as u32;
    byte >> (bits * (i % span / run)) & ((1u32 << bits) - 1)
}

/// Two of eight 6-bit integers packed into 12 bytes: the scale (x) and the minimum (y) of group `k`.
#[device]
pub fn packed6(block: Weights<u8>, at: u32, k: u32) -> U32x2 {
    let low = block[at + k] as u32;
    let middle = block[at + k % 4 + 4] as u32;
    let high = block[at + k % 4 + 8] as u32;
    let first = block[at + k % 4] as u32;
    let scale = if k < 4 { low & 63 } else { high & 15 | first >> 6 << 4 };
    let minimum = if k < 4 { middle & 63 } else { high >> 4 | middle >> 6 << 4 };
    u32x2(scale, minimum)
}

/// One of 16 signed levels, four to a word.
#[device]
pub fn level_of<const LEVELS_0: u32, const LEVELS_1: u32, const LEVELS_2: u32, const LEVELS_3: u32>(code: u32) -> i32 {
    let lower = if code < 4 { LEVELS_0 } else { LEVELS_1 };
    let upper = if code < 12 { LEVELS_2 } else { LEVELS_3 };
    signed_byte_of(if code < 8 { lower } else { upper }, code % 4)
}

/// `out[row] = scale * table[tokens[row]]`, the table in blocks of LEN values and BYTES bytes. A token beyond the table
/// reads its last row: rows past the end of a prompt hold whatever was there.
#[kernel(block = 256, dependent)]
pub fn gather_blocks<
    const LEN: u32,
    const BYTES: u32,
    const LOW_AT: u32,
    const LOW_BITS: u32,
    const LOW_RUN: u32,
    const LOW_SPAN: u32,
    const HIGH_AT: u32,
    const HIGH_BITS: u32,
    const HIGH_RUN: u32,
    const HIGH_SPAN: u32,
    const ZERO: i32,
    const SIGNED: bool,
    const LEVELS: bool,
    const LEVELS_0: u32,
    const LEVELS_1: u32,
    const LEVELS_2: u32,
    const LEVELS_3: u32,
    const HALF_AT: u32,
    const SCALE_PACKED6: bool,
    const SCALE_BYTES16: bool,
    const SCALE_SPLIT6: bool,
    const SCALE_AT: u32,
    const SCALE_HIGH_AT: u32,
    const MINIMUM_HALF: bool,
    const MINIMUM_PACKED6: bool,
    const MINIMUM_AT: u32,
>(
    tokens: Input<u32>,
    table: Weights<u8>,
    out: Output<f32>,
    width: u32,
    vocabulary: u32,
    scale: f32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let at = block_idx() * block_dim() + thread_idx();
    if at < width {
        let token = tokens[row].min(vocabulary - 1);
        // A table may be larger than 4 GiB.
        let row_bytes = (width / LEN * BYTES) as u64;
        let block = table.offset(token as u64 * row_bytes + (at / LEN * BYTES) as u64);
        let i = at % LEN;

        let low = plane_bits(block, i, LOW_AT, LOW_BITS, LOW_RUN, LOW_SPAN);
        let high = plane_bits(block, i, HIGH_AT, HIGH_BITS, HIGH_RUN, HIGH_SPAN);
        let mut code = (low | high << LOW_BITS) as i32 - ZERO;
        if SIGNED {
            code = low as i8 as i32;
        }
        if LEVELS {
            code = level_of(low);
        }

        let mut factor = load::<F16>(block, HALF_AT).to_f32();
        if SCALE_PACKED6 {
            factor = factor * packed6(block, SCALE_AT, i / 32).x as f32;
        }
        if SCALE_BYTES16 {
            factor = factor * (block[SCALE_AT + i / 16] as i8 as i32) as f32;
        }
        if SCALE_SPLIT6 {
            let k = i / 32;
            let four_bits = block[SCALE_AT + k / 2] as u32 >> (4 * (k % 2)) & 15;
            let two_bits = load::<u16>(block, SCALE_HIGH_AT) as u32 >> (2 * k) & 3;
            factor = factor * ((four_bits | two_bits << 4) as i32 - 32) as f32;
        }

        // Without a minimum nothing is added, not even zero: a negative scale times code 0 stays -0.0.
        let mut value = factor * code as f32;
        if MINIMUM_HALF {
            value = value + load::<F16>(block, MINIMUM_AT).to_f32();
        }
        if MINIMUM_PACKED6 {
            let minimum = packed6(block, SCALE_AT, i / 32).y as f32;
            value = value + -(load::<F16>(block, MINIMUM_AT).to_f32() * minimum);
        }
        out[row * width + at] = value * scale;
    }
}

/// `out[row] = scale * table[tokens[row]]`, the table in floats. A token beyond the table reads its last row.
#[kernel(block = 256, dependent)]
pub fn gather_floats<T: Float>(
    tokens: Input<u32>,
    table: Weights<T>,
    out: Output<f32>,
    width: u32,
    vocabulary: u32,
    scale: f32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let at = block_idx() * block_dim() + thread_idx();
    if at < width {
        let token = tokens[row].min(vocabulary - 1);
        out[row * width + at] = table[token as u64 * width as u64 + at as u64].to_f32() * scale;
    }
}

/// The kernel for tables of that type: `gather_floats` or `gather_blocks`.
pub fn instance(dtype: DType) -> Result<Instance, InstanceError> {
    let floats = |ty| Instance::of(gather_floats::DEF).element("T", ty).build();
    match dtype {
        DType::F32 => floats(ElementType::F32),
        DType::F16 => floats(ElementType::F16),
        DType::BF16 => floats(ElementType::BF16),
        quantised => blocks(quantised.layout()),
    }
}

/// One instance a type: widths are launch parameters.
pub fn instances() -> Vec<(String, Instance)> {
    let named = |dtype: DType| instance(dtype).map(|instance| (dtype.name().to_owned(), instance));
    DType::ALL.into_iter().map(named).collect::<Result<_, _>>().expect("every block format has its parameters")
}

/// A block format as compile-time parameters.
fn blocks(layout: &Layout) -> Result<Instance, InstanceError> {
    let none = Plane { offset: 0, bits: 0, run: 1 };
    let (low, high, zero, levels) = match layout.codes {
        Codes::Float => (none, none, 0, None),
        Codes::Signed { plane } => (plane, none, 0, None),
        Codes::Unsigned { low, high, zero } => (low, high.unwrap_or(none), zero, None),
        Codes::Table { low, levels } => (low, none, 0, Some(levels)),
    };
    let (half, scale_at, scale_high) = match layout.scale {
        Scale::One => (0, 0, 0),
        Scale::Half { offset } => (offset, 0, 0),
        Scale::Packed6 { half, packed } => (half, packed, 0),
        Scale::Bytes16 { half, bytes } => (half, bytes, 0),
        Scale::Split6 { half, high, low } => (half, low, high),
    };
    let minimum_at = match layout.minimum {
        Minimum::Zero => 0,
        Minimum::Half { offset } => offset,
        Minimum::Packed6 { half, .. } => half,
    };
    let mut builder = Instance::of(gather_blocks::DEF)
        .constant("LEN", layout.len as u32)
        .constant("BYTES", layout.bytes as u32)
        .constant("ZERO", zero)
        .constant("SIGNED", matches!(layout.codes, Codes::Signed { .. }))
        .constant("LEVELS", levels.is_some())
        .constant("HALF_AT", half as u32)
        .constant("SCALE_PACKED6", matches!(layout.scale, Scale::Packed6 { .. }))
        .constant("SCALE_BYTES16", matches!(layout.scale, Scale::Bytes16 { .. }))
        .constant("SCALE_SPLIT6", matches!(layout.scale, Scale::Split6 { .. }))
        .constant("SCALE_AT", scale_at as u32)
        .constant("SCALE_HIGH_AT", scale_high as u32)
        .constant("MINIMUM_HALF", matches!(layout.minimum, Minimum::Half { .. }))
        .constant("MINIMUM_PACKED6", matches!(layout.minimum, Minimum::Packed6 { .. }))
        .constant("MINIMUM_AT", minimum_at as u32);
    builder = plane(builder, "LOW", low);
    builder = plane(builder, "HIGH", high);
    for (word, name) in ["LEVELS_0", "LEVELS_1", "LEVELS_2", "LEVELS_3"].into_iter().enumerate() {
        let bytes: [u8; 4] = std::array::from_fn(|i| levels.map_or(0, |levels| levels[4 * word + i] as u8));
        builder = builder.constant(name, u32::from_le_bytes(bytes));
    }
    builder.build()
}

/// A plane of no bits reads as zero, at byte 0 whatever the element.
fn plane(builder: InstanceBuilder, name: &str, plane: Plane) -> InstanceBuilder {
    let span = (plane.run * 8).checked_div(plane.bits).map_or(u32::MAX, |span| span as u32);
    builder
        .constant(&format!("{name}_AT"), plane.offset as u32)
        .constant(&format!("{name}_BITS"), plane.bits as u32)
        .constant(&format!("{name}_RUN"), plane.run as u32)
        .constant(&format!("{name}_SPAN"), span)
}
