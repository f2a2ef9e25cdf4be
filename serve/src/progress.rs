//! All choices of a request as they come: replies of the engine in, parts of answers out.

use std::sync::Arc;

use gemma4c_runtime::engine::Finish;

use crate::answer::{Answer, Part, Whole};
use crate::error::ApiError;
use crate::exchange::Exchange;
use crate::record::Record;
use crate::reply::Reply;
use crate::speech::Speech;

/// What has come of one choice.
#[derive(Debug)]
pub struct Update {
    pub choice: usize,
    pub parts: Vec<Part>,
    /// Why it has ended, where it has.
    pub finished: Option<&'static str>,
}

/// Tokens of a request and of its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: usize,
    pub cached: u32,
    /// Tokens of the prompt that were computed, and are kept for the next.
    pub cache_written: u32,
    pub completion: u32,
    pub reasoning: u32,
    /// Tokens that were guessed, and those of them that were right.
    pub drafted: u32,
    pub accepted: u32,
}

/// A request that is being answered.
pub struct Progress {
    exchange: Exchange,
    speech: Arc<Speech>,
    answers: Vec<Answer>,
    is_open: Vec<bool>,
    /// Of the prompt, and of drafts; what the answers count is added when it is asked for.
    usage: Usage,
    record: Arc<Record>,
    /// An error that has come behind other replies: those are given out first.
    failed: Option<ApiError>,
}

impl Progress {
    pub fn new(
        exchange: Exchange,
        speech: Arc<Speech>,
        answers: Vec<Answer>,
        usage: Usage,
        record: Arc<Record>,
    ) -> Progress {
        let is_open = vec![true; answers.len()];
        Progress { exchange, speech, answers, is_open, usage, record, failed: None }
    }

    /// Waits for something, and takes what else is there; nothing once all has ended.
    pub async fn next(&mut self) -> Result<Vec<Update>, ApiError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let mut updates = Vec::new();
        while updates.is_empty() && self.is_open.contains(&true) {
            let reply = self.exchange.next().await?;
            self.take(reply, &mut updates);
            while let Some(reply) = self.exchange.try_next() {
                match reply {
                    Ok(reply) => self.take(reply, &mut updates),
                    Err(error) if updates.is_empty() => return Err(error),
                    Err(error) => self.failed = Some(error),
                }
            }
        }
        Ok(updates)
    }

    fn take(&mut self, reply: Reply, updates: &mut Vec<Update>) {
        let (choice, parts, finished) = match reply {
            Reply::Token { choice, token, logprobs } if self.is_open[choice] => {
                self.record.count_token();
                let answer = &mut self.answers[choice];
                let mut parts = answer.token(&self.speech, token, logprobs);
                let mut finished = None;
                if answer.has_stopped() {
                    let (rest, word) = answer.finish(Finish::Stop);
                    parts.extend(rest);
                    finished = Some(word);
                    self.exchange.cancel_choice(choice);
                }
                (choice, parts, finished)
            }
            Reply::Prompt { choice, logprobs } if self.is_open[choice] => (choice, vec![Part::Prompt(logprobs)], None),
            Reply::Drafted { choice, drafted, accepted } if self.is_open[choice] => {
                self.usage.drafted += drafted;
                self.usage.accepted += accepted;
                return;
            }
            Reply::Finished { choice, reason } if self.is_open[choice] => {
                let (parts, word) = self.answers[choice].finish(reason);
                (choice, parts, Some(word))
            }
            _ => return,
        };
        self.is_open[choice] &= finished.is_none();
        finished.into_iter().for_each(|reason| self.record.finish(reason));
        if !parts.is_empty() || finished.is_some() {
            updates.push(Update { choice, parts, finished });
        }
    }

    /// Waits for all of it.
    pub async fn whole(mut self) -> Result<(Vec<(Whole, &'static str)>, Usage), ApiError> {
        let mut all = vec![(Whole::default(), "stop"); self.answers.len()];
        loop {
            let updates = self.next().await?;
            if updates.is_empty() {
                return Ok((all, self.usage()));
            }
            for Update { choice, parts, finished } in updates {
                all[choice].0.add(parts);
                all[choice].1 = finished.unwrap_or(all[choice].1);
            }
        }
    }

    /// What the line about the request says.
    pub fn record(&self) -> &Record {
        &self.record
    }

    pub fn usage(&self) -> Usage {
        Usage {
            completion: self.answers.iter().map(|answer| answer.tokens).sum(),
            reasoning: self.answers.iter().map(|answer| answer.reasoning_tokens).sum(),
            ..self.usage
        }
    }
}
