//! A launch: binds arguments to an instance's parameters, runs the grid block by block, and looks at what was written.

use super::cluster::{Program, Turn};
use super::constants::Constants;
use super::fault::{Fault, FaultKind};
use super::grid::Grid;
use super::history::History;
use super::memory::{Memory, View};
use super::order::Order;
use super::region::{Region, SharedMemory};
use super::shadow::Shadow;
use super::stacks::RESIDENT_THREADS;
use super::stream::Link;
use super::thread::{Launch, LaunchName};
use crate::arguments::ArgumentValue;
use crate::definition::{Access, ParamKind};
use crate::elements::ElementType;
use crate::instance::Instance;
use crate::passing::Arguments;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// An argument of a launch.
pub type Arg = ArgumentValue<View>;

/// How a launch is run and how closely it is watched.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub order: Order,
    /// Bounds are always checked. Without this, races, initialisation, completeness of outputs and the dependency wait
    /// are not: whole plans run several times faster.
    pub unchecked: bool,
    /// Outputs, by name, that the launch does not write completely.
    pub partial_outputs: Vec<String>,
}

/// Why a launch did not happen, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("kernel {kernel}: it takes {expected} arguments, {found} were given")]
    Count { kernel: &'static str, expected: usize, found: usize },
    #[error("kernel {kernel}, argument `{param}`: {why}")]
    Argument { kernel: &'static str, param: String, why: String },
    #[error("kernel {kernel}: a grid of {grid:?} blocks")]
    Grid { kernel: &'static str, grid: [u32; 3] },
    #[error("kernel {kernel}: a grid of {grid:?} blocks cannot be cut into clusters of {blocks} along y")]
    Cluster { kernel: &'static str, grid: [u32; 3], blocks: u32 },
    #[error(transparent)]
    Fault(#[from] Box<Fault>),
}

/// Runs a kernel's Rust body over a grid.
pub fn launch(
    instance: &Instance,
    grid: [u32; 3],
    memory: &mut Memory,
    args: &[Arg],
    options: &Options,
) -> Result<(), LaunchError> {
    let launch = bind(instance, grid, memory, args, options, Binding::alone(instance))?;
    let arguments = Arguments { launch: &launch };
    run_grid(&launch, options, &|| (instance.def.run)(&arguments))
}

/// Runs `entry`, the kernel compiled for the host, over the same grid and under the same scheduler.
pub(crate) fn launch_host(
    instance: &Instance,
    grid: [u32; 3],
    memory: &mut Memory,
    args: &[Arg],
    options: &Options,
    entry: &dyn Fn(&[*const std::ffi::c_void]),
) -> Result<(), LaunchError> {
    // The host text reads memory through plain pointers: nothing could note its accesses.
    let options = Options { unchecked: true, ..options.clone() };
    let launch = bind(instance, grid, memory, args, &options, Binding { host: true, ..Binding::alone(instance) })?;
    let bases: Vec<*mut u8> =
        launch.regions.iter().map(|r| r.as_ref().map_or(std::ptr::null_mut(), |r| r.base)).collect();
    let pointers: Vec<*const std::ffi::c_void> = (0..args.len())
        .map(|index| match &launch.regions[index] {
            Some(_) => (&raw const bases[index]).cast(),
            None => (&raw const launch.scalars[index]).cast(),
        })
        .collect();
    run_grid(&launch, &options, &|| entry(&pointers))
}

fn run_grid(launch: &Launch<'_>, options: &Options, program: Program<'_>) -> Result<(), LaunchError> {
    let mut grid = Grid::new(launch, &options.order, program);
    loop {
        match grid.turn(RESIDENT_THREADS.saturating_sub(grid.resident())) {
            Ok(Turn::Progress) => continue,
            Ok(Turn::Done) => check_outputs(launch, options),
            Ok(Turn::Blocked) => grid.report_deadlock(),
            Err(_) => {}
        }
        break;
    }
    match launch.fault.take() {
        Some(fault) => Err(Box::new(fault).into()),
        None => Ok(()),
    }
}

pub(crate) fn check_outputs(launch: &Launch<'_>, options: &Options) {
    for region in launch.regions.iter().flatten() {
        let partial = options.partial_outputs.contains(&region.name);
        let (Some(shadow), Access::Output, false) = (&region.shadow, region.access, partial) else { continue };
        if let Some(at) = shadow.borrow().first_unwritten(region.shadow_start, region.bytes) {
            let element = (at - region.shadow_start) / region.element.size();
            let len = region.bytes / region.element.size();
            launch.fault.replace(Some(Fault {
                kernel: launch.kernel().to_string(),
                kind: FaultKind::UnwrittenOutput,
                block: [0; 3],
                thread: 0,
                line: "after the launch".to_string(),
                message: format!("`{}[{element}]` of {len} was never written", region.name),
            }));
            return;
        }
    }
}

/// What surrounds a launch.
pub(crate) struct Binding<'h> {
    pub link: Link,
    pub names: Rc<[LaunchName]>,
    /// By the position of the allocation; a launch alone has none.
    pub histories: Option<&'h BTreeMap<usize, Rc<RefCell<History>>>>,
    pub host: bool,
}

impl Binding<'static> {
    /// A launch with nothing before and after it.
    pub fn alone(instance: &Instance) -> Self {
        let names = Rc::new([LaunchName { kernel: instance.def.name, threads: instance.block() }]);
        Self { link: Link::alone(), names, histories: None, host: false }
    }
}

pub(crate) fn bind<'a>(
    instance: &'a Instance,
    grid: [u32; 3],
    memory: &mut Memory,
    args: &[Arg],
    options: &Options,
    binding: Binding<'_>,
) -> Result<Launch<'a>, LaunchError> {
    let kernel = instance.def.name;
    let params = instance.params();
    if params.len() != args.len() {
        return Err(LaunchError::Count { kernel, expected: params.len(), found: args.len() });
    }
    let blocks = grid.iter().map(|&n| u64::from(n)).product::<u64>();
    if blocks == 0 || blocks > u64::from(u32::MAX) {
        return Err(LaunchError::Grid { kernel, grid });
    }
    let cluster = instance.cluster();
    if !grid[1].is_multiple_of(cluster) {
        return Err(LaunchError::Cluster { kernel, grid, blocks: cluster });
    }
    // In a chain it is known what the predecessors write, and the wait matters for that alone.
    let must_wait = !options.unchecked && instance.def.launch.dependent && binding.histories.is_none();
    let mut regions = Vec::new();
    let mut scalars = Vec::new();
    for (param, arg) in params.iter().zip(args) {
        let refuse = |why: String| LaunchError::Argument { kernel, param: param.name.clone(), why };
        let (region, scalar) = match (param.def.kind, *arg) {
            (ParamKind::Memory { access, element }, Arg::Memory(view)) => {
                let element =
                    instance.values().element(element).ok_or_else(|| refuse(format!("element type `{element}`")))?;
                let size = element.size();
                if view.offset + view.bytes > memory.len(view.allocation) {
                    return Err(refuse(format!("{} bytes at {} leave the allocation", view.bytes, view.offset)));
                }
                if view.offset % size != 0 || view.bytes % size != 0 {
                    return Err(refuse(format!(
                        "{} bytes at {} do not hold whole elements of {size}",
                        view.bytes, view.offset
                    )));
                }
                let base = memory.bytes_mut(view.allocation)[view.offset..].as_mut_ptr();
                let region = Region {
                    name: param.name.clone(),
                    access,
                    element,
                    thin: instance.has_thin(param),
                    base,
                    bytes: view.bytes,
                    checked: false,
                    after_wait: must_wait && access != Access::Weights,
                    early: instance.reads_early(&param.name),
                    only_read: instance.only_reads(&param.name),
                    shadow: None,
                    history: binding.histories.and_then(|all| all.get(&memory.position(view.allocation)).cloned()),
                    shadow_start: view.offset,
                };
                (Some((view, region)), 0)
            }
            (ParamKind::Scalar("u32"), Arg::U32(value)) => (None, u64::from(value)),
            (ParamKind::Scalar("i32"), Arg::I32(value)) => (None, u64::from(value as u32)),
            (ParamKind::Scalar("u64"), Arg::U64(value)) => (None, value),
            (ParamKind::Scalar("f32"), Arg::F32(value)) => (None, u64::from(value.to_bits())),
            (kind, arg) => return Err(refuse(format!("the kernel wants {kind:?}, {arg:?} was given"))),
        };
        regions.push(region);
        scalars.push(scalar);
    }
    for (weights, reader) in regions.iter().flatten().filter(|(_, region)| region.access == Access::Weights) {
        let overlaps = |view: &View| {
            let (a, b) = (weights, view);
            a.allocation == b.allocation && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
        };
        if let Some((_, writer)) = regions.iter().flatten().find(|(view, r)| r.access.writes() && overlaps(view)) {
            let why = format!("weights are constant while a kernel runs, but `{}` writes the same memory", writer.name);
            return Err(LaunchError::Argument { kernel, param: reader.name.clone(), why });
        }
    }
    if !options.unchecked {
        attach_shadows(&mut regions, memory);
    }
    for (_, region) in regions.iter_mut().flatten() {
        region.checked = region.shadow.is_some() || region.history.is_some() || region.after_wait || region.only_read;
    }
    let launch = Launch {
        instance,
        grid,
        threads: instance.block(),
        cluster,
        constants: Constants::default(),
        regions: regions.into_iter().map(|region| region.map(|(_, region)| region)).collect(),
        scalars,
        spare: RefCell::new(Vec::new()),
        link: binding.link,
        names: binding.names,
        checks: !options.unchecked,
        thin: instance.is_thin(),
        must_wait,
        host: binding.host,
        clock: Cell::new(0),
        fault: RefCell::new(None),
    };
    check_shared(&launch)?;
    Ok(launch)
}

/// Memory that somebody may write during the launch is shadowed; the rest cannot race.
fn attach_shadows(regions: &mut [Option<(View, Region)>], memory: &Memory) {
    let mut shadows = BTreeMap::new();
    for (view, region) in regions.iter().flatten() {
        let id = memory.position(view.allocation);
        let (writes, granule) = shadows.entry(id).or_insert((false, usize::MAX));
        *writes |= region.access.writes();
        *granule = region.element.size().min(*granule);
    }
    let shadows: BTreeMap<_, _> = shadows
        .into_iter()
        .filter(|(_, (writes, _))| *writes)
        .map(|(id, (_, granule))| (id, Rc::new(RefCell::new(Shadow::new(memory.len_at(id), granule.min(4), false)))))
        .collect();
    for (view, region) in regions.iter_mut().flatten() {
        region.shadow = shadows.get(&memory.position(view.allocation)).cloned();
    }
}

/// Whether the kernel's shared arrays can be made.
fn check_shared(launch: &Launch<'_>) -> Result<(), LaunchError> {
    let kernel = launch.kernel();
    for array in launch.instance.def.shared {
        let refuse = |why: String| LaunchError::Argument { kernel, param: array.name.to_string(), why };
        if launch.values().element(array.element).is_none() {
            return Err(refuse(format!("element type `{}`", array.element)));
        }
        let bytes = array.bytes(launch.values());
        if bytes > 228 * 1024 {
            return Err(refuse(format!(
                "{bytes} bytes of shared memory: no GPU of ours has more than 228 KiB a block"
            )));
        }
    }
    Ok(())
}

impl Launch<'_> {
    pub fn blocks(&self) -> u32 {
        self.grid.iter().product()
    }

    /// Shared arrays for a cluster that starts: those of one that has ended, or new ones. The host's text has its own.
    pub fn shared_memory(&self) -> SharedMemory {
        if let Some(spare) = self.spare.borrow_mut().pop() {
            return spare;
        }
        let defs = if self.host { &[][..] } else { self.instance.def.shared };
        let sizes: Vec<usize> = defs.iter().map(|array| array.bytes(self.values())).collect();
        SharedMemory::new(self.cluster, &sizes, |number, base| {
            let (array, bytes) = (&defs[number], sizes[number]);
            // `check_shared` has found the type.
            let element = self.values().element(array.element).unwrap_or(ElementType::U8);
            let shadow = self.checks.then(|| Rc::new(RefCell::new(Shadow::new(bytes, element.size().min(4), true))));
            Region {
                name: array.name.to_string(),
                access: Access::Shared,
                element,
                thin: false,
                base,
                bytes,
                checked: shadow.is_some(),
                after_wait: false,
                early: false,
                only_read: false,
                shadow,
                history: None,
                shadow_start: 0,
            }
        })
    }
}
