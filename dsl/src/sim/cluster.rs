//! The scheduler of one cluster of blocks, most often of one block: every GPU thread is a coroutine that runs until it
//! waits for others.
//!
//! Threads run one at a time, in the order asked for. A thread that reaches a collective stops; when the last of its
//! warp, block or cluster has stopped at the same place, all of them go on. If nobody can go on and somebody has not
//! returned, the threads have diverged, and the fault says who waits where.

use super::fault::{FaultKind, Line, spelled};
use super::known::Known;
use super::mbarrier;
use super::order::Order;
use super::panics;
use super::pending::{WARPGROUP, Warpgroup};
use super::stacks::{self, ThreadStack};
use super::thread::{Block, CURRENT, Cause, ClusterState, LANE_WORDS, Launch, Raised, Stop, StopScope, Thread, Warp};
use corosensei::{Coroutine, CoroutineResult};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

type GpuThread = Coroutine<(), Stop, (), ThreadStack>;

/// The error after a fault, which is stored in the launch.
pub(crate) struct Faulted;

enum Status {
    Ready,
    /// For the others of its collective.
    Waiting(Stop),
    /// An event, which the thread looks for when it has its turn.
    Awaits(Stop),
    Done,
}

/// The code of a GPU thread.
pub(crate) type Program<'a> = &'a dyn Fn();

/// What a cluster did with its turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Some thread went on.
    Progress,
    /// All threads that have not returned wait for events that have not happened.
    Blocked,
    Done,
}

/// What threads did that went on.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// Some came to another place.
    progress: bool,
    /// Some still wait for an event,
    blocked: bool,
    /// and some of these for one that threads of the launch bring about.
    on_threads: bool,
    /// Some wait for an event, or let others go first.
    gave_way: bool,
}

impl Seen {
    fn join(&mut self, other: Seen) {
        self.progress |= other.progress;
        self.blocked |= other.blocked;
        self.on_threads |= other.on_threads;
        self.gave_way |= other.gave_way;
    }
}

/// A cluster that has started, with its threads.
pub(crate) struct Cluster<'a> {
    /// Finished or dropped before what they borrow.
    coroutines: Vec<GpuThread>,
    states: Vec<Thread>,
    blocks: Vec<Block>,
    /// Behind a box, since threads point to it; `None` once the cluster is dropped.
    state: Option<Box<ClusterState>>,
    launch: &'a Launch<'a>,
    status: Vec<Status>,
    /// Threads that wait at a warp collective, for each warp.
    in_warp: Vec<usize>,
    in_warpgroup: Vec<usize>,
    in_block: Vec<usize>,
    /// Threads that wait at a barrier of the block's first ones.
    in_part: Vec<usize>,
    in_cluster: usize,
    /// Threads that have returned, for each block.
    done: Vec<usize>,
    sequence: Vec<usize>,
    /// Every thread that could go on waits for the end of the predecessor: until then a turn would find them all where
    /// they are.
    awaits_predecessor: bool,
    lets_others_go: bool,
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        // A thread that is still suspended (after a fault) is unwound by its drop instead.
        stacks::put_back(self.coroutines.drain(..).filter(GpuThread::done).map(GpuThread::into_stack));
        self.states.clear();
        if let Some(state) = self.state.take() {
            self.launch.spare.borrow_mut().push(state.shared);
        }
    }
}

/// Block `rank` of a cluster: its blocks lie one after the other along y.
fn block(launch: &Launch<'_>, first: [u32; 3], rank: u32, cluster: *const ClusterState) -> Block {
    let threads = launch.threads as usize;
    let ([gx, gy, _], [x, y, z]) = (launch.grid, [first[0], first[1] + rank, first[2]]);
    Block {
        index: [x, y, z],
        linear: (z * gy + y) * gx + x,
        rank,
        cluster,
        released: Cell::new(false),
        warps: (0..threads / 32)
            .map(|_| Warp { words: RefCell::new([[[0; LANE_WORDS]; 32]; 2]), result: Cell::new((0, 0)) })
            .collect(),
        warpgroups: (0..threads.div_ceil(WARPGROUP)).map(|_| Warpgroup::default()).collect(),
        proxy_fences: vec![Cell::new(0); threads],
        mbarriers: RefCell::default(),
        words: RefCell::new([vec![0; threads], vec![0; threads]]),
        result: Cell::new((0, 0)),
        after_all_blocks: Cell::new(false),
    }
}

#[allow(unsafe_code)]
fn coroutine(state: &Thread, program: Program<'_>) -> GpuThread {
    let stack = stacks::take();
    let state: *const Thread = state;
    // SAFETY: the coroutine borrows `state` and `program`, both of which outlive it: a cluster drops its coroutines
    // first.
    unsafe {
        Coroutine::with_stack_unchecked(stack, move |yielder, ()| {
            (*state).yielder.set(yielder);
            program();
        })
    }
}

/// Threads that met at a barrier know what any of them knew.
fn share_knowledge<'t>(threads: impl Iterator<Item = &'t Thread> + Clone) {
    let mut known: Option<Known> = None;
    for thread in threads.clone() {
        if let Some(own) = &*thread.known.borrow() {
            known.get_or_insert_default().join(own);
        }
    }
    let Some(known) = known.map(Rc::new) else { return };
    threads.for_each(|thread| *thread.known.borrow_mut() = Some(Rc::clone(&known)));
}

impl<'a> Cluster<'a> {
    /// The cluster whose first block is `first`, about to run.
    pub fn start(launch: &'a Launch<'a>, first: [u32; 3], program: Program<'a>) -> Self {
        panics::watch();
        let start = launch.tick();
        let shared = launch.shared_memory();
        for shadow in shared.arrays.iter().flatten().filter_map(|region| region.shadow.as_ref()) {
            shadow.borrow_mut().restart(start);
        }
        let returned = RefCell::new(vec![false; launch.cluster as usize]);
        let state = Box::new(ClusterState { shared, returned });
        let blocks: Vec<Block> =
            (0..launch.cluster).map(|rank| block(launch, first, rank, &raw const *state)).collect();
        let threads = launch.threads as usize;
        let states: Vec<Thread> = blocks
            .iter()
            .flat_map(|block| (0..launch.threads).map(|index| Thread::new(index, launch, block, start)))
            .collect();
        Self {
            coroutines: states.iter().map(|state| coroutine(state, program)).collect(),
            status: states.iter().map(|_| Status::Ready).collect(),
            in_warp: vec![0; states.len() / 32],
            in_warpgroup: vec![0; blocks.len() * threads.div_ceil(WARPGROUP)],
            in_block: vec![0; blocks.len()],
            in_part: vec![0; blocks.len()],
            in_cluster: 0,
            done: vec![0; blocks.len()],
            sequence: (0..states.len()).collect(),
            awaits_predecessor: false,
            lets_others_go: false,
            launch,
            states,
            blocks,
            state: Some(state),
        }
    }

    /// Lets every thread that can go on do so, once or more. On a fault the result is `Err`, and the fault is stored in
    /// the launch.
    ///
    /// In a shuffled order every thread has one go. In the other two a warp goes on until it waits for other warps, and
    /// a block until it waits for other blocks: more often than not a thread's stack is in the CPU's caches then, and a
    /// launch takes up to a tenth less time. A block in which somebody waits for an event lets the others go first,
    /// since they may bring it about.
    pub fn turn(&mut self, order: &mut Order) -> Result<Turn, Faulted> {
        if self.awaits_predecessor && !self.launch.link.predecessor_is_complete() {
            return Ok(Turn::Blocked);
        }
        let mut sequence = std::mem::take(&mut self.sequence);
        order.arrange(&mut sequence);
        let mut seen = Seen::default();
        match order {
            Order::Seeded(_) => self.pass(&sequence, &mut seen)?,
            Order::Forward | Order::Reverse => {
                for block in sequence.chunks(self.threads()) {
                    self.block_turn(block, &mut seen)?;
                }
            }
        }
        self.sequence = sequence;
        self.awaits_predecessor = seen.blocked && !seen.progress && !seen.on_threads;
        self.lets_others_go = seen.gave_way;
        match seen {
            _ if self.all_done() == self.states.len() => Ok(Turn::Done),
            Seen { progress: true, .. } => Ok(Turn::Progress),
            Seen { blocked: true, .. } => Ok(Turn::Blocked),
            _ => Err(self.report_divergence()),
        }
    }

    /// Whether every thread that could go on waits for the end of the predecessor.
    pub fn awaits_predecessor(&self) -> bool {
        self.awaits_predecessor
    }

    /// Whether a thread waited for an event, or let others go first, in the last turn.
    pub fn lets_others_go(&self) -> bool {
        self.lets_others_go
    }

    /// Lets the warps of a block go on until they wait for others than each other.
    fn block_turn(&mut self, block: &[usize], all: &mut Seen) -> Result<(), Faulted> {
        loop {
            let mut seen = Seen::default();
            for warp in block.chunks(32) {
                loop {
                    let mut of_warp = Seen::default();
                    self.pass(warp, &mut of_warp)?;
                    seen.join(of_warp);
                    if !of_warp.progress || seen.gave_way {
                        break;
                    }
                }
            }
            all.join(seen);
            if !seen.progress || seen.gave_way {
                return Ok(());
            }
        }
    }

    /// Lets each of these threads go on once, if it can.
    fn pass(&mut self, threads: &[usize], seen: &mut Seen) -> Result<(), Faulted> {
        for &index in threads {
            if matches!(self.status[index], Status::Waiting(_) | Status::Done) {
                continue;
            }
            let Some(stop) = self.resume(index)? else {
                seen.progress = true;
                self.status[index] = Status::Done;
                self.check_end(index)?;
                self.returns(index)?;
                continue;
            };
            seen.gave_way |= matches!(stop.scope, StopScope::Event { .. } | StopScope::Pause);
            match stop.scope {
                StopScope::Event { by, again: true } => {
                    seen.blocked = true;
                    seen.on_threads |= by == Cause::Threads;
                }
                _ => {
                    seen.progress = true;
                    self.arrive(index, stop)?;
                }
            }
        }
        Ok(())
    }

    /// Whether the successor need not wait for any of the blocks in order to start.
    pub fn is_released(&self) -> bool {
        self.blocks.iter().all(|block| block.released.get())
    }

    /// Reports a thread that waits for an event, when nobody can bring it about.
    pub fn report_deadlock(&self, rest: &str) -> Faulted {
        let waiting = (0..self.states.len()).find_map(|index| match &self.status[index] {
            Status::Awaits(stop) => Some((index, *stop)),
            _ => None,
        });
        let Some((index, stop)) = waiting else { return self.report_divergence() };
        let message = format!(
            "`{}` waits for {}, but nothing can go on{rest}",
            stop.operation,
            self.states[index].awaits.borrow()
        );
        self.raise(index, FaultKind::Deadlock, stop.line, message)
    }

    fn threads(&self) -> usize {
        self.launch.threads as usize
    }

    fn all_done(&self) -> usize {
        self.done.iter().sum()
    }

    /// Counts a thread that has returned; the others of its cluster may have waited for that.
    fn returns(&mut self, index: usize) -> Result<(), Faulted> {
        let block = index / self.threads();
        self.done[block] += 1;
        let returned = self.done[block] == self.threads();
        if let Some(state) = &self.state {
            state.returned.borrow_mut()[block] = returned;
        }
        if let Some(line) = mbarrier::unfinished(&self.blocks[block].mbarriers.borrow()).filter(|_| returned) {
            let message = "is the last to return, and nobody waited for a bulk_load".to_string();
            return Err(self.raise(index, FaultKind::UnfinishedCopy, line, message));
        }
        if returned && !self.blocks[block].released.replace(true) {
            self.launch.link.releases(self.states[index].waited.get());
        }
        self.release_cluster()
    }

    /// Lets the cluster go on if all of its threads wait for each other or have returned.
    fn release_cluster(&mut self) -> Result<(), Faulted> {
        if self.in_cluster == 0 || self.in_cluster + self.all_done() < self.states.len() {
            return Ok(());
        }
        self.in_cluster = 0;
        let waiting: Vec<usize> =
            (0..self.states.len()).filter(|index| matches!(self.status[*index], Status::Waiting(_))).collect();
        let Some(&Status::Waiting(stop)) = waiting.first().map(|first| &self.status[*first]) else { return Ok(()) };
        self.release(waiting.iter().copied(), stop)?;
        if stop.scope == StopScope::Meeting {
            return Ok(());
        }
        let now = self.launch.tick();
        for state in waiting.iter().map(|index| &self.states[*index]) {
            state.last_cluster_barrier.set(now);
            state.last_block_barrier.set(now);
        }
        share_knowledge(waiting.iter().map(|index| &self.states[*index]));
        Ok(())
    }

    /// The warpgroup of a thread: its number among all, and its threads.
    fn warpgroup(&self, index: usize) -> (usize, std::ops::Range<usize>) {
        let (block, in_block) = (index / self.threads(), index % self.threads());
        let (number, end) = (in_block / WARPGROUP, (block + 1) * self.threads());
        let start = block * self.threads() + number * WARPGROUP;
        (block * self.threads().div_ceil(WARPGROUP) + number, start..end.min(start + WARPGROUP))
    }

    /// The first threads of a thread's block.
    fn part(&self, index: usize, threads: u32) -> std::ops::Range<usize> {
        let start = index / self.threads() * self.threads();
        start..start + threads as usize
    }

    /// Whole warps that met at a barrier know what any of them did and knew. The other threads of the block took no
    /// part in it.
    fn gather_knowledge(&self, part: std::ops::Range<usize>) {
        if !self.launch.checks {
            return;
        }
        let now = self.launch.tick();
        let mut all = Known::default();
        for state in &self.states[part.clone()] {
            if let Some(own) = state.known.borrow().as_deref() {
                all.join(own);
            }
            all.warp(state.number() / 32, now);
        }
        let all = Rc::new(all);
        self.states[part].iter().for_each(|state| *state.known.borrow_mut() = Some(Rc::clone(&all)));
    }

    /// Runs a thread until it waits (`Some`) or returns (`None`).
    fn resume(&mut self, index: usize) -> Result<Option<Stop>, Faulted> {
        CURRENT.set(&self.states[index]);
        let coroutine = &mut self.coroutines[index];
        let outcome = catch_unwind(AssertUnwindSafe(|| coroutine.resume(())));
        CURRENT.set(std::ptr::null());
        match outcome {
            Ok(CoroutineResult::Yield(stop)) => Ok(Some(stop)),
            Ok(CoroutineResult::Return(())) => Ok(None),
            Err(payload) => {
                if !payload.is::<Raised>() {
                    let (line, message) = panics::take();
                    let mut fault = self.states[index].fault(FaultKind::Panic, None, message);
                    fault.line = line;
                    self.launch.fault.borrow_mut().get_or_insert(fault);
                }
                Err(Faulted)
            }
        }
    }

    fn arrive(&mut self, index: usize, stop: Stop) -> Result<(), Faulted> {
        self.status[index] = Status::Waiting(stop);
        match stop.scope {
            StopScope::Warp { orders_memory } => {
                let warp = index / 32;
                self.in_warp[warp] += 1;
                if self.in_warp[warp] == 32 {
                    self.in_warp[warp] = 0;
                    self.release(warp * 32..warp * 32 + 32, stop)?;
                    if orders_memory {
                        let now = self.launch.tick();
                        let lanes = &self.states[warp * 32..warp * 32 + 32];
                        lanes.iter().for_each(|state| state.last_warp_barrier.set(now));
                        share_knowledge(lanes.iter());
                    }
                }
            }
            StopScope::Warpgroup => {
                let (group, threads) = self.warpgroup(index);
                self.in_warpgroup[group] += 1;
                if self.in_warpgroup[group] == WARPGROUP {
                    self.in_warpgroup[group] = 0;
                    self.release(threads, stop)?;
                }
            }
            StopScope::Block => {
                let block = index / self.threads();
                self.in_block[block] += 1;
                if self.in_block[block] == self.threads() {
                    self.in_block[block] = 0;
                    let threads = block * self.threads()..(block + 1) * self.threads();
                    self.release(threads.clone(), stop)?;
                    let now = self.launch.tick();
                    self.states[threads.clone()].iter().for_each(|state| {
                        state.last_block_barrier.set(now);
                        state.last_full_barrier.set(now);
                    });
                    share_knowledge(self.states[threads].iter());
                }
            }
            StopScope::Part { threads } => {
                let block = index / self.threads();
                self.in_part[block] += 1;
                if self.in_part[block] == threads as usize {
                    self.in_part[block] = 0;
                    let part = self.part(index, threads);
                    self.release(part.clone(), stop)?;
                    self.gather_knowledge(part);
                }
            }
            StopScope::Cluster | StopScope::Meeting => {
                self.in_cluster += 1;
                self.release_cluster()?;
            }
            StopScope::Event { .. } => self.status[index] = Status::Awaits(stop),
            StopScope::Pause => self.status[index] = Status::Ready,
        }
        Ok(())
    }

    /// Resumes the threads of a collective, if all of them stopped at the same place.
    fn release(&mut self, group: impl Iterator<Item = usize> + Clone, stop: Stop) -> Result<(), Faulted> {
        for index in group.clone() {
            if let Status::Waiting(other) = &self.status[index]
                && !other.is_at(&stop)
            {
                return Err(self.report_divergence());
            }
        }
        for index in group {
            self.status[index] = Status::Ready;
        }
        Ok(())
    }

    fn report_divergence(&self) -> Faulted {
        let waiting = |index: usize| match &self.status[index] {
            Status::Waiting(stop) => Some(*stop),
            _ => None,
        };
        let Some(first) = (0..self.status.len()).find(|&index| waiting(index).is_some()) else { return Faulted };
        let Some(stop) = waiting(first) else { return Faulted };
        let (group, whole) = match stop.scope {
            StopScope::Warp { .. } => (first / 32 * 32..first / 32 * 32 + 32, "all 32 lanes of a warp"),
            StopScope::Warpgroup => (self.warpgroup(first).1, "all 128 threads of a warpgroup"),
            StopScope::Block => {
                let start = first / self.threads() * self.threads();
                (start..start + self.threads(), "all threads of a block")
            }
            StopScope::Part { threads } => (self.part(first, threads), "all threads of the warps it names"),
            StopScope::Cluster | StopScope::Meeting => (0..self.status.len(), "all threads of a cluster"),
            StopScope::Event { .. } | StopScope::Pause => (first..first + 1, "the thread alone"),
        };
        let elsewhere = group.into_iter().find_map(|other| match waiting(other) {
            Some(at) if at.is_at(&stop) => None,
            Some(at) => Some(format!("{} waits at `{}`, {}", self.called(other), at.operation, spelled(at.line))),
            // A cluster barrier does not wait for blocks that have returned.
            None if matches!(stop.scope, StopScope::Cluster | StopScope::Meeting) => None,
            None => Some(format!("{} has returned", self.called(other))),
        });
        let message = format!(
            "`{}` needs {whole} at the same place, but {}",
            stop.operation,
            elsewhere.unwrap_or_else(|| "other threads are elsewhere".to_string())
        );
        self.raise(first, FaultKind::Divergence, stop.line, message)
    }

    fn called(&self, index: usize) -> String {
        let (block, thread) = (index / self.threads(), index % self.threads());
        if self.done.len() == 1 { format!("thread {thread}") } else { format!("thread {thread} of block {block}") }
    }

    fn raise(&self, index: usize, kind: FaultKind, line: Line, message: String) -> Faulted {
        let fault = self.states[index].fault(kind, line, message);
        self.launch.fault.borrow_mut().get_or_insert(fault);
        Faulted
    }

    /// What a thread must have done before it returns.
    fn check_end(&self, index: usize) -> Result<(), Faulted> {
        let state = &self.states[index];
        if self.launch.must_wait && !state.waited.get() {
            let message =
                "returns without grid_dependency_wait(): its successor would not wait for its predecessor".to_string();
            return Err(self.raise(index, FaultKind::MissingDependencyWait, None, message));
        }
        if state.arrived.get() {
            let message =
                "returns after `cluster_arrive` without `cluster_wait`: a peer may still read its shared memory"
                    .to_string();
            return Err(self.raise(index, FaultKind::Divergence, None, message));
        }
        let open = state.open_copies.borrow().first().map(|copy| copy.line);
        let pending = state.copy_groups.borrow().iter().flatten().next().map(|copy| copy.line);
        if let Some(line) = open.or(pending) {
            self.raise(
                index,
                FaultKind::UnfinishedCopy,
                line,
                "returns with a cp_async that nobody waited for".to_string(),
            );
            return Err(Faulted);
        }
        let products = state.products.borrow();
        if !products.is_idle() {
            let message = "returns with a wgmma that nobody waited for".to_string();
            return Err(self.raise(index, FaultKind::UnfinishedProduct, products.line, message));
        }
        Ok(())
    }
}
