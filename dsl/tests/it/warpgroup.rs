//! Products of whole warpgroups against plain loops, and the mistakes that the simulator must find in them.

use gemma4c_dsl::harness::{Bound, Case, CaseError, Data, Executor, Random, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{FaultKind, LaunchError, Order};
use gemma4c_dsl::{ElementType, Instance};

/// A warpgroup's product, two steps along k: rows of `a` and `b` are copied to swizzled tiles.
#[kernel(block = 128, dynamic_shared)]
fn product_by_warpgroup<const COLUMNS: u32>(a: Input<BF16>, b: Input<BF16>, out: Output<f32>) {
    let a_tile = shared::<BF16>(4096);
    let b_tile = shared::<BF16>(COLUMNS * 64);
    for at in (thread_idx()..512).by(128) {
        let row = at / 8;
        cp_async16(a_tile, row * 64 + (at % 8 ^ row % 8) * 8, a, at * 8);
    }
    for at in (thread_idx()..COLUMNS * 8).by(128) {
        let row = at / 8;
        cp_async16(b_tile, row * 64 + (at % 8 ^ row % 8) * 8, b, at * 8);
    }
    cp_async_commit();
    cp_async_wait(0);
    fence_proxy_async();
    barrier();

    let mut sums = regs(1.0f32, COLUMNS / 2);
    wgmma_fence(&mut sums);
    wgmma_bf16(&mut sums, a_tile, b_tile);
    wgmma_bf16(&mut sums, a_tile.offset(16u32), b_tile.offset(16u32));
    wgmma_commit();
    wgmma_bf16(&mut sums, a_tile.offset(48u32), b_tile.offset(48u32));
    wgmma_commit();
    wgmma_wait(1, &mut sums);
    wgmma_wait(0, &mut sums);
    let row = warp_id() * 16 + lane_id() / 4;
    #[unroll]
    for i in 0..COLUMNS / 2 {
        out[(row + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + lane_id() % 4 * 2 + i % 2] = sums[i];
    }
}

#[test]
fn products_of_a_warpgroup() {
    for columns in [32, 96, 256] {
        let mut random = Random::new(columns as u64);
        let a: Vec<BF16> = random.floats(64 * 64, -1.0, 1.0).into_iter().map(BF16::from_f32).collect();
        let b: Vec<BF16> = random.floats(columns * 64, -1.0, 1.0).into_iter().map(BF16::from_f32).collect();
        let multiplied = |k: &usize| !(32..48).contains(k);
        let term = |row: usize, column: usize, k: usize| a[row * 64 + k].to_f32() * b[column * 64 + k].to_f32();
        let sum = |row, column| 1.0 + (0..64).filter(multiplied).map(|k| term(row, column, k)).sum::<f32>();
        let expected: Vec<f32> = (0..64 * columns).map(|i| sum(i / columns, i % columns)).collect();
        for kernel in [product_by_warpgroup::DEF, product_of_registers::DEF] {
            let instance = Instance::of(kernel).constant("COLUMNS", columns as u32).build().unwrap();
            assert!(instance.needs_warpgroups());
            assert!(instance.cuda().contains("SWIZZLED_SHARED("));
            Case::new(format!("64 x {columns} x 48"), instance)
                .buffer("a", a.clone())
                .buffer("b", b.clone())
                .expect("out", expected.clone(), Bound::Within { absolute: 1e-5, relative: 1e-5 })
                .assert();
        }
    }
}

/// The same product with the left operand in registers.
#[kernel(block = 128, dynamic_shared)]
fn product_of_registers<const COLUMNS: u32>(a: Input<BF16>, b: Input<BF16>, out: Output<f32>) {
    let b_tile = shared::<BF16>(COLUMNS * 64);
    for at in (thread_idx()..COLUMNS * 8).by(128) {
        let row = at / 8;
        cp_async16(b_tile, row * 64 + (at % 8 ^ row % 8) * 8, b, at * 8);
    }
    cp_async_commit();
    cp_async_wait(0);
    fence_proxy_async();
    barrier();

    let row = warp_id() * 16 + lane_id() / 4;
    let mut held = regs(U32x4::ZERO, 4);
    #[unroll]
    for i in 0u32..4 {
        let at = row * 64 + i * 16 + lane_id() % 4 * 2;
        held[i] = u32x4(load::<u32>(a, at), load::<u32>(a, at + 512), load::<u32>(a, at + 8), load::<u32>(a, at + 520));
    }
    let mut sums = regs(1.0f32, COLUMNS / 2);
    wgmma_fence(&mut sums);
    wgmma_b16_held(&mut sums, held[0], b_tile, 0);
    wgmma_b16_held(&mut sums, held[1], b_tile, 16);
    wgmma_commit();
    wgmma_b16_held(&mut sums, held[3], b_tile, 48);
    wgmma_commit();
    wgmma_wait(1, &mut sums);
    wgmma_wait(0, &mut sums);
    #[unroll]
    for i in 0..COLUMNS / 2 {
        out[(row + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + lane_id() % 4 * 2 + i % 2] = sums[i];
    }
}

/// A product of either 16-bit float whose left operand comes out of another product, and whose right one has its
/// columns innermost: `(a · bᵀ) · c`.
#[kernel(block = 128, dynamic_shared)]
fn product_across<const COLUMNS: u32, const BF: bool, T: Float>(
    a: Input<T>,
    b: Input<T>,
    c: Input<T>,
    out: Output<f32>,
) {
    let a_tile = shared::<T>(4096);
    let b_tile = shared::<T>(4096);
    let c_tile = shared::<T>(COLUMNS * 64);
    for at in (thread_idx()..512).by(128) {
        let row = at / 8;
        cp_async16(a_tile, row * 64 + (at % 8 ^ row % 8) * 8, a, at * 8);
        cp_async16(b_tile, row * 64 + (at % 8 ^ row % 8) * 8, b, at * 8);
    }
    for at in (thread_idx()..COLUMNS * 8).by(128) {
        let row = at / (COLUMNS / 8);
        let piece = at % (COLUMNS / 8);
        cp_async16(c_tile, piece / 8 * 4096 + row * 64 + (piece % 8 ^ row % 8) * 8, c, at * 8);
    }
    cp_async_commit();
    cp_async_wait(0);
    fence_proxy_async();
    barrier();

    let mut between = regs(0.0f32, 32);
    wgmma_fence(&mut between);
    #[unroll]
    for i in 0u32..4 {
        wgmma_b16(&mut between, a_tile.offset(i * 16), b_tile.offset(i * 16));
    }
    wgmma_commit();
    wgmma_wait(0, &mut between);
    let mut held = regs(U32x4::ZERO, 4);
    #[unroll]
    for i in 0u32..4 {
        let mut words = regs(0u32, 4);
        #[unroll]
        for pair in 0u32..4 {
            let from = i * 8 + pair * 2;
            if BF {
                words[pair] = pack_bf16(between[from], between[from + 1]);
            } else {
                words[pair] = pack_f16(between[from], between[from + 1]);
            }
        }
        held[i] = u32x4(words[0], words[1], words[2], words[3]);
    }
    let mut sums = regs(0.0f32, COLUMNS / 2);
    wgmma_fence(&mut sums);
    #[unroll]
    for i in 0u32..4 {
        wgmma_b16_held_across(&mut sums, held[i], c_tile.offset(i * 1024), 4096);
    }
    wgmma_commit();
    wgmma_wait(0, &mut sums);
    let row = warp_id() * 16 + lane_id() / 4;
    #[unroll]
    for i in 0..COLUMNS / 2 {
        out[(row + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + lane_id() % 4 * 2 + i % 2] = sums[i];
    }
}

/// Whole numbers, which either type holds exactly.
#[test]
fn products_of_right_operands_across() {
    for (columns, bf) in [(64, true), (64, false), (128, false), (256, true)] {
        let mut random = Random::new(columns as u64);
        let mut whole = |count: usize| -> Vec<f32> { (0..count).map(|_| random.below(5) as f32 - 2.0).collect() };
        let (a, b, c) = (whole(4096), whole(4096), whole(64 * columns));
        // One value of `a` to a row, so that what is rounded between the products is small.
        let a: Vec<f32> = a.iter().enumerate().map(|(i, value)| if i % 64 == i / 64 { *value } else { 0.0 }).collect();
        let between = |row: usize, k: usize| a[row * 65] * b[k * 64 + row];
        let sum = |row: usize, column: usize| (0..64).map(|k| between(row, k) * c[k * columns + column]).sum::<f32>();
        let expected: Vec<f32> = (0..64 * columns).map(|i| sum(i / columns, i % columns)).collect();
        let element = if bf { ElementType::BF16 } else { ElementType::F16 };
        let data = |values: &[f32]| -> Data {
            match bf {
                true => values.iter().map(|value| BF16::from_f32(*value)).collect::<Vec<_>>().into(),
                false => values.iter().map(|value| F16::from_f32(*value)).collect::<Vec<_>>().into(),
            }
        };
        let instance = Instance::of(product_across::DEF)
            .constant("COLUMNS", columns as u32)
            .constant("BF", bf)
            .element("T", element)
            .build()
            .unwrap();
        Case::new(format!("64 x {columns}, {}", element.name()), instance)
            .buffer("a", data(&a))
            .buffer("b", data(&b))
            .buffer("c", data(&c))
            .expect("out", expected, Bound::Exact)
            .assert();
    }
}

/// One of several mistakes; none for 0.
#[kernel(block = 128, dynamic_shared)]
fn mistaken<const MISTAKE: u32>(x: Input<BF16>, out: Output<f32>) {
    let tile = shared::<BF16>(4096);
    for at in (thread_idx()..512).by(128) {
        store(tile, at * 8, load::<U32x4>(x, at * 8));
    }
    if MISTAKE != 1 {
        fence_proxy_async();
    }
    barrier();
    let mut sums = regs(0.0f32, 32);
    if MISTAKE != 2 {
        wgmma_fence(&mut sums);
    }
    if MISTAKE != 3 || warp_id() > 0 {
        wgmma_bf16(&mut sums, tile.offset(if MISTAKE == 4 { 64u32 } else { 0u32 }), tile);
    }
    wgmma_commit();
    if MISTAKE == 5 {
        tile[thread_idx()] = BF16::from_f32(0.0);
    }
    if MISTAKE != 6 {
        wgmma_wait(0, &mut sums);
    }
    if MISTAKE == 7 {
        wgmma_bf16(&mut sums, tile, tile);
        wgmma_commit();
        wgmma_wait(0, &mut sums);
    }
    out[thread_idx()] = sums[0];
}

fn case_of(mistake: u32) -> Case {
    let instance = Instance::of(mistaken::DEF).constant("MISTAKE", mistake).build().expect("the constant is set");
    let zeros = vec![0.0f32; 128];
    Case::new("planted", instance).buffer("x", vec![BF16::from_f32(0.0); 4096]).expect("out", zeros, Bound::Exact)
}

#[test]
fn mistakes_around_products_are_found_in_every_order() {
    case_of(0).assert();
    let planted = [
        (1, FaultKind::MissingFence, "without fence_proxy_async() since"),
        (2, FaultKind::MissingFence, "without wgmma_fence()"),
        (3, FaultKind::Divergence, "all 128 threads of a warpgroup"),
        (4, FaultKind::Misaligned, "starts in the first row of a pattern"),
        (5, FaultKind::Race, "with no barrier between"),
        (6, FaultKind::UnfinishedProduct, "a wgmma that nobody waited for"),
        (7, FaultKind::MissingFence, "since the last wait"),
    ];
    for (mistake, kind, message) in planted {
        for order in Order::ALL {
            let result = Simulator(order.clone()).run(&case_of(mistake));
            let Err(CaseError::Launch { source, .. }) = result else { panic!("{kind:?}, {order:?}: not found") };
            let LaunchError::Fault(fault) = *source else { panic!("{source}") };
            assert_eq!(fault.kind, kind, "{fault}");
            assert!(fault.to_string().contains(message), "{fault}");
        }
    }
}

/// Reads its accumulator while the product is on its way.
#[kernel(block = 128, dynamic_shared)]
fn reads_too_early(x: Input<BF16>, out: Output<f32>) {
    let tile = shared::<BF16>(4096);
    for at in (thread_idx()..512).by(128) {
        store(tile, at * 8, load::<U32x4>(x, at * 8));
    }
    fence_proxy_async();
    barrier();
    let mut sums = regs(0.0f32, 32);
    wgmma_fence(&mut sums);
    wgmma_bf16(&mut sums, tile, tile);
    wgmma_commit();
    out[thread_idx()] = sums[0];
    wgmma_wait(0, &mut sums);
}

#[test]
fn an_accumulator_is_hidden_until_the_wait() {
    let case = Case::new("zeros", Instance::of(reads_too_early::DEF).build().unwrap())
        .buffer("x", vec![BF16::from_f32(0.0); 4096])
        .expect("out", vec![0.0f32; 128], Bound::Exact);
    let found = case.check_on(&Simulator(Order::Forward));
    assert!(matches!(found, Err(CaseError::Mismatch { .. })), "{found:?}");
}
