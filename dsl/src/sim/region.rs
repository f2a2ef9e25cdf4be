//! What a launch sees of memory: one region for each argument and each shared array, as plain data.

use super::history::History;
use super::shadow::Shadow;
use crate::definition::Access;
use crate::elements::ElementType;
use std::cell::RefCell;
use std::rc::Rc;

#[derive(Clone, Copy)]
#[repr(C, align(256))]
pub(crate) struct Chunk(pub [u8; 256]);

/// One argument's memory during a launch.
pub(crate) struct Region {
    pub name: String,
    pub access: Access,
    pub element: ElementType,
    /// Elements are 8 bytes, and read as 16 (`thin.rs`).
    pub thin: bool,
    pub base: *mut u8,
    pub bytes: usize,
    /// More than the bound must be checked.
    pub checked: bool,
    /// May be touched only after the dependency wait.
    pub after_wait: bool,
    /// But may be read before.
    pub early: bool,
    /// May not be written, whatever its role.
    pub only_read: bool,
    pub shadow: Option<Rc<RefCell<Shadow>>>,
    /// Who touched it in a chain of launches.
    pub history: Option<Rc<RefCell<History>>>,
    /// Where the region starts in the shadow and the history, which cover a whole allocation.
    pub shadow_start: usize,
}

/// The shared arrays of a cluster's blocks, with their bytes: whatever was left there, as on the GPU.
pub(crate) struct SharedMemory {
    /// The arrays of each block.
    pub arrays: Vec<Vec<Region>>,
    /// What they point to.
    _bytes: Vec<Vec<Chunk>>,
}

impl SharedMemory {
    /// The arrays that `array` describes, given the bytes of each, for `blocks` blocks.
    pub fn new(blocks: u32, sizes: &[usize], array: impl Fn(usize, *mut u8) -> Region) -> Self {
        let mut bytes = Vec::new();
        let mut of_block = || {
            let regions = sizes.iter().enumerate().map(|(number, size)| {
                let mut chunks = vec![Chunk([0xff; 256]); size.div_ceil(256)];
                let base = chunks.as_mut_ptr().cast();
                bytes.push(chunks);
                array(number, base)
            });
            regions.collect::<Vec<_>>()
        };
        let arrays = (0..blocks).map(|_| of_block()).collect();
        Self { arrays, _bytes: bytes }
    }
}
