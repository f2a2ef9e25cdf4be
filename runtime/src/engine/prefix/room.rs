//! Room for more: what is least recently used goes to the second tier, or for good.

use super::{Place, Prefixes};
use crate::RuntimeError;
use crate::engine::device::{Device, Part};
use crate::engine::pool::Pool;

impl Prefixes {
    /// Makes `count` blocks free by letting go of what nobody but a kept prefix has. Where that is not enough, nothing
    /// is let go.
    pub fn make_room(
        &mut self,
        count: usize,
        except: Option<u64>,
        pool: &mut Pool,
        device: &mut dyn Device,
    ) -> Result<bool, RuntimeError> {
        if pool.free_blocks() + self.idle_blocks(except, pool).count() < count {
            return Ok(false);
        }
        while pool.free_blocks() < count {
            // Of equally old ones the deepest: what is before it may serve others.
            let oldest = self.idle_blocks(except, pool).min_by_key(|idle| (idle.last_used, usize::MAX - idle.depth));
            let Some(Idle { last_used, what, block, .. }) = oldest else { return Ok(false) };
            match self.take_units(self.block_units, last_used, except, pool) {
                // Making room in the second tier may have dropped the block itself.
                Some(units) if self.is_there(what, block) => {
                    device.save(Part::Block(block), &units)?;
                    pool.release(block);
                    self.put(what, Place::Host(units));
                }
                Some(units) => self.free_units.extend(units),
                None => self.drop_what_needs(what, pool),
            }
        }
        Ok(true)
    }

    /// Blocks of the device that only a kept prefix has.
    fn idle_blocks<'a>(&'a self, except: Option<u64>, pool: &'a Pool) -> impl Iterator<Item = Idle> + 'a {
        let nodes = self.nodes.iter().filter_map(move |(hash, node)| match node.place {
            Place::Device(block) if pool.owners(block) == 1 => {
                Some(Idle { what: What::Node(*hash), block, depth: node.depth, last_used: node.last_used })
            }
            _ => None,
        });
        let others = self.snapshots.iter().filter(move |(id, _)| Some(**id) != except);
        let rests = others.filter_map(|(id, snapshot)| match snapshot.rest_at {
            Some(Place::Device(block)) => {
                let depth = snapshot.chain.len();
                Some(Idle { what: What::Rest(*id), block, depth, last_used: snapshot.last_used })
            }
            _ => None,
        });
        nodes.chain(rests)
    }

    fn is_there(&self, what: What, block: u32) -> bool {
        let place = match what {
            What::Node(hash) => self.nodes.get(&hash).map(|node| &node.place),
            What::Rest(id) => self.snapshots.get(&id).and_then(|snapshot| snapshot.rest_at.as_ref()),
        };
        matches!(place, Some(Place::Device(found)) if *found == block)
    }

    fn put(&mut self, what: What, place: Place) {
        match what {
            What::Node(hash) => self.nodes.get_mut(&hash).expect("it is there").place = place,
            What::Rest(id) => self.snapshots.get_mut(&id).expect("it is there").rest_at = Some(place),
        }
    }

    fn drop_what_needs(&mut self, what: What, pool: &mut Pool) {
        let doomed: Vec<u64> = match what {
            What::Rest(id) => vec![id],
            What::Node(hash) => {
                self.snapshots.iter().filter(|(_, s)| s.chain.contains(&hash)).map(|(id, _)| *id).collect()
            }
        };
        doomed.into_iter().for_each(|id| self.drop_snapshot(id, pool));
    }

    pub(super) fn place_for_ring(
        &mut self,
        pool: &mut Pool,
        device: &mut dyn Device,
    ) -> Result<Option<Place>, RuntimeError> {
        if let Some(ring) = pool.take_ring() {
            return Ok(Some(Place::Device(ring)));
        }
        let resident = self.snapshots.iter().filter_map(|(id, snapshot)| match snapshot.ring {
            Place::Device(ring) => Some((snapshot.last_used, *id, ring)),
            Place::Host(_) => None,
        });
        match resident.min() {
            Some((last_used, id, ring)) => {
                match self.take_units(self.ring_units, last_used, Some(id), pool) {
                    Some(units) => {
                        device.save(Part::Ring(ring), &units)?;
                        pool.release_ring(ring);
                        self.snapshots.get_mut(&id).expect("it is the oldest").ring = Place::Host(units);
                    }
                    None => self.drop_snapshot(id, pool),
                }
                Ok(pool.take_ring().map(Place::Device))
            }
            // No ring of the device is for snapshots at all.
            None => Ok(self.take_units(self.ring_units, self.clock, None, pool).map(Place::Host)),
        }
    }

    pub(super) fn place_for_block(
        &mut self,
        pool: &mut Pool,
        device: &mut dyn Device,
    ) -> Result<Option<Place>, RuntimeError> {
        if self.make_room(1, None, pool, device)? {
            return Ok(pool.take_block().map(Place::Device));
        }
        Ok(self.take_units(self.block_units, self.clock, None, pool).map(Place::Host))
    }

    /// Units of the second tier for something last used then: nothing newer is dropped for it.
    fn take_units(&mut self, count: usize, last_used: u64, except: Option<u64>, pool: &mut Pool) -> Option<Vec<u32>> {
        while self.free_units.len() < count {
            let is_on_host = |place: &Place| matches!(place, Place::Host(_));
            let in_the_way = self.snapshots.iter().filter(|(id, snapshot)| {
                let rest = snapshot.rest_at.as_ref().is_some_and(is_on_host);
                let nodes = || snapshot.chain.iter().any(|hash| is_on_host(&self.nodes[hash].place));
                Some(**id) != except
                    && snapshot.last_used < last_used
                    && (is_on_host(&snapshot.ring) || rest || nodes())
            });
            let (_, oldest) = in_the_way.map(|(id, snapshot)| (snapshot.last_used, *id)).min()?;
            self.drop_snapshot(oldest, pool);
        }
        let rest = self.free_units.len() - count;
        Some(self.free_units.split_off(rest))
    }
}

/// A block of the device that could be let go.
struct Idle {
    what: What,
    block: u32,
    depth: usize,
    last_used: u64,
}

#[derive(Clone, Copy)]
enum What {
    Node(u128),
    Rest(u64),
}
