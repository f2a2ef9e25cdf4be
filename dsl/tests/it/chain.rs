//! Chains of launches: a dependent launch runs beside its predecessor, and what it may not touch before the wait is
//! found.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::{
    AllocationId, Arg, ChainStep, Fault, FaultKind, Interleaving, LaunchError, Memory, Options, Order,
};
use gemma4c_dsl::{Instance, KernelDef};

const COUNT: u32 = 128;

/// Doubles; lets its successor start before it has done anything.
#[kernel(block = 32, dependent)]
fn early_double(x: Input<f32>, out: Output<f32>) {
    let i = block_idx() * 32 + thread_idx();
    grid_launch_dependents();
    grid_dependency_wait();
    out[i] = 2.0 * x[i];
}

/// Doubles; lets its successor start when its own predecessor has ended.
#[kernel(block = 32, dependent)]
fn late_double(x: Input<f32>, out: Output<f32>) {
    let i = block_idx() * 32 + thread_idx();
    grid_dependency_wait();
    grid_launch_dependents();
    out[i] = 2.0 * x[i];
}

/// Reads constant data before it waits.
#[kernel(block = 32, dependent)]
fn scaled(scales: Weights<f32>, x: Input<f32>, out: Output<f32>) {
    let i = block_idx() * 32 + thread_idx();
    grid_launch_dependents();
    let scale = scales[i]; // early read of weights
    grid_dependency_wait();
    out[i] = scale * x[i];
}

/// Reads an activation before it waits.
#[kernel(block = 32, dependent)]
fn impatient_reader(x: Input<f32>, out: Output<f32>) {
    let i = block_idx() * 32 + thread_idx();
    grid_launch_dependents();
    let value = x[i]; // early read
    grid_dependency_wait();
    out[i] = 2.0 * value;
}

/// Writes its result before it waits.
#[kernel(block = 32, dependent)]
fn impatient_writer(out: Output<f32>) {
    grid_launch_dependents();
    out[block_idx() * 32 + thread_idx()] = 1.0; // early write
    grid_dependency_wait();
}

/// Never waits, so that its end says nothing of its predecessor's.
#[kernel(block = 32, dependent)]
fn heedless(out: Output<f32>) {
    grid_launch_dependents();
    out[block_idx() * 32 + thread_idx()] = 3.0;
}

/// Reads constant data after it has waited.
#[kernel(block = 32, dependent)]
fn late_weights(scales: Weights<f32>, out: Output<f32>) {
    let i = block_idx() * 32 + thread_idx();
    grid_dependency_wait();
    out[i] = scales[i]; // late read of weights
}

/// Buffers of one memory, and the launches over them.
struct Chain {
    memory: Memory,
    buffers: Vec<AllocationId>,
    steps: Vec<(Instance, Vec<Arg>, bool)>,
}

impl Chain {
    /// `count` buffers of consecutive numbers.
    fn of(count: usize) -> Chain {
        let mut memory = Memory::new();
        let buffers = (0..count).map(|_| memory.allocate(4 * COUNT as usize)).collect();
        let mut chain = Chain { memory, buffers, steps: Vec::new() };
        for &buffer in &chain.buffers {
            let bytes = (0..COUNT).flat_map(|i| (i as f32).to_ne_bytes()).collect::<Vec<_>>();
            chain.memory.bytes_mut(buffer).copy_from_slice(&bytes);
        }
        chain
    }

    /// A dependent launch of 4 blocks with these buffers as its arguments.
    fn then(mut self, def: &'static KernelDef, buffers: &[usize]) -> Chain {
        let args = buffers.iter().map(|at| Arg::Memory(self.memory.view(self.buffers[*at]))).collect();
        self.steps.push((Instance::of(def).build().expect("an instance"), args, true));
        self
    }

    /// The last launch waits for its predecessor's end before it starts.
    fn serial(mut self) -> Chain {
        self.steps.last_mut().expect("a step").2 = false;
        self
    }

    fn run(&mut self, interleaving: Interleaving, options: &Options) -> Result<(), LaunchError> {
        let grid = [COUNT / 32, 1, 1];
        let steps: Vec<_> = self
            .steps
            .iter()
            .map(|(instance, args, dependent)| ChainStep { instance, grid, args: args.clone(), dependent: *dependent })
            .collect();
        gemma4c_dsl::sim::launch_chain(&steps, &mut self.memory, interleaving, options)
    }

    fn value(&self, buffer: usize, at: usize) -> f32 {
        let bytes = &self.memory.bytes(self.buffers[buffer])[4 * at..][..4];
        f32::from_ne_bytes(bytes.try_into().expect("four bytes"))
    }
}

fn all_ways() -> impl Iterator<Item = (Interleaving, Options)> {
    let orders = [false, true].into_iter().flat_map(|unchecked| Order::ALL.map(|order| (unchecked, order)));
    orders.flat_map(|(unchecked, order)| {
        Interleaving::ALL
            .map(|interleaving| (interleaving, Options { order: order.clone(), unchecked, ..Options::default() }))
    })
}

/// The fault between launches that the chain has, in whatever order it runs.
fn fault(make: impl Fn() -> Chain) -> Fault {
    let mut found = None;
    for (interleaving, options) in all_ways() {
        match make().run(interleaving, &options) {
            Err(LaunchError::Fault(fault)) if fault.kind == FaultKind::RaceBetweenLaunches => found = Some(*fault),
            other => panic!("{interleaving:?}, {options:?}: {other:?}"),
        }
    }
    found.expect("some way to run it")
}

fn works(make: impl Fn() -> Chain, check: impl Fn(&Chain)) {
    for (interleaving, options) in all_ways() {
        let mut chain = make();
        if let Err(error) = chain.run(interleaving, &options) {
            panic!("{interleaving:?}, {options:?}: {error}");
        }
        check(&chain);
    }
}

/// The line of this file that ends with this comment.
fn line(comment: &str) -> String {
    let source = include_str!("chain.rs");
    let at = source.lines().position(|line| line.ends_with(comment)).expect("a marked line");
    format!("dsl/tests/it/chain.rs:{}", at + 1)
}

#[test]
fn launches_that_wait_see_what_all_before_them_wrote() {
    let make = || {
        let chain = Chain::of(5).then(early_double::DEF, &[0, 1]).then(early_double::DEF, &[1, 2]);
        // The last reuses the memory of the first result.
        chain.then(late_double::DEF, &[2, 3]).then(scaled::DEF, &[4, 3, 1])
    };
    works(make, |chain| {
        for at in [0, 5, 127] {
            assert_eq!(chain.value(1, at), 8.0 * (at * at) as f32);
        }
    });
}

#[test]
fn a_read_of_the_predecessors_result_before_the_wait_is_found() {
    let found = fault(|| Chain::of(3).then(early_double::DEF, &[0, 1]).then(impatient_reader::DEF, &[1, 2]));
    let text = found.to_string();
    assert!(text.contains(&line("// early read")), "{text}");
    // Whoever comes second finds it: the launches really run in another order.
    let finder = |interleaving| {
        let mut chain = Chain::of(3).then(early_double::DEF, &[0, 1]).then(impatient_reader::DEF, &[1, 2]);
        match chain.run(interleaving, &Options::default()) {
            Err(LaunchError::Fault(fault)) => fault.kernel,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(finder(Interleaving::PredecessorFirst), "impatient_reader");
    assert_eq!(finder(Interleaving::SuccessorFirst), "early_double");
    assert!(text.contains("early_double") && text.contains("impatient_reader") && text.contains("byte "), "{text}");
}

#[test]
fn a_read_before_the_wait_of_what_nobody_writes_is_no_fault() {
    works(
        || Chain::of(4).then(early_double::DEF, &[0, 1]).then(impatient_reader::DEF, &[2, 3]),
        |chain| assert_eq!((chain.value(1, 7), chain.value(3, 7)), (14.0, 14.0)),
    );
}

#[test]
fn a_write_before_the_wait_to_what_the_predecessor_reads_or_writes_is_found() {
    let read = fault(|| Chain::of(3).then(early_double::DEF, &[0, 1]).then(impatient_writer::DEF, &[0]));
    assert!(read.to_string().contains(&line("// early write")), "{read}");
    let written = fault(|| Chain::of(3).then(early_double::DEF, &[0, 1]).then(impatient_writer::DEF, &[1]));
    assert!(written.to_string().contains(&line("// early write")), "{written}");
}

#[test]
fn a_launch_that_waited_for_one_that_did_not_has_not_waited_for_the_one_before() {
    let found = fault(|| {
        let chain = Chain::of(4).then(early_double::DEF, &[0, 1]).then(heedless::DEF, &[2]);
        chain.then(early_double::DEF, &[1, 3])
    });
    assert!(found.message.contains("`x[") || found.message.contains("`out["), "{found}");
    // It is the launch before the last that all depends on.
    works(
        || {
            let chain = Chain::of(4).then(early_double::DEF, &[0, 1]).then(late_double::DEF, &[0, 2]);
            chain.then(early_double::DEF, &[1, 3])
        },
        |chain| assert_eq!(chain.value(3, 9), 36.0),
    );
}

#[test]
fn what_a_launch_may_touch_before_its_wait_depends_on_when_its_predecessor_released_it() {
    // The middle launch has waited before it lets the last one start, so the first is complete by then.
    works(
        || {
            let chain = Chain::of(4).then(early_double::DEF, &[0, 1]).then(late_double::DEF, &[0, 2]);
            chain.then(impatient_reader::DEF, &[1, 3])
        },
        |chain| assert_eq!(chain.value(3, 9), 36.0),
    );
    // Here all three run side by side.
    let found = fault(|| {
        let chain = Chain::of(4).then(early_double::DEF, &[0, 1]).then(early_double::DEF, &[0, 2]);
        chain.then(impatient_reader::DEF, &[1, 3])
    });
    assert!(found.to_string().contains(&line("// early read")), "{found}");
}

#[test]
fn weights_that_the_predecessor_makes_are_found_before_and_after_the_wait() {
    let before = fault(|| Chain::of(4).then(early_double::DEF, &[0, 1]).then(scaled::DEF, &[1, 2, 3]));
    assert!(before.to_string().contains(&line("// early read of weights")), "{before}");
    let after = fault(|| Chain::of(3).then(early_double::DEF, &[0, 1]).then(late_weights::DEF, &[1, 2]));
    assert!(after.to_string().contains(&line("// late read of weights")), "{after}");
    works(
        || Chain::of(3).then(early_double::DEF, &[0, 1]).then(late_weights::DEF, &[1, 2]).serial(),
        |chain| assert_eq!(chain.value(2, 3), 6.0),
    );
}

#[test]
fn a_launch_that_is_not_dependent_starts_after_its_predecessor() {
    works(
        || Chain::of(3).then(early_double::DEF, &[0, 1]).then(impatient_reader::DEF, &[1, 2]).serial(),
        |chain| assert_eq!(chain.value(2, 3), 12.0),
    );
}
