//! Windows through one plan, or through two at once: piece by piece, so that a few rows of logits are all that is held.

use anyhow::{Context, Result, bail};
use gemma4c_runtime::{Asked, Session, argmax};
use rayon::prelude::*;

use super::score::Scores;
use super::windows::Window;
use crate::scoring::LogSoftmax;

/// Bytes of logits held for each plan: 32 rows of the largest vocabulary there is.
const HELD_BYTES: usize = 32 << 20;
/// Beyond this many rows at once nothing gets faster.
const MOST_ROWS: usize = 512;

/// A plan that reads windows.
pub struct Reader {
    session: Session,
    /// The plan's file, for messages.
    name: String,
    /// Tokens go through the decode phase, not through prefill.
    one_by_one: bool,
    /// Logits of the piece at hand, row after row.
    rows: Vec<f32>,
}

impl Reader {
    pub fn new(session: Session, name: String, one_by_one: bool) -> Reader {
        Reader { session, name, one_by_one, rows: Vec::new() }
    }

    /// The CPU computes a row in one way, however it is fed: as a reference it reads prompts, which is faster.
    pub fn into_reference(mut self) -> Reader {
        self.one_by_one &= self.session.backend().is_some();
        self
    }

    pub fn device(&self) -> String {
        self.session.device_name()
    }

    /// Reads tokens whose logits nobody wants.
    fn skip(&mut self, tokens: &[u32]) -> Result<()> {
        match (tokens.is_empty(), self.one_by_one) {
            (true, _) => Ok(()),
            (false, true) => Ok(tokens.iter().try_for_each(|token| self.session.decode(*token, |_| {}))?),
            (false, false) => Ok(self.session.feed(tokens, Asked::None, None, |_, _| {})?),
        }
    }

    /// Reads tokens and keeps the logits after each.
    fn read(&mut self, tokens: &[u32]) -> Result<()> {
        let Reader { session, rows, .. } = self;
        rows.clear();
        rows.reserve_exact(tokens.len() * session.plan().model.vocab_size as usize);
        match self.one_by_one {
            true => tokens.iter().try_for_each(|token| session.decode(*token, |row| rows.extend_from_slice(row)))?,
            false => session.feed(tokens, Asked::All, None, |_, row| rows.extend_from_slice(row))?,
        }
        Ok(())
    }

    /// The logits after the tokens read last.
    fn rows(&self) -> Rows<'_> {
        Rows { name: &self.name, width: self.session.plan().model.vocab_size as usize, values: &self.rows }
    }
}

/// Logits of consecutive tokens. Unlike a session, they can be looked at from any thread.
#[derive(Clone, Copy)]
struct Rows<'a> {
    /// The plan they are of.
    name: &'a str,
    width: usize,
    values: &'a [f32],
}

impl<'a> Rows<'a> {
    /// One row, which must have a softmax.
    fn row(&self, index: usize, window: &Window, position: usize) -> Result<&'a [f32]> {
        let logits = &self.values[index * self.width..][..self.width];
        let Some(token) = logits.iter().position(|logit| !logit.is_finite()) else { return Ok(logits) };
        let (name, window, value) = (self.name, &window.name, logits[token]);
        bail!("{name}: {window}, position {position}: the logit of token {token} is {value}, which has no softmax")
    }
}

/// One plan, and the one it is compared with.
pub struct Readers {
    pub this: Reader,
    pub against: Option<Reader>,
    rows_at_once: usize,
}

/// What is found of one token.
struct Found {
    nll: f64,
    against: Option<FoundAgainst>,
}

struct FoundAgainst {
    nll: f64,
    kl: f64,
    same_top: bool,
}

impl Found {
    /// What row `index` says of the token after `position`.
    fn new(this: Rows<'_>, against: Option<Rows<'_>>, index: usize, window: &Window, position: usize) -> Result<Found> {
        let token = window.tokens[position + 1];
        let logits = this.row(index, window, position)?;
        let this = LogSoftmax::new(logits);
        let nll = this.nll(token);
        let Some(against) = against else { return Ok(Found { nll, against: None }) };
        let others = against.row(index, window, position)?;
        let reference = LogSoftmax::new(others);
        let (kl, same_top) = (reference.divergence(&this), argmax(logits) == argmax(others));
        Ok(Found { nll, against: Some(FoundAgainst { nll: reference.nll(token), kl, same_top }) })
    }
}

impl Readers {
    pub fn new(this: Reader, against: Option<Reader>) -> Readers {
        let row_bytes = 4 * this.session.plan().model.vocab_size as usize;
        let rows_at_once = (HELD_BYTES / row_bytes.max(1)).clamp(1, MOST_ROWS);
        Readers { this, against, rows_at_once }
    }

    /// Scores a window; `progress` is told of tokens as they are done.
    pub fn score(&mut self, window: &Window, progress: &mut dyn FnMut(usize)) -> Result<Scores> {
        let mut scores = Scores::new(self.against.is_some());
        let (skipped, rest) = window.fed().split_at(window.first_scored - 1);
        self.each(window, |reader| {
            reader.session.reset();
            reader.skip(skipped)
        })?;
        progress(skipped.len());
        let mut first = skipped.len();
        for piece in rest.chunks(self.rows_at_once) {
            self.each(window, |reader| reader.read(piece))?;
            // Rows are scored on all cores, each by one of them, and taken in order.
            let (this, against) = (self.this.rows(), self.against.as_ref().map(Reader::rows));
            let found = |index| Found::new(this, against, index, window, first + index);
            let found: Vec<Result<Found>> = (0..piece.len()).into_par_iter().map(found).collect();
            for found in found {
                let Found { nll, against } = found?;
                scores.nll.push(nll);
                if let (Some(all), Some(found)) = (&mut scores.against, against) {
                    all.nll.push(found.nll);
                    all.kl.push(found.kl);
                    all.same_top.push(found.same_top);
                }
            }
            first += piece.len();
            progress(piece.len());
        }
        Ok(scores)
    }

    /// Has both read.
    fn each(&mut self, window: &Window, mut read: impl FnMut(&mut Reader) -> Result<()>) -> Result<()> {
        for reader in [Some(&mut self.this), self.against.as_mut()].into_iter().flatten() {
            read(reader).with_context(|| format!("{}: {}", reader.name, window.name))?;
        }
        Ok(())
    }
}
