//! What was measured on which GPU, as data: a file a GPU, what was chosen beside what was tried and lost, so that nobody tries it
//! again unknowingly.
//!
//! The compiler asks here before it goes by a rule. A product that has a chosen shape in its GPU's table gets that; numbers of the
//! rules that were found by trying are taken from here too; and the best of what lost is a step's runner-up in the plan. Only figures
//! that were measured are here. Adding a row is all it takes to change a choice.

mod h200;

use gemma4c_blocks::DType;

use crate::arch::Arch;
use crate::kernels::matvec::shape::LaunchShape;

pub use h200::H200;

/// What was measured on one GPU.
#[derive(Debug)]
pub struct Measured {
    pub gpu: &'static str,
    pub arch: Arch,
    pub trials: &'static [Trial],
    pub products: &'static [ProductTrial],
}

/// What a trial of whole plans decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Warps of a block of a product that has work for all of them.
    Warps,
    /// Warps of a block at least, of a product that has not.
    FewestWarps,
    /// Who computes the norm before a decoded row's product.
    Norms,
    /// Launches from a decoded row's raw heads to its mixed values.
    AttentionLaunches,
    /// Keys that one part of a decoded row's attention takes.
    SegmentKeys,
    /// When keys and values of the first tile are asked for.
    FirstTile,
    /// Parts of a decoded row's attention that a merge has on their way at once.
    PartsAtOnce,
    /// Threads of a block of a decoded row's attention.
    AttentionThreads,
    /// Where the parts of a window's attention meet.
    WindowMerge,
    /// Blocks of a full layer's attention, in clusters.
    ClusterBlocks,
    /// Blocks of a cluster of a full layer with one key-value head.
    PeersOfOneHead,
    /// The same with several key-value heads, each of which has clusters of its own.
    PeersOfHeads,
    /// Blocks of the cluster that makes a layer's per-layer gate and projection.
    PerLayerBlocks,
    /// Lanes that share a row of weights.
    Lanes,
    /// How activations become int8.
    Codes,
}

/// What became of something tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Chosen,
    Lost,
}

/// A way to answer a question, and how fast a whole plan was with it.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    pub question: Question,
    pub variant: &'static str,
    /// The variant as a number, where it is one.
    pub value: u32,
    /// The model of the plan.
    pub model: &'static str,
    /// Tokens a second, by the depth they were decoded at; none where it was seen to be no better and the figure was not kept.
    pub tokens_per_second: &'static [(u32, f32)],
    pub verdict: Verdict,
}

/// A product of one row, alone: a shape of its launch, and microseconds.
#[derive(Clone, Copy, Debug)]
pub struct ProductTrial {
    pub dtype: DType,
    pub outputs: u32,
    pub k: u32,
    /// Gate and up as one.
    pub paired: bool,
    pub shape: LaunchShape,
    pub alone_us: f32,
    /// As one of a chain, each starting before the one before it ends.
    pub chained_us: f32,
    pub verdict: Verdict,
}

/// All GPUs that there are figures of.
static TABLES: [&Measured; 1] = [&H200];

impl Measured {
    /// The table for a plan of these architectures.
    pub fn find(architectures: &[Arch]) -> Option<&'static Measured> {
        TABLES.into_iter().find(|table| architectures.contains(&table.arch))
    }

    /// The number that a question was answered with.
    ///
    /// # Panics
    ///
    /// Where it was not; at compile time, where a rule takes its constants from here.
    pub const fn value(&self, question: Question) -> u32 {
        let mut at = 0;
        while at < self.trials.len() {
            let trial = &self.trials[at];
            if trial.question as u8 == question as u8 && matches!(trial.verdict, Verdict::Chosen) {
                return trial.value;
            }
            at += 1;
        }
        panic!("the table does not answer this question")
    }

    fn answers(&self, question: Question, verdict: Verdict) -> impl Iterator<Item = &'static Trial> {
        self.trials.iter().filter(move |trial| trial.question == question && trial.verdict == verdict)
    }

    pub fn chosen(&self, question: Question) -> Option<&'static Trial> {
        self.answers(question, Verdict::Chosen).next()
    }

    /// The best of those that lost.
    pub fn runner_up(&self, question: Question) -> Option<&'static Trial> {
        self.answers(question, Verdict::Lost).max_by(|a, b| a.speed().total_cmp(&b.speed()))
    }

    /// The trials of exactly this product.
    fn of_product(&self, of: (DType, u32, u32, bool)) -> impl Iterator<Item = &'static ProductTrial> {
        self.products.iter().filter(move |trial| (trial.dtype, trial.outputs, trial.k, trial.paired) == of)
    }

    /// The shape chosen for exactly this product.
    pub fn product(&self, of: (DType, u32, u32, bool)) -> Option<&'static ProductTrial> {
        self.of_product(of).find(|trial| trial.verdict == Verdict::Chosen)
    }

    /// The fastest shape that lost for exactly this product.
    pub fn lost_product(&self, of: (DType, u32, u32, bool)) -> Option<&'static ProductTrial> {
        let lost = self.of_product(of).filter(|trial| trial.verdict == Verdict::Lost);
        lost.min_by(|a, b| a.chained_us.total_cmp(&b.chained_us))
    }
}

impl Trial {
    fn speed(&self) -> f32 {
        self.tokens_per_second.first().map_or(0.0, |(_, speed)| *speed)
    }

    /// `16 warps: 462 tokens/s of E4B Q8_0`.
    pub fn told(&self) -> String {
        match self.tokens_per_second {
            [] => format!("{}: no better for {}", self.variant, self.model),
            [(_, speed), ..] => format!("{}: {speed} tokens/s of {}", self.variant, self.model),
        }
    }
}

impl ProductTrial {
    /// `32 lanes, 4 rows, 3 ahead, 792 blocks of 4 warps: 12.9 us in a chain`.
    pub fn told(&self) -> String {
        format!("{}: {} us in a chain", self.shape.told(), self.chained_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every question has one answer, which is not slower than what lost where it was measured first; where it is not faster, the
    /// other lost for another reason that its row says.
    #[test]
    fn tables_answer_each_question_once() {
        for table in TABLES {
            for question in [
                Question::Warps,
                Question::FewestWarps,
                Question::Norms,
                Question::AttentionLaunches,
                Question::SegmentKeys,
                Question::FirstTile,
                Question::PartsAtOnce,
                Question::AttentionThreads,
                Question::WindowMerge,
                Question::ClusterBlocks,
                Question::PeersOfOneHead,
                Question::PeersOfHeads,
                Question::PerLayerBlocks,
                Question::Lanes,
                Question::Codes,
            ] {
                let chosen: Vec<_> = table.answers(question, Verdict::Chosen).collect();
                assert_eq!(chosen.len(), 1, "{question:?} on {}", table.gpu);
                let lost = table.runner_up(question).expect("what lost is what the table is for");
                assert!(!lost.variant.is_empty() && lost.variant != chosen[0].variant);
                // Within the noise of a run: there the simpler one, or the one that is better at depth, was taken.
                assert!(lost.speed() < chosen[0].speed() * 1.01, "{question:?}: {}", lost.told());
            }
            for trial in table.products {
                let same = table.of_product((trial.dtype, trial.outputs, trial.k, trial.paired));
                assert!(same.filter(|trial| trial.verdict == Verdict::Chosen).count() <= 1, "{trial:?}");
                assert!(trial.alone_us > 0.0 && trial.chained_us > 0.0, "{trial:?}");
            }
        }
    }

    #[test]
    fn a_table_is_found_by_its_architecture() {
        assert_eq!(Measured::find(&[Arch::Sm89, Arch::Sm90a]).map(|table| table.gpu), Some("H200"));
        assert!(Measured::find(&[Arch::Sm89]).is_none());
        assert_eq!(H200.value(Question::FewestWarps), 20);
        assert_eq!(
            H200.runner_up(Question::FewestWarps).map(Trial::told).as_deref(),
            Some("16 warps: 462 tokens/s of E4B Q8_0")
        );
        let gate_and_up = (DType::Q8_0, 10240, 2560, true);
        assert!(H200.product(gate_and_up).is_none());
        assert_eq!(
            H200.lost_product(gate_and_up).map(ProductTrial::told).as_deref(),
            Some("32 lanes, 4 rows, 3 ahead, 792 blocks of 4 warps: 12.9 us in a chain")
        );
    }
}
