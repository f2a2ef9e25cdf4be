//! The kernel library: one family a file or folder, with the rule that shapes its launches beside each kernel.
//!
//! Nothing here knows a case, a graph or a program. Of a plan it has the type of keys and values and the layout of
//! records; of GPUs, the table of targets that launch shapes are chosen by. The table of all families, with their cases,
//! is `families.rs`; which kernel a node gets, and so which instances there are, is decided elsewhere.

pub mod adapter;
pub mod attention;
pub mod draft;
pub mod formats;
pub mod gather;
pub mod geglu;
pub mod gelu;
pub mod gemm;
pub mod heads;
pub mod matvec;
pub mod moe;
pub mod norm;
pub mod outputs;
pub mod per_layer;
pub mod plain;
pub mod planes;
pub mod probe;
pub mod product;
pub mod quantise;
pub mod repack;
pub mod rows;
pub mod sample;
pub mod tower;
pub mod values;

use gemma4c_dsl::{ElementType, Instance};
use gemma4c_plan::cuda::KvType;

use crate::nvrtc::Source;

/// The epsilon of the models' norms, for a product without one and for cases. A plan takes its own from the model file.
pub const NORM_EPSILON: f32 = 1e-6;

/// The element type of keys and values in the tiles that are multiplied. Those of 8 bits are widened to F16, and their cache is counted in
/// its two bytes.
pub const fn kv_element(kv: KvType) -> ElementType {
    match kv {
        KvType::F16 | KvType::Q8_0 | KvType::Fp8 => ElementType::F16,
        KvType::BF16 => ElementType::BF16,
        KvType::F32 => ElementType::F32,
    }
}

/// An instance's CUDA C under its kernel's name.
pub fn source(instance: &Instance) -> Source {
    Source { name: instance.def.name.to_owned(), text: instance.cuda() }
}
