//! Kernels of mbarriers and bulk copies. The tests of the simulator run them, NVRTC's compile them.

use gemma4c_dsl::prelude::*;

/// Adds up pieces of 64 values that come through a ring of two stages: a lane of the last warp copies, two warps add.
#[kernel(block = 96, dynamic_shared)]
pub fn ring(x: Weights<f32>, pieces: u32, out: Output<f32>) {
    let full = shared::<u64>(2);
    let empty = shared::<u64>(2);
    let stages = shared::<f32>(128);
    if thread_idx() == 0 {
        for stage in 0u32..2 {
            mbarrier_init(full, stage, 1);
            mbarrier_init(empty, stage, 64);
        }
        fence_proxy_async();
    }
    barrier();
    if warp_id() == 2 {
        if lane_id() == 0 {
            for piece in 0..pieces {
                let stage = piece % 2;
                mbarrier_wait(empty, stage, (piece / 2 + 1) % 2);
                mbarrier_arrive_expect(full, stage, 256);
                bulk_load(stages, stage * 64, x, piece * 64, 64, full, stage);
            }
        }
    } else {
        let mut sum = 0.0f32;
        for piece in 0..pieces {
            let stage = piece % 2;
            mbarrier_wait(full, stage, piece / 2 % 2);
            sum += stages[stage * 64 + thread_idx()];
            mbarrier_arrive(empty, stage);
        }
        out[thread_idx()] = sum;
    }
}
