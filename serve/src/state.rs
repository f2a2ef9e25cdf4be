//! What the engine's thread and the requests of a model share: whether it is well, how long its queue is, and its
//! metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::error::ApiError;
use crate::metrics::Metrics;

/// How the engine is.
#[derive(Clone, Debug, PartialEq)]
pub enum Health {
    /// The server starts, and loads this model first.
    Loading,
    /// It takes requests. Where the model is away, they bring it.
    Ready,
    /// It will not come back.
    Failed(String),
}

/// How much may wait for its turn.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    pub requests: usize,
    pub prompt_tokens: usize,
}

/// The state of one model.
pub struct State {
    health: Mutex<Health>,
    draining: AtomicBool,
    limits: QueueLimits,
    queue: Arc<Queue>,
    /// Requests that have no answer yet, or half of one.
    active: Arc<ActiveRequests>,
    pub metrics: Metrics,
}

#[derive(Default)]
struct Queue {
    requests: AtomicUsize,
    prompt_tokens: AtomicUsize,
}

/// A place in the queue; whoever drops it leaves.
pub struct Place {
    queue: Arc<Queue>,
    prompt_tokens: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.requests.fetch_sub(1, Ordering::Relaxed);
        self.queue.prompt_tokens.fetch_sub(self.prompt_tokens, Ordering::Relaxed);
    }
}

/// When requests that the engine has were begun, by their numbers.
#[derive(Default)]
struct ActiveRequests(Mutex<(u64, BTreeMap<u64, Instant>)>);

/// Counts a request while it lives.
pub struct Active {
    all: Arc<ActiveRequests>,
    number: u64,
}

impl Drop for Active {
    fn drop(&mut self) {
        self.all.0.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&self.number);
    }
}

impl State {
    pub fn new(limits: QueueLimits) -> State {
        State {
            health: Mutex::new(Health::Loading),
            draining: AtomicBool::new(false),
            limits,
            queue: Arc::default(),
            active: Arc::default(),
            metrics: Metrics::default(),
        }
    }

    pub fn set_health(&self, health: Health) {
        *self.health.lock().unwrap_or_else(PoisonError::into_inner) = health;
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether requests are taken.
    pub fn check(&self) -> Result<(), ApiError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::unavailable("draining", "the server is shutting down"));
        }
        match &*self.health.lock().unwrap_or_else(PoisonError::into_inner) {
            Health::Ready => Ok(()),
            Health::Loading => Err(ApiError::unavailable("loading", "the model is being loaded")),
            Health::Failed(why) => Err(ApiError { retry_after: None, ..ApiError::unavailable("failed", why) }),
        }
    }

    /// A place in the queue for a prompt. An empty queue takes any.
    pub fn queue(&self, prompt_tokens: usize) -> Result<Place, ApiError> {
        let requests = self.queue.requests.fetch_add(1, Ordering::Relaxed);
        let tokens = self.queue.prompt_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
        let place = Place { queue: Arc::clone(&self.queue), prompt_tokens };
        if requests >= self.limits.requests {
            return Err(ApiError::queue_full(format!("{requests} requests are waiting, which is the limit")));
        }
        if tokens > 0 && tokens + prompt_tokens > self.limits.prompt_tokens {
            let limit = self.limits.prompt_tokens;
            let message = format!("{tokens} prompt tokens are waiting; with {prompt_tokens} more they pass {limit}");
            return Err(ApiError::queue_full(message));
        }
        Ok(place)
    }

    pub fn waiting(&self) -> usize {
        self.queue.requests.load(Ordering::Relaxed)
    }

    pub fn begin(&self) -> Active {
        let mut active = self.active.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = active.0;
        active.0 += 1;
        active.1.insert(number, Instant::now());
        Active { all: Arc::clone(&self.active), number }
    }

    pub fn active(&self) -> usize {
        self.active.0.lock().unwrap_or_else(PoisonError::into_inner).1.len()
    }

    /// When the oldest of them was begun.
    pub fn oldest_active(&self) -> Option<Instant> {
        self.active.0.lock().unwrap_or_else(PoisonError::into_inner).1.values().next().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_limited_by_requests_and_by_tokens() {
        let state = State::new(QueueLimits { requests: 2, prompt_tokens: 10 });
        let first = state.queue(50).expect("an empty queue takes any");
        assert_eq!(state.queue(1).map(|_| ()).unwrap_err().code, "queue_full");
        drop(first);
        let _places = [state.queue(3).unwrap(), state.queue(7).unwrap()];
        assert!(state.queue(0).is_err());
        assert_eq!(state.waiting(), 2);
    }

    #[test]
    fn health_decides_whether_requests_are_taken() {
        let state = State::new(QueueLimits { requests: 2, prompt_tokens: 10 });
        assert_eq!(state.check().unwrap_err().code, "loading");
        state.set_health(Health::Ready);
        assert_eq!(state.check(), Ok(()));
        state.drain();
        assert_eq!(state.check().unwrap_err().code, "draining");
    }
}
