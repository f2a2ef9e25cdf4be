//! What was measured on a GPU and decides a number of a rule, as data: a file a GPU.
//!
//! A question is a constant that was found by trying. Its rows are the values that were tried and how fast a whole plan was with each; the
//! compiler takes the fastest, so adding a row is all it takes to change a choice. Nothing else is here: what was tried and is no number of
//! a rule is told in BENCHMARKS.md. No step of a plan quotes a row, which may be of another model than the plan's.

mod h200;

pub use h200::H200;

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
    /// Threads of a block of a decoded row's attention, heads of 512 and at most eight to a key-value head.
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

#[cfg(test)]
mod tests {
    use super::*;

    const QUESTIONS: [Question; 8] = [
        Question::Warps,
        Question::FewestWarps,
        Question::SegmentKeys,
        Question::AttentionThreads,
        Question::ClusterBlocks,
        Question::PeersOfOneHead,
        Question::PeersOfHeads,
        Question::PerLayerBlocks,
    ];

    /// Rows of a question compare: one model, the same depths, a value once; and there is something to choose from.
    #[test]
    fn rows_of_a_question_compare() {
        for question in QUESTIONS {
            let rows: Vec<&Trial> = H200.trials.iter().filter(|trial| trial.question == question).collect();
            assert!(rows.len() >= 2, "{question:?} has nothing to choose from");
            let depths = |trial: &Trial| trial.tokens_per_second.iter().map(|(depth, _)| *depth).collect::<Vec<_>>();
            for row in &rows {
                assert_eq!((row.model, depths(row)), (rows[0].model, depths(rows[0])), "{question:?}");
                assert_eq!(rows.iter().filter(|other| other.value == row.value).count(), 1, "{row:?}");
            }
        }
        assert!(H200.trials.iter().all(|trial| QUESTIONS.contains(&trial.question)));
    }

    /// The table decides: a faster row is another answer.
    #[test]
    fn the_fastest_row_is_the_answer() {
        const fn of(value: u32, tokens_per_second: &'static [(u32, f32)]) -> Trial {
            Trial { question: Question::SegmentKeys, value, model: "a test", tokens_per_second }
        }
        const SLOW: Trial = of(64, &[(0, 470.0), (8192, 431.0)]);
        const FAST: Trial = of(128, &[(0, 473.0), (8192, 416.0)]);
        const FASTER: Trial = of(256, &[(0, 471.0), (8192, 431.0)]);
        static TWO: [Trial; 2] = [SLOW, FAST];
        static THREE: [Trial; 3] = [SLOW, FAST, FASTER];
        assert_eq!(
            Measured { multiprocessors: 132, trials: &TWO }.fastest(Question::SegmentKeys),
            64,
            "what counts is all depths"
        );
        assert_eq!(Measured { multiprocessors: 132, trials: &THREE }.fastest(Question::SegmentKeys), 256);
        assert_eq!(QUESTIONS.map(|question| H200.fastest(question)), [20, 20, 64, 512, 120, 8, 4, 16]);
    }
}
