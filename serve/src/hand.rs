//! Requests of any kind that a server has in hand: from the head of each to the end of its answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// All of them.
#[derive(Default)]
pub struct Hand {
    requests: AtomicUsize,
    is_empty: Notify,
}

/// Counts a request from its head to the end of its answer.
pub struct InHand(Arc<Hand>);

impl Drop for InHand {
    fn drop(&mut self) {
        if self.0.requests.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.is_empty.notify_one();
        }
    }
}

impl Hand {
    pub fn take(self: &Arc<Hand>) -> InHand {
        self.requests.fetch_add(1, Ordering::Relaxed);
        InHand(Arc::clone(self))
    }

    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    /// Waits until the last request in hand has ended.
    pub async fn has_come_to_rest(&self) {
        self.is_empty.notified().await;
    }
}
