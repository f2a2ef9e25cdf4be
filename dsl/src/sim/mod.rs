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
mod stream;
pub(crate) mod thread;

pub use chain::{ChainStep, Interleaving, launch_chain};
pub use fault::{Fault, FaultKind};
pub(crate) use launch::launch_host;
pub use launch::{Arg, LaunchError, Options, launch};
pub use memory::{
    AllocationId, InOut, Input, KernelIndex, Memory, Output, Readable, Regs, Shared, View, Weights, Writable, regs,
};

use crate::{BF16, Element, F16, F32x2, F32x4, I32x4, U32x2, U32x4};
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

/// A value of at most 16 bytes, type erased: what passes through a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word4([u32; 4]);

impl Word4 {
    pub fn from_value<T: SlotValue>(value: T) -> Self {
        Self(value.into_words())
    }
}

/// A value type that a slot may take or give.
pub trait SlotValue: Copy {
    #[doc(hidden)]
    fn into_words(self) -> [u32; 4];
    #[doc(hidden)]
    fn from_words(words: [u32; 4]) -> Self;
}

macro_rules! slot_values {
    ($($ty:ident ($value:ident) $into:expr, ($words:ident) $from:expr;)*) => { $(impl SlotValue for $ty {
        fn into_words(self) -> [u32; 4] {
            let $value = self;
            $into
        }

        fn from_words($words: [u32; 4]) -> Self {
            $from
        }
    })* };
}
slot_values! {
    bool (v) [v.into(), 0, 0, 0], (w) w[0] != 0;
    u8 (v) [v.into(), 0, 0, 0], (w) w[0] as u8;
    i8 (v) [v as u32, 0, 0, 0], (w) w[0] as i8;
    u16 (v) [v.into(), 0, 0, 0], (w) w[0] as u16;
    i16 (v) [v as u32, 0, 0, 0], (w) w[0] as i16;
    u32 (v) [v, 0, 0, 0], (w) w[0];
    i32 (v) [v as u32, 0, 0, 0], (w) w[0] as i32;
    u64 (v) [v as u32, (v >> 32) as u32, 0, 0], (w) u64::from(w[0]) | u64::from(w[1]) << 32;
    i64 (v) [v as u32, (v >> 32) as u32, 0, 0], (w) (u64::from(w[0]) | u64::from(w[1]) << 32) as i64;
    f32 (v) [v.to_bits(), 0, 0, 0], (w) f32::from_bits(w[0]);
    F16 (v) [v.to_bits().into(), 0, 0, 0], (w) F16::from_bits(w[0] as u16);
    BF16 (v) [v.to_bits().into(), 0, 0, 0], (w) BF16::from_bits(w[0] as u16);
    U32x2 (v) [v.x, v.y, 0, 0], (w) U32x2 { x: w[0], y: w[1] };
    U32x4 (v) [v.x, v.y, v.z, v.w], (w) U32x4 { x: w[0], y: w[1], z: w[2], w: w[3] };
    I32x4 (v) [v.x, v.y, v.z, v.w].map(|v| v as u32), (w) I32x4 { x: w[0] as i32, y: w[1] as i32, z: w[2] as i32, w: w[3] as i32 };
    F32x2 (v) [v.x.to_bits(), v.y.to_bits(), 0, 0], (w) F32x2 { x: f32::from_bits(w[0]), y: f32::from_bits(w[1]) };
    F32x4 (v) [v.x, v.y, v.z, v.w].map(f32::to_bits),
        (w) F32x4 { x: f32::from_bits(w[0]), y: f32::from_bits(w[1]), z: f32::from_bits(w[2]), w: f32::from_bits(w[3]) };
}

/// The arguments of a device function in a slot: the slot's values, then launch arguments of its own.
pub struct SlotArguments<'a> {
    values: &'a [Word4],
    launch: &'a Launch<'a>,
    /// Index among the launch's arguments of the function's first extra parameter.
    first: usize,
}

impl SlotArguments<'_> {
    #[doc(hidden)]
    pub fn take<T: FromSlot>(&self, index: usize) -> T {
        T::from_slot(self, index)
    }
}

/// What a device function in a slot may take.
#[doc(hidden)]
pub trait FromSlot: Sized {
    fn from_slot(arguments: &SlotArguments<'_>, index: usize) -> Self;
}

macro_rules! from_slot_values {
    ($($ty:ident)*) => { $(impl FromSlot for $ty {
        fn from_slot(arguments: &SlotArguments<'_>, index: usize) -> Self {
            match arguments.values.get(index) {
                Some(value) => <$ty>::from_words(value.0),
                None => {
                    let bits = arguments.launch.scalars[arguments.first + index - arguments.values.len()];
                    <$ty>::from_words([bits as u32, (bits >> 32) as u32, 0, 0])
                }
            }
        }
    })* };
}
from_slot_values!(bool u8 i8 u16 i16 u32 i32 u64 i64 f32 F16 BF16 U32x2 U32x4 I32x4 F32x2 F32x4);

macro_rules! from_slot_handles {
    ($($name:ident)*) => { $(impl<T: Element> FromSlot for $name<T> {
        fn from_slot(arguments: &SlotArguments<'_>, index: usize) -> Self {
            FromArgument::from_argument(arguments.launch, arguments.first + index - arguments.values.len())
        }
    })* };
}
from_slot_handles!(Weights Input Output InOut);

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
#[track_caller]
pub fn slot<T: SlotValue>(number: usize, values: &[Word4]) -> T {
    let launch = Thread::current().launch();
    let fill = &launch.instance.fills()[number];
    let mut values = values.to_vec();
    for (function, &first) in fill.functions.iter().zip(&fill.extra) {
        let call = function.call.expect("checked when the instance was built");
        let result = call(&SlotArguments { values: &values, launch, first });
        values[0] = result;
    }
    T::from_words(values[0].0)
}

#[doc(hidden)]
pub fn refuse_types(types: &[&str]) {
    panic!("element types {types:?} are not among f32, F16, BF16");
}
