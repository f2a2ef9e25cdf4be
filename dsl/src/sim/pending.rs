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
