//! Formats of weights, one file a kind: all that a GPU needs of their types.
//!
//! A format is codes and factors. How bits become small integers or floats, and how a scale is read ([`factors`]), are
//! written once each and composed: `side_*` fetches what lies beside a unit of codes, `dot_*` multiplies a unit of one
//! row, `bytes_*` makes the signed bytes of tensor cores, `decode_*` pairs of 16-bit floats, and `value_*` one value of
//! a block in its file's layout. What each of them must do is said where it is used:
//! [`matvec`](super::matvec::formats), [`rows`](super::rows::formats), [`product`](super::product::decode),
//! [`gemm`](super::gemm::decode), [`values`](super::values). Planes follow from the layout ([`planes`](super::planes)).
//!
//! The tables of those families have the older types themselves, and take all others from [`of`].

pub mod description;
pub mod factors;
mod nibbles;
pub mod pieces;

use gemma4c_blocks::DType;
use gemma4c_dsl::{DeviceDef, Filled};

use description::{Format, TensorFormat};

/// What the kernels ask of a type.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    pub matvec: Format,
    /// `None` where int8 tensor cores cannot multiply it: several rows are multiplied by CUDA cores.
    pub tensor: Option<TensorFormat>,
    /// Eight values of a unit as bf16.
    pub decode: &'static DeviceDef,
    /// The same with fewer instructions, where there is such a function.
    pub decode_by_fma: &'static DeviceDef,
    /// For types with one scale of 16 bits for each 32 values.
    pub picked: Option<Picked>,
}

/// How the words that a lane picks out of the codes become pairs of 16-bit floats, next to the word that has the scale.
#[derive(Clone, Copy, Debug)]
pub struct Picked {
    pub to_bf16: &'static DeviceDef,
    pub to_f16: &'static DeviceDef,
}

/// What the kernels ask of a type; `None` of types that have a place of their own, or no kernels.
pub fn of(dtype: DType) -> Option<Kernels> {
    match dtype {
        DType::I4 => Some(nibbles::i4()),
        _ => None,
    }
}

/// The arguments of the `side_*` function of a type, from the memory of each of its planes.
pub fn side_arguments<M>(dtype: DType, plane: &impl Fn(&'static str) -> M) -> Option<Filled<M>> {
    let scales = || plane("scales");
    Some(match dtype {
        DType::I4 => pieces::side_half::Arguments { scales: scales() }.into(),
        _ => return None,
    })
}

/// What fills a slot `value` for tensors of a type, which are in their file's layout.
pub fn value_arguments<M>(dtype: DType, tensor: M) -> Option<Filled<M>> {
    Some(match dtype {
        DType::I4 => nibbles::value_i4::Arguments { tensor }.into(),
        _ => return None,
    })
}
