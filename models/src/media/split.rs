//! A long sound as pieces that the model reads one by one, cut where it is quiet: a cut through a word costs the word.
//!
//! Quiet is what has the least energy, whatever that is speech, breath or hum: nothing here knows what speech is.

use std::ops::Range;

use super::sound::{MOST_SECONDS, RATE};

/// Samples of a piece, at most.
const MOST: usize = (MOST_SECONDS * RATE) as usize;
/// A cut is looked for in so many samples at a piece's end: short pieces lose what the model knows of the sentence.
const SEARCHED: usize = 8 * RATE as usize;
/// What is left behind the last cut has so many samples at least.
const LEAST: usize = RATE as usize;
/// Samples whose energy is compared, and from one place to the next: a tenth of a second is the gap between two words,
/// and is longer than a period of the deepest voice.
const WINDOW: usize = RATE as usize / 10;
const STEP: usize = WINDOW / 4;

/// The ranges of a sound's pieces, in order; together they are all of it.
pub fn split(samples: &[f32]) -> Vec<Range<usize>> {
    let (mut pieces, mut start) = (Vec::new(), 0);
    while samples.len() - start > MOST {
        let end = (start + MOST).min(samples.len() - LEAST);
        let cut = quietest(samples, end - SEARCHED..end);
        pieces.push(start..cut);
        start = cut;
    }
    pieces.push(start..samples.len());
    pieces
}

/// The middle of the quietest window; of several the last, which makes the longest piece.
fn quietest(samples: &[f32], range: Range<usize>) -> usize {
    let energy = |at: usize| -> f64 { samples[at..at + WINDOW].iter().map(|x| f64::from(*x) * f64::from(*x)).sum() };
    let places = range.clone().step_by(STEP).take_while(|at| at + WINDOW <= range.end);
    let quietest = places.map(|at| (energy(at), at)).reduce(|a, b| if b.0 <= a.0 { b } else { a });
    quietest.map_or(range.end, |(_, at)| at + WINDOW / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: usize = RATE as usize;

    /// A tone with pauses of 0.3 seconds around these times, in tenths of a second.
    fn tone(tenths: usize, pauses: &[usize]) -> Vec<f32> {
        let is_pause = |at: usize| pauses.iter().any(|pause| at.abs_diff(pause * SECOND / 10) <= 3 * SECOND / 20);
        let sample = |at: usize| if is_pause(at) { 0.001 } else { 0.5 } * (at as f32 / 7.0).sin();
        (0..tenths * SECOND / 10).map(sample).collect()
    }

    fn ends(samples: &[f32]) -> Vec<f64> {
        let pieces = split(samples);
        let mut next = 0;
        for piece in &pieces {
            assert!(piece.start == next && piece.len() <= MOST && !piece.is_empty(), "{pieces:?}");
            next = piece.end;
        }
        assert_eq!(next, samples.len());
        pieces.iter().map(|piece| piece.end as f64 / SECOND as f64).collect()
    }

    #[test]
    fn cuts_are_in_pauses_near_the_end_of_a_piece() {
        assert_eq!(ends(&tone(300, &[250])), [30.0]);
        // The pause at 5 seconds is too early to be of use.
        let found = ends(&tone(700, &[50, 250, 500]));
        assert!((found[0] - 25.0).abs() < 0.15 && (found[1] - 50.0).abs() < 0.15 && found.len() == 3, "{found:?}");
        // The deepest pause is not the last one.
        let mut samples = tone(400, &[240, 280]);
        samples[24 * SECOND - 800..24 * SECOND + 800].fill(0.0);
        assert!((ends(&samples)[0] - 24.0).abs() < 0.15);
    }

    #[test]
    fn a_sound_without_pauses_is_cut_all_the_same() {
        assert!(ends(&vec![0.0; 30 * SECOND + 1]).len() == 2);
        let silence = ends(&vec![0.0; 65 * SECOND]);
        assert!(silence.len() == 3 && silence[0] > 29.9, "{silence:?}");
        assert!(ends(&tone(301, &[]))[0] <= 29.1, "the rest is no shorter than a second");
        assert_eq!(split(&[]).first(), Some(&(0..0)));
        assert_eq!(ends(&[0.0; 7]).len(), 1);
    }

    /// Not a number is no energy: what is wrong with such samples is said elsewhere.
    #[test]
    fn odd_samples_do_no_harm() {
        assert!(ends(&vec![f32::NAN; 31 * SECOND]).len() == 2);
    }
}
