//! Launches under construction: arguments by name, memory by value, kernels each once.
//!
//! A lowering names what it passes (`"codes"`, `"out"`); here the names become positions, and a forgotten or unknown one is an
//! error of the compiler that says which kernel wanted what.

use gemma4c_dsl::{Instance, InstanceParam, ParamKind};
use gemma4c_plan::cuda::{Kernel, KernelIndex, Range, Region};

use super::LowerError;

/// An argument whose place in the arena may not be known yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// A range that is known: weights, caches, the loop's state.
    Fixed(Range),
    /// Bytes of a value's buffer.
    Buffer {
        buffer: BufferId,
        offset: u64,
        bytes: u64,
    },
    /// Memory that the instance has no use for.
    Unused,
    U32(u32),
    F32(f32),
}

impl Arg {
    /// From that byte on.
    pub fn skip(self, by: u64) -> Arg {
        match self {
            Arg::Fixed(range) => {
                Arg::Fixed(Range { offset: range.offset + by, bytes: range.bytes.saturating_sub(by), ..range })
            }
            Arg::Buffer { buffer, offset, bytes } => {
                Arg::Buffer { buffer, offset: offset + by, bytes: bytes.saturating_sub(by) }
            }
            other => other,
        }
    }

    /// That many bytes of it.
    pub fn take(self, bytes: u64) -> Arg {
        match self {
            Arg::Fixed(range) => Arg::Fixed(Range { bytes, ..range }),
            Arg::Buffer { buffer, offset, .. } => Arg::Buffer { buffer, offset, bytes },
            other => other,
        }
    }
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
            written: written(instance),
            waits: instance.def.launch.dependent,
        };
        self.instances.iter().zip(&self.names).map(describe).collect()
    }
}

/// A bit for each parameter that is memory the kernel writes to.
fn written(instance: &Instance) -> u64 {
    let is_written = |param: &InstanceParam| match param.def.kind {
        ParamKind::Memory { access, .. } => access.writes(),
        ParamKind::Scalar(_) | ParamKind::Local => false,
    };
    let bits = instance.params().iter().enumerate().filter(|(_, param)| is_written(param)).map(|(index, _)| 1 << index);
    bits.fold(0, |all, bit: u64| all | bit)
}

/// The arguments in the order of the instance's parameters.
pub fn bind(instance: &Instance, named: &[(&str, Arg)]) -> Result<Vec<Arg>, LowerError> {
    let kernel = || instance.to_string();
    let mut used = vec![false; named.len()];
    let mut bound = Vec::new();
    for param in instance.params() {
        let at = named.iter().position(|(name, _)| *name == param.name);
        let at = at.ok_or_else(|| LowerError::Argument { kernel: kernel(), parameter: param.name.clone() })?;
        let is_memory = matches!(param.def.kind, ParamKind::Memory { .. });
        if is_memory == matches!(named[at].1, Arg::U32(_) | Arg::F32(_)) {
            return Err(LowerError::Argument { kernel: kernel(), parameter: param.name.clone() });
        }
        used[at] = true;
        bound.push(named[at].1);
    }
    match used.iter().position(|used| !used) {
        Some(at) => Err(LowerError::Argument { kernel: kernel(), parameter: named[at].0.to_owned() }),
        None => Ok(bound),
    }
}

/// A range of nothing: what an unused parameter is given.
pub const NOTHING: Range = Range { region: Region::Arena, offset: 0, bytes: 0 };
