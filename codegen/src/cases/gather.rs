//! Cases of the gather: every type, one row and many, widths that leave a block's threads over, hostile tokens.

use gemma4c_blocks::{Codes, DType, Scale, reference};
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, F16};

use crate::kernels::gather;
use crate::kernels::matvec::formats::types_with_kernels;

/// The row of a token, decoded by the block table alone.
fn oracle(dtype: DType, table: &[u8], width: usize, vocabulary: usize, token: u32, scale: f32) -> Vec<f32> {
    let layout = dtype.layout();
    let row_bytes = width / layout.len * layout.bytes;
    let row = &table[(token as usize).min(vocabulary - 1) * row_bytes..][..row_bytes];
    let blocks = row.chunks_exact(layout.bytes);
    blocks.flat_map(|block| (0..layout.len).map(|i| reference::value(layout, block, i) * scale)).collect()
}

/// Random blocks whose half-precision fields are numbers: random bits would sometimes be infinite.
pub fn table(dtype: DType, values: usize, random: &mut Random) -> Vec<u8> {
    let layout = dtype.layout();
    let mut table = random.bytes(values / layout.len * layout.bytes);
    let finite = |high: &mut u8| *high &= 0xbb;
    for block in table.chunks_exact_mut(layout.bytes) {
        match dtype {
            DType::F32 => block[3] &= 0xbf,
            DType::F16 => finite(&mut block[1]),
            DType::BF16 => block[1] &= 0xbf,
            DType::Q6K => finite(&mut block[209]),
            DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => {
                finite(&mut block[1]);
                finite(&mut block[3]);
            }
            _ => match layout.scale {
                Scale::Brain { .. } => block[1] &= 0xbf,
                Scale::Single { .. } | Scale::Floats16 { .. } => block[3] &= 0xbf,
                Scale::Exponent { offset } => block[offset] &= 0x7f,
                _ => finite(&mut block[1]),
            },
        }
        if let Codes::E4M3 { plane } = layout.codes {
            block[plane.offset..].iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code ^= 1);
        }
    }
    table
}

pub fn elements(dtype: DType, bytes: Vec<u8>) -> Data {
    let halves = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        DType::F32 => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>().into()
        }
        DType::F16 => halves().map(F16::from_bits).collect::<Vec<_>>().into(),
        DType::BF16 => halves().map(BF16::from_bits).collect::<Vec<_>>().into(),
        _ => bytes.into(),
    }
}

fn case(dtype: DType, width: usize, tokens: &[u32], scale: f32) -> Case {
    let vocabulary = 5;
    let bytes = table(dtype, width * vocabulary, &mut Random::new(width as u64 + dtype as u64));
    let expected: Vec<f32> =
        tokens.iter().flat_map(|token| oracle(dtype, &bytes, width, vocabulary, *token, scale)).collect();
    let instance = gather::instance(dtype).expect("every type has a kernel");
    let grid = gather::grid(&instance, width as u32, tokens.len() as u32);
    Case::new(format!("{dtype}, {} rows of {width}", tokens.len()), instance)
        .grid(grid)
        .buffer("tokens", tokens)
        .buffer("value_tensor", elements(dtype, bytes))
        .scalar("width", width as u32)
        .scalar("vocabulary", vocabulary as u32)
        .scalar("token_stride", 1u32)
        .scalar("scale", scale)
        .expect("out", expected, Bound::Exact)
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in types_with_kernels() {
        let block = dtype.layout().len;
        // The embedding's factor is the root of a width, the per-layer table's is 16.
        cases.push(case(dtype, 512, &[3], 50.596_443));
        // The last block of threads is not full, and tokens repeat, come in no order, and leave the table.
        let width = match block {
            256 => 768,
            64 => 448,
            _ => 352,
        };
        cases.push(case(dtype, width, &[4, 0, 0, 2, u32::MAX], 16.0));
    }
    cases.push(case(DType::F32, 7, &[1, 4], 1.0));
    cases.push(case(DType::Q8_0, 1536, &[2], 39.191_837));
    cases
}
