//! Kernels that tiles of rows are tested with, in the simulator and by NVRTC.

use gemma4c_dsl::prelude::*;

/// The tile at row `row` that holds a row's last values, as it lies in shared memory.
#[kernel(block = 128, dynamic_shared)]
pub fn last_tile(x: Tiles<BF16>, width: u32, row: u32, out: Output<BF16>) {
    let tile = shared::<BF16>(2048);
    let full = shared::<u64>(1);
    if thread_idx() == 0 {
        mbarrier_init(full, 0u32, 1);
        fence_proxy_async();
        mbarrier_arrive_expect(full, 0u32, 4096);
        tile_load(tile, 0u32, x, (width - 1) / 64 * 64, row, full, 0u32);
    }
    barrier();
    mbarrier_wait(full, 0u32, 0);
    for i in (thread_idx()..2048).by(128) {
        out[i] = tile[i];
    }
}

/// The sums of 32 rows, of which 64 values at a time lie in one of two stages.
#[kernel(block = 64, dynamic_shared)]
pub fn sums_of_tiles(x: Tiles<BF16>, width: u32, out: Output<f32>) {
    let ring = shared::<BF16>(4096);
    let full = shared::<u64>(2);
    let empty = shared::<u64>(2);
    if thread_idx() == 0 {
        for stage in 0u32..2 {
            mbarrier_init(full, stage, 1);
            mbarrier_init(empty, stage, 1);
        }
        fence_proxy_async();
    }
    barrier();
    if warp_id() == 1 {
        if lane_id() == 0 {
            for step in 0..width / 64 {
                mbarrier_wait(empty, step % 2, 1 - step / 2 % 2);
                mbarrier_arrive_expect(full, step % 2, 4096);
                tile_load(ring, step % 2 * 2048, x, step * 64, 0, full, step % 2);
            }
        }
    } else {
        let row = lane_id();
        let mut sum = 0.0f32;
        for step in 0..width / 64 {
            mbarrier_wait(full, step % 2, step / 2 % 2);
            for i in 0u32..64 {
                sum += ring[step % 2 * 2048 + row * 64 + (i / 8 ^ row % 8) * 8 + i % 8].to_f32();
            }
            warp_barrier();
            if row == 0 {
                mbarrier_arrive(empty, step % 2);
            }
        }
        out[row] = sum;
    }
}
