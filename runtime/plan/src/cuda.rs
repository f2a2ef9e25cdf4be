//! What a plan runs on a GPU: kernels, launches in order, and every byte of memory they touch.
//!
//! A runtime replays this blindly. Memory is four regions, each one allocation, whose sizes are known before a GPU is
//! seen; everything a launch reads or writes is a range of one of them. What changes from token to token (token,
//! position, rows) lies in device memory at [`Places`], so that no launch is ever rewritten.

use gemma4c_ops::WeightId;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use crate::kv::KvType;
use crate::list::at_most;
use crate::program::ValueIndex;
use crate::tower::MOST_TOWERS;

pub use crate::places::{
    KvCache, KvLayout, KvShape, PAGE_UNIT, Paging, Places, RECORD_WORDS, SEAT_WORDS, SEGMENT_ROWS, SEGMENT_WORDS,
    Segment, SoftPlaces, TowerPlaces, record,
};

/// Index into [`CudaProgram::kernels`], and into [`Code`]s.
pub type KernelIndex = u32;

/// A program for one GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Cuda {
    pub program: CudaProgram,
    /// In the order of [`CudaProgram::kernels`].
    pub code: Vec<Code>,
}

/// The launches and the memory map.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CudaProgram {
    /// What its launches are shaped for.
    pub gpu: Gpu,
    /// The version of NVRTC that compiled it.
    pub toolchain: String,
    pub kv: KvType,
    pub memory: Memory,
    /// How [`Region::Kv`] is divided.
    pub kv_layout: KvLayout,
    pub places: Places,
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub kernels: Vec<Kernel>,
    /// How each weight is loaded, in the order of the file.
    #[serde(deserialize_with = "at_most::<16384, _, _>")]
    pub loads: Vec<Load>,
    /// Tables the compiler computed.
    #[serde(deserialize_with = "at_most::<64, _, _>")]
    pub constants: Vec<Constant>,
    /// Launched once, in order, after weights and tables are loaded: they derive bf16 copies from loaded weights.
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub prepare: Vec<Launch>,
    /// The decode ladder, then the prefill ladder, each from the fewest rows to the most. The first decodes one row.
    #[serde(deserialize_with = "at_most::<32, _, _>")]
    pub phases: Vec<Phase>,
    /// What the plan's towers run, in their order.
    #[serde(deserialize_with = "at_most::<MOST_TOWERS, _, _>")]
    pub towers: Vec<CudaTower>,
    /// The most candidates that a [`Phase::pick_sampled`] considers.
    pub most_candidates: u32,
    /// Rows of one sequence that a decode may have, at consecutive positions: 1 where each must be of another.
    pub verified_rows: u32,
    /// The launches of the plan's drafter, if it has one.
    pub drafter: Option<CudaDrafter>,
    /// What each pass did, and what it refused.
    #[serde(deserialize_with = "at_most::<64, _, _>")]
    pub passes: Vec<PassReport>,
}

/// A drafter on a GPU: its steps in order, each of which finds the token and the hidden state that the one before it
/// left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CudaDrafter {
    /// All launches, for one sequence: what brings the hidden state of a decoded row into place, then each step of the
    /// drafter with its choice, then what ends a round. The values that they compute are those of the drafter's own
    /// program.
    pub phase: Phase,
    /// Behind which launch each draft is there: a round of n drafts runs the launches up to the n-th of these, a decode
    /// of n + 1 rows with its picks, and the launch behind the last of these: it keeps the drafts that were picked, and
    /// makes all records ready for the next round.
    #[serde(deserialize_with = "at_most::<64, _, _>")]
    pub ends: Vec<u32>,
    pub places: DrafterPlaces,
}

/// What host and drafter exchange: offsets in the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrafterPlaces {
    /// The drafter's record: the token that is to be followed and its position, which all steps are rotated by; its
    /// tick is the row that the next draft follows.
    pub record: u64,
    /// Right behind it a second one, of the position before, up to which keys are looked at. Its token is the number of
    /// the row whose hidden state is taken.
    pub before: u64,
    /// What entered the last norm of the model, of every decoded row, or of the asked one: f32.
    pub entering: u64,
    /// The hidden state of the next step: f32, as wide as the model.
    pub hidden: u64,
    /// The drafts, a word for each decoded row: a draft lies in that of the row before its own, and is also the token
    /// in the record of its own.
    pub drafts: u64,
    /// As many words: what takes the place of a draft in this round, as the token + 1; 0 leaves the drafter's own.
    pub given: u64,
    /// The last step's scores: of all tokens in the place of row 0's logits, or of the tokens of some groups.
    pub scores: u64,
    pub score_count: u32,
    /// Which groups these are, and how many; 0 where all tokens are scored.
    pub groups: u64,
    pub group_count: u32,
}

/// The GPU that a program's launches are shaped for. It may run on others: those that its code runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its name on the command line; unique in the plan.
    pub key: String,
    /// Its name for a person.
    pub name: String,
    /// `sm_90a`, `sm_89`: what the machine code is for. `compute_80`: the code is PTX, which a driver compiles for any
    /// GPU from 8.0 on.
    pub architecture: String,
    pub multiprocessors: u32,
    /// Shared memory that a block was given at most.
    pub shared_bytes_per_block: u32,
    pub l2_bytes: u64,
    /// Whether the rules' constants were measured on it.
    pub measured: bool,
}

impl std::fmt::Display for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, {} SMs)", self.name, self.architecture, self.multiprocessors)
    }
}

impl CudaProgram {
    /// Rows of the largest decode phase: as many have records, logits and history.
    pub fn decode_rows(&self) -> u32 {
        let decode = self.phases.iter().filter(|phase| phase.kind == PhaseKind::Decode);
        decode.map(|phase| phase.rows).max().unwrap_or(1)
    }

    /// All phases as a run counts them: the text's, then each tower's from the fewest patches to the most, then the
    /// drafter's.
    pub fn all_phases(&self) -> impl Iterator<Item = &Phase> {
        let of_towers = self.towers.iter().flat_map(|tower| &tower.phases);
        self.phases.iter().chain(of_towers).chain(self.drafter.as_ref().map(|drafter| &drafter.phase))
    }

    /// A phase as a run counts it.
    pub fn phase(&self, index: usize) -> Option<&Phase> {
        self.all_phases().nth(index)
    }

    /// Where a run finds the drafter's phase: behind all others.
    pub fn drafter_phase(&self) -> usize {
        self.phases.len() + self.towers.iter().map(|tower| tower.phases.len()).sum::<usize>()
    }

    /// How many pages a program has room for in so many bytes: those that it has, or with `more` all that are of use.
    /// `Err`: the bytes that it needs for one sequence as long as the context.
    pub fn pages_within(&self, bytes: u64, context: u32, more: bool) -> Result<u32, u64> {
        let layout = &self.kv_layout;
        let fixed = self.memory.device().map_or(u64::MAX, |all| all - self.memory.kv);
        let whole = layout.pages_for(context);
        let of_use = layout.slots.saturating_mul(whole);
        let most = if more { layout.pages.max(of_use) } else { layout.pages };
        let fitting = bytes.saturating_sub(fixed).checked_div(layout.page_bytes).unwrap_or(u64::MAX);
        match u32::try_from(fitting).unwrap_or(u32::MAX).min(most) {
            pages if pages >= whole && bytes >= fixed => Ok(pages),
            _ => Err(fixed.saturating_add(layout.bytes_for(context))),
        }
    }

    /// What takes the memory of a program that does not fit into `available` bytes, each with what makes it less.
    pub fn advice(&self, context: u32, available: u64) -> String {
        let Memory { weights, kv, arena, seats, .. } = self.memory;
        let (one, name) = (self.kv_layout.bytes_for(context), self.kv.name());
        let mut parts = vec![format!("weights take {weights} bytes (a file of fewer bits a weight, a smaller model)")];
        parts.extend((seats > 0).then(|| format!("seats {seats} bytes (fewer --adapters, a smaller --rank)")));
        parts.push(format!("activations {arena} bytes (fewer --sequences, a smaller --chunk)"));
        // 34 bytes in place of 32 values of 16 bits.
        let narrow = one / self.kv.bytes() * 34 / 32;
        let less = if self.kv.is_narrow() { String::new() } else { format!(", {narrow} bytes with --kv q8_0") };
        parts.push(format!("one sequence of {context} tokens {one} bytes in {name} (a smaller --ctx{less})"));
        let all = self.memory.device().unwrap_or(u64::MAX).saturating_sub(kv).saturating_add(one);
        let more = all.saturating_sub(available);
        format!("{}; a GPU with {more} bytes more has room for it", parts.join(", "))
    }

    /// Gives the program another number of pages. What its launches are told of a cache is from the first page to the
    /// last, and nothing else depends on how many there are.
    pub fn set_pages(&mut self, pages: u32) {
        let more = i64::from(pages) - i64::from(self.kv_layout.pages);
        let grown = |bytes: u64| bytes.wrapping_add_signed(more.wrapping_mul(self.kv_layout.page_bytes as i64));
        let grow = |launch: &mut Launch| {
            for argument in &mut launch.arguments {
                if let Argument::Memory(Range { region: Region::Kv, bytes, .. }) = argument {
                    *bytes = grown(*bytes);
                }
            }
        };
        let of_towers = self.towers.iter_mut().flat_map(|tower| &mut tower.phases);
        let phases = self.phases.iter_mut().chain(of_towers);
        for phase in phases.chain(self.drafter.iter_mut().map(|drafter| &mut drafter.phase)) {
            phase.steps.iter_mut().for_each(|step| grow(&mut step.launch));
        }
        self.memory.kv = grown(self.memory.kv);
        self.kv_layout.pages = pages;
    }

    /// Bytes of the weights' region that are loaded; what follows them is computed on the device.
    pub fn loaded_bytes(&self) -> u64 {
        let parts = self.loads.iter().flat_map(|load| &load.parts).map(|part| match part {
            LoadPart::Copy { to } | LoadPart::Kernel { to, .. } => to,
        });
        let ranges = parts.chain(self.constants.iter().map(|constant| &constant.to));
        let ends = ranges.filter(|to| to.region == Region::Weights).map(|to| to.offset.saturating_add(to.bytes));
        ends.max().unwrap_or(0)
    }
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Region {
    /// On the device; written while loading, never after.
    Weights,
    /// On the device: keys and values of all layers, by [`KvLayout`].
    Kv,
    /// On the device: activations, logits, and the state of the decode loop.
    Arena,
    /// Pinned memory of the host, which the device reads over the bus: tables too large for the budget.
    Host,
    /// On the device: the weights that are reserved for adapters, one behind the other in the plan's order. Zeros until
    /// a seat is filled; no launch writes there.
    Seats,
}

/// Bytes of the regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub weights: u64,
    pub kv: u64,
    pub arena: u64,
    pub host: u64,
    pub seats: u64,
}

impl Memory {
    pub const fn of(&self, region: Region) -> u64 {
        match region {
            Region::Weights => self.weights,
            Region::Kv => self.kv,
            Region::Arena => self.arena,
            Region::Host => self.host,
            Region::Seats => self.seats,
        }
    }

    /// Bytes on the device; `None` on overflow.
    pub fn device(&self) -> Option<u64> {
        self.weights.checked_add(self.kv)?.checked_add(self.arena)?.checked_add(self.seats)
    }
}

/// A compiled kernel. Its machine code and text are in [`Code`], in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// The symbol in its image.
    pub name: String,
    /// Everything that was chosen for it: unique in the plan, and enough to build it again.
    pub instance: String,
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// A bit for each parameter, set where the kernel writes to the memory it is given.
    pub written: u64,
    /// It waits for its predecessor itself, in every thread, before it touches what others write (PDL).
    pub waits: bool,
    /// It lets its successor start only once it has waited (PDL): what came before it has ended when that starts.
    pub waits_first: bool,
    /// A bit for each parameter, set where the kernel reads the memory it is given before it waits, though launches
    /// write there (PDL).
    pub early: u64,
}

impl Kernel {
    /// Whether it reads the memory that this argument is before it waits.
    pub const fn reads_early(&self, argument: usize) -> bool {
        argument < 64 && self.early >> argument & 1 == 1
    }

    /// Whether it writes to the memory that this argument is.
    pub const fn writes_to(&self, argument: usize) -> bool {
        argument < 64 && self.written >> argument & 1 == 1
    }
}

/// Machine code and source text of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    pub source: String,
    pub image: Image,
}

/// A cubin, or the text of a PTX module with a zero byte at its end. Read and written in one piece: byte by byte a plan
/// would take longer to read than its weights.
#[derive(Clone, PartialEq, Eq)]
pub struct Image(pub Vec<u8>);

impl Serialize for Image {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Image {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Image, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Image;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Image, E> {
                Ok(Image(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// A range of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    pub region: Region,
    pub offset: u64,
    pub bytes: u64,
}

/// An argument of a launch, in the order of the kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Argument {
    Memory(Range),
    U32(u32),
    F32(f32),
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    pub kernel: KernelIndex,
    pub grid: [u32; 3],
    #[serde(deserialize_with = "at_most::<64, _, _>")]
    pub arguments: Vec<Argument>,
    /// Programmatic dependent launch: it may start before its predecessor ends, and waits for it itself. Of a step, the
    /// predecessor is the one step it waits for.
    pub programmatic: bool,
}

/// One launch of a phase, and the values it computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CudaStep {
    pub launch: Launch,
    /// The earlier steps of the phase that it waits for, ascending: all that a graph has as edges. What these have
    /// waited for has ended, too. The edge of a programmatic launch is a programmatic one.
    #[serde(deserialize_with = "at_most::<64, _, _>")]
    pub after: Vec<u32>,
    /// The values of the unfused program that it computes, inner ones too: its meaning.
    #[serde(deserialize_with = "at_most::<64, _, _>")]
    pub nodes: Vec<ValueIndex>,
    /// Those of them that it writes to memory.
    #[serde(deserialize_with = "at_most::<16, _, _>")]
    pub outputs: Vec<StepOutput>,
    pub layer: Option<u32>,
    /// Bytes it must read: weights, keys and values at full window, activations.
    pub bytes: u64,
    pub flops: u64,
    /// Why this kernel, with these parameters.
    pub reason: String,
    /// The alternative that was not chosen, and what is known of it; empty if there is none.
    pub runner_up: String,
}

/// A value that a step writes to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOutput {
    pub value: ValueIndex,
    pub form: Form,
    /// From the first row's first element to the last row's last. Rows are evenly spaced: those that are part of wider
    /// ones have gaps. Of int8 all codes, then all scales, then all sums.
    pub place: Range,
}

/// What the numbers of a value are in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Form {
    F32,
    BF16,
    /// int8 codes, with a scale and a sum for each quantisation block of 32.
    Int8,
    /// The same of all but the last `loose` values, and behind it these as f32.
    Mixed {
        loose: u32,
    },
    /// The type of keys and values: rows of a chunk in flight to their pages.
    Kv,
    /// Of a routing: the ids of the experts a row goes to, as u32.
    Experts,
    F16,
}

/// What the rows of a phase are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PhaseKind {
    /// Tokens of as many sequences: each row has its record.
    Decode,
    /// A chunk of one prompt.
    Prefill,
    /// The patches of a picture.
    Tower,
}

/// The launches for one number of rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// "decode", "decode 8", "prefill 512".
    pub name: String,
    pub kind: PhaseKind,
    /// Rows of a chunk, or decoded rows, at most.
    pub rows: u32,
    #[serde(deserialize_with = "at_most::<16384, _, _>")]
    pub steps: Vec<CudaStep>,
    /// From this step on only the asked row is computed. A chunk without an asked row ends here; for several asked rows
    /// of one chunk the remaining steps run once each.
    pub asked_from: u32,
    /// From the logits to the next tokens, by the largest logit: one after another, after all steps. Of prefill, for
    /// the asked row.
    #[serde(deserialize_with = "at_most::<8, _, _>")]
    pub pick_largest: Vec<Launch>,
    /// The same, by temperature, top-k and top-p.
    #[serde(deserialize_with = "at_most::<8, _, _>")]
    pub pick_sampled: Vec<Launch>,
    /// Bytes of the arena it uses.
    pub arena_bytes: u64,
}

/// A tower's launches, and where they meet the host. Their values are those of the tower's own program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CudaTower {
    pub places: TowerPlaces,
    /// From the fewest patches to the most.
    #[serde(deserialize_with = "at_most::<8, _, _>")]
    pub phases: Vec<Phase>,
}

/// How one tensor is loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    pub weight: WeightId,
    /// Rows of the tensor in its file, of all experts together.
    pub rows: u64,
    #[serde(deserialize_with = "at_most::<16, _, _>")]
    pub parts: Vec<LoadPart>,
}

/// One destination of a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum LoadPart {
    /// The bytes as they are in the file.
    Copy { to: Range },
    /// A kernel's output, over whole rows, on `count.div_ceil(per_block)` blocks.
    Kernel {
        kernel: KernelIndex,
        /// Its three parameters.
        order: [LoadArgument; 3],
        to: Range,
        /// `count` for one row.
        row_count: u64,
        /// Bytes of `to` for one row.
        row_bytes: u64,
        per_block: u32,
    },
}

/// An argument of a kernel that loads weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadArgument {
    /// The tensor's bytes, from the first row of the batch.
    Blocks,
    /// The destination of those rows.
    Out,
    /// `row_count` for all of them.
    Count,
}

/// A table that is copied to the device unchanged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constant {
    pub name: String,
    pub to: Range,
    #[serde(deserialize_with = "at_most::<1048576, _, _>")]
    pub values: Vec<f32>,
}

/// What a pass did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassReport {
    pub name: String,
    pub about: String,
    pub enabled: bool,
    /// How often it applied, in the phase where it was most.
    pub applied: u32,
    #[serde(deserialize_with = "at_most::<4096, _, _>")]
    pub refused: Vec<Refusal>,
}

/// A place where a pass could have applied, and why it did not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub node: String,
    pub reason: String,
}
