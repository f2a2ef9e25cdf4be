//! The grid of one launch: which of its clusters run.
//!
//! Most kernels' blocks know nothing of each other, and run one after the other. A cluster starts beside others when
//! all of those wait: for another block's counter, or for the launch's predecessor. As many run side by side as
//! [`RESIDENT_THREADS`] allow.

use super::cluster::{Cluster, Faulted, Program, Turn};
use super::order::Order;
use super::thread::Launch;
use std::collections::VecDeque;

/// Threads that run side by side, beyond which no cluster starts. Each has a stack of its own, and a process may have
/// some 30,000 of those.
pub(crate) const RESIDENT_THREADS: usize = 8192;

/// A launch that runs.
pub(crate) struct Grid<'a> {
    launch: &'a Launch<'a>,
    program: Program<'a>,
    order: Order,
    /// Numbers of the clusters that have not started.
    pending: VecDeque<usize>,
    live: VecDeque<Cluster<'a>>,
}

impl<'a> Grid<'a> {
    pub fn new(launch: &'a Launch<'a>, order: &Order, program: Program<'a>) -> Self {
        let mut order = order.clone();
        let mut clusters: Vec<usize> = (0..(launch.blocks() / launch.cluster) as usize).collect();
        order.arrange(&mut clusters);
        Self { launch, program, order, pending: clusters.into(), live: VecDeque::new() }
    }

    /// Threads that have started and not all returned.
    pub fn resident(&self) -> usize {
        self.live.len() * self.threads_per_cluster()
    }

    fn threads_per_cluster(&self) -> usize {
        (self.launch.cluster * self.launch.threads) as usize
    }

    fn can_start(&self, room: usize) -> bool {
        let has_room = room >= self.threads_per_cluster();
        // The host's text has its shared memory once.
        let separate = !self.launch.host || self.live.is_empty() || self.launch.instance.def.shared.is_empty();
        !self.pending.is_empty() && has_room && separate
    }

    /// Lets one cluster go on, or starts one. `room`: threads that may start.
    pub fn turn(&mut self, room: usize) -> Result<Turn, Faulted> {
        let room = if self.live.is_empty() { room.max(self.threads_per_cluster()) } else { room };
        // The successor starts as early as it may: a cluster that has released it waits for the others to do so.
        let pauses = self.launch.link.pauses;
        if self.any_turn(|cluster| !pauses || !cluster.is_released())? {
            return Ok(Turn::Progress);
        }
        if self.can_start(room) {
            let number = self.pending.pop_front().unwrap_or_default();
            self.live.push_back(Cluster::start(self.launch, self.first_block(number as u32), self.program));
            return Ok(Turn::Progress);
        }
        match pauses && self.any_turn(Cluster::is_released)? {
            true => Ok(Turn::Progress),
            false if self.pending.is_empty() && self.live.is_empty() => Ok(Turn::Done),
            false => Ok(Turn::Blocked),
        }
    }

    /// Lets the first of these clusters that can go on do so.
    ///
    /// Where blocks exchange values their clusters take turns. In a chain all of a launch's clusters wait side by side,
    /// and one goes on as long as it can before the next does: if they took turns, every thread's stack would have left
    /// the CPU's caches when it is needed.
    fn any_turn(&mut self, among: impl Fn(&Cluster<'a>) -> bool) -> Result<bool, Faulted> {
        for _ in 0..self.live.len() {
            let Some(mut cluster) = self.live.pop_front() else { break };
            let turn = if among(&cluster) { cluster.turn(&mut self.order)? } else { Turn::Blocked };
            match turn {
                Turn::Done => return Ok(true),
                Turn::Progress if self.launch.link.pauses && !cluster.lets_others_go() => self.live.push_front(cluster),
                Turn::Progress | Turn::Blocked => self.live.push_back(cluster),
            }
            if turn == Turn::Progress {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The first block of a cluster: its blocks follow each other along y.
    fn first_block(&self, number: u32) -> [u32; 3] {
        let [gx, gy, _] = self.launch.grid;
        let high = gy / self.launch.cluster;
        [number % gx, number / gx % high * self.launch.cluster, number / gx / high]
    }

    /// Reports that nothing can go on.
    pub fn report_deadlock(&self) {
        let rest = match self.pending.len() {
            0 => String::new(),
            _ if self.launch.host => {
                ": the host's text has its shared memory once, so its blocks run one after the other".into()
            }
            left => {
                format!(": {left} blocks have yet to start, and {RESIDENT_THREADS} threads run side by side at most")
            }
        };
        if let Some(cluster) = self.live.front() {
            cluster.report_deadlock(&rest);
        }
    }
}
