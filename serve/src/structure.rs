//! Which form an answer must have, as far as a request says.

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;

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
