//! A chain of launches over one memory, as a stream runs them: a dependent launch runs beside its predecessor.
//!
//! Every access to memory that some launch of the chain writes is checked against those of the other launches
//! (`history.rs`, by the rule of `stream.rs`): a read of what a launch writes that nobody has waited for, and a write
//! of what it reads or writes. The check does not depend on the interleaving; what the kernels compute when something
//! is wrong does.

use super::cluster::{Program, Turn};
use super::grid::Grid;
use super::history::History;
use super::launch::{Arg, Binding, LaunchError, Options, bind, check_outputs};
use super::memory::Memory;
use super::stacks::RESIDENT_THREADS;
use super::stream::Link;
use super::thread::{Launch, LaunchName};
use crate::definition::ParamKind;
use crate::elements::ElementType;
use crate::instance::Instance;
use crate::passing::Arguments;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// One launch of a chain.
pub struct ChainStep<'a> {
    pub instance: &'a Instance,
    pub grid: [u32; 3],
    pub args: Vec<Arg>,
    /// Launched with programmatic dependent launch: it may start before its predecessor ends.
    pub dependent: bool,
}

/// Which launch of a chain goes on when several could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interleaving {
    /// A launch starts when its predecessor has ended.
    PredecessorFirst,
    /// A launch starts as early as it may, and goes on as long as it can.
    SuccessorFirst,
    /// A launch starts as early as it may, and all that run take turns.
    Alternate,
}

impl Interleaving {
    pub const ALL: [Self; 3] = [Self::PredecessorFirst, Self::SuccessorFirst, Self::Alternate];
}

/// Runs launches in a stream's order. With [`Options::unchecked`] the order between launches is still checked, but
/// nothing within one.
pub fn launch_chain(
    steps: &[ChainStep<'_>],
    memory: &mut Memory,
    interleaving: Interleaving,
    options: &Options,
) -> Result<(), LaunchError> {
    let names: Rc<[LaunchName]> = steps
        .iter()
        .map(|step| LaunchName { kernel: step.instance.def.name, threads: step.instance.block() })
        .collect();
    let histories = histories(steps, memory);
    let mut launches: Vec<Launch<'_>> = Vec::new();
    for step in steps {
        let pauses = interleaving != Interleaving::PredecessorFirst;
        let link = launches.last().map_or_else(
            || Link { pauses, ..Link::alone() },
            |before| Link::after(&before.link, step.dependent, pauses),
        );
        let binding =
            Binding { link, names: Rc::clone(&names), histories: Some(&histories), ..Binding::alone(step.instance) };
        launches.push(bind(step.instance, step.grid, memory, &step.args, options, binding)?);
    }
    let arguments: Vec<Arguments<'_>> = launches.iter().map(|launch| Arguments { launch }).collect();
    let programs: Vec<Box<dyn Fn() + '_>> = arguments
        .iter()
        .zip(steps)
        .map(|(arguments, step)| -> Box<dyn Fn() + '_> { Box::new(|| (step.instance.def.run)(arguments)) })
        .collect();
    let mut chain =
        Chain { launches: &launches, programs: &programs, options, running: BTreeMap::new(), started: 0, last: 0 };
    chain.run(interleaving)
}

/// A history for each allocation that some launch writes.
fn histories(steps: &[ChainStep<'_>], memory: &Memory) -> BTreeMap<usize, Rc<RefCell<History>>> {
    let mut found = BTreeMap::new();
    for step in steps {
        for (param, arg) in step.instance.params().iter().zip(&step.args) {
            let (ParamKind::Memory { access, element }, Arg::Memory(view)) = (param.def.kind, arg) else { continue };
            let size = step.instance.values().element(element).map_or(1, ElementType::size);
            let (writes, granule) = found.entry(memory.position(view.allocation)).or_insert((false, 4));
            *writes |= access.writes();
            *granule = size.min(*granule);
        }
    }
    found
        .into_iter()
        .filter(|(_, (writes, _))| *writes)
        .map(|(id, (_, granule))| (id, Rc::new(RefCell::new(History::new(memory.len_at(id), granule)))))
        .collect()
}

struct Chain<'a> {
    launches: &'a [Launch<'a>],
    programs: &'a [Box<dyn Fn() + 'a>],
    options: &'a Options,
    /// By number.
    running: BTreeMap<usize, Grid<'a>>,
    started: usize,
    /// Went on last.
    last: usize,
}

impl<'a> Chain<'a> {
    fn run(&mut self, interleaving: Interleaving) -> Result<(), LaunchError> {
        loop {
            let may_overlap = interleaving != Interleaving::PredecessorFirst;
            while self.started < self.launches.len()
                && (may_overlap || self.running.is_empty())
                && self.next_may_start()
            {
                let launch = &self.launches[self.started];
                launch.link.starts();
                let program: Program<'a> = &*self.programs[self.started];
                self.running.insert(self.started, Grid::new(launch, &self.options.order, program));
                self.started += 1;
            }
            if self.running.is_empty() {
                return Ok(());
            }
            let mut candidates: Vec<usize> = self.running.keys().copied().collect();
            match interleaving {
                Interleaving::PredecessorFirst => {}
                Interleaving::SuccessorFirst => candidates.reverse(),
                Interleaving::Alternate => {
                    let after = candidates.iter().filter(|number| **number <= self.last).count();
                    let by = after % candidates.len();
                    candidates.rotate_left(by);
                }
            }
            self.advance(&candidates)?;
        }
    }

    fn next_may_start(&self) -> bool {
        let before = self.started.checked_sub(1).map_or(0, |before| self.launches[before].blocks());
        self.launches[self.started].link.may_start(before)
    }

    /// Lets the first launch that can go on do so.
    fn advance(&mut self, candidates: &[usize]) -> Result<(), LaunchError> {
        for &number in candidates {
            let resident: usize = self.running.values().map(Grid::resident).sum();
            let oldest = self.running.keys().next() == Some(&number);
            let Some(grid) = self.running.get_mut(&number) else { continue };
            let room = RESIDENT_THREADS.saturating_sub(resident);
            // What cannot start a single cluster waits for the others to end, unless it is they who wait for it.
            if !oldest && grid.resident() == 0 && room == 0 {
                continue;
            }
            match grid.turn(room) {
                Ok(Turn::Blocked) => continue,
                Ok(Turn::Progress) => {}
                Ok(Turn::Done) => {
                    self.running.remove(&number);
                    let launch = &self.launches[number];
                    check_outputs(launch, self.options);
                    launch.link.own.complete.set(true);
                }
                Err(_) => {}
            }
            self.last = number;
            return self.launches[number].fault.take().map_or(Ok(()), |fault| Err(Box::new(fault).into()));
        }
        let Some((&number, grid)) = self.running.iter().next() else { return Ok(()) };
        grid.report_deadlock();
        self.launches[number].fault.take().map_or(Ok(()), |fault| Err(Box::new(fault).into()))
    }
}
