//! Clusters: blocks that run concurrently and read each other's shared memory (DSMEM). Hopper and later have them.
//!
//! A block must not return while another may still read its shared memory, so a cluster ends with a `cluster_barrier`,
//! or with a meeting: `cluster_arrive` when a block has read its peers, `cluster_wait` when it has done the rest of its
//! work. Neither waits for threads that have returned, so a block that no other reads may return early.
//!
//! `block_sum` and `block_max` do not work in a cluster: their host text has one scratch array for all concurrent
//! blocks, so a case would fail there.

use super::rows::{intrinsic, row};
use crate::Element;
use crate::sim::FaultKind;
use crate::sim::memory::{KernelIndex, Readable, Shared};
use crate::sim::thread::{Stop, StopScope, Thread};

intrinsic! {
    /// The block's number in its cluster.
    Thread fn cluster_rank() -> u32 { Thread::current().block().rank }
    cuda "
    u32 rank = 0;
#if __CUDA_ARCH__ >= 900
    asm(\"mov.u32 %0, %cluster_ctarank;\" : \"=r\"(rank));
#endif
    return rank;
"
}

intrinsic! {
    /// Waits for all threads of the cluster that have not returned; what they wrote to shared memory before is visible
    /// after. Other memory is not ordered: that takes half a microsecond on a busy GPU.
    Cluster fn cluster_barrier() {
        let thread = Thread::current();
        if thread.arrived.get() {
            let message = "`cluster_barrier` between `cluster_arrive` and `cluster_wait`".to_string();
            thread.raise(FaultKind::Divergence, thread.line(), message)
        }
        thread.suspend(Stop { scope: StopScope::Cluster, operation: "cluster_barrier", line: thread.line() });
    }
    cuda "
#if __CUDA_ARCH__ >= 900
#if __CUDACC_VER_MAJOR__ >= 13
    asm volatile(\"fence.release.sync_restrict::shared::cta.cluster;\\nbarrier.cluster.arrive.relaxed.aligned;\" ::: \"memory\");
    asm volatile(\"barrier.cluster.wait.aligned;\\nfence.acquire.sync_restrict::shared::cluster.cluster;\" ::: \"memory\");
#else
    // Compilers before CUDA 13 may not know these fences: all memory is ordered.
    asm volatile(\"barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;\" ::: \"memory\");
#endif
#endif
"
}

intrinsic! {
    /// The first half of a meeting of the cluster: says that the thread has read what it wanted of its peers. It
    /// publishes nothing.
    Cluster fn cluster_arrive() {
        let thread = Thread::current();
        if thread.arrived.replace(true) {
            let message = "`cluster_arrive` twice, with no `cluster_wait` between".to_string();
            thread.raise(FaultKind::Divergence, thread.line(), message)
        }
    }
    cuda "
#if __CUDA_ARCH__ >= 900
    asm volatile(\"fence.acq_rel.cta;\\nbarrier.cluster.arrive.relaxed.aligned;\" ::: \"memory\");
#endif
"
}

intrinsic! {
    /// The second half: waits until all threads of the cluster that have not returned have arrived. The block may
    /// return then.
    Cluster fn cluster_wait() {
        let thread = Thread::current();
        if !thread.arrived.replace(false) {
            let message = "`cluster_wait` without a `cluster_arrive` before it".to_string();
            thread.raise(FaultKind::Divergence, thread.line(), message)
        }
        thread.suspend(Stop { scope: StopScope::Meeting, operation: "cluster_wait", line: thread.line() });
    }
    cuda "
#if __CUDA_ARCH__ >= 900
    asm volatile(\"barrier.cluster.wait.aligned;\" ::: \"memory\");
#endif
"
}

/// Reads a `V` at element `index` of the array that block `peer` of the cluster has in this one's place.
#[track_caller]
pub fn load_peer<V: Element>(memory: Shared<impl Element>, index: impl KernelIndex, peer: u32) -> V {
    let thread = Thread::current();
    let (launch, cluster) = (thread.launch(), thread.cluster());
    if thread.arrived.get() {
        let message =
            format!("reads the shared memory of block {peer} of its cluster after `cluster_arrive`, which lets it go");
        thread.raise(FaultKind::OutOfBounds, thread.line(), message)
    }
    let message = match cluster.returned.borrow().get(peer as usize) {
        None => format!("reads the shared memory of block {peer} of a cluster of {}", launch.cluster),
        Some(true) => format!("reads the shared memory of block {peer} of its cluster, which has returned"),
        Some(false) => {
            return memory.raw().of_peer(&cluster.shared.arrays, thread.block().rank, peer).get(index.value());
        }
    };
    thread.raise(FaultKind::OutOfBounds, thread.line(), message)
}

row! {
    /// Reads a `V` at element `index` of the array that block `peer` of the cluster has in this one's place.
    Thread load_peer needs [cluster_rank]
    cuda "
template <class V, class T, class I> __device__ __forceinline__ V load_peer(const T* memory, I index, u32 peer) {
    V value = {};
#if __CUDA_ARCH__ >= 900
    u32 at;
    asm(\"mapa.shared::cluster.u32 %0, %1, %2;\" : \"=r\"(at) : \"r\"((u32)__cvta_generic_to_shared(memory + index)), \"r\"(peer));
    if constexpr (sizeof(V) == 16) {
        U32x4 raw;
        asm volatile(\"ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];\" : \"=r\"(raw.x), \"=r\"(raw.y), \"=r\"(raw.z), \"=r\"(raw.w) : \"r\"(at));
        value = bits_as<V>(raw);
    } else {
        static_assert(sizeof(V) == 4, \"one word or four\");
        u32 raw;
        asm volatile(\"ld.shared::cluster.u32 %0, [%1];\" : \"=r\"(raw) : \"r\"(at));
        value = bits_as<V>(raw);
    }
#endif
    return value;
}"
    host "template <class V, class T, class I> inline V load_peer(const T* memory, I index, u32 peer) { return *(const V*)((const u8*)(memory + index) + (i64)shared_stride * ((i64)peer - (i64)cluster_rank())); }"
}
