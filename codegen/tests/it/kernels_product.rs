//! The matrix product against a plain sum in f64: in the simulator under three orders, and as host-compiled text.

use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::cases::{grouped, product, wgmma};
use gemma4c_codegen::kernels::product::warpgroups::{Source, WgmmaProduct, WgmmaTile};
use gemma4c_codegen::kernels::product::{Product, Tile};
use gemma4c_codegen::target::Target;
use gemma4c_dsl::ElementType;
use gemma4c_dsl::harness::{Case, Executor, Simulator};
use gemma4c_dsl::sim::Order;

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn every_type() {
    check(product::types());
}

#[test]
fn tiles_full_and_not() {
    check(product::shapes());
}

/// The first row of every result, `outputs` values of it, must have the same bits.
fn same_first_rows(cases: &[Case], outputs: usize) {
    let first_row = |case: &Case| {
        let out = case.instance.params().iter().position(|param| param.name == "out").expect("it has a result");
        let results = Simulator(Order::Forward).run(case).expect("the case runs");
        let out = results[out].as_ref().expect("the result is a buffer");
        out.bytes()[..outputs * 4].to_vec()
    };
    let rows: Vec<Vec<u8>> = cases.iter().map(first_row).collect();
    assert!(rows[0].iter().any(|byte| *byte != 0));
    assert!(rows.iter().all(|row| *row == rows[0]));
}

#[test]
fn a_row_does_not_depend_on_its_neighbours_nor_on_the_tile() {
    same_first_rows(&product::first_rows(), 19);
    same_first_rows(&wgmma::first_rows(), 20);
}

#[test]
fn rows_by_expert() {
    check(grouped::products());
}

#[test]
fn a_row_does_not_depend_on_who_else_chose_its_expert() {
    same_first_rows(&grouped::first_pairs(), 19);
    same_first_rows(&grouped::first_pairs_of_warpgroups(), 20);
}

#[test]
fn warpgroups_multiply_in_every_tile() {
    check(wgmma::tiles());
}

#[test]
fn warpgroups_gate_what_they_multiplied() {
    check(wgmma::gated());
}

#[test]
fn warpgroups_multiply_what_bulk_copies_bring() {
    check(wgmma::by_bulk_copies());
}

#[test]
fn warpgroups_decode_weights_on_the_way() {
    check(wgmma::decoding());
}

#[test]
fn teams_decode_for_one_that_multiplies() {
    check(wgmma::by_teams());
}

#[test]
fn a_copy_of_the_weights_changes_no_bit() {
    for dtype in [DType::Q8_0, DType::Q4_0, DType::Q6K, DType::F16] {
        same_first_rows(&wgmma::with_and_without_copy(dtype), 20);
    }
}

#[test]
fn weights_to_bf16() {
    check(wgmma::widening());
}

#[test]
fn warpgroups_take_the_tile_with_the_shortest_waves() {
    let wgmma = WgmmaProduct::plain(ElementType::F32, Source::Copy);
    let h200 = Target::of_arch(Arch::Sm90a);
    let of = |wgmma: &WgmmaProduct, rows, outputs, k| {
        wgmma.choose(rows, outputs, k, &h200).map(|tile| (tile.rows, tile.columns, tile.bulk))
    };
    let tile = |rows, outputs, k| of(&wgmma, rows, outputs, k);
    assert_eq!(tile(2048, 20480, 2560), Some((128, 256, true)));
    assert_eq!(tile(2048, 5376, 21504), Some((128, 256, true)));
    assert_eq!(tile(512, 2560, 10240), Some((128, 96, false)));
    assert_eq!(tile(2048, 2560, 10240), Some((128, 160, false)));
    assert_eq!(tile(7, 2560, 10240), Some((64, 32, false)));
    // Bulk copies bring activations of one matrix, for tiles that every SM has one of.
    let in_parts = WgmmaProduct { part_columns: 256, ..wgmma.clone() };
    assert_eq!(of(&in_parts, 2048, 20480, 2560), Some((128, 256, false)));
    assert!(tile(128, 20480, 2560).is_some_and(|(_, _, bulk)| !bulk));
    // Over planes short products are a team's, long ones are not.
    let planes = WgmmaProduct { source: Source::Planes(DType::Q8_0), ..wgmma.clone() };
    let team =
        |rows, outputs, k| planes.choose(rows, outputs, k, &h200).map(|tile| (tile.rows, tile.columns, tile.team));
    assert_eq!(team(128, 2560, 10240), Some((64, 64, 5)));
    assert_eq!(team(512, 2560, 10240), Some((256, 64, 2)));
    assert_eq!(team(2048, 2560, 10240), Some((160, 128, 0)));
    assert_eq!(team(2048, 20480, 2560), Some((256, 128, 0)));
    // Steps are 64 values, results are stored by fours, and only Hopper has warpgroups that multiply.
    assert_eq!(tile(512, 2560, 2080), None);
    assert_eq!(tile(512, 2562, 2560), None);
    assert_eq!(wgmma.choose(512, 2560, 2560, &Target::of_arch(Arch::Sm89)), None);
}

#[test]
fn sorted_rows_of_many_are_fed() {
    let h200 = Target::of_arch(Arch::Sm90a);
    let tile = |dtype, height| {
        let wgmma = WgmmaProduct::plain(ElementType::F32, Source::Planes(dtype));
        let grouped = WgmmaProduct { pairs: 1, ..wgmma };
        let tile = grouped.choose_grouped(192, height, 2816, 704, &h200)?;
        Some((tile.rows, tile.columns, tile.team))
    };
    assert_eq!(tile(DType::Q4_0, 64), Some((64, 128, 4)));
    assert_eq!(tile(DType::Q4K, 192), Some((192, 128, 2)));
    // Few rows of an expert, and weights of more than a nibble.
    assert_eq!(tile(DType::Q4_0, 32).map(|tile| tile.2), Some(0));
    assert_eq!(tile(DType::Q8_0, 128), Some((128, 128, 0)));
}

#[test]
fn a_fed_ring_of_half_a_warpgroup_of_rows_is_refused() {
    let wgmma = WgmmaProduct::plain(ElementType::F32, Source::Planes(DType::Q4_0));
    let tile = WgmmaTile { rows: 32, columns: 128, team: 4, bulk: false };
    let text = wgmma.instance(tile).expect("the compiler refuses it, not the builder").cuda();
    assert!(text.contains("static_assert(ROWS % 64 == 0"), "{text}");
}

#[test]
fn activations_to_bf16() {
    check(product::rounding());
}

#[test]
fn the_tile_is_the_largest_that_leaves_nobody_without_work() {
    assert_eq!(Tile::choose(7, 262_144, 132), Tile::SMALL);
    assert_eq!(Tile::choose(512, 2560, 132), Tile::MEDIUM);
    assert_eq!(Tile::choose(512, 20480, 132), Tile::LARGE);
}

#[test]
fn a_width_that_is_not_whole_groups_is_refused() {
    let product = Product { dtype: DType::F16, k: 40, out: ElementType::F32, pairs: 0, epilogue: Vec::new() };
    let text = product.instance(Tile::SMALL).expect("the compiler refuses it, not the builder").cuda();
    assert!(text.contains("static_assert(STEP % 32 == 0"), "{text}");
}
