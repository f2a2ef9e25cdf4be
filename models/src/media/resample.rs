//! Bicubic resampling as Pillow does it, to the bit: it is what the model was trained on.
//!
//! Weights are computed in f64 and rounded to 22 bits behind the point. Columns are resampled first, then rows; what
//! lies between is rounded to 8 bits. Each pass is an integer sum, so that neither order nor machine matters.

use rayon::prelude::*;

use super::picture::{Pixels, Rgb};

/// Bits behind the point of a weight: eight are the pixel's, and two are left for sums beyond its range.
const PRECISION: u32 = 32 - 8 - 2;
/// How far the filter reaches, in source pixels where the picture does not shrink.
const SUPPORT: f64 = 2.0;

/// Brings a picture to another size. A side that is right already is left alone.
pub fn resample(picture: &Rgb, size: Pixels) -> Rgb {
    let columns = columns(picture, size.width);
    rows(&columns, size.height)
}

/// The source pixels of one target pixel, and their weights.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// For each of `to` pixels along a side of `from`.
fn taps(from: u32, to: u32) -> Vec<Taps> {
    let scale = f64::from(from) / f64::from(to);
    // A picture that shrinks is smoothed: the filter is stretched.
    let stretch = scale.max(1.0);
    let support = SUPPORT * stretch;
    let tap = |at: u32| {
        let centre = (f64::from(at) + 0.5) * scale;
        // The cast drops the fraction, as C does.
        let first = ((centre - support + 0.5) as i64).max(0);
        let end = ((centre + support + 0.5) as i64).min(i64::from(from));
        let weight = |pixel: i64| bicubic((pixel as f64 - centre + 0.5) * (1.0 / stretch));
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let weights = weights.into_iter().map(|weight| if sum == 0.0 { weight } else { weight / sum }).map(rounded);
        Taps { first: first as usize, weights: weights.collect() }
    };
    (0..to).map(tap).collect()
}

/// Keys' filter with a = -0.5.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    match x.abs() {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
        _ => 0.0,
    }
}

fn rounded(weight: f64) -> i32 {
    let scaled = weight * f64::from(1 << PRECISION);
    (if scaled < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32
}

fn pixel(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (PRECISION - 1);

fn columns(picture: &Rgb, width: u32) -> Rgb {
    let Pixels { width: from, height } = picture.size;
    if from == width {
        return picture.clone();
    }
    let taps = taps(from, width);
    let mut bytes = vec![0; width as usize * height as usize * 3];
    let rows = bytes.par_chunks_exact_mut(width as usize * 3).zip(picture.bytes.par_chunks_exact(from as usize * 3));
    rows.for_each(|(out, row)| {
        for (out, tap) in out.chunks_exact_mut(3).zip(&taps) {
            let mut sums = [HALF; 3];
            for (source, weight) in row[tap.first * 3..].chunks_exact(3).zip(&tap.weights) {
                for (sum, source) in sums.iter_mut().zip(source) {
                    *sum += i32::from(*source) * weight;
                }
            }
            out.copy_from_slice(&sums.map(pixel));
        }
    });
    Rgb { size: Pixels { width, height }, bytes }
}

fn rows(picture: &Rgb, height: u32) -> Rgb {
    let Pixels { width, height: from } = picture.size;
    if from == height {
        return picture.clone();
    }
    let (taps, row_bytes) = (taps(from, height), width as usize * 3);
    let mut bytes = vec![0; row_bytes * height as usize];
    bytes.par_chunks_exact_mut(row_bytes).zip(&taps).for_each(|(out, tap)| {
        let mut sums = vec![HALF; row_bytes];
        for (row, weight) in picture.bytes[tap.first * row_bytes..].chunks_exact(row_bytes).zip(&tap.weights) {
            for (sum, source) in sums.iter_mut().zip(row) {
                *sum += i32::from(*source) * weight;
            }
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = pixel(sum));
    });
    Rgb { size: Pixels { width, height }, bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(width: u32, height: u32) -> Rgb {
        let bytes = (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        Rgb { size: Pixels { width, height }, bytes }
    }

    #[test]
    fn one_colour_stays_one_colour_and_the_same_size_changes_nothing() {
        let plain = Rgb { size: Pixels { width: 31, height: 7 }, bytes: [3u8, 200, 255].repeat(31 * 7) };
        for (width, height) in [(48, 48), (5, 3), (31, 96), (480, 7)] {
            let out = resample(&plain, Pixels { width, height });
            assert!(out.bytes.chunks(3).all(|pixel| pixel == [3, 200, 255]), "{width}x{height}");
        }
        let noise = picture(33, 17);
        assert_eq!(resample(&noise, noise.size), noise);
    }

    #[test]
    fn weights_sum_to_one_and_stay_within_the_picture() {
        for (from, to) in [(150, 480), (4000, 480), (1, 48), (7, 3), (480, 481)] {
            for (at, tap) in taps(from, to).iter().enumerate() {
                let sum: i64 = tap.weights.iter().map(|w| i64::from(*w)).sum();
                assert!((sum - (1 << PRECISION)).abs() <= tap.weights.len() as i64, "{from} to {to}, pixel {at}");
                assert!(tap.first + tap.weights.len() <= from as usize);
            }
        }
    }

    /// The values are Pillow's: `Image.resize((w, h), BICUBIC)` of a ramp.
    #[test]
    fn a_ramp_as_pillow_resamples_it() {
        let ramp: Vec<u8> = [0u8, 60, 120, 255].iter().flat_map(|v| [*v; 3]).collect();
        let ramp = Rgb { size: Pixels { width: 4, height: 1 }, bytes: ramp };
        let row =
            |width| resample(&ramp, Pixels { width, height: 1 }).bytes.iter().step_by(3).copied().collect::<Vec<_>>();
        assert_eq!(row(8), [0, 10, 43, 73, 100, 154, 231, 255]);
        assert_eq!(row(3), [11, 87, 225]);
    }
}
