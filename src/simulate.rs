//! A GPU plan without a GPU: its launches run in the simulator.
//!
//! The simulator needs the kernels as Rust functions, which a plan cannot hold. So the model is lowered again, and its
//! kernels must have the plan's names. The launches and their memory are the plan's own.

use std::cell::RefCell;

use gemma4c_codegen::cuda::simulate::Simulator;
use gemma4c_dsl::sim::Interleaving;
use gemma4c_plan::cuda::{CudaProgram, Range, Region};
use gemma4c_plan::embedded::host_start;
use gemma4c_plan::{Adapter, Plan};
use gemma4c_runtime::{Backend, EmbeddedWeights, ModelLocation, Pick, Run, RuntimeError, Session, named};

use crate::adapters::{self, For};
use crate::error::Error;
use crate::options::{AdapterAt, Options};
use crate::pipeline::{Declared, Files, Source};

/// A session that runs a plan's launches in the simulator, one after the other: those of its first program, or of that
/// for a GPU.
pub fn open(plan: Plan, location: &ModelLocation, gpu: Option<&str>) -> Result<Session, Error> {
    open_with(plan, location, gpu, None)
}

/// The plan, of which that program is the first, and the simulator that runs its launches one after the other.
pub fn open_backend(
    plan: Plan,
    location: &ModelLocation,
    gpu: Option<&str>,
) -> Result<(Plan, Box<dyn Backend>), Error> {
    let (plan, simulator) = loaded(plan, location, gpu)?;
    let backend = backend(&plan, simulator, None)?;
    Ok((plan, backend))
}

/// The same of the first program, with the launches of a phase side by side, as far as their programmatic edges allow
/// it. A launch that touches what another has not finished with is an error.
pub fn open_chained(plan: Plan, location: &ModelLocation, interleaving: Interleaving) -> Result<Session, Error> {
    open_with(plan, location, None, Some(interleaving))
}

fn open_with(
    plan: Plan,
    location: &ModelLocation,
    gpu: Option<&str>,
    chained: Option<Interleaving>,
) -> Result<Session, Error> {
    let (plan, simulator) = loaded(plan, location, gpu)?;
    session(plan, simulator, chained)
}

/// A simulator with the kernels and the weights of a plan.
fn loaded(mut plan: Plan, location: &ModelLocation, gpu: Option<&str>) -> Result<(Plan, Simulator), Error> {
    if plan.cuda.is_none() {
        return Err(without_program());
    }
    plan.choose(named(&plan, gpu)?);
    let program = plan.cuda.as_ref().ok_or_else(without_program)?.program.clone();
    let options = Options::of_program(&plan, &program)?;
    let files = files(&plan, location)?;
    let declared = Declared::new(&files, &options)?;
    let lowered = declared.lower(&options.gpus[0])?;
    if lowered.program.kernels != program.kernels {
        let why = "the plan was made by another version of gemma4c: compile the model again to simulate it";
        return Err(Error::Option(why.into()));
    }
    let mut simulator = Simulator::new(&program, lowered.instances);
    if let Some(embedded) = &plan.embedded {
        let weights = EmbeddedWeights::open(embedded, location)?;
        let (loaded, host) = (program.loaded_bytes(), program.memory.host);
        let range = |region, bytes| Range { region, offset: 0, bytes };
        simulator.write(range(Region::Weights, loaded), &weights.bytes()[..loaded as usize]);
        let start = host_start(&program).unwrap_or(loaded).min(weights.bytes().len() as u64);
        simulator.write(range(Region::Host, host), &weights.bytes()[start as usize..][..host as usize]);
        simulator.prepare(&program)?;
    } else {
        let failed = RefCell::new(None);
        simulator.load(&program, |weight| {
            let bytes = declared.bytes(weight.index()).unwrap_or_else(|error| {
                failed.replace(Some(error));
                None
            });
            bytes.unwrap_or_else(|| vec![0; plan.weights[weight.index()].bytes as usize].into())
        })?;
        failed.into_inner().map_or(Ok(()), Err)?;
    }
    Ok((plan, simulator))
}

fn without_program() -> Error {
    Error::Option("the plan is for the CPU: nothing of it runs on a simulated GPU".into())
}

/// The files that a plan was made of. Adapters follow the model's own files, a projector them, and a drafter's weights
/// are the plan's last.
fn files(plan: &Plan, location: &ModelLocation) -> Result<Files, Error> {
    let paths = location.files(plan)?;
    let open = |index: usize| match paths.get(index) {
        Some(path) => Source::open(path),
        None => Err(Error::Option(format!("file {index} is missing"))),
    };
    let text = open(0)?;
    let parts = text.file().map_or(1, |file| file.files().len());
    let projector = (!plan.towers.is_empty()).then_some(parts + plan.model.adapters.len());
    let projector = projector.map(open).transpose()?;
    let model = For { text: &text, projector: projector.as_deref() };
    let adapter = |(number, adapter): (usize, &Adapter)| {
        let path = paths.get(adapter.file as usize);
        let path = path.ok_or_else(|| Error::Option(format!("file {} is missing", adapter.file)))?.clone();
        adapters::open_one((number, &AdapterAt { path, scale: adapter.scale }), model, !adapter.is_merged)
    };
    let mut adapters = plan.model.adapters.iter().enumerate().map(adapter).collect::<Result<Vec<_>, Error>>()?;
    let is_merged = plan.model.adapters.iter().any(|adapter| adapter.is_merged);
    let (text, merged) = match (text, adapters.pop_if(|_| is_merged)) {
        (Source::File(file), Some(adapter)) => {
            let (file, merged) = adapters::merge(file, adapter)?;
            (Source::File(file), Some(merged))
        }
        (text, _) => (text, None),
    };
    let drafter = plan.weights.last().filter(|_| plan.drafter.is_some()).map(|weight| weight.file as usize);
    Ok(Files { text, adapters, merged, projector, drafter: drafter.map(open).transpose()? })
}

/// A session over a plan's first program, in a simulator that has its kernels and its weights.
pub fn session(plan: Plan, simulator: Simulator, chained: Option<Interleaving>) -> Result<Session, Error> {
    let backend = backend(&plan, simulator, chained)?;
    Ok(Session::with_backend(plan, backend)?)
}

/// The launches of a plan's first program, in a simulator that has its kernels and its weights.
fn backend(plan: &Plan, simulator: Simulator, chained: Option<Interleaving>) -> Result<Box<dyn Backend>, Error> {
    let cuda = plan.cuda.as_ref().ok_or_else(without_program)?;
    let (program, sent) = (cuda.program.clone(), Default::default());
    Ok(Box::new(Simulated { simulator, program, chained, sent, tier: Vec::new() }))
}

struct Simulated {
    simulator: Simulator,
    program: CudaProgram,
    /// How the launches of a phase overlap, if they do.
    chained: Option<Interleaving>,
    sent: std::collections::VecDeque<Vec<u32>>,
    tier: Vec<u8>,
}

impl Backend for Simulated {
    fn name(&self) -> String {
        "a simulated GPU".into()
    }

    fn write(&mut self, to: Range, bytes: &[u8]) -> Result<(), RuntimeError> {
        self.simulator.write(to, bytes);
        Ok(())
    }

    fn read(&mut self, from: Range, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        bytes.copy_from_slice(self.simulator.read(from));
        Ok(())
    }

    fn run(&mut self, run: Run) -> Result<(), RuntimeError> {
        let phase = self.program.phase(run.phase).ok_or(RuntimeError::NoSuchRun(run))?;
        let picks = match run.pick {
            Pick::None => &[][..],
            Pick::Largest => &phase.pick_largest,
            Pick::Sampled => &phase.pick_sampled,
        };
        let phase = phase.clone();
        let picks = picks.to_vec();
        let steps = phase.steps[run.steps.0..run.steps.1].iter().map(|step| &step.launch);
        let mut launches = steps.chain(&picks);
        let result = match self.chained {
            Some(interleaving) => self.simulator.launch_chain(launches, interleaving),
            None => launches.try_for_each(|launch| self.simulator.launch(launch)),
        };
        result.map_err(|fault| RuntimeError::Backend(fault.to_string()))
    }

    fn send_back(&mut self, from: Range) -> Result<(), RuntimeError> {
        let words = self.simulator.read(from).chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        self.sent.push_back(words.collect());
        Ok(())
    }

    fn receive(&mut self) -> Result<Vec<u32>, RuntimeError> {
        self.sent.pop_front().ok_or_else(|| RuntimeError::Backend("nothing was sent back".into()))
    }

    fn copy(&mut self, from: Range, to: Range) -> Result<(), RuntimeError> {
        let bytes = self.simulator.read(from).to_vec();
        self.simulator.write(to, &bytes);
        Ok(())
    }

    fn reserve_tier(&mut self, bytes: u64) -> Result<(), RuntimeError> {
        self.tier = vec![0; bytes as usize];
        Ok(())
    }

    fn save(&mut self, from: Range, at: u64) -> Result<(), RuntimeError> {
        self.tier[at as usize..][..from.bytes as usize].copy_from_slice(self.simulator.read(from));
        Ok(())
    }

    fn load(&mut self, at: u64, to: Range) -> Result<(), RuntimeError> {
        self.simulator.write(to, &self.tier[at as usize..][..to.bytes as usize]);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), RuntimeError> {
        Ok(())
    }
}
