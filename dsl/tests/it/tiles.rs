//! Tiles of rows by bulk copies: where their values lie, what is outside, and the mistakes that the simulator must
//! find.

#[path = "../kernels/tiles.rs"]
mod kernels;

use gemma4c_dsl::harness::{Bound, Case, CaseError, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{FaultKind, LaunchError, Order};
use gemma4c_dsl::{Instance, KernelDef};

fn case(def: &'static KernelDef) -> Case {
    let instance = Instance::of(def).build().expect("an instance without parameters");
    assert_eq!(instance.minimum_capability(), 90);
    Case::new(def.name, instance)
}

fn values(count: usize) -> Vec<BF16> {
    (0..count).map(|i| BF16::from_f32((i % 251) as f32)).collect()
}

#[test]
fn a_tile_lies_swizzled_and_is_zero_outside_the_matrix() {
    for (rows, width, row) in [(64, 64, 32), (40, 64, 32), (33, 72, 0), (7, 184, 5), (3, 64, 32)] {
        let x = values(rows * width);
        let column = (width - 1) / 64 * 64;
        let mut expected = vec![BF16::from_f32(0.0); 2048];
        for (at, value) in expected.iter_mut().enumerate() {
            let (line, piece) = (at / 64, (at % 64 / 8) ^ (at / 64 % 8));
            let from = column + piece * 8 + at % 8;
            if row + line < rows && from < width {
                *value = x[(row + line) * width + from];
            }
        }
        case(kernels::last_tile::DEF)
            .buffer("x", x)
            .scalar("width", width as u32)
            .scalar("row", row as u32)
            .expect("out", expected, Bound::Exact)
            .assert();
    }
}

fn of_32_rows(def: &'static KernelDef, width: usize) -> Case {
    let x = values(32 * width);
    let sums: Vec<f32> = x.chunks(width).map(|row| row.iter().map(|value| value.to_f32()).sum()).collect();
    case(def).buffer("x", x).scalar("width", width as u32).expect("out", sums, Bound::Exact)
}

#[test]
fn tiles_go_round_a_ring() {
    for width in [64, 192, 320] {
        of_32_rows(kernels::sums_of_tiles::DEF, width).assert();
    }
}

/// The second tile comes while the first may still be read.
#[kernel(block = 64, dynamic_shared)]
fn overwrites_what_is_read(x: Tiles<BF16>, width: u32, out: Output<f32>) {
    let tile = shared::<BF16>(2048);
    let full = shared::<u64>(1);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
    }
    barrier();
    let mut sum = 0.0f32;
    for step in 0..width / 64 {
        if thread_idx() == 0 {
            mbarrier_arrive_expect(full, 0u32, 4096);
            tile_load(tile, 0u32, x, step * 64, 0, full, 0u32);
        }
        mbarrier_wait(full, 0u32, step % 2);
        for i in 0u32..64 {
            sum += tile[thread_idx() % 32 * 64 + i].to_f32();
        }
    }
    if thread_idx() < 32 {
        out[thread_idx()] = sum;
    }
}

#[kernel(block = 64, dynamic_shared)]
fn between_patterns(x: Tiles<BF16>, width: u32, out: Output<f32>) {
    let tile = shared::<BF16>(4096);
    let full = shared::<u64>(1);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        mbarrier_arrive_expect(full, 0u32, 4096);
        tile_load(tile, 64u32, x, 0, 0, full, 0u32);
    }
    out[thread_idx()] = width as f32;
}

#[track_caller]
fn finds(case: &Case, kinds: &[FaultKind], text: &str) {
    for order in Order::ALL {
        match case.check_on(&Simulator(order)) {
            Err(CaseError::Launch { source, .. }) => match *source {
                LaunchError::Fault(fault) => {
                    assert!(kinds.contains(&fault.kind) && fault.message.contains(text), "{fault}");
                }
                other => panic!("{}: {other}", case.name),
            },
            other => panic!("{}: the fault was not found: {other:?}", case.name),
        }
    }
}

#[test]
fn misused_tiles_are_found() {
    let early = [FaultKind::Race, FaultKind::UnfinishedCopy, FaultKind::Deadlock];
    finds(&of_32_rows(overwrites_what_is_read::DEF, 128), &early, "");
    let alone = |def, width: usize| {
        let x = values(64 * width);
        case(def).buffer("x", x).scalar("width", width as u32).expect("out", vec![0.0f32; 64], Bound::Exact)
    };
    finds(&alone(between_patterns::DEF, 64), &[FaultKind::Misaligned], "multiple of 1024 bytes");
    finds(&alone(between_patterns::DEF, 68), &[FaultKind::Misaligned], "rows of 136 bytes of `x`");
}
