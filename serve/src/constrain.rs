//! What keeps an answer to the form that its request asks for: a guide over its tokens.

use crate::app::App;
use crate::error::ApiError;
use crate::guide::{Calls, Guided, Ids};
use crate::language::{Mark, Start};
use crate::rules::Guide;
use crate::structure::Structure;
use crate::tools::{Declared, ToolChoice};

/// What a request says of thoughts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thoughts {
    pub wanted: bool,
    /// Tokens of them, at most.
    pub most: Option<u32>,
}

/// What keeps an answer to its form; nothing where any will do.
pub fn guide(
    app: &App,
    structure: Option<Structure>,
    tools: &[Declared],
    choice: &ToolChoice,
    start: Start,
    thoughts: Thoughts,
) -> Result<Option<Box<dyn Guide>>, ApiError> {
    if structure.is_none() && tools.is_empty() && thoughts.most.is_none() {
        return Ok(None);
    }
    let mut guide = Guided::new(Ids::new(&app.speech), start != Start::Content);
    (guide.may_think, guide.most_thoughts) = (thoughts.wanted, thoughts.most);
    guide.answer = structure.map(|structure| app.grammars.structure(&structure)).transpose()?;
    let named = |name: &Option<String>, tool: &Declared| name.as_ref().is_none_or(|name| *name == tool.tool.name);
    let (allowed, must, parallel): (Vec<&Declared>, bool, bool) = match choice {
        ToolChoice::None => (Vec::new(), false, false),
        ToolChoice::Auto { parallel } => (tools.iter().collect(), false, *parallel),
        ToolChoice::Required { name, parallel } => {
            (tools.iter().filter(|tool| named(name, tool)).collect(), true, *parallel)
        }
    };
    guide.forbids_calls = allowed.is_empty() && !tools.is_empty();
    if let (false, Some(quote), Some(close)) =
        (allowed.is_empty(), app.speech.id(Mark::Quote), app.speech.id(Mark::CallClose))
    {
        let follower = app.grammars.call(&allowed, quote, close)?;
        let names = allowed.iter().map(|tool| tool.tool.name.clone()).collect();
        guide.calls = Some(Calls { follower, names, must, parallel });
    } else if must {
        return Err(ApiError::invalid("tool_choice", "the model's vocabulary has no markers for calls of tools"));
    }
    Ok(Some(Box::new(guide)))
}
