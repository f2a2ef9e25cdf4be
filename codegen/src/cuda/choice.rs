//! Why a launch is what it is: the reason, and what would have been taken otherwise. A plan carries both for every step.

/// The words of a choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    pub reason: String,
    /// Empty where nothing else could do it.
    pub runner_up: String,
}

impl Choice {
    /// Says what was the next best.
    pub fn over(self, runner_up: impl Into<String>) -> Choice {
        Choice { runner_up: runner_up.into(), ..self }
    }

    pub fn because(reason: impl Into<String>) -> Choice {
        Choice { reason: reason.into(), runner_up: String::new() }
    }
}

impl From<&str> for Choice {
    fn from(reason: &str) -> Choice {
        Choice::because(reason)
    }
}

impl From<String> for Choice {
    fn from(reason: String) -> Choice {
        Choice::because(reason)
    }
}
