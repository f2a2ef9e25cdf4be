//! Why a file gives no drafter for a model.

use gemma4c_graph::VerifyError;

use super::super::config::ConfigError;
use super::super::weights::WeightsError;

/// Why a file gives no drafter for a model.
#[derive(Debug, thiserror::Error)]
pub enum DrafterError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("general.architecture is `{found}`, expected `gemma4-assistant`: this is not a drafter")]
    NotADrafter { found: String },
    #[error("the drafter{} does not belong to the model{}:{}", called(drafter), called(model), listed(problems))]
    OtherModel { drafter: Option<String>, model: Option<String>, problems: Vec<String> },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("tensor {ORDERING}: {why}")]
    Ordering { why: String },
    #[error("the declared drafter is not well-formed: {0}")]
    Graph(#[from] VerifyError),
}

/// The tokens, group after group, of a drafter that scores only some groups.
pub(super) const ORDERING: &str = "masked_embd_ordering";

fn called(name: &Option<String>) -> String {
    name.as_ref().map_or(String::new(), |name| format!(" `{name}`"))
}

fn listed(problems: &[String]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}
