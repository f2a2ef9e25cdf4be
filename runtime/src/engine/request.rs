//! What an engine is asked for, and what it answers.

use std::fmt;
use std::sync::Arc;

use gemma4c_plan::Sampling;

use super::attachment::Attachment;
use super::device::Mask;
use super::seated::{SeatError, Seated};
use crate::RuntimeError;

/// The longest salt.
pub const LONGEST_SALT: usize = 256;

/// A sequence, from its submission to its end. No number is given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub(super) u64);

/// What a rule demands of the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// Nothing: tokens are picked as fast as without a rule.
    Nothing,
    /// That it is among some. The device picks it; they are found out while it computes the logits.
    Mask,
    /// That it is picked from other logits than the model's. The host does that, from logits that come all the way.
    Logits,
}

/// What a request demands of its tokens beyond sampling: a grammar, biases, penalties.
pub trait Rule: Send {
    fn demand(&self) -> Demand;

    /// Takes from a mask that allows everything what may not come next. A row without any token left ends its sequence.
    /// Only where it demands a mask.
    fn restrict(&mut self, allowed: &mut Mask);

    /// Changes the logits that the next token is picked from, as far as it demands anything. A token whose logit is NaN
    /// is not picked; a row without any other ends its sequence.
    fn apply(&mut self, logits: &mut [f32]);

    /// What was picked, whatever it has demanded. Stop tokens end a sequence and are not told.
    fn picked(&mut self, token: u32);

    /// The same in the same state, for a sequence of its own.
    fn copy(&self) -> Box<dyn Rule>;
}

/// A [`Rule`] that goes with its request.
pub struct BoxedRule(pub Box<dyn Rule>);

impl Clone for BoxedRule {
    fn clone(&self) -> BoxedRule {
        BoxedRule(self.0.copy())
    }
}

impl fmt::Debug for BoxedRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").field("demand", &self.0.demand()).finish_non_exhaustive()
    }
}

/// A prompt to be continued.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Arc<[u32]>,
    /// Tokens to generate, at most; with 0 the prompt is only read, which keeps its prefixes.
    pub most: u32,
    pub sampling: Sampling,
    pub seed: u64,
    /// Tokens that end it; they are not given out.
    pub stop: Arc<[u32]>,
    /// Numbers of tokens of the prompt after which its state is kept, for prompts that begin alike.
    pub snapshot_at: Vec<u32>,
    /// Prefixes are shared by requests with the same salt alone.
    pub salt: Arc<[u8]>,
    /// Every token comes with the model's own logits, which a rule has not changed.
    pub logits: bool,
    /// The logits after each token of the prompt but the last come too. Token by token, since a device has room for the
    /// logits of one row; what is kept of such a prompt is not used.
    pub prompt_logits: bool,
    pub rule: Option<BoxedRule>,
    /// Pictures and sounds, in the order of their places in the prompt.
    pub media: Arc<[Attachment]>,
    /// The adapter that all its rows have, in a seat of the plan.
    pub adapter: Option<Seated>,
    /// Whose it is: those who have less running go first.
    pub client: u64,
}

impl Request {
    /// The likeliest tokens after a prompt.
    pub fn greedy(prompt: impl Into<Arc<[u32]>>, most: u32) -> Request {
        Request {
            prompt: prompt.into(),
            most,
            sampling: Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 },
            seed: 0,
            stop: Arc::default(),
            snapshot_at: Vec::new(),
            salt: Arc::default(),
            logits: false,
            prompt_logits: false,
            rule: None,
            media: Arc::default(),
            adapter: None,
            client: 0,
        }
    }

    /// What is demanded of the next token.
    pub(super) fn demand(&self) -> Demand {
        self.rule.as_ref().map_or(Demand::Nothing, |rule| rule.0.demand())
    }
}

/// How a fork of a sequence goes on; the rest is as its parent has it.
#[derive(Clone, Debug)]
pub struct Fork {
    /// Tokens to generate after those of the parent, at most.
    pub most: u32,
    pub sampling: Sampling,
    pub seed: u64,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It has as many tokens as were asked for.
    Length,
    /// A stop token came.
    Stop,
    /// The context is full.
    Context,
    Cancelled,
}

impl Finish {
    /// The word for it in answers.
    pub const fn name(self) -> &'static str {
        match self {
            Finish::Length => "length",
            Finish::Stop => "stop",
            Finish::Context => "context",
            Finish::Cancelled => "cancelled",
        }
    }
}

/// What happened to a sequence.
#[derive(Debug)]
pub enum Event {
    /// It has its memory. The first `cached` tokens of its prompt need not be computed.
    Admitted {
        id: Id,
        cached: u32,
    },
    /// The logits after a token of the prompt.
    Prompt {
        id: Id,
        position: u32,
        logits: Vec<f32>,
    },
    /// So many tokens were guessed for it, of which the first `accepted` are its next tokens, which come now.
    Drafted {
        id: Id,
        drafted: u32,
        accepted: u32,
    },
    /// `logits` is empty unless the request wanted them.
    Token {
        id: Id,
        token: u32,
        logits: Vec<f32>,
    },
    Finished {
        id: Id,
        reason: Finish,
    },
    /// It ended by a fault of its own; other sequences are not affected.
    Failed {
        id: Id,
        error: RuntimeError,
    },
}

impl Event {
    pub fn id(&self) -> Id {
        match self {
            Event::Admitted { id, .. }
            | Event::Prompt { id, .. }
            | Event::Drafted { id, .. }
            | Event::Token { id, .. }
            | Event::Finished { id, .. }
            | Event::Failed { id, .. } => *id,
        }
    }
}

/// Why a request is not taken; others are not affected.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("no tokens were given; at least one is needed")]
    NoTokens,
    #[error("token {token} is out of range: the vocabulary has {vocab} tokens (0 to {})", vocab - 1)]
    TokenOutOfRange { token: u32, vocab: u32 },
    #[error("the prompt has {tokens} tokens, the context has room for {context}: compile with a larger --ctx")]
    PromptTooLong { tokens: usize, context: u32 },
    #[error(
        "{positions} positions take {needed} pages of keys and values, there are {pages} in all: ask for fewer tokens, or give it more memory"
    )]
    NeverFits { positions: u32, needed: u32, pages: u32 },
    #[error("a salt of {bytes} bytes is too long: {LONGEST_SALT} at most")]
    SaltTooLong { bytes: usize },
    #[error("a snapshot was asked for after {position} tokens of a prompt of {tokens}")]
    SnapshotOutOfRange { position: u32, tokens: usize },
    #[error("a snapshot was asked for at position {position}, within a picture or a sound")]
    SnapshotWithin { position: u32 },
    #[error(
        "medium {index} has {soft} soft tokens, and the prompt does not hold as many places for them (token {token}) from position {position} on"
    )]
    NoPlace { index: usize, soft: usize, position: u32, token: u32 },
    #[error(
        "a picture of {soft} soft tokens that see each other must go in at once, and the plan reads {chunk} tokens at once: compile it with a larger --chunk"
    )]
    NeverWhole { soft: usize, chunk: u32 },
    #[error("the logits of a prompt are not given where it has pictures or sounds in it")]
    LogitsOfMedia,
    #[error("sequence {0} is not generating, so it cannot be forked")]
    NotRunning(u64),
    #[error("a fork that generates nothing is of no use: ask for at least one token")]
    NothingAsked,
    #[error("there is no room now for a fork: {0}")]
    NoRoom(&'static str),
    #[error(transparent)]
    Seat(#[from] SeatError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}
