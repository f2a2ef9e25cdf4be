//! What was measured on an NVIDIA H200 (132 SMs, read ceiling 4.4 TB/s): `gemma4c bench` of whole plans, tokens a second by depth. Each
//! question was measured on the plan of its day, so figures compare within it. docs/ledger.md has the machine, and what else was tried.

use super::table::{Measured, Question, Trial};

/// The NVIDIA H200.
pub static H200: Measured = Measured { multiprocessors: 132, trials: TRIALS };

const fn of(model: &'static str, question: Question, value: u32, tokens_per_second: &'static [(u32, f32)]) -> Trial {
    Trial { question, value, model, tokens_per_second }
}

const TRIALS: &[Trial] = &[
    // With one block an SM: every block reads all activations and computes their norms.
    of("E4B Q8_0", Question::Warps, 10, &[(0, 369.0)]),
    of("E4B Q8_0", Question::Warps, 16, &[(0, 438.0)]),
    of("E4B Q8_0", Question::Warps, 20, &[(0, 455.0)]),
    of("E4B Q8_0", Question::FewestWarps, 8, &[(0, 455.0)]),
    of("E4B Q8_0", Question::FewestWarps, 16, &[(0, 462.0)]),
    of("E4B Q8_0", Question::FewestWarps, 20, &[(0, 477.0)]),
    // What is won at the start is lost, and more, at depth.
    of("E4B Q8_0", Question::SegmentKeys, 64, &[(0, 470.0), (8192, 431.0)]),
    of("E4B Q8_0", Question::SegmentKeys, 128, &[(0, 473.0), (8192, 416.0)]),
    of("E4B Q8_0", Question::AttentionThreads, 512, &[(0, 494.0), (8192, 454.0), (32768, 421.0)]),
    of("E4B Q8_0", Question::AttentionThreads, 256, &[(0, 491.0), (8192, 448.0), (32768, 417.0)]),
    // A cluster must fit in one GPC. The 132 SMs have no room for 128 blocks in clusters of 4 or of 8: the last cluster waits
    // for another to end.
    of("E4B Q8_0", Question::ClusterBlocks, 128, &[(0, 524.9), (8192, 483.8), (32768, 420.9)]),
    of("E4B Q8_0", Question::ClusterBlocks, 120, &[(0, 525.3), (8192, 496.2), (32768, 460.0)]),
    of("E4B Q8_0", Question::ClusterBlocks, 112, &[(0, 524.8), (8192, 496.2), (32768, 455.8)]),
    // 16 with 112 blocks in all, 4 with 132; 1 is no cluster.
    of("12B Q4_0", Question::PeersOfOneHead, 8, &[(0, 397.8), (8192, 375.1)]),
    of("12B Q4_0", Question::PeersOfOneHead, 16, &[(0, 397.0), (8192, 375.1)]),
    of("12B Q4_0", Question::PeersOfOneHead, 4, &[(0, 396.3), (8192, 365.8)]),
    of("12B Q4_0", Question::PeersOfOneHead, 1, &[(0, 389.8), (8192, 351.9)]),
    // 8 with 96 blocks in all.
    of("31B Q4_0", Question::PeersOfHeads, 4, &[(0, 188.6), (8192, 175.3)]),
    of("31B Q4_0", Question::PeersOfHeads, 8, &[(0, 188.5), (8192, 174.1)]),
    of("31B Q4_0", Question::PeersOfHeads, 1, &[(0, 188.0), (8192, 173.7)]),
    of("E4B Q4_0", Question::PerLayerBlocks, 16, &[(0, 664.5)]),
    of("E4B Q4_0", Question::PerLayerBlocks, 8, &[(0, 645.5)]),
];
