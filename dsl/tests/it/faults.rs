//! Planted faults: each kernel holds one mistake, and the simulator must find it and name kernel, thread and line.

use gemma4c_dsl::harness::{Bound, Case, CaseError, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{Fault, FaultKind, LaunchError, Order};
use gemma4c_dsl::{Instance, KernelDef};

fn case(def: &'static KernelDef) -> Case {
    Case::new("planted", Instance::of(def).build().expect("an instance without parameters"))
}

/// The fault a case ends with, which must be the same in every order.
fn fault(case: &Case) -> Fault {
    let faults: Vec<Fault> = Order::ALL
        .into_iter()
        .map(|order| match case.check_on(&Simulator(order.clone())) {
            Err(CaseError::Launch { source, .. }) => match *source {
                LaunchError::Fault(fault) => *fault,
                other => panic!("{order:?}: {other}"),
            },
            other => panic!("{order:?}: the fault was not found: {other:?}"),
        })
        .collect();
    assert!(faults.iter().all(|f| f.kind == faults[0].kind), "{faults:#?}");
    assert!(faults.iter().all(|f| f.kernel == case.instance.def.name));
    faults.into_iter().next().expect("three orders")
}

/// The line of this file that ends with `// fault`, inside the kernel `name`.
fn planted(name: &str) -> String {
    let source = include_str!("faults.rs");
    let start = source.find(&format!("fn {name}(")).expect("the kernel is in this file");
    let before = source[..start].matches('\n').count() + 1;
    let offset = source[start..].lines().position(|line| line.ends_with("// fault")).expect("a marked line");
    format!("dsl/tests/it/faults.rs:{}", before + offset)
}

#[kernel(block = 64)]
fn missing_barrier(x: Input<f32>, out: Output<f32>) {
    let tile = shared::<f32>(64);
    let i = thread_idx();
    tile[i] = x[i];
    // A barrier belongs here.
    out[i] = tile[63 - i]; // fault
}

#[test]
fn a_missing_barrier_is_a_race() {
    let x = vec![1.0f32; 64];
    let found = case(missing_barrier::DEF).buffer("x", x.clone()).expect("out", x, Bound::Exact);
    // In forward order the first half of the block reads what nobody has written yet; in reverse order, the second
    // half.
    for order in Order::ALL {
        let Err(CaseError::Launch { source, .. }) = found.check_on(&Simulator(order)) else { panic!("not found") };
        let LaunchError::Fault(fault) = *source else { panic!("{source}") };
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::UninitialisedShared), "{fault}");
    }
}

#[kernel(block = 64)]
fn overwritten_too_early(x: Input<f32>, out: Output<f32>) {
    let tile = shared::<f32>(64);
    let i = thread_idx();
    tile[i] = x[i];
    barrier();
    let first = tile[63 - i];
    // A barrier belongs here: the others may still be reading.
    tile[i] = 2.0 * first; // fault
    barrier();
    out[i] = tile[i];
}

#[test]
fn a_missing_barrier_before_a_second_write_is_a_race() {
    let x = vec![1.0f32; 64];
    let found = fault(&case(overwritten_too_early::DEF).buffer("x", x.clone()).expect("out", x, Bound::Exact));
    assert_eq!(found.kind, FaultKind::Race);
    // The write is found by a later read, or the read by a later write: the message names both lines.
    assert!(found.to_string().contains(&planted("overwritten_too_early")), "{found}");
    assert!(found.message.contains("tile["), "{found}");
}

#[kernel(block = 64)]
fn shuffles_do_not_order_memory(out: Output<u32>) {
    let tile = shared::<u32>(64);
    let i = thread_idx();
    tile[i] = i;
    let neighbour = shfl_xor(i, 1);
    // warp_barrier() belongs here.
    out[i] = tile[neighbour]; // fault
}

#[test]
fn a_shuffle_is_not_a_barrier() {
    let expected: Vec<u32> = (0..64).map(|i| i ^ 1).collect();
    let found = fault(&case(shuffles_do_not_order_memory::DEF).expect("out", expected, Bound::Exact));
    assert_eq!((found.kind, found.line), (FaultKind::Race, planted("shuffles_do_not_order_memory")));
}

#[kernel(block = 64)]
fn ordered_by_warp(out: Output<u32>) {
    let tile = shared::<u32>(64);
    let i = thread_idx();
    tile[i] = i;
    warp_barrier();
    out[i] = tile[i ^ 1];
}

#[test]
fn a_warp_barrier_orders_the_lanes_of_a_warp() {
    let expected: Vec<u32> = (0..64).map(|i| i ^ 1).collect();
    case(ordered_by_warp::DEF).expect("out", expected, Bound::Exact).assert();
}

#[kernel(block = 64)]
fn divergent_barrier(out: Output<u32>) {
    let i = thread_idx();
    if i < 40 {
        barrier(); // fault
    }
    out[i] = i;
}

#[test]
fn a_divergent_barrier_is_named() {
    let found = fault(&case(divergent_barrier::DEF).expect("out", (0..64).collect::<Vec<u32>>(), Bound::Exact));
    assert_eq!((found.kind, found.line.clone()), (FaultKind::Divergence, planted("divergent_barrier")));
    assert!(found.message.contains("thread 40 has returned"), "{found}");
}

#[kernel(block = 32)]
fn two_barriers(out: Output<u32>) {
    let i = thread_idx();
    if i < 16 {
        barrier(); // fault
    } else {
        barrier();
    }
    out[i] = i;
}

#[test]
fn two_barriers_are_not_one() {
    let found = fault(&case(two_barriers::DEF).expect("out", (0..32).collect::<Vec<u32>>(), Bound::Exact));
    assert_eq!((found.kind, found.line), (FaultKind::Divergence, planted("two_barriers")));
}

#[kernel(block = 32)]
fn divergent_shuffle(out: Output<f32>) {
    let i = thread_idx();
    let mut sum = 1.0f32;
    if i != 7 {
        sum = warp_sum(sum); // fault
    }
    out[i] = sum;
}

#[test]
fn a_collective_needs_every_lane() {
    let found = fault(&case(divergent_shuffle::DEF).expect("out", vec![32.0f32; 32], Bound::Exact));
    assert_eq!((found.kind, found.line.clone()), (FaultKind::Divergence, planted("divergent_shuffle")));
    assert!(found.message.contains("thread 7"), "{found}");
}

#[kernel(block = 32)]
fn blocks_collide(out: Output<u32>) {
    out[thread_idx()] = thread_idx(); // fault
}

#[test]
fn two_blocks_that_write_the_same_place_race() {
    let found =
        fault(&case(blocks_collide::DEF).grid([2, 1, 1]).expect("out", (0..32).collect::<Vec<u32>>(), Bound::Exact));
    assert_eq!((found.kind, found.line), (FaultKind::RaceBetweenBlocks, planted("blocks_collide")));
}

#[kernel(block = 32)]
fn reads_another_blocks_work(sums: InOut<u32>) {
    let mine = block_idx() * 32 + thread_idx();
    sums[mine] = mine;
    if block_idx() == 1 {
        sums[mine] = sums[mine] + sums[thread_idx()]; // fault
    }
}

#[test]
fn one_block_must_not_read_what_another_writes() {
    // Whichever block runs first: the read finds the other's write, or the write finds the other's read.
    for order in Order::ALL {
        let case = case(reads_another_blocks_work::DEF).grid([2, 1, 1]).buffer("sums", vec![0u32; 64]);
        let Err(CaseError::Launch { source, .. }) = case.check_on(&Simulator(order)) else { panic!("not found") };
        let LaunchError::Fault(fault) = *source else { panic!("{source}") };
        assert_eq!(fault.kind, FaultKind::RaceBetweenBlocks, "{fault}");
    }
}

#[kernel(block = 32)]
fn reads_beyond(x: Input<f32>, out: Output<f32>) {
    let i = thread_idx();
    out[i] = x[i + 1]; // fault
}

#[test]
fn a_read_out_of_bounds_is_named() {
    let found =
        fault(&case(reads_beyond::DEF).buffer("x", vec![0.0f32; 32]).expect("out", vec![0.0f32; 32], Bound::Exact));
    assert_eq!((found.kind, found.thread, found.line.clone()), (FaultKind::OutOfBounds, 31, planted("reads_beyond")));
    assert_eq!(found.message, "reads `x[32]`, which has 32 elements");
}

#[kernel(block = 32)]
fn negative_index(x: Input<f32>, out: Output<f32>) {
    let i = thread_idx();
    out[i] = x[i as i32 - 1]; // fault
}

#[test]
fn a_negative_index_is_out_of_bounds() {
    let found =
        fault(&case(negative_index::DEF).buffer("x", vec![0.0f32; 32]).expect("out", vec![0.0f32; 32], Bound::Exact));
    assert_eq!((found.kind, found.thread, found.line), (FaultKind::OutOfBounds, 0, planted("negative_index")));
}

#[kernel(block = 32)]
fn misaligned(x: Input<u8>, out: Output<u32>) {
    let i = thread_idx();
    out[i] = load::<u32>(x, i * 3); // fault
}

#[test]
fn a_misaligned_vector_load_is_named() {
    let found = fault(&case(misaligned::DEF).buffer("x", vec![0u8; 100]).expect("out", vec![0u32; 32], Bound::Exact));
    assert_eq!((found.kind, found.line), (FaultKind::Misaligned, planted("misaligned")));
}

#[kernel(block = 32)]
fn forgets_the_last(out: Output<u32>) {
    let i = thread_idx();
    if i != 31 {
        out[i] = i;
    }
}

#[test]
fn an_unwritten_output_is_named() {
    let forgetful = case(forgets_the_last::DEF).expect("out", (0..32).collect::<Vec<u32>>(), Bound::Exact);
    let found = fault(&forgetful);
    assert_eq!(found.kind, FaultKind::UnwrittenOutput);
    assert_eq!(found.message, "`out[31]` of 32 was never written");
    // A case may say that the rest is left alone.
    forgetful.except(31..32).assert();
}

#[kernel(block = 32)]
fn reads_its_output(out: Output<u32>) {
    let i = thread_idx();
    out[i] = i;
    out[i] = out[i] + 1; // fault
}

#[test]
fn an_output_is_not_read() {
    let found = fault(&case(reads_its_output::DEF).expect("out", (1..33).collect::<Vec<u32>>(), Bound::Exact));
    assert_eq!((found.kind, found.line), (FaultKind::ReadOfOutput, planted("reads_its_output")));
}

#[kernel(block = 32, dependent)]
fn reads_before_the_wait(w: Weights<f32>, x: Input<f32>, out: Output<f32>) {
    let i = thread_idx();
    let weight = w[i];
    let value = x[i]; // fault
    grid_dependency_wait();
    out[i] = weight * value;
}

#[test]
fn an_activation_is_not_read_before_the_dependency_wait() {
    let ones = vec![1.0f32; 32];
    let case = case(reads_before_the_wait::DEF).buffer("w", ones.clone()).buffer("x", ones.clone());
    let found = fault(&case.expect("out", ones, Bound::Exact));
    assert_eq!((found.kind, found.line), (FaultKind::MissingDependencyWait, planted("reads_before_the_wait")));
    assert!(found.message.contains("`x`"), "{}", found.message);
}

#[kernel(block = 32, dependent, early(EARLY, x))]
fn reads_early<const EARLY: bool>(x: InOut<f32>, out: Output<f32>) {
    let i = thread_idx();
    let value = x[i];
    grid_dependency_wait();
    x[i] = 0.0;
    out[i] = value;
}

#[test]
fn a_kernel_may_say_what_it_reads_before_the_dependency_wait() {
    let case = |early: bool| {
        let instance = Instance::of(reads_early::DEF).constant("EARLY", early).build().expect("an instance");
        let case = Case::new("early", instance).buffer("x", vec![1.0f32; 32]);
        case.expect("x", vec![0.0f32; 32], Bound::Exact).expect("out", vec![1.0f32; 32], Bound::Exact)
    };
    case(true).check().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(fault(&case(false)).kind, FaultKind::MissingDependencyWait);
}

#[kernel(block = 32, dependent, early(true, x))]
fn writes_early(x: InOut<f32>) {
    x[thread_idx()] = 1.0;
    grid_dependency_wait();
}

#[test]
fn what_is_read_before_the_dependency_wait_is_not_written_there() {
    let found = fault(&case(writes_early::DEF).buffer("x", vec![0.0f32; 32]));
    assert_eq!(found.kind, FaultKind::MissingDependencyWait);
}

#[kernel(block = 32, only_reads(KEEPS, x))]
fn writes_nothing<const KEEPS: bool>(x: InOut<f32>) {
    x[thread_idx()] = 1.0;
}

#[test]
fn what_a_kernel_says_that_it_only_reads_is_not_written() {
    let instance =
        |keeps: bool| Instance::of(writes_nothing::DEF).constant("KEEPS", keeps).build().expect("an instance");
    let case = |keeps| Case::new("keeps", instance(keeps)).buffer("x", vec![0.0f32; 32]);
    case(false).expect("x", vec![1.0f32; 32], Bound::Exact).check().unwrap_or_else(|error| panic!("{error}"));
    assert!(fault(&case(true)).message.contains("only reads"));
    let writes = |keeps| instance(keeps).writes(&instance(keeps).params()[0]);
    assert!(writes(false) && !writes(true));
}

#[kernel(block = 32, dependent, waits_first)]
fn lets_go_too_early(out: Output<f32>) {
    grid_launch_dependents();
    grid_dependency_wait();
    out[thread_idx()] = 1.0;
}

#[test]
fn a_kernel_that_waits_first_lets_nobody_start_before() {
    let found = fault(&case(lets_go_too_early::DEF).expect("out", vec![1.0f32; 32], Bound::Exact));
    assert_eq!(found.kind, FaultKind::MissingDependencyWait);
    assert!(found.message.contains("waits_first"), "{}", found.message);
}

#[kernel(block = 32, dependent, waits_first)]
fn orders_its_loads(w: Weights<f32>, out: Output<f32>) {
    let weight = w[thread_idx()];
    order_loads();
    grid_dependency_wait();
    grid_launch_dependents();
    out[thread_idx()] = weight;
}

/// The instruction that keeps loads in order is the one that lets a successor start, under a predicate that is never
/// true: it lets nobody start.
#[test]
fn to_order_loads_lets_nobody_start() {
    let w: Vec<f32> = (0..32).map(|i| i as f32).collect();
    let case = case(orders_its_loads::DEF).buffer("w", w.clone()).expect("out", w, Bound::Exact);
    let text = case.instance.cuda();
    let never = text.split("order_loads() {").nth(1).and_then(|rest| rest.split("#endif").next()).expect("its text");
    assert!(never.contains("if (sms == 0) asm volatile(\"griddepcontrol.launch_dependents;\""), "{never}");
    case.assert();
}

#[kernel(block = 32, dependent)]
fn never_waits(w: Weights<f32>, n: u32) {
    let _weight = w[n - 1];
}

#[test]
fn a_dependent_kernel_that_never_waits_is_named() {
    let found = fault(&case(never_waits::DEF).buffer("w", vec![1.0f32; 4]).scalar("n", 4u32));
    assert_eq!(found.kind, FaultKind::MissingDependencyWait);
}

#[kernel(block = 32)]
fn copy_without_wait(x: Input<u32>, out: Output<u32>) {
    let tile = shared::<u32>(128);
    cp_async16(tile, thread_idx() * 4, x, thread_idx() * 4);
    cp_async_commit();
    // cp_async_wait(0) belongs here.
    barrier();
    store(out, thread_idx() * 4, load::<U32x4>(tile, thread_idx() * 4));
}

#[test]
fn an_asynchronous_copy_must_be_waited_for() {
    let x: Vec<u32> = (0..128).collect();
    let found = fault(&case(copy_without_wait::DEF).buffer("x", x.clone()).expect("out", x, Bound::Exact));
    assert_eq!(found.kind, FaultKind::UnfinishedCopy);
}

#[kernel(block = 32)]
fn underflows(out: Output<u32>) {
    let i = thread_idx();
    out[i] = i - 1; // fault
}

#[test]
fn integer_overflow_is_a_fault_with_a_line() {
    let found = fault(&case(underflows::DEF).expect("out", (0..32).collect::<Vec<u32>>(), Bound::Exact));
    assert_eq!((found.kind, found.line, found.thread), (FaultKind::Panic, planted("underflows"), 0));
    assert!(found.message.contains("subtract with overflow"), "{}", found.message);
}

/// Uses a mask and a cast, which the test below removes from the emitted text.
#[kernel(block = 32)]
fn masks_and_casts(x: Input<u32>, out: Output<u32>) {
    let i = thread_idx();
    out[i] = (x[i] & 7 == 3) as u32 + (x[i] as u8 as u32);
}

/// A printer that loses a parenthesis or a cast compiles, and gives another result: the host executor sees it.
#[test]
fn a_wrong_precedence_or_cast_in_the_text_is_caught() {
    let x: Vec<u32> = (0..32).map(|i| i * 77).collect();
    let expected: Vec<u32> = x.iter().map(|x| u32::from(x & 7 == 3) + u32::from(*x as u8)).collect();
    let right = case(masks_and_casts::DEF).buffer("x", x).expect("out", expected, Bound::Exact);
    right.assert();
    for (from, to) in [("(x[i] & 7) == 3", "x[i] & 7 == 3"), ("(u32)(u8)x[i]", "(u32)x[i]")] {
        assert!(masks_and_casts::DEF.cuda.contains(from), "{from} is not in\n{}", masks_and_casts::DEF.cuda);
        let spoilt =
            Box::leak(Box::new(masks_and_casts::DEF.with_cuda(masks_and_casts::DEF.cuda.replace(from, to).leak())));
        let mut wrong = right.clone();
        wrong.instance = Instance::of(spoilt).build().unwrap();
        match wrong.check() {
            Err(CaseError::Mismatch { executor, kernel, param, .. }) => {
                assert_eq!(
                    (executor.as_str(), kernel, param.as_str()),
                    ("host-compiled text", "masks_and_casts", "out")
                );
            }
            other => panic!("{to}: {other:?}"),
        }
    }
}
