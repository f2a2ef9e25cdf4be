//! What a model computes besides text: how well it predicts one, and the states between its layers.

use gemma4c_plan::Plan;
use gemma4c_runtime::engine::{Event, Request};
use gemma4c_runtime::{Asked, ModelLocation, Session};

use super::Model;
use super::interrupt::Interrupt;
use crate::error::Error;
use crate::scoring::{Cut, LogSoftmax};

/// How well a model predicts a text.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Perplexity {
    /// The mean negative log-likelihood of a token, by the natural logarithm.
    pub nll: f64,
    /// Tokens that were scored.
    pub tokens: usize,
}

impl Perplexity {
    /// exp(nll).
    pub fn value(&self) -> f64 {
        self.nll.exp()
    }
}

/// The residual before, between and after the layers: `layers + 1` tables of a row for each token, one behind the other.
/// The first is the embedding, table i what layer i gives to the next, and the last is normalised, as the LM head reads
/// it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HiddenStates {
    /// Tables.
    pub tables: usize,
    /// Rows of a table.
    pub tokens: usize,
    /// Numbers of a row.
    pub width: usize,
    /// All of them.
    pub values: Vec<f32>,
}

impl Model {
    /// Calls `each` with the logits after each of these tokens, in order.
    pub(super) fn each_row(
        &mut self,
        tokens: &[u32],
        each: &mut dyn FnMut(Vec<f32>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let request = Request { logits: true, prompt_logits: true, ..Request::greedy(tokens, 1) };
        let id = self.engine.submit(request)?;
        let mut read = || loop {
            self.interrupt.check()?;
            for event in self.engine.step()?.into_iter().filter(|event| event.id() == id) {
                match event {
                    Event::Prompt { logits, .. } | Event::Token { logits, .. } => each(logits)?,
                    Event::Finished { .. } => return Ok(()),
                    Event::Failed { error, .. } => return Err(error.into()),
                    Event::Admitted { .. } | Event::Drafted { .. } => {}
                }
            }
        };
        let read = read();
        if read.is_err() {
            self.engine.cancel(id);
        }
        read
    }

    /// How well the model predicts a text, as `gemma4c perplexity` has it: the text is cut into windows of so many
    /// tokens, and the second half of each is scored.
    ///
    /// ```
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let mut model = gemma4c::Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
    /// let prose = model.perplexity("It was not in her power to be of any use, and she knew that she was not.", 16)?;
    /// let noise = model.perplexity("Zq 7; function[] returns %d kWh (tm) <br> 0x7f4a, else \\n == null;", 16)?;
    /// assert!(prose.value() < noise.value());
    /// # Ok(())
    /// # }
    /// ```
    pub fn perplexity(&mut self, text: &str, window: usize) -> Result<Perplexity, Error> {
        let cut = Cut { tokens: window, all: false };
        if window < cut.least() {
            let least = cut.least();
            return Err(Error::Option(format!(
                "window {window}: at least {least} tokens are needed to have one to score"
            )));
        }
        let bos = self.plan.vocab.as_ref().ok_or(Error::NoVocabulary)?;
        let bos = bos.bos.filter(|_| bos.add_bos);
        let ids = self.tokenize(text)?;
        if ids.len() < window {
            let why = format!("the text has {} tokens, too few for a window of {window}", ids.len());
            return Err(Error::Option(why));
        }
        let mut scores = Vec::new();
        for tokens in cut.windows(&ids, bos) {
            // Nobody asks what comes after the last.
            let fed = &tokens[..tokens.len() - 1];
            let mut scored = 1;
            self.each_row(fed, &mut |logits| {
                if scored >= cut.first_scored() {
                    scores.push(LogSoftmax::new(&logits).nll(tokens[scored]));
                }
                scored += 1;
                Ok(())
            })?;
        }
        Ok(Perplexity { nll: scores.iter().sum::<f64>() / scores.len() as f64, tokens: scores.len() })
    }

    /// The residual before, between and after the layers. The CPU computes it in f32, also where a GPU runs the model:
    /// between a GPU's launches most values exist in its registers alone.
    ///
    /// ```
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let mut model = gemma4c::Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
    /// let tokens = model.tokenize("She was")?;
    /// let states = model.hidden_states(&tokens)?;
    /// assert_eq!(states.tokens, tokens.len());
    /// assert_eq!(states.values.len(), states.tables * states.tokens * states.width);
    /// # Ok(())
    /// # }
    /// ```
    pub fn hidden_states(&mut self, tokens: &[u32]) -> Result<HiddenStates, Error> {
        let session = match &mut self.on_cpu {
            Some(session) => session,
            none => none.insert(open_on_cpu(&self.plan, &self.location)?),
        };
        session.reset();
        read_states(session, tokens, &self.interrupt)
    }
}

/// Its weights are the file's own bytes, mapped a second time.
fn open_on_cpu(plan: &Plan, location: &ModelLocation) -> Result<Session, Error> {
    Ok(Session::on_cpu(plan.clone(), location)?)
}

fn read_states(session: &mut Session, tokens: &[u32], interrupt: &Interrupt) -> Result<HiddenStates, Error> {
    let (layers, width) = (session.plan().model.layers as usize, session.plan().model.hidden as usize);
    let (tables, count) = (layers + 1, tokens.len());
    // Of the last layer what comes of it is shown, once it is normalised.
    let names = (0..layers).map(|layer| match layer {
        0 => "embedding.out".to_owned(),
        _ => format!("blk.{}.layer.out", layer - 1),
    });
    let names: Vec<String> = names.chain(["head.normed".to_owned()]).collect();
    let mut values = vec![0.0; tables * count * width];
    let mut filled = vec![0; tables];
    let mut tap = |name: &str, of: usize, rows: &mut [f32]| {
        if let Some(table) = names.iter().position(|wanted| wanted == name).filter(|_| of == width) {
            let start = (table * count + filled[table]) * width;
            values[start..start + rows.len()].copy_from_slice(rows);
            filled[table] += rows.len() / width;
        }
    };
    for piece in session.pieces(count) {
        interrupt.check()?;
        session.feed_tapped(&tokens[piece], Asked::All, None, &mut tap, &mut |_, _| {})?;
    }
    match filled.iter().position(|rows| *rows != count) {
        Some(table) => Err(Error::Option(format!("the plan has no value {} to show", names[table]))),
        None => Ok(HiddenStates { tables, tokens: count, width, values }),
    }
}
