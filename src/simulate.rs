//! A GPU plan without a GPU: its launches run in the simulator.
//!
//! The simulator needs the kernels as Rust functions, which a plan cannot hold. So the model is lowered again, and its kernels must
//! have the plan's names. The launches and their memory are the plan's own.

use anyhow::{Context, Result, bail, ensure};
use gemma4c_codegen::cuda::simulate::Simulator;
use gemma4c_codegen::target::Target;
use gemma4c_dsl::sim::Interleaving;
use gemma4c_models::gguf::Gguf;
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{CudaProgram, Range, Region};
use gemma4c_plan::embedded::host_start;
use gemma4c_runtime::{Backend, EmbeddedWeights, ModelLocation, Pick, Run, RuntimeError, Session, named};

use crate::compile::{self, CudaOptions, Files};

/// A session that runs a plan's launches in the simulator, one after the other: those of its first program, or of that for a GPU.
pub fn open(plan: Plan, location: &ModelLocation, gpu: Option<&str>) -> Result<Session> {
    open_with(plan, location, gpu, None)
}

/// The plan, of which that program is the first, and the simulator that runs its launches one after the other.
pub fn open_backend(plan: Plan, location: &ModelLocation, gpu: Option<&str>) -> Result<(Plan, Box<dyn Backend>)> {
    let (plan, simulator) = loaded(plan, location, gpu)?;
    let backend = backend(&plan, simulator, None)?;
    Ok((plan, backend))
}

/// The same of the first program, with the launches of a phase side by side, as far as their programmatic edges allow it. A launch that touches
/// what another has not finished with is an error.
pub fn open_chained(plan: Plan, location: &ModelLocation, interleaving: Interleaving) -> Result<Session> {
    open_with(plan, location, None, Some(interleaving))
}

fn open_with(
    plan: Plan,
    location: &ModelLocation,
    gpu: Option<&str>,
    chained: Option<Interleaving>,
) -> Result<Session> {
    let (plan, simulator) = loaded(plan, location, gpu)?;
    session(plan, simulator, chained)
}

/// A simulator with the kernels and the weights of a plan.
fn loaded(mut plan: Plan, location: &ModelLocation, gpu: Option<&str>) -> Result<(Plan, Simulator)> {
    ensure!(plan.cuda.is_some(), "the plan is for the CPU: nothing of it runs on a simulated GPU");
    plan.choose(named(&plan, gpu)?);
    let Some(cuda) = &plan.cuda else { bail!("the plan has lost its program") };
    let program = cuda.program.clone();
    let files = location.files(&plan)?;
    let open = |index: u32| files.get(index as usize).with_context(|| format!("file {index} is missing"));
    let file = Gguf::open(open(0)?)?;
    // A projector follows the model's own files.
    let of_projector = (!plan.towers.is_empty()).then_some(file.files().len() as u32);
    let projector = of_projector.map(|index| -> Result<Gguf> { Ok(Gguf::open(open(index)?)?) }).transpose()?;
    // A drafter's weights are the plan's last.
    let of_drafter = plan.weights.last().filter(|_| plan.drafter.is_some()).map(|weight| weight.file);
    let drafter_file = of_drafter.map(|index| -> Result<Gguf> { Ok(Gguf::open(open(index)?)?) }).transpose()?;
    let disabled = program.passes.iter().filter(|pass| !pass.enabled).map(|pass| pass.name.clone()).collect();
    let target = Target::of_program(&program.gpu);
    let target =
        target.with_context(|| format!("the plan is for {}, which this gemma4c does not know", program.gpu))?;
    let layout = &program.kv_layout;
    let options = CudaOptions {
        targets: vec![target.clone()],
        kv: program.kv,
        sequences: layout.slots,
        verified: program.verified_rows,
        snapshots: Some(layout.rings - layout.slots),
        // What a budget decided then is what it decides now, if it is as large as the plan.
        vram: program.memory.device(),
        disabled,
    };
    let chunk = program.phases.last().map_or(1, |phase| phase.rows);
    let of_plan = Files { file: &file, projector: projector.as_ref(), drafter: drafter_file.as_ref() };
    let (lowered, tensors) = compile::lower_again(&plan, of_plan, &options, &target, chunk)?;
    let same = lowered.program.kernels == program.kernels;
    ensure!(same, "the plan was made by another version of gemma4c: compile the model again to simulate it");
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
        simulator.load(&program, |weight| tensors[weight as usize])?;
    }
    Ok((plan, simulator))
}

/// A session over a plan's first program, in a simulator that has its kernels and its weights.
pub fn session(plan: Plan, simulator: Simulator, chained: Option<Interleaving>) -> Result<Session> {
    let backend = backend(&plan, simulator, chained)?;
    Ok(Session::with_backend(plan, backend)?)
}

/// The launches of a plan's first program, in a simulator that has its kernels and its weights.
fn backend(plan: &Plan, simulator: Simulator, chained: Option<Interleaving>) -> Result<Box<dyn Backend>> {
    let Some(cuda) = &plan.cuda else { bail!("the plan has no program for a GPU") };
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
