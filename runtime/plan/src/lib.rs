//! plan.bin: what the compiler hands the runtime, as plain data, versioned and checked.
//!
//! It shares its operations with the compiler's graph; all other types here are the format's own, so that either side
//! can change without the other noticing until the format's version does. Weights are not in a plan: it says where they
//! lie in the model's files and how to tell that those have not changed, or that they follow it in its own file
//! ([`embedded`]).

pub mod cuda;
mod drafter;
pub mod embedded;
pub mod fingerprint;
mod format;
pub mod hazards;
mod kv;
mod list;
mod model;
mod places;
mod program;
mod reserved;
mod seats;
pub mod stamps;
mod tower;
mod validate;
mod validate_cuda;
mod validate_drafter;
mod validate_kv;
mod validate_program;
mod validate_range;
mod validate_seats;
mod validate_tower;
mod vocab;

pub use drafter::Drafter;
pub use format::{PlanError, START, VERSION, own_bytes};
pub use gemma4c_ops::{Attribute, CacheId, Op, RowCount, WeightId};
pub use model::{Adapter, MOST_ADAPTERS, Model, ModelFile, Piece, Span, Target, Weight};
pub use program::{Cache, Kind, Program, Step, Value, ValueIndex};
pub use seats::{MOST_SEAT_RANK, MOST_SEATS, SEAT_RANK_STEP, SeatWeights, Seats};
pub use tower::{MediaTokens, Medium, Stage, Tower};
pub use vocab::{Merge, Sampling, Strings, TokenKind, Vocab};

/// A compiled model.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub model: Model,
    pub target: Target,
    pub weights: Vec<Weight>,
    /// The unfused program: what a CPU runs, and what every fused step of the GPU means.
    pub program: Program,
    /// The program for a GPU: the plan's first until one is [chosen](Plan::choose). `None` for a plan that runs on a
    /// CPU alone.
    pub cuda: Option<cuda::Cuda>,
    /// Programs for other GPUs, in the order of the plan.
    pub others: Vec<cuda::Cuda>,
    /// `None` for a model without one: it runs on token ids.
    pub vocab: Option<Vocab>,
    pub sampling: Sampling,
    /// Weights behind the plan, in the same file; `None`: they are in the model's files alone.
    pub embedded: Option<embedded::Embedded>,
    /// What makes soft tokens of pictures; none for a plan that reads text alone.
    pub towers: Vec<Tower>,
    /// What guesses the next tokens; `None` for a plan without one.
    pub drafter: Option<Drafter>,
    /// The graph the steps came from, as text.
    pub report: String,
}

impl Plan {
    /// The programs for GPUs, in the plan's order.
    pub fn programs(&self) -> impl Iterator<Item = &cuda::Cuda> {
        self.cuda.iter().chain(&self.others)
    }

    /// Makes one of [`Plan::programs`] the first; the others keep their order.
    pub fn show(&mut self, index: usize) {
        let mut programs: Vec<_> = self.cuda.take().into_iter().chain(std::mem::take(&mut self.others)).collect();
        if index < programs.len() {
            programs[..=index].rotate_right(1);
        }
        let mut programs = programs.into_iter();
        (self.cuda, self.others) = (programs.next(), programs.collect());
    }

    /// Makes one of [`Plan::programs`] the plan's only one: what runs has no use for the others.
    pub fn choose(&mut self, index: usize) {
        let programs = self.cuda.take().into_iter().chain(std::mem::take(&mut self.others));
        self.cuda = programs.into_iter().nth(index);
    }
}
