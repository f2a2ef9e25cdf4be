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

pub mod bytes;
pub mod description;
pub mod factors;
pub mod fp4;
pub mod fp8;
pub mod grids;
pub mod nibbles;
pub mod packing;
pub mod pieces;
pub mod two_bits;

use gemma4c_blocks::DType;
use gemma4c_dsl::Filled;

pub use description::{Kernels, Picked};

/// What the kernels ask of a type; `None` of types that have a place of their own, or no kernels.
pub fn of(dtype: DType) -> Option<Kernels> {
    Some(match dtype {
        DType::MXFP4 => fp4::mxfp4(),
        DType::NVFP4 => fp4::nvfp4(),
        DType::I4 => nibbles::i4(),
        DType::I4Z => nibbles::i4_z(),
        DType::I8 => bytes::i8(),
        DType::F8 => fp8::f8(),
        DType::F8S => fp8::f8_s(),
        DType::Q2K => two_bits::q2_k(),
        DType::Q3K => two_bits::q3_k(),
        DType::I2 => two_bits::i2(),
        DType::IQ2XXS => grids::iq2_xxs(),
        DType::IQ2XS => grids::iq2_xs(),
        DType::IQ2S => grids::iq2_s(),
        DType::IQ3XXS => grids::iq3_xxs(),
        DType::IQ3S => grids::iq3_s(),
        _ => return None,
    })
}

/// Whether values are integers about zero, times a bfloat16 scale.
pub fn is_centred(dtype: DType) -> bool {
    of(dtype).and_then(|kernels| kernels.picked).is_some_and(|picked| picked.centred)
}

/// Whether several rows are better multiplied in 16 bits, because int8 tensor cores cannot have the type.
pub fn wants_16_bits(dtype: DType) -> bool {
    of(dtype).is_some_and(|kernels| kernels.matvec.integer && kernels.tensor.is_none())
}

/// The arguments of the `side_*` function of a type, from the memory of each of its planes.
pub fn side_arguments<M>(dtype: DType, plane: &impl Fn(&'static str) -> M) -> Option<Filled<M>> {
    let (high, scales, supers) = (|| plane("high"), || plane("scales"), || plane("supers"));
    Some(match dtype {
        DType::MXFP4 => factors::side_byte::Arguments { scales: scales() }.into(),
        DType::NVFP4 => factors::side_floats16::Arguments { scales: scales(), supers: supers() }.into(),
        DType::I4 => pieces::side_half::Arguments { scales: scales() }.into(),
        DType::Q2K => two_bits::side_q2_k::Arguments { scales: scales(), supers: supers() }.into(),
        DType::Q3K => two_bits::side_with_high::Arguments { high: high(), scales: scales(), supers: supers() }.into(),
        DType::I2 => two_bits::side_i2::Arguments { scales: scales() }.into(),
        DType::IQ2XXS => grids::side_iq2_xxs::Arguments { scales: scales(), supers: supers() }.into(),
        DType::IQ2XS => grids::side_iq2_xs::Arguments { scales: scales(), supers: supers() }.into(),
        DType::IQ2S => grids::side_iq2_s::Arguments { scales: scales(), supers: supers() }.into(),
        DType::IQ3XXS => grids::side_iq3_xxs::Arguments { high: high(), scales: scales() }.into(),
        DType::IQ3S => grids::side_iq3_s::Arguments { high: high(), scales: scales(), supers: supers() }.into(),
        DType::I4Z => pieces::side_half_pair::Arguments { scales: scales() }.into(),
        DType::I8 | DType::F8 => pieces::side_q8_0::Arguments { scales: scales() }.into(),
        DType::F8S => factors::side_single16::Arguments { scales: scales() }.into(),
        _ => return None,
    })
}

/// What fills a slot `value` for tensors of a type, which are in their file's layout.
pub fn value_arguments<M>(dtype: DType, tensor: M) -> Option<Filled<M>> {
    Some(match dtype {
        DType::MXFP4 => fp4::value_mxfp4::Arguments { tensor }.into(),
        DType::NVFP4 => fp4::value_nvfp4::Arguments { tensor }.into(),
        DType::I4 => nibbles::value_i4::Arguments { tensor }.into(),
        DType::Q2K => two_bits::value_q2_k::Arguments { tensor }.into(),
        DType::Q3K => two_bits::value_q3_k::Arguments { tensor }.into(),
        DType::I2 => two_bits::value_i2::Arguments { tensor }.into(),
        DType::IQ2XXS => grids::value_iq2_xxs::Arguments { tensor }.into(),
        DType::IQ2XS => grids::value_iq2_xs::Arguments { tensor }.into(),
        DType::IQ2S => grids::value_iq2_s::Arguments { tensor }.into(),
        DType::IQ3XXS => grids::value_iq3_xxs::Arguments { tensor }.into(),
        DType::IQ3S => grids::value_iq3_s::Arguments { tensor }.into(),
        DType::I4Z => nibbles::value_i4_z::Arguments { tensor }.into(),
        DType::I8 => bytes::value_i8::Arguments { tensor }.into(),
        DType::F8 => fp8::value_f8::Arguments { tensor }.into(),
        DType::F8S => fp8::value_f8_s::Arguments { tensor }.into(),
        _ => return None,
    })
}
