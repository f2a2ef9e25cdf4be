//! Arguments of a launch. `#[kernel]` derives a struct with a field for each of the kernel's parameters
//! (`matvec::Arguments`), and `#[device]` one for what a function takes besides a slot's values
//! (`then_scale::Arguments`), so that a forgotten or misspelt argument does not compile. What fills a slot is chosen at
//! run time: whether its arguments are there is checked against the [`Instance`].
//!
//! `M` stands for memory: a place in a plan, a view in the simulator, an address.

use crate::definition::{DeviceDef, KernelDef, ParamKind};
use crate::instance::Instance;

/// One argument of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ArgumentValue<M> {
    Memory(M),
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
}

macro_rules! scalars {
    ($($ty:ident $variant:ident)*) => { $(
        impl<M> From<$ty> for ArgumentValue<M> {
            fn from(value: $ty) -> Self {
                Self::$variant(value)
            }
        }
    )* };
}
scalars!(u32 U32 i32 I32 u64 U64 f32 F32);

impl<M> ArgumentValue<M> {
    fn fits(&self, kind: ParamKind) -> bool {
        match self {
            Self::Memory(_) => matches!(kind, ParamKind::Memory { .. }),
            Self::U32(_) => kind == ParamKind::Scalar("u32"),
            Self::I32(_) => kind == ParamKind::Scalar("i32"),
            Self::U64(_) => kind == ParamKind::Scalar("u64"),
            Self::F32(_) => kind == ParamKind::Scalar("f32"),
        }
    }
}

/// A slot of a kernel: `matvec::slot::side`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotKey {
    pub kernel: &'static str,
    pub slot: &'static str,
}

/// A device function in a slot, with the arguments that it takes besides the slot's values.
#[derive(Clone, Debug)]
pub struct Filled<M> {
    pub function: &'static DeviceDef,
    values: Vec<ArgumentValue<M>>,
}

impl<M> Filled<M> {
    /// Made by the function's own `Arguments`.
    #[doc(hidden)]
    pub fn new(function: &'static DeviceDef, values: Vec<ArgumentValue<M>>) -> Self {
        Self { function, values }
    }

    /// A function that takes the slot's values and nothing else.
    pub fn alone(function: &'static DeviceDef) -> Self {
        Self { function, values: Vec::new() }
    }
}

/// The arguments of a launch: the kernel's own, and those of what fills its slots.
#[derive(Clone, Debug)]
pub struct LaunchArguments<M> {
    kernel: &'static KernelDef,
    own: Vec<ArgumentValue<M>>,
    slots: Vec<(SlotKey, Filled<M>)>,
}

/// Why arguments are not those of an instance. Each names the instance.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentError {
    #[error("kernel {instance}: the arguments are those of kernel {given}")]
    Kernel { instance: String, given: &'static str },
    #[error("kernel {instance}: parameter `{parameter}`, of `{function}` in slot `{slot}`, has no argument")]
    Missing { instance: String, slot: &'static str, function: &'static str, parameter: String },
    #[error("kernel {instance}: slot `{slot}` got arguments of `{function}`, which does not fill it there")]
    Function { instance: String, slot: &'static str, function: &'static str },
    #[error(
        "kernel {instance}: `{function}` in slot `{slot}` takes [{parameters}], its arguments are others: say `fills(…)` at the function"
    )]
    Parameters { instance: String, slot: &'static str, function: &'static str, parameters: String },
}

impl<M> LaunchArguments<M> {
    /// Made by the kernel's own `Arguments`.
    #[doc(hidden)]
    pub fn new(kernel: &'static KernelDef, own: Vec<ArgumentValue<M>>) -> Self {
        Self { kernel, own, slots: Vec::new() }
    }

    /// Adds the arguments of a function in a slot; of several in one slot, in their order. A function that takes
    /// nothing besides the slot's values need not be named.
    pub fn with_slot(mut self, slot: SlotKey, filled: impl Into<Filled<M>>) -> Self {
        self.slots.push((slot, filled.into()));
        self
    }

    /// The arguments in the order of the instance's parameters.
    pub fn bind(self, instance: &Instance) -> Result<Vec<ArgumentValue<M>>, ArgumentError> {
        let name = || instance.to_string();
        let given = self.slots.iter().map(|(key, _)| key.kernel).find(|kernel| *kernel != instance.def.name);
        if self.kernel != instance.def || given.is_some() {
            return Err(ArgumentError::Kernel { instance: name(), given: given.unwrap_or(self.kernel.name) });
        }
        let mut bound = self.own;
        let mut slots = self.slots;
        for (slot, function, params) in instance.slot_params() {
            let at = slots.iter().position(|(key, _)| key.slot == slot.name);
            // The next arguments of this slot are this function's, or, if it needs none, perhaps a later one's.
            let filled = match at {
                Some(at) if slots[at].1.function == function => slots.remove(at).1,
                _ if params.is_empty() => continue,
                Some(at) => {
                    let function = slots[at].1.function.name;
                    return Err(ArgumentError::Function { instance: name(), slot: slot.name, function });
                }
                None => {
                    let (slot, function, parameter) = (slot.name, function.name, params[0].name.clone());
                    return Err(ArgumentError::Missing { instance: name(), slot, function, parameter });
                }
            };
            let fit = filled.values.iter().zip(params).all(|(value, param)| value.fits(param.def.kind));
            if !fit || filled.values.len() != params.len() {
                let parameters: Vec<_> = params.iter().map(|param| param.name.as_str()).collect();
                let (slot, function, parameters) = (slot.name, function.name, parameters.join(", "));
                return Err(ArgumentError::Parameters { instance: name(), slot, function, parameters });
            }
            bound.extend(filled.values);
        }
        match slots.first() {
            Some((key, filled)) => {
                Err(ArgumentError::Function { instance: name(), slot: key.slot, function: filled.function.name })
            }
            None => Ok(bound),
        }
    }
}
