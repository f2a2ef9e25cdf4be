//! Servers on devices that take their time, or fail, and what to wait for on them.

use std::thread;
use std::time::{Duration, Instant};

use gemma4c_plan::{Sampling, SeatWeights};
use gemma4c_runtime::RuntimeError;
use gemma4c_runtime::engine::{AskedRow, Chunk, Device, Limits, Mask, Picked, Row, Seated};
use gemma4c_serve::Options;
use serde_json::{Value, json};

use crate::support::{Server, options};

/// Waits until something holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A request with a long answer.
pub fn long(stream: bool) -> Value {
    json!({ "prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": true, "stream": stream })
}

/// A device that takes its time, and may fail.
struct Odd {
    device: Box<dyn Device>,
    delay: Duration,
    decodes_left: Option<u32>,
    panics: bool,
}

impl Odd {
    fn count(&mut self) -> Result<(), RuntimeError> {
        thread::sleep(self.delay);
        let Some(left) = &mut self.decodes_left else { return Ok(()) };
        *left = left.saturating_sub(1);
        match *left {
            0 if self.panics => panic!("a fault of our own"),
            0 => Err(RuntimeError::Backend("an illegal memory access".into())),
            _ => Ok(()),
        }
    }
}

/// A server on which a long answer takes a second, however fast the machine is.
pub fn slow(options: Options, sequences: u32) -> Server {
    slowed(options, sequences, Duration::from_millis(3))
}

/// A server whose tokens take so long.
pub fn slowed(options: Options, sequences: u32, delay: Duration) -> Server {
    Server::on(options, sequences, delayed(delay))
}

/// Makes the tokens of a device take so long.
pub fn delayed(delay: Duration) -> impl Fn(Box<dyn Device>) -> Box<dyn Device> + Send + Sync + 'static {
    move |device| Box::new(Odd { device, delay, decodes_left: None, panics: false })
}

/// One whose device fails after some tokens.
pub fn failing(panics: bool) -> Server {
    let delay = Duration::ZERO;
    Server::on(options(), 2, move |device| Box::new(Odd { device, delay, decodes_left: Some(30), panics }))
}

impl Device for Odd {
    fn limits(&self) -> &Limits {
        self.device.limits()
    }

    fn name(&self) -> String {
        self.device.name()
    }

    fn identity(&self) -> u128 {
        self.device.identity()
    }

    fn can_pick(&self, sampling: &Sampling) -> bool {
        self.device.can_pick(sampling)
    }

    fn set_pages(&mut self, slot: u32, sliding: &[u32], full: &[u32]) -> Result<(), RuntimeError> {
        self.device.set_pages(slot, sliding, full)
    }

    fn fill_seat(&mut self, seat: u32, weights: &SeatWeights) -> Result<(), RuntimeError> {
        self.device.fill_seat(seat, weights)
    }

    fn seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        self.device.seat(slot, adapter)
    }

    fn prefill(&mut self, chunks: &[Chunk<'_>], asked: &[AskedRow]) -> Result<(), RuntimeError> {
        self.device.prefill(chunks, asked)
    }

    fn decode(&mut self, rows: &[Row]) -> Result<(), RuntimeError> {
        self.count()?;
        self.device.decode(rows)
    }

    fn decode_again(&mut self) -> Result<(), RuntimeError> {
        self.count()?;
        self.device.decode_again()
    }

    fn pick(&mut self, masks: &[Option<Mask>]) -> Result<(), RuntimeError> {
        self.device.pick(masks)
    }

    fn collect(&mut self) -> Result<Vec<Picked>, RuntimeError> {
        self.device.collect()
    }

    fn copy(&mut self, from: u32, to: u32) -> Result<(), RuntimeError> {
        self.device.copy(from, to)
    }

    fn save(&mut self, from: u32, unit: u32) -> Result<(), RuntimeError> {
        self.device.save(from, unit)
    }

    fn load(&mut self, unit: u32, to: u32) -> Result<(), RuntimeError> {
        self.device.load(unit, to)
    }
}
