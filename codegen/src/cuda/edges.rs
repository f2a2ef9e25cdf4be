//! Which steps of a phase wait for which.
//!
//! What a step must wait for follows from the memory that steps read and write (`gemma4c_plan::hazards`). In decode
//! that is the step before it, always. In prefill some steps could run concurrently. Most of them wait all the same and
//! form a chain: a launch of prefill fills the GPU, so that two at once only take turns, and a fork and a join have
//! full edges where the chain has programmatic ones. A chain covers every need: a step runs after its predecessor has
//! ended, which had waited likewise.
//!
//! The exception are steps that the lowering forks from the chain. They dequantise weights, which depend on no step and
//! are bound by memory where products are bound by the tensor cores. Such a step waits for those that touched its
//! memory before, and for nobody else. The chain passes it by. The step of the chain that reads what it wrote waits for
//! both, by full edges: a programmatic launch waits for one predecessor.
//!
//! A kernel may read before it waits (`early` in its head) what no launch that may still run writes. A product lets its successor start before it has
//! waited itself, so several launches may be under way when one starts. Attention waits first (`waits_first`), so whatever starts behind it starts when all
//! before it have ended: when a layer's attention starts, the previous layer's is the oldest launch that may still run. `PhaseBuilder::is_settled`
//! looks for a writer among those.
//!
//! The reader of a plan does not take any of this on trust: `hazards::disturbed` derives the same from edges and ranges.

use gemma4c_plan::cuda::{CudaStep, Kernel, Launch};
use gemma4c_plan::hazards::{needs, reduced};

/// Gives every step its edges, where `forked` are those forked from the chain. Of the steps that may be programmatic
/// those remain that wait for exactly one, and not for one before the asked part from within it: that part may run by
/// itself. `None` where steps cut memory into more pieces than a plan may have.
pub fn connect(steps: &mut [CudaStep], forked: &[bool], asked_from: usize, kernels: &[Kernel]) -> Option<()> {
    let launches: Vec<&Launch> = steps.iter().map(|step| &step.launch).collect();
    let needed = if forked.contains(&true) { needs(&launches, kernels)? } else { vec![Vec::new(); steps.len()] };
    let mut before = None;
    let mut edges = Vec::with_capacity(steps.len());
    for (at, mut own) in needed.into_iter().enumerate() {
        if !forked[at] {
            // What it needs of the chain has ended with its predecessor.
            own.retain(|earlier| forked[*earlier as usize]);
            own.extend(before.replace(at as u32));
            own.sort_unstable();
        }
        edges.push(own);
    }
    for (at, (step, own)) in steps.iter_mut().zip(reduced(&edges)).enumerate() {
        let is_same_part = |before: u32| (before as usize) >= asked_from || at < asked_from;
        step.launch.programmatic &= matches!(own[..], [before] if is_same_part(before));
        step.after = own;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use gemma4c_plan::cuda::{Argument, Range, Region};

    use super::*;

    /// From one byte to another.
    type Bytes = (u64, u64);
    const NONE: Bytes = (0, 0);

    /// The edges of steps that read and write, and whether each is programmatic. Those that are named are forked from
    /// the chain.
    fn edges(accesses: &[(Bytes, Bytes)], forked: &[usize]) -> Vec<(Vec<u32>, bool)> {
        edges_of_parts(accesses, forked, accesses.len())
    }

    /// The same where the asked part begins with a step.
    fn edges_of_parts(accesses: &[(Bytes, Bytes)], forked: &[usize], asked_from: usize) -> Vec<(Vec<u32>, bool)> {
        let kernel = Kernel {
            name: "k".into(),
            instance: "k".into(),
            block: 32,
            shared: 0,
            written: 0b10,
            waits: true,
            waits_first: false,
            early: 0,
        };
        let range =
            |(start, end): Bytes| Argument::Memory(Range { region: Region::Arena, offset: start, bytes: end - start });
        let step = |(at, (read, write)): (usize, &(Bytes, Bytes))| CudaStep {
            launch: Launch {
                kernel: 0,
                grid: [1; 3],
                arguments: vec![range(*read), range(*write)],
                programmatic: !forked.contains(&at),
            },
            after: Vec::new(),
            nodes: Vec::new(),
            outputs: Vec::new(),
            layer: None,
            bytes: 0,
            flops: 0,
            reason: String::new(),
            runner_up: String::new(),
        };
        let mut steps: Vec<CudaStep> = accesses.iter().enumerate().map(step).collect();
        let is_forked: Vec<bool> = (0..steps.len()).map(|at| forked.contains(&at)).collect();
        connect(&mut steps, &is_forked, asked_from, &[kernel]).expect("few pieces");
        steps.into_iter().map(|step| (step.after, step.launch.programmatic)).collect()
    }

    fn alone(before: u32) -> (Vec<u32>, bool) {
        (vec![before], true)
    }

    #[test]
    fn steps_are_a_chain_also_where_they_share_no_memory() {
        let accesses = [(NONE, (0, 8)), ((16, 24), (24, 32)), ((0, 8), (8, 16))];
        assert_eq!(edges(&accesses, &[]), [(vec![], false), alone(0), alone(1)]);
    }

    /// The chain passes by a forked step, until one reads what that wrote. This one is programmatic no more, and the
    /// next is again.
    #[test]
    fn a_forked_step_is_joined_by_its_reader() {
        let chain = (0, 8);
        let weights = (100, 200);
        let accesses = [(NONE, chain), (NONE, weights), (chain, chain), (weights, chain), (chain, chain)];
        let expected = [(vec![], false), (vec![], false), alone(0), (vec![1, 2], false), alone(3)];
        assert_eq!(edges(&accesses, &[1]), expected);
        // Where it is the first step, the chain begins after it.
        assert_eq!(edges(&accesses[1..4], &[0]), [(vec![], false), (vec![], false), (vec![0, 1], false)]);
    }

    /// Two places take turns: a forked step waits for the reader of the turn before the last, and its place may have
    /// been another's.
    #[test]
    fn a_place_that_is_used_again_waits_for_its_last_reader() {
        let (chain, one, other) = ((0, 8), (100, 200), (200, 300));
        let accesses = [
            (NONE, (150, 160)),
            ((150, 160), chain),
            (NONE, one),
            (one, chain),
            (NONE, other),
            (other, chain),
            (NONE, one),
            (one, chain),
            // The first place is another's again: its last reader is in the chain.
            (chain, (120, 130)),
        ];
        let expected = [
            (vec![], false),
            alone(0),
            // Where that is the chain's last step, nothing runs concurrently: the reader waits for it by waiting for
            // this one.
            (vec![1], false),
            alone(2),
            (vec![], false),
            (vec![3, 4], false),
            (vec![3], false),
            (vec![5, 6], false),
            alone(7),
        ];
        assert_eq!(edges(&accesses, &[2, 4, 6]), expected);
    }

    /// The chain goes on into the asked part, but by a full edge, with whichever step of the chain that part begins.
    /// What a forked step before it has written may be read in it.
    #[test]
    fn the_asked_part_starts_when_all_before_it_has_ended() {
        let (chain, weights) = ((0, 8), (100, 200));
        let accesses = [(NONE, chain), (chain, chain), (NONE, weights), (chain, chain), (weights, chain)];
        let full = |before: u32| (vec![before], false);
        let before_or_in = [(vec![], false), alone(0), (vec![], false), full(1), (vec![2, 3], false)];
        assert_eq!(edges_of_parts(&accesses, &[2], 2), before_or_in);
        assert_eq!(edges_of_parts(&accesses, &[2], 3), before_or_in);
        let chained = [(vec![], false), alone(0), full(1), alone(2), alone(3)];
        assert_eq!(edges_of_parts(&accesses, &[], 2), chained);
    }
}
