//! What was measured on an NVIDIA H200 (132 multiprocessors, read ceiling 4.4 TB/s). BENCHMARKS.md has the commands and the machine.

use gemma4c_blocks::DType;

use super::{Measured, ProductTrial, Question, Trial, Verdict};
use crate::arch::Arch;
use crate::kernels::matvec::shape::LaunchShape;
use Verdict::{Chosen, Lost};

/// The NVIDIA H200.
pub static H200: Measured = Measured { gpu: "H200", arch: Arch::Sm90a, trials: TRIALS, products: PRODUCTS };

/// Of whole plans of E4B Q8_0, decoded at that depth. Each group was measured on the plan of its day, so figures compare within it.
const fn whole(
    question: Question,
    variant: &'static str,
    value: u32,
    tokens_per_second: &'static [(u32, f32)],
    verdict: Verdict,
) -> Trial {
    Trial { question, variant, value, model: "E4B Q8_0", tokens_per_second, verdict }
}

/// The same of another model.
const fn of(
    model: &'static str,
    question: Question,
    variant: &'static str,
    value: u32,
    tokens_per_second: &'static [(u32, f32)],
    verdict: Verdict,
) -> Trial {
    Trial { model, ..whole(question, variant, value, tokens_per_second, verdict) }
}

const TRIALS: &[Trial] = &[
    // One block a multiprocessor but where it says otherwise: every block reads all activations and computes their norms.
    whole(Question::Warps, "four blocks of 4 warps", 4, &[(0, 405.0)], Lost),
    whole(Question::Warps, "two blocks of 8 warps", 8, &[(0, 422.0)], Lost),
    whole(Question::Warps, "10 warps", 10, &[(0, 369.0)], Lost),
    whole(Question::Warps, "16 warps", 16, &[(0, 438.0)], Lost),
    whole(Question::Warps, "20 warps", 20, &[(0, 455.0)], Chosen),
    whole(Question::Warps, "two resident blocks in half the registers each", 20, &[(0, 375.0)], Lost),
    whole(Question::Warps, "24 to 32 warps", 24, &[], Lost),
    whole(Question::FewestWarps, "8 warps", 8, &[(0, 455.0)], Lost),
    whole(Question::FewestWarps, "16 warps", 16, &[(0, 462.0)], Lost),
    whole(Question::FewestWarps, "20 warps", 20, &[(0, 477.0)], Chosen),
    whole(Question::Norms, "in every block of the product", 0, &[(0, 391.0)], Chosen),
    whole(Question::Norms, "a launch of its own", 1, &[(0, 380.0)], Lost),
    // Equally fast, and two launches fewer.
    whole(Question::AttentionLaunches, "one launch", 1, &[(0, 422.0)], Chosen),
    whole(Question::AttentionLaunches, "three launches", 3, &[(0, 422.0)], Lost),
    // What is won at the start is lost, and more, at depth.
    whole(Question::SegmentKeys, "64 keys", 64, &[(0, 470.0), (8192, 431.0)], Chosen),
    whole(Question::SegmentKeys, "128 keys", 128, &[(0, 473.0), (8192, 416.0)], Lost),
    // Parts of a row's attention that a merge reads at once, if they weigh anything: E4B is indifferent, E2B and 12B are not.
    of("E2B Q8_0", Question::PartsAtOnce, "16 parts", 16, &[(0, 822.0), (8192, 743.0)], Chosen),
    of("E2B Q8_0", Question::PartsAtOnce, "17 parts: all of a window of 1024", 17, &[(0, 809.0), (8192, 726.0)], Lost),
    of("E2B Q8_0", Question::PartsAtOnce, "16, and more than there are", 16, &[(0, 784.0), (8192, 695.0)], Lost),
    of(
        "E2B Q8_0",
        Question::PartsAtOnce,
        "16, asked for before their weights are known",
        16,
        &[(0, 767.0), (8192, 660.0)],
        Lost,
    ),
    // Threads of a block of the attention of a decoded row, heads of 512 and at most eight to a key-value head.
    of(
        "E4B Q8_0",
        Question::AttentionThreads,
        "512 threads",
        512,
        &[(0, 494.0), (8192, 454.0), (32768, 421.0)],
        Chosen,
    ),
    of("E4B Q8_0", Question::AttentionThreads, "256 threads", 256, &[(0, 491.0), (8192, 448.0), (32768, 417.0)], Lost),
    whole(Question::WindowMerge, "in a cluster's shared memory", 1, &[(0, 521.1), (8192, 490.7)], Chosen),
    whole(Question::WindowMerge, "in memory, by the last block", 0, &[(0, 515.8), (8192, 477.7)], Lost),
    // Multiprocessors come in groups that a cluster cannot leave. The 132 have no room for 128 blocks in clusters of 4 or of 8: the
    // last cluster waits for another to end.
    whole(Question::ClusterBlocks, "128", 128, &[(0, 524.9), (8192, 483.8), (32768, 420.9)], Lost),
    whole(Question::ClusterBlocks, "120", 120, &[(0, 525.3), (8192, 496.2), (32768, 460.0)], Chosen),
    whole(Question::ClusterBlocks, "112", 112, &[(0, 524.8), (8192, 496.2), (32768, 455.8)], Lost),
    of("12B Q4_0", Question::PeersOfOneHead, "8 blocks", 8, &[(0, 397.8), (8192, 375.1)], Chosen),
    of("12B Q4_0", Question::PeersOfOneHead, "16 blocks, 112 in all", 16, &[(0, 397.0), (8192, 375.1)], Lost),
    of("12B Q4_0", Question::PeersOfOneHead, "4 blocks, 132 in all", 4, &[(0, 396.3), (8192, 365.8)], Lost),
    of("12B Q4_0", Question::PeersOfOneHead, "no clusters", 1, &[(0, 389.8), (8192, 351.9)], Lost),
    of("31B Q4_0", Question::PeersOfHeads, "4 blocks", 4, &[(0, 188.6), (8192, 175.3)], Chosen),
    of("31B Q4_0", Question::PeersOfHeads, "8 blocks, 96 in all", 8, &[(0, 188.5), (8192, 174.1)], Lost),
    of("31B Q4_0", Question::PeersOfHeads, "no clusters", 1, &[(0, 188.0), (8192, 173.7)], Lost),
    // What few multiprocessors can read is what it takes; but more clusters, each with all of the gate, are no faster.
    of("E4B Q4_0", Question::PerLayerBlocks, "one cluster of 16", 16, &[(0, 664.5)], Chosen),
    of("E4B Q4_0", Question::PerLayerBlocks, "one cluster of 8", 8, &[(0, 645.5)], Lost),
    of("E4B Q4_0", Question::PerLayerBlocks, "three clusters of 16", 48, &[(0, 664.9)], Lost),
    of("E4B Q4_0", Question::PerLayerBlocks, "seven clusters of 16", 112, &[(0, 654.4)], Lost),
    of("E4B Q4_0", Question::PerLayerBlocks, "two launches", 0, &[(0, 655.5)], Lost),
    // Lanes that share a row of weights: fewer than 32 where the row's end leaves lanes without work.
    of("E4B Q4_0", Question::Lanes, "32 lanes", 32, &[(0, 640.0), (8192, 573.0)], Chosen),
    of("E4B Q4_0", Question::Lanes, "16 lanes", 16, &[(0, 627.0), (8192, 563.0)], Lost),
    // A group's codes are values times one quotient, or values divided one by one.
    of("E4B Q8_0", Question::Codes, "a division a group", 1, &[(0, 496.0)], Chosen),
    of("E4B Q8_0", Question::Codes, "a division a value", 32, &[(0, 474.0)], Lost),
    // Within the noise, and not as simple.
    whole(Question::FirstTile, "after the wait for the launch before", 0, &[(0, 470.0)], Chosen),
    whole(Question::FirstTile, "before it", 1, &[(0, 472.0)], Lost),
];

/// Gate and up of E4B. The kernel had blocks of 4 warps then, as many a multiprocessor as is said. The best of them was used until whole
/// plans showed that one large block a multiprocessor is better; fewer than four of these lost everywhere.
const fn gate_and_up(
    dtype: DType,
    [lanes, rows, depth, blocks]: [u32; 4],
    [alone_us, chained_us]: [f32; 2],
) -> ProductTrial {
    let shape = LaunchShape { lanes, rows, depth, warps: 4, blocks: blocks * 132 };
    ProductTrial { dtype, outputs: 10240, k: 2560, paired: true, shape, alone_us, chained_us, verdict: Lost }
}

const PRODUCTS: &[ProductTrial] = &[
    gate_and_up(DType::Q8_0, [16, 4, 2, 5], [14.6, 17.5]),
    gate_and_up(DType::Q8_0, [32, 4, 3, 6], [14.5, 12.9]),
    gate_and_up(DType::Q8_0, [32, 2, 4, 8], [15.1, 13.9]),
    gate_and_up(DType::Q4_0, [16, 4, 2, 5], [10.3, 10.0]),
    gate_and_up(DType::Q4_0, [32, 4, 3, 6], [9.5, 8.1]),
    gate_and_up(DType::Q4_0, [8, 2, 5, 5], [9.6, 7.8]),
    gate_and_up(DType::Q4_0, [32, 2, 4, 8], [9.9, 8.8]),
];
