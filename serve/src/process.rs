//! Starting a server from a program that has no asynchronous runtime of its own.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::server::{Offer, Options, ServeError, serve};

fn runtime() -> Result<Runtime, ServeError> {
    Builder::new_multi_thread().enable_all().build().map_err(ServeError::Runtime)
}

/// Serves until the process is told to end (SIGTERM or SIGINT): once to let running requests finish, twice to end now.
pub fn run(offers: Vec<Offer>, options: Options, ready: impl FnOnce(SocketAddr)) -> Result<(), ServeError> {
    let runtime = runtime()?;
    let ended = runtime.block_on(async {
        let (end, ending) = watch::channel(0);
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            let mut signals = signal(kind).map_err(ServeError::Runtime)?;
            let end = end.clone();
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    end.send_modify(|count| *count += 1);
                }
            });
        }
        serve(offers, options, ready, ending).await
    });
    // What a client is still told in the background is of no interest any more.
    runtime.shutdown_background();
    ended
}

/// A server in the background of this process.
pub struct Running {
    pub address: SocketAddr,
    end: watch::Sender<u32>,
    thread: JoinHandle<Result<(), ServeError>>,
}

/// Starts a server and waits until it is ready.
pub fn start(offers: Vec<Offer>, options: Options) -> Result<Running, ServeError> {
    let runtime = runtime()?;
    let (end, ending) = watch::channel(0);
    let (ready, when_ready) = mpsc::channel();
    let thread = thread::spawn(move || {
        let ready = move |address| _ = ready.send(address);
        let ended = runtime.block_on(serve(offers, options, ready, ending));
        runtime.shutdown_background();
        ended
    });
    match when_ready.recv() {
        Ok(address) => Ok(Running { address, end, thread }),
        Err(_) => Err(match thread.join() {
            Ok(Err(error)) => error,
            _ => ServeError::Device("the server has ended before it was ready".into()),
        }),
    }
}

impl Running {
    /// The same as a signal.
    pub fn signal(&self) {
        self.end.send_modify(|count| *count += 1);
    }

    /// Waits for the end.
    pub fn wait(self) -> Result<(), ServeError> {
        self.thread.join().unwrap_or_else(|_| Err(ServeError::Device("the server has panicked".into())))
    }
}
