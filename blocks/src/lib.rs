//! Block formats of weights as data, and the decoders that follow from them.
//!
//! A GGUF tensor is rows of blocks; a block packs `len` values into `bytes` bytes. [`Layout`] says where each
//! field of a block lies, and that table is the only place in the project that knows: the reader sizes tensors
//! from it, [`reference`] decodes any format straight from it, the unrolled decoders in [`decode`] are tested
//! against it for every bit pattern that matters, and GPU kernels take their offsets from it.
//!
//! [`grids`] has the tables of the IQ formats. [`finite`] finds what is no number in a damaged file.
//!
//! [`narrow`] is the other use of 8 bits: keys and values, which are rounded while a plan runs.
//!
//! [`recipe`] makes rows of blocks of files that store them otherwise: safetensors with scales in tensors of their own,
//! and floats that are to be quantised.
//!
//! What this crate does not do: arithmetic on blocks; dot products live with the backends.

pub mod decode;
pub mod finite;
pub mod grids;
mod layout;
pub mod narrow;
pub mod recipe;
pub mod reference;

pub use layout::{Codes, DType, Factor, Index, Layout, Minimum, OddField, Plane, Scale, Signs};
