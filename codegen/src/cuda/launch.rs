//! Launches under construction: memory that may have no place yet, kernels each once.
//!
//! A lowering fills the struct that a kernel derives for its arguments (`matvec::Arguments`) with [`Span`]s and
//! scalars. What the kernel's slots want besides is checked here, when [`bind`] puts all of it in launch order.

use gemma4c_dsl::{ArgumentValue, Instance, InstanceParam, LaunchArguments};
use gemma4c_plan::cuda::{Argument, Kernel, KernelIndex, Range, Region};

use super::error::LowerError;

/// A range of memory whose place in the arena may not be known yet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Span {
    /// A range that is known: weights, caches, the loop's state.
    Fixed(Range),
    /// Bytes of a value's buffer.
    Buffer { buffer: BufferId, offset: u64, bytes: u64 },
    /// Memory that the instance has no use for.
    #[default]
    Unused,
}

impl Span {
    /// From that byte on.
    pub fn skip(self, by: u64) -> Span {
        match self {
            Span::Fixed(range) => {
                Span::Fixed(Range { offset: range.offset + by, bytes: range.bytes.saturating_sub(by), ..range })
            }
            Span::Buffer { buffer, offset, bytes } => {
                Span::Buffer { buffer, offset: offset + by, bytes: bytes.saturating_sub(by) }
            }
            Span::Unused => Span::Unused,
        }
    }

    /// That many bytes of it.
    pub fn take(self, bytes: u64) -> Span {
        match self {
            Span::Fixed(range) => Span::Fixed(Range { bytes, ..range }),
            Span::Buffer { buffer, offset, .. } => Span::Buffer { buffer, offset, bytes },
            Span::Unused => Span::Unused,
        }
    }

    /// Its range, if it needs no buffer: a range of nothing, if it is unused.
    pub fn fixed(self) -> Option<Range> {
        match self {
            Span::Fixed(range) => Some(range),
            Span::Buffer { .. } => None,
            Span::Unused => Some(NOTHING),
        }
    }
}

/// Activations in int8, 32 to a group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Int8Span {
    pub codes: Span,
    pub scales: Span,
    pub sums: Span,
}

impl Int8Span {
    /// Codes, scales and sums of so many values, one after the other.
    pub fn of(start: Span, elements: u64) -> Int8Span {
        let groups = elements / 32 * 4;
        Int8Span {
            codes: start.take(elements),
            scales: start.skip(elements).take(groups),
            sums: start.skip(elements + groups).take(groups),
        }
    }
}

/// Activations of which whole groups are in int8, and those after them floats.
#[derive(Clone, Copy, Debug, Default)]
pub struct MixedSpan {
    pub whole: Int8Span,
    pub loose: Span,
}

impl MixedSpan {
    /// Bytes of so many values, of which the last `loose` are floats.
    pub fn bytes(elements: u64, loose: u64) -> u64 {
        (elements - loose) / 32 * 40 + loose * 4
    }

    /// The int8 of all whole groups, then the floats.
    pub fn of(start: Span, elements: u64, loose: u64) -> MixedSpan {
        let whole = elements - loose;
        MixedSpan { whole: Int8Span::of(start, whole), loose: start.skip(whole / 32 * 40).take(loose * 4) }
    }
}

/// An argument of a kind that a plan has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BoundArgument {
    Memory(Span),
    U32(u32),
    F32(f32),
}

impl BoundArgument {
    /// The plan's argument, once memory has its place.
    pub fn placed(self, range: impl Fn(Span) -> Range) -> Argument {
        match self {
            BoundArgument::Memory(span) => Argument::Memory(range(span)),
            BoundArgument::U32(value) => Argument::U32(value),
            BoundArgument::F32(value) => Argument::F32(value),
        }
    }
}

/// The arguments in the order of the instance's parameters.
pub fn bind(arguments: LaunchArguments<Span>, instance: &Instance) -> Result<Vec<BoundArgument>, LowerError> {
    let bound = |argument| match argument {
        ArgumentValue::Memory(span) => Ok(BoundArgument::Memory(span)),
        ArgumentValue::U32(value) => Ok(BoundArgument::U32(value)),
        ArgumentValue::F32(value) => Ok(BoundArgument::F32(value)),
        ArgumentValue::I32(_) | ArgumentValue::U64(_) => Err(LowerError::Scalar { kernel: instance.to_string() }),
    };
    arguments.bind(instance)?.into_iter().map(bound).collect()
}

/// The arguments of a launch outside the phases, which has no buffers: all its memory is fixed.
pub fn bind_fixed(arguments: LaunchArguments<Span>, instance: &Instance) -> Result<Vec<Argument>, LowerError> {
    let placed = |argument: BoundArgument| match argument {
        BoundArgument::Memory(span) => {
            let range = span.fixed().ok_or_else(|| LowerError::Buffer { kernel: instance.to_string() })?;
            Ok(Argument::Memory(range))
        }
        BoundArgument::U32(value) => Ok(Argument::U32(value)),
        BoundArgument::F32(value) => Ok(Argument::F32(value)),
    };
    bind(arguments, instance)?.into_iter().map(placed).collect()
}

/// A piece of the arena that one phase uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferId(pub usize);

/// The kernels of a plan, each once.
#[derive(Debug, Default)]
pub struct Kernels {
    pub instances: Vec<Instance>,
    names: Vec<String>,
}

impl Kernels {
    /// The kernel's place in the plan.
    pub fn index(&mut self, instance: Instance) -> KernelIndex {
        let name = instance.to_string();
        let found = self.names.iter().position(|known| *known == name);
        found.unwrap_or_else(|| {
            self.names.push(name);
            self.instances.push(instance);
            self.names.len() - 1
        }) as KernelIndex
    }

    /// What the plan says of them.
    pub fn described(&self) -> Vec<Kernel> {
        let describe = |(instance, name): (&Instance, &String)| Kernel {
            name: instance.def.name.to_owned(),
            instance: name.clone(),
            block: instance.block(),
            shared: if instance.def.launch.dynamic_shared { instance.shared_bytes() as u32 } else { 0 },
            written: bits(instance, |param| instance.writes(param)),
            waits: instance.def.launch.dependent,
            waits_first: instance.def.launch.waits_first,
            early: bits(instance, |param| instance.reads_early(&param.name)),
        };
        self.instances.iter().zip(&self.names).map(describe).collect()
    }
}

/// A bit for each parameter of a kind.
fn bits(instance: &Instance, is_meant: impl Fn(&InstanceParam) -> bool) -> u64 {
    let bits = instance.params().iter().enumerate().filter(|(_, param)| is_meant(param)).map(|(index, _)| 1 << index);
    bits.fold(0, |all, bit: u64| all | bit)
}

/// A range of nothing: what an unused parameter is given.
pub const NOTHING: Range = Range { region: Region::Arena, offset: 0, bytes: 0 };
