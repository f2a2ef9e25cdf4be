//! Products of several rows against the product of one: equal bits, in the simulator under three orders, and as host-compiled text.

use crate::support;
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::cases::rows;
use gemma4c_codegen::kernels::matvec::formats::types_with_kernels;
use gemma4c_codegen::kernels::matvec::{Product as OneRow, Prologue};
use gemma4c_codegen::kernels::rows::formats::TensorFormat;
use gemma4c_codegen::kernels::rows::shape::{Cores, Tensor};
use gemma4c_codegen::kernels::rows::tiling::Tiles;
use gemma4c_codegen::kernels::rows::{Product, Shape, SumOrder};
use gemma4c_codegen::kernels::source;
use gemma4c_codegen::nvrtc::Options;
use gemma4c_codegen::target::Target;
use gemma4c_dsl::harness::{Case, Executor, Simulator};
use gemma4c_dsl::sim::Order;

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

/// Rows of a phase that no sequence has are multiplied too, and their activations are whatever lay there.
#[test]
fn activations_of_rows_that_nobody_has_may_be_anything() {
    for mut case in rows::types() {
        for (_, sums) in case.buffers.iter_mut().filter(|(name, _)| ["xsum", "fine_sums"].contains(&name.as_str())) {
            let count = sums.bytes().len() / 4;
            *sums = [i32::MIN, i32::MAX].into_iter().cycle().take(count).collect::<Vec<i32>>().into();
        }
        Simulator(Order::Forward).run(&case).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn widths_and_numbers_of_rows_that_leave_lanes_over() {
    check(rows::shapes());
}

#[test]
fn tiles_of_all_sizes_on_tensor_cores() {
    check(rows::tiles());
}

#[test]
fn joined_results_are_left_as_the_next_product_reads_them() {
    check(rows::rounded());
}

#[test]
fn adapters_in_seats_have_the_bits_of_one_row() {
    check(rows::adapters());
}

#[test]
fn the_dense_half_of_a_mixture_has_the_bits_of_one_launch_of_both() {
    check(rows::mixture::cases());
}

#[test]
fn prologues_and_epilogues_have_the_bits_of_one_row() {
    check(rows::fusions());
}

/// Gate and up, down, and the LM head of real models, in types of every kind: each for the GPU with most of its own, and for one of the others in turn.
#[test]
fn products_of_real_models_compile_without_spills() {
    let Some(toolchain) = support::toolchain() else { return };
    let of = |dtype, outputs, k, prologue, geglu, rows| {
        let one = OneRow { geglu, ..OneRow::new(dtype, outputs, k, prologue) };
        Product::new(one, rows, SumOrder::Matvec)
    };
    let products = [
        of(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm, true, 4),
        of(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm, true, 8),
        of(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm, true, 32),
        of(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm, true, 128),
        of(DType::Q8_0, 2560, 10240, Prologue::Plain, false, 16),
        of(DType::Q4_0, 21504, 5376, Prologue::ResidualNorm, true, 16),
        of(DType::Q4_0, 5376, 21504, Prologue::Plain, false, 64),
        of(DType::Q6K, 262_144, 2560, Prologue::Norm, false, 8),
        of(DType::Q4K, 2560, 10240, Prologue::Plain, false, 32),
        of(DType::BF16, 2560, 10240, Prologue::Plain, false, 8),
    ];
    let others = [Arch::Sm89, Arch::Sm80, Arch::Sm120a].into_iter().cycle();
    let both = products.iter().zip(others).flat_map(|(product, other)| [(product, Arch::Sm90a), (product, other)]);
    for (product, arch) in both {
        let target = Target::of_arch(arch);
        let (shape, why, _) = product.choose(&target);
        let prepared = product.prepare(product.one.shape(&target), shape).unwrap();
        for instance in prepared.into_iter().chain([product.instance(shape).unwrap()]) {
            let what = format!("{instance}: {why}");
            assert!(instance.shared_bytes() as u32 <= target.shared_bytes_per_block, "{what}");
            let cubin = toolchain.compile(&source(&instance), arch, Options::default()).unwrap();
            assert!(!cubin.resources.spills(), "{arch}, {what}: {:?}", cubin.resources);
            assert_eq!(cubin.warnings().next(), None, "{arch}, {what}");
        }
    }
}

#[test]
fn what_cannot_be_multiplied_is_refused_by_name() {
    let target = Target::of_arch(Arch::Sm90a);
    let of = |dtype, k, rows| Product::new(OneRow::new(dtype, 64, k, Prologue::Plain), rows, SumOrder::Matvec);
    let tensor = Shape::Tensor(Tensor {
        lanes: 8,
        warps: 4,
        copiers: 0,
        tile: 8,
        columns: 16,
        stages: 2,
        resident: true,
        blocks: 1,
    });
    let tiles = Shape::Tiles(Tiles {
        own: 4,
        step: 8,
        groups: 1,
        splits: 1,
        eights: 1,
        copiers: 4,
        stages: 2,
        resident: true,
        panels: true,
        blocks: 1,
    });
    let cores = Shape::Cores(Cores { lanes: 8, weight_rows: 2, depth: 1, warps: 1, tile: 2, blocks: 1 });
    let refused = |product: Product, shape| product.instance(shape).unwrap_err().to_string();
    assert_eq!(
        refused(of(DType::F32, 40, 2), cores),
        "a product of 2 rows: rows of 40 values are not whole groups of 32"
    );
    assert_eq!(refused(of(DType::Q8_0, 64, 0), cores), "a product of no rows");
    assert_eq!(refused(of(DType::BF16, 64, 8), tiles), "int8 tensor cores do not multiply bf16");
    let dense = Product { order: SumOrder::Down, ..of(DType::Q8_0, 64, 8) };
    assert_eq!(
        refused(dense, tensor),
        "a mixture's dense half adds q8_0 in halves of a block, which tensor cores do not"
    );
    assert_eq!(
        refused(Product { order: SumOrder::GateUp, ..of(DType::Q4_0, 64, 8) }, tiles),
        "tiles are for the order of a matrix-vector product, not of a mixture's dense half"
    );
    let one = OneRow { unbounded: true, ..OneRow::new(DType::Q8_0, 64, 64, Prologue::Plain) };
    let error = refused(Product::new(one.clone(), 8, SumOrder::Matvec), tiles);
    assert_eq!(error, "tensor cores do not multiply q8_0 by activations with fine codes");
    let wide = of(DType::Q8_0, 64, 8);
    let joined = Product { one: OneRow { geglu: true, ..wide.one.clone() }, leaves_panels: true, ..wide };
    let refusal =
        "only tiles of joined outputs on tensor cores, with mbarriers, leave int8, whole groups of 32 of them";
    for shape in [cores, tiles] {
        assert_eq!(refused(joined.clone(), shape), refusal);
    }
    for product in [Product::new(one, 64, SumOrder::Matvec), of(DType::F16, 512, 128), of(DType::Q8_0, 512, 2)] {
        assert!(matches!(product.choose(&target).0, Shape::Cores(_)), "{product:?}");
    }
}

/// Whatever the number of rows, lanes on CUDA cores are those of one row: nothing else of a shape decides bits.
#[test]
fn every_product_of_every_model_gets_a_shape_that_fits() {
    for target in [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm120a].map(Target::of_arch) {
        for dtype in types_with_kernels() {
            for k in [256, 704, 2112, 2560, 5376, 10240, 21504].into_iter().filter(|k| dtype.row_bytes(*k).is_some()) {
                for (outputs, geglu) in [(256, false), (2560, false), (21504, true), (262_144, false)] {
                    let one = OneRow { geglu, ..OneRow::new(dtype, outputs, k as u32, Prologue::Plain) };
                    let lanes = one.shape(&target).lanes;
                    for rows in [2, 3, 4, 8, 16, 32, 64, 128] {
                        let product = Product::new(one.clone(), rows, SumOrder::Matvec);
                        let (shape, why, _) = product.choose(&target);
                        let what = format!("{dtype}, {outputs} x {k}, {why}");
                        let (tile, blocks) = match shape {
                            Shape::Cores(shape) => {
                                assert_eq!(shape.lanes, lanes, "{what}");
                                (shape.tile, shape.blocks)
                            }
                            Shape::Tensor(_) => panic!("{what}: the order of a mixture's dense half"),
                            Shape::Tiles(shape) => (shape.tile(), shape.blocks),
                        };
                        assert!(
                            blocks >= 1 && (blocks == 1 || blocks * rows.div_ceil(tile) <= target.multiprocessors),
                            "{what}"
                        );
                        assert_eq!(product.grid(shape), [blocks, rows.div_ceil(tile), 1], "{what}");
                        let instance = product.instance(shape).unwrap_or_else(|error| panic!("{what}: {error}"));
                        assert!(instance.shared_bytes() as u32 <= target.shared_bytes_per_block, "{what}");
                        let on_tensor_cores = matches!(shape, Shape::Tiles(_));
                        let many = u64::from(outputs) * k * if geglu { 2 } else { 1 } >= 100 << 20;
                        let few = if TensorFormat::of(dtype).is_some_and(|weights| weights.parts == 2) || many {
                            3
                        } else {
                            5
                        };
                        assert_eq!(on_tensor_cores, TensorFormat::of(dtype).is_some() && rows >= few, "{what}");
                    }
                }
            }
        }
    }
}
