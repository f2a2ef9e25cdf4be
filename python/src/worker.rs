//! The thread that owns a model. Calls come to it over a channel, one after another, and whoever calls waits without the
//! interpreter's lock, looking for signals several times a second: Ctrl-C is an exception at once, and the thread ends
//! what it computes after the step at hand.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gemma4c::{Interrupt, Model};
use pyo3::prelude::*;

use crate::{Error, raised};

/// How often a waiting call looks for signals.
const LOOKS: Duration = Duration::from_millis(100);

type Job = Box<dyn FnOnce(&mut Model) + Send>;

/// The way to the thread; dropping it ends the thread, and waits for that.
pub struct Worker {
    jobs: Sender<Job>,
    /// `None` where nobody waits for its end.
    thread: Option<JoinHandle<()>>,
    running: Arc<Mutex<Running>>,
}

/// What the thread is at.
#[derive(Default)]
struct Running {
    /// Of the call that it computes.
    interrupt: Interrupt,
    /// What is still queued is dropped.
    has_ended: bool,
}

/// A result that is computed elsewhere, and what ends that.
pub struct Pending<T> {
    pub results: Receiver<Result<T, gemma4c::Error>>,
    pub interrupt: Interrupt,
}

impl Worker {
    /// Starts the thread, which opens the model first, and waits for that. `look` reads what is asked of every model.
    pub fn start<T: Send + 'static>(
        py: Python<'_>,
        open: impl FnOnce() -> Result<Model, gemma4c::Error> + Send + 'static,
        look: impl FnOnce(&Model) -> T + Send + 'static,
    ) -> PyResult<(Worker, T)> {
        let (jobs, received) = mpsc::channel::<Job>();
        let (ready, results) = mpsc::channel();
        let running = Arc::new(Mutex::new(Running::default()));
        let seen = Arc::clone(&running);
        let work = move || {
            let mut model = match open() {
                Ok(model) => model,
                Err(error) => return drop(ready.send(Err(error))),
            };
            // Nobody waits any more after Ctrl-C.
            if ready.send(Ok(look(&model))).is_err() {
                return;
            }
            for job in received {
                if lock(&seen).has_ended {
                    return;
                }
                job(&mut model);
            }
        };
        let thread = thread::Builder::new().name("gemma4c".into()).spawn(work)?;
        let mut worker = Worker { jobs, thread: None, running };
        let facts = wait(py, &mut Pending { results, interrupt: Interrupt::default() })?.ok_or_else(ended)?;
        worker.thread = Some(thread);
        Ok((worker, facts))
    }

    /// Begins to compute something that gives any number of results. It does not wait, and may be called under a lock.
    pub fn begin<T: Send + 'static>(
        &self,
        compute: impl FnOnce(&mut Model, &Sender<Result<T, gemma4c::Error>>) + Send + 'static,
    ) -> PyResult<Pending<T>> {
        let (sender, results) = mpsc::channel();
        let interrupt = Interrupt::default();
        let (own, running) = (interrupt.clone(), Arc::clone(&self.running));
        let job = move |model: &mut Model| {
            let mut now = lock(&running);
            now.interrupt = own.clone();
            drop(now);
            model.interrupt_by(own);
            compute(model, &sender);
        };
        self.jobs.send(Box::new(job)).map_err(|_| ended())?;
        Ok(Pending { results, interrupt })
    }
}

impl Drop for Worker {
    /// What is computed ends after the step at hand.
    fn drop(&mut self) {
        let mut running = lock(&self.running);
        running.has_ended = true;
        running.interrupt.set();
        drop(running);
        // Waits for jobs no longer.
        self.jobs = mpsc::channel().0;
        if let Some(thread) = self.thread.take() {
            // A fault of the thread was told to whoever waited for it.
            _ = thread.join();
        }
    }
}

/// The next result, without the interpreter's lock; `None` where no more come. A signal's exception ends what is
/// computed.
pub fn wait<T: Send>(py: Python<'_>, pending: &mut Pending<T>) -> PyResult<Option<T>> {
    loop {
        let results = &mut pending.results;
        match py.detach(move || results.recv_timeout(LOOKS)) {
            Ok(result) => return result.map(Some).map_err(raised),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => py.check_signals().inspect_err(|_| pending.interrupt.set())?,
        }
    }
}

/// Why a result does not come.
pub fn ended() -> PyErr {
    Error::new_err("the model was closed, or its thread has ended by a fault")
}

/// Nothing is left half-way under this lock.
fn lock(running: &Mutex<Running>) -> MutexGuard<'_, Running> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}
