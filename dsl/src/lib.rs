//! The two languages of gemma4c.
//!
//! `#[dataflow]` goes on a function that builds a graph; it names the nodes after the function's bindings.

pub use gemma4c_dsl_macros::dataflow;

extern crate self as gemma4c_dsl;

mod definition;
pub mod elements;
pub mod harness;
pub mod host;
mod instance;
pub mod intrinsics;
#[doc(hidden)]
pub mod semantics;
pub mod sim;
pub mod text;

pub use definition::{
    Access, Callee, ConstantDef, DeviceDef, KernelDef, LaunchContract, ParamDef, ParamKind, SharedDef, SlotDef,
};
pub use elements::{BF16, Element, ElementType, F16, F32x2, F32x4, Float, I32x4, U32x2, U32x4};
pub use gemma4c_dsl_macros::{device, kernel};
pub use instance::{
    Constant, ConstantValue, Instance, InstanceBuilder, InstanceError, InstanceParam, NVRTC_OPTIONS, Values,
};

/// Everything a file of kernels uses: `use gemma4c_dsl::prelude::*;`.
pub mod prelude {
    pub use crate::elements::{
        BF16, Element, F16, F32x2, F32x4, Float, I32x4, U32x2, U32x4, f32x2, f32x4, i32x4, u32x2, u32x4,
    };
    pub use crate::intrinsics::{
        asynchronous::*, atomics::*, bits::*, grid::*, ids::*, loads::*, math::*, tensor::*, warp::*,
    };
    pub use crate::sim::{InOut, Input, Output, Regs, Shared, Weights, regs};
    pub use crate::{By, device, kernel, require};
}

/// A condition on compile-time parameters. `static_assert` in the CUDA text, a fault in the simulator.
#[macro_export]
macro_rules! require {
    ($condition:expr) => {
        assert!($condition, "require!({})", stringify!($condition))
    };
}

/// `for i in (a..b).by(step)`: every `step`-th number of a range.
pub trait By<T> {
    fn by(self, step: T) -> Stepped<T>;
}

/// The numbers of a range in steps. A step beyond the type's largest number is an overflow, as it is on the GPU.
pub struct Stepped<T> {
    next: T,
    end: T,
    step: T,
}

macro_rules! stepped {
    ($($ty:ty)*) => { $(
        impl By<$ty> for std::ops::Range<$ty> {
            fn by(self, step: $ty) -> Stepped<$ty> {
                assert!(step > 0, "a loop's step is zero");
                Stepped { next: self.start, end: self.end, step }
            }
        }

        impl Iterator for Stepped<$ty> {
            type Item = $ty;

            fn next(&mut self) -> Option<$ty> {
                let now = self.next;
                if now >= self.end {
                    return None;
                }
                self.next = now + self.step;
                Some(now)
            }
        }
    )* };
}
stepped!(u32 i32 u64 i64);
