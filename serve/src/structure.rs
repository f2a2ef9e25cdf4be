//! Which form an answer must have, as far as a request says.

use serde_json::Value;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::guide::{Calls, Guided, Ids};
use crate::language::{Mark, Start};
use crate::rules::Guide;
use crate::tools::{Declared, ToolChoice};

/// A form that a whole answer must have.
#[derive(Clone, Debug, PartialEq)]
pub enum Structure {
    /// Any JSON object.
    JsonObject,
    /// With the field of the request that has it.
    JsonSchema {
        schema: Value,
        param: String,
    },
    Regex(String),
    Choice(Vec<String>),
    Lark(String),
}

/// The form that a request asks for, in the words of OpenAI, vLLM or llama-server.
pub fn read(fields: Fields<'_>) -> Result<Option<Structure>, ApiError> {
    if let Some(format) = fields.object("response_format")? {
        match format.text("type")?.unwrap_or("text") {
            "text" => {}
            "json_object" => return Ok(Some(Structure::JsonObject)),
            "json_schema" => {
                let schema = format.object("json_schema")?.and_then(|inner| inner.get("schema"));
                let schema = schema.ok_or_else(|| {
                    ApiError::invalid("response_format", "response_format.json_schema.schema is missing")
                })?;
                let param = "response_format.json_schema.schema".into();
                return Ok(Some(Structure::JsonSchema { schema: schema.clone(), param }));
            }
            other => {
                let message = format!("response_format.type is {other:?}; expected text, json_object or json_schema");
                return Err(ApiError::invalid("response_format", message));
            }
        }
    }
    if let Some(outputs) = fields.object("structured_outputs")? {
        return read_outputs(outputs, ["json", "regex", "choice", "grammar"]);
    }
    if let Some(found) = read_outputs(fields, ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])? {
        return Ok(Some(found));
    }
    read_outputs(fields, ["json_schema", "", "", "grammar"])
}

fn read_outputs(fields: Fields<'_>, names: [&str; 4]) -> Result<Option<Structure>, ApiError> {
    let [json, regex, choice, grammar] = names;
    if let Some(schema) = fields.get(json) {
        let schema = match schema {
            Value::String(text) => serde_json::from_str(text)
                .map_err(|error| ApiError::invalid(json, format!("{json} is no JSON schema: {error}")))?,
            schema => schema.clone(),
        };
        return Ok(Some(Structure::JsonSchema { schema, param: json.into() }));
    }
    if let Some(regex) = fields.text(regex)? {
        return Ok(Some(Structure::Regex(regex.into())));
    }
    if fields.get(choice).is_some() {
        return Ok(Some(Structure::Choice(fields.texts(choice, 1024)?)));
    }
    Ok(fields.text(grammar)?.map(|grammar| Structure::Lark(grammar.into())))
}

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
