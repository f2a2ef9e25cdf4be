//! A plan on a GPU: loaded once, then replayed.
//!
//! Everything is allocated before the first token. A sequence of launches is captured as a CUDA graph when it is first run, and
//! replayed from then on. What changes from token to token lies in device memory, so no graph is ever updated.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{self as plan, Cuda, CudaProgram, Range, Region};

use super::load::{self, Loader};
use super::load_image::load_image;
use super::regions::Regions;
use super::words::Words;
use super::{Argument, CudaError, Device, Function, Graph, Launch, Pinned, Stream};
use crate::backend::{Backend, Pick, Run};
use crate::choose::choose;
use crate::embedded::EmbeddedWeights;
use crate::machine;
use crate::weights::Weights;
use crate::{ModelLocation, RuntimeError};

/// Bytes in flight to the device, at most: the tokens of dozens of chunks.
const MAILBOX: usize = 1 << 20;

/// Times and sizes of opening a plan on a GPU.
#[derive(Clone, Debug, Default)]
pub struct Opened {
    /// Parts of the time, in order. The kernels are loaded while the weights are.
    pub parts: Vec<(&'static str, Duration)>,
    /// Bytes of the model's files that were read.
    pub loaded: u64,
    /// Free on the device before anything of the plan was there.
    pub free_before: u64,
}

/// A plan on a GPU.
pub struct CudaBackend {
    // Fields are dropped in this order: graphs and functions before the memory they use.
    graphs: HashMap<Run, Graph>,
    pub(super) functions: Vec<Function>,
    regions: Regions,
    mailbox: Mailbox,
    outbox: Pinned,
    words: Words,
    pub(super) device: Device,
    pub(super) plan: Arc<Plan>,
    opened: Opened,
}

/// How a plan is put on a GPU.
#[derive(Clone, Debug, Default)]
pub struct OnGpu {
    /// The key of the program that is wanted, where the plan has several; else the one that [fits best](crate::choose).
    pub program: Option<String>,
    /// SMs that it may use; else all.
    pub multiprocessors: Option<u32>,
}

impl CudaBackend {
    /// Opens the first GPU and loads one of the plan's programs onto it; `progress` is told the weights' bytes done and the bytes there are.
    /// Returns the plan with that program alone.
    pub(crate) fn open(
        mut plan: Plan,
        location: &ModelLocation,
        on: &OnGpu,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Arc<Plan>, CudaBackend), RuntimeError> {
        if plan.cuda.is_none() {
            return Err(RuntimeError::NoProgram);
        }
        let mut clock = Clock::start();
        let source = match &plan.embedded {
            Some(embedded) => Source::Inside(EmbeddedWeights::open(embedded, location)?),
            None => Source::Model(Weights::open(&plan, location)?),
        };
        clock.lap("model file");
        let device = Device::open_part(0, on.multiprocessors)?;
        plan.choose(choose(&plan, &device.gpu, on.program.as_deref())?);
        let plan = Arc::new(plan);
        let Cuda { program, code } = plan.cuda.as_ref().ok_or(RuntimeError::NoProgram)?;
        let free_before = check_memory(&device, program, &source)?;
        clock.lap("GPU");
        let mut regions = Regions::allocate(&device, &program.memory)?;
        clock.lap("memory");
        let mut functions: Vec<Option<Function>> = (0..code.len()).map(|_| None).collect();
        let function = |kernel: usize| {
            let plan::Kernel { name, shared, .. } = &program.kernels[kernel];
            device.load(name, &code[kernel].image.0)?.function(name, *shared)
        };
        let first = match source {
            Source::Model(_) => load::kernels(program),
            Source::Inside(_) => Vec::new(),
        };
        for &kernel in &first {
            functions[kernel] = Some(function(kernel)?);
        }
        clock.lap("kernels that load");
        let others: Vec<usize> = (0..code.len()).filter(|kernel| !first.contains(kernel)).collect();
        let mut loaded = 0;
        let (rest, outcome) = std::thread::scope(|scope| {
            let load_rest = || others.iter().map(|kernel| function(*kernel)).collect::<Result<Vec<_>, CudaError>>();
            let rest = scope.spawn(load_rest);
            let (device, plan, regions) = (&device, &*plan, &mut regions);
            let mut progress = |done, total| {
                loaded = done;
                progress(done, total);
            };
            let outcome = match &source {
                Source::Model(weights) => {
                    let mut loader = Loader { device, plan, program, weights, functions: &functions, regions };
                    loader.load(&mut progress)
                }
                Source::Inside(inside) => load_image(device, program, inside, regions, &mut progress),
            };
            clock.lap("weights");
            (rest.join().expect("loading a kernel does not panic"), outcome)
        });
        outcome?;
        for (kernel, function) in others.into_iter().zip(rest?) {
            functions[kernel] = Some(function);
        }
        let functions = functions.into_iter().map(|function| function.expect("every kernel was loaded")).collect();
        let mailbox = Mailbox { pinned: device.pinned(MAILBOX)?, used: 0 };
        let outbox = device.pinned((plan.model.vocab_size as usize * 4).max(MAILBOX))?;
        let words = Words::new(&device)?;
        clock.lap("the other kernels");
        let opened = Opened { parts: clock.parts, loaded, free_before };
        let graphs = HashMap::new();
        let own = Arc::clone(&plan);
        let mut backend = CudaBackend { graphs, functions, regions, mailbox, outbox, words, device, plan: own, opened };
        backend.prepare()?;
        Ok((plan, backend))
    }

    /// Launches the kernels that derive weights from loaded ones (bf16 copies).
    fn prepare(&mut self) -> Result<(), CudaError> {
        let started = Instant::now();
        self.program().prepare.iter().try_for_each(|launch| self.launch(launch, false))?;
        self.device.synchronize()?;
        self.opened.parts.push(("copies of weights", started.elapsed()));
        Ok(())
    }

    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Device memory in use now that was free before the plan was opened, whichever process uses it.
    pub fn memory_taken(&self) -> Result<u64, CudaError> {
        Ok(self.opened.free_before.saturating_sub(self.device.memory()?.0 as u64))
    }

    pub(super) fn program(&self) -> &CudaProgram {
        program(&self.plan)
    }

    /// The launches of a run; an error for a run that the plan does not have.
    pub(super) fn launches(&self, run: Run) -> Result<Vec<&plan::Launch>, RuntimeError> {
        let program = self.program();
        let phase = program.phases.get(run.phase);
        let steps = phase.and_then(|phase| phase.steps.get(run.steps.0..run.steps.1));
        let Some(steps) = steps else { return Err(RuntimeError::NoSuchRun(run)) };
        let pick = match run.pick {
            Pick::None => &[][..],
            Pick::Largest => &program.pick_largest,
            Pick::Sampled => &program.pick_sampled,
        };
        Ok(steps.iter().map(|step| &step.launch).chain(pick).collect())
    }

    /// Queues one launch.
    #[allow(unsafe_code)]
    pub(super) fn launch(&self, launch: &plan::Launch, may_overlap: bool) -> Result<(), CudaError> {
        let arguments: Vec<Argument<'_>> = launch
            .arguments
            .iter()
            .map(|argument| match argument {
                plan::Argument::Memory(range) => Argument::Address(self.regions.address(range)),
                plan::Argument::U32(value) => Argument::U32(*value),
                plan::Argument::F32(value) => Argument::F32(*value),
            })
            .collect();
        // GPUs before Hopper have no programmatic edges.
        let dependent = launch.programmatic && may_overlap && self.device.gpu.compute_capability.0 >= 9;
        let block = self.program().kernels[launch.kernel as usize].block;
        // SAFETY: the ranges were checked against the regions, which live as long as `self`; that the kernel stays within
        // them is the compiler's promise.
        unsafe {
            self.functions[launch.kernel as usize].launch(Launch { grid: launch.grid, block, dependent }, &arguments)
        }
    }

    /// Whether a run will be repeated and is worth a graph: a whole phase, or one of its two parts.
    fn is_whole(&self, run: Run) -> bool {
        self.program().phases.get(run.phase).is_some_and(|phase| {
            let (asked_from, end) = (phase.asked_from as usize, phase.steps.len());
            [(0, asked_from), (asked_from, end), (0, end)].contains(&run.steps)
        })
    }

    /// The graph of a run, recorded if this is the first time.
    pub(super) fn graph(&mut self, run: Run) -> Result<&Graph, RuntimeError> {
        if !self.graphs.contains_key(&run) {
            let launches = self.launches(run)?;
            let graph = self.device.record(|| launches.iter().try_for_each(|launch| self.launch(launch, true)))?;
            self.graphs.insert(run, graph);
        }
        match self.graphs.entry(run) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(_) => unreachable!("inserted just now"),
        }
    }
}

fn program(plan: &Plan) -> &CudaProgram {
    &plan.cuda.as_ref().expect("a backend is only made for a plan that has one").program
}

/// Where a GPU's weights come from.
enum Source {
    /// The model's files: they are repacked on the device.
    Model(Weights),
    /// The plan's own file, as they will lie in memory.
    Inside(EmbeddedWeights),
}

/// Refuses what cannot fit before anything is allocated; returns the free bytes.
fn check_memory(device: &Device, program: &CudaProgram, source: &Source) -> Result<u64, RuntimeError> {
    let free = device.memory()?.0 as u64;
    let staging = if matches!(source, Source::Model(_)) { load::STAGING } else { 0 };
    let needed = program.memory.device().and_then(|bytes| bytes.checked_add(staging)).unwrap_or(u64::MAX);
    if needed > free {
        return Err(RuntimeError::OutOfDeviceMemory { gpu: device.gpu.name.clone(), needed, free });
    }
    match machine::physical_memory() {
        Some(available) if program.memory.host > available => {
            let what = "tables that the GPU reads from the host";
            Err(RuntimeError::OutOfMemory { what, needed: program.memory.host, available })
        }
        _ => Ok(free),
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> String {
        self.device.gpu.name.clone()
    }

    #[allow(unsafe_code)]
    fn write(&mut self, to: Range, bytes: &[u8]) -> Result<(), RuntimeError> {
        if to.region == Region::Host {
            self.device.synchronize()?;
            return Ok(self.regions.write(&to, bytes)?);
        }
        let mut address = self.regions.address(&to);
        for piece in bytes.chunks(MAILBOX) {
            let place = self.mailbox.put(&self.device, piece)?;
            // SAFETY: the range lies in its region; the mailbox writes nothing over it before it has left.
            unsafe { self.mailbox.pinned.copy_to(place, address, Stream::Launches) }?;
            address += piece.len() as u64;
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn read(&mut self, from: Range, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        if from.region == Region::Host {
            self.device.synchronize()?;
            bytes.copy_from_slice(self.regions.host(&from));
            return Ok(());
        }
        let mut address = self.regions.address(&from);
        for piece in bytes.chunks_mut(self.outbox.len()) {
            // SAFETY: the range lies in its region, and the device has been waited for before anybody looks.
            unsafe { self.outbox.copy_from(address, 0..piece.len(), Stream::Launches) }?;
            self.device.synchronize()?;
            piece.copy_from_slice(&self.outbox.as_slice()[..piece.len()]);
            address += piece.len() as u64;
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn run(&mut self, run: Run) -> Result<(), RuntimeError> {
        if !self.is_whole(run) {
            return Ok(self.launches(run)?.into_iter().try_for_each(|launch| self.launch(launch, true))?);
        }
        // SAFETY: memory and functions live as long as the graph; each launch is as sound here as it is alone.
        Ok(unsafe { self.graph(run)?.replay() }?)
    }

    fn send_back(&mut self, from: Range) -> Result<(), RuntimeError> {
        let address = self.regions.address(&from);
        Ok(self.words.send(address)?)
    }

    fn receive(&mut self) -> Result<u32, RuntimeError> {
        Ok(self.words.receive()?)
    }

    fn wait(&mut self) -> Result<(), RuntimeError> {
        Ok(self.device.synchronize()?)
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Memory must not be freed under a running kernel; if the GPU is lost, none runs.
        let _ = self.device.synchronize();
    }
}

/// A pinned buffer for bytes on their way to the device, so that the writer need not wait for the copy.
struct Mailbox {
    pinned: Pinned,
    used: usize,
}

impl Mailbox {
    /// Adds at most [`MAILBOX`] bytes. They stay unchanged until the buffer is emptied, which happens when it is full.
    fn put(&mut self, device: &Device, bytes: &[u8]) -> Result<std::ops::Range<usize>, CudaError> {
        if self.used + bytes.len() > self.pinned.len() {
            device.synchronize()?;
            self.used = 0;
        }
        let place = self.used..self.used + bytes.len();
        self.pinned.as_mut_slice()[place.clone()].copy_from_slice(bytes);
        self.used = place.end.next_multiple_of(16);
        Ok(place)
    }
}

/// Measures the parts of opening.
struct Clock {
    parts: Vec<(&'static str, Duration)>,
    last: Instant,
}

impl Clock {
    fn start() -> Clock {
        Clock { parts: Vec::new(), last: Instant::now() }
    }

    fn lap(&mut self, part: &'static str) {
        self.parts.push((part, self.last.elapsed()));
        self.last = Instant::now();
    }
}
