//! Random models with massive channels: the residual has them from the first layer to the last, for every token.

use crate::common::Place;

/// Those of `synth`.
const CHANNELS: [usize; 3] = [37, 50, 200];

#[test]
fn a_few_channels_are_hundreds_of_times_the_others() {
    for (preset, layers) in [("tiny-e", 6), ("tiny-dense", 4), ("tiny-moe", 3)] {
        for option in ["", "--massive"] {
            let place = Place::new();
            place.ok(&format!("synth {preset} -q q4_0 {option} -o model.gguf"));
            place.ok("compile model.gguf -o plan.bin --target cpu");
            let taps: String = (0..layers).map(|layer| format!(" --tap blk.{layer}.layer.out")).collect();
            let logits = place.logits("plan.bin", &format!("--tokens 2,100,200,300,44,17,301,22 --all{taps}"));
            for layer in 0..layers {
                let residual = logits.get(&format!("blk.{layer}.layer.out"));
                for row in 0..8 {
                    let row = residual.row(row);
                    let least = CHANNELS.map(|channel| row[channel].abs()).into_iter().fold(f32::INFINITY, f32::min);
                    let others = row.iter().enumerate().filter(|(i, _)| !CHANNELS.contains(i)).map(|(_, v)| v.powi(2));
                    let rms = (others.sum::<f32>() / (row.len() - CHANNELS.len()) as f32).sqrt();
                    assert_eq!(
                        least > 300.0 * rms,
                        !option.is_empty(),
                        "{preset} {option}, layer {layer}: {least} {rms}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_size_that_makes_no_sense_is_refused() {
    let message = Place::new().refused("synth tiny-e --massive=0.5 -o model.gguf");
    assert_eq!(message, "error: massive channels of 0.5 times the others: it must be 1 to 100000\n");
}
