//! What a thread or a warpgroup has started and not waited for: copies and products, and the state of mbarriers.

use super::fault::Line;
use super::known::Known;
use super::region::Region;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// 4 or 16 bytes on their way from global to shared memory.
pub(crate) struct AsyncCopy {
    pub target: *const Region,
    pub at: usize,
    pub data: [u8; 16],
    pub len: usize,
    pub line: Line,
}

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: usize = 128;

/// What the threads of a warpgroup share: the operands of its latest products, which one of them has read for all.
#[derive(Default)]
pub(crate) struct Warpgroup {
    pub operands: RefCell<VecDeque<(u32, Rc<Operands>)>>,
    /// Left operands that lie in registers, by the product's number: four words a thread.
    pub held: RefCell<BTreeMap<u32, Vec<[u32; 4]>>>,
}

/// A product's operands as numbers, 16 to a line: 64 lines of the left one, a line for each column of the right one.
pub(crate) struct Operands {
    pub left: Vec<f32>,
    pub right: Vec<f32>,
}

/// A product of a warpgroup that was started.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    /// Counts the thread's products.
    pub number: u32,
    /// `None` where the threads hold it in registers.
    pub left: Option<Tile>,
    pub right: Tile,
}

/// Where an operand starts in shared memory: array and byte, before the swizzle.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub region: *const Region,
    pub at: usize,
    /// Columns are innermost, and 64 of them are so many bytes before the next. `None`: k is innermost.
    pub panel: Option<usize>,
    /// The number that an element's bits are.
    pub widen: fn(u16) -> f32,
}

/// The products of its warpgroup that a thread has started and not waited for.
#[derive(Default)]
pub(crate) struct Products {
    pub started: u32,
    /// The accumulator while products are on their way; the kernel's own registers hold NaN meanwhile.
    pub sums: Vec<f32>,
    /// The accumulator's registers are in order before the next product.
    pub fenced: bool,
    pub open: Vec<Product>,
    pub groups: VecDeque<Vec<Product>>,
    pub line: Line,
}

impl Products {
    pub fn is_idle(&self) -> bool {
        self.open.is_empty() && self.groups.iter().all(Vec::is_empty)
    }
}

/// A bulk copy from shared to global memory.
pub(crate) struct BulkStore {
    pub source: *const Region,
    pub from: usize,
    pub target: *const Region,
    pub to: usize,
    pub data: Vec<u8>,
    pub line: Line,
}

/// The bulk stores that a thread has not waited for.
#[derive(Default)]
pub(crate) struct BulkStores {
    pub open: Vec<BulkStore>,
    /// Groups that may still read their sources, the oldest first,
    reading: VecDeque<Vec<BulkStore>>,
    /// and those before them, which may still write their targets.
    writing: VecDeque<Vec<BulkStore>>,
}

impl BulkStores {
    pub fn commit(&mut self) {
        self.reading.push_back(std::mem::take(&mut self.open));
    }

    /// All groups but the latest `pending` have read their sources.
    #[allow(unsafe_code)]
    pub fn wait_read(&mut self, pending: usize) {
        while self.reading.len() > pending {
            let Some(group) = self.reading.pop_front() else { break };
            for copy in &group {
                // SAFETY: the array belongs to the running cluster.
                let source = unsafe { &*copy.source };
                if let Some(shadow) = &source.shadow {
                    shadow.borrow_mut().give_back(copy.from, copy.data.len());
                }
            }
            self.writing.push_back(group);
        }
    }

    /// All groups but the latest `pending` have written their targets.
    #[allow(unsafe_code)]
    pub fn wait(&mut self, pending: usize) {
        self.wait_read(pending);
        while self.reading.len() + self.writing.len() > pending {
            let Some(group) = self.writing.pop_front() else { break };
            for copy in group {
                // SAFETY: the region belongs to the launch; bounds were checked when the copy started.
                unsafe {
                    let target = (*copy.target).base.add(copy.to);
                    std::ptr::copy_nonoverlapping(copy.data.as_ptr(), target, copy.data.len());
                }
            }
        }
    }

    /// The line of a store whose source nobody waited for: shared memory ends with its block.
    pub fn unfinished(&self) -> Option<Line> {
        self.open.iter().chain(self.reading.iter().flatten()).map(|copy| copy.line).next()
    }
}

/// A copy on its way to shared memory.
pub(crate) struct Flight {
    pub target: *const Region,
    pub at: usize,
    pub data: Vec<u8>,
    pub line: Line,
}

/// An mbarrier's state.
pub(crate) struct Mbarrier {
    /// Arrivals of a phase.
    pub count: u32,
    /// Those still to come.
    pub pending: u32,
    /// Bytes that were announced and have not come; less than zero while they come first.
    pub bytes: i64,
    /// Phases that have ended.
    pub phase: u32,
    /// What the arrivals of this phase know.
    pub gathered: Known,
    /// What those of all phases before knew.
    pub published: Known,
    /// Phases that a thread has waited for, all before included.
    pub waited: BTreeMap<u32, u32>,
    pub flights: Vec<Flight>,
    /// Thread and time of the initialisation.
    pub made: (u32, u32),
}

impl Mbarrier {
    pub fn settle(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.count;
            self.phase += 1;
            self.published.join(&std::mem::take(&mut self.gathered));
        }
    }

    pub fn missing(&self) -> String {
        format!(
            "its phase {} to end: {} of {} arrivals and {} bytes are missing",
            self.phase, self.pending, self.count, self.bytes
        )
    }
}
