//! Blocks that wait for each other: counters with release and acquire, relaxed accesses, and the mistakes found in them.

#[path = "../kernels/ordered.rs"]
mod kernels;

use gemma4c_dsl::harness::{Bound, Case, CaseError, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{Fault, FaultKind, LaunchError, Order};
use gemma4c_dsl::{Instance, KernelDef};

fn case(def: &'static KernelDef, blocks: u32) -> Case {
    let instance = Instance::of(def).build().expect("an instance without parameters");
    assert_eq!(instance.minimum_capability(), 80);
    Case::new(format!("{blocks} blocks"), instance).grid([blocks, 1, 1])
}

fn faults(case: &Case) -> Vec<Fault> {
    let fault = |order: Order| match case.check_on(&Simulator(order)) {
        Err(CaseError::Launch { source, .. }) => match *source {
            LaunchError::Fault(fault) => *fault,
            other => panic!("{other}"),
        },
        other => panic!("the fault was not found: {other:?}"),
    };
    Order::ALL.map(fault).into()
}

#[test]
fn what_is_released_may_be_read_after_the_acquire() {
    for blocks in [1, 2, 7] {
        let count = blocks * 64;
        let pieces: Vec<u32> = (0..count).map(|i| 3 * i).collect();
        let out: Vec<u32> = (0..count).map(|i| 3 * ((i + 64) % count)).collect();
        case(kernels::exchange::DEF, blocks)
            .buffer("counter", vec![0u32])
            .buffer("pieces", vec![0u32; count as usize])
            .expect("pieces", pieces, Bound::Exact)
            .expect("counter", vec![blocks], Bound::Exact)
            .expect("out", out, Bound::Exact)
            .assert();
    }
}

#[test]
fn relaxed_accesses_are_whole() {
    let from = |i: u32| (i + 32) % 96;
    case(kernels::mailboxes::DEF, 3)
        .buffer("slots", vec![0u32; 192])
        .buffer("wide", vec![U32x4::ZERO; 96])
        .expect("out", (0..96).map(|i| from(i) + 100 + 1000 * from(i)).collect::<Vec<u32>>(), Bound::Exact)
        .assert();
}

/// Publishes with an update that releases nothing.
#[kernel(block = 32)]
fn not_released(counter: InOut<u32>, pieces: InOut<u32>, out: Output<u32>) {
    let i = block_idx() * 32 + thread_idx();
    pieces[i] = i;
    barrier();
    if thread_idx() == 0 {
        atomic_add(counter, 0u32, 1);
        atomic_wait_acquire(counter, 0u32, grid_dim());
    }
    barrier();
    out[i] = pieces[(i + 32) % (grid_dim() * 32)];
}

/// Publishes what other threads of the block may not have written yet.
#[kernel(block = 64)]
fn released_too_early(counter: InOut<u32>, pieces: InOut<u32>, out: Output<u32>) {
    let i = block_idx() * 64 + thread_idx();
    pieces[i] = i;
    // A barrier belongs here.
    if thread_idx() == 0 {
        atomic_add_release(counter, 0u32, 1);
    }
    atomic_wait_acquire(counter, 0u32, grid_dim());
    out[i] = pieces[(i + 64) % (grid_dim() * 64)];
}

/// Waits with an access that acquires nothing.
#[kernel(block = 32)]
fn not_acquired(counter: InOut<u32>, pieces: InOut<u32>, out: Output<u32>) {
    let i = block_idx() * 32 + thread_idx();
    pieces[i] = i;
    barrier();
    if thread_idx() == 0 {
        atomic_add_release(counter, 0u32, 1);
    }
    while atomic_load_relaxed::<u32>(counter, 0u32) < grid_dim() {}
    out[i] = pieces[(i + 32) % (grid_dim() * 32)];
}

#[test]
fn without_release_and_acquire_it_is_a_race() {
    for def in [not_released::DEF, released_too_early::DEF, not_acquired::DEF] {
        let count = 2 * Instance::of(def).build().expect("an instance").block() as usize;
        let planted = case(def, 2).buffer("counter", vec![0u32]).buffer("pieces", vec![0u32; count]).expect(
            "out",
            vec![0u32; count],
            Bound::Exact,
        );
        for fault in faults(&planted) {
            assert_eq!(fault.kind, FaultKind::RaceBetweenBlocks, "{fault}");
            assert!(fault.message.contains("pieces["), "{fault}");
        }
    }
}

/// Relaxed writes and plain reads of the same words.
#[kernel(block = 32)]
fn half_relaxed(words: InOut<u32>, out: Output<u32>) {
    let i = thread_idx();
    atomic_store_relaxed(words, i, i);
    out[i] = words[31 - i];
}

#[test]
fn a_plain_access_beside_a_relaxed_one_is_a_race() {
    let planted = case(half_relaxed::DEF, 1).buffer("words", vec![0u32; 32]);
    let planted = planted.expect("out", (0..32).rev().collect::<Vec<u32>>(), Bound::Exact);
    for fault in faults(&planted) {
        assert_eq!(fault.kind, FaultKind::Race, "{fault}");
    }
}

/// Waits for one arrival more than there are blocks.
#[kernel(block = 32)]
fn waits_for_too_many(counter: InOut<u32>) {
    if thread_idx() == 0 {
        atomic_add_release(counter, 0u32, 1);
        atomic_wait_acquire(counter, 0u32, grid_dim() + 1);
    }
}

/// The same with a loop of its own.
#[kernel(block = 32)]
fn spins_for_too_many(counter: InOut<u32>) {
    if thread_idx() == 0 {
        atomic_add_release(counter, 0u32, 1);
        while atomic_load_acquire(counter, 0u32) < grid_dim() + 1 {}
    }
}

#[test]
fn a_wait_that_nobody_ends_is_a_deadlock() {
    for fault in faults(&case(waits_for_too_many::DEF, 3).buffer("counter", vec![0u32])) {
        assert_eq!(fault.kind, FaultKind::Deadlock, "{fault}");
        assert!(fault.message.contains("`counter[0]` to be at least 4"), "{fault}");
    }
    for fault in faults(&case(spins_for_too_many::DEF, 3).buffer("counter", vec![0u32])) {
        assert_eq!(fault.kind, FaultKind::Deadlock, "{fault}");
    }
}

/// More blocks wait for each other than run side by side.
#[test]
fn more_blocks_than_are_resident_are_a_deadlock() {
    let planted = case(waits_for_too_many::DEF, 300).buffer("counter", vec![0u32]);
    let fault = faults(&planted).remove(0);
    assert_eq!(fault.kind, FaultKind::Deadlock, "{fault}");
    assert!(fault.message.contains("44 blocks have yet to start"), "{fault}");
}

#[kernel(block = 32)]
fn prefetches_beyond(x: Weights<f32>, out: Output<f32>) {
    let i = thread_idx();
    prefetch_l2(x, i + 1);
    out[i] = x[i];
}

#[test]
fn a_prefetch_stays_within_its_memory() {
    let x = vec![1.0f32; 32];
    let planted = case(prefetches_beyond::DEF, 1).buffer("x", x.clone()).expect("out", x, Bound::Exact);
    for fault in faults(&planted) {
        assert_eq!(fault.kind, FaultKind::OutOfBounds, "{fault}");
    }
}
