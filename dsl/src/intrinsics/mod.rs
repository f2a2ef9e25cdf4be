//! Intrinsics: what a kernel can do beyond arithmetic. Each is one row: its Rust meaning, its CUDA text, its host text
//! and its synchronisation scope. A new one is one row in the file of its topic; it may wrap any inline PTX, if it
//! brings its Rust meaning.
//!
//! Two macros write rows (`rows.rs`).

pub mod asynchronous;
pub mod atomics;
pub mod bits;
pub mod bulk;
pub mod cluster;
pub mod grid;
pub mod ids;
pub mod loads;
pub mod math;
pub mod mbarrier;
pub mod narrow;
pub mod packets;
mod rows;
pub mod tensor;
pub mod tiles;
pub mod warp;
pub mod warpgroup;

pub use crate::definition::{Hook, HostText, Intrinsic, Scope};

macro_rules! table {
    ($($module:ident: $($name:ident)*;)*) => {
        /// Every intrinsic, by topic.
        pub static TABLE: &[&Intrinsic] = &[$($($module::$name::ROW),*),*];
    };
}

table! {
    ids: thread_idx block_dim block_idx block_idx_y block_idx_z grid_dim grid_dim_y grid_dim_z lane_id warp_id;
    warp: barrier warp_barrier shfl_xor shfl_idx ballot warp_any warp_all warp_sum warp_max warp_largest block_sum block_max;
    atomics: atomic_add last_block_of;
    loads: load load_streamed load_streamed_if read_only store store_floats4;
    packets: send receive prefetch;
    asynchronous: cp_async16 cp_async4 cp_async_commit cp_async_wait;
    mbarrier: mbarrier_init mbarrier_arrive mbarrier_arrive_expect cp_async_arrive mbarrier_wait;
    bulk: bulk_load;
    tiles: tile_load;
    bits: byte_of signed_byte_of nibble_of pack_bytes byte_perm byte_perm_or_sign byte_signs dp4a dp4a_unsigned sub_bytes bf16_lo bf16_hi f16_lo f16_hi pack_bf16 pack_f16;
    narrow: widen_int8 multiply_f16 fma_f16 and_or e4m3_as_f16 widen_e4m3 pack_e4m3;
    math: rsqrt quotient recip f32_to_i32 f32_to_u32 round_to_i32 exp_fast exp2_fast exp2_flushed;
    tensor: ldmatrix_x1 ldmatrix_x2 ldmatrix_x4 ldmatrix_x2_trans ldmatrix_x4_trans mma_m16n8k16_bf16 mma_m16n8k16_f16 mma_m16n8k16_s8 mma_m16n8k32_s8;
    warpgroup: wgmma_bf16 wgmma_b16_held wgmma_b16 wgmma_b16_held_across wgmma_fence wgmma_commit wgmma_wait fence_proxy_async;
    cluster: cluster_rank cluster_barrier cluster_arrive cluster_wait load_peer;
    grid: grid_dependency_wait grid_launch_dependents order_loads;
}
