//! What a launch passes to a kernel, and a slot to a device function: values with their types erased.
//!
//! Which function is behind a slot is known when the instance is built, so values pass 16 bytes at a time; a struct of
//! registers passes as its fields. Definitions hold function pointers that take these, so nothing here knows the
//! simulator: it is behind [`LaunchValues`].

use crate::elements::{BF16, ElementType, F16, F32x2, F32x4, I32x4, U32x2, U32x4};
use smallvec::SmallVec;
use std::any::Any;
use std::cell::Cell;

/// A launch's arguments, by position.
pub struct Arguments<'a> {
    pub(crate) launch: &'a dyn LaunchValues,
}

/// A launch, as far as its arguments go.
pub(crate) trait LaunchValues {
    fn scalar(&self, index: usize) -> u64;
    /// What the simulator keeps of a memory argument.
    fn memory(&self, index: usize) -> Option<&dyn Any>;
    /// The element type called so in the instance.
    fn element(&self, name: &str) -> Option<ElementType>;
}

impl Arguments<'_> {
    /// From the first one on.
    #[doc(hidden)]
    pub fn in_order(&self) -> InOrder<'_> {
        InOrder { launch: self.launch, next: Cell::new(0) }
    }

    #[doc(hidden)]
    pub fn element_type(&self, name: &str) -> &'static str {
        self.launch.element(name).map_or("", ElementType::name)
    }
}

/// A launch's arguments, taken one after the other.
#[doc(hidden)]
pub struct InOrder<'a> {
    pub(crate) launch: &'a dyn LaunchValues,
    pub(crate) next: Cell<usize>,
}

impl InOrder<'_> {
    #[doc(hidden)]
    pub fn next<T: FromArgument>(&self) -> T {
        T::from_argument(self)
    }

    pub(crate) fn advance(&self) -> usize {
        self.next.replace(self.next.get() + 1)
    }
}

/// What a kernel's parameter may be.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "a launch cannot give `{Self}`",
    label = "a kernel's struct is a `#[view]` of `Weights<T>`, `Input<T>`, `Output<T>`, `InOut<T>` and scalars u32, i32, u64, f32"
)]
pub trait FromArgument: Sized {
    fn from_argument(arguments: &InOrder<'_>) -> Self;
}

macro_rules! scalars {
    ($($ty:ident $from:expr;)*) => { $(impl FromArgument for $ty {
        fn from_argument(arguments: &InOrder<'_>) -> Self {
            let from: fn(u64) -> $ty = $from;
            from(arguments.launch.scalar(arguments.advance()))
        }
    })* };
}
scalars! {
    u32 |bits| bits as u32;
    i32 |bits| bits as i32;
    u64 |bits| bits;
    f32 |bits| f32::from_bits(bits as u32);
}

/// A value of at most 16 bytes, type erased: what passes through a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word4(pub(crate) [u32; 4]);

impl Word4 {
    pub fn from_value<T: SlotValue>(value: T) -> Self {
        Self(value.into_words())
    }
}

/// The values that pass through a slot. Most slots take few: they need no allocation.
#[derive(Default)]
pub struct Words(pub(crate) SmallVec<[Word4; 8]>);

impl Words {
    pub fn push(&mut self, word: Word4) {
        self.0.push(word);
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
        #[inline]
        fn into_words(self) -> [u32; 4] {
            let $value = self;
            $into
        }

        #[inline]
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

/// What registers hold: a value type, or a struct of them (`#[registers]`).
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not pass through a slot",
    label = "a slot takes numbers, vectors and `#[registers]` structs; what fills it gets a view from the launch"
)]
pub trait Value: Copy {
    const ZERO: Self;
    /// Words of 16 bytes in a slot.
    #[doc(hidden)]
    const WORDS: usize;
    #[doc(hidden)]
    fn put(self, words: &mut Words);
    /// Takes its words off the front.
    #[doc(hidden)]
    fn take(words: &mut &[Word4]) -> Self;
}

macro_rules! values {
    ($($ty:ident $zero:expr;)*) => { $(impl Value for $ty {
        const ZERO: Self = $zero;
        const WORDS: usize = 1;

        #[inline]
        fn put(self, words: &mut Words) {
            words.push(Word4::from_value(self));
        }

        fn take(words: &mut &[Word4]) -> Self {
            let (first, rest) = words.split_first().expect("a slot has all its values");
            *words = rest;
            Self::from_words(first.0)
        }
    })* };
}
values! {
    bool false;
    u8 0; i8 0; u16 0; i16 0; u32 0; i32 0; u64 0; i64 0;
    f32 0.0; F16 F16::from_bits(0); BF16 BF16::from_bits(0);
    U32x2 U32x2::ZERO; U32x4 U32x4::ZERO; I32x4 I32x4::ZERO; F32x2 F32x2::ZERO; F32x4 F32x4::ZERO;
}

/// The arguments of a device function in a slot: the slot's values, then launch arguments of its own.
pub struct SlotArguments<'a> {
    pub(crate) values: &'a [Word4],
    pub(crate) launch: &'a dyn LaunchValues,
    /// Index among the launch's arguments of the function's first extra parameter.
    pub(crate) first: usize,
    /// Words and arguments that were taken.
    pub(crate) taken: Cell<usize>,
}

impl SlotArguments<'_> {
    /// The next parameter's argument.
    #[doc(hidden)]
    pub fn next<T: FromSlot>(&self) -> T {
        T::from_slot(self)
    }

    pub(crate) fn advance(&self, by: usize) -> usize {
        self.taken.replace(self.taken.get() + by)
    }
}

/// What a device function in a slot may take.
#[doc(hidden)]
pub trait FromSlot: Sized {
    fn from_slot(arguments: &SlotArguments<'_>) -> Self;
}

impl<T: Value> FromSlot for T {
    fn from_slot(arguments: &SlotArguments<'_>) -> Self {
        let at = arguments.advance(T::WORDS);
        match arguments.values.get(at..) {
            Some(mut values) if !values.is_empty() => T::take(&mut values),
            _ => {
                let bits = arguments.launch.scalar(arguments.first + at - arguments.values.len());
                T::take(&mut [Word4([bits as u32, (bits >> 32) as u32, 0, 0])].as_slice())
            }
        }
    }
}
