//! The tests of the compiler's back end, in one binary: kernels against their oracles, their texts, NVRTC, lowering for the CPU, and what is refused for a GPU.

#![allow(clippy::unwrap_used)]

#[path = "../../../tests/common/skipped.rs"]
mod skipped;
#[path = "../support/mod.rs"]
mod support;

mod cpu_lowering;
mod cuda_refusals;
mod gpus;
mod intrinsics;
mod kernel_snapshots;
mod kernels_adapter;
mod kernels_attention;
mod kernels_draft;
mod kernels_gather;
mod kernels_geglu;
mod kernels_gemm;
mod kernels_heads;
mod kernels_matvec;
mod kernels_moe;
mod kernels_norm;
mod kernels_per_layer;
mod kernels_plain;
mod kernels_probe;
mod kernels_product;
mod kernels_quantise;
mod kernels_repack;
mod kernels_rows;
mod kernels_sample;
mod kernels_tower;
mod launch_arguments;
mod nvrtc;
mod nvrtc_parts;
mod planes;
mod stamps;
