//! mbarriers and bulk copies against plain loops, and the mistakes that the simulator must find in them.

#[path = "../kernels/bulk.rs"]
mod kernels;

use gemma4c_dsl::harness::{Bound, Case, CaseError, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{Fault, FaultKind, LaunchError, Order};
use gemma4c_dsl::{Instance, KernelDef};

/// The first GPUs with mbarriers, and with bulk copies.
const AMPERE: u32 = 80;
const HOPPER: u32 = 90;

fn case(def: &'static KernelDef) -> Case {
    let instance = Instance::of(def).build().expect("an instance without parameters");
    assert!([AMPERE, HOPPER].contains(&instance.minimum_capability()), "{}", def.name);
    Case::new(def.name, instance)
}

/// The fault of a kernel that takes 64 values and gives 64, in three orders.
fn faults(def: &'static KernelDef) -> Vec<Fault> {
    let case = case(def).buffer("x", vec![1.0f32; 64]).expect("out", vec![1.0f32; 64], Bound::Exact);
    let fault = |order: Order| match case.check_on(&Simulator(order)) {
        Err(CaseError::Launch { source, .. }) => match *source {
            LaunchError::Fault(fault) => *fault,
            other => panic!("{}: {other}", def.name),
        },
        other => panic!("{}: the fault was not found: {other:?}", def.name),
    };
    Order::ALL.map(fault).into()
}

/// Every order finds a fault of the kind, which says so much.
#[track_caller]
fn finds(def: &'static KernelDef, kind: FaultKind, text: &str) {
    finds_either(def, &[(kind, text)]);
}

/// Which of several faults comes first depends on the order of threads; each of them is found by some order.
#[track_caller]
fn finds_either(def: &'static KernelDef, expected: &[(FaultKind, &str)]) {
    let found = faults(def);
    let is = |fault: &Fault, (kind, text): &(FaultKind, &str)| fault.kind == *kind && fault.message.contains(text);
    for fault in &found {
        assert!(expected.iter().any(|expected| is(fault, expected)), "{}: {fault}", def.name);
    }
    for expected in expected {
        assert!(found.iter().any(|fault| is(fault, expected)), "{}: no order finds {expected:?}", def.name);
    }
}

#[test]
fn pieces_go_round_a_ring() {
    for pieces in [1, 2, 3, 7] {
        let x: Vec<f32> = (0..pieces * 64).map(|i| i as f32).collect();
        let out: Vec<f32> = (0..64).map(|i| (0..pieces).map(|piece| x[piece * 64 + i]).sum()).collect();
        case(kernels::ring::DEF)
            .buffer("x", x)
            .scalar("pieces", pieces as u32)
            .expect("out", out, Bound::Exact)
            .assert();
    }
}

#[kernel(block = 64, dynamic_shared)]
fn reads_too_early(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        mbarrier_arrive_expect(full, 0u32, 256);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 0u32);
    }
    barrier();
    out[thread_idx()] = tile[thread_idx()];
    mbarrier_wait(full, 0u32, 0);
}

#[kernel(block = 64, dynamic_shared)]
fn one_waits_for_all(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        mbarrier_arrive_expect(full, 0u32, 256);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 0u32);
    }
    barrier();
    if thread_idx() == 0 {
        mbarrier_wait(full, 0u32, 0);
    }
    // A barrier belongs here.
    out[thread_idx()] = tile[thread_idx()];
}

#[test]
fn a_copy_is_there_after_a_wait_for_its_phase() {
    finds(reads_too_early::DEF, FaultKind::UnfinishedCopy, "tile[");
    // Whoever runs before the thread that waits finds the copy on its way.
    finds(one_waits_for_all::DEF, FaultKind::UnfinishedCopy, "and its mbarrier's phase has not ended");
}

/// Each thread copies an element, and reads the one that another has copied.
#[kernel(block = 64, dynamic_shared)]
fn exchanged_copies(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 64);
    }
    barrier();
    cp_async4(tile, thread_idx(), x, thread_idx());
    cp_async_arrive(full, 0u32);
    mbarrier_wait(full, 0u32, 0);
    out[thread_idx()] = tile[63 - thread_idx()];
}

#[kernel(block = 64, dynamic_shared)]
fn exchanged_without_a_wait(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 64);
    }
    barrier();
    cp_async4(tile, thread_idx(), x, thread_idx());
    cp_async_arrive(full, 0u32);
    out[thread_idx()] = tile[63 - thread_idx()];
}

#[test]
fn copies_of_threads_arrive_at_an_mbarrier() {
    let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let reversed: Vec<f32> = x.iter().rev().copied().collect();
    case(exchanged_copies::DEF).buffer("x", x).expect("out", reversed, Bound::Exact).assert();
    finds(exchanged_without_a_wait::DEF, FaultKind::UninitialisedShared, "reads `tile[");
}

#[kernel(block = 64, dynamic_shared)]
fn never_made(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let i = thread_idx();
    mbarrier_arrive(full, 0u32);
    out[i] = x[i];
}

#[kernel(block = 64, dynamic_shared)]
fn waits_for_one_never_made(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let i = thread_idx();
    mbarrier_wait(full, 0u32, 0);
    out[i] = x[i];
}

#[kernel(block = 64, dynamic_shared)]
fn made_without_a_barrier(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 64);
    }
    // A barrier belongs here.
    mbarrier_arrive(full, 0u32);
    out[i] = x[i];
}

#[kernel(block = 64, dynamic_shared)]
fn arrives_too_often(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 63);
    }
    barrier();
    // The bytes never come, so the phase does not end and the last arrival is one too many.
    mbarrier_arrive_expect(full, 0u32, 16);
    out[i] = x[i];
}

#[kernel(block = 64, dynamic_shared)]
fn bytes_never_come(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        mbarrier_arrive_expect(full, 0u32, 512);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 0u32);
    }
    barrier();
    mbarrier_wait(full, 0u32, 0);
    out[thread_idx()] = tile[thread_idx()];
}

#[kernel(block = 64, dynamic_shared)]
fn misses_a_phase(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 1);
        mbarrier_arrive(full, 0u32);
    }
    barrier();
    mbarrier_wait(full, 0u32, 0);
    barrier();
    if i == 0 {
        mbarrier_arrive(full, 0u32);
        mbarrier_arrive(full, 0u32);
        mbarrier_arrive(full, 0u32);
    }
    barrier();
    mbarrier_wait(full, 0u32, 1);
    out[i] = x[i];
}

#[test]
fn misused_mbarriers_are_found() {
    let needs = |def| Instance::of(def).build().expect("an instance").minimum_capability();
    assert_eq!([needs(never_made::DEF), needs(bytes_never_come::DEF)], [AMPERE, HOPPER]);
    let unmade = (FaultKind::Mbarrier, "uses an mbarrier that mbarrier_init has not made");
    finds_either(never_made::DEF, &[unmade]);
    finds(waits_for_one_never_made::DEF, FaultKind::UninitialisedShared, "reads `full[0]`");
    // Threads that come before the one that makes it find nothing.
    finds_either(made_without_a_barrier::DEF, &[(FaultKind::Race, "with no barrier between"), unmade]);
    finds(arrives_too_often::DEF, FaultKind::Mbarrier, "all 63 of its phase 0");
    finds(bytes_never_come::DEF, FaultKind::Deadlock, "bytes are missing");
    finds(misses_a_phase::DEF, FaultKind::Mbarrier, "used again without a wait");
}

/// The second copy does not wait for the readers of the first.
#[kernel(block = 64, dynamic_shared)]
fn fills_again_too_early(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(32);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
    }
    barrier();
    for half in 0u32..2 {
        if i == 0 {
            mbarrier_arrive_expect(full, 0u32, 128);
            bulk_load(tile, 0u32, x, half * 32, 32, full, 0u32);
        }
        mbarrier_wait(full, 0u32, half);
        if i / 32 == half {
            out[i] = tile[i % 32];
        }
    }
}

/// The same with a thread that only copies, and a barrier for each copy.
#[kernel(block = 96, dynamic_shared)]
fn overwrites_a_stage(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(2);
    let tile = shared::<f32>(64);
    let i = thread_idx();
    if i == 64 {
        mbarrier_init(full, 0u32, 1);
        mbarrier_init(full, 1u32, 1);
        fence_proxy_async();
    }
    barrier();
    if i == 64 {
        mbarrier_arrive_expect(full, 0u32, 256);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 0u32);
        mbarrier_wait(full, 0u32, 0);
        mbarrier_arrive_expect(full, 1u32, 256);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 1u32);
    }
    if i < 64 {
        mbarrier_wait(full, 0u32, 0);
        out[i] = tile[i];
    }
    mbarrier_wait(full, 1u32, 0);
}

#[kernel(block = 64, dynamic_shared)]
fn crooked(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        mbarrier_arrive_expect(full, 0u32, 128);
        bulk_load(tile, 0u32, x, 1u32, 32, full, 0u32);
    }
    out[i] = x[i];
}

#[kernel(block = 64, dynamic_shared)]
fn uneven(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        bulk_load(tile, 0u32, x, 0u32, 30, full, 0u32);
    }
    out[i] = x[i];
}

#[kernel(block = 64, dynamic_shared)]
fn nobody_waits(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        mbarrier_arrive_expect(full, 0u32, 256);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 0u32);
    }
    out[i] = x[i];
}

#[test]
fn loads_that_cannot_be_are_found() {
    // A thread that runs ahead ends two phases before the others see the first.
    finds(fills_again_too_early::DEF, FaultKind::Deadlock, "nothing can go on");
    finds(overwrites_a_stage::DEF, FaultKind::Race, "for whose mbarrier this thread has not waited");
    finds(crooked::DEF, FaultKind::Misaligned, "multiples of 16");
    finds(uneven::DEF, FaultKind::Misaligned, "multiples of 16");
    finds(nobody_waits::DEF, FaultKind::UnfinishedCopy, "nobody waited");
}

#[kernel(block = 64, dynamic_shared)]
fn unfenced_barrier(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    let i = thread_idx();
    if i == 0 {
        mbarrier_init(full, 0u32, 1);
        mbarrier_arrive_expect(full, 0u32, 256);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 0u32);
    }
    out[i] = x[i];
}

#[kernel(block = 64, dynamic_shared)]
fn unfenced_target(x: Weights<f32>, out: Output<f32>) {
    let full = shared::<u64>(1);
    let tile = shared::<f32>(64);
    let i = thread_idx();
    tile[i] = 0.0;
    if i == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
    }
    barrier();
    if i == 0 {
        mbarrier_arrive_expect(full, 0u32, 256);
        bulk_load(tile, 0u32, x, 0u32, 64, full, 0u32);
    }
    mbarrier_wait(full, 0u32, 0);
    out[i] = tile[i];
}

#[test]
fn what_no_fence_showed_to_the_engine_is_found() {
    finds(unfenced_barrier::DEF, FaultKind::MissingFence, "mbarrier without fence_proxy_async()");
    finds(unfenced_target::DEF, FaultKind::MissingFence, "copies to `tile[0]`");
}
