//! What an operator may be used on. `#[kernel]` wraps operands in these identity functions, so that rustc refuses, at
//! the operand, what would mean something else in C++: there `u8 + u8` is an `int`, `!x` of a number is a comparison
//! with zero, `a & b` of two bools is an `int`, and a float out of range makes an `as i32` undefined.

macro_rules! holds {
    ($trait:ident: $($ty:ty)*) => { $(impl $trait for $ty {})* };
}

/// Types with `+ - * /`.
#[diagnostic::on_unimplemented(
    message = "arithmetic on `{Self}` is refused in a kernel",
    label = "cast it first: `x as i32` or `x as u32`; a 16-bit float: `x.to_f32()`",
    note = "C++ widens small integers to `int` before it computes, Rust does not: the two would differ"
)]
pub trait Arithmetic {}
holds!(Arithmetic: i32 u32 i64 u64 f32);

#[inline(always)]
pub fn arithmetic<T: Arithmetic>(value: T) -> T {
    value
}

/// Types with `% & | ^ << >>`.
#[diagnostic::on_unimplemented(
    message = "`%`, `&`, `|`, `^`, `<<`, `>>` on `{Self}` are refused in a kernel",
    label = "cast a small integer first (`x as u32`); join conditions with `&&` and `||`; a float has none of them",
    note = "bit operations and remainders are for u32, i32, u64 and i64"
)]
pub trait Bits {}
holds!(Bits: i32 u32 i64 u64);

#[inline(always)]
pub fn bits<T: Bits>(value: T) -> T {
    value
}

/// Types with `!`.
#[diagnostic::on_unimplemented(
    message = "`!` on `{Self}` is refused in a kernel",
    label = "write `x ^ 0xffff_ffff` to flip bits, or compare: `x == 0`",
    note = "`!` is for bool: in C++ it does not flip bits"
)]
pub trait Boolean {}
holds!(Boolean: bool);

#[inline(always)]
pub fn boolean<T: Boolean>(value: T) -> T {
    value
}

/// Types that `as` takes to an integer.
#[diagnostic::on_unimplemented(
    message = "`as` from `{Self}` to an integer is refused in a kernel",
    label = "write `f32_to_i32(x)`, `f32_to_u32(x)` (towards zero) or `round_to_i32(x)`",
    note = "a float out of range saturates in Rust and is undefined in C++"
)]
pub trait ToInteger {}
holds!(ToInteger: bool u8 i8 u16 i16 u32 i32 u64 i64);

#[inline(always)]
pub fn to_integer<T: ToInteger>(value: T) -> T {
    value
}

/// Types that `as` takes to f32.
#[diagnostic::on_unimplemented(
    message = "`as f32` from `{Self}` is refused in a kernel",
    label = "a 16-bit float: `x.to_f32()`"
)]
pub trait ToFloat {}
holds!(ToFloat: u8 i8 u16 i16 u32 i32 u64 i64 f32);

#[inline(always)]
pub fn to_float<T: ToFloat>(value: T) -> T {
    value
}
