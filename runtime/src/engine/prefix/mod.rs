//! Prefixes of prompts that are kept, so that a prompt that begins alike is not read again.
//!
//! A prefix can be continued where two things are there: the full layers' rows of all its positions, and the windows of
//! the sliding layers as they were at its end. The first are whole pages, found by the hash of their keys (tokens, and
//! of media their hash) and of all before them, and shared with running sequences. The second is a snapshot, copies of
//! the window's pages, which the sequence goes on writing to, at a place that the request named; the part of the last
//! page of full layers belongs to it. A page is kept for as long as a snapshot needs it.
//!
//! Only rows that prefill wrote come here: a decoded row is rounded otherwise, and an answer must not depend on what
//! was cached.
//!
//! The least recently used goes first: to the second tier in host memory while that has room for it, else for good.

use std::collections::BTreeMap;
use std::sync::Arc;

use gemma4c_plan::cuda::Paging;
use xxhash_rust::xxh3::xxh3_128;

use super::device::{Device, Limits};
use super::pool::{Pages, Pool};
use super::seated::Adapted;
use crate::RuntimeError;

mod room;

/// Where a page that is kept is: on the device, or in a unit of the second tier.
#[derive(Clone, Copy, Debug)]
enum Place {
    Device(u32),
    Host(u32),
}

/// A whole page of tokens after a chain of whole pages.
#[derive(Debug)]
struct Node {
    keys: Vec<u64>,
    place: Place,
    /// Pages before it.
    depth: usize,
    /// Snapshots that need it.
    needed_by: u32,
    last_used: u64,
}

/// The state after a number of tokens.
#[derive(Debug)]
struct Snapshot {
    apart: Apart,
    /// The hashes of its whole pages, in order.
    chain: Vec<u128>,
    /// The hash that the rest of the tokens follows.
    parent: u128,
    /// Keys after the whole pages.
    rest: Vec<u64>,
    /// Its own pages: those of the window by their entries in the table, then that of the rest, if there is one.
    places: Vec<Place>,
    last_used: u64,
}

/// What keeps prompts apart that have the same tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Apart {
    pub salt: Arc<[u8]>,
    pub adapter: Option<Adapted>,
}

/// A prompt as it is looked up: a key for each position, the hashes of whole pages of them, each with all before it,
/// and what keeps it apart from others.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    keys: Arc<[u64]>,
    /// Of nothing, of the first page, of the first two …
    hashes: Vec<u128>,
    apart: Apart,
}

impl Chain {
    pub fn new(identity: u128, apart: Apart, keys: Vec<u64>, rows: u32) -> Chain {
        let mut bytes = identity.to_le_bytes().to_vec();
        bytes.extend_from_slice(&apart.salt);
        if let Some(Adapted { filling, strength }) = apart.adapter {
            bytes.extend(filling.to_le_bytes());
            bytes.extend(strength.to_le_bytes());
        }
        let mut hashes = vec![xxh3_128(&bytes)];
        for page in keys.chunks_exact(rows as usize) {
            bytes.clear();
            bytes.extend_from_slice(&hashes[hashes.len() - 1].to_le_bytes());
            bytes.extend(page.iter().flat_map(|key| key.to_le_bytes()));
            hashes.push(xxh3_128(&bytes));
        }
        Chain { keys: keys.into(), hashes, apart }
    }
}

/// A prompt that is being read.
#[derive(Clone, Copy)]
pub(super) struct Prompt<'a> {
    pub chain: &'a Chain,
    pub pages: &'a Pages,
}

/// A snapshot that a prompt can start from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hit {
    snapshot: u64,
    pub position: u32,
}

/// What is kept.
#[derive(Debug)]
pub(super) struct Prefixes {
    sliding: Paging,
    /// Positions of a page of full layers.
    rows: usize,
    nodes: BTreeMap<u128, Node>,
    snapshots: BTreeMap<u64, Snapshot>,
    /// Snapshots by the hash that their last tokens follow.
    after: BTreeMap<u128, Vec<u64>>,
    free_units: Vec<u32>,
    next: u64,
    clock: u64,
}

impl Prefixes {
    pub fn new(limits: &Limits) -> Prefixes {
        Prefixes {
            sliding: limits.sliding,
            rows: limits.full.rows as usize,
            nodes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            after: BTreeMap::new(),
            free_units: (0..limits.host_units).rev().collect(),
            next: 0,
            clock: 0,
        }
    }

    /// How many snapshots there are, wherever they are.
    pub fn len(&self) -> usize {
        self.snapshots.len()
    }

    /// The longest kept prefix that leaves at least one token of the prompt to compute.
    pub fn find(&self, chain: &Chain) -> Option<Hit> {
        for whole in (0..chain.hashes.len()).rev() {
            let Some(here) = self.after.get(&chain.hashes[whole]) else { continue };
            let keys = &chain.keys[whole * self.rows..];
            let fits = |id: &&u64| {
                let snapshot = &self.snapshots[id];
                let rest = &snapshot.rest;
                rest.len() < keys.len() && keys.starts_with(rest) && self.is_of(snapshot, chain)
            };
            if let Some(id) = here.iter().filter(fits).max_by_key(|id| self.snapshots[id].rest.len()) {
                let position = whole * self.rows + self.snapshots[id].rest.len();
                return Some(Hit { snapshot: *id, position: position as u32 });
            }
        }
        None
    }

    /// A hash alone is not believed.
    fn is_of(&self, snapshot: &Snapshot, chain: &Chain) -> bool {
        let pages = snapshot.chain.iter().zip(chain.keys.chunks_exact(self.rows));
        snapshot.apart == chain.apart && pages.into_iter().all(|(hash, keys)| self.nodes[hash].keys == keys)
    }

    /// Gives a sequence the pages it asks for, so many of sliding and of full layers, with the prefix on them. `None`
    /// where there is no room, and then nothing has changed but that less may be kept.
    pub fn start_from(
        &mut self,
        hit: Hit,
        [sliding, full]: [usize; 2],
        pool: &mut Pool,
        device: &mut dyn Device,
    ) -> Result<Option<Pages>, RuntimeError> {
        let chain = self.snapshots[&hit.snapshot].chain.clone();
        let resident: Vec<u32> = chain
            .iter()
            .filter_map(|hash| match self.nodes[hash].place {
                Place::Device(page) => Some(page),
                Place::Host(_) => None,
            })
            .collect();
        // From here on they have another owner and stay.
        resident.iter().for_each(|page| pool.share(*page));
        if !self.make_room(sliding + full - resident.len(), Some(hit.snapshot), pool, device)? {
            resident.iter().for_each(|page| pool.release(*page));
            return Ok(None);
        }
        self.clock += 1;
        let mut pages = Pages::default();
        for hash in &chain {
            let node = self.nodes.get_mut(hash).expect("a snapshot's pages are kept");
            node.last_used = self.clock;
            pages.full.push(match node.place {
                Place::Device(page) => page,
                Place::Host(unit) => {
                    let page = pool.take_page().expect("there is room");
                    device.load(unit, page)?;
                    self.free_units.push(unit);
                    node.place = Place::Device(page);
                    pool.share(page);
                    page
                }
            });
        }
        pages.full.extend(pool.take_pages(full - chain.len()));
        pages.sliding.extend(pool.take_pages(sliding));
        let snapshot = self.snapshots.get_mut(&hit.snapshot).expect("it was found");
        snapshot.last_used = self.clock;
        let window = self.sliding.pages_for(hit.position) as usize;
        let own = pages.sliding[..window].iter().chain(pages.full.get(chain.len()));
        for (place, page) in snapshot.places.iter().zip(own) {
            match place {
                Place::Device(kept) => device.copy(*kept, *page)?,
                Place::Host(unit) => device.load(*unit, *page)?,
            }
        }
        Ok(Some(pages))
    }

    /// Keeps the state of a sequence that has read `position` tokens of its prompt and no more. Does nothing where
    /// there is no room for a snapshot.
    pub fn keep(
        &mut self,
        position: u32,
        of: Prompt<'_>,
        pool: &mut Pool,
        device: &mut dyn Device,
    ) -> Result<(), RuntimeError> {
        let Prompt { chain, pages } = of;
        let whole = position as usize / self.rows;
        let rest = &chain.keys[whole * self.rows..position as usize];
        let parent = chain.hashes[whole];
        self.clock += 1;
        if let Some(id) = self.same(parent, rest, chain) {
            self.touch(id);
            return Ok(());
        }
        let window = &pages.sliding[..self.sliding.pages_for(position) as usize];
        let own: Vec<u32> = window.iter().chain(pages.full.get(whole).filter(|_| !rest.is_empty())).copied().collect();
        let Some(places) = self.places_for(own.len(), pool, device)? else { return Ok(()) };
        for (place, page) in places.iter().zip(own) {
            match place {
                Place::Device(kept) => device.copy(page, *kept)?,
                Place::Host(unit) => device.save(page, *unit)?,
            }
        }
        let wholes = chain.keys.chunks_exact(self.rows).zip(&pages.full);
        for (depth, (hash, (keys, page))) in chain.hashes[1..=whole].iter().zip(wholes).enumerate() {
            let node = self.nodes.entry(*hash).or_insert_with(|| {
                pool.share(*page);
                let keys = keys.to_vec();
                Node { keys, place: Place::Device(*page), depth, needed_by: 0, last_used: 0 }
            });
            node.needed_by += 1;
            node.last_used = self.clock;
        }
        let (id, chain_of_it) = (self.next, chain.hashes[1..=whole].to_vec());
        self.next += 1;
        self.after.entry(parent).or_default().push(id);
        let (apart, rest) = (chain.apart.clone(), rest.to_vec());
        let snapshot = Snapshot { apart, chain: chain_of_it, parent, rest, places, last_used: self.clock };
        self.snapshots.insert(id, snapshot);
        Ok(())
    }

    fn same(&self, parent: u128, rest: &[u64], chain: &Chain) -> Option<u64> {
        let here = self.after.get(&parent)?;
        let is_same = |id: &&u64| self.snapshots[id].rest == rest && self.is_of(&self.snapshots[id], chain);
        here.iter().find(is_same).copied()
    }

    /// Whoever names a place expects others to depart from it: a snapshot there counts as used, even by a prompt that
    /// starts from a later one. So the turns of a chat do not push out the system prompt that they have in common.
    pub fn use_named(&mut self, places: &[u32], chain: &Chain) {
        self.clock += 1;
        for &position in places {
            let whole = position as usize / self.rows;
            let rest = &chain.keys[whole * self.rows..position as usize];
            if let Some(id) = self.same(chain.hashes[whole], rest, chain) {
                self.touch(id);
            }
        }
    }

    fn touch(&mut self, id: u64) {
        let snapshot = self.snapshots.get_mut(&id).expect("it was found");
        snapshot.last_used = self.clock;
        for hash in &snapshot.chain {
            self.nodes.get_mut(hash).expect("a snapshot's pages are kept").last_used = self.clock;
        }
    }

    fn drop_snapshot(&mut self, id: u64, pool: &mut Pool) {
        let Some(snapshot) = self.snapshots.remove(&id) else { return };
        if let Some(here) = self.after.get_mut(&snapshot.parent) {
            here.retain(|other| *other != id);
            if here.is_empty() {
                self.after.remove(&snapshot.parent);
            }
        }
        snapshot.places.into_iter().for_each(|place| self.let_go(place, pool));
        for hash in snapshot.chain {
            let node = self.nodes.get_mut(&hash).expect("a snapshot's pages are kept");
            node.needed_by -= 1;
            if node.needed_by == 0
                && let Some(node) = self.nodes.remove(&hash)
            {
                self.let_go(node.place, pool);
            }
        }
    }

    fn let_go(&mut self, place: Place, pool: &mut Pool) {
        match place {
            Place::Device(page) => pool.release(page),
            Place::Host(unit) => self.free_units.push(unit),
        }
    }

    /// Forgets what is kept of prompts with a filling that is gone.
    pub fn forget_filling(&mut self, filling: u64, pool: &mut Pool) {
        let of = |snapshot: &Snapshot| snapshot.apart.adapter.is_some_and(|adapter| adapter.filling == filling);
        let gone: Vec<u64> = self.snapshots.iter().filter(|(_, it)| of(it)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.drop_snapshot(id, pool));
    }

    /// Forgets everything that is kept.
    pub fn clear(&mut self, pool: &mut Pool) {
        let all: Vec<u64> = self.snapshots.keys().copied().collect();
        all.into_iter().for_each(|id| self.drop_snapshot(id, pool));
    }

    /// Where everything is that is kept.
    fn places(&self) -> impl Iterator<Item = Place> {
        let nodes = self.nodes.values().map(|node| node.place);
        nodes.chain(self.snapshots.values().flat_map(|snapshot| snapshot.places.iter().copied()))
    }

    /// The pages of the device that it owns.
    pub fn owned(&self) -> Vec<u32> {
        let on_device = |place| match place {
            Place::Device(page) => Some(page),
            Place::Host(_) => None,
        };
        self.places().filter_map(on_device).collect()
    }

    /// Whether every unit of the second tier is free or used once, and every page is needed by somebody.
    pub fn audit(&self, limits: &Limits) -> Result<(), String> {
        let mut units = self.free_units.clone();
        units.extend(self.places().filter_map(|place| match place {
            Place::Host(unit) => Some(unit),
            Place::Device(_) => None,
        }));
        units.sort_unstable();
        if !units.iter().copied().eq(0..limits.host_units) {
            return Err(format!("units of the second tier: {units:?}"));
        }
        for (hash, node) in &self.nodes {
            let needed_by = self.snapshots.values().filter(|s| s.chain.contains(hash)).count();
            if needed_by != node.needed_by as usize || needed_by == 0 {
                return Err(format!("a kept page is needed by {needed_by} snapshots, counted {}", node.needed_by));
            }
        }
        Ok(())
    }
}
