//! The shadow of an allocation over a chain of launches: which launch wrote and read each granule last, and where.
//!
//! Two accesses by different launches, one of them a write, must be ordered: everything of the earlier launch happened
//! before what the thread of the later one does ([`Link::knows`]). This holds or fails whatever the interleaving. When
//! the later launch comes first, the earlier one finds its mark. Order within a launch is the business of `shadow.rs`.

use super::fault::{Line, spelled};
use super::shadow::Touch;
use super::stream::Link;

/// The thread that makes an access.
pub(crate) struct Visitor<'a> {
    pub link: &'a Link,
    /// The launch's predecessor is known to be complete: the thread has waited, and the access may see what came
    /// meanwhile.
    pub waited: bool,
    /// Number of the thread in the grid.
    pub thread: u32,
    pub line: Line,
}

#[derive(Clone, Copy, Default)]
struct Mark {
    /// Plus one; zero for none.
    launch: u32,
    thread: u32,
    line: Line,
}

#[derive(Clone, Copy, Default)]
struct Granule {
    write: Mark,
    /// By the two latest launches that read it.
    reads: [Mark; 2],
}

/// The other side of an access that nothing orders.
pub(crate) struct Conflict {
    /// Byte of the allocation.
    pub at: usize,
    pub launch: u32,
    pub thread: u32,
    pub line: String,
    pub wrote: bool,
}

/// The history of one allocation.
pub(crate) struct History {
    granules: Vec<Granule>,
    bytes_per_granule: usize,
}

impl History {
    pub fn new(bytes: usize, bytes_per_granule: usize) -> Self {
        let granules = vec![Granule::default(); bytes.div_ceil(bytes_per_granule)];
        Self { granules, bytes_per_granule }
    }

    /// Checks an access and notes it.
    pub fn touch(&mut self, at: usize, bytes: usize, touch: Touch, who: &Visitor<'_>) -> Result<(), Conflict> {
        let range = at / self.bytes_per_granule..(at + bytes).div_ceil(self.bytes_per_granule);
        let own = who.link.number + 1;
        let mark = Mark { launch: own, thread: who.thread, line: who.line };
        // A later launch that came first cannot have been ordered after this one, which is still running.
        let unordered = |mark: Mark| {
            mark.launch != 0
                && mark.launch != own
                && (mark.launch > own || !who.link.knows(mark.launch - 1, who.waited))
        };
        for index in range {
            let granule = &mut self.granules[index];
            let conflict = |mark: Mark, wrote: bool| Conflict {
                at: index * self.bytes_per_granule,
                launch: mark.launch - 1,
                thread: mark.thread,
                line: spelled(mark.line),
                wrote,
            };
            if unordered(granule.write) {
                return Err(conflict(granule.write, true));
            }
            if !touch.writes() {
                let [latest, other] = granule.reads;
                if latest.launch < own {
                    granule.reads = [mark, latest];
                } else if (other.launch + 1..latest.launch).contains(&own) {
                    granule.reads = [latest, mark];
                }
                continue;
            }
            if let Some(read) = granule.reads.into_iter().find(|read| unordered(*read)) {
                return Err(conflict(read, false));
            }
            granule.write = mark;
        }
        Ok(())
    }
}
