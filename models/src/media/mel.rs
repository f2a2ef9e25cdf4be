//! Samples to the frames that a tower reads: log-mel features, or the samples themselves.

use gemma4c_plan::Medium;
use rayon::prelude::*;
use rustfft::FftPlannerScalar;
use rustfft::num_complex::Complex;

use super::SoundError;
use super::sound::RATE;

/// Samples from one frame of features to the next.
pub const HOP: u32 = 160;
/// Samples of a frame.
const WINDOW: usize = 320;
/// Samples of the transform; what is beyond the window is zero.
const TRANSFORM: usize = 512;
/// Frames that a thread takes at a time.
const FRAMES_A_TASK: usize = 16;
/// Added before the logarithm.
const FLOOR: f64 = 1e-3;

/// A sound cut into frames, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Frames {
    pub values: Vec<f32>,
    pub count: u32,
}

/// The frames of a sound for a tower that reads `medium`.
pub fn frames(medium: Medium, samples: &[f32]) -> Result<Frames, SoundError> {
    let values = match medium {
        Medium::Samples { frame } => {
            let mut values = samples.to_vec();
            values.resize(samples.len().next_multiple_of(frame as usize), 0.0);
            values
        }
        Medium::Mel { bins } => mel(samples, bins as usize),
        Medium::Picture { .. } => Vec::new(),
    };
    match values.len() / medium.row_width() as usize {
        0 => Err(SoundError::TooShort { samples: samples.len() }),
        count => Ok(Frames { values, count: count as u32 }),
    }
}

/// The logarithms of the energies of `bins` bands. The scalar transform gives the same bits on every machine.
fn mel(samples: &[f32], bins: usize) -> Vec<f32> {
    // One hop of silence comes first, and a frame needs a sample beyond its end.
    let hop = HOP as usize;
    let at = |n: usize| n.checked_sub(hop).and_then(|n| samples.get(n)).map_or(0.0, |sample| f64::from(*sample));
    let count = (samples.len() + hop).checked_sub(WINDOW + 1).map_or(0, |rest| rest / hop + 1);
    let angle = |n: usize| std::f64::consts::TAU * n as f64 / WINDOW as f64;
    let window: Vec<f64> = (0..WINDOW).map(|n| 0.5 - 0.5 * angle(n).cos()).collect();
    let (filters, transform) = (filters(bins), FftPlannerScalar::<f64>::new().plan_fft_forward(TRANSFORM));
    let mut values = vec![0.0; count * bins];
    // Frames know nothing of each other: whoever computes one, its bits are the same.
    values.par_chunks_mut(bins * FRAMES_A_TASK).enumerate().for_each(|(task, values)| {
        let mut spectrum = vec![Complex::default(); TRANSFORM];
        let mut scratch = vec![Complex::default(); transform.get_inplace_scratch_len()];
        for (frame, values) in (task * FRAMES_A_TASK..).zip(values.chunks_exact_mut(bins)) {
            spectrum.fill(Complex::default());
            for (n, (out, window)) in spectrum.iter_mut().zip(&window).enumerate() {
                out.re = at(frame * hop + n) * window;
            }
            transform.process_with_scratch(&mut spectrum, &mut scratch);
            let sizes: Vec<f64> = spectrum[..=TRANSFORM / 2].iter().map(|value| value.norm()).collect();
            for (value, filter) in values.iter_mut().zip(&filters) {
                let bands = sizes[filter.first..].iter().zip(&filter.weights);
                *value = (bands.map(|(size, weight)| size * weight).sum::<f64>() + FLOOR).ln() as f32;
            }
        }
    });
    values
}

/// A triangle over the transform's frequencies.
struct Filter {
    first: usize,
    weights: Vec<f64>,
}

/// Triangles of height 1 whose corners are equally spaced in mel, from 0 to half the rate.
fn filters(bins: usize) -> Vec<Filter> {
    let half = f64::from(RATE) / 2.0;
    let highest = 2595.0 * (1.0 + half / 700.0).log10();
    let hertz = |corner: usize| 700.0 * (10f64.powf(highest * corner as f64 / (bins + 1) as f64 / 2595.0) - 1.0);
    let filter = |bin: usize| {
        let [left, centre, right] = [0, 1, 2].map(|corner| hertz(bin + corner));
        let weight = |k: usize| {
            let frequency = k as f64 * f64::from(RATE) / TRANSFORM as f64;
            ((frequency - left) / (centre - left)).min((right - frequency) / (right - centre)).max(0.0)
        };
        let weights: Vec<f64> = (0..=TRANSFORM / 2).map(weight).collect();
        let first = weights.iter().position(|weight| *weight > 0.0).unwrap_or(0);
        let end = weights.iter().rposition(|weight| *weight > 0.0).map_or(first, |last| last + 1);
        Filter { first, weights: weights[first..end].to_vec() }
    };
    (0..bins).map(filter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_counted_as_the_reference_counts_them() {
        let count = |samples: usize| frames(Medium::Mel { bins: 128 }, &vec![0.0; samples]).map_or(0, |f| f.count);
        assert_eq!([0, 160, 161, 320, 321, 640, 16_000, 19_000, 480_000].map(count), [0, 0, 1, 1, 2, 3, 99, 118, 2999]);
        let raw = frames(Medium::Samples { frame: 640 }, &[0.5; 641]).unwrap();
        assert_eq!((raw.count, raw.values[640], raw.values[641]), (2, 0.5, 0.0));
        assert!(frames(Medium::Samples { frame: 640 }, &[]).is_err());
    }

    #[test]
    fn silence_is_the_floor() {
        let silent = frames(Medium::Mel { bins: 128 }, &[0.0; 2000]).unwrap();
        assert!(silent.values.iter().all(|value| *value == 1e-3f64.ln() as f32));
    }
}
