//! The merge of splits that are the blocks of a cluster, out of each other's shared memory, and of what several clusters have left in memory.
//!
//! Everything is asked for at once: the values of the other blocks are on their way before it is known what share each of them has.

use gemma4c_dsl::prelude::*;

use super::floats::add_scaled;

/// Lane p: the largest score and the total that block p of the cluster has found for a head, the first element of both.
#[device]
pub fn peer_part(largest: Shared<f32>, totals: Shared<f32>, peers: u32) -> F32x2 {
    let mut part = f32x2(f32::NEG_INFINITY, 0.0);
    if lane_id() < peers {
        part = f32x2(load_peer::<f32>(largest, 0u32, lane_id()), load_peer::<f32>(totals, 0u32, lane_id()));
    }
    part
}

/// Four values of a head as each block of the cluster has them.
#[device]
pub fn load_peers<const PEERS: u32>(four: Shared<f32>, peers: u32, parts: &mut Regs<F32x4>) {
    #[unroll]
    for peer in 0..PEERS {
        if peer < peers {
            parts[peer] = load_peer::<F32x4>(four, 0u32, peer);
        }
    }
}

/// These merged, in the order of `combine.rs`: lane p has the share of block p. A collective of the warp.
#[device]
pub fn merge_peers<const PEERS: u32>(parts: &mut Regs<F32x4>, share: f32) -> F32x4 {
    let mut sum = F32x4::ZERO;
    #[unroll]
    for peer in 0..PEERS {
        sum = add_scaled(sum, 1.0, add_scaled(F32x4::ZERO, shfl_idx(share, peer), parts[peer]));
    }
    sum
}

/// Four values of a head, merged from what clusters have left, in their order. Lane c has the share of cluster c. A collective
/// of the warp.
#[device]
pub fn merge_clusters<const D: u32, const G: u32>(values: Input<f32>, share: f32, clusters: u32) -> F32x4 {
    let mut sum = F32x4::ZERO;
    for first in (0..clusters).by(8) {
        let mut parts = regs(F32x4::ZERO, 8);
        #[unroll]
        for i in 0u32..8 {
            if first + i < clusters {
                parts[i] = load::<F32x4>(values, (first + i) * (G * D));
            }
        }
        #[unroll]
        for i in 0u32..8 {
            sum = add_scaled(sum, shfl_idx(share, first + i), parts[i]);
        }
    }
    sum
}
