//! Memory: what the host owns ([`Memory`]), how what a launch sees of it ([`Region`]) is accessed, and the handles a
//! kernel holds.
//!
//! A handle is indexed like a slice. Each access is checked against the region's bounds, and, where the region can be
//! written during the launch, against its shadow. References that indexing hands out live for one expression: the macro
//! refuses to borrow an element, and no thread can be suspended in between.

use super::fault::FaultKind;
use super::region::{Chunk, Region};
use super::shadow::Touch;
use super::thread::Thread;
use crate::definition::Access;
use crate::elements::Element;
use smallvec::SmallVec;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Device memory of the simulator: allocations of bytes, aligned as on the GPU.
#[derive(Default)]
pub struct Memory {
    allocations: Vec<(Vec<Chunk>, usize)>,
}

/// One allocation of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocationId(u32);

/// Part of an allocation, as a kernel's argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    pub allocation: AllocationId,
    /// In bytes.
    pub offset: usize,
    pub bytes: usize,
}

impl Memory {
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates zeroed bytes.
    pub fn allocate(&mut self, bytes: usize) -> AllocationId {
        self.allocations.push((vec![Chunk([0; 256]); bytes.div_ceil(256)], bytes));
        AllocationId(self.allocations.len() as u32 - 1)
    }

    pub fn len(&self, id: AllocationId) -> usize {
        self.allocations[id.0 as usize].1
    }

    pub fn view(&self, allocation: AllocationId) -> View {
        View { allocation, offset: 0, bytes: self.len(allocation) }
    }

    pub(crate) fn position(&self, id: AllocationId) -> usize {
        id.0 as usize
    }

    pub(crate) fn len_at(&self, position: usize) -> usize {
        self.allocations[position].1
    }

    #[allow(unsafe_code)]
    pub fn bytes(&self, id: AllocationId) -> &[u8] {
        let (chunks, bytes) = &self.allocations[id.0 as usize];
        // SAFETY: the chunks are plain bytes, and `bytes` of them were allocated.
        unsafe { std::slice::from_raw_parts(chunks.as_ptr().cast(), *bytes) }
    }

    #[allow(unsafe_code)]
    pub fn bytes_mut(&mut self, id: AllocationId) -> &mut [u8] {
        let (chunks, bytes) = &mut self.allocations[id.0 as usize];
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(chunks.as_mut_ptr().cast(), *bytes) }
    }
}

impl Region {
    /// The address of `bytes` bytes at byte `at`, after all checks.
    #[allow(unsafe_code)]
    #[inline]
    #[track_caller]
    pub fn access(&self, index: i64, at: i64, bytes: usize, touch: Touch) -> *mut u8 {
        if at < 0 || at as usize + bytes > self.bytes {
            self.out_of_bounds(index, bytes, touch);
        }
        if self.checked {
            let thread = Thread::current();
            let line = thread.line();
            if !touch.writes() && self.access == Access::Output {
                let message = format!("reads `{}[{index}]`, which is an Output: declare it InOut", self.name);
                thread.raise(FaultKind::ReadOfOutput, line, message);
            }
            thread.check(self, at as usize, bytes, touch, line);
        }
        // SAFETY: inside the region, which is part of one allocation.
        unsafe { self.base.add(at as usize) }
    }

    #[cold]
    #[track_caller]
    fn out_of_bounds(&self, index: i64, bytes: usize, touch: Touch) -> ! {
        let thread = Thread::current();
        let verb = if touch.writes() { "writes" } else { "reads" };
        let len = self.bytes / self.element.size();
        let message = match bytes / self.element.size() {
            0 | 1 => format!("{verb} `{}[{index}]`, which has {len} elements", self.name),
            more => format!("{verb} {more} elements from `{}[{index}]`, which has {len}", self.name),
        };
        thread.raise(FaultKind::OutOfBounds, thread.line(), message)
    }
}

/// What may index memory and registers: the integer types a kernel computes with.
pub trait KernelIndex: Copy {
    #[doc(hidden)]
    fn value(self) -> i64;
}

macro_rules! indices {
    ($($ty:ty)*) => { $(impl KernelIndex for $ty {
        #[inline]
        fn value(self) -> i64 {
            i64::try_from(self).unwrap_or(i64::MAX)
        }
    })* };
}
indices!(u32 i32 u64 i64);

/// Typed part of a region.
#[doc(hidden)]
pub struct Raw<T> {
    pub(crate) region: *const Region,
    /// Elements that `offset` has skipped.
    first: i64,
    element: PhantomData<*mut T>,
}

impl<T> Clone for Raw<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

impl<T: Element> Raw<T> {
    pub(crate) fn new(region: &Region) -> Self {
        Self { region, first: 0, element: PhantomData }
    }

    #[allow(unsafe_code)]
    #[inline]
    pub(crate) fn region(&self) -> &Region {
        // SAFETY: a handle exists inside a thread of the launch that owns the region.
        unsafe { &*self.region }
    }

    /// The address of a `V` at element `index`.
    #[inline]
    #[track_caller]
    pub(crate) fn at<V>(&self, index: i64, touch: Touch) -> *mut V {
        let region = self.region();
        assert!(!region.thin, "`{}` is read by loads alone: its elements are 8 bytes", region.name);
        let index = self.first.saturating_add(index);
        let at = index.saturating_mul(size_of::<T>() as i64);
        let address = region.access(index, at, size_of::<V>(), touch);
        if !(address as usize).is_multiple_of(size_of::<V>()) {
            let thread = Thread::current();
            let message =
                format!("`{}[{index}]` is not aligned to the {} bytes of the access", region.name, size_of::<V>());
            thread.raise(FaultKind::Misaligned, thread.line(), message);
        }
        address.cast()
    }

    #[inline]
    #[track_caller]
    pub(crate) fn get<V: Element>(&self, index: i64) -> V {
        self.get_by(index, Touch::Read)
    }

    #[inline]
    #[track_caller]
    pub(crate) fn set<V: Element>(&self, index: i64, value: V) {
        self.set_by(index, Touch::Write, value);
    }

    #[allow(unsafe_code)]
    #[inline]
    #[track_caller]
    pub(crate) fn get_by<V: Element>(&self, index: i64, touch: Touch) -> V {
        if self.region().thin {
            return self.widened(index, touch);
        }
        // SAFETY: `at` has checked bounds and alignment; every bit pattern is a valid element.
        unsafe { *self.at::<V>(index, touch) }
    }

    /// The 8 bytes of element `index` of a thin region, and zeros.
    #[allow(unsafe_code)]
    #[track_caller]
    fn widened<V: Element>(&self, index: i64, touch: Touch) -> V {
        assert_eq!((size_of::<T>(), size_of::<V>()), (16, 16), "elements of 8 bytes are read as 16");
        let index = self.first.saturating_add(index);
        let address = self.region().access(index, index.saturating_mul(8), 8, touch);
        let mut bytes = [0u8; 16];
        // SAFETY: `access` has checked bounds; every bit pattern is a valid element.
        unsafe {
            std::ptr::copy_nonoverlapping(address, bytes.as_mut_ptr(), 8);
            bytes.as_ptr().cast::<V>().read_unaligned()
        }
    }

    #[allow(unsafe_code)]
    #[inline]
    #[track_caller]
    pub(crate) fn set_by<V: Element>(&self, index: i64, touch: Touch, value: V) {
        // SAFETY: as above; all threads of a launch run on one OS thread.
        unsafe { *self.at::<V>(index, touch) = value }
    }

    /// The bytes from element `index` on, which were checked and noted by the caller.
    #[allow(unsafe_code)]
    #[track_caller]
    pub(crate) fn content(&self, index: i64, count: usize) -> Vec<u8> {
        let at = self.check_bounds(index, count);
        // SAFETY: inside the region.
        unsafe { std::slice::from_raw_parts(self.region().base.add(at), count * size_of::<T>()).to_vec() }
    }

    #[allow(unsafe_code)]
    #[inline]
    #[track_caller]
    pub(crate) fn update(&self, index: i64, change: impl FnOnce(T) -> T) -> T {
        let address = self.at::<T>(index, Touch::Atomic);
        // SAFETY: as above; nothing runs between the read and the write.
        unsafe {
            let old = *address;
            *address = change(old);
            old
        }
    }

    /// Checks that `count` elements from `index` on are there, without touching them. Gives the byte of the region
    /// where they start.
    #[track_caller]
    pub(crate) fn check_bounds(&self, index: i64, count: usize) -> usize {
        let region = self.region();
        let index = self.first.saturating_add(index);
        let at = index.saturating_mul(size_of::<T>() as i64);
        if at < 0 || at as usize + count * size_of::<T>() > region.bytes {
            region.out_of_bounds(index, count * size_of::<T>(), Touch::Read);
        }
        at as usize
    }

    /// The same place in the array that another block of the cluster has. `shared`: the arrays of each of its blocks.
    pub(crate) fn of_peer(mut self, shared: &[Vec<Region>], own: u32, peer: u32) -> Self {
        let number = shared[own as usize].iter().position(|region| std::ptr::eq(region, self.region));
        self.region = &shared[peer as usize][number.expect("an array of the thread's own block")];
        self
    }

    /// Where the handle starts in its region, in bytes.
    pub(crate) fn first_byte(&self) -> i64 {
        self.first.saturating_mul(size_of::<T>() as i64)
    }

    fn skip(mut self, by: i64) -> Self {
        self.first = self.first.saturating_add(by);
        self
    }
}

/// Memory that a kernel may read.
pub trait Readable: Copy {
    type Element: Element;
    #[doc(hidden)]
    fn raw(self) -> Raw<Self::Element>;
}

/// Memory that a kernel may write.
pub trait Writable: Copy {
    type Element: Element;
    #[doc(hidden)]
    fn raw_mut(self) -> Raw<Self::Element>;
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => { $(
        $(#[$doc])*
        pub struct $name<T>(pub(crate) Raw<T>);

        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<T> {}

        impl<T: Element> $name<T> {
            /// The handle `by` elements further on.
            pub fn offset(self, by: impl KernelIndex) -> Self {
                Self(self.0.skip(by.value()))
            }
        }

        impl<T: Element, I: KernelIndex> Index<I> for $name<T> {
            type Output = T;

            #[allow(unsafe_code)]
            #[inline]
            #[track_caller]
            fn index(&self, index: I) -> &T {
                // SAFETY: checked; the reference lives for one expression, in which no other thread runs.
                unsafe { &*self.0.at::<T>(index.value(), Touch::Read) }
            }
        }
    )* };
}
handles! {
    /// Constant data, read on the non-coherent path, also before the dependency wait. `weights<T>` in CUDA.
    Weights;
    /// What an earlier kernel wrote; read only. `const T*` in CUDA.
    Input;
    /// Rows of 16-bit floats that an earlier kernel wrote, or weights, brought tile by tile (`tile_load`). The first
    /// scalar behind it says how many values a row has. `tiles<T>` in CUDA: a tensor map.
    Tiles;
    /// What this kernel writes, every element of it; not read. `T*` in CUDA.
    Output;
    /// What this kernel reads and writes, or updates atomically. `T*` in CUDA.
    InOut;
    /// An array in the block's shared memory: `let tile = shared::<f32>(N);`.
    Shared;
}

macro_rules! readable {
    ($($name:ident)*) => { $(impl<T: Element> Readable for $name<T> {
        type Element = T;

        fn raw(self) -> Raw<T> {
            self.0
        }
    })* };
}
readable!(Weights Input InOut Shared);

macro_rules! writable {
    ($($name:ident)*) => { $(
        impl<T: Element> Writable for $name<T> {
            type Element = T;

            fn raw_mut(self) -> Raw<T> {
                self.0
            }
        }

        impl<T: Element, I: KernelIndex> IndexMut<I> for $name<T> {
            #[allow(unsafe_code)]
            #[inline]
            #[track_caller]
            fn index_mut(&mut self, index: I) -> &mut T {
                // SAFETY: checked; the reference lives for one assignment, in which no other thread runs.
                unsafe { &mut *self.0.at::<T>(index.value(), Touch::Write) }
            }
        }
    )* };
}
writable!(Output InOut Shared);

/// An array in registers: `let mut acc = regs(0.0f32, N);`. `T acc[N]` in CUDA.
pub struct Regs<T>(SmallVec<[T; 8]>);

/// `len` registers that start as `value`.
pub fn regs<T: Copy>(value: T, len: u32) -> Regs<T> {
    Regs(SmallVec::from_elem(value, len as usize))
}

impl<T> Regs<T> {
    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        &mut self.0
    }

    #[inline]
    #[track_caller]
    fn slot(&self, index: i64) -> usize {
        match usize::try_from(index) {
            Ok(at) if at < self.0.len() => at,
            _ => no_register(index, self.0.len()),
        }
    }
}

#[cold]
#[track_caller]
fn no_register(index: i64, len: usize) -> ! {
    let thread = Thread::current();
    let message = format!("register {index} of an array of {len}");
    thread.raise(FaultKind::OutOfBounds, thread.line(), message)
}

impl<T, I: KernelIndex> Index<I> for Regs<T> {
    type Output = T;

    #[inline]
    #[track_caller]
    fn index(&self, index: I) -> &T {
        &self.0[self.slot(index.value())]
    }
}

impl<T, I: KernelIndex> IndexMut<I> for Regs<T> {
    #[inline]
    #[track_caller]
    fn index_mut(&mut self, index: I) -> &mut T {
        let at = self.slot(index.value());
        &mut self.0[at]
    }
}
