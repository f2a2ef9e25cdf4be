//! The simulator: runs a kernel's Rust body, or its emitted text compiled for the host, on the CPU, as a grid of blocks
//! of coroutines, and watches what it does.
//!
//! What it finds: races within a block, between blocks and between launches, divergent barriers and collectives,
//! accesses out of bounds or misaligned, shared memory read before it is written, outputs left unwritten, activations
//! touched before the dependency wait, waits that nobody ends, integer overflow. What it does not model: time, caches,
//! weak memory beyond what orders two accesses. [`launch`] runs one kernel; [`launch_chain`] several, each beside its
//! predecessor as far as programmatic dependent launch allows.

mod chain;
mod cluster;
mod constants;
mod fault;
mod grid;
mod history;
mod known;
mod launch;
pub(crate) mod mbarrier;
pub(crate) mod memory;
mod order;
mod panics;
pub(crate) mod pending;
pub(crate) mod region;
pub(crate) mod shadow;
mod slots;
mod stacks;
mod stream;
pub(crate) mod thread;

pub use chain::{ChainStep, Interleaving, launch_chain};
#[doc(hidden)]
pub use constants::ConstantNames;
pub use fault::{Fault, FaultKind};
pub(crate) use launch::launch_host;
pub use launch::{Arg, LaunchError, Options, launch};
pub use memory::{
    AllocationId, InOut, Input, KernelIndex, Memory, Output, Readable, Regs, Shared, Tiles, View, Weights, Writable,
    regs,
};
pub use order::Order;
#[doc(hidden)]
pub use slots::{not_in_a_slot, slot};

pub use crate::passing::{Arguments, FromArgument, SlotArguments, SlotValue, Value, Word4, Words};
#[doc(hidden)]
pub use crate::passing::{FromSlot, InOrder};

use crate::elements::{Element, ElementType};
use crate::passing::LaunchValues;
use crate::values::{Constant, ConstantValue, of_type};
use memory::Raw;
use region::Region;
use std::any::Any;
use thread::{Launch, Thread};

/// Whether the running instance is thin.
#[doc(hidden)]
pub fn is_thin() -> bool {
    Thread::current().launch().thin
}

impl LaunchValues for Launch<'_> {
    fn scalar(&self, index: usize) -> u64 {
        self.scalars[index]
    }

    fn memory(&self, index: usize) -> Option<&dyn Any> {
        self.regions[index].as_ref().map(|region| region as &dyn Any)
    }

    fn element(&self, name: &str) -> Option<ElementType> {
        self.values().element(name)
    }
}

macro_rules! handle_arguments {
    ($($name:ident)*) => { $(impl<T: Element> FromArgument for $name<T> {
        fn from_argument(arguments: &InOrder<'_>) -> Self {
            let region = arguments.launch.memory(arguments.advance()).and_then(|memory| memory.downcast_ref::<Region>()).expect("bound as memory");
            // The element type was checked by name when the instance was built; an element-type parameter was
            // dispatched on.
            assert_eq!(region.element, T::TYPE, "parameter `{}`", region.name);
            $name(Raw::new(region))
        }
    })* };
}
handle_arguments!(Weights Input Tiles Output InOut);

// ---- what the expansion of a kernel calls -----------------------------------------------------------------------

/// The values of a function's compile-time parameters in the instance that runs.
#[doc(hidden)]
#[inline]
pub fn constants<const N: usize>(names: &ConstantNames) -> [ConstantValue; N] {
    let mut values = [ConstantValue::Bool(false); N];
    read_constants(names, &mut values);
    values
}

/// Not generic, so that it is compiled here, where it is optimised.
fn read_constants(names: &ConstantNames, into: &mut [ConstantValue]) {
    let launch = Thread::current().launch();
    launch.constants.read(launch.values(), names, into);
}

/// One of them as its type, which the instance has checked.
#[doc(hidden)]
#[inline]
pub fn constant<T: Constant>(value: ConstantValue, name: &str) -> T {
    of_type(value, name)
}

#[doc(hidden)]
pub fn shared<T: Element>(number: usize, _len: u32) -> Shared<T> {
    let thread = Thread::current();
    Shared(Raw::new(&thread.cluster().shared.arrays[thread.block().rank as usize][number]))
}

#[doc(hidden)]
pub fn refuse_types(types: &[&str]) {
    panic!("element types {types:?} are not among f32, F16, BF16");
}
