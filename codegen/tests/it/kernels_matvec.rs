//! The matrix-vector product against a plain sum in f64: in the simulator under three orders, and as host-compiled text.

use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::cases::adapter::Adapter;
use gemma4c_codegen::cases::matvec;
use gemma4c_codegen::kernels::matvec::LaunchShape;
use gemma4c_codegen::kernels::matvec::formats::types_with_kernels;
use gemma4c_codegen::kernels::matvec::shape::whole_groups_pay;
use gemma4c_codegen::kernels::matvec::{Product, Prologue};
use gemma4c_codegen::target::Target;
use gemma4c_dsl::ElementType;
use gemma4c_dsl::harness::{Bound, Case, Data, Simulator};
use gemma4c_dsl::sim::Order;

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn every_type() {
    check(matvec::types());
}

#[test]
fn shapes_that_leave_lanes_warps_or_blocks_over() {
    check(matvec::shapes());
}

#[test]
fn eight_lanes_have_the_bits_of_all() {
    check(matvec::stretches());
}

#[test]
fn prologues_and_epilogues() {
    check(matvec::fusions());
}

#[test]
fn massive_channels_cost_their_neighbours_nothing() {
    check(matvec::massive_channels());
}

/// What the five models' products read: model, attention, feed-forward and per-layer widths.
const WIDTHS: &[u32] =
    &[256, 704, 1536, 2048, 2112, 2560, 2816, 3840, 4096, 5376, 6144, 8192, 10240, 12288, 15360, 16384, 21504];

fn h200() -> Target {
    Target::of_arch(Arch::Sm90a)
}

#[test]
fn every_product_of_every_model_gets_a_shape_that_fits() {
    for dtype in types_with_kernels() {
        for &k in WIDTHS.iter().filter(|&&k| dtype.row_bytes(u64::from(k)).is_some()) {
            let products = [(1, false), (256, false), (2560, false), (21504, true), (262_144, false), (6144, true)];
            for (outputs, geglu) in products {
                let leaves_int8 = outputs == 6144;
                let product = Product { geglu, leaves_int8, ..Product::new(dtype, outputs, k, Prologue::Plain) };
                let shape = product.shape(&h200());
                let LaunchShape { lanes, rows, depth, warps, blocks, share } = shape;
                let what = format!("{dtype}, {outputs} x {k}: {shape:?}");
                assert!([8, 16, 32].contains(&lanes) && rows <= lanes && depth >= 1, "{what}");
                assert!(!geglu || rows % 2 == 0, "{what}");
                assert!((1..=132 * 768 / (warps * 32)).contains(&blocks), "{what}");
                assert_eq!((share > 0, share % 32), (leaves_int8, 0), "{what}");
                // A block that is launched has rows to work on.
                assert!(
                    share > 0 && (blocks - 1) * share < outputs
                        || (blocks - 1) * warps * (32 / lanes) * if geglu { rows / 2 } else { rows } < outputs,
                    "{what}"
                );
                let instance = product.instance(shape).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(instance.shared_bytes() as u32 <= Arch::Sm89.max_shared_bytes_per_block(), "{what}");
            }
        }
    }
}

#[test]
fn whole_groups_pay_unless_many_sms_have_none() {
    // Gate and up of E2B, E4B, 12B and 31B.
    for (outputs, k) in [(6144, 1536), (10240, 2560), (15360, 3840), (21504, 5376)] {
        for of_32 in [18, 34] {
            assert!(whole_groups_pay(outputs, u64::from(outputs) * 2 * k / 32 * of_32, &h200()), "{outputs}");
        }
    }
    assert!(!whole_groups_pay(1024, 40 << 20, &h200()), "three of four SMs have no group");
    assert!(!whole_groups_pay(100, 1, &h200()), "the last group is not whole");
}

fn gate_and_up(dtype: DType, outputs: u32, k: u32) -> Product {
    Product { geglu: true, leaves_int8: true, ..Product::new(dtype, outputs, k, Prologue::ResidualNorm) }
}

#[test]
fn groups_behind_the_last_full_round_are_spread_where_many_bytes_are_theirs() {
    for (dtype, outputs, k, share, blocks, loose) in [
        (DType::Q8_0, 10240, 2560, 64, 132, 1792),
        (DType::Q4_0, 21504, 5376, 160, 132, 384),
        (DType::Q4_0, 15360, 3840, 128, 120, 0),
        (DType::Q8_0, 12288, 1536, 96, 128, 0),
        (DType::Q8_0, 6144, 1536, 64, 96, 0),
    ] {
        let shape = gate_and_up(dtype, outputs, k).shape(&h200());
        assert_eq!((shape.share, shape.blocks, shape.loose(outputs)), (share, blocks, loose), "{dtype}, {outputs}");
    }
}

/// Rows a warp, warps and blocks of products on an H200, each of a type, outputs and activations.
fn assert_shapes(prologue: Prologue, products: &[(DType, u32, u32, [u32; 3])]) {
    for &(dtype, outputs, k, expected) in products {
        let shape = Product::new(dtype, outputs, k, prologue).shape(&h200());
        assert_eq!([shape.rows, shape.warps, shape.blocks], expected, "{dtype}, {outputs} x {k}");
    }
}

#[test]
fn short_products_leave_sms_to_their_successors() {
    // Output projections of E4B and E2B.
    assert_shapes(
        Prologue::Int8,
        &[
            (DType::Q8_0, 2560, 2048, [2, 14, 92]),
            (DType::Q4_0, 2560, 4096, [2, 14, 92]),
            (DType::Q8_0, 1536, 2048, [2, 12, 64]),
        ],
    );
    // The first down products of E2B, of which two whole rows are on their way; those of Q4_0 that are as long have all SMs, and so has an output projection of 26B-A4B Q8_0, in one round.
    assert_shapes(
        Prologue::Int8,
        &[
            (DType::Q8_0, 1536, 6144, [2, 12, 64]),
            (DType::Q4_0, 1536, 6144, [2, 12, 64]),
            (DType::Q4_0, 1536, 12288, [1, 12, 128]),
            (DType::Q8_0, 2816, 4096, [2, 11, 128]),
            (DType::Q8_0, 2816, 8192, [2, 11, 128]),
        ],
    );
    // Down of E4B and 12B is long, and an output projection of 12B has too many rows for fewer SMs.
    assert_shapes(
        Prologue::Int8,
        &[
            (DType::Q8_0, 2560, 10240, [1, 20, 128]),
            (DType::Q4_0, 3840, 15360, [2, 15, 128]),
            (DType::Q4_0, 3840, 4096, [2, 20, 96]),
        ],
    );
}

#[test]
fn a_product_that_norms_first_has_a_warp_for_each_128_of_its_activations() {
    // Queries of E2B and E4B. Those of 31B and 26B-A4B are several rounds, by warps with three and with two chunks each; warps of 12B with whole chunks would be idle too often.
    assert_shapes(
        Prologue::ResidualNorm,
        &[
            (DType::Q8_0, 2048, 1536, [2, 12, 86]),
            (DType::Q8_0, 2048, 2560, [2, 20, 52]),
            (DType::Q4_0, 16384, 5376, [2, 14, 132]),
            (DType::Q4_0, 8192, 2816, [2, 11, 132]),
            (DType::Q4_0, 8192, 3840, [2, 16, 132]),
        ],
    );
}

#[test]
fn eight_lanes_take_rows_that_would_leave_a_quarter_of_32_idle() {
    // Queries, and gate and up of E2B; heads have too many rounds, and rows of E4B would not be whole.
    let lanes = |product: Product| {
        let LaunchShape { lanes, rows, depth, warps, .. } = product.shape(&h200());
        [lanes, rows, depth, warps]
    };
    let of = |dtype, outputs, k| Product::new(dtype, outputs, k, Prologue::ResidualNorm);
    assert_eq!(lanes(of(DType::Q4_0, 2048, 1536)), [8, 1, 6, 12]);
    assert_eq!(lanes(gate_and_up(DType::Q4_0, 12288, 1536)), [8, 2, 6, 12]);
    assert_eq!(lanes(of(DType::Q8_0, 2048, 1536))[0], 32);
    assert_eq!(lanes(of(DType::Q4_0, 262_144, 1536))[0], 32);
    assert_eq!(lanes(gate_and_up(DType::Q4_0, 10240, 2560))[0], 32);
}

#[test]
fn long_products_and_wide_pairs_have_whole_rows_on_their_way() {
    // LM heads of all sizes; four rows of 31B Q8_0 are not whole, because no row would fit.
    for (dtype, k, expected) in [
        (DType::Q4_0, 1536, [4, 2, 16]),
        (DType::Q8_0, 1536, [4, 3, 12]),
        (DType::Q8_0, 2816, [2, 6, 12]),
        (DType::Q8_0, 2560, [2, 5, 16]),
        (DType::Q4_0, 2816, [2, 3, 20]),
        (DType::Q4_0, 3840, [2, 4, 16]),
        (DType::Q4_0, 5376, [1, 6, 20]),
        (DType::Q8_0, 5376, [4, 3, 14]),
    ] {
        let LaunchShape { rows, depth, warps, .. } =
            Product::new(dtype, 262_144, k, Prologue::ResidualNorm).shape(&h200());
        assert_eq!([rows, depth, warps], expected, "{dtype}, {k}");
    }
    // Gate and up of 12B and 31B Q4_0 have two rows and fewer warps for it, those of E4B have four; of Q8_0 no warps have room, so theirs have whole chunks to norm.
    for (dtype, outputs, k, expected) in [
        (DType::Q8_0, 21504, 5376, [2, 6, 14]),
        (DType::Q4_0, 21504, 5376, [2, 6, 12]),
        (DType::Q8_0, 10240, 2560, [2, 5, 20]),
        (DType::Q4_0, 10240, 2560, [4, 3, 16]),
        (DType::Q4_0, 15360, 3840, [2, 4, 16]),
    ] {
        let LaunchShape { rows, depth, warps, .. } = gate_and_up(dtype, outputs, k).shape(&h200());
        assert_eq!([rows, depth, warps], expected, "{dtype}, {outputs} x {k}");
    }
}

#[test]
fn the_largest_products_keep_memory_busy() {
    // Gate and up of E4B and 31B, and the LM heads.
    for (outputs, k, geglu) in
        [(10240, 2560, true), (21504, 5376, true), (262_144, 2560, false), (262_144, 5376, false)]
    {
        for dtype in [DType::Q8_0, DType::Q4_0, DType::Q4K, DType::Q6K] {
            let product = Product { geglu, ..Product::new(dtype, outputs, k, Prologue::ResidualNorm) };
            let LaunchShape { rows, depth, warps, blocks, .. } = product.shape(&h200());
            let unit_bytes = if dtype == DType::Q6K { 24 } else { 16 };
            let bytes = blocks * warps * 32 * rows * depth * unit_bytes / 132;
            assert!(bytes >= 40 << 10, "{outputs} x {k}, {dtype}: {bytes} bytes on their way");
        }
    }
}

/// Why four outputs of such a product cannot be simulated.
fn refusal(product: &Product, give: impl FnOnce(Case) -> Case) -> String {
    let shape = LaunchShape { lanes: 8, rows: 2, depth: 1, warps: 1, blocks: 1, share: 0 };
    let none = Vec::<f32>::new;
    let case = Case::new("refused", product.instance(shape).unwrap())
        .buffer("codes", Data::new(ElementType::U32x4, vec![0; 4 * 64 * 2]))
        .buffer("update_norm", none())
        .buffer("branch_norm", none())
        .buffer("post_norm", none())
        .buffer("next_norm", none())
        .scalar("rows", 4u32)
        .expect("out", vec![0.0f32; 4], Bound::Exact);
    Adapter::give(None, give(case)).check_on(&Simulator(Order::Forward)).unwrap_err().to_string()
}

#[test]
fn int8_activations_are_refused_for_float_weights() {
    let error = refusal(&Product::new(DType::BF16, 4, 32, Prologue::Int8), |case| {
        case.buffer("ready_xq", vec![0u32; 8])
            .buffer("ready_group_xscale", vec![0.0f32])
            .buffer("ready_group_xsum", vec![0i32])
    });
    assert!(error.contains("require!(!READY || INTEGER)"), "{error}");
}

#[test]
fn eight_lanes_are_refused_a_row_that_is_not_whole() {
    let product = Product::new(DType::Q4_0, 4, 512, Prologue::Plain);
    let error =
        refusal(&product, |case| case.buffer("side_scales", vec![0u32; 32]).buffer("input_x", vec![0.0f32; 512]));
    assert!(error.contains("K / UNIT <= 8 * DEPTH"), "{error}");
}

#[test]
fn loose_values_are_refused_where_nothing_is_int8() {
    let product = Product { loose: 32, ..Product::new(DType::Q8_0, 4, 64, Prologue::Plain) };
    let error = refusal(&product, |case| case.buffer("side_scales", vec![0u32; 4]).buffer("input_x", vec![0.0f32; 64]));
    assert!(error.contains("LOOSE == 0 || READY"), "{error}");
}
