//! Blocks of 32 from floats, to the byte as ggml's reference functions make them: so that a checkpoint quantised while
//! it is loaded answers as its quantised file does.

use half::f16;

use crate::DType;

/// Of one of the two types that there are quantisers for.
pub(super) fn quantise_block(values: &[f32; 32], to: DType, block: &mut [u8]) {
    match to {
        DType::Q4_0 => quantise_q4_0(values, block),
        _ => quantise_q8_0(values, block),
    }
}

/// The value of largest magnitude, its sign kept, becomes code -8: of two equally large the first.
fn quantise_q4_0(values: &[f32; 32], block: &mut [u8]) {
    let mut largest = 0.0f32;
    for &value in values {
        if value.abs() > largest.abs() {
            largest = value;
        }
    }
    let scale = largest / -8.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    // The addend rounds to nearest, since the cast cuts.
    let code = |value: f32| ((value * inverse + 8.5) as i32).min(15) as u8;
    for j in 0..16 {
        block[2 + j] = code(values[j]) | code(values[j + 16]) << 4;
    }
}

/// The largest magnitude becomes code 127; halves are rounded away from zero.
fn quantise_q8_0(values: &[f32; 32], block: &mut [u8]) {
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (code, value) in block[2..].iter_mut().zip(values) {
        *code = (value * inverse).round() as i8 as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_magnitude_decides() {
        let mut values = [0.25f32; 32];
        values[3] = -2.0;
        values[20] = 2.0;
        let mut block = [0; 18];
        quantise_q4_0(&values, &mut block);
        assert_eq!(f16::from_le_bytes([block[0], block[1]]).to_f32(), 0.25);
        // -2 is code 0, the equal 2 behind it is clamped to 15, and 0.25 is one step above the middle.
        assert_eq!((block[2 + 3] & 15, block[2 + 4] >> 4, block[2] & 15), (0, 15, 9));
        let mut block = [0; 34];
        quantise_q8_0(&values, &mut block);
        assert_eq!((block[2 + 3] as i8, block[2 + 20] as i8, block[2] as i8), (-127, 127, 16));
    }

    #[test]
    fn zeros_are_zeros() {
        let (mut four, mut eight) = ([1; 18], [1; 34]);
        quantise_q4_0(&[0.0; 32], &mut four);
        quantise_q8_0(&[0.0; 32], &mut eight);
        assert_eq!((&four[..2], four[2], eight), (&[0, 0x80][..], 0x88, [0; 34]));
    }
}
