//! Samples at another rate: band-limited, by a windowed sinc.
//!
//! A sample of the result is a weighted sum of the source's around its time. The weights are a sinc, cut off below the
//! half of the lower rate, under a Kaiser window. Both rates are whole numbers, so only as many sets of weights occur
//! as the result has samples a second, at most; each is computed once, in f64. Sums are in one order: the bits are the
//! same on every machine, which the vector code of resampling crates does not give. Tones up to 0.87 of the half of the
//! lower rate come out within 1e-4 of their amplitude, and those above that half are below 1e-4 (tests hold it to
//! that).

use rayon::prelude::*;

/// Zeros of the sinc on either side of its peak.
const ZEROS: f64 = 64.0;
/// Where the sinc is cut off, in halves of the lower rate; what lies between this and the half itself is the filter's
/// slope.
const CUTOFF: f64 = 0.945;
/// Of the Kaiser window: how much of what is beyond the cutoff is left.
const BETA: f64 = 10.0;

/// Sets of weights that are there at once. Rates without a common factor have one for each sample of a second, 6.5 kB
/// each at most: all of them would take 100 MB.
const TABLES: usize = 1024;

/// The same sound at another rate. Both rates are positive; the same rate changes nothing.
pub fn at_rate(samples: &[f32], from: u32, to: u32) -> Vec<f32> {
    if from == to {
        return samples.to_vec();
    }
    let common = gcd(from, to);
    let (step, phases) = (u64::from(from / common), u64::from(to / common));
    let cutoff = CUTOFF * (f64::from(to) / f64::from(from)).min(1.0);
    let reach = (ZEROS / cutoff).ceil() as i64;
    let kernel = |distance: f64| {
        let inside = 1.0 - (distance * cutoff / ZEROS).powi(2);
        if inside <= 0.0 { 0.0 } else { cutoff * sinc(cutoff * distance) * bessel(BETA * inside.sqrt()) / bessel(BETA) }
    };
    // The result's n-th sample lies at n * step / phases of the source: at a whole sample and one of `phases`
    // fractions.
    let weights = |phase: u64| -> Vec<f32> {
        let fraction = phase as f64 / phases as f64;
        (-reach..=reach).map(|k| kernel(k as f64 - fraction) as f32).collect()
    };
    let sample = |n: u64, weights: &[f32]| {
        let first = (n * step / phases) as i64 - reach;
        let skipped = (-first).max(0) as usize;
        let source = samples.get((first.max(0)) as usize..).unwrap_or(&[]);
        let products = weights.iter().skip(skipped).zip(source).map(|(w, x)| f64::from(*w) * f64::from(*x));
        products.sum::<f64>() as f32
    };
    let count = samples.len() as u64 * phases / step;
    let mut result = vec![0.0; count as usize];
    for first in (0..phases.min(count)).step_by(TABLES) {
        let some = first..(first + TABLES as u64).min(phases);
        let tables: Vec<Vec<f32>> = some.into_par_iter().map(|n| weights(n * step % phases)).collect();
        // Samples that many apart have the same weights.
        let turns = result.par_chunks_mut(phases as usize).enumerate();
        turns.for_each(|(turn, samples)| {
            let own = samples.iter_mut().enumerate().skip(first as usize);
            for ((at, result), weights) in own.zip(&tables) {
                *result = sample(turn as u64 * phases + at as u64, weights);
            }
        });
    }
    result
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn sinc(x: f64) -> f64 {
    let angle = std::f64::consts::PI * x;
    if angle == 0.0 { 1.0 } else { angle.sin() / angle }
}

/// The modified Bessel function of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let (mut term, mut sum) = (1.0, 1.0);
    for k in 1..60 {
        term *= (x / (2.0 * f64::from(k))).powi(2);
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(hertz: f64, rate: u32, samples: usize) -> Vec<f32> {
        let angle = |n: usize| std::f64::consts::TAU * hertz * n as f64 / f64::from(rate);
        (0..samples).map(|n| angle(n).sin() as f32).collect()
    }

    /// Largest difference from the tone itself at the other rate, away from the ends.
    fn off(hertz: f64, from: u32, amplitude: f64) -> f64 {
        let out = at_rate(&tone(hertz, from, from as usize), from, 16_000);
        assert_eq!(out.len(), 16_000);
        let exact = tone(hertz, 16_000, out.len());
        let pairs = out.iter().zip(&exact).skip(500).take(15_000);
        pairs.map(|(a, b)| (f64::from(*a) - amplitude * f64::from(*b)).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn tones_stay_and_what_cannot_be_told_apart_goes() {
        for from in [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 16_001] {
            let half = f64::from(from.min(16_000)) / 2.0;
            for hertz in [50.0, 0.3 * half, 0.87 * half] {
                let off = off(hertz, from, 1.0);
                assert!(off < 1e-4, "{hertz} Hz of {from}: {off:e}");
            }
        }
        for (hertz, from) in [(8_000.5, 44_100), (12_000.0, 48_000), (21_000.0, 44_100), (9_000.0, 22_050)] {
            let off = off(hertz, from, 0.0);
            assert!(off < 1e-4, "{hertz} Hz of {from}: {off:e}");
        }
    }

    #[test]
    fn short_sounds_and_the_same_rate() {
        assert_eq!(at_rate(&[1.0, -1.0], 16_000, 16_000), [1.0, -1.0]);
        assert!(at_rate(&[], 44_100, 16_000).is_empty());
        assert_eq!(at_rate(&[1.0; 3], 8_000, 16_000).len(), 6);
    }
}
