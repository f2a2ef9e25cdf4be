//! What a thread knows of others through counters: which of their accesses happened before its own.
//!
//! A release publishes what its thread knows, an acquire of the same counter takes it over. Barriers pass it on to the
//! threads that meet there. Without either, blocks of a launch know nothing of each other.

use std::collections::BTreeMap;

/// Accesses before these times are ordered, for single threads, warps and blocks of the grid.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Known {
    threads: BTreeMap<u32, u32>,
    warps: BTreeMap<u32, u32>,
    blocks: BTreeMap<u32, u32>,
}

fn raise(times: &mut BTreeMap<u32, u32>, of: u32, time: u32) {
    let entry = times.entry(of).or_insert(0);
    *entry = time.max(*entry);
}

impl Known {
    pub fn thread(&mut self, number: u32, time: u32) {
        raise(&mut self.threads, number, time);
    }

    pub fn warp(&mut self, number: u32, time: u32) {
        raise(&mut self.warps, number, time);
    }

    pub fn block(&mut self, number: u32, time: u32) {
        raise(&mut self.blocks, number, time);
    }

    /// Takes over what another knows.
    pub fn join(&mut self, other: &Known) {
        other.threads.iter().for_each(|(of, time)| self.thread(*of, *time));
        other.warps.iter().for_each(|(of, time)| self.warp(*of, *time));
        other.blocks.iter().for_each(|(of, time)| self.block(*of, *time));
    }

    /// An access by this thread at this time is ordered.
    pub fn covers(&self, thread: u32, threads_per_block: u32, time: u32) -> bool {
        let before = |known: Option<&u32>| known.is_some_and(|known| time < *known);
        before(self.threads.get(&thread))
            || before(self.warps.get(&(thread / 32)))
            || before(self.blocks.get(&(thread / threads_per_block)))
    }
}
