//! Attention against its definition: in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::attention::Scene;
use gemma4c_codegen::cases::attention::company::{companies, shared_companies};
use gemma4c_codegen::cases::attention::packed::{Packed, attended};
use gemma4c_codegen::cases::attention::step::steps;
use gemma4c_codegen::families::family;
use gemma4c_codegen::kernels::attention::decode::attention_decode;
use gemma4c_codegen::kernels::attention::step::StepOut;
use gemma4c_codegen::kernels::attention::view::{AttentionShape, CacheFormat, DecodeTile, Pipeline};
use gemma4c_codegen::kernels::attention::warpgroups::Block::{One, Two};
use gemma4c_codegen::kernels::attention::warpgroups::{NO_HEADS, NOT_HALVES};
use gemma4c_codegen::kernels::attention::{Attention, SHARED_BYTES};
use gemma4c_dsl::ElementType;
use gemma4c_dsl::harness::{Case, Data, Executor, Simulator};
use gemma4c_dsl::sim::Order;
use gemma4c_plan::cuda::KvType;

#[test]
fn every_case_equals_its_oracle() {
    for case in (family("attention").expect("a family").cases)() {
        case.assert();
    }
}

/// Buffers after a launch.
fn after<const N: usize>(case: &Case, params: [&str; N]) -> [Data; N] {
    let results = Simulator(Order::Seeded(7)).run(case).unwrap_or_else(|error| panic!("{error}"));
    params.map(|param| {
        let at = case.instance.params().iter().position(|p| p.name == param).expect("the kernel has that buffer");
        results[at].clone().expect("it is a buffer")
    })
}

/// The bytes of an output after a launch.
fn output(case: &Case, param: &str) -> Vec<u8> {
    let [data] = after(case, [param]);
    data.bytes().to_vec()
}

/// A chunk in one piece and cut in other ways: not one bit of a row may differ.
fn assert_rows_are_independent(scene: &Scene, cuts: &[&[u32]], param: &str, case: impl Fn(Scene) -> Case) {
    let together = output(&case(scene.clone()), param);
    let row_bytes = together.len() / scene.rows as usize;
    for cut in cuts {
        assert_eq!(cut.iter().sum::<u32>(), scene.rows, "the pieces are the chunk");
        let mut first = 0;
        for &rows in *cut {
            let piece = output(&case(scene.part(first, rows)), param);
            let expected = &together[first as usize * row_bytes..][..rows as usize * row_bytes];
            let name = scene.name;
            assert!(piece == expected, "`{name}`: `{param}` of {rows} rows from {first} on depends on the chunk");
            first += rows;
        }
    }
}

fn layers_of_both_kinds() -> [Attention; 2] {
    let [.., shared_bytes] = SHARED_BYTES;
    let full = Attention {
        head_dim: 128,
        kv_heads: 1,
        group: 2,
        window: None,
        capacity: 120,
        kv: KvType::BF16,
        shared_bytes,
        cluster: 1,
        multiprocessors: 132,
    };
    [full, Attention { window: Some(20), ..full }]
}

#[test]
fn a_decoded_row_has_the_same_bits_in_any_chunk() {
    for layer in layers_of_both_kinds() {
        let scene = Scene::new("a chunk across a segment", layer, 61, 5);
        let cuts: [&[u32]; 2] = [&[1, 1, 1, 1, 1], &[3, 2]];
        // Splits without a visible position leave their values alone: the extrema tell.
        assert_rows_are_independent(&scene, &cuts, "extrema", |scene| scene.decode_case());
        assert_rows_are_independent(&scene, &cuts, "values", |scene| scene.decode_case());
        assert_rows_are_independent(&scene, &cuts, "out", |scene| scene.combine_case());
    }
}

#[test]
fn a_prefilled_row_has_the_same_bits_in_any_chunk() {
    for layer in layers_of_both_kinds() {
        // Tiles of 16 rows and 16 or 32 keys: pieces begin and end inside of them, at their edges, and cover several.
        let scene = Scene::new("a chunk across tiles", layer, 27, 37);
        let cuts: [&[u32]; 5] = [&[1, 36], &[5, 16, 16], &[16, 21], &[21, 1, 15], &[33, 4]];
        assert_rows_are_independent(&scene, &cuts, "out", |scene| scene.flash_case(16, 16, 64));
        assert_rows_are_independent(&scene, &cuts, "out", |scene| scene.flash_case(32, 32, 128));
        assert_rows_are_independent(&scene, &cuts, "out", |scene| scene.warpgroups_case(Two));
        // A head on two blocks, or on two warpgroups of one, across tiles of 64 keys.
        let wide = Attention { head_dim: 512, group: 4, ..layer };
        let scene = Scene::new("a chunk of wide heads", wide, 60, 40);
        assert_rows_are_independent(&scene, &[&[1, 39], &[33, 7]], "out", |scene| scene.warpgroups_case(Two));
        let of = |block| output(&scene.clone().warpgroups_case(block), "out");
        assert!(of(One) == of(Two), "whether a head is on two blocks changes a row");
    }
}

#[test]
fn a_prefilled_row_has_the_same_bits_in_any_segment() {
    for packed in attended() {
        let together = output(&packed.flash_case(32, 16, 64), "out");
        let width = (packed.scenes[0].layer.heads() * packed.scenes[0].layer.head_dim) as usize;
        for (segment, scene) in packed.segments().iter().zip(&packed.scenes) {
            let alone = output(&scene.clone().flash_case(32, 16, 64), "out");
            let found = &together[4 * width * segment.first_row as usize..][..alone.len()];
            assert!(found == alone, "`{}`: {} rows at row {}", packed.name, segment.rows, segment.first_row);
        }
        if packed.scenes[0].layer.fits_warpgroups().is_err() {
            continue;
        }
        let together = output(&packed.warpgroups_case(One), "out");
        for (segment, scene) in packed.segments().iter().zip(&packed.scenes) {
            let alone = output(&scene.clone().warpgroups_case(Two), "out");
            let found = &together[4 * width * segment.first_row as usize..][..alone.len()];
            assert!(found == alone, "`{}`, warpgroups: {} rows at {}", packed.name, segment.rows, segment.first_row);
        }
    }
}

/// A segment that is said to start elsewhere than its rows lie is found out.
#[test]
fn a_segment_with_another_first_row_has_other_values() {
    let packed: Packed = attended().swap_remove(1);
    let mut case = packed.flash_case(32, 16, 64);
    let (_, state) = case.buffers.iter_mut().find(|(name, _)| name == "state").expect("a chunk has segments");
    let segments = packed.segments();
    let mut words = gemma4c_plan::cuda::Segment::words(&segments, segments[1].first_row + segments[1].rows);
    words[4 + 2] -= 1;
    *state = words.into();
    let error = case.check_on(&Simulator(Order::Forward)).expect_err("the first row is wrong").to_string();
    assert!(error.contains("`out`"), "{error}");
}

#[test]
fn the_step_has_the_bits_of_the_kernels_it_stands_for() {
    for step in steps() {
        let name = step.scene.name;
        let [q, k, v] = after(&step.heads_case(), ["q_out", "kv_k", "kv_v"]);
        let (peers, splits) = (step.scene.layer.peers(), step.scene.splits);
        if (peers == 1 && step.grouped < splits) || (peers > 1 && peers < splits) {
            // Merged in another order.
            continue;
        }
        let [extrema, values] = after(&step.splits_case(q, k.clone(), v.clone()), ["extrema", "values"]);
        let merged = |out| step.merge_case(out, extrema.clone(), values.clone());

        let [found_k, found_v, out] = after(&step.case(StepOut::Floats), ["kv_k", "kv_v", "write_out"]);
        assert!(found_k.bytes() == k.bytes() && found_v.bytes() == v.bytes(), "`{name}`: the caches differ");
        let [expected] = after(&merged(StepOut::Floats), ["out"]);
        assert!(out.bytes() == expected.bytes(), "`{name}`: the outputs differ");

        let int8 = after(&step.case(StepOut::Int8), ["write_xq", "write_xscale", "write_xsum"]);
        let expected = after(&merged(StepOut::Int8), ["xq", "xscale", "xsum"]);
        let same = int8.iter().zip(&expected).all(|(found, expected)| found.bytes() == expected.bytes());
        assert!(same, "`{name}`: the int8 outputs differ");

        let [found_extrema, found_values] = after(&step.case(StepOut::Partials), ["parts_extrema", "parts_values"]);
        assert!(found_extrema.bytes() == extrema.bytes(), "`{name}`: the extrema differ");
        let dim = 4 * step.scene.layer.head_dim as usize;
        let parts = extrema.bytes().chunks_exact(8).zip(found_values.bytes().chunks_exact(dim));
        for ((part, found), expected) in parts.zip(values.bytes().chunks_exact(dim)) {
            let saw_nothing = part[4..8] == [0; 4];
            assert!(saw_nothing || found == expected, "`{name}`: the values differ");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_company() {
    for company in companies() {
        let together = output(&company.case(StepOut::Floats), "write_out");
        for (row, bits) in company.rows.iter().zip(together.chunks_exact(together.len() / company.rows.len())) {
            let Some(step) = row else { continue };
            let position = step.scene.position;
            assert!(output(&step.case(StepOut::Floats), "write_out") == bits, "`{}`, {position}", company.name);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whoever_takes_its_splits() {
    for (company, sharing) in shared_companies() {
        let case = company.shared_case(sharing);
        let together = output(&case, "write_out");
        for (row, bits) in company.rows.iter().zip(together.chunks_exact(together.len() / company.rows.len())) {
            let Some(step) = row else { continue };
            let position = step.scene.position;
            assert!(output(&step.case(StepOut::Floats), "write_out") == bits, "`{}`, {position}", case.name);
        }
    }
}

/// Several rows: about as many blocks as a GPU holds at once, and no more results in a block than fit beside its tiles.
#[test]
fn rows_share_out_their_splits() {
    let [roomy, .., tight] = SHARED_BYTES;
    let layer = |head_dim, [kv_heads, group]: [u32; 2], window: Option<u32>| {
        let (capacity, cluster) = (window.map_or(32768, |window| window + 256), 16);
        let (kv, shared_bytes, multiprocessors) = (KvType::F16, roomy, 132);
        Attention { head_dim, kv_heads, group, window, capacity, kv, shared_bytes, cluster, multiprocessors }
    };
    let shared = |layer: Attention, rows| {
        let sharing = layer.sharing(rows, true).expect("an instance")?;
        let bytes = layer.rows(true, StepOut::Floats, sharing).expect("an instance").shared_bytes();
        assert!(bytes <= layer.shared_bytes, "{rows} rows: {bytes} bytes");
        Some((sharing.peers, sharing.turns, sharing.clusters, sharing.ahead))
    };
    let dense = layer(256, [8, 2], Some(1024));
    let dense_full = layer(512, [1, 16], None);
    let small = layer(256, [2, 4], Some(512));
    let small_full = layer(512, [2, 4], None);
    let of = |layer| [2, 8, 32, 128].map(|rows| shared(layer, rows));
    let all = |peers, turns| Some((peers, turns, 1, true));
    assert_eq!(of(dense), [all(4, 4), all(2, 8), Some((1, 16, 1, false)), Some((1, 16, 1, false))]);
    assert_eq!(of(small), [None, None, all(2, 4), Some((1, 8, 1, false))]);
    // Tiles of wider heads leave room for few results, and for no other tile.
    assert_eq!(of(dense_full)[1..], [Some((8, 1, 3, false)), Some((4, 2, 1, false)), Some((4, 2, 1, false))]);
    assert_eq!(of(small_full)[1..], [Some((2, 2, 8, false)), Some((1, 4, 4, false)), Some((1, 4, 1, false))]);

    // One row has a block for each split, and what is merged through memory has no groups.
    assert_eq!(shared(dense, 1), None);
    assert_eq!(shared(Attention { cluster: 1, ..dense }, 32), None);
    // What does not fit is left to more blocks.
    assert_eq!(shared(Attention { shared_bytes: tight, ..dense }, 32), Some((2, 8, 1, false)));
}

/// Every model's layers have work for most multiprocessors of a large GPU, and no more splits than can have any.
#[test]
fn splits_are_fixed_by_the_shape() {
    let shaped = |multiprocessors, kv_heads, window, capacity| {
        let [.., shared_bytes] = SHARED_BYTES;
        let layer = Attention {
            head_dim: 256,
            kv_heads,
            group: 1,
            window,
            capacity,
            kv: KvType::F16,
            shared_bytes,
            cluster: 1,
            multiprocessors,
        };
        (layer.segment(), layer.splits(), layer.grouped())
    };
    let layer = |kv_heads, window, capacity| shaped(132, kv_heads, window, capacity);
    assert_eq!(layer(1, Some(512), 1024), (64, 8, 8));
    assert_eq!(layer(2, Some(512), 1024), (64, 8, 8));
    assert_eq!(layer(8, Some(1024), 1536), (64, 16, 16));
    assert_eq!(layer(16, Some(1024), 1536), (64, 8, 8));
    assert_eq!(layer(1, None, 32768), (64, 264, 17));
    assert_eq!(layer(2, None, 262_144), (64, 132, 12));
    assert_eq!(layer(4, None, 32768), (64, 66, 9));
    assert_eq!(layer(4, None, 100), (64, 2, 2));
    assert_eq!(layer(300, None, 100), (64, 1, 1));

    // A smaller GPU has fewer of them, and a window's splits take more turns before half of them wait.
    assert_eq!(shaped(60, 16, Some(1024), 1536), (64, 4, 4));
    assert_eq!(shaped(60, 1, None, 32768), (64, 120, 11));
    assert_eq!(shaped(170, 16, Some(1024), 1536), (64, 8, 8));

    let clusters = |multiprocessors, kv_heads, window, capacity| {
        let [shared_bytes, ..] = SHARED_BYTES;
        let kv = KvType::F16;
        let (head_dim, group, cluster) = (512, 1, 16);
        let layer =
            Attention { head_dim, kv_heads, group, window, capacity, kv, shared_bytes, cluster, multiprocessors };
        (layer.splits(), layer.peers())
    };
    let clustered = |kv_heads, window, capacity| clusters(132, kv_heads, window, capacity);
    assert_eq!(clusters(112, 1, None, 32768), (96, 8));
    assert_eq!(clusters(170, 1, None, 32768), (152, 8));
    assert_eq!(clustered(2, Some(512), 1024), (8, 8));
    assert_eq!(clustered(8, Some(1024), 1536), (16, 16));
    assert_eq!(clustered(1, Some(4096), 4100), (64, 1), "more than a cluster holds");
    assert_eq!(clustered(1, None, 32768), (120, 8));
    assert_eq!(clustered(2, None, 32768), (60, 4));
    assert_eq!(clustered(4, None, 32768), (28, 4));
    assert_eq!(clustered(1, None, 1000), (16, 8));
    assert_eq!(clustered(1, None, 200), (4, 4));
    assert_eq!(clustered(1, None, 30), (1, 1));
}

/// Warps that are left over, and tiles too short for all warps of a slice: the text's assertion and the simulator's.
#[test]
fn slices_of_a_head_that_warps_do_not_share_out_are_refused() {
    let scene = Scene::new("slices", Attention { capacity: 512, ..layers_of_both_kinds()[0] }, 33, 1);
    let Attention { head_dim, group, .. } = scene.layer;
    let tile =
        |slices| DecodeTile { KEYS: 64, THREADS: 256, VECTOR: 8, SETS: group.div_ceil(8), SLICES: slices, RESIDENT: 1 };
    let sliced = |slices| attention_decode::Chosen {
        S: AttentionShape { D: head_dim, GROUP: group },
        C: CacheFormat::of(KvType::BF16),
        T: tile(slices),
        P: Pipeline::of_split(KvType::BF16, false),
        KV: ElementType::BF16,
        operands: vec![],
    };
    for (slices, is_refused) in [(8, false), (4, false), (3, true), (1, true)] {
        let mut case = scene.decode_case();
        case.instance = sliced(slices).build().expect("the compiler refuses it, not the builder");
        assert!(case.instance.cuda().contains("static_assert(!TENSOR || (THREADS / 32 % SLICES == 0"));
        let refusal = case.check_on(&Simulator(Order::Forward)).map_err(|error| error.to_string()).err();
        let by_slices = |error: &String| error.contains("require!(!C.TENSOR || T.THREADS / 32 % T.SLICES == 0");
        assert_eq!(refusal.as_ref().is_some_and(by_slices), is_refused, "{slices} slices: {refusal:?}");
    }
}

/// What warpgroups do not take is refused by name, and a block fits on Hopper.
#[test]
fn warpgroups_take_halves_and_whole_tiles_of_columns() {
    let [roomy, ..] = SHARED_BYTES;
    let [full, _] = layers_of_both_kinds();
    for head_dim in [64, 128, 256, 512] {
        let layer = Attention { head_dim, ..full };
        assert_eq!(layer.fits_warpgroups(), Ok(()));
        for block in [One, Two] {
            let bytes = layer.warpgroups(block, ElementType::BF16, false).expect("an instance").shared_bytes();
            assert!(bytes <= roomy, "heads of {head_dim}: {bytes} bytes");
        }
    }
    // Blocks of one warpgroup while each can have an SM for itself: heads of 512 take two blocks.
    let layer = |head_dim| Attention { head_dim, kv_heads: 2, group: 4, ..full };
    assert_eq!([512, 1024, 2048].map(|rows| layer(256).block_for(rows)), [One, One, Two]);
    assert_eq!([32, 512, 1024].map(|rows| layer(512).block_for(rows)), [One, One, Two]);
    assert_eq!(Attention { head_dim: 96, ..full }.fits_warpgroups(), Err(NO_HEADS));
    assert_eq!(Attention { kv: KvType::Q8_0, ..full }.fits_warpgroups(), Err(NOT_HALVES));
    assert_eq!(Attention { kv: KvType::F32, ..full }.fits_warpgroups(), Err(NOT_HALVES));
}

#[test]
fn flash_takes_the_largest_tile_that_fits() {
    let layer = |kv, shared_bytes| Attention {
        head_dim: 512,
        kv_heads: 1,
        group: 8,
        window: None,
        capacity: 64,
        kv,
        shared_bytes,
        cluster: 1,
        multiprocessors: 132,
    };
    let rows =
        |kv, shared| layer(kv, shared).flash(ElementType::F32, false).expect("an instance").map(|flash| flash.rows);
    assert_eq!(rows(KvType::BF16, 227 * 1024), Some(64));
    assert_eq!(rows(KvType::F16, 99 * 1024), Some(32));
    assert_eq!(rows(KvType::F16, 48 * 1024), None);
    assert_eq!(rows(KvType::F32, 227 * 1024), None);
}
