//! Weight planes: what repacking makes of blocks, on the host and for an image, and what the kernels' formats take of it.

mod layout {
    use gemma4c_blocks::DType;
    use gemma4c_blocks::reference;
    use gemma4c_codegen::kernels::matvec::formats::types_with_kernels;
    use gemma4c_codegen::kernels::planes::{Repacked, planes};
    use gemma4c_dsl::harness::Random;

    #[test]
    fn repacked_values_are_the_blocks_values() {
        for dtype in types_with_kernels() {
            let layout = dtype.layout();
            let (rows, k) = (3, 512);
            let blocks = Random::new(dtype as u64).bytes(rows * k / layout.len * layout.bytes);
            let repacked = Repacked::from_blocks(dtype, rows, k, &blocks).unwrap();
            let values =
                blocks.chunks_exact(layout.bytes).flat_map(|b| (0..layout.len).map(|i| reference::value(layout, b, i)));
            for (i, (expected, found)) in values.zip(repacked.dequantise()).enumerate() {
                let same = expected.to_bits() == found.to_bits() || expected.is_nan() && found.is_nan();
                assert!(same, "{dtype}, value {i}: {found}, expected {expected}");
            }
        }
    }

    #[test]
    fn a_repacked_matrix_is_as_large_as_its_blocks() {
        for dtype in types_with_kernels() {
            let k = 512;
            let total: u64 = planes(dtype).iter().map(|plane| plane.total_bytes(16, k)).sum();
            let blocks = dtype.row_bytes(k).unwrap() * 16;
            // The scales of the K formats give up their 6-bit packing, those of IQ2_XXS their place among the signs.
            assert!(total >= blocks && total * 100 <= blocks * 107, "{dtype}: {total} bytes from {blocks}");
        }
    }

    #[test]
    fn planes_are_padded_and_bad_shapes_named() {
        let scales = planes(DType::Q4_0)[1];
        assert_eq!((scales.total_bytes(1, 32), scales.total_bytes(3, 96)), (16, 32));
        let error = Repacked::from_blocks(DType::Q4K, 1, 320, &[]).unwrap_err();
        assert_eq!(error.to_string(), "a row of 320 values of q4_k is not whole blocks");
        let error = Repacked::from_blocks(DType::Q4_0, 2, 32, &[0; 18]).unwrap_err();
        assert_eq!(error.to_string(), "2 rows of 32 values of q4_0 take 36 bytes of blocks, 18 were given");
    }
}

mod formats {
    use gemma4c_codegen::kernels::matvec::formats::{format, side_arguments, types_with_kernels};
    use gemma4c_codegen::kernels::planes::planes;
    use gemma4c_dsl::Filled;

    /// A type's planes besides `codes` are what its side function takes, each once.
    #[test]
    fn side_functions_take_the_planes_of_their_type() {
        for dtype in types_with_kernels() {
            let filled: Filled<&str> = side_arguments(dtype, |plane| plane);
            assert_eq!(filled.function, format(dtype).side, "{dtype}");
            let params: Vec<_> = filled.function.params[2..].iter().map(|param| param.name).collect();
            let planes: Vec<_> = planes(dtype).iter().skip(1).map(|plane| plane.name).collect();
            assert_eq!(params, planes, "{dtype}");
        }
    }
}

mod image {
    use gemma4c_codegen::cuda::image::repacked_plane;
    use gemma4c_codegen::kernels::matvec::formats::types_with_kernels;
    use gemma4c_codegen::kernels::planes::Repacked;
    use gemma4c_dsl::harness::Random;

    /// Against the plain oracle of the kernels, bit by bit.
    #[test]
    fn planes_are_those_that_the_kernels_make() {
        for dtype in types_with_kernels() {
            let (layout, rows, k) = (dtype.layout(), 3, 768);
            let blocks = Random::new(dtype as u64 + 7).bytes(rows * k / layout.len * layout.bytes);
            let expected = Repacked::from_blocks(dtype, rows, k, &blocks).expect("whole rows");
            for (plane, bytes) in &expected.planes {
                let row_bytes = k / plane.per * plane.bytes;
                let out = repacked_plane(&blocks, rows, layout, plane.content, row_bytes).expect("memory");
                assert_eq!(out, bytes[..rows * row_bytes], "{dtype} {}", plane.name);
            }
        }
    }
}
