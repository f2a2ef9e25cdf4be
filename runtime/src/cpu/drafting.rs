//! Steps of a plan's drafter on the CPU, over the keys and values of the text's executor.

use gemma4c_plan::Drafter;

use super::executor::{Executor, Pass, Span, Tap};
use crate::{RuntimeError, argmax};

/// From where a drafter guesses.
#[derive(Clone, Debug)]
pub(crate) struct Beginning {
    pub slot: u32,
    /// The token that is to be followed, which was not run yet, and its position: at least 1.
    pub token: u32,
    pub position: usize,
    /// What the LM head read at the position before.
    pub hidden: Vec<f32>,
}

/// What one step of a drafter made.
#[derive(Clone, Copy, Debug)]
pub struct Draft<'a> {
    /// The likeliest token.
    pub token: u32,
    pub logits: &'a [f32],
    /// The next step's hidden state.
    pub hidden: &'a [f32],
}

/// So many tokens that may follow, each of which `each` is told. `executor` is the drafter's, `text` that of the model.
pub(crate) fn draft(
    (executor, drafter): (&mut Executor, &Drafter),
    text: &Executor,
    from: Beginning,
    steps: u32,
    tap: &mut Tap<'_>,
    each: &mut dyn FnMut(Draft<'_>),
) -> Result<(), RuntimeError> {
    let Beginning { slot, mut token, position, mut hidden } = from;
    for _ in 0..steps {
        // Every step looks from the position of the first: nothing is appended, so no other has more to see.
        let span = Span { slot, first_position: position, rows: 1 };
        let pass = Pass { tokens: &[token], spans: &[span], hidden: &hidden, ..Pass::default() };
        executor.run_beside(text, &pass, tap);
        let logits = executor.value(drafter.program.output, &pass);
        let next = executor.value(drafter.hidden, &pass);
        token = argmax(logits).ok_or(RuntimeError::NoPick)?;
        each(Draft { token, logits, hidden: next });
        hidden = next.to_vec();
    }
    Ok(())
}
