//! Who has which ring and which block.
//!
//! A block may have several owners: sequences that share a prefix, and the prefixes that are kept. It is free when the
//! last lets go. Rings have one owner each. Nothing is allocated here: these are numbers of places that the device has
//! reserved.

use super::device::Limits;

/// Free places, and the owners of blocks.
#[derive(Debug)]
pub(super) struct Pool {
    owners: Vec<u32>,
    free_blocks: Vec<u32>,
    free_slots: Vec<u32>,
    /// Rings beyond the slots.
    free_rings: Vec<u32>,
    slots: u32,
}

impl Pool {
    pub fn new(limits: &Limits) -> Pool {
        Pool {
            owners: vec![0; limits.blocks as usize],
            // Taken from the end: low numbers first.
            free_blocks: (0..limits.blocks).rev().collect(),
            free_slots: (0..limits.slots).rev().collect(),
            free_rings: (limits.slots..limits.rings.max(limits.slots)).rev().collect(),
            slots: limits.slots,
        }
    }

    pub fn free_blocks(&self) -> usize {
        self.free_blocks.len()
    }

    pub fn blocks(&self) -> usize {
        self.owners.len()
    }

    pub fn free_slots(&self) -> usize {
        self.free_slots.len()
    }

    pub fn take_block(&mut self) -> Option<u32> {
        let block = self.free_blocks.pop()?;
        self.owners[block as usize] = 1;
        Some(block)
    }

    /// One more owner for a block that has some.
    pub fn share(&mut self, block: u32) {
        assert!(self.owners[block as usize] > 0, "block {block} is free");
        self.owners[block as usize] += 1;
    }

    pub fn release(&mut self, block: u32) {
        let owners = &mut self.owners[block as usize];
        assert!(*owners > 0, "block {block} is free already");
        *owners -= 1;
        if *owners == 0 {
            self.free_blocks.push(block);
        }
    }

    pub fn owners(&self, block: u32) -> u32 {
        self.owners[block as usize]
    }

    pub fn take_slot(&mut self) -> Option<u32> {
        self.free_slots.pop()
    }

    pub fn release_slot(&mut self, slot: u32) {
        assert!(slot < self.slots && !self.free_slots.contains(&slot), "slot {slot} is free already");
        self.free_slots.push(slot);
    }

    pub fn take_ring(&mut self) -> Option<u32> {
        self.free_rings.pop()
    }

    pub fn release_ring(&mut self, ring: u32) {
        assert!(ring >= self.slots && !self.free_rings.contains(&ring), "ring {ring} is free already");
        self.free_rings.push(ring);
    }

    /// Whether these are the owners of everything that is not free: blocks as often as they are owned, and rings.
    pub fn audit(&self, blocks: &[u32], slots: &[u32], rings: &[u32], limits: &Limits) -> Result<(), String> {
        let mut owners = vec![0u32; self.owners.len()];
        blocks.iter().for_each(|block| owners[*block as usize] += 1);
        if let Some(block) = (0..owners.len()).find(|b| owners[*b] != self.owners[*b]) {
            return Err(format!("block {block} has {} owners, counted {}", owners[block], self.owners[block]));
        }
        let mut free = self.free_blocks.clone();
        free.sort_unstable();
        let unowned = (0..).zip(&owners).filter(|(_, owners)| **owners == 0).map(|(block, _)| block);
        if !free.iter().copied().eq(unowned) {
            return Err(format!("blocks without an owner and free ones differ: {free:?}"));
        }
        let all = |owned: &[u32], free: &[u32], range: std::ops::Range<u32>, what: &str| {
            let mut all = [owned, free].concat();
            all.sort_unstable();
            let whole = all.iter().copied().eq(range);
            if whole { Ok(()) } else { Err(format!("{what}: owned {owned:?}, free {free:?}")) }
        };
        all(slots, &self.free_slots, 0..limits.slots, "slots")?;
        all(rings, &self.free_rings, limits.slots..limits.rings.max(limits.slots), "rings of snapshots")
    }
}
