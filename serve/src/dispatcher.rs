//! The thread that sends replies to requests.
//!
//! A reply wakes the task that waits for it, and log probabilities take a pass over the vocabulary: for a hundred rows
//! that is as long as a small model's step. The engine's thread hands over what a step brought and goes on.

use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use crate::logprobs::logprobs;
use crate::reply::Reply;

/// A reply that is not made yet, and who waits for it.
pub struct PendingReply {
    to: UnboundedSender<Reply>,
    content: Content,
}

enum Content {
    Reply(Reply),
    /// A token, and the logits it came from, where so many of the likeliest are wanted.
    Token {
        choice: usize,
        token: u32,
        logits: Vec<f32>,
        top: Option<usize>,
        at: Instant,
    },
    /// A token of the prompt, and the logits before it.
    Prompt {
        choice: usize,
        token: u32,
        logits: Vec<f32>,
        top: usize,
    },
}

impl PendingReply {
    pub fn reply(to: &UnboundedSender<Reply>, reply: Reply) -> PendingReply {
        PendingReply { to: to.clone(), content: Content::Reply(reply) }
    }

    pub fn token(
        to: &UnboundedSender<Reply>,
        choice: usize,
        token: u32,
        logits: Vec<f32>,
        top: Option<usize>,
    ) -> PendingReply {
        PendingReply { to: to.clone(), content: Content::Token { choice, token, logits, top, at: Instant::now() } }
    }

    pub fn prompt(
        to: &UnboundedSender<Reply>,
        choice: usize,
        token: u32,
        logits: Vec<f32>,
        top: usize,
    ) -> PendingReply {
        PendingReply { to: to.clone(), content: Content::Prompt { choice, token, logits, top } }
    }

    fn send(self) {
        let reply = match self.content {
            Content::Reply(reply) => reply,
            Content::Token { choice, token, logits, top, at } => {
                Reply::Token { choice, token, logprobs: top.map(|top| logprobs(&logits, token, top)), at }
            }
            Content::Prompt { choice, token, logits, top } => {
                Reply::Prompt { choice, logprobs: logprobs(&logits, token, top) }
            }
        };
        // A client that is gone has its request cancelled by whoever noticed.
        _ = self.to.send(reply);
    }
}

/// The queue of the thread, which ends when nobody has its queue any more, after all was sent.
pub struct Dispatcher {
    replies: mpsc::Sender<Vec<PendingReply>>,
}

impl Dispatcher {
    pub fn start() -> Dispatcher {
        let (replies, received) = mpsc::channel::<Vec<PendingReply>>();
        thread::spawn(move || received.into_iter().flatten().for_each(PendingReply::send));
        Dispatcher { replies }
    }

    pub fn dispatch(&self, replies: Vec<PendingReply>) {
        // The thread is gone only when the process ends.
        _ = self.replies.send(replies);
    }
}
