//! Room for more: what is least recently used goes to the second tier, or for good.

use super::{Place, Prefixes};
use crate::RuntimeError;
use crate::engine::device::Device;
use crate::engine::pool::Pool;

impl Prefixes {
    /// Makes `count` pages free by letting go of what nobody but a kept prefix has. Where that is not enough, nothing
    /// is let go.
    pub fn make_room(
        &mut self,
        count: usize,
        except: Option<u64>,
        pool: &mut Pool,
        device: &mut dyn Device,
    ) -> Result<bool, RuntimeError> {
        if pool.free_pages() + self.idle_pages(except, pool).count() < count {
            return Ok(false);
        }
        while pool.free_pages() < count {
            // Of equally old ones the deepest: what is before it may serve others.
            let oldest = self.idle_pages(except, pool).min_by_key(|idle| (idle.last_used, usize::MAX - idle.depth));
            let Some(Idle { last_used, what, page, .. }) = oldest else { return Ok(false) };
            match self.take_units(1, last_used, except, pool).as_deref() {
                // Making room in the second tier may have dropped the page itself.
                Some(&[unit]) if self.is_there(what, page) => {
                    device.save(page, unit)?;
                    pool.release(page);
                    self.put(what, Place::Host(unit));
                }
                Some(units) => self.free_units.extend(units),
                None => self.drop_what_needs(what, pool),
            }
        }
        Ok(true)
    }

    /// Pages of the device that only a kept prefix has.
    fn idle_pages<'a>(&'a self, except: Option<u64>, pool: &'a Pool) -> impl Iterator<Item = Idle> + 'a {
        let nodes = self.nodes.iter().filter_map(move |(hash, node)| match node.place {
            Place::Device(page) if pool.owners(page) == 1 => {
                Some(Idle { what: What::Node(*hash), page, depth: node.depth, last_used: node.last_used })
            }
            _ => None,
        });
        let others = self.snapshots.iter().filter(move |(id, _)| Some(**id) != except);
        let own = others.flat_map(|(id, snapshot)| {
            let places = snapshot.places.iter().enumerate();
            places.filter_map(|(index, place)| match place {
                Place::Device(page) => Some(Idle {
                    what: What::OfSnapshot(*id, index),
                    page: *page,
                    depth: snapshot.chain.len(),
                    last_used: snapshot.last_used,
                }),
                Place::Host(_) => None,
            })
        });
        nodes.chain(own)
    }

    fn is_there(&self, what: What, page: u32) -> bool {
        let place = match what {
            What::Node(hash) => self.nodes.get(&hash).map(|node| &node.place),
            What::OfSnapshot(id, index) => self.snapshots.get(&id).map(|snapshot| &snapshot.places[index]),
        };
        matches!(place, Some(Place::Device(found)) if *found == page)
    }

    fn put(&mut self, what: What, place: Place) {
        match what {
            What::Node(hash) => self.nodes.get_mut(&hash).expect("it is there").place = place,
            What::OfSnapshot(id, index) => {
                self.snapshots.get_mut(&id).expect("it is there").places[index] = place;
            }
        }
    }

    fn drop_what_needs(&mut self, what: What, pool: &mut Pool) {
        let doomed: Vec<u64> = match what {
            What::OfSnapshot(id, _) => vec![id],
            What::Node(hash) => {
                self.snapshots.iter().filter(|(_, s)| s.chain.contains(&hash)).map(|(id, _)| *id).collect()
            }
        };
        doomed.into_iter().for_each(|id| self.drop_snapshot(id, pool));
    }

    /// Places for the pages of a new snapshot, on the device or else in the second tier.
    pub(super) fn places_for(
        &mut self,
        count: usize,
        pool: &mut Pool,
        device: &mut dyn Device,
    ) -> Result<Option<Vec<Place>>, RuntimeError> {
        if self.make_room(count, None, pool, device)? {
            return Ok(Some(pool.take_pages(count).map(Place::Device).collect()));
        }
        let units = self.take_units(count, self.clock, None, pool);
        Ok(units.map(|units| units.into_iter().map(Place::Host).collect()))
    }

    /// Units of the second tier for something last used then: nothing newer is dropped for it.
    fn take_units(&mut self, count: usize, last_used: u64, except: Option<u64>, pool: &mut Pool) -> Option<Vec<u32>> {
        while self.free_units.len() < count {
            let is_on_host = |place: &Place| matches!(place, Place::Host(_));
            let in_the_way = self.snapshots.iter().filter(|(id, snapshot)| {
                let nodes = || snapshot.chain.iter().any(|hash| is_on_host(&self.nodes[hash].place));
                Some(**id) != except
                    && snapshot.last_used < last_used
                    && (snapshot.places.iter().any(is_on_host) || nodes())
            });
            let (_, oldest) = in_the_way.map(|(id, snapshot)| (snapshot.last_used, *id)).min()?;
            self.drop_snapshot(oldest, pool);
        }
        let rest = self.free_units.len() - count;
        Some(self.free_units.split_off(rest))
    }
}

/// A page of the device that could be let go.
struct Idle {
    what: What,
    page: u32,
    depth: usize,
    last_used: u64,
}

#[derive(Clone, Copy)]
enum What {
    Node(u128),
    /// One of a snapshot's own pages.
    OfSnapshot(u64, usize),
}
