//! Barriers of a block's first warps, while the others go on; and the mistakes found in them.

use gemma4c_dsl::harness::{Bound, Case, CaseError, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{Fault, FaultKind, LaunchError, Order};
use gemma4c_dsl::{Instance, KernelDef};

fn case(def: &'static KernelDef) -> Case {
    Case::new(def.name, Instance::of(def).build().expect("an instance without parameters"))
}

fn finds(case: &Case, kind: FaultKind, text: &str) {
    let fault = |order: Order| -> Fault {
        match case.check_on(&Simulator(order)) {
            Err(CaseError::Launch { source, .. }) => match *source {
                LaunchError::Fault(fault) => *fault,
                other => panic!("{other}"),
            },
            other => panic!("the fault was not found: {other:?}"),
        }
    };
    for fault in Order::ALL.map(fault) {
        assert_eq!(fault.kind, kind, "{fault}");
        assert!(fault.message.contains(text), "{fault}");
    }
}

/// Two warps turn values round in shared memory, twice; the third does nothing of the kind.
#[kernel(block = 96)]
fn two_of_three(out: Output<u32>) {
    let held = shared::<u32>(64);
    if warp_id() == 2 {
        out[thread_idx()] = 7;
        return;
    }
    held[thread_idx()] = thread_idx();
    barrier_of(2);
    let other = held[63 - thread_idx()];
    barrier_of(2);
    held[thread_idx()] = other + 1;
    barrier_of(2);
    out[thread_idx()] = held[(thread_idx() + 32) % 64];
}

#[test]
fn the_first_warps_meet_and_the_others_go_on() {
    let turned = |i: u32| 63 - (i + 32) % 64 + 1;
    let out: Vec<u32> = (0..64).map(turned).chain([7; 32]).collect();
    case(two_of_three::DEF).expect("out", out, Bound::Exact).assert();
}

#[kernel(block = 96)]
fn the_third_looks_on(out: Output<u32>) {
    let held = shared::<u32>(64);
    if warp_id() < 2 {
        held[thread_idx()] = thread_idx();
        barrier_of(2);
    }
    out[thread_idx()] = held[thread_idx() % 64];
}

#[kernel(block = 96)]
fn the_third_joins(out: Output<u32>) {
    barrier_of(2);
    out[thread_idx()] = 1;
}

#[test]
fn who_took_no_part_knows_nothing() {
    let ones = vec![1u32; 96];
    let looked = case(the_third_looks_on::DEF).expect("out", ones.clone(), Bound::Exact);
    let error = looked.check_on(&Simulator(Order::Forward)).expect_err("a race").to_string();
    assert!(error.contains("`held["), "{error}");
    finds(&case(the_third_joins::DEF).expect("out", ones, Bound::Exact), FaultKind::Divergence, "barrier_of(2)");
}
