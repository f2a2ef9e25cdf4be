//! One GPU thread as the code that runs on it sees it: who it is, what it may touch, how it waits for the others.
//!
//! The running thread is found through a thread-local pointer, which the scheduler sets before it resumes a coroutine.
//! Coroutines never move between OS threads.

use super::constants::Constants;
use super::fault::{Fault, FaultKind, Line, spelled};
use super::history::{Conflict, Visitor};
use super::known::Known;
use super::pending::{AsyncCopy, Mbarrier, Products, WARPGROUP, Warpgroup};
use super::region::{Region, SharedMemory};
use super::shadow::{Accessor, Touch};
use super::stream::Link;
use crate::definition::Access;
use crate::instance::Instance;
use crate::values::Values;
use corosensei::Yielder;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use std::rc::Rc;

/// Words that a lane may bring to a collective: two operands and an accumulator of a tensor-core product.
pub(crate) const LANE_WORDS: usize = 12;
pub(crate) type Lanes = [[u32; LANE_WORDS]; 32];

/// Why a thread gave up control.
#[derive(Clone, Copy)]
pub(crate) struct Stop {
    pub scope: StopScope,
    pub operation: &'static str,
    pub line: Line,
}

impl Stop {
    /// The same operation at the same line. Addresses are compared first: most often it is the very same place.
    pub fn is_at(&self, other: &Stop) -> bool {
        let same_line = match (self.line, other.line) {
            (Some(line), Some(other)) => std::ptr::eq(line, other) || line == other,
            (line, other) => line == other,
        };
        same_line && (std::ptr::eq(self.operation, other.operation) || self.operation == other.operation)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopScope {
    Warp {
        orders_memory: bool,
    },
    Warpgroup,
    Block,
    /// The block's first threads, as many.
    Part {
        threads: u32,
    },
    Cluster,
    /// All of a cluster, of which it orders no memory.
    Meeting,
    /// Something that others bring about. `again`: it had not happened a turn ago either.
    Event {
        by: Cause,
        again: bool,
    },
    /// Nothing: the thread lets others go first.
    Pause,
}

/// Who brings an event about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Threads of the same launch.
    Threads,
    /// The launch's predecessor in the stream, by its end.
    Predecessor,
}

/// State of one launch, shared by all its threads.
pub(crate) struct Launch<'a> {
    pub instance: &'a Instance,
    pub grid: [u32; 3],
    pub threads: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    pub constants: Constants,
    /// One for each parameter; scalars have none.
    pub regions: Vec<Option<Region>>,
    pub scalars: Vec<u64>,
    /// Shared memory of clusters that have ended, for the next.
    pub spare: RefCell<Vec<SharedMemory>>,
    /// Where the launch stands in its stream.
    pub link: Link,
    /// The launches of the stream, by number.
    pub names: Rc<[LaunchName]>,
    pub checks: bool,
    /// Of a thin instance.
    pub thin: bool,
    /// Every thread must wait for the predecessor, whatever it is.
    pub must_wait: bool,
    pub host: bool,
    /// Advanced by every barrier; orders the marks of the shadow.
    pub clock: Cell<u32>,
    pub fault: RefCell<Option<Fault>>,
}

impl Launch<'_> {
    pub fn values(&self) -> &Values {
        self.instance.values()
    }

    pub fn kernel(&self) -> &'static str {
        self.instance.def.name
    }

    pub fn tick(&self) -> u32 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }
}

/// How a launch is called in another's fault.
pub(crate) struct LaunchName {
    pub kernel: &'static str,
    pub threads: u32,
}

/// State of a running cluster.
pub(crate) struct ClusterState {
    /// Of each block.
    pub shared: SharedMemory,
    /// Which of its blocks have returned.
    pub returned: RefCell<Vec<bool>>,
}

/// State of a running block.
pub(crate) struct Block {
    pub index: [u32; 3],
    pub linear: u32,
    /// Its number in its cluster.
    pub rank: u32,
    pub cluster: *const ClusterState,
    /// One of its threads has let the successor start.
    pub released: Cell<bool>,
    pub warps: Vec<Warp>,
    pub warpgroups: Vec<Warpgroup>,
    /// When each thread last made its writes to shared memory visible to products of warpgroups.
    pub proxy_fences: Vec<Cell<u32>>,
    /// By their addresses.
    pub mbarriers: RefCell<BTreeMap<usize, Mbarrier>>,
    /// What the threads brought to block collectives: two sets, used in turn, so that a fast thread cannot overwrite
    /// what a slow one has yet to read.
    pub words: RefCell<[Vec<u32>; 2]>,
    /// (number of the collective, its result)
    pub result: Cell<(u32, u32)>,
    pub after_all_blocks: Cell<bool>,
}

pub(crate) struct Warp {
    pub words: RefCell<[Lanes; 2]>,
    /// (number of the collective, its result), of collectives with one for all lanes
    pub result: Cell<(u32, u32)>,
}

/// State of one GPU thread.
pub(crate) struct Thread {
    pub index: u32,
    pub launch: *const Launch<'static>,
    pub block: *const Block,
    pub yielder: Cell<*const Yielder<(), Stop>>,
    pub last_cluster_barrier: Cell<u32>,
    pub last_block_barrier: Cell<u32>,
    /// The last that ordered all memory.
    pub last_full_barrier: Cell<u32>,
    pub last_warp_barrier: Cell<u32>,
    pub waited: Cell<bool>,
    /// Between the halves of a meeting of the cluster.
    pub arrived: Cell<bool>,
    /// What the thread waits for, when it waits for an event: for the report of a deadlock.
    pub awaits: RefCell<String>,
    /// What the thread knows of others through mbarriers.
    pub known: RefCell<Option<Rc<Known>>>,
    pub warp_collectives: Cell<u32>,
    pub block_collectives: Cell<u32>,
    pub open_copies: RefCell<Vec<AsyncCopy>>,
    pub copy_groups: RefCell<VecDeque<Vec<AsyncCopy>>>,
    pub products: RefCell<Products>,
}

thread_local! {
    pub(crate) static CURRENT: Cell<*const Thread> = const { Cell::new(std::ptr::null()) };
}

impl Thread {
    /// A thread that has not run yet. Its launch and its block must outlive it.
    #[allow(unsafe_code)]
    pub fn new(index: u32, launch: &Launch<'_>, block: &Block, start: u32) -> Self {
        Self {
            index,
            // SAFETY: only the lifetime is erased; see above.
            launch: unsafe { std::mem::transmute::<*const Launch<'_>, *const Launch<'static>>(launch) },
            block,
            yielder: Cell::new(std::ptr::null()),
            last_cluster_barrier: Cell::new(start),
            last_block_barrier: Cell::new(start),
            last_full_barrier: Cell::new(start),
            last_warp_barrier: Cell::new(start),
            waited: Cell::new(false),
            arrived: Cell::new(false),
            awaits: RefCell::default(),
            known: RefCell::default(),
            warp_collectives: Cell::new(0),
            block_collectives: Cell::new(0),
            open_copies: RefCell::default(),
            copy_groups: RefCell::default(),
            products: RefCell::default(),
        }
    }
}

/// The payload of the unwinding that ends a faulty thread.
pub(crate) struct Raised;

impl Thread {
    /// The GPU thread that is running.
    #[allow(unsafe_code)]
    #[track_caller]
    pub fn current() -> &'static Thread {
        let current = CURRENT.get();
        assert!(!current.is_null(), "a kernel's functions work inside a simulated launch alone");
        // SAFETY: the scheduler keeps the block's threads alive while any of their coroutines can run, and clears the
        // pointer when it returns. The reference does not leave the coroutine's stack.
        unsafe { &*current }
    }

    #[allow(unsafe_code)]
    pub fn launch(&self) -> &Launch<'_> {
        // SAFETY: a thread lives inside the call that owns its launch.
        unsafe { &*self.launch }
    }

    #[allow(unsafe_code)]
    pub fn block(&self) -> &Block {
        // SAFETY: as above, for the block.
        unsafe { &*self.block }
    }

    #[allow(unsafe_code)]
    pub fn cluster(&self) -> &ClusterState {
        // SAFETY: as above, for the cluster.
        unsafe { &*self.block().cluster }
    }

    pub fn lane(&self) -> usize {
        self.index as usize % 32
    }

    pub fn warpgroup(&self) -> &Warpgroup {
        &self.block().warpgroups[self.index as usize / WARPGROUP]
    }

    /// The kernel's line that called, unless it is the host text that runs.
    #[track_caller]
    pub fn line(&self) -> Line {
        if self.launch().host { None } else { Some(Location::caller()) }
    }

    pub fn accessor(&self, line: Line) -> Accessor {
        let (launch, block) = (self.launch(), self.block());
        Accessor {
            thread: self.number(),
            now: launch.clock.get(),
            cluster: launch.cluster,
            grid: launch.grid,
            last_cluster_barrier: self.last_cluster_barrier.get(),
            last_block_barrier: self.last_block_barrier.get(),
            last_warp_barrier: self.last_warp_barrier.get(),
            after_all_blocks: block.after_all_blocks.get(),
            known: self.known.borrow().clone(),
            threads_per_block: launch.threads,
            line,
        }
    }

    pub fn fault(&self, kind: FaultKind, line: Line, message: String) -> Fault {
        let kernel = self.launch().kernel().to_string();
        Fault { kernel, kind, block: self.block().index, thread: self.index, line: spelled(line), message }
    }

    /// Ends the thread, and with it the launch.
    pub fn raise(&self, kind: FaultKind, line: Line, message: String) -> ! {
        let fault = self.fault(kind, line, message);
        self.launch().fault.borrow_mut().get_or_insert(fault);
        std::panic::resume_unwind(Box::new(Raised))
    }

    /// Gives control back until the other threads have arrived.
    #[allow(unsafe_code)]
    pub fn suspend(&self, stop: Stop) {
        // SAFETY: set at the start of this coroutine, on whose stack this runs.
        let yielder = unsafe { &*self.yielder.get() };
        yielder.suspend(stop);
    }

    /// Lets the others run until `happened` holds. `what` is awaited: it is said if nobody brings it about.
    pub fn wait_until(
        &self,
        by: Cause,
        operation: &'static str,
        line: Line,
        what: impl Fn() -> String,
        happened: impl Fn() -> bool,
    ) {
        let mut again = false;
        while !happened() {
            if !again {
                *self.awaits.borrow_mut() = what();
            }
            self.suspend(Stop { scope: StopScope::Event { by, again }, operation, line });
            again = true;
        }
    }

    /// What the thread did until now, and knows of others: what a release publishes. Nothing, where no accesses are
    /// checked.
    pub fn knowledge(&self) -> Known {
        let (launch, block) = (self.launch(), self.block());
        if !launch.checks {
            return Known::default();
        }
        // What the thread does from now on is later.
        let now = launch.tick();
        let mut all = self.known.borrow().as_deref().cloned().unwrap_or_default();
        all.thread(self.number(), now);
        all.warp(self.number() / 32, self.last_warp_barrier.get().max(self.last_full_barrier.get()));
        all.block(block.linear, self.last_full_barrier.get());
        all
    }

    /// Takes over what another knows.
    pub fn learns(&self, known: &Known) {
        if !self.launch().checks {
            return;
        }
        let mut own = self.known.borrow_mut();
        let mut all = own.as_deref().cloned().unwrap_or_default();
        all.join(known);
        *own = Some(Rc::new(all));
    }

    /// The number of the thread in the grid.
    pub fn number(&self) -> u32 {
        self.block().linear * self.launch().threads + self.index
    }

    /// Checks an access to memory that needs more than a bound.
    pub fn check(&self, region: &Region, at: usize, bytes: usize, touch: Touch, line: Line) {
        let launch = self.launch();
        if region.after_wait && !self.waited.get() && (touch.writes() || !region.early) {
            let message =
                format!("touches `{}` before grid_dependency_wait(): its producer may still be running", region.name);
            self.raise(FaultKind::MissingDependencyWait, line, message);
        }
        if region.only_read && touch.writes() {
            let message = format!("writes `{}`, which the kernel's head says that it only reads", region.name);
            self.raise(FaultKind::OutOfBounds, line, message);
        }
        if let Some(shadow) = &region.shadow {
            let mut accessor = self.accessor(line);
            if region.access != Access::Shared {
                // A cluster's barrier orders shared memory alone.
                (accessor.last_cluster_barrier, accessor.last_block_barrier) = (0, self.last_full_barrier.get());
            }
            let result = shadow.borrow_mut().touch(region.shadow_start + at, bytes, touch, &accessor);
            if let Err((kind, why)) = result {
                let element = at / region.element.size();
                self.raise(kind, line, format!("{} `{}[{element}]`: {why}", touch.verb(), region.name));
            }
        }
        if let Some(history) = &region.history {
            // What is constant while a kernel runs is so from its start: the compiler moves its reads above the wait.
            let waited = self.waited.get() && region.access != Access::Weights;
            let visitor = Visitor { link: &launch.link, waited, thread: self.number(), line };
            let result = history.borrow_mut().touch(region.shadow_start + at, bytes, touch, &visitor);
            if let Err(conflict) = result {
                self.raise_conflict(region, touch, line, &conflict);
            }
        }
    }

    /// What threads wrote to these bytes of shared memory is visible to the async proxy, or it is a fault.
    pub fn require_fenced(&self, region: &Region, at: usize, bytes: usize, does: &str, line: Line) {
        let Some(shadow) = &region.shadow else { return };
        let unfenced = shadow.borrow().unfenced(at, bytes, &self.block().proxy_fences);
        if let Some((writer, written)) = unfenced {
            let (name, element, written) = (&region.name, at / region.element.size(), spelled(written));
            let message = format!(
                "{does} `{name}[{element}]`, which thread {writer} wrote at {written} without fence_proxy_async() since"
            );
            self.raise(FaultKind::MissingFence, line, message);
        }
    }

    fn raise_conflict(&self, region: &Region, touch: Touch, line: Line, conflict: &Conflict) -> ! {
        let launch = self.launch();
        let byte = conflict.at.saturating_sub(region.shadow_start);
        let other = &launch.names[conflict.launch as usize];
        let (block, thread) = (conflict.thread / other.threads, conflict.thread % other.threads);
        let did = if conflict.wrote { "written" } else { "read" };
        let why = if conflict.launch > launch.link.number {
            "which does not wait for this launch before that"
        } else if region.access == Access::Weights && self.waited.get() {
            "but weights are constant from before this launch starts"
        } else if self.waited.get() {
            "for which no launch between has waited"
        } else {
            "before grid_dependency_wait()"
        };
        let message = format!(
            "{} `{}[{}]`, byte {byte}: {did} by kernel {} (launch {}, this is {}), thread {thread} of block {block}, at {}, {why}",
            touch.verb(),
            region.name,
            byte / region.element.size(),
            other.kernel,
            conflict.launch,
            launch.link.number,
            conflict.line,
        );
        self.raise(FaultKind::RaceBetweenLaunches, line, message)
    }

    /// All lanes bring words, wait for each other, and see what the others brought.
    pub fn warp_collective<R>(
        &self,
        operation: &'static str,
        line: Line,
        words: &[u32],
        see: impl FnOnce(&Lanes) -> R,
    ) -> R {
        let turn = self.warp_collectives.get();
        self.warp_collectives.set(turn + 1);
        let warp = &self.block().warps[self.index as usize / 32];
        warp.words.borrow_mut()[turn as usize % 2][self.lane()][..words.len()].copy_from_slice(words);
        self.suspend(Stop { scope: StopScope::Warp { orders_memory: false }, operation, line });
        see(&warp.words.borrow()[turn as usize % 2])
    }

    /// All lanes bring a word, wait for each other, and get one result.
    pub fn warp_reduction(
        &self,
        operation: &'static str,
        line: Line,
        word: u32,
        see: impl FnOnce(&Lanes) -> u32,
    ) -> u32 {
        // Numbered from one: a warp that has reduced nothing has the result zero of collective zero.
        let turn = self.warp_collectives.get() + 1;
        let result = &self.block().warps[self.index as usize / 32].result;
        self.warp_collective(operation, line, &[word], |lanes| {
            if result.get().0 != turn {
                result.set((turn, see(lanes)));
            }
            result.get().1
        })
    }

    /// All threads bring a word, wait for each other, and get one result. Orders memory like a barrier.
    pub fn block_collective(
        &self,
        operation: &'static str,
        line: Line,
        word: u32,
        see: impl FnOnce(&[u32]) -> u32,
    ) -> u32 {
        let turn = self.block_collectives.get() + 1;
        self.block_collectives.set(turn);
        let block = self.block();
        block.words.borrow_mut()[turn as usize % 2][self.index as usize] = word;
        self.suspend(Stop { scope: StopScope::Block, operation, line });
        if block.result.get().0 != turn {
            let result = see(&block.words.borrow()[turn as usize % 2]);
            block.result.set((turn, result));
        }
        block.result.get().1
    }
}
