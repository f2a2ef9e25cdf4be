//! The grid of one launch: which of its clusters run.
//!
//! Most kernels' blocks know nothing of each other, and run one after the other. A cluster starts beside others when
//! all of those wait: for another block's words, or for the launch's predecessor. As many run side by side as
//! [`RESIDENT_THREADS`] allow; one launch at a time may have more, whose blocks all wait for words of each other.

use super::cluster::{Cluster, Faulted, Program, Turn};
use super::order::Order;
use super::stacks::RESIDENT_THREADS;
use super::thread::Launch;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The same of the one launch that may have more.
const MOST_THREADS: usize = 24576;

/// Held by the grid that has more threads than others may.
static LARGEST: Mutex<()> = Mutex::new(());

/// A launch that runs.
pub(crate) struct Grid<'a> {
    launch: &'a Launch<'a>,
    program: Program<'a>,
    order: Order,
    /// Numbers of the clusters that have not started.
    pending: VecDeque<usize>,
    live: VecDeque<Cluster<'a>>,
    is_largest: Option<MutexGuard<'static, ()>>,
}

impl<'a> Grid<'a> {
    pub fn new(launch: &'a Launch<'a>, order: &Order, program: Program<'a>) -> Self {
        let mut order = order.clone();
        let mut clusters: Vec<usize> = (0..(launch.blocks() / launch.cluster) as usize).collect();
        order.arrange(&mut clusters);
        Self { launch, program, order, pending: clusters.into(), live: VecDeque::new(), is_largest: None }
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

    fn start_next(&mut self) {
        let number = self.pending.pop_front().unwrap_or_default();
        self.live.push_back(Cluster::start(self.launch, self.first_block(number as u32), self.program));
    }

    /// Whether one more cluster may start because those that run wait for words that it may send.
    fn can_start_beyond(&mut self) -> bool {
        let waits = !self.live.is_empty() && !self.live.iter().any(Cluster::awaits_predecessor);
        let starts = waits && self.can_start(MOST_THREADS.saturating_sub(self.resident()));
        if starts && self.is_largest.is_none() {
            self.is_largest = Some(LARGEST.lock().unwrap_or_else(PoisonError::into_inner));
        }
        starts
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
            self.start_next();
            return Ok(Turn::Progress);
        }
        match pauses && self.any_turn(Cluster::is_released)? {
            true => Ok(Turn::Progress),
            false if self.can_start_beyond() => {
                self.start_next();
                Ok(Turn::Progress)
            }
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
