//! Who has which slot and which page.
//!
//! A page may have several owners: sequences that share a prefix, and the prefixes that are kept. It is free when the
//! last lets go. Nothing is allocated here: these are numbers of places that the device has reserved. Pages of sliding
//! and of full layers are the same pages; what one holds is known by who owns it.

use super::device::Limits;

/// The pages of a sequence: of sliding layers, over and over, and of full ones, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    pub sliding: Vec<u32>,
    pub full: Vec<u32>,
}

impl Pages {
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.sliding.iter().chain(&self.full).copied()
    }
}

/// Free places, and the owners of pages.
#[derive(Debug)]
pub(super) struct Pool {
    owners: Vec<u32>,
    free_pages: Vec<u32>,
    free_slots: Vec<u32>,
    slots: u32,
}

impl Pool {
    pub fn new(limits: &Limits) -> Pool {
        Pool {
            owners: vec![0; limits.pages as usize],
            // Taken from the end: low numbers first.
            free_pages: (0..limits.pages).rev().collect(),
            free_slots: (0..limits.slots).rev().collect(),
            slots: limits.slots,
        }
    }

    pub fn free_pages(&self) -> usize {
        self.free_pages.len()
    }

    pub fn pages(&self) -> usize {
        self.owners.len()
    }

    pub fn free_slots(&self) -> usize {
        self.free_slots.len()
    }

    pub fn take_page(&mut self) -> Option<u32> {
        let page = self.free_pages.pop()?;
        self.owners[page as usize] = 1;
        Some(page)
    }

    /// Pages that there is room for.
    pub fn take_pages(&mut self, count: usize) -> impl Iterator<Item = u32> {
        (0..count).map(|_| self.take_page().expect("there is room"))
    }

    /// One more owner for a page that has some.
    pub fn share(&mut self, page: u32) {
        assert!(self.owners[page as usize] > 0, "page {page} is free");
        self.owners[page as usize] += 1;
    }

    pub fn release(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        assert!(*owners > 0, "page {page} is free already");
        *owners -= 1;
        if *owners == 0 {
            self.free_pages.push(page);
        }
    }

    pub fn owners(&self, page: u32) -> u32 {
        self.owners[page as usize]
    }

    pub fn take_slot(&mut self) -> Option<u32> {
        self.free_slots.pop()
    }

    pub fn release_slot(&mut self, slot: u32) {
        assert!(slot < self.slots && !self.free_slots.contains(&slot), "slot {slot} is free already");
        self.free_slots.push(slot);
    }

    /// Whether these are the owners of everything that is not free: pages as often as they are owned, and slots.
    pub fn audit(&self, pages: &[u32], slots: &[u32], limits: &Limits) -> Result<(), String> {
        let mut owners = vec![0u32; self.owners.len()];
        pages.iter().for_each(|page| owners[*page as usize] += 1);
        if let Some(page) = (0..owners.len()).find(|page| owners[*page] != self.owners[*page]) {
            return Err(format!("page {page} has {} owners, counted {}", owners[page], self.owners[page]));
        }
        let mut free = self.free_pages.clone();
        free.sort_unstable();
        let unowned = (0..).zip(&owners).filter(|(_, owners)| **owners == 0).map(|(page, _)| page);
        if !free.iter().copied().eq(unowned) {
            return Err(format!("pages without an owner and free ones differ: {free:?}"));
        }
        let mut all = [slots, &self.free_slots].concat();
        all.sort_unstable();
        match all.iter().copied().eq(0..limits.slots) {
            true => Ok(()),
            false => Err(format!("slots: owned {slots:?}, free {:?}", self.free_slots)),
        }
    }
}
