//! How the attention of decoded rows is spread over a GPU: what a block is, how keys are cut, and who merges. A pure
//! function of the layer's shape and the GPU's, so that a row's result never depends on load. The constants are
//! measured ([`crate::measured`]).

use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::view::{AttentionShape, DecodeTile};
use crate::measured::{H200, Question};

/// Shared memory of a block that has an SM for itself, and its threads where it has much to merge.
pub(super) const ROOMY: usize = 200 * 1024;
const ROOMY_THREADS: u32 = H200.fastest(Question::AttentionThreads);
/// Slices of a head's values where there are more than eight query heads. Scores of 16 slices take 73 KB, and it seems
/// that an SM with such a block has too little L1 for the products beside it: 12B Q4_0 decodes 450 tokens a second,
/// with eight 467.
const SLICES_OF_MANY: u32 = 8;
/// Blocks of a full layer's cluster: with one key-value head, and with several.
const FULL_PEERS: [u32; 2] = [H200.fastest(Question::PeersOfOneHead), H200.fastest(Question::PeersOfHeads)];
/// Positions of a segment of a full layer.
const SEGMENT_KEYS: u32 = H200.fastest(Question::SegmentKeys);
/// Clusters of a full layer: a lane for each merges them.
const MOST_CLUSTERS: u32 = 32;

/// SMs that blocks in clusters find room on. A cluster must fit in one GPC, which leaves some SMs over: of others than
/// the H200's the same share.
pub(super) fn clustered_multiprocessors(multiprocessors: u32) -> u32 {
    multiprocessors * H200.fastest(Question::ClusterBlocks) / H200.multiprocessors
}

impl Attention {
    pub(super) fn attention_shape(&self) -> AttentionShape {
        AttentionShape { D: self.head_dim, GROUP: self.group }
    }

    /// Positions of a segment. Splits take turns with them, and short ones share out evenly what there is to see,
    /// however little that is.
    pub fn segment(&self) -> u32 {
        SEGMENT_KEYS
    }

    /// Blocks that share a row's keys. A window is cut so that there is work for every SM, but not below a segment: the
    /// results of splits are merged by few blocks. A full layer's are whole clusters.
    pub fn splits(&self) -> u32 {
        match self.window {
            Some(window) => {
                let own = (window * self.kv_heads / self.window_blocks()).next_power_of_two();
                window.div_ceil(own.clamp(SEGMENT_KEYS, 4 * SEGMENT_KEYS))
            }
            None => self.most_splits() / self.peers() * self.peers(),
        }
    }

    /// Blocks that a window is cut into: a power of two, which a third of the SMs may miss.
    fn window_blocks(&self) -> u32 {
        1 << (self.multiprocessors * 4 / 3).max(1).ilog2()
    }

    /// Splits of a full layer that are of use: one for each segment, but no more than the GPU has room for.
    fn most_splits(&self) -> u32 {
        let multiprocessors =
            if self.cluster > 1 { clustered_multiprocessors(self.multiprocessors) } else { self.multiprocessors };
        let blocks = multiprocessors * self.decode_shape().RESIDENT;
        let room = match self.full_peers() {
            1 => blocks / self.kv_heads,
            peers => (blocks / self.kv_heads).min(MOST_CLUSTERS * peers),
        };
        self.capacity.div_ceil(self.segment()).min(room).max(1)
    }

    /// Blocks of a cluster: all splits of a window, where clusters are so large; some of a full layer's.
    pub fn peers(&self) -> u32 {
        match self.window {
            Some(_) if self.splits() <= self.cluster => self.splits(),
            Some(_) => 1,
            None => self.most_splits().min(self.full_peers()),
        }
    }

    fn full_peers(&self) -> u32 {
        FULL_PEERS[usize::from(self.kv_heads > 1)].min(self.cluster)
    }

    /// Where there is room, a tile is a segment, and a block has as many threads as help: what it does besides waiting
    /// for memory takes longer than that. Else tiles of about 64 KiB fit twice on an SM; 16 heads need half of it for
    /// themselves.
    pub(super) fn decode_shape(&self) -> DecodeTile {
        let sets = self.group.div_ceil(8);
        let shape = |threads, keys, resident| DecodeTile {
            KEYS: keys,
            THREADS: threads,
            VECTOR: 8,
            SETS: sets,
            SLICES: threads / 32,
            RESIDENT: resident,
        };
        match (self.kv, self.head_dim, self.group) {
            (KvType::F32, 512.., 9..) => DecodeTile { VECTOR: 4, ..shape(128, 8, 1) },
            (KvType::F32, ..) => DecodeTile { VECTOR: 4, ..shape(128, 16, 2) },
            (KvType::F16 | KvType::BF16, 512.., 9..) if self.shared_bytes >= ROOMY => {
                DecodeTile { SLICES: SLICES_OF_MANY, ..shape(ROOMY_THREADS, 64, 1) }
            }
            (_, 512.., _) if self.shared_bytes >= ROOMY => {
                shape(if self.group > 8 { 256 } else { ROOMY_THREADS }, 64, 1)
            }
            (_, 256.., 8) if self.shared_bytes >= ROOMY => shape(ROOMY_THREADS, 64, 1),
            (_, 512.., 9..) => shape(256, 16, 1),
            // Two would not fit, and half of the registers are too few to widen with.
            (KvType::Q8_0 | KvType::Fp8, 512.., 8) => shape(256, 32, 1),
            (_, 512.., _) => shape(256, 32, 2),
            (_, _, 9..) => shape(256, 64, 1),
            _ => shape(256, 64, 2),
        }
    }
}
