//! The thread that tells requests what came of them.
//!
//! A reply wakes the task that waits for it, and log probabilities take a pass over the vocabulary: for a hundred rows that is as long as a
//! small model's step. The engine's thread hands over what a step brought and goes on.

use std::sync::mpsc;
use std::thread;

use tokio::sync::mpsc::UnboundedSender;

use crate::logprobs::logprobs;
use crate::worker::Reply;

/// Something to tell, and whom.
pub struct News {
    to: UnboundedSender<Reply>,
    what: What,
}

enum What {
    Reply(Reply),
    /// A token, and the logits it came from, where so many of the likeliest are wanted.
    Token {
        choice: usize,
        token: u32,
        logits: Vec<f32>,
        top: Option<usize>,
    },
    /// A token of the prompt, and the logits before it.
    Prompt {
        choice: usize,
        token: u32,
        logits: Vec<f32>,
        top: usize,
    },
}

impl News {
    pub fn reply(to: &UnboundedSender<Reply>, reply: Reply) -> News {
        News { to: to.clone(), what: What::Reply(reply) }
    }

    pub fn token(to: &UnboundedSender<Reply>, choice: usize, token: u32, logits: Vec<f32>, top: Option<usize>) -> News {
        News { to: to.clone(), what: What::Token { choice, token, logits, top } }
    }

    pub fn prompt(to: &UnboundedSender<Reply>, choice: usize, token: u32, logits: Vec<f32>, top: usize) -> News {
        News { to: to.clone(), what: What::Prompt { choice, token, logits, top } }
    }

    fn tell(self) {
        let reply = match self.what {
            What::Reply(reply) => reply,
            What::Token { choice, token, logits, top } => {
                Reply::Token { choice, token, logprobs: top.map(|top| logprobs(&logits, token, top)) }
            }
            What::Prompt { choice, token, logits, top } => {
                Reply::Prompt { choice, logprobs: logprobs(&logits, token, top) }
            }
        };
        // A client that is gone has its request cancelled by whoever noticed.
        _ = self.to.send(reply);
    }
}

/// The way to the thread. It ends when nobody has anything to tell any more, after all was told.
pub struct Teller {
    news: mpsc::Sender<Vec<News>>,
}

impl Teller {
    pub fn start() -> Teller {
        let (news, received) = mpsc::channel::<Vec<News>>();
        thread::spawn(move || received.into_iter().flatten().for_each(News::tell));
        Teller { news }
    }

    pub fn tell(&self, news: Vec<News>) {
        // Nobody hears when the process ends.
        _ = self.news.send(news);
    }
}
