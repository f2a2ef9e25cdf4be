//! What a table of measurements is, and how it answers a question.

/// What was measured on one GPU.
#[derive(Debug)]
pub struct Measured {
    /// SMs that it has.
    pub multiprocessors: u32,
    pub trials: &'static [Trial],
}

/// A constant of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Warps of a block of a matrix-vector product that has work for all of them.
    Warps,
    /// Warps of a block at least, of such a product that has not.
    FewestWarps,
    /// Keys that one part of a decoded row's attention takes, where it sees all of them.
    SegmentKeys,
    /// Threads of a block of a decoded row's attention, heads of 512.
    AttentionThreads,
    /// Blocks of a full layer's attention, in clusters.
    ClusterBlocks,
    /// Blocks of a cluster of a full layer with one key-value head.
    PeersOfOneHead,
    /// The same with several key-value heads, each of which has clusters of its own.
    PeersOfHeads,
    /// Blocks of the cluster that makes a layer's per-layer gate and projection.
    PerLayerBlocks,
}

/// A value for a question, and how fast a whole plan was with it.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    pub question: Question,
    pub value: u32,
    /// The model of the plan.
    pub model: &'static str,
    /// Tokens a second, by the depth they were decoded at.
    pub tokens_per_second: &'static [(u32, f32)],
}

impl Measured {
    /// The fastest value for a question: the largest sum over the depths that all of its rows have.
    ///
    /// # Panics
    ///
    /// Where there is no row; at compile time, as rules take their constants from here.
    pub const fn fastest(&self, question: Question) -> u32 {
        let mut best: Option<(u32, f32)> = None;
        let mut at = 0;
        while at < self.trials.len() {
            let trial = &self.trials[at];
            let is_better = match best {
                Some((_, speed)) => trial.speed() > speed,
                None => true,
            };
            if trial.question as u8 == question as u8 && is_better {
                best = Some((trial.value, trial.speed()));
            }
            at += 1;
        }
        match best {
            Some((value, _)) => value,
            None => panic!("the table does not answer this question"),
        }
    }
}

impl Trial {
    const fn speed(&self) -> f32 {
        let mut sum = 0.0;
        let mut at = 0;
        while at < self.tokens_per_second.len() {
            sum += self.tokens_per_second[at].1;
            at += 1;
        }
        sum
    }
}
