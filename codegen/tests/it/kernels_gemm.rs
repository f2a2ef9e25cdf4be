//! The product with one arithmetic against a plain sum in f64: in the simulator under three orders, and as host-compiled
//! text. Its bits: the same for a row alone and in any batch.

use gemma4c_blocks::DType;
use gemma4c_codegen::cases::gemm;
use gemma4c_codegen::kernels::gemm::decode::raw_q4_0;
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
    for (dtype, k) in [(DType::Q4_0, 1088), (DType::Q8_0, 1088), (DType::BF16, 1056), (DType::Q6K, 1280)] {
        let rows: Vec<Vec<u8>> = gemm::first_rows(dtype, k).iter().map(first_row).collect();
        assert!(rows[0].iter().any(|byte| *byte != 0));
        assert!(rows.iter().all(|row| *row == rows[0]), "{dtype}");
    }
}

/// In pairs of bf16 a nibble times a scale is rounded once, whatever the scale.
#[test]
fn nibbles_are_decoded_exactly() {
    for bits in (0..=u16::MAX).filter(|bits| F16::from_bits(*bits).to_f32().is_finite()) {
        let scale = F16::from_bits(bits).to_f32();
        let codes = U32x4 { x: 0x33221100, y: 0x77665544, z: 0xbbaa9988, w: 0xffeeddcc };
        for part in [0, 1] {
            let U32x4 { x, y, z, w } = raw_q4_0(codes, U32x4 { x: bits.into(), ..U32x4::ZERO }, 0, part);
            let halves = [x, y, z, w].into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]);
            for (at, half) in halves.enumerate() {
                let expected = BF16::from_f32((part as f32 * 8.0 + at as f32 - 8.0) * scale).to_f32();
                assert_eq!(BF16::from_bits(half).to_f32(), expected, "{scale} times {at} of part {part}");
            }
        }
    }
}

#[test]
fn slices_follow_from_the_matrix() {
    assert_eq!(slices(262144, 2560), 1);
    assert_eq!(slices(20480, 2560), 2);
    assert_eq!(slices(2560, 10240), 8);
    // Too short to be cut further.
    assert_eq!(slices(3072, 2560), 4);
    assert_eq!(slices(16, 128), 1);
}

#[test]
fn every_shape_fits_its_gpu() {
    for target in &GPUS {
        let cluster = target.arch.most_peers().min(8);
        for (dtype, outputs, k) in [(DType::Q8_0, 2560, 10240), (DType::Q4_0, 20480, 2560), (DType::BF16, 256, 1536)] {
            let of = Gemm { dtype, outputs, k, geglu: false, pairs: 0, out: ElementType::F32, epilogue: Vec::new() };
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
