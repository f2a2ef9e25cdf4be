//! The two languages of gemma4c.
//!
//! `#[dataflow]` goes on a function that builds a graph; it names the nodes after the function's bindings.
//!
//! `#[kernel]` goes on a plain Rust function and prints it as CUDA C at build time. rustc checks the function; it stays
//! in place as the kernel's meaning, which the simulator ([`sim`]) runs; the printed text is compiled by the system's
//! C++ compiler ([`host`]) and by NVRTC. The same cases ([`harness`]) run through all of them.
//!
//! # How to write a kernel
//!
//! ```
//! use gemma4c_dsl::prelude::*;
//! use gemma4c_dsl::{ElementType, LaunchArguments, harness::{Bound, Case}};
//!
//! /// Adds the residual: a function for a slot. The slot's values come first, then arguments of its own.
//! #[device]
//! fn add_residual(value: f32, row: u32, residual: Input<f32>) -> f32 {
//!     value + residual[row]
//! }
//!
//! /// The sum of each row's squares.
//! #[kernel(block = 64, dependent, slots(epilogue(value: f32, row: u32) -> f32))]
//! pub fn square_sums<const K: u32, E: Float>(x: Input<E>, out: Output<f32>) {
//!     require!(K % 32 == 0);
//!     let partial = shared::<f32>(2);
//!     let row = block_idx();
//!
//!     // Nothing but weights may be touched before this line.
//!     grid_dependency_wait();
//!     let mut sum = 0.0f32;
//!     for i in (thread_idx()..K).by(64) {
//!         let value = x[row * K + i].to_f32();
//!         sum = value.mul_add(value, sum);
//!     }
//!     let sum = warp_sum(sum);
//!     if lane_id() == 0 {
//!         partial[warp_id()] = sum;
//!     }
//!     barrier();
//!     if thread_idx() == 0 {
//!         out[row] = epilogue(partial[0] + partial[1], row);
//!     }
//!     grid_launch_dependents();
//! }
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let instance = square_sums::Chosen { K: 32, E: ElementType::BF16, epilogue: vec![add_residual::DEF] }.build()?;
//!     println!("{}", instance.cuda()); // the whole source, for NVRTC
//!     // Arguments in launch order; here addresses stand for memory.
//!     let arguments: LaunchArguments<u64> = square_sums::Arguments { x: 4096, out: 8192 }
//!         .with_slot(square_sums::slot::epilogue, add_residual::Arguments { residual: 12288 });
//!     assert_eq!(arguments.bind(&instance)?.len(), 3);
//!     Case::new("two rows of ones", instance)
//!         .grid([2, 1, 1])
//!         .buffer("x", vec![BF16::from_f32(1.0); 64])
//!         .buffer("epilogue_residual", vec![0.5f32, 0.25])
//!         .expect("out", vec![32.5f32, 32.25], Bound::Exact)
//!         .check()?; // the simulator in three orders with all checks, then the host's compiler
//!     Ok(())
//! }
//! ```
//!
//! A kernel stands at the level of a module, not inside a function: beside it the macro puts a module of its name, with
//! `DEF`, and with a field for everything that an instance chooses (`Chosen`) and that a launch gives (`Arguments`). A
//! forgotten or misspelt one is an error of rustc. A device function that takes more than a slot's values has
//! `Arguments`, too.
//!
//! - **The head.** `block` is the number of threads, an expression over compile-time parameters. `dependent`: launched
//!   with programmatic dependent launch, so every thread executes `grid_dependency_wait()`. `waits_first`: it does so
//!   before `grid_launch_dependents()`, so that the launches before its predecessor have ended when its successor
//!   starts. `early(CONDITION, a, …)`: where the condition over compile-time parameters holds, the buffers a, … are
//!   read before the wait; a plan with such a launch must show that whoever writes there has ended. It may stand
//!   several times. `only_reads(CONDITION, a, …)`: the buffers a, … are not written then, whatever their role.
//!   `min_blocks`, also an expression: the second operand of `__launch_bounds__`. `cluster`, also an expression: the
//!   number of blocks, consecutive along y, that wait for each other and read each other's shared memory
//!   (`cluster_barrier`, `load_peer`); 1 if not given. `dynamic_shared`: shared arrays live in dynamic shared memory
//!   (needed above 48 KiB, and in clusters); the launch states [`Instance::shared_bytes`]. `slots(…)`: named places,
//!   called like functions.
//! - **Compile-time parameters** are const generics (`u32`, `i32`, `f32`, `bool`): `constexpr` in the text, so loops
//!   over them unroll and arrays may have their length. In Rust they are variables that the instance fills, so one
//!   compiled test runs every instance. A device function names the ones it needs in the same way and gets the
//!   instance's.
//! - **Configs**: `#[config] struct Shape { WIDTH: u32, PADDED: bool }` is compile-time parameters that travel
//!   together. A kernel or a device function takes one as `const S: Shape` and reads `S.WIDTH`; the text has the fields
//!   alone, as if each were a parameter of its own, so their names are unique in a kernel. A device function may still
//!   name one of them, `const WIDTH: u32`. `Chosen` has a field of the struct's type.
//! - **Element types** are type parameters bound by [`Float`] (f32, F16, BF16).
//! - **Buffers** are parameters by role: [`sim::Weights`] (constant; the non-coherent path; allowed before the
//!   dependency wait), [`sim::Input`], [`sim::Output`] (all of it written, none of it read), [`sim::InOut`];
//!   [`sim::Tiles`] are rows that bulk copies bring in tiles (Hopper and later). `x[i]` reads, `x[i] = v` and `x[i] +=
//!   v` write; `x.offset(n)` is the handle n elements on; `load::<U32x4>(x, i)` and `store(x, i, v)` move 16 bytes.
//!   Scalars are u32, i32, u64, f32.
//! - **Shared memory**: `let tile = shared::<f32>(N);` at the top level of the kernel; `Shared<T>` as a device
//!   function's parameter.
//! - **Registers**: `let mut acc = regs(0.0f32, N);`, `&mut Regs<f32>` as a parameter. Index them with unrolled loops
//!   alone: a run-time index spills them.
//! - **Slots**: an instance fills each with device functions whose first parameters are the slot's; extra parameters
//!   become launch arguments called `<slot>_<parameter>`, after the kernel's own. They start at the first memory
//!   handle; where a scalar comes first, `#[device(fills(value, row))]` names what the slot gives. A slot whose result
//!   has the type of its first value may stay empty or chain several functions; any other must be filled with one.
//! - **Structs of registers**: `#[registers] struct Unit { codes: U32x4, number: u32 }` is a plain `Copy` struct of
//!   value types, and a struct in C++. It is a local, a parameter, a result, an element of `regs(Unit::ZERO, N)`, and
//!   behind `&mut`; never an element of memory. A literal `Unit { codes, number: 1 }` writes all fields in the order of
//!   declaration. A slot may take one, and gives a number or a vector.
//! - **Views**: `#[view] struct KvView<KV: Float> { k: Input<KV>, v: Input<KV>, capacity: u32 }` is memory handles and
//!   numbers that travel together: a struct in C++, `kv.k[i]` and `kv.k.offset(n)` in both. Each handle keeps its role.
//!   A kernel takes the fields as parameters `kv_k`, `kv_v`, … and puts the struct together; the host fills a
//!   `KvViewArguments`; `early(…, kv.k)` names one. With `Shared<T>` or other values among the fields a view is made in
//!   the kernel, `Scratch::<KV> { keys, sums }`, for device functions. Its fields do not change. A function with a view
//!   fills a slot if it says what the slot gives: `fills(value)`.
//! - **Device functions** are inlined. They take values, handles, `&mut value` and `&mut Regs<T>`, and return a value
//!   or nothing. In CUDA a register array is a reference with its length, so that they may pass it on to `wgmma`.
//! - **Thin functions**: `#[device(thin)]` on a function in a slot says that elements of `Weights<U32x4>` are 8
//!   bytes. Loads and 16-byte copies of one bring these, and zeros or anything behind them. So kernels of units of 16
//!   bytes take units of 8. `#[device(thin(other))]` on a function that they call names what stands for it then.
//! - **Tables** ([`table!`]): constant words by index, in shared memory.
//! - **Device functions with slots**: `#[device(slots(fetch(at: u32) -> U32x4))]`. Whoever calls one passes a function
//!   for each slot before the other arguments: a slot of its own, or a device function by name, `pipeline(fetch,
//!   dot_q8_0, &mut ahead, …)`. In Rust a slot is an `impl Fn`; in CUDA the function is a template, and a kernel's slot
//!   is passed as a lambda over its launch arguments, `fetch_slot`.
//!
//! # The language
//!
//! Statements: `let` of one name (a type or an initial value that says its type), assignment and compound assignment,
//! `if`/`else if`/`else`, `for` over `a..b` and `(a..b).by(step)`, `while`, `loop`, `break`, `continue`, `return`,
//! blocks, calls, `require!(condition)` (a `static_assert`), `const NAME: u32 = …;`. `#[unroll]` and `#[unroll(4)]` on
//! a loop. Expressions: literals, variables, the operators, `as`, indexing, fields (`.x`, `.codes`), literals of
//! `#[registers]` and `#[view]` structs, calls of device functions, slots and [`intrinsics`], methods of numbers (`min
//! max clamp abs sqrt mul_add floor ceil trunc round round_ties_even exp exp2 ln log2 powf tanh sin cos to_bits
//! is_nan`, `wrapping_add wrapping_sub wrapping_mul rotate_left rotate_right div_ceil abs_diff count_ones leading_zeros
//! trailing_zeros`, `to_f32`), `T::from_f32`, `f32::from_bits`, constants such as `f32::INFINITY`, and `if c { a } else
//! { b }` with one expression a branch. Names and comments are kept; a name that shadows another gets a number.
//!
//! Everything else is a compile error at its token that says what to write instead: closures, `match`, tuples, arrays,
//! other structs, references outside calls, recursion, `usize`, f64, iterators, other macros, `..=`, labels.
//!
//! # What means the same, and how
//!
//! - A bare literal takes its type from its neighbour in Rust and in C++. Where it has none (`let n = 0`, `1 << k`,
//!   `0..4`, `2 * 3`) it is refused: write `0u32`.
//! - Arithmetic is for i32, u32, i64, u64 and f32; small integers are cast first, 16-bit floats converted. rustc checks
//!   this: the macro wraps operands in identity functions whose bounds say so. `!` is for bool, `& | ^ << >> %` for
//!   integers.
//! - Overflow, division by zero and shifts out of range are faults of the simulator, so that C++'s undefined behaviour
//!   is never reached in a tested case. `wrapping_*` wraps in both.
//! - `as` between integers truncates or extends, to f32 rounds to nearest. From f32 to an integer: `f32_to_i32`, which
//!   saturates everywhere.
//! - Floats are never contracted: NVRTC gets `--fmad=false` ([`NVRTC_OPTIONS`]), the host `-ffp-contract=off`;
//!   `mul_add` is one fused operation everywhere. `+ - * / sqrt mul_add` and the roundings give the same bits in every
//!   executor; `exp exp2 ln log2 powf tanh sin cos`, tensor-core sums and float atomics do not, and need a bound.
//! - A loop's bounds are evaluated once; in the text, one that could change becomes a variable. C++ evaluates arguments
//!   and operands in any order, so two effects (atomics, calls with `&mut`) in one expression are refused.
//!
//! # Intrinsics
//!
//! [`intrinsics::TABLE`] has every row with its scope. By topic: [`intrinsics::ids`] (`thread_idx block_idx lane_id
//! warp_id …`), [`intrinsics::warp`] (`barrier barrier_of warp_barrier shfl_xor shfl_idx ballot warp_any warp_all
//! warp_sum warp_max warp_largest block_sum block_max`), [`intrinsics::loads`] (`load load_streamed load_streamed_if
//! read_only store`), [`intrinsics::bits`] (`dp4a dp4a_unsigned byte_perm byte_perm_or_sign byte_signs byte_of
//! signed_byte_of nibble_of pack_bytes sub_bytes bf16_lo bf16_hi f16_lo f16_hi pack_bf16 pack_f16`), [`intrinsics::narrow`] (`widen_int8
//! multiply_f16 fma_f16 and_or e4m3_as_f16`, and from Ada on `widen_e4m3 pack_e4m3`), [`intrinsics::math`] (`rsqrt
//! quotient recip f32_to_i32 f32_to_u32 round_to_i32 exp_fast exp2_fast exp2_flushed`), [`intrinsics::atomics`]
//! (`atomic_add last_block_of`), [`intrinsics::packets`] (`send receive`: words between the blocks of a launch; `prefetch`),
//! [`intrinsics::asynchronous`] (`cp_async16 cp_async4 cp_async_commit cp_async_wait`), [`intrinsics::mbarrier`]
//! (`mbarrier_init mbarrier_arrive mbarrier_arrive_expect cp_async_arrive mbarrier_wait`) and [`intrinsics::bulk`]
//! (`bulk_load`: Hopper and later, as mbarriers), [`intrinsics::tiles`] (`tile_load`), [`intrinsics::tensor`]
//! (`ldmatrix_x1 … mma_m16n8k16_bf16 mma_m16n8k16_f16 mma_m16n8k16_s8 mma_m16n8k32_s8`), [`intrinsics::warpgroup`]
//! (`wgmma_bf16 wgmma_b16_held wgmma_b16 wgmma_b16_held_across wgmma_fence wgmma_commit wgmma_wait fence_proxy_async`:
//! Hopper only), [`intrinsics::cluster`] (`cluster_rank cluster_barrier cluster_arrive cluster_wait load_peer`: Hopper
//! and later), [`intrinsics::grid`] (`grid_dependency_wait grid_launch_dependents order_loads`). Warp, warpgroup and
//! block intrinsics need all their threads at the same line; shuffles and reductions of a warp do not order memory.

pub use gemma4c_dsl_macros::dataflow;

extern crate self as gemma4c_dsl;

mod arguments;
mod definition;
pub mod elements;
pub mod harness;
pub mod host;
mod instance;
pub mod intrinsics;
mod passing;
#[doc(hidden)]
pub mod semantics;
pub mod sim;
mod source;
#[doc(hidden)]
pub mod structs;
pub mod text;
mod thin;
mod values;

pub use arguments::{ArgumentError, ArgumentValue, Filled, LaunchArguments, SlotKey};
pub use definition::{
    Access, Buffers, Callee, ConstantDef, DeviceDef, KernelDef, LaunchContract, ParamDef, ParamKind, SharedDef,
    SlotDef, StructDef, StructKind, TableDef,
};
pub use elements::{BF16, Element, ElementType, F16, F32x2, F32x4, Float, I32x4, U32x2, U32x4};
pub use gemma4c_dsl_macros::{config, device, kernel, registers, view};
pub use instance::{Instance, InstanceBuilder, InstanceError, InstanceParam, NVRTC_OPTIONS};
pub use structs::{Config, Registers, Struct, View, ViewArguments};
pub use values::{Constant, ConstantValue, Values};

/// Everything a file of kernels uses: `use gemma4c_dsl::prelude::*;`.
pub mod prelude {
    pub use crate::elements::{
        BF16, Element, F16, F32x2, F32x4, Float, I32x4, U32x2, U32x4, f32x2, f32x4, i32x4, u32x2, u32x4,
    };
    pub use crate::intrinsics::{
        asynchronous::*, atomics::*, bits::*, bulk::*, cluster::*, grid::*, ids::*, loads::*, math::*, mbarrier::*,
        narrow::*, packets::*, tensor::*, tiles::*, warp::*, warpgroup::*,
    };
    pub use crate::sim::{InOut, Input, Output, Regs, Shared, Tiles, Weights, regs};
    pub use crate::{By, config, device, kernel, registers, require, view};
}

/// A constant table of words, and the function that looks a value up:
/// `table! { /// Squares. pub fn squares: [u32; 256] = all_squares(); }`, where `squares(i)` is the i-th.
///
/// On a GPU a table is in the text. A kernel that reaches one copies it to shared memory when it starts, in front of its
/// first line and a barrier of the block, beside its own arrays ([`Instance::table_bytes`]).
#[macro_export]
macro_rules! table {
    ($(#[doc = $doc:literal])* $vis:vis fn $name:ident: [u32; $len:expr] = $values:expr;) => {
        $(#[doc = $doc])*
        #[track_caller]
        $vis fn $name(index: u32) -> u32 {
            $name::DEF.values[index as usize]
        }

        #[doc(hidden)]
        #[allow(non_camel_case_types)]
        $vis enum $name {}

        impl $name {
            pub const DEF: &'static $crate::TableDef = {
                static VALUES: [u32; $len] = $values;
                static DEF: $crate::TableDef =
                    $crate::TableDef { name: stringify!($name), doc: concat!($($doc, "\n"),*), values: &VALUES };
                &DEF
            };

            #[doc(hidden)]
            pub fn callee() -> $crate::Callee {
                $crate::Callee::Table(Self::DEF)
            }
        }
    };
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
