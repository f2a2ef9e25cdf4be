//! The simulator: runs a kernel's Rust body, or its emitted text compiled for the host, on the CPU, as a grid of blocks of
//! coroutines, and watches what it does.
//!
//! What it finds: races within a block, between blocks and between launches, divergent barriers and collectives, accesses out of
//! bounds or misaligned, shared memory read before it is written, outputs left unwritten, activations touched before the
//! dependency wait, waits that nobody ends, integer overflow. What it does not model: time, caches, weak memory beyond what
//! orders two accesses. [`launch`] runs one kernel; [`launch_chain`] several, each beside its predecessor as far as programmatic
//! dependent launch allows.

mod chain;
mod cluster;
mod fault;
mod grid;
mod history;
mod known;
mod launch;
pub(crate) mod mbarrier;
pub(crate) mod memory;
mod panics;
pub(crate) mod pending;
pub(crate) mod shadow;
mod slots;
mod stream;
pub(crate) mod thread;

pub use chain::{ChainStep, Interleaving, launch_chain};
pub use fault::{Fault, FaultKind};
pub(crate) use launch::launch_host;
pub use launch::{Arg, LaunchError, Options, launch};
pub use memory::{
    AllocationId, InOut, Input, KernelIndex, Memory, Output, Readable, Regs, Shared, View, Weights, Writable, regs,
};
#[doc(hidden)]
pub use slots::{FromSlot, slot};
pub use slots::{SlotArguments, SlotValue, Value, Word4};

use crate::Element;
use memory::Raw;
use thread::{Launch, Thread};

/// The order in which threads and blocks get their turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Forward,
    Reverse,
    /// A new shuffle for every turn, from this state.
    Seeded(u64),
}

impl Order {
    /// The three orders every case runs under.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Reverse, Self::Seeded(0x9e37_79b9_7f4a_7c15)];

    fn arrange(&mut self, sequence: &mut [usize]) {
        match self {
            Self::Forward => sequence.sort_unstable(),
            Self::Reverse => sequence.sort_unstable_by(|a, b| b.cmp(a)),
            Self::Seeded(state) => {
                for last in (1..sequence.len()).rev() {
                    // splitmix64
                    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                    let mut z = *state;
                    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                    sequence.swap(last, ((z ^ (z >> 31)) % (last as u64 + 1)) as usize);
                }
            }
        }
    }
}

/// A launch's arguments, by position.
pub struct Arguments<'a> {
    launch: &'a Launch<'a>,
}

impl Arguments<'_> {
    #[doc(hidden)]
    pub fn take<T: FromArgument>(&self, index: usize) -> T {
        T::from_argument(self.launch, index)
    }

    #[doc(hidden)]
    pub fn element_type(&self, name: &str) -> &'static str {
        self.launch.values().element(name).map_or("", crate::ElementType::name)
    }
}

/// What a kernel's parameter may be.
#[doc(hidden)]
pub trait FromArgument: Sized {
    #[allow(private_interfaces)]
    fn from_argument(launch: &Launch<'_>, index: usize) -> Self;
}

macro_rules! scalars {
    ($($ty:ident $from:expr;)*) => { $(impl FromArgument for $ty {
        #[allow(private_interfaces)]
        fn from_argument(launch: &Launch<'_>, index: usize) -> Self {
            let from: fn(u64) -> $ty = $from;
            from(launch.scalars[index])
        }
    })* };
}
scalars! {
    u32 |bits| bits as u32;
    i32 |bits| bits as i32;
    u64 |bits| bits;
    f32 |bits| f32::from_bits(bits as u32);
}

macro_rules! handle_arguments {
    ($($name:ident)*) => { $(impl<T: Element> FromArgument for $name<T> {
        #[allow(private_interfaces)]
        fn from_argument(launch: &Launch<'_>, index: usize) -> Self {
            let region = launch.regions[index].as_ref().expect("bound as memory");
            // The element type was checked by name when the instance was built; an element-type parameter was dispatched on.
            assert_eq!(region.element, T::TYPE, "parameter `{}`", region.name);
            $name(Raw::new(region))
        }
    })* };
}
handle_arguments!(Weights Input Output InOut);

// ---- what the expansion of a kernel calls -----------------------------------------------------------------------

#[doc(hidden)]
pub fn constant<T: crate::instance::Constant>(name: &str) -> T {
    Thread::current().launch().values().constant(name)
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
