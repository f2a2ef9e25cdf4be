//! The fast decoders against the literal reading of the layout table, bit for bit, for every format.

use gemma4c_blocks::decode::{BlockFormat, decode_row, half_to_f32};
use gemma4c_blocks::{DType, Minimum, Scale, reference, with_format};
use proptest::prelude::*;

/// Byte offsets of the half-precision fields of a block: random bits there may be infinite or NaN.
fn half_fields(dtype: DType) -> Vec<usize> {
    let layout = dtype.layout();
    let scale = match layout.scale {
        Scale::One => None,
        Scale::Half { offset: half }
        | Scale::Packed6 { half, .. }
        | Scale::Bytes16 { half, .. }
        | Scale::Split6 { half, .. } => Some(half),
    };
    let minimum = match layout.minimum {
        Minimum::Zero => None,
        Minimum::Half { offset: half } | Minimum::Packed6 { half, .. } => Some(half),
    };
    scale.into_iter().chain(minimum).collect()
}

/// Finite halves: any, and often the awkward ones (zeros, subnormals, extremes).
fn finite_half() -> impl Strategy<Value = u16> {
    let awkward = prop::sample::select(vec![0, 0x8000, 1, 0x8001, 0x03ff, 0x83ff, 0x0400, 0x8400, 0x7bff, 0xfbff]);
    prop_oneof![any::<u16>().prop_map(|bits| if bits & 0x7c00 == 0x7c00 { bits & 0x83ff } else { bits }), awkward,]
}

fn row_of(dtype: DType) -> impl Strategy<Value = Vec<u8>> {
    let layout = dtype.layout();
    (1usize..4).prop_flat_map(move |blocks| {
        // Rows of floats may end in fewer than 32 values.
        let blocks = if layout.len == 1 { blocks * 29 } else { blocks };
        let fields = half_fields(dtype);
        let halves = prop::collection::vec(finite_half(), blocks * fields.len());
        (prop::collection::vec(any::<u8>(), blocks * layout.bytes), halves).prop_map(move |(mut row, halves)| {
            for (i, half) in halves.into_iter().enumerate() {
                let at = i / fields.len() * layout.bytes + fields[i % fields.len()];
                row[at..at + 2].copy_from_slice(&half.to_le_bytes());
            }
            row
        })
    })
}

#[test]
fn decoders_equal_the_reference_bit_for_bit() {
    for dtype in DType::ALL {
        let layout = dtype.layout();
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        runner
            .run(&row_of(dtype), |row| {
                let mut values = vec![f32::NAN; row.len() / layout.bytes * layout.len];
                decode_row(dtype, &row, &mut values);
                for (i, value) in values.iter().enumerate() {
                    let block = &row[i / layout.len * layout.bytes..][..layout.bytes];
                    let expected = reference::value(layout, block, i % layout.len);
                    let equal = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
                    prop_assert!(equal, "{dtype} element {i}: {value:?}, not {expected:?}");
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn every_half_is_converted_exactly() {
    for bits in 0..=u16::MAX {
        let (value, expected) = (half_to_f32(bits), half::f16::from_bits(bits).to_f32());
        assert!(value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(), "{bits:#06x}: {value}");
    }
}

#[test]
fn formats_have_the_sizes_of_their_layouts() {
    for dtype in DType::ALL {
        let layout = dtype.layout();
        with_format!(dtype, F => {
            assert_eq!(F::DTYPE, dtype);
            assert_eq!(F::BYTES * layout.len, layout.bytes * F::LEN, "{dtype}");
            assert!(layout.len == 1 || layout.len == F::LEN, "{dtype}");
        });
    }
}
