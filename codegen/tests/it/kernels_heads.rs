//! Heads: every case in the simulator under three orders and as host-compiled text; and the rotation's own arithmetic.

use gemma4c_codegen::cases::heads;
use gemma4c_codegen::kernels::heads::{cos_sin, inverse_frequencies};

#[test]
fn every_case_equals_its_oracle() {
    for case in heads::cases() {
        case.assert();
    }
}

/// Every position of the longest context turns the first pair by itself, in radians.
#[test]
fn cosine_and_sine_are_accurate_over_the_longest_context() {
    let (mut worst, mut at) = (0.0f64, 0.0);
    let steps = (0..262_144u32).map(|p| p as f32).chain((0..100_000u32).map(|p| p as f32 * 0.930_572_03));
    for angle in steps {
        let (found, (sin, cos)) = (cos_sin(angle), f64::from(angle).sin_cos());
        let error = (f64::from(found.x) - cos).abs().max((f64::from(found.y) - sin).abs());
        if error > worst {
            (worst, at) = (error, angle);
        }
    }
    assert!(worst < 1.2e-7, "off by {worst} at {at}");
}

#[test]
fn a_factor_of_1e30_stops_the_rotation() {
    let table = inverse_frequencies(512, 1e6, Some(&[vec![1.0; 64], vec![1e30; 192]].concat()));
    assert_eq!((table[0], table.len()), (1.0, 256));
    assert_eq!(table[63], 1e6f64.powf(-126.0 / 512.0) as f32);
    let turn = cos_sin(262_143.0 * table[64]);
    assert!(turn.x == 1.0 && turn.y.abs() < 1e-24, "{turn:?}");
}
