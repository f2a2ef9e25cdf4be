//! The fast decoders against the literal reading of the layout table, bit for bit, for every format.

use gemma4c_blocks::decode::{BlockFormat, decode_row, half_to_f32};
use gemma4c_blocks::{DType, Factor, reference, with_format};
use proptest::prelude::*;

/// Byte offsets of the fields of a block that are, or end in, a float of 16 bits: random bits there may be infinite or
/// NaN. A bfloat16's bits, which a single's upper ones are, are not told from a half's.
fn half_fields(dtype: DType) -> Vec<usize> {
    let layout = dtype.layout();
    let factor = layout.scale.factor().and_then(|(at, stored)| match stored {
        Factor::Half | Factor::Brain => Some(at),
        Factor::Single => Some(at + 2),
        Factor::Exponent => None,
    });
    factor.into_iter().chain(layout.minimum.half()).collect()
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

/// Blocks of each type with the values that reference dequantisers make of them.
#[test]
fn blocks_of_the_low_bit_types_have_their_values() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/formats/blocks.safetensors");
    let Ok(file) = std::fs::read(&path) else {
        return eprintln!("NOT CHECKED: there is no {}", path.display());
    };
    let (len, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let bytes = |name: &str| {
        let ends = &header[name]["data_offsets"];
        &data[ends[0].as_u64().unwrap() as usize..ends[1].as_u64().unwrap() as usize]
    };
    let mut checked = 0;
    for name in header.as_object().unwrap().keys().filter_map(|name| name.strip_suffix(".bytes")) {
        let dtype = DType::from_name(&name.to_lowercase()).unwrap();
        let values = bytes(&format!("{name}.values")).as_chunks::<4>().0;
        let mut blocks = bytes(&format!("{name}.bytes")).to_vec();
        if dtype == DType::NVFP4 {
            // Its blocks have the tensor's factor in front, once they are loaded.
            blocks = blocks.chunks(36).flat_map(|block| [1f32.to_le_bytes().as_slice(), block].concat()).collect();
        }
        let mut decoded = vec![f32::NAN; values.len()];
        decode_row(dtype, &blocks, &mut decoded);
        for (i, (value, expected)) in decoded.iter().zip(values).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert!((value - expected).abs() <= 1e-6 * expected.abs(), "{name} element {i}: {value}, not {expected}");
        }
        checked += 1;
    }
    assert_eq!(checked, 9);
}
