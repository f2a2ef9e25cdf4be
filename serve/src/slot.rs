//! A model's place in memory. It is there or away; while it is there it has a thread with an engine, and whoever holds
//! a lease keeps it there.
//!
//! When it comes and when it goes is decided in `house.rs`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::Notify;

use crate::adapters::Adapters;
use crate::state::State;
use crate::worker::{OpenError, Opener, Ready, Worker};

/// The place of one model.
pub struct Slot {
    pub model: String,
    /// Device memory that it takes.
    pub bytes: u64,
    open: Arc<Opener>,
    pub state: Arc<State>,
    /// Come back with it.
    pub adapters: Arc<Adapters>,
    here: Mutex<Option<Here>>,
    /// The last lease of a model that is to go has ended.
    released: Notify,
    loads: AtomicU64,
}

/// A model that is there.
struct Here {
    worker: Worker,
    thread: JoinHandle<()>,
    ready: Ready,
    leases: usize,
    /// It gets no more leases.
    is_leaving: bool,
    came: Instant,
    last_used: Instant,
}

/// Keeps a model where it is.
pub struct Lease {
    slot: Arc<Slot>,
    pub worker: Worker,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(here) = self.slot.here().as_mut() {
            here.leases -= 1;
            here.last_used = Instant::now();
            if here.leases == 0 && here.is_leaving {
                self.slot.released.notify_one();
            }
        }
    }
}

impl Slot {
    pub fn new(model: String, bytes: u64, open: Arc<Opener>, state: Arc<State>, adapters: Arc<Adapters>) -> Slot {
        let (here, released, loads) = (Mutex::new(None), Notify::new(), AtomicU64::new(0));
        Slot { model, bytes, open, state, adapters, here, released, loads }
    }

    fn here(&self) -> MutexGuard<'_, Option<Here>> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of a model that is there and stays.
    pub fn lease(self: &Arc<Slot>) -> Option<Lease> {
        let mut here = self.here();
        let here = here.as_mut().filter(|here| !here.is_leaving)?;
        here.leases += 1;
        Some(Lease { slot: Arc::clone(self), worker: here.worker.clone() })
    }

    /// What its engine says of itself, while it is there.
    pub fn ready(&self) -> Option<Ready> {
        self.here().as_ref().map(|here| here.ready.clone())
    }

    pub fn is_here(&self) -> bool {
        self.here().is_some()
    }

    /// Since when nobody has used it, where it is there.
    pub fn idle_since(&self) -> Option<Instant> {
        self.here().as_ref().filter(|here| here.leases == 0).map(|here| here.last_used)
    }

    /// Of several that are there, the least is the first to go: one that nobody uses, and that for the longest; of
    /// those in use the one that came first.
    pub fn precedence(&self) -> Option<(bool, Instant)> {
        let of = |here: &Here| if here.leases > 0 { (true, here.came) } else { (false, here.last_used) };
        self.here().as_ref().map(of)
    }

    /// How often it came.
    pub fn loads(&self) -> u64 {
        self.loads.load(Ordering::Relaxed)
    }

    /// Opens the engine. Nobody else may do so at the same time.
    pub async fn come(&self) -> Result<(), OpenError> {
        let (worker, thread, when_ready) =
            Worker::start(Arc::clone(&self.open), Arc::clone(&self.state), Arc::clone(&self.adapters));
        let ready = when_ready.await.unwrap_or_else(|_| Err("the engine's thread has ended".into()))?;
        let now = Instant::now();
        let here = Here { worker, thread, ready, leases: 0, is_leaving: false, came: now, last_used: now };
        *self.here() = Some(here);
        self.loads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Gives no more leases; how many there still are.
    fn leases_of_leaving(&self) -> usize {
        let mut here = self.here();
        let here = here.as_mut();
        here.map_or(0, |here| {
            here.is_leaving = true;
            here.leases
        })
    }

    /// Waits for whoever still uses it, and closes the engine: its memory is free when this returns.
    pub async fn go(&self) {
        while self.leases_of_leaving() > 0 {
            self.released.notified().await;
        }
        let Some(Here { worker, thread, .. }) = self.here().take() else { return };
        worker.end();
        // A thread that has panicked has said so, and holds nothing either.
        _ = tokio::task::spawn_blocking(move || _ = thread.join()).await;
        self.state.metrics.occupy(0, 0, 0);
    }

    /// The server ends, and what runs ends with it.
    pub fn abort(&self) {
        if let Some(here) = self.here().as_ref() {
            here.worker.abort();
        }
    }
}
