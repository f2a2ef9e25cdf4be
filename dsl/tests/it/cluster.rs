//! Clusters of blocks: what they compute, in the simulator and through the host's compiler, and each mistake that can
//! be made with them.

use gemma4c_dsl::harness::{Bound, Case, CaseError, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{Fault, FaultKind, LaunchError, Order};
use gemma4c_dsl::{Instance, InstanceError, KernelDef};

/// Each block sums one value of every block of its cluster, read from one peer after the other and four at once.
#[kernel(block = 64, cluster = PEERS, dynamic_shared)]
fn sum_of_peers<const PEERS: u32>(x: Input<f32>, out: Output<f32>) {
    let own = shared::<f32>(256);
    let at = (block_idx() * grid_dim_y() + block_idx_y()) * 64 + thread_idx();
    own[thread_idx() * 4] = x[at];
    own[thread_idx() * 4 + 1] = cluster_rank() as f32;
    own[thread_idx() * 4 + 2] = 0.0;
    own[thread_idx() * 4 + 3] = 0.0;
    cluster_barrier();
    let mut sum = 0.0f32;
    #[unroll]
    for peer in 0..PEERS {
        let four = load_peer::<F32x4>(own, (63 - thread_idx()) * 4, peer);
        sum += load_peer::<f32>(own, thread_idx() * 4, peer) + 1000.0 * four.x + 0.5 * four.y;
    }
    out[at] = sum;
    cluster_barrier();
}

fn sums(peers: u32, grid: [u32; 3]) -> Case {
    let instance = Instance::of(sum_of_peers::DEF).constant("PEERS", peers).build().expect("a small cluster");
    let threads = (grid.iter().product::<u32>() * 64) as usize;
    let x: Vec<f32> = (0..threads).map(|i| (i % 251) as f32).collect();
    let block = peers as usize * 64;
    let mut expected: Vec<f32> = Vec::new();
    for i in 0..threads {
        let (cluster, thread) = (i / block * block, i % 64);
        let of_peer = |peer: usize| {
            let at = |thread: usize| x.get(cluster + peer * 64 + thread).copied().unwrap_or_default();
            at(thread) + 1000.0 * at(63 - thread) + 0.5 * peer as f32
        };
        expected.push((0..peers as usize).map(of_peer).sum());
    }
    Case::new(format!("{peers} peers"), instance).grid(grid).buffer("x", x).expect("out", expected, Bound::Exact)
}

#[test]
fn blocks_read_each_others_shared_memory() {
    for (peers, grid) in [(1, [2, 3, 1]), (2, [1, 2, 1]), (4, [3, 8, 1]), (16, [2, 16, 1])] {
        sums(peers, grid).check().unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_cluster_is_in_the_text_if_it_has_several_blocks() {
    let text = |peers| sums(peers, [1, peers, 1]).instance.cuda();
    assert!(text(4).contains("#define CLUSTER __cluster_dims__(1, 4, 1)\n"));
    assert!(text(1).contains("#define CLUSTER\n") && text(1).contains("void CLUSTER __launch_bounds__(64)"));
}

#[test]
fn what_cannot_be_a_cluster_is_refused() {
    let build = |peers: u32| Instance::of(sum_of_peers::DEF).constant("PEERS", peers).build().map(|_| ());
    for blocks in [0, 17] {
        assert_eq!(build(blocks), Err(InstanceError::Cluster { kernel: "sum_of_peers", blocks }));
    }

    let Err(CaseError::Launch { source, .. }) = sums(4, [1, 6, 1]).check() else { panic!("not refused") };
    assert_eq!(
        source.to_string(),
        "kernel sum_of_peers: a grid of [1, 6, 1] blocks cannot be cut into clusters of 4 along y"
    );
}

/// The fault of a planted kernel of two blocks, which must be the same in every order.
fn fault(def: &'static KernelDef) -> Fault {
    let instance = Instance::of(def).build().expect("an instance without parameters");
    let case = Case::new("planted", instance).grid([1, 2, 1]).expect("out", vec![0.0f32; 64], Bound::Exact);
    let faults = Order::ALL.map(|order| match case.check_on(&Simulator(order.clone())) {
        Err(CaseError::Launch { source, .. }) => match *source {
            LaunchError::Fault(fault) => *fault,
            other => panic!("{order:?}: {other}"),
        },
        other => panic!("{order:?}: the fault was not found: {other:?}"),
    });
    assert!(faults.iter().all(|fault| fault.kind == faults[0].kind), "{faults:#?}");
    let [fault, ..] = faults;
    fault
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn overwrites_what_a_peer_reads(out: Output<f32>) {
    let own = shared::<f32>(32);
    own[thread_idx()] = 1.0;
    cluster_barrier();
    let read = load_peer::<f32>(own, thread_idx(), 1 - cluster_rank());
    // A cluster_barrier belongs here.
    own[thread_idx()] = read;
    out[block_idx_y() * 32 + thread_idx()] = own[thread_idx()];
    cluster_barrier();
}

#[test]
fn a_missing_barrier_between_peers_is_a_race() {
    let found = fault(overwrites_what_a_peer_reads::DEF);
    assert_eq!(found.kind, FaultKind::RaceBetweenBlocks);
    assert!(found.message.contains("own[") && found.message.contains("with no cluster_barrier between"), "{found}");
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn returns_too_early(out: Output<f32>) {
    let own = shared::<f32>(32);
    own[thread_idx()] = 1.0;
    cluster_barrier();
    out[block_idx_y() * 32 + thread_idx()] = load_peer::<f32>(own, thread_idx(), 1 - cluster_rank());
    // A cluster_barrier belongs here.
}

#[test]
fn a_peer_that_has_returned_cannot_be_read() {
    let found = fault(returns_too_early::DEF);
    assert_eq!(found.kind, FaultKind::OutOfBounds);
    assert!(found.message.contains("of its cluster, which has returned"), "{found}");
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn reads_a_peer_that_may_go(out: Output<f32>) {
    let own = shared::<f32>(32);
    own[thread_idx()] = 1.0;
    cluster_barrier();
    cluster_arrive();
    out[block_idx_y() * 32 + thread_idx()] = load_peer::<f32>(own, thread_idx(), 1 - cluster_rank());
    cluster_wait();
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn takes_a_meeting_for_a_barrier(out: Output<f32>) {
    let own = shared::<f32>(32);
    own[thread_idx()] = 1.0;
    cluster_arrive();
    cluster_wait();
    out[block_idx_y() * 32 + thread_idx()] = load_peer::<f32>(own, thread_idx(), 1 - cluster_rank());
    cluster_barrier();
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn reads_a_peers_output(out: InOut<f32>) {
    out[block_idx_y() * 32 + thread_idx()] = 1.0;
    cluster_barrier();
    let read = out[(1 - block_idx_y()) * 32 + thread_idx()];
    cluster_barrier();
    out[block_idx_y() * 32 + thread_idx()] = read;
}

#[test]
fn a_barrier_orders_shared_memory_alone() {
    let instance = Instance::of(reads_a_peers_output::DEF).build().expect("an instance without parameters");
    let case = Case::new("planted", instance).grid([1, 2, 1]).buffer("out", vec![0.0f32; 64]);
    let error = case.expect("out", vec![1.0f32; 64], Bound::Exact).check().expect_err("a race").to_string();
    assert!(error.contains("RaceBetweenBlocks"), "{error}");
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn arrives_and_returns(out: Output<f32>) {
    let own = shared::<f32>(32);
    own[thread_idx()] = 1.0;
    cluster_barrier();
    out[block_idx_y() * 32 + thread_idx()] = load_peer::<f32>(own, thread_idx(), 1 - cluster_rank());
    cluster_arrive();
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn waits_without_arriving(out: Output<f32>) {
    out[block_idx_y() * 32 + thread_idx()] = 1.0;
    cluster_wait();
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn arrives_twice(out: Output<f32>) {
    out[block_idx_y() * 32 + thread_idx()] = 1.0;
    cluster_arrive();
    cluster_barrier();
    cluster_wait();
}

#[test]
fn the_halves_of_a_meeting_belong_together() {
    for (kernel, kind, says) in [
        (reads_a_peer_that_may_go::DEF, FaultKind::OutOfBounds, "after `cluster_arrive`"),
        (takes_a_meeting_for_a_barrier::DEF, FaultKind::RaceBetweenBlocks, "with no cluster_barrier between"),
        (arrives_and_returns::DEF, FaultKind::Divergence, "without `cluster_wait`"),
        (waits_without_arriving::DEF, FaultKind::Divergence, "without a `cluster_arrive`"),
        (arrives_twice::DEF, FaultKind::Divergence, "between `cluster_arrive` and `cluster_wait`"),
    ] {
        let found = fault(kernel);
        assert_eq!(found.kind, kind, "{found}");
        assert!(found.message.contains(says), "{found}");
    }
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn reads_past_the_cluster(out: Output<f32>) {
    let own = shared::<f32>(32);
    own[thread_idx()] = 1.0;
    cluster_barrier();
    out[block_idx_y() * 32 + thread_idx()] = load_peer::<f32>(own, thread_idx(), 2);
    cluster_barrier();
}

#[test]
fn a_cluster_has_no_more_blocks_than_it_says() {
    let found = fault(reads_past_the_cluster::DEF);
    assert_eq!(found.kind, FaultKind::OutOfBounds);
    assert!(found.message.ends_with("reads the shared memory of block 2 of a cluster of 2"), "{found}");
}

#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn waits_at_two_places(out: Output<f32>) {
    let own = shared::<f32>(32);
    own[thread_idx()] = 1.0;
    out[block_idx_y() * 32 + thread_idx()] = own[thread_idx()];
    if cluster_rank() == 0 {
        cluster_barrier();
    } else {
        cluster_barrier();
    }
}

#[test]
fn a_cluster_waits_at_one_place() {
    let found = fault(waits_at_two_places::DEF);
    assert_eq!(found.kind, FaultKind::Divergence);
    assert!(found.message.contains("all threads of a cluster"), "{found}");
}

/// A block that no other reads may return early; the cluster barrier does not wait for it.
#[kernel(block = 32, cluster = 2, dynamic_shared)]
fn leaves_early(out: Output<f32>) {
    let own = shared::<f32>(32);
    out[block_idx_y() * 32 + thread_idx()] = 0.0;
    if cluster_rank() == 1 {
        return;
    }
    own[thread_idx()] = 1.0;
    cluster_barrier();
    out[thread_idx()] = load_peer::<f32>(own, 31 - thread_idx(), 0);
    cluster_barrier();
}

#[test]
fn a_block_that_nobody_reads_may_leave() {
    let instance = Instance::of(leaves_early::DEF).build().expect("an instance without parameters");
    let out: Vec<f32> = (0..64).map(|i| if i < 32 { 1.0 } else { 0.0 }).collect();
    let case = Case::new("leaves", instance).grid([1, 2, 1]).expect("out", out, Bound::Exact);
    case.check().unwrap_or_else(|error| panic!("{error}"));
}
