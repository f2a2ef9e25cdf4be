//! What ends a computation from outside: a flag that is looked at before every step of the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;

/// Ends what a model computes, from any thread or from a signal handler. [`Model::interrupt_by`](crate::Model) takes it.
///
/// ```
/// use gemma4c::{Error, Interrupt, Model, Sampling};
///
/// # fn main() -> Result<(), gemma4c::Error> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let mut model = Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
/// let interrupt = Interrupt::default();
/// model.interrupt_by(interrupt.clone());
/// let mut answer = model.stream("She was", &Sampling::greedy())?;
/// answer.next();
/// interrupt.set();
/// assert!(matches!(answer.complete(), Err(Error::Interrupted)));
/// // The model is as good as before.
/// model.interrupt_by(Interrupt::default());
/// assert_eq!(model.generate("She was", &Sampling::greedy().max_tokens(3))?.tokens.len(), 3);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Ends what is computed with [`Error::Interrupted`] after the step that is being done; it stays set.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }
}
