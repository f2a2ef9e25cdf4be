//! All choices of a request as they come: replies of the engine in, parts of answers out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gemma4c_runtime::engine::Finish;

use crate::answer::{Answer, Part, Whole};
use crate::error::ApiError;
use crate::exchange::Exchange;
use crate::loops::Loops;
use crate::record::Record;
use crate::reply::Reply;
use crate::speech::Speech;

/// What has come of one choice.
#[derive(Debug)]
pub struct Update {
    pub choice: usize,
    pub parts: Vec<Part>,
    /// Its tokens since the last update.
    pub tokens: Vec<u32>,
    /// Why it has ended, where it has.
    pub finished: Option<&'static str>,
    /// The stop string that has ended it.
    pub stop_string: Option<String>,
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
    pub timing: Timing,
}

/// What the time of a request went into, as the engine's thread saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Since it came.
    pub total: Duration,
    /// Until it had its memory: it was read, and waited for its turn.
    pub queued: Duration,
    /// From there to its first token.
    pub prompt: Duration,
    /// From there to its end.
    pub generation: Duration,
}

/// A request that is being answered.
pub struct Progress {
    exchange: Exchange,
    speech: Arc<Speech>,
    answers: Vec<Answer>,
    /// One for each choice, where answers end that go round in circles.
    loops: Vec<Loops>,
    is_open: Vec<bool>,
    /// Tokens of each choice that no update has told.
    tokens: Vec<Vec<u32>>,
    first: Option<Instant>,
    latest: Option<Instant>,
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
        loops: Vec<Loops>,
        usage: Usage,
        record: Arc<Record>,
    ) -> Progress {
        let is_open = vec![true; answers.len()];
        let (tokens, first, latest, failed) = (vec![Vec::new(); answers.len()], None, None, None);
        Progress { exchange, speech, answers, loops, is_open, tokens, first, latest, usage, record, failed }
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
            Reply::Token { choice, token, logprobs, at } if self.is_open[choice] => {
                self.record.count_token();
                self.tokens[choice].push(token);
                self.first.get_or_insert(at);
                self.latest = Some(at);
                let answer = &mut self.answers[choice];
                let mut parts = answer.token(&self.speech, token, logprobs);
                let mut finished = None;
                let is_loop = self.loops.get_mut(choice).is_some_and(|loops| loops.push(token));
                if answer.has_stopped() || is_loop {
                    let (rest, word) = answer.finish(if is_loop { Finish::Length } else { Finish::Stop });
                    parts.extend(rest);
                    finished = Some(if is_loop && word == "length" { "repetition" } else { word });
                    self.latest = Some(Instant::now());
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
            Reply::Finished { choice, reason, at } if self.is_open[choice] => {
                self.latest = Some(at);
                let (parts, word) = self.answers[choice].finish(reason);
                (choice, parts, Some(word))
            }
            _ => return,
        };
        self.is_open[choice] &= finished.is_none();
        finished.into_iter().for_each(|reason| self.record.finish(reason));
        if !parts.is_empty() || finished.is_some() {
            let tokens = std::mem::take(&mut self.tokens[choice]);
            let stop_string = finished.and_then(|_| self.answers[choice].stop_string().map(String::from));
            updates.push(Update { choice, parts, tokens, finished, stop_string });
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
            for Update { choice, parts, finished, .. } in updates {
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
            timing: self.timing(),
            ..self.usage
        }
    }

    fn timing(&self) -> Timing {
        let (started, admitted) = (self.record.started(), self.exchange.admitted);
        let latest = self.latest.unwrap_or(admitted);
        let first = self.first.unwrap_or(latest);
        Timing {
            total: started.elapsed(),
            queued: admitted.saturating_duration_since(started),
            prompt: first.saturating_duration_since(admitted),
            generation: latest.saturating_duration_since(first),
        }
    }
}
