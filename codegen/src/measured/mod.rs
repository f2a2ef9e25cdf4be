//! What was measured on a GPU and decides a number of a rule, as data: a file a GPU.
//!
//! A question is a constant that was found by trying. Its rows are the values that were tried and how fast a whole plan was with each; the
//! compiler takes the fastest, so adding a row is all it takes to change a choice. Nothing else is here: what was tried and is no number of
//! a rule is told in BENCHMARKS.md. No step of a plan quotes a row, which may be of another model than the plan's.

mod h200;
mod table;

pub use h200::H200;
pub use table::{Measured, Question, Trial};

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
