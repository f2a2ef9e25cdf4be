//! The product with one arithmetic against a plain sum in f64: in the simulator under three orders, and as host-compiled
//! text. Its bits: the same for a row alone and in any batch.

use gemma4c_blocks::DType;
use gemma4c_blocks::narrow::fp8_to_f32;
use gemma4c_codegen::cases::gemm;
use gemma4c_codegen::kernels::formats::bytes::halves_i8;
use gemma4c_codegen::kernels::formats::fp8::halves_f8;
use gemma4c_codegen::kernels::formats::nibbles::halves_i4;
use gemma4c_codegen::kernels::gemm::decode::{halves_q4_0, halves_q8_0};
use gemma4c_codegen::kernels::gemm::shape::{MOST_ROWS, slices};
use gemma4c_codegen::kernels::gemm::{Gemm, Shape};
use gemma4c_codegen::target::GPUS;
use gemma4c_dsl::harness::{Case, Executor, Simulator};
use gemma4c_dsl::sim::Order;
use gemma4c_dsl::{BF16, ElementType, F16, Float, U32x4};

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn every_type() {
    check(gemm::types());
}

#[test]
fn tiles_and_slices() {
    check(gemm::shapes());
}

#[test]
fn by_warpgroups() {
    check(gemm::warpgroups());
}

#[test]
fn rows_by_expert() {
    check(gemm::experts());
}

#[test]
fn a_row_does_not_depend_on_its_neighbours_nor_on_the_tile() {
    let first_row = |case: &Case| {
        let out = case.instance.params().iter().position(|param| param.name == "out").expect("it has a result");
        let results = Simulator(Order::Forward).run(case).expect("the case runs");
        results[out].as_ref().expect("the result is a buffer").bytes()[..19 * 4].to_vec()
    };
    let (bf16, f16) = (ElementType::BF16, ElementType::F16);
    let products = [
        (DType::Q4_0, f16, 1088),
        (DType::Q8_0, bf16, 1088),
        (DType::BF16, bf16, 1056),
        (DType::Q6K, bf16, 1280),
        (DType::I4, f16, 1088),
        (DType::F8, bf16, 1088),
        (DType::MXFP4, bf16, 1056),
    ];
    for (dtype, operands, k) in products {
        let rows: Vec<Vec<u8>> = gemm::first_rows(dtype, operands, k).iter().map(first_row).collect();
        assert!(rows[0].iter().any(|byte| *byte != 0));
        assert!(rows.iter().all(|row| *row == rows[0]), "{dtype}");
    }
}

/// In f16 a code times a scale is rounded once, whatever the scale.
#[test]
fn codes_are_decoded_exactly_in_f16() {
    let halves = |words: [u32; 4]| words.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]);
    for bits in (0..=u16::MAX).filter(|bits| F16::from_bits(*bits).to_f32().is_finite()) {
        let scale = F16::from_bits(bits).to_f32();
        let side = U32x4 { x: bits.into(), ..U32x4::ZERO };
        let exact = |code: i32| F16::from_f32(code as f32 * scale).to_f32();
        for [a, b, c, d] in [[0u32, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]] {
            // The lower nibbles are values of one product, the upper ones of the next, in another order.
            let codes =
                U32x4 { x: a | c << 8 | b << 16 | d << 24 | (d | b << 8 | c << 16 | a << 24) << 4, ..U32x4::ZERO };
            let U32x4 { x, y, z, w } = halves_q4_0(codes, side, 0, 0);
            for (half, code) in halves([x, y, z, w]).zip([a, b, c, d, d, c, b, a]) {
                assert_eq!(F16::from_bits(half).to_f32(), exact(code as i32 - 8), "{scale} times nibble {code}");
            }
            let bytes = [a * 16, b * 17, c * 9, d * 13].map(|code| code as u8);
            let codes = U32x4 { x: u32::from_le_bytes(bytes), ..U32x4::ZERO };
            let U32x4 { x, y, .. } = halves_q8_0(codes, side, 0, 0);
            for (half, code) in halves([x, y, 0, 0]).zip(bytes) {
                assert_eq!(F16::from_bits(half).to_f32(), exact(i32::from(code as i8)), "{scale} times byte {code}");
            }
        }
    }
}

/// The same of bfloat16 scales, as far as their product with a power of two is an f16.
#[test]
fn codes_with_bfloat16_scales_are_decoded_exactly_in_f16() {
    let halves = |words: [u32; 4]| words.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]);
    for bits in 0..=u16::MAX {
        let scale = BF16::from_bits(bits).to_f32();
        let side = U32x4 { x: bits.into(), ..U32x4::ZERO };
        let rounded = |value: f32| F16::from_f32(value * scale).to_f32();
        let codes = |bytes: [u8; 4]| U32x4 { x: u32::from_le_bytes(bytes), ..U32x4::ZERO };
        let is_exact = |by: f32, largest: f32| {
            F16::from_f32(scale * by).to_f32() == scale * by && (scale * largest).abs() <= 65504.0
        };
        let check = |found: U32x4, values: &[f32], name: &str| {
            for (half, value) in halves([found.x, found.y, found.z, found.w]).zip(values) {
                assert_eq!(F16::from_bits(half).to_f32(), rounded(*value), "{name}: {scale} times {value}");
            }
        };
        for [a, b, c, d] in [[0u8, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]] {
            if is_exact(8.0, 8.0) {
                let both = [a | d << 4, c | b << 4, b | c << 4, d | a << 4];
                let values = [a, b, c, d, d, c, b, a].map(|code| f32::from(code) - 8.0);
                check(halves_i4(codes(both), side, 0, 0), &values, "i4");
            }
            let bytes = [a * 16, b * 17, c * 9, d * 13];
            if is_exact(128.0, 128.0) {
                check(halves_i8(codes(bytes), side, 0, 0), &bytes.map(|code| f32::from(code as i8)), "i8");
            }
            if is_exact(256.0, 448.0) && bytes.iter().all(|code| code & 127 != 127) {
                check(halves_f8(codes(bytes), side, 0, 0), &bytes.map(fp8_to_f32), "f8");
            }
        }
    }
}

#[test]
fn slices_follow_from_the_matrix() {
    assert_eq!(slices(262144, 2560), 1);
    assert_eq!(slices(8192, 3840), 2);
    assert_eq!(slices(2560, 10240), 8);
    // Too short to be cut further.
    assert_eq!(slices(3072, 2560), 4);
    assert_eq!(slices(16, 128), 1);
}

/// Few rows are in whole blocks, about one for each SM: neither one block for each warp, nor a second wave of them.
#[test]
fn few_rows_are_shared_out_among_all_sms() {
    let h200 = GPUS.iter().find(|gpu| gpu.multiprocessors == 132).expect("a GPU with 132 SMs");
    let gate_and_up = |dtype, outputs, k| Gemm {
        dtype,
        operands: ElementType::F16,
        outputs,
        k,
        geglu: true,
        pairs: 0,
        out: ElementType::BF16,
        epilogue: Vec::new(),
        adapted: None,
    };
    for (of, across) in [(gate_and_up(DType::Q8_0, 10240, 2560), 10), (gate_and_up(DType::Q4_0, 15360, 3840), 15)] {
        let shape = of.shape(8, 8, h200);
        assert_eq!((shape.across, of.grid(shape, 8)), (across, [1, 128, 1]), "{shape:?}");
    }
}

#[test]
fn every_shape_fits_its_gpu() {
    for target in &GPUS {
        let cluster = target.arch.most_peers().min(8);
        for (dtype, outputs, k) in [(DType::Q8_0, 2560, 10240), (DType::Q4_0, 20480, 2560), (DType::BF16, 256, 1536)] {
            let operands = ElementType::BF16;
            let of = Gemm {
                dtype,
                operands,
                outputs,
                k,
                geglu: false,
                pairs: 0,
                out: ElementType::F32,
                epilogue: Vec::new(),
                adapted: None,
            };
            for rows in [1, 8, 9, 17, 33, 65, MOST_ROWS, 300] {
                let shape: Shape = of.shape(rows, cluster, target);
                let instance = of.instance(shape).expect("it fits the kernel");
                assert!(
                    instance.shared_bytes() <= target.shared_bytes_per_block as usize,
                    "{shape:?} on {}",
                    target.name
                );
                assert!(of.slices() / shape.held <= cluster, "{shape:?} on {}", target.name);
            }
        }
    }
}
