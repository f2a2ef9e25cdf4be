//! Turns random bytes into the data of a tensor of a given type and size of values.
//!
//! Nothing is quantised: the codes of a block are random bits as they come, and only its scales are overwritten. Where
//! the scales lie comes from the layout table; how large the codes are on average is measured once per format by
//! decoding a few, so that no format needs a number of its own here.

use gemma4c_blocks::{Codes, DType, Layout, Minimum, Plane, Scale, reference};
use half::{bf16, f16};

use super::inventory::{Fill, MASSIVE_CHANNELS, Massive};
use super::random::Lanes;

/// Makes the data of one tensor, in any number of pieces.
pub(super) enum Filler {
    Floats {
        low: f32,
        span: f32,
    },
    /// 16-bit floats, evenly spread.
    Levels(Box<[u16; LEVELS]>),
    Blocks(Box<Blocks>),
    /// The values themselves.
    Exact(Vec<u8>),
    /// Another's values, but for massive channels.
    Channels(Box<Channels>),
}

/// What is done to massive channels.
pub(super) struct Channels {
    others: Filler,
    what: Massive,
    layout: &'static Layout,
    /// Values of a row.
    row: u64,
}

const LEVELS: usize = 4096;
/// Blocks decoded to measure a format.
const SAMPLE: usize = 1024;

/// Random codes under chosen scales.
pub(super) struct Blocks {
    layout: &'static Layout,
    /// The factor of a block as it is stored, picked by a random byte.
    scales: [Stored; 256],
    /// The half-precision minimum that centres a block with that factor.
    minima: [[u8; 2]; 256],
}

impl Filler {
    /// `unit_rms` gives [`unit_rms`] of a format; it takes a moment, so the caller keeps the answers.
    pub fn new(fill: Fill, dtype: DType, len: u64, unit_rms: impl FnOnce(DType) -> f32) -> Filler {
        // Evenly spread between -a and a, the root mean square is a/√3.
        let symmetric = |rms: f32| rms * 3f32.sqrt();
        match (fill, dtype) {
            (Fill::Between { low, high }, _) => Filler::Floats { low, span: high - low },
            (Fill::RopeFactors { rotated }, _) => {
                let factor = |i: u64| if i < rotated.into() { 1f32 } else { 1e30 };
                Filler::Exact((0..len / 4).flat_map(|i| factor(i).to_le_bytes()).collect())
            }
            (Fill::EveryToken, _) => {
                let count = len / 4;
                // A step that shares no factor with the count meets every number.
                let meets_all = |step: &u64| {
                    let (mut a, mut b) = (count, *step);
                    while b > 0 {
                        (a, b) = (b, a % b);
                    }
                    a == 1
                };
                let step = [40_503, 1].into_iter().find(meets_all).unwrap_or(1);
                Filler::Exact((0..count).flat_map(|i| ((i * step % count) as i32).to_le_bytes()).collect())
            }
            (Fill::Symmetric { rms }, DType::F32) => {
                Filler::Floats { low: -symmetric(rms), span: 2.0 * symmetric(rms) }
            }
            (Fill::Symmetric { rms }, DType::F16 | DType::BF16) => {
                let level = |i: usize| symmetric(rms) * ((2 * i + 1) as f32 / LEVELS as f32 - 1.0);
                let bits = |value| {
                    if dtype == DType::F16 { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() }
                };
                Filler::Levels(Box::new(std::array::from_fn(|i| bits(level(i)))))
            }
            (Fill::Symmetric { rms }, _) => Filler::Blocks(Box::new(Blocks::new(dtype, rms / unit_rms(dtype)))),
        }
    }

    /// The same with massive channels, in rows of this many values.
    pub fn with_massive(self, what: Massive, dtype: DType, row: u64) -> Filler {
        Filler::Channels(Box::new(Channels { others: self, what, layout: dtype.layout(), row }))
    }

    /// Fills `out`, which starts `offset` bytes into the tensor and holds whole blocks.
    pub fn fill(&self, random: &mut Lanes, offset: u64, out: &mut [u8]) {
        match self {
            Filler::Exact(bytes) => out.copy_from_slice(&bytes[offset as usize..][..out.len()]),
            Filler::Floats { low, span } => {
                random.fill(out);
                for value in out.as_chunks_mut::<4>().0 {
                    // 24 bits are what an f32 holds exactly.
                    let even = (u32::from_le_bytes(*value) >> 8) as f32 / (1 << 24) as f32;
                    *value = (low + span * even).to_le_bytes();
                }
            }
            Filler::Levels(levels) => {
                random.fill(out);
                for value in out.as_chunks_mut::<2>().0 {
                    *value = levels[u16::from_le_bytes(*value) as usize % LEVELS].to_le_bytes();
                }
            }
            Filler::Blocks(blocks) => {
                random.fill(out);
                blocks.set_scales(out);
            }
            Filler::Channels(channels) => {
                channels.others.fill(random, offset, out);
                channels.apply(offset, out);
            }
        }
    }
}

impl Channels {
    fn apply(&self, offset: u64, out: &mut [u8]) {
        let (bytes, len) = (self.layout.bytes as u64, self.layout.len as u64);
        let first = offset / bytes * len;
        let values = out.len() as u64 / bytes * len;
        for row in first / self.row..=(first + values) / self.row {
            let columns: &mut dyn Iterator<Item = u64> = match self.what {
                Massive::Untouched => return,
                Massive::Times(_) => &mut MASSIVE_CHANNELS.into_iter(),
                Massive::Rows(_) if MASSIVE_CHANNELS.contains(&row) => &mut (0..self.row),
                Massive::Rows(_) => continue,
            };
            for column in columns {
                let at = (row * self.row + column).wrapping_sub(first);
                if at < values {
                    let block = &mut out[(at / len * bytes) as usize..][..bytes as usize];
                    let i = (at % len) as usize;
                    let value = match self.what {
                        Massive::Times(factor) => reference::value(self.layout, block, i) * factor,
                        Massive::Rows(value) => value,
                        Massive::Untouched => return,
                    };
                    self.set(block, i, value);
                }
            }
        }
    }

    /// Sets a value, in blocks to that code of all which comes nearest: scales and minima stay.
    fn set(&self, block: &mut [u8], i: usize, value: f32) {
        let (low, high) = match (self.layout.codes, self.layout.dtype) {
            (Codes::Float, DType::F16) => return block.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            (Codes::Float, DType::BF16) => return block.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            (Codes::Float, _) => return block.copy_from_slice(&value.to_le_bytes()),
            (Codes::Signed { plane: low } | Codes::Table { low, .. }, _) => (low, None),
            (Codes::Unsigned { low, high, .. }, _) => (low, high),
            (Codes::E4M3 { plane }, _) => (plane, None),
            (Codes::Grid { .. }, _) => unreachable!("no value of a grid is set alone: `can_be_set`"),
        };
        let mut put = |code: usize| {
            put_bits(block, low, i, code % (1 << low.bits));
            if let Some(plane) = high {
                put_bits(block, plane, i, code >> low.bits);
            }
            (reference::value(self.layout, block, i) - value).abs()
        };
        let codes = 1usize << (low.bits + high.map_or(0, |plane| plane.bits));
        let off: Vec<f32> = (0..codes).map(&mut put).collect();
        let nearest = (0..codes).min_by(|a, b| off[*a].total_cmp(&off[*b]));
        put(nearest.unwrap_or(0));
    }
}

/// Whether single values of the type can be set: not those that a grid has together, nor where codes are so few that
/// the nearest may be far.
pub(super) fn can_be_set(dtype: DType) -> bool {
    let layout = dtype.layout();
    match layout.codes {
        Codes::Grid { .. } => false,
        Codes::Unsigned { low, high, .. } => low.bits + high.map_or(0, |plane| plane.bits) >= 4,
        Codes::Table { .. } => !matches!(layout.scale, Scale::Exponent { .. } | Scale::Floats16 { .. }),
        Codes::Float | Codes::Signed { .. } | Codes::E4M3 { .. } => true,
    }
}

fn put_bits(block: &mut [u8], plane: Plane, i: usize, bits: usize) {
    let (byte, shift) = plane.locate(i);
    let mask = ((1usize << plane.bits) - 1) << shift;
    block[byte] = (block[byte] as usize & !mask | bits << shift) as u8;
}

impl Blocks {
    fn new(dtype: DType, scale: f32) -> Blocks {
        let layout = dtype.layout();
        // Factors from half to one and a half of `scale`. Formats without a minimum have codes that lean to one side,
        // so half of their blocks are turned over: a lean common to all rows would grow from layer to layer.
        let factor = |i: usize| {
            let size = scale * (0.5 + (i % 128) as f32 / 127.0);
            if i >= 128 && layout.minimum == Minimum::Zero { -size } else { size }
        };
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        let stored = |i: usize| match layout.scale {
            Scale::Brain { .. } => Stored::two(bf16::from_f32(factor(i)).to_le_bytes()),
            Scale::Single { .. } => Stored { bytes: factor(i).to_le_bytes(), len: 4 },
            Scale::Exponent { .. } => Stored::one(exponent_of(scale, i)),
            // From 0.5 to 1.5: the size of the values is in the tensor's own factor.
            Scale::Floats16 { .. } => Stored::one(E4M3_HALF + (i % 13) as u8),
            _ => Stored::two(half(factor(i))),
        };
        let centre = match layout.minimum {
            Minimum::Zero => 0.0,
            // Added as it is.
            Minimum::Half { .. } => -mean_code(layout),
            // Subtracted, times an integer as large on average as that of the scale.
            Minimum::Packed6 { .. } | Minimum::HighNibbles16 { .. } => mean_code(layout),
            Minimum::ZeroPoint { .. } => 0.0,
        };
        Blocks {
            layout,
            scales: std::array::from_fn(stored),
            minima: std::array::from_fn(|i| half(factor(i) * centre)),
        }
    }

    fn set_scales(&self, out: &mut [u8]) {
        let at = scale_offset(self.layout);
        match (self.layout.scale, self.layout.minimum) {
            (Scale::Packed6 { packed, .. }, Minimum::Packed6 { half: minimum, .. }) => self.each(out, |block, pick| {
                self.scales[pick].put(block, at);
                put(block, minimum, self.minima[pick]);
                // The top bit of every 6-bit integer, scales and minima, first and last four: 32 to 63.
                block[packed..packed + 8].iter_mut().for_each(|byte| *byte |= 0xa0);
            }),
            (Scale::Bytes16 { bytes, .. }, _) => self.each(out, |block, pick| {
                self.scales[pick].put(block, at);
                // 32 to 63 or -33 to -64.
                let signed = |byte: u8| (byte & 0x1f | 0x20) ^ ((byte as i8 >> 7) as u8);
                block[bytes..bytes + 16].iter_mut().for_each(|byte| *byte = signed(*byte));
            }),
            (_, Minimum::Half { offset: minimum } | Minimum::HighNibbles16 { half: minimum, .. }) => {
                self.each(out, |block, pick| {
                    self.scales[pick].put(block, at);
                    put(block, minimum, self.minima[pick]);
                })
            }
            // In a file the block begins with its four scales.
            (Scale::Floats16 { .. }, _) => self.each(out, |block, _| {
                (0..4).for_each(|part| self.scales[block[part] as usize].put(block, part));
            }),
            (_, Minimum::ZeroPoint { offset: zero }) => self.each(out, |block, pick| {
                self.scales[pick].put(block, at);
                put(block, zero, (7 + pick as u16 % 2).to_le_bytes());
            }),
            (_, _) if matches!(self.layout.codes, Codes::E4M3 { .. }) => self.each(out, |block, pick| {
                self.scales[pick].put(block, at);
                // Neither NaN nor the upper exponents, which would make few values large and the others nothing.
                block[at + self.scales[pick].len..].iter_mut().for_each(|code| *code &= 0xbf);
            }),
            _ => self.each(out, |block, pick| self.scales[pick].put(block, at)),
        }
    }

    /// Calls `set` for every block with the random byte that stands where its factor will.
    fn each(&self, out: &mut [u8], set: impl Fn(&mut [u8], usize)) {
        let at = scale_offset(self.layout);
        for block in out.chunks_exact_mut(self.layout.file_bytes) {
            let pick = block[at] as usize;
            set(block, pick);
        }
    }
}

/// A block's factor in the bytes of its format.
#[derive(Clone, Copy)]
struct Stored {
    bytes: [u8; 4],
    len: usize,
}

impl Stored {
    fn one(byte: u8) -> Stored {
        Stored { bytes: [byte, 0, 0, 0], len: 1 }
    }

    fn two(bytes: [u8; 2]) -> Stored {
        Stored { bytes: [bytes[0], bytes[1], 0, 0], len: 2 }
    }

    fn put(&self, block: &mut [u8], offset: usize) {
        block[offset..offset + self.len].copy_from_slice(&self.bytes[..self.len]);
    }
}

/// 0.5 as an e4m3; each step up to 1.5 is a sixteenth or an eighth more.
const E4M3_HALF: u8 = 0x30;

/// Factor `i` of 256 that are powers of two, and in the mean of their squares as large as others are: a share of them
/// is twice the rest.
fn exponent_of(scale: f32, i: usize) -> u8 {
    let square = scale * scale * (1.0 + 1.0 / 12.0);
    let exponent = square.log2().div_euclid(2.0);
    let share = (square / (2.0 * exponent).exp2() - 1.0) / 3.0;
    // Levels are doubled, and the stored exponent is 127 more.
    (exponent as i32 + 128 + i32::from((i as f32) < share * 256.0)) as u8
}

/// Where the factor of a file's block lies: at the front, where its four scales are, if the file has it elsewhere.
fn scale_offset(layout: &Layout) -> usize {
    let is_elsewhere = layout.file_bytes < layout.bytes;
    layout.scale.factor().filter(|_| !is_elsewhere).map_or(0, |(at, _)| at)
}

fn put(block: &mut [u8], offset: usize, half: [u8; 2]) {
    block[offset..offset + 2].copy_from_slice(&half);
}

/// The mean of an unsigned code.
fn mean_code(layout: &Layout) -> f32 {
    match layout.codes {
        Codes::Unsigned { low, high, zero } => {
            let bits = low.bits + high.map_or(0, |plane| plane.bits);
            ((1 << bits) - 1) as f32 / 2.0 - zero as f32
        }
        Codes::Float | Codes::Signed { .. } | Codes::Table { .. } | Codes::E4M3 { .. } | Codes::Grid { .. } => 0.0,
    }
}

/// Root mean square of the values of random blocks whose scales are around 1.
pub(super) fn unit_rms(dtype: DType) -> f32 {
    let layout = dtype.layout();
    let blocks = Blocks::new(dtype, 1.0);
    let mut bytes = vec![0; SAMPLE * layout.file_bytes];
    Lanes::new(0, 0, 0).fill(&mut bytes);
    // Every scale as often as any other: their spread would blur a sample this small.
    for (i, block) in bytes.chunks_exact_mut(layout.file_bytes).enumerate() {
        block[scale_offset(layout)] = i as u8;
    }
    blocks.set_scales(&mut bytes);
    let squares: f64 = loaded(layout, &bytes)
        .chunks_exact(layout.bytes)
        .flat_map(|block| (0..layout.len).map(|i| f64::from(reference::value(layout, block, i)).powi(2)))
        .sum();
    (squares / (SAMPLE * layout.len) as f64).sqrt() as f32
}

/// A file's blocks as they are when loaded, where their tensor's factor is 1.
fn loaded(layout: &Layout, blocks: &[u8]) -> Vec<u8> {
    let factor = if layout.file_bytes < layout.bytes { &1f32.to_le_bytes()[..] } else { &[] };
    blocks.chunks_exact(layout.file_bytes).flat_map(|block| [factor, block].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In whatever piece a massive channel lies, it is set, in blocks as nearly as their codes can; no other value
    /// changes.
    #[test]
    fn massive_channels_are_set_and_no_others() {
        let row = 512;
        let of_types = DType::ALL.into_iter().filter(|dtype| can_be_set(*dtype));
        let of_types = of_types.map(|dtype| (dtype, Massive::Times(0.0)));
        for (dtype, what) in of_types.chain([(DType::F32, Massive::Times(5000.0)), (DType::Q8_0, Massive::Rows(0.04))])
        {
            let layout = dtype.layout();
            let bytes = row / layout.len * layout.bytes;
            let filler = || Filler::new(Fill::Symmetric { rms: 0.05 }, dtype, (64 * bytes) as u64, unit_rms);
            // From the last row before a massive one on: two rows and a half.
            let start = 36;
            let fill = |filler: Filler| {
                let mut out = vec![0; bytes * 5 / 2];
                filler.fill(&mut Lanes::new(1, 2, 3), (start * bytes) as u64, &mut out);
                out
            };
            let (plain, out) = (fill(filler()), fill(filler().with_massive(what, dtype, row as u64)));
            let value = |data: &[u8], i: usize| {
                reference::value(layout, &data[i / layout.len * layout.bytes..][..layout.bytes], i % layout.len)
            };
            for i in 0..row * 5 / 2 {
                let (before, after) = (value(&plain, i), value(&out, i));
                let is_massive = |channel: usize| MASSIVE_CHANNELS.contains(&(channel as u64));
                let wanted = match what {
                    Massive::Times(factor) if is_massive(i % row) => Some(before * factor),
                    Massive::Rows(value) if is_massive(start + i / row) => Some(value),
                    _ => None,
                };
                match wanted {
                    Some(wanted) if layout.codes == Codes::Float => assert_eq!(after, wanted, "{dtype} {i}"),
                    // Half of a code, of the 16 or more that spread over four times the rms.
                    Some(wanted) => assert!((after - wanted).abs() < 0.01, "{dtype} {i}: {after} for {wanted}"),
                    None => assert_eq!(after.to_bits(), before.to_bits(), "{dtype} {i}"),
                }
            }
        }
    }

    #[test]
    fn a_file_of_nvfp4_has_the_size_that_its_factors_are_made_for() {
        let off = unit_rms(DType::NVFP4) / super::super::inventory::NVFP4_UNIT_RMS - 1.0;
        assert!(off.abs() < 0.01, "{off}");
    }

    /// Values of every type have the size asked for, do not lean to one side, and are numbers.
    #[test]
    fn every_type_has_the_size_asked_for() {
        for dtype in DType::ALL {
            // The smallest and about the largest a real model has: f16 scales are subnormal in the first.
            for rms in [0.0017, 0.06] {
                let layout = dtype.layout();
                // The size of a file's NVFP4 is in a tensor of its own.
                let rms = if dtype == DType::NVFP4 { unit_rms(dtype) } else { rms };
                let mut bytes = vec![0; 4096 * 256 / layout.len * layout.file_bytes];
                let filler = Filler::new(Fill::Symmetric { rms }, dtype, bytes.len() as u64, unit_rms);
                filler.fill(&mut Lanes::new(1, 2, 3), 0, &mut bytes);
                let bytes = loaded(layout, &bytes);
                let blocks = bytes.chunks_exact(layout.bytes);
                let values: Vec<f64> =
                    blocks.flat_map(|b| (0..layout.len).map(|i| f64::from(reference::value(layout, b, i)))).collect();
                let count = values.len() as f64;
                let mean = values.iter().sum::<f64>() / count;
                let found = (values.iter().map(|v| v * v).sum::<f64>() / count).sqrt();
                let off = found / f64::from(rms) - 1.0;
                assert!(off.abs() < 0.03, "{dtype} {rms}: {found}");
                assert!((mean / found).abs() < 0.01, "{dtype} {rms}: mean {mean}");
                assert!(values.iter().all(|v| v.abs() < 8.0 * found), "{dtype} {rms}");
            }
        }
    }
}
