//! Where a launch stands in its stream: what of the launches before it is complete, and known to be, at which point.
//!
//! The rule of programmatic dependent launch (PDL), as far as memory is concerned. A dependent launch starts once every
//! block of its predecessor has called `grid_launch_dependents()` or has ended. Nothing that the predecessor wrote is
//! visible before `grid_dependency_wait()` returns, which is when the predecessor is complete. It says nothing of the
//! launches further back: those are complete because the predecessor waited for them, if one of its threads did. A
//! predecessor that lets its successor start before it has waited itself is still waiting when the successor starts, so
//! more than two launches can be under way.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A set of launches, by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launches(Vec<bool>);

impl Launches {
    pub fn contains(&self, number: u32) -> bool {
        self.0.get(number as usize).copied().unwrap_or(false)
    }

    fn with(&self, number: u32) -> Self {
        let mut all = self.clone();
        all.0.resize(all.0.len().max(number as usize + 1), false);
        all.0[number as usize] = true;
        all
    }
}

/// How far a launch is, as its successor sees it.
#[derive(Default)]
pub(crate) struct Progress {
    pub complete: Cell<bool>,
    /// Blocks that let the successor start, or have ended.
    pub released: Cell<u32>,
    /// One of them did so before it had waited for the launch's own predecessor.
    released_early: Cell<bool>,
    /// Some thread has waited for the launch's predecessor, so that the launch cannot end before it.
    waited: Cell<bool>,
    /// Launches that are complete and visible from the start.
    at_start: RefCell<Launches>,
    /// The same after the wait.
    after_wait: RefCell<Launches>,
}

/// A launch's place in the stream.
pub(crate) struct Link {
    /// Counted from the start of the chain.
    pub number: u32,
    /// The launch may start before its predecessor is complete.
    pub dependent: bool,
    /// A thread that lets the successor start gives up its turn there.
    pub pauses: bool,
    pub own: Rc<Progress>,
    pub before: Option<Rc<Progress>>,
}

impl Link {
    /// A launch that nothing runs beside.
    pub fn alone() -> Self {
        Self { number: 0, dependent: false, pauses: false, own: Rc::default(), before: None }
    }

    /// The launch after `before`.
    pub fn after(before: &Link, dependent: bool, pauses: bool) -> Self {
        let number = before.number + 1;
        Self { number, dependent, pauses, own: Rc::default(), before: Some(Rc::clone(&before.own)) }
    }

    /// The launch may start now. `blocks`: of its predecessor.
    pub fn may_start(&self, blocks: u32) -> bool {
        self.before
            .as_ref()
            .is_none_or(|before| before.complete.get() || self.dependent && before.released.get() == blocks)
    }

    pub fn predecessor_is_complete(&self) -> bool {
        self.before.as_ref().is_none_or(|before| before.complete.get())
    }

    /// Notes what is complete as the launch starts.
    pub fn starts(&self) {
        let Some(before) = &self.before else { return };
        let known = if !self.dependent {
            self.all_of(before)
        } else if before.released_early.get() {
            before.at_start.borrow().clone()
        } else {
            before.after_wait.borrow().clone()
        };
        *self.own.after_wait.borrow_mut() = known.clone();
        *self.own.at_start.borrow_mut() = known;
    }

    /// A thread has waited for the predecessor, which is complete.
    pub fn has_waited(&self) {
        let Some(before) = &self.before else { return };
        if !self.own.waited.replace(true) {
            *self.own.after_wait.borrow_mut() = self.all_of(before);
        }
    }

    /// The predecessor, and what is complete because it is.
    fn all_of(&self, before: &Progress) -> Launches {
        let earlier = if before.waited.get() { &before.after_wait } else { &before.at_start };
        earlier.borrow().with(self.number - 1)
    }

    /// A block lets the successor start, or ends. `waited`: its thread has waited for the predecessor.
    pub fn releases(&self, waited: bool) {
        self.own.released.set(self.own.released.get() + 1);
        if self.dependent && !waited {
            self.own.released_early.set(true);
        }
    }

    /// Whether all of launch `number` happened before what a thread does now.
    pub fn knows(&self, number: u32, waited: bool) -> bool {
        let known = if waited { &self.own.after_wait } else { &self.own.at_start };
        known.borrow().contains(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three launches, of one block each; `second` says how the middle one behaves before it ends.
    fn third(second: impl FnOnce(&Link)) -> Link {
        let first = Link::alone();
        let middle = Link::after(&first, true, false);
        let last = Link::after(&middle, true, false);
        first.releases(true);
        middle.starts();
        first.own.complete.set(true);
        second(&middle);
        last.starts();
        middle.own.complete.set(true);
        last.has_waited();
        last
    }

    #[test]
    fn waiting_reaches_the_predecessors_predecessor_through_the_predecessors_own_wait() {
        let waits = |link: &Link| {
            link.has_waited();
            link.releases(true);
        };
        let last = third(waits);
        assert!(last.knows(1, true) && last.knows(0, true));
        // It started after the second launch had waited, so the first was complete before it started.
        assert!(!last.knows(1, false) && last.knows(0, false));
    }

    #[test]
    fn an_early_release_says_nothing_of_launches_before_it() {
        let early = |link: &Link| {
            link.releases(false);
            link.has_waited();
        };
        let last = third(early);
        assert!(last.knows(1, true) && last.knows(0, true));
        assert!(!last.knows(1, false) && !last.knows(0, false));
    }

    #[test]
    fn a_predecessor_that_never_waits_hides_its_own_predecessor() {
        let last = third(|link| link.releases(false));
        assert!(last.knows(1, true) && !last.knows(0, true));
    }

    #[test]
    fn a_dependent_launch_starts_when_all_blocks_are_released() {
        let first = Link::alone();
        let (beside, behind) = (Link::after(&first, true, false), Link::after(&first, false, false));
        first.releases(true);
        assert!(!beside.may_start(2) && beside.may_start(1) && !behind.may_start(1));
        first.own.complete.set(true);
        assert!(behind.may_start(1) && beside.predecessor_is_complete());
    }
}
