//! The activation quantisation against its definition: in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::quantise::cases;
use gemma4c_codegen::kernels::matvec::parts::mean_of;
use gemma4c_codegen::kernels::quantise::{codes_per_unit, int8_code, scale_of};

#[test]
fn codes_scales_and_sums_are_the_definitions() {
    for case in cases() {
        case.assert();
    }
}

/// Every number between 1 and 2: what is correctly rounded there is so at other powers of two.
fn significands() -> impl Iterator<Item = f32> {
    (0..1u32 << 23).map(|bits| f32::from_bits(0x3f80_0000 | bits))
}

#[test]
fn quotients_in_three_steps_are_correctly_rounded() {
    for x in significands() {
        assert_eq!(scale_of(x), x / 127.0, "{x}");
    }
    // The widths of E2B, E4B, 26B-A4B, 12B and 31B.
    for width in [1536, 2560, 2816, 3840, 5376] {
        for x in significands().step_by(17) {
            assert_eq!(mean_of(x, width), x / width as f32, "{x} / {width}");
        }
    }
    assert_eq!((scale_of(0.0), mean_of(0.0, 2560)), (0.0, 0.0));
}

#[test]
fn codes_are_rounded_to_the_nearest_ties_to_even() {
    for x in significands().step_by(5) {
        for (x, largest) in [(x, 2.0), (-x, x), (x / 3.0, 1.9), (x, x)] {
            let per_unit = codes_per_unit(largest);
            assert_eq!(int8_code(x, per_unit) as i8, (x * per_unit).round_ties_even() as i8, "{x} of {largest}");
        }
    }
    for (half, even) in [(0.5, 0), (1.5, 2), (-2.5, -2), (126.5, 126), (-126.5, -126)] {
        assert_eq!(int8_code(half, 1.0) as i8, even, "{half}");
    }
    assert_eq!(int8_code(0.0, codes_per_unit(0.0)) as i8, 0);
}
