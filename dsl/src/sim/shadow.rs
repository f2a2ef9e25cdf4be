//! The shadow of a piece of memory: who touched each granule last, when, and at which line.
//!
//! Time is a counter of the launch that every barrier advances. A thread remembers when its last block barrier and its
//! last warp barrier were; an earlier access by another thread is ordered before the thread's own only if it is older
//! than the barrier that both passed. Two readers a granule are kept, from different warps where there are any, which
//! is enough to find the other side of a write.

use super::fault::{FaultKind, Line, spelled};
use super::known::Known;
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

/// Added to a block's number: the engine that copies for it, as a thread.
pub(crate) const ASYNCHRONOUS: u32 = 1 << 31;

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Read,
    Write,
    /// An update, or a relaxed write.
    Atomic,
    /// Of what others may update meanwhile.
    RelaxedRead,
}

impl Touch {
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Atomic)
    }

    fn relaxed(self) -> bool {
        matches!(self, Self::Atomic | Self::RelaxedRead)
    }

    pub fn verb(self) -> &'static str {
        match self {
            Self::Read | Self::RelaxedRead => "reads",
            Self::Write => "writes",
            Self::Atomic => "updates",
        }
    }
}

/// The thread that makes an access, and its place in time.
pub(crate) struct Accessor {
    /// Number of the thread in the grid.
    pub thread: u32,
    pub now: u32,
    /// Blocks of a cluster, and of the grid: clusters are blocks that follow each other along y.
    pub cluster: u32,
    pub grid: [u32; 3],
    pub last_cluster_barrier: u32,
    pub last_block_barrier: u32,
    pub last_warp_barrier: u32,
    /// The block was the last to arrive (`last_block_of`): everything the other blocks did before is ordered.
    pub after_all_blocks: bool,
    /// What the thread knows through counters.
    pub known: Option<Rc<Known>>,
    pub threads_per_block: u32,
    pub line: Line,
}

#[derive(Clone, Copy, Default)]
struct Mark {
    /// Number of the thread in the grid, plus one; zero for nobody.
    thread: u32,
    time: u32,
    line: Line,
}

#[derive(Clone, Copy, Default)]
struct Granule {
    write: Mark,
    atomic: bool,
    /// Latest write that was no update: updates by others do not make up for an order that is missing.
    plain_write: Mark,
    reads: [Mark; 2],
    /// First reader of the launch: another block's read is never ordered before a write of ours.
    first_read: Mark,
    /// Latest relaxed read, which races with plain writes alone.
    relaxed_read: Mark,
}

/// The shadow of one allocation or shared array.
pub(crate) struct Shadow {
    granules: Vec<Granule>,
    bytes_per_granule: usize,
    /// Marks older than this are void: shared memory starts anew with each block.
    floor: u32,
    shared: bool,
    /// Bytes that an asynchronous copy will write.
    incoming: Vec<(Range<usize>, Line)>,
}

/// The line of the copy whose bytes overlap these.
fn overlapping(copies: &[(Range<usize>, Line)], at: usize, bytes: usize) -> Option<Line> {
    copies.iter().find(|(range, _)| range.start < at + bytes && at < range.end).map(|(_, line)| *line)
}

impl Shadow {
    pub fn new(bytes: usize, bytes_per_granule: usize, shared: bool) -> Self {
        Self {
            granules: vec![Granule::default(); bytes.div_ceil(bytes_per_granule)],
            bytes_per_granule,
            floor: 0,
            shared,
            incoming: Vec::new(),
        }
    }

    /// Forgets everything before `now`: a new block.
    pub fn restart(&mut self, now: u32) {
        self.floor = now;
        self.incoming.clear();
    }

    /// An asynchronous copy to these bytes has started.
    pub fn depart(&mut self, at: usize, bytes: usize, line: Line) {
        self.incoming.push((at..at + bytes, line));
    }

    /// It has ended: `engine` has written them.
    pub fn arrive(&mut self, at: usize, bytes: usize, engine: u32, now: u32, line: Line) {
        self.incoming.retain(|(range, _)| *range != (at..at + bytes));
        let range = at / self.bytes_per_granule..(at + bytes).div_ceil(self.bytes_per_granule);
        for granule in &mut self.granules[range] {
            granule.write = Mark { thread: engine + 1, time: now, line };
            (granule.plain_write, granule.atomic) = (granule.write, false);
        }
    }

    /// Checks an access and notes it.
    pub fn touch(&mut self, at: usize, bytes: usize, touch: Touch, who: &Accessor) -> Result<(), (FaultKind, String)> {
        let (floor, shared) = (self.floor, self.shared);
        if let Some(line) = overlapping(&self.incoming, at, bytes) {
            let why =
                format!("a bulk copy of {} is on its way there, and its mbarrier's phase has not ended", spelled(line));
            return Err((FaultKind::UnfinishedCopy, why));
        }
        let live = |mark: Mark| mark.thread != 0 && mark.time >= floor;
        let range = at / self.bytes_per_granule..(at + bytes).div_ceil(self.bytes_per_granule);
        for granule in &mut self.granules[range] {
            let unordered = |mark: Mark| live(mark) && !who.is_after(mark);
            if shared && !touch.writes() && !live(granule.write) {
                return Err((FaultKind::UninitialisedShared, "reads shared memory that nobody has written".into()));
            }
            if unordered(granule.write) && !(touch.relaxed() && granule.atomic) {
                return Err(who.race(granule.write, "written"));
            }
            if unordered(granule.plain_write) {
                return Err(who.race(granule.plain_write, "written"));
            }
            if touch == Touch::Read {
                granule.note_read(who, floor);
            } else if touch == Touch::RelaxedRead {
                granule.relaxed_read = who.mark();
            } else {
                if touch == Touch::Write && unordered(granule.relaxed_read) {
                    return Err(who.race(granule.relaxed_read, "read"));
                }
                for read in granule.reads.into_iter().chain([granule.first_read]) {
                    if unordered(read) {
                        return Err(who.race(read, "read"));
                    }
                }
                granule.write = who.mark();
                granule.atomic = touch == Touch::Atomic;
                if !granule.atomic {
                    granule.plain_write = granule.write;
                }
            }
        }
        Ok(())
    }

    /// A thread of the block, with the line of its write to `at..at + bytes`, that has not fenced it since. `fences`:
    /// when each thread of the block last did.
    pub fn unfenced(&self, at: usize, bytes: usize, fences: &[Cell<u32>]) -> Option<(u32, Line)> {
        let range = at / self.bytes_per_granule..(at + bytes).div_ceil(self.bytes_per_granule);
        let writer = |mark: Mark| (mark.thread - 1) % fences.len() as u32;
        let by_thread =
            |mark: &Mark| mark.thread != 0 && mark.time >= self.floor && (mark.thread - 1) & ASYNCHRONOUS == 0;
        let unfenced = |mark: &Mark| by_thread(mark) && mark.time >= fences[writer(*mark) as usize].get();
        let mark = self.granules[range].iter().map(|granule| granule.write).find(unfenced)?;
        Some((writer(mark), mark.line))
    }

    /// The first byte of `at..at + bytes` that nobody wrote.
    pub fn first_unwritten(&self, at: usize, bytes: usize) -> Option<usize> {
        let range = at / self.bytes_per_granule..(at + bytes).div_ceil(self.bytes_per_granule);
        range.clone().find(|&index| self.granules[index].write.thread == 0).map(|index| index * self.bytes_per_granule)
    }
}

impl Granule {
    fn note_read(&mut self, who: &Accessor, floor: u32) {
        let mark = who.mark();
        if self.first_read.thread == 0 || self.first_read.time < floor {
            self.first_read = mark;
        }
        let [first, second] = self.reads;
        let stale = |old: Mark| match old {
            _ if old.thread == 0 || old.time < floor => true,
            _ if who.same_block(old) => old.time < who.last_block_barrier,
            _ => !who.same_cluster(old) || old.time < who.last_cluster_barrier,
        };
        if stale(first) || first.thread == mark.thread {
            self.reads[0] = mark;
        } else if stale(second) || second.thread == mark.thread || who.warp_of(second) == who.warp_of(first) {
            self.reads[1] = mark;
        }
    }
}

impl Accessor {
    fn mark(&self) -> Mark {
        Mark { thread: self.thread + 1, time: self.now, line: self.line }
    }

    fn same_block(&self, mark: Mark) -> bool {
        (mark.thread - 1) / self.threads_per_block == self.thread / self.threads_per_block
    }

    fn same_cluster(&self, mark: Mark) -> bool {
        let cluster = |thread: u32| {
            let block = thread / self.threads_per_block;
            let row = block / self.grid[0];
            // A grid is cut into whole clusters along y, so rows of all layers can be counted through.
            (block % self.grid[0], row / self.cluster)
        };
        self.cluster > 1 && cluster(mark.thread - 1) == cluster(self.thread)
    }

    fn warp_of(&self, mark: Mark) -> u32 {
        (mark.thread - 1) / 32
    }

    /// The access behind `mark` happened before this thread's next one.
    fn is_after(&self, mark: Mark) -> bool {
        if mark.thread == self.thread + 1 {
            return true;
        }
        let known = |known: &Rc<Known>| known.covers(mark.thread - 1, self.threads_per_block, mark.time);
        if self.known.as_ref().is_some_and(known) {
            return true;
        }
        if (mark.thread - 1) & ASYNCHRONOUS != 0 {
            return false;
        }
        if !self.same_block(mark) {
            return self.after_all_blocks || (self.same_cluster(mark) && mark.time < self.last_cluster_barrier);
        }
        let barrier = if self.warp_of(mark) == self.thread / 32 {
            self.last_warp_barrier.max(self.last_block_barrier)
        } else {
            self.last_block_barrier
        };
        mark.time < barrier
    }

    fn race(&self, other: Mark, did: &str) -> (FaultKind, String) {
        let thread = other.thread - 1;
        let (block, thread) = (thread / self.threads_per_block, thread % self.threads_per_block);
        let line = spelled(other.line);
        if (other.thread - 1) & ASYNCHRONOUS != 0 {
            let why = format!("{did} by a bulk copy of {line}, for whose mbarrier this thread has not waited");
            return (FaultKind::Race, why);
        }
        if self.same_block(other) {
            (FaultKind::Race, format!("{did} by thread {thread} at {line}, with no barrier between"))
        } else {
            let between = match self.same_cluster(other) {
                true => "with no cluster_barrier between",
                false => "and nothing orders the two blocks: no counter was released and acquired",
            };
            let why = format!("{did} by thread {thread} of block {block} at {line}, {between}");
            (FaultKind::RaceBetweenBlocks, why)
        }
    }
}
