//! A request on its way through the engine, from the client's side: its place in the queue, its replies, its limits in
//! time, and its end when the client goes away.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gemma4c_runtime::engine::Request;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::error::ApiError;
use crate::media::Held;
use crate::reply::Reply;
use crate::state::{Active, State};
use crate::worker::{Job, Worker};

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
    worker: Worker,
    ticket: u64,
    replies: mpsc::UnboundedReceiver<Reply>,
    deadline: Instant,
    whole: Duration,
    /// Tokens of the prompt that were not computed again.
    pub cached: u32,
    /// The memory of its pictures and sounds.
    pub held: Held,
    _active: Active,
}

/// Whoever goes away takes the request along: its memory is free with the engine's next step.
impl Drop for Exchange {
    fn drop(&mut self) {
        self.worker.cancel(self.ticket);
    }
}

impl Exchange {
    /// Queues a request and waits until it has its memory.
    pub async fn begin(
        worker: &Worker,
        state: &Arc<State>,
        requests: Vec<Request>,
        is_shared: bool,
        top_logprobs: Option<usize>,
        deadlines: Deadlines,
    ) -> Result<Exchange, ApiError> {
        static TICKETS: AtomicU64 = AtomicU64::new(0);
        state.check()?;
        let active = state.begin();
        let each = if is_shared { 1 } else { requests.len() };
        let place = state.queue(requests.iter().take(each).map(|request| request.prompt.len()).sum())?;
        let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
        let (sender, replies) = mpsc::unbounded_channel();
        let job = Job { ticket, choices: requests, is_shared, top_logprobs, replies: sender, place };
        worker.submit(job)?;
        let now = Instant::now();
        let mut exchange = Exchange {
            worker: worker.clone(),
            ticket,
            replies,
            deadline: now + deadlines.whole,
            whole: deadlines.whole,
            cached: 0,
            held: Held::new(),
            _active: active,
        };
        let admitted = timeout_at(now + deadlines.queue, exchange.replies.recv()).await;
        match admitted {
            Err(_) => {
                let message = format!("the request was not begun within {} seconds", deadlines.queue.as_secs());
                Err(ApiError::timeout("queue_timeout", message))
            }
            Ok(Some(Reply::Admitted { cached })) => {
                exchange.cached = cached;
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
        self.worker.cancel_choice(self.ticket, choice);
    }

    /// What has come already.
    pub fn try_next(&mut self) -> Option<Result<Reply, ApiError>> {
        match self.replies.try_recv().ok()? {
            Reply::Failed(error) => Some(Err(error)),
            reply => Some(Ok(reply)),
        }
    }
}
