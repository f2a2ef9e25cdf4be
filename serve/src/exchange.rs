//! A request on its way through the engine, from the client's side: its place in the queue, its replies, its limits in
//! time, and its end when the client goes away.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gemma4c_runtime::engine::Request;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::adapters::Sitting;
use crate::error::ApiError;
use crate::house::House;
use crate::media::Held;
use crate::reply::Reply;
use crate::slot::{Lease, Slot};
use crate::state::Active;
use crate::worker::Job;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// From its arrival until a request has its memory.
    pub queue: Duration,
    /// Until its last token.
    pub whole: Duration,
}

/// A request that the engine has.
pub struct Exchange {
    /// Keeps the model in memory.
    lease: Lease,
    ticket: u64,
    replies: mpsc::UnboundedReceiver<Reply>,
    deadline: Instant,
    whole: Duration,
    /// Tokens of the prompt that were not computed again.
    pub cached: u32,
    /// When it had its memory.
    pub admitted: std::time::Instant,
    /// The memory of its pictures and sounds.
    pub held: Held,
    /// Its adapter, which keeps its seat until the engine was told of the request's end.
    pub sitting: Option<Sitting>,
    _active: Active,
}

/// Whoever goes away takes the request along: its memory is free with the engine's next step.
impl Drop for Exchange {
    fn drop(&mut self) {
        self.lease.worker.cancel(self.ticket);
    }
}

impl Exchange {
    /// Queues a request and waits until it has its memory.
    pub async fn begin(
        house: &Arc<House>,
        slot: &Arc<Slot>,
        requests: Vec<Request>,
        is_shared: bool,
        top_logprobs: Option<usize>,
        deadlines: Deadlines,
    ) -> Result<Exchange, ApiError> {
        static TICKETS: AtomicU64 = AtomicU64::new(0);
        slot.state.check()?;
        let active = slot.state.begin();
        let each = if is_shared { 1 } else { requests.len() };
        let place = slot.state.queue(requests.iter().take(each).map(|request| request.prompt.len()).sum())?;
        let now = Instant::now();
        let too_late = |_| {
            let message = format!("the request was not begun within {} seconds", deadlines.queue.as_secs());
            ApiError::timeout("queue_timeout", message)
        };
        let lease = timeout_at(now + deadlines.queue, house.lease(slot)).await.map_err(too_late)??;
        let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
        let (sender, replies) = mpsc::unbounded_channel();
        let job = Job { ticket, choices: requests, is_shared, top_logprobs, replies: sender, place };
        lease.worker.submit(job)?;
        let mut exchange = Exchange {
            lease,
            ticket,
            replies,
            deadline: now + deadlines.whole,
            whole: deadlines.whole,
            cached: 0,
            admitted: now.into_std(),
            held: Held::new(),
            sitting: None,
            _active: active,
        };
        let admitted = timeout_at(now + deadlines.queue, exchange.replies.recv()).await;
        match admitted.map_err(too_late) {
            Err(error) => Err(error),
            Ok(Some(Reply::Admitted { cached, at })) => {
                (exchange.cached, exchange.admitted) = (cached, at);
                Ok(exchange)
            }
            Ok(Some(Reply::Failed(error))) => Err(error),
            Ok(_) => Err(ApiError::internal("the engine has ended")),
        }
    }

    /// What comes next; an error is the end.
    pub async fn next(&mut self) -> Result<Reply, ApiError> {
        match timeout_at(self.deadline, self.replies.recv()).await {
            Err(_) => {
                let message = format!("the answer was not complete within {} seconds", self.whole.as_secs());
                Err(ApiError::timeout("deadline", message))
            }
            Ok(Some(Reply::Failed(error))) => Err(error),
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(ApiError::internal("the engine has ended")),
        }
    }

    /// One choice is complete; the others go on.
    pub fn cancel_choice(&self, choice: usize) {
        self.lease.worker.cancel_choice(self.ticket, choice);
    }

    /// What has come already.
    pub fn try_next(&mut self) -> Option<Result<Reply, ApiError>> {
        match self.replies.try_recv().ok()? {
            Reply::Failed(error) => Some(Err(error)),
            reply => Some(Ok(reply)),
        }
    }
}
