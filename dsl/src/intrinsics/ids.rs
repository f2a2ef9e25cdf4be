//! Indices: the thread's position in its block, warp and grid. Blocks are one-dimensional, grids up to three.

use super::rows::intrinsic;
use crate::sim::thread::Thread;

intrinsic! {
    /// Number of the thread in its block.
    Thread fn thread_idx() -> u32 { Thread::current().index }
    cuda "return threadIdx.x;"
}

intrinsic! {
    /// Threads of a block.
    Thread fn block_dim() -> u32 { Thread::current().launch().threads }
    cuda "return blockDim.x;"
}

intrinsic! {
    /// Number of the block in the grid, first dimension.
    Thread fn block_idx() -> u32 { Thread::current().block().index[0] }
    cuda "return blockIdx.x;"
}

intrinsic! {
    /// Number of the block in the grid, second dimension.
    Thread fn block_idx_y() -> u32 { Thread::current().block().index[1] }
    cuda "return blockIdx.y;"
}

intrinsic! {
    /// Number of the block in the grid, third dimension.
    Thread fn block_idx_z() -> u32 { Thread::current().block().index[2] }
    cuda "return blockIdx.z;"
}

intrinsic! {
    /// Blocks of the grid, first dimension.
    Thread fn grid_dim() -> u32 { Thread::current().launch().grid[0] }
    cuda "return gridDim.x;"
}

intrinsic! {
    /// Blocks of the grid, second dimension.
    Thread fn grid_dim_y() -> u32 { Thread::current().launch().grid[1] }
    cuda "return gridDim.y;"
}

intrinsic! {
    /// Blocks of the grid, third dimension.
    Thread fn grid_dim_z() -> u32 { Thread::current().launch().grid[2] }
    cuda "return gridDim.z;"
}

intrinsic! {
    /// Number of the thread in its warp.
    Thread fn lane_id() -> u32 { Thread::current().index % 32 }
    cuda "return threadIdx.x % 32u;"
}

intrinsic! {
    /// Number of the warp in its block.
    Thread fn warp_id() -> u32 { Thread::current().index / 32 }
    cuda "return threadIdx.x / 32u;"
}
