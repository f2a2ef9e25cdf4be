//! Products of several rows against the product of one: equal bits, in the simulator under three orders, and as host-compiled text.

use crate::support;
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::cases::rows;
use gemma4c_codegen::kernels::matvec::{Product as OneRow, Prologue};
use gemma4c_codegen::kernels::rows::Product;
use gemma4c_codegen::kernels::source;
use gemma4c_codegen::nvrtc::Options;
use gemma4c_codegen::target::Target;
use gemma4c_dsl::harness::Case;

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn every_type_has_the_bits_of_one_row() {
    check(rows::types());
}

#[test]
fn widths_and_numbers_of_rows_that_leave_lanes_over() {
    check(rows::shapes());
}

#[test]
fn prologues_and_epilogues_have_the_bits_of_one_row() {
    check(rows::fusions());
}

/// Gate and up, down, and the LM head of real models, in types of every kind.
#[test]
fn products_of_real_models_compile_without_spills() {
    let Some(toolchain) = support::toolchain() else { return };
    let target = Target::of_arch(Arch::Sm90a);
    let of = |dtype, outputs, k, prologue, geglu, rows| {
        let one = OneRow { geglu, ..OneRow::new(dtype, outputs, k, prologue) };
        Product { one, rows }
    };
    let products = [
        of(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm, true, 8),
        of(DType::Q8_0, 2560, 10240, Prologue::Plain, false, 16),
        of(DType::Q4_0, 21504, 5376, Prologue::ResidualNorm, true, 4),
        of(DType::Q6K, 262_144, 2560, Prologue::Norm, false, 8),
        of(DType::BF16, 2560, 10240, Prologue::Plain, false, 8),
    ];
    for product in products {
        let one = product.one.shape(target.multiprocessors);
        let (shape, why, _) = product.choose(&target);
        let prepared = product.prepare(one).unwrap();
        for instance in prepared.into_iter().chain([product.instance(shape).unwrap()]) {
            let what = format!("{instance}: {why}");
            assert!(instance.shared_bytes() as u32 <= target.shared_bytes_per_block, "{what}");
            for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120a] {
                let cubin = toolchain.compile(&source(&instance), arch, Options::default()).unwrap();
                println!("{arch} {what} {:?}", cubin.resources);
                assert!(!cubin.resources.spills(), "{arch}, {what}: {:?}", cubin.resources);
            }
        }
    }
}
