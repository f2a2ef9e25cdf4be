//! What can go wrong between a plan and its logits.

use std::path::PathBuf;

use crate::cuda::CudaError;
use crate::runs::Run;

/// An error of the runtime; each names the thing it is about.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("the plan's model file {name} was not found; looked at {}. Give its place with --model", listed(looked))]
    ModelMissing { name: String, looked: Vec<PathBuf> },
    #[error(
        "the plan has its weights with it as a GPU reads them; anything else needs the model file {name}, which was not found; looked at {}. Give its place with --model",
        listed(looked)
    )]
    RepackedAlone { name: String, looked: Vec<PathBuf> },
    #[error("{} is cut: its weights are {needed} bytes, the file has {found}", path.display())]
    WeightsCut { path: PathBuf, needed: u64, found: u64 },
    #[error("{} is damaged: bytes {first} to {last} of its weights are not those it was compiled with", path.display())]
    WeightsDamaged { path: PathBuf, first: u64, last: u64 },
    #[error("{} has {found} bytes, the plan was compiled from a file of {expected}: compile it again", path.display())]
    ModelSize { path: PathBuf, expected: u64, found: u64 },
    #[error(
        "{} is not the model the plan was compiled from (fingerprint {found:016x}, expected {expected:016x}): compile it again",
        path.display()
    )]
    ModelChanged { path: PathBuf, expected: u64, found: u64 },
    #[error("token {token} is out of range: the vocabulary has {vocab_size} tokens (0 to {})", vocab_size - 1)]
    TokenOutOfRange { token: u32, vocab_size: u32 },
    #[error("no tokens were given; at least one is needed")]
    NoTokens,
    #[error(
        "{wanted} positions do not fit the plan's context of {context} ({used} are in use): compile with a larger --ctx"
    )]
    ContextOverflow { context: u32, used: u32, wanted: u64 },
    #[error("the plan needs {needed} bytes for {what}, this machine has {available}: {advice}")]
    OutOfMemory { what: &'static str, needed: u64, available: u64, advice: &'static str },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("the plan was compiled for the CPU alone: compile it with --target cuda to run it on a GPU")]
    NoProgram,
    #[error(
        "{gpu} runs none of the plan's programs, which are for {expected}: compile it again for this GPU, or with --arch compute_80"
    )]
    Architecture { gpu: String, expected: String },
    #[error("the plan has no program for `{key}`; it has {known}")]
    NoSuchProgram { key: String, known: String },
    #[error("the plan needs {needed} bytes on {gpu}, {free} are free: {advice}")]
    OutOfDeviceMemory { gpu: String, needed: u64, free: u64, advice: String },
    #[error("value {value} of {tensor} is infinite, NaN or too large for 16 bits: the model's file is damaged")]
    NoNumber { tensor: String, value: u64 },
    #[error(
        "{tensor}{of}: the scale of row {row} from column {column} on is {scale}; a trained weight has a positive number"
    )]
    BadScale { tensor: String, of: String, row: u64, column: usize, scale: f32 },
    #[error("{tensor} cannot be made of what the plan says: compile the model again")]
    Unmade { tensor: String },
    #[error("a row of {tensor} has {bytes} bytes, {most} at most can be loaded at once")]
    LongRow { tensor: String, bytes: usize, most: usize },
    #[error("the plan runs {room} sequences at once, not {wanted}: compile it with --sequences {wanted}")]
    TooManySequences { wanted: u32, room: u32 },
    #[error("the plan has no steps for {0:?}")]
    NoSuchRun(Run),
    #[error(
        "position {to} cannot be restored from position {from}: the pages of sliding layers no longer hold the rows it needs"
    )]
    Forgotten { to: u32, from: u32 },
    #[error("intermediate values can be seen only on the CPU: use --device cpu")]
    NoTaps,
    #[error("the plan reads no pictures or sound: compile it with --mmproj, and the projector file of its model")]
    NoTower,
    #[error(
        "{media} media make {soft} soft tokens of the {name} tower, and the tokens hold {places} places for them (token {token}): there must be as many"
    )]
    Placeholders { name: String, media: usize, soft: usize, token: u32, places: usize },
    #[error(
        "{values} numbers are not a grid of {columns} by {rows} patches, of which each {pool} by {pool} are a soft token"
    )]
    Patches { columns: u32, rows: u32, pool: u32, values: usize },
    #[error(
        "a medium of {soft} soft tokens: the plan has room for {most}; of a picture compile it with a larger --image-tokens"
    )]
    PictureTooLarge { soft: u64, most: u32 },
    #[error("a picture {patches} patches long: the tower knows positions up to {longest}")]
    PictureTooLong { patches: u32, longest: u64 },
    #[error("the plan has no seats for adapters: compile it with --adapters")]
    NoSeats,
    #[error("the adapter was prepared for another plan than this")]
    OtherPlan,
    #[error("the plan has no drafter: compile it with --draft, and the drafter's file of its model")]
    NoDrafter,
    #[error(
        "the plan computes one row a pass of a sequence, and drafts are verified several at once: compile with --drafts for a GPU, with a larger --chunk for a CPU"
    )]
    NoRoomToVerify,
    #[error("a draft needs at least one token before the one it follows, and its logits asked for")]
    NothingToDraftFrom,
    #[error("the logits are not numbers, so no token can be picked")]
    NoPick,
    /// Of a backend that is not this crate's.
    #[error("{0}")]
    Backend(String),
    #[error("{what} of {found} is out of range, expected {expected}")]
    Setting { what: &'static str, expected: String, found: String },
}

fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}
