//! The arguments about adapters: those that a run has, and the seats that a plan has for such as come and go.

use anyhow::{Context, Result, ensure};
use gemma4c_models::adapter::Seating;
use gemma4c_plan::{MOST_SEAT_RANK, MOST_SEATS, Plan, SEAT_RANK_STEP, SeatWeights, Seats};
use gemma4c_runtime::engine::{Device, Engine, Seated};
use gemma4c_runtime::{RuntimeError, Session};

use xxhash_rust::xxh3::Xxh3Default;

use super::plan_file::PlanArgs;
use crate::options::AdapterAt;

/// Rank of seats where nobody says.
const USUAL_RANK: u32 = 16;

/// How many seats a model is compiled with.
#[derive(Clone, Copy, Default, clap::Args)]
pub struct SeatArgs {
    /// Room for that many adapters (LoRA) that come and go while the plan runs, each for the requests that name it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_SEATS)))]
    adapters: Option<u32>,

    /// Of these adapters: their rank at most, rounded up to a multiple of 16 [default: 16]
    #[arg(long, value_name = "R", requires = "adapters", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_SEAT_RANK)))]
    rank: Option<u32>,
}

impl SeatArgs {
    pub fn seats(&self) -> Option<Seats> {
        let rank = self.rank.unwrap_or(USUAL_RANK).next_multiple_of(SEAT_RANK_STEP);
        self.adapters.map(|count| Seats { count, rank })
    }
}

/// The adapters of a run.
#[derive(Clone, Default, clap::Args)]
pub struct LoraArgs {
    /// An adapter (LoRA), and if wanted how strong it is to be: of a GGUF model one that is always on, which may be
    /// repeated; of a plan with seats (compile --adapters) one for a seat
    #[arg(long, value_name = "FILE[:SCALE]")]
    pub lora: Vec<AdapterAt>,
}

/// Adapters that are ready for a plan's seats, and how strong each is.
pub struct Ready(Vec<(SeatWeights, f32)>);

impl LoraArgs {
    /// The same of the only one that there may be.
    pub fn for_seat(&self, given: &PlanArgs, plan: &Plan) -> Result<Ready> {
        let count = self.lora.len();
        ensure!(given.made.is_some() || count <= 1, "--lora is given {count} times: a sequence has one adapter");
        self.for_seats(given, plan)
    }

    /// Those for the seats of a plan. What was compiled in, because a model was given, needs none.
    pub fn for_seats(&self, given: &PlanArgs, plan: &Plan) -> Result<Ready> {
        if given.made.is_some() || self.lora.is_empty() {
            return Ok(Ready(Vec::new()));
        }
        let seating = Seating::of(plan).ok_or(RuntimeError::NoSeats).context("--lora")?;
        let ready = |at: &AdapterAt| {
            let weights = seating.prepare(&at.path)?;
            let (path, pairs, times) = (at.path.display(), weights.pairs, at.scale);
            let times = if times == 1.0 { String::new() } else { format!(", times {times}") };
            eprintln!("[{path}: applied {pairs} of {pairs} pairs{times}]");
            Ok((weights, at.scale))
        };
        Ok(Ready(self.lora.iter().map(ready).collect::<Result<_>>()?))
    }
}

impl Ready {
    /// What tells them from others; `None` of none.
    pub fn checksum(&self) -> Option<u64> {
        let mut hash = Xxh3Default::new();
        for (weights, strength) in &self.0 {
            hash.update(&strength.to_le_bytes());
            weights.matrices.iter().for_each(|matrix| hash.update(matrix));
        }
        (!self.0.is_empty()).then(|| hash.digest())
    }

    /// Gives a session its adapter, if there is one.
    pub fn sit(&self, session: &mut Session) -> Result<()> {
        self.0.iter().try_for_each(|(weights, strength)| Ok(session.adapt(weights, *strength)?))
    }

    /// Puts the only one into an engine's first seat, if there is one.
    pub fn fill_one<D: Device>(&self, engine: &mut Engine<D>) -> Result<Option<Seated>> {
        Ok(self.fill(engine)?.pop())
    }

    /// Puts all of them into an engine's seats, in order.
    pub fn fill<D: Device>(&self, engine: &mut Engine<D>) -> Result<Vec<Seated>> {
        let fill = |(seat, (weights, strength)): (u32, &(SeatWeights, f32))| {
            engine.fill_seat(seat, weights).context("--lora")?;
            Ok(Seated { seat, strength: *strength })
        };
        (1..).zip(&self.0).map(fill).collect()
    }
}
