//! A plan on a GPU: loaded once, then replayed.
//!
//! Everything is allocated before the first token, and every CUDA graph is built from the plan's steps and their edges,
//! instantiated and uploaded. What changes from token to token lies in device memory, so no graph is ever updated.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{self as plan, Cuda, CudaProgram, Range, Region};

use super::load::{self, Loader};
use super::load_image::load_image;
use super::mailbox::{MAILBOX, Mailbox};
use super::regions::Regions;
use super::words::Words;
use super::{Argument, CudaError, Device, Function, Graph, GraphBuilder, Launch, Node, Pinned, Stream};
use crate::backend::{Backend, MemoryUse, Pick, Run};
use crate::choose::choose;
use crate::embedded::EmbeddedWeights;
use crate::machine;
use crate::runs::replays;
use crate::weights::Weights;
use crate::{ModelLocation, RuntimeError};

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
    graphs: HashMap<Vec<Run>, Graph>,
    pub(super) functions: Vec<Function>,
    regions: Regions,
    mailbox: Mailbox,
    outbox: Pinned,
    /// Host memory for kept prefixes.
    tier: Option<Pinned>,
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
    /// Bytes of the GPU's memory that it may take: it gets as many pages as there is room for and use of. Else it gets
    /// those that it was compiled with, or as many of them as there is room for.
    pub memory: Option<u64>,
}

impl CudaBackend {
    /// Opens the first GPU and loads one of the plan's programs onto it; `progress` is told the weights' bytes done and
    /// the bytes there are. Returns the plan with that program alone.
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
        let free_before = fit_pages(&device, &mut plan, &source, on.memory)?;
        let plan = Arc::new(plan);
        let Cuda { program, code } = plan.cuda.as_ref().ok_or(RuntimeError::NoProgram)?;
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
        // The masks of a whole batch go there at once.
        let masks = 4 * plan::Places::mask_words(plan.model.vocab_size) as usize * program.decode_rows() as usize;
        let mailbox = Mailbox::new(&device, MAILBOX.max(masks))?;
        let outbox = device.pinned((plan.model.vocab_size as usize * 4).max(MAILBOX))?;
        let words = Words::new(&device, program.decode_rows() as usize)?;
        clock.lap("the other kernels");
        let opened = Opened { parts: clock.parts, loaded, free_before };
        let graphs = HashMap::new();
        let own = Arc::clone(&plan);
        let tier = None;
        let mut backend =
            CudaBackend { graphs, functions, regions, mailbox, outbox, tier, words, device, plan: own, opened };
        backend.prepare()?;
        backend.build_graphs()?;
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

    /// Builds the graph of everything that feeding tokens asks for.
    fn build_graphs(&mut self) -> Result<(), RuntimeError> {
        let started = Instant::now();
        for runs in replays(self.program()) {
            let mut graph = self.device.graph()?;
            let mut before = Vec::new();
            for run in &runs {
                before = self.add_run(&mut graph, *run, &before)?;
            }
            self.graphs.insert(runs, graph.finish()?);
        }
        self.device.synchronize()?;
        self.opened.parts.push(("graphs", started.elapsed()));
        Ok(())
    }

    /// Adds the launches of a run to a graph, after some nodes of it. Returns those that none of them waits for.
    fn add_run(&self, graph: &mut GraphBuilder, run: Run, before: &[Node]) -> Result<Vec<Node>, RuntimeError> {
        let (mut nodes, mut is_last): (Vec<Node>, Vec<bool>) = (Vec::new(), Vec::new());
        for Queued { launch, after } in self.launches(run)? {
            after.iter().for_each(|position| is_last[*position] = false);
            let own: Vec<Node> = after.iter().map(|position| nodes[*position]).collect();
            // A launch that waits for several would wait for one of them; the first ones of a run overlap with nothing
            // before it.
            let overlaps = own.len() == 1;
            let after = if own.is_empty() { before } else { &own };
            nodes.push(self.add(graph, launch, overlaps, after)?);
            is_last.push(true);
        }
        Ok(nodes.into_iter().zip(is_last).filter(|(_, is_last)| *is_last).map(|(node, _)| node).collect())
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

    /// The launches of a run, in order; an error for a run that the plan does not have.
    pub(super) fn launches(&self, run: Run) -> Result<Vec<Queued<'_>>, RuntimeError> {
        let program = self.program();
        let phase = program.phase(run.phase).ok_or(RuntimeError::NoSuchRun(run))?;
        let steps = phase.steps.get(run.steps.0..run.steps.1).ok_or(RuntimeError::NoSuchRun(run))?;
        let pick = match run.pick {
            Pick::None => &[][..],
            Pick::Largest => &phase.pick_largest,
            Pick::Sampled => &phase.pick_sampled,
        };
        Ok(with_edges(steps, run.steps.0, pick))
    }

    /// Adds one launch to a graph.
    pub(super) fn add(
        &self,
        graph: &mut GraphBuilder,
        launch: &plan::Launch,
        may_overlap: bool,
        after: &[Node],
    ) -> Result<Node, CudaError> {
        let function = &self.functions[launch.kernel as usize];
        graph.launch(function, self.shape(launch, may_overlap), &self.arguments(launch), after)
    }

    /// The arguments of a launch as addresses and numbers.
    fn arguments(&self, launch: &plan::Launch) -> Vec<Argument<'static>> {
        let argument = |argument: &plan::Argument| match argument {
            plan::Argument::Memory(range) => Argument::Address(self.regions.address(range), range.bytes),
            plan::Argument::U32(value) => Argument::U32(*value),
            plan::Argument::F32(value) => Argument::F32(*value),
        };
        launch.arguments.iter().map(argument).collect()
    }

    fn shape(&self, launch: &plan::Launch, may_overlap: bool) -> Launch {
        // GPUs before Hopper have no programmatic dependent launch.
        let dependent = launch.programmatic && may_overlap && self.device.gpu.compute_capability.0 >= 9;
        Launch { grid: launch.grid, block: self.program().kernels[launch.kernel as usize].block, dependent }
    }

    /// Queues one launch.
    #[allow(unsafe_code)]
    pub(super) fn launch(&self, launch: &plan::Launch, may_overlap: bool) -> Result<(), CudaError> {
        let (function, shape) = (&self.functions[launch.kernel as usize], self.shape(launch, may_overlap));
        // SAFETY: the ranges were checked against the regions, which live as long as `self`; that the kernel stays
        // within them is the compiler's promise.
        unsafe { function.launch(shape, &self.arguments(launch)) }
    }

    /// The graph of a run; `None` for one that feeding tokens does not ask for, such as a single step.
    pub(super) fn graph(&self, run: Run) -> Option<&Graph> {
        self.graphs.get(&[run][..])
    }
}

/// A launch of a run, and the launches that it waits for, by their places in the run.
pub(super) struct Queued<'a> {
    pub launch: &'a plan::Launch,
    pub after: Vec<usize>,
}

/// Steps of a phase, the first of which is number `first`, and the launches that follow them: each of these after the
/// one before it, and the first after all steps. What lies before the first step has ended.
fn with_edges<'a>(steps: &'a [plan::CudaStep], first: usize, then: &'a [plan::Launch]) -> Vec<Queued<'a>> {
    let mut all: Vec<Queued<'a>> = Vec::with_capacity(steps.len() + then.len());
    let mut is_last = vec![true; steps.len()];
    for step in steps {
        let after: Vec<usize> = step.after.iter().filter_map(|before| (*before as usize).checked_sub(first)).collect();
        after.iter().for_each(|before| is_last[*before] = false);
        all.push(Queued { launch: &step.launch, after });
    }
    let mut after: Vec<usize> = (0..steps.len()).filter(|position| is_last[*position]).collect();
    for launch in then {
        all.push(Queued { launch, after });
        after = vec![all.len() - 1];
    }
    all
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

/// Gives the plan as many pages as there is room for. Refuses what cannot fit before anything is allocated; returns the
/// free bytes.
fn fit_pages(device: &Device, plan: &mut Plan, source: &Source, most: Option<u64>) -> Result<u64, RuntimeError> {
    let (context, free) = (plan.program.context, device.memory()?.0 as u64);
    let program = &mut plan.cuda.as_mut().ok_or(RuntimeError::NoProgram)?.program;
    let staging = if matches!(source, Source::Model(_)) { load::STAGING } else { 0 };
    let room = free.saturating_sub(staging).min(most.unwrap_or(u64::MAX));
    match program.pages_within(room, context, most.is_some()) {
        Ok(pages) => program.set_pages(pages),
        Err(needed) => {
            let (gpu, advice) = (device.gpu.name.clone(), program.advice(context, room));
            return Err(RuntimeError::OutOfDeviceMemory { gpu, needed: needed.saturating_add(staging), free, advice });
        }
    }
    match machine::physical_memory() {
        Some(available) if program.memory.host > available => {
            let what = "tables that the GPU reads from the host";
            let advice = "compile with more --vram, or take a smaller model";
            Err(RuntimeError::OutOfMemory { what, needed: program.memory.host, available, advice })
        }
        _ => Ok(free),
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> String {
        self.device.gpu.name.clone()
    }

    fn concrete(&mut self) -> Option<&mut dyn Any> {
        Some(self)
    }

    #[allow(unsafe_code)]
    fn write(&mut self, to: Range, bytes: &[u8]) -> Result<(), RuntimeError> {
        if to.region == Region::Host {
            self.device.synchronize()?;
            return Ok(self.regions.write(&to, bytes)?);
        }
        let mut address = self.regions.address(&to);
        for piece in bytes.chunks(MAILBOX) {
            let place = self.mailbox.put(piece)?;
            // SAFETY: the range lies in its region; the mailbox writes nothing over it before it has left.
            unsafe { self.mailbox.pinned().copy_to(place, address, Stream::Launches) }?;
            address += piece.len() as u64;
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn write_floats(&mut self, to: Range, values: &[f32]) -> Result<(), RuntimeError> {
        let mut address = self.regions.address(&to);
        for piece in values.chunks(MAILBOX / 4) {
            let place = self.mailbox.put_floats(piece)?;
            // SAFETY: the range lies in its region; the mailbox writes nothing over it before it has left.
            unsafe { self.mailbox.pinned().copy_to(place, address, Stream::Launches) }?;
            address += 4 * piece.len() as u64;
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
        let Some(graph) = self.graph(run) else {
            // The first may follow a copy or a graph, which a launch cannot overlap.
            let mut launches = self.launches(run)?.into_iter().enumerate();
            return Ok(launches.try_for_each(|(index, queued)| self.launch(queued.launch, index > 0))?);
        };
        // SAFETY: memory and functions live as long as the graph; each launch is as sound here as it is alone, and the
        // plan's edges were checked.
        Ok(unsafe { graph.replay() }?)
    }

    #[allow(unsafe_code)]
    fn run_all(&mut self, runs: &[Run]) -> Result<(), RuntimeError> {
        match self.graphs.get(runs) {
            // SAFETY: as above; each run waits for all of the one before it.
            Some(graph) => Ok(unsafe { graph.replay() }?),
            None => runs.iter().try_for_each(|run| self.run(*run)),
        }
    }

    fn send_back(&mut self, from: Range) -> Result<(), RuntimeError> {
        let address = self.regions.address(&from);
        Ok(self.words.send(address, from.bytes as usize)?)
    }

    fn receive(&mut self) -> Result<Vec<u32>, RuntimeError> {
        Ok(self.words.receive()?)
    }

    #[allow(unsafe_code)]
    fn copy(&mut self, from: Range, to: Range) -> Result<(), RuntimeError> {
        let bytes = from.bytes.min(to.bytes) as usize;
        // SAFETY: both ranges lie in their regions, which live as long as the device's streams have work.
        unsafe { self.device.copy(self.regions.address(&from), self.regions.address(&to), bytes) }?;
        Ok(())
    }

    fn reserve_tier(&mut self, bytes: u64) -> Result<(), RuntimeError> {
        self.tier = if bytes > 0 { Some(self.device.pinned(bytes as usize)?) } else { None };
        Ok(())
    }

    #[allow(unsafe_code)]
    fn save(&mut self, from: Range, at: u64) -> Result<(), RuntimeError> {
        let (address, place) = (self.regions.address(&from), at as usize..(at + from.bytes) as usize);
        let tier = self.tier.as_mut().filter(|tier| place.end <= tier.len()).ok_or_else(no_tier)?;
        // SAFETY: the range lies in its region; the bytes here are only ever read by copies in the same stream.
        Ok(unsafe { tier.copy_from(address, place, Stream::Launches) }?)
    }

    #[allow(unsafe_code)]
    fn load(&mut self, at: u64, to: Range) -> Result<(), RuntimeError> {
        let (address, place) = (self.regions.address(&to), at as usize..(at + to.bytes) as usize);
        let tier = self.tier.as_ref().filter(|tier| place.end <= tier.len()).ok_or_else(no_tier)?;
        // SAFETY: as above; the bytes are only ever written by copies in the same stream.
        Ok(unsafe { tier.copy_to(place, address, Stream::Launches) }?)
    }

    fn memory(&self) -> Result<Option<MemoryUse>, RuntimeError> {
        let planned = self.program().memory.device().unwrap_or(u64::MAX);
        Ok(Some(MemoryUse { planned, taken: self.memory_taken()? }))
    }

    fn wait(&mut self) -> Result<(), RuntimeError> {
        Ok(self.device.synchronize()?)
    }
}

fn no_tier() -> RuntimeError {
    RuntimeError::Backend("the host memory for kept prefixes was not reserved".into())
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Memory must not be freed under a running kernel; if the GPU is lost, none runs.
        let _ = self.device.synchronize();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support;

    #[test]
    fn a_part_of_a_phase_waits_for_nothing_before_it() {
        let program = support::plan().cuda.unwrap().program;
        let phase = &program.phases[1];
        let steps = &phase.steps;
        let edges = |steps, first, then| -> Vec<Vec<usize>> {
            with_edges(steps, first, then).into_iter().map(|queued| queued.after).collect()
        };
        assert_eq!(edges(steps, 0, &phase.pick_largest), [vec![], vec![0], vec![1], vec![2]]);
        assert_eq!(edges(&steps[1..], 1, &[]), [vec![], vec![0]]);
        assert_eq!(edges(&[], 3, &phase.pick_largest), [Vec::<usize>::new()]);
        // A fork: what follows the steps waits for both ends.
        let mut forked = steps.clone();
        forked[2].after = vec![0];
        assert_eq!(edges(&forked, 0, &phase.pick_sampled), [vec![], vec![0], vec![0], vec![1, 2]]);
    }
}
