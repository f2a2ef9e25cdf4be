//! Runs a GPU's program in the simulator: the same loads, launches, arguments and offsets, on kernels' Rust bodies.
//!
//! What it shows is that fusion, schedule, memory and kernels are right together. Bounds are checked at every access,
//! against the ranges the plan gives; races within a launch and unwritten outputs are the business of the kernels' own
//! cases, where they are looked for much more closely. Races between launches are the plan's:
//! [`Simulator::launch_chain`] finds them.

use std::borrow::Cow;

use gemma4c_dsl::Instance;
use gemma4c_dsl::sim::{self, AllocationId, ChainStep, Interleaving, Memory, Options, View};
use gemma4c_plan::WeightId;
use gemma4c_plan::cuda::{Argument, CudaProgram, Launch, LoadArgument, LoadPart, Range, Region};

/// Why a launch did not work.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    #[error("kernel {instance}: {source}")]
    Launch { instance: String, source: sim::LaunchError },
    #[error("a chain of {launches} launches: {source}")]
    Chain { launches: usize, source: sim::LaunchError },
    #[error("{tensor}: {found} bytes were given, {expected} expected")]
    Tensor { tensor: u32, expected: u64, found: u64 },
}

/// A program with its memory.
pub struct Simulator {
    memory: Memory,
    regions: [AllocationId; 5],
    instances: Vec<Instance>,
    options: Options,
}

impl Simulator {
    /// Empty memory. `instances` are the program's kernels, in order.
    pub fn new(program: &CudaProgram, instances: Vec<Instance>) -> Simulator {
        let mut memory = Memory::new();
        let all = [Region::Weights, Region::Kv, Region::Arena, Region::Host, Region::Seats];
        let regions = all.map(|region| memory.allocate(program.memory.of(region) as usize));
        let options = Options { unchecked: true, ..Options::default() };
        Simulator { memory, regions, instances, options }
    }

    /// Brings the weights to the device, by the program's own kernels. `bytes` gives a tensor's bytes in its file.
    pub fn load<'b, B: Into<Cow<'b, [u8]>>>(
        &mut self,
        program: &CudaProgram,
        bytes: impl Fn(WeightId) -> B,
    ) -> Result<(), SimulateError> {
        for constant in &program.constants {
            let values: Vec<u8> = constant.values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.write(constant.to, &values);
        }
        for load in &program.loads {
            let blocks: Cow<'b, [u8]> = bytes(load.weight).into();
            let mut staging = Memory::new();
            let source = staging.allocate(blocks.len());
            staging.bytes_mut(source).copy_from_slice(&blocks);
            for part in &load.parts {
                match *part {
                    LoadPart::Copy { to } => self.write(to, &blocks),
                    LoadPart::Kernel { kernel, order, to, row_count, per_block, .. } => {
                        let count = row_count * load.rows;
                        let instance = &self.instances[kernel as usize];
                        let out = staging.allocate(to.bytes as usize);
                        let arguments = order.map(|argument| match argument {
                            LoadArgument::Blocks => sim::Arg::Memory(staging.view(source)),
                            LoadArgument::Out => sim::Arg::Memory(staging.view(out)),
                            LoadArgument::Count => sim::Arg::U32(count as u32),
                        });
                        let grid = [count.div_ceil(per_block as u64) as u32, 1, 1];
                        sim::launch(instance, grid, &mut staging, &arguments, &self.options)
                            .map_err(|source| SimulateError::Launch { instance: instance.to_string(), source })?;
                        let made = staging.bytes(out).to_vec();
                        self.write(to, &made);
                    }
                }
            }
        }
        self.prepare(program)
    }

    /// Launches what derives weights from weights, once they are loaded.
    pub fn prepare(&mut self, program: &CudaProgram) -> Result<(), SimulateError> {
        program.prepare.iter().try_for_each(|launch| self.launch(launch))
    }

    fn region(&self, region: Region) -> AllocationId {
        self.regions[match region {
            Region::Weights => 0,
            Region::Kv => 1,
            Region::Arena => 2,
            Region::Host => 3,
            Region::Seats => 4,
        }]
    }

    fn view(&self, range: Range) -> View {
        View { allocation: self.region(range.region), offset: range.offset as usize, bytes: range.bytes as usize }
    }

    /// Overwrites the start of a range.
    pub fn write(&mut self, to: Range, bytes: &[u8]) {
        let (region, start) = (self.region(to.region), to.offset as usize);
        self.memory.bytes_mut(region)[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// The bytes of a range.
    pub fn read(&self, from: Range) -> &[u8] {
        let start = from.offset as usize;
        &self.memory.bytes(self.region(from.region))[start..start + from.bytes as usize]
    }

    fn arguments(&self, launch: &Launch) -> Vec<sim::Arg> {
        let argument = |argument: &Argument| match *argument {
            Argument::Memory(range) => sim::Arg::Memory(self.view(range)),
            Argument::U32(value) => sim::Arg::U32(value),
            Argument::F32(value) => sim::Arg::F32(value),
        };
        launch.arguments.iter().map(argument).collect()
    }

    /// One launch.
    pub fn launch(&mut self, launch: &Launch) -> Result<(), SimulateError> {
        let arguments = self.arguments(launch);
        let instance = &self.instances[launch.kernel as usize];
        sim::launch(instance, launch.grid, &mut self.memory, &arguments, &self.options)
            .map_err(|source| SimulateError::Launch { instance: instance.to_string(), source })
    }

    /// Launches as a GPU runs them: a programmatic one concurrently with its predecessor. What one of them may not
    /// touch before it has waited for another is an error.
    pub fn launch_chain<'l>(
        &mut self,
        launches: impl Iterator<Item = &'l Launch>,
        interleaving: Interleaving,
    ) -> Result<(), SimulateError> {
        let bound: Vec<_> = launches.map(|launch| (launch, self.arguments(launch))).collect();
        let instances = &self.instances;
        let step = |(launch, args): &'_ (&Launch, Vec<sim::Arg>)| ChainStep {
            instance: &instances[launch.kernel as usize],
            grid: launch.grid,
            args: args.clone(),
            dependent: launch.programmatic,
        };
        let steps: Vec<_> = bound.iter().map(step).collect();
        sim::launch_chain(&steps, &mut self.memory, interleaving, &self.options)
            .map_err(|source| SimulateError::Chain { launches: steps.len(), source })
    }
}
