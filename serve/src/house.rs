//! Which of a server's models are in memory: one comes when it is asked for, and the one that was not asked for the
//! longest goes where there is no room for both, or where nobody has used it for a while.
//!
//! One model comes or goes at a time, and requests that wait for that get their turns in the order of their arrival. A
//! model that is to go gets no new requests, finishes those it has, and is loaded again for whoever asks meanwhile:
//! nothing is lost, however requests alternate.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::error::ApiError;
use crate::slot::{Lease, Slot};
use crate::worker::OpenError;

/// How many models there may be at once.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub models: usize,
    /// Of device memory, for all of them; `None` where it is not counted.
    pub bytes: Option<u64>,
    /// After so long without a request a model goes.
    pub idle: Option<Duration>,
}

impl Default for Room {
    fn default() -> Room {
        Room { models: 1, bytes: None, idle: None }
    }
}

/// The places of all models.
pub struct House {
    slots: Vec<Arc<Slot>>,
    room: Room,
    change: Arc<Mutex<()>>,
}

/// How often it is looked whether a model is idle.
const LOOK: Duration = Duration::from_millis(250);

impl House {
    pub fn new(slots: Vec<Arc<Slot>>, room: Room) -> House {
        House { slots, room, change: Arc::default() }
    }

    /// A lease of a model, which is loaded if it is away.
    pub async fn lease(self: &Arc<House>, slot: &Arc<Slot>) -> Result<Lease, ApiError> {
        loop {
            if let Some(lease) = slot.lease() {
                return Ok(lease);
            }
            let change = Arc::clone(&self.change).lock_owned().await;
            // Whoever had the turn before may have brought it.
            if let Some(lease) = slot.lease() {
                return Ok(lease);
            }
            let (house, slot) = (Arc::clone(self), Arc::clone(slot));
            // A client that goes away must not leave a model halfway.
            let brought = tokio::spawn(async move {
                let _change = change;
                house.make_room(&slot).await;
                slot.come().await.map_err(|error| {
                    ApiError::unavailable(
                        "load_failed",
                        format!("the model {:?} cannot be loaded: {error}", slot.model),
                    )
                })
            });
            brought.await.unwrap_or_else(|_| Err(ApiError::internal("loading the model has failed")))?;
        }
    }

    /// Loads the model that a server begins with.
    pub async fn bring_first(&self, slot: &Arc<Slot>) -> Result<(), OpenError> {
        let _change = self.change.lock().await;
        slot.come().await
    }

    /// Lets others go until one more fits.
    async fn make_room(&self, newcomer: &Arc<Slot>) {
        loop {
            let others = || self.slots.iter().filter(|slot| !Arc::ptr_eq(slot, newcomer) && slot.is_here());
            let bytes = others().map(|slot| slot.bytes).sum::<u64>().saturating_add(newcomer.bytes);
            if others().count() < self.room.models && self.room.bytes.is_none_or(|room| bytes <= room) {
                return;
            }
            match others().min_by_key(|slot| slot.precedence()) {
                Some(oldest) => oldest.go().await,
                // It is alone. The device itself will say whether it fits.
                None => return,
            }
        }
    }

    /// Lets a model go when its last request has ended.
    pub async fn let_go(self: &Arc<House>, slot: &Arc<Slot>) {
        let change = Arc::clone(&self.change).lock_owned().await;
        let slot = Arc::clone(slot);
        // A client that goes away must not leave it halfway.
        let gone = tokio::spawn(async move {
            let _change = change;
            slot.go().await;
        });
        _ = gone.await;
    }

    /// Lets models go that nobody uses, for as long as the server runs.
    pub async fn empty_when_idle(self: Arc<House>) {
        let Some(idle) = self.room.idle else { return };
        loop {
            tokio::time::sleep(LOOK.min(idle)).await;
            let is_idle = |slot: &&Arc<Slot>| slot.idle_since().is_some_and(|since| since + idle <= Instant::now());
            let Some(slot) = self.slots.iter().find(is_idle) else { continue };
            let _change = self.change.lock().await;
            if is_idle(&slot) {
                slot.go().await;
            }
        }
    }
}
