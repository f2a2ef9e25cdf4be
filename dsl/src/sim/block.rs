//! The scheduler of one block: every GPU thread is a coroutine that runs until it waits for others.
//!
//! Threads run one at a time, in the order asked for. A thread that reaches a collective stops; when the last of its warp
//! or block has stopped at the same place, all of them go on. If nobody can go on and somebody has not returned, the
//! threads have diverged, and the fault says who waits where.

use super::Order;
use super::fault::{FaultKind, Line, spelled};
use super::thread::{
    AsyncCopy, Block, CURRENT, LANE_WORDS, Launch, Products, Raised, Stop, StopScope, Thread, WARPGROUP, Warp,
    Warpgroup,
};
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Address space of a coroutine's stack; pages are committed as they are touched.
const STACK_BYTES: usize = 256 * 1024;

thread_local! {
    /// Stacks of finished coroutines, for the next block.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
    /// What the panic hook saw of a panic inside a GPU thread.
    static PANIC: RefCell<Option<(String, String)>> = const { RefCell::new(None) };
}

type GpuThread = Coroutine<(), Stop, (), DefaultStack>;

/// A fault was left in the launch.
pub(crate) struct Faulted;

enum Status {
    Ready,
    Waiting(Stop),
    Done,
}

/// The code of a GPU thread.
pub(crate) type Program<'a> = &'a dyn Fn();

/// Runs a block to its end. A fault is left in the launch, and the result is `Err`.
pub(crate) fn run(
    launch: &Launch<'_>,
    index: [u32; 3],
    linear: u32,
    order: &mut Order,
    program: Program<'_>,
) -> Result<(), Faulted> {
    watch_panics();
    let threads = launch.threads as usize;
    let block = Block {
        index,
        linear,
        warps: (0..threads / 32).map(|_| Warp { words: RefCell::new([[[0; LANE_WORDS]; 32]; 2]) }).collect(),
        warpgroups: (0..threads.div_ceil(WARPGROUP)).map(|_| Warpgroup::default()).collect(),
        proxy_fences: vec![Cell::new(0); threads],
        words: RefCell::new([vec![0; threads], vec![0; threads]]),
        result: Cell::new((0, 0)),
        after_all_blocks: Cell::new(false),
    };
    let start = launch.tick();
    for region in &launch.shared {
        if let Some(shadow) = &region.shadow {
            shadow.borrow_mut().restart(start);
        }
    }
    let states: Vec<Thread> = (0..launch.threads).map(|index| thread(index, launch, &block, start)).collect();
    let mut scheduler = Scheduler {
        launch,
        states: &states,
        coroutines: states.iter().map(|state| coroutine(state, program)).collect(),
        status: (0..threads).map(|_| Status::Ready).collect(),
        in_warp: vec![0; threads / 32],
        in_warpgroup: vec![0; threads.div_ceil(WARPGROUP)],
        in_block: 0,
    };
    let result = scheduler.run(order);
    let Scheduler { coroutines, .. } = scheduler;
    STACKS.with_borrow_mut(|pool| {
        for coroutine in coroutines {
            // A thread that is still suspended (after a fault) is unwound by its drop instead.
            if coroutine.done() {
                pool.push(coroutine.into_stack());
            }
        }
    });
    CURRENT.set(std::ptr::null());
    result
}

#[allow(unsafe_code)]
fn thread(index: u32, launch: &Launch<'_>, block: &Block, start: u32) -> Thread {
    Thread {
        index,
        // SAFETY: only the lifetime is erased; the thread is dropped before the launch (see `run`).
        launch: unsafe { std::mem::transmute::<*const Launch<'_>, *const Launch<'static>>(launch) },
        block,
        yielder: Cell::new(std::ptr::null()),
        last_block_barrier: Cell::new(start),
        last_warp_barrier: Cell::new(start),
        waited: Cell::new(false),
        warp_collectives: Cell::new(0),
        block_collectives: Cell::new(0),
        open_copies: RefCell::new(Vec::<AsyncCopy>::new()),
        copy_groups: RefCell::new(VecDeque::new()),
        products: RefCell::new(Products::default()),
    }
}

#[allow(unsafe_code)]
fn coroutine(state: &Thread, program: Program<'_>) -> GpuThread {
    let stack = STACKS
        .with_borrow_mut(Vec::pop)
        .unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("address space for a coroutine's stack"));
    let state: *const Thread = state;
    // SAFETY: the coroutine borrows `state` and `program`, both of which outlive it: it is finished or dropped in `run`,
    // before they are.
    unsafe {
        Coroutine::with_stack_unchecked(stack, move |yielder, ()| {
            (*state).yielder.set(yielder);
            program();
        })
    }
}

struct Scheduler<'a> {
    launch: &'a Launch<'a>,
    states: &'a [Thread],
    coroutines: Vec<GpuThread>,
    status: Vec<Status>,
    /// Threads that wait at a warp collective, for each warp.
    in_warp: Vec<usize>,
    in_warpgroup: Vec<usize>,
    in_block: usize,
}

impl Scheduler<'_> {
    fn run(&mut self, order: &mut Order) -> Result<(), Faulted> {
        let mut sequence: Vec<usize> = (0..self.states.len()).collect();
        let mut done = 0;
        while done < self.states.len() {
            order.arrange(&mut sequence);
            let mut progress = false;
            for &index in &sequence {
                if !matches!(self.status[index], Status::Ready) {
                    continue;
                }
                progress = true;
                match self.resume(index)? {
                    Some(stop) => self.arrive(index, stop)?,
                    None => {
                        self.status[index] = Status::Done;
                        self.check_end(index)?;
                        done += 1;
                    }
                }
            }
            if !progress {
                return Err(self.report_divergence());
            }
        }
        Ok(())
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
                    let (line, message) =
                        PANIC.take().unwrap_or_else(|| (spelled(None), "a panic without a message".into()));
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
                        self.states[warp * 32..warp * 32 + 32]
                            .iter()
                            .for_each(|state| state.last_warp_barrier.set(now));
                    }
                }
            }
            StopScope::Warpgroup => {
                let group = index / WARPGROUP;
                self.in_warpgroup[group] += 1;
                if self.in_warpgroup[group] == WARPGROUP {
                    self.in_warpgroup[group] = 0;
                    self.release(group * WARPGROUP..(group + 1) * WARPGROUP, stop)?;
                }
            }
            StopScope::Block => {
                self.in_block += 1;
                if self.in_block == self.states.len() {
                    self.in_block = 0;
                    self.release(0..self.states.len(), stop)?;
                    let now = self.launch.tick();
                    self.states.iter().for_each(|state| state.last_block_barrier.set(now));
                }
            }
        }
        Ok(())
    }

    /// Lets a group go on, if all of it stopped at the same place.
    fn release(&mut self, group: std::ops::Range<usize>, stop: Stop) -> Result<(), Faulted> {
        for index in group.clone() {
            if let Status::Waiting(other) = &self.status[index]
                && (other.operation, other.line) != (stop.operation, stop.line)
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
            StopScope::Warpgroup => {
                let start = first / WARPGROUP * WARPGROUP;
                (start..self.status.len().min(start + WARPGROUP), "all 128 threads of a warpgroup")
            }
            StopScope::Block => (0..self.status.len(), "all threads of a block"),
        };
        let elsewhere = group.into_iter().find_map(|other| match waiting(other) {
            Some(at) if (at.operation, at.line) == (stop.operation, stop.line) => None,
            Some(at) => Some(format!("thread {other} waits at `{}`, {}", at.operation, spelled(at.line))),
            None => Some(format!("thread {other} has returned")),
        });
        let message = format!(
            "`{}` needs {whole} at the same place, but {}",
            stop.operation,
            elsewhere.unwrap_or_else(|| "other threads are elsewhere".to_string())
        );
        self.raise(first, FaultKind::Divergence, stop.line, message)
    }

    fn raise(&self, index: usize, kind: FaultKind, line: Line, message: String) -> Faulted {
        let fault = self.states[index].fault(kind, line, message);
        self.launch.fault.borrow_mut().get_or_insert(fault);
        Faulted
    }

    /// What a thread must have done before it returns.
    fn check_end(&self, index: usize) -> Result<(), Faulted> {
        let state = &self.states[index];
        if self.launch.checks && self.launch.instance.def.launch.dependent && !state.waited.get() {
            let message =
                "returns without grid_dependency_wait(): its successor would not wait for its predecessor".to_string();
            return Err(self.raise(index, FaultKind::MissingDependencyWait, None, message));
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

fn said(payload: &dyn std::any::Any) -> String {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_string()
}

/// Installs, once, a panic hook that keeps quiet about panics inside GPU threads and remembers their line.
fn watch_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CURRENT.get().is_null() {
                return previous(info);
            }
            let line = info.location().map_or_else(|| spelled(None), |at| format!("{}:{}", at.file(), at.line()));
            let message = said(info.payload());
            PANIC.set(Some((line, message)));
        }));
    });
}
