//! The tools of a request, and which of them the model may, must or must not call.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::language::Tool;

const MOST_TOOLS: usize = 128;

/// A tool, and its declaration as the template takes it.
#[derive(Clone, Debug)]
pub struct Declared {
    pub tool: Tool,
    pub declaration: Value,
    /// The field of the request that has the schema of its arguments.
    pub param: String,
}

/// Which tools may be called.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolChoice {
    None,
    Auto {
        parallel: bool,
    },
    /// At least one, of any name or of this one.
    Required {
        name: Option<String>,
        parallel: bool,
    },
}

/// The tools of a request. Other kinds than functions are left out: the model cannot call them.
pub fn read(fields: Fields<'_>) -> Result<(Vec<Declared>, ToolChoice), ApiError> {
    let list = fields.list("tools")?.unwrap_or_default();
    if list.len() > MOST_TOOLS {
        let message = format!("tools must have at most {MOST_TOOLS} entries; found {}", list.len());
        return Err(ApiError::invalid("tools", message));
    }
    let mut tools: Vec<Declared> = Vec::new();
    for (index, tool) in list.iter().enumerate() {
        if tool.get("type").is_some_and(|kind| kind != "function") {
            continue;
        }
        // Responses have the function's fields in the tool itself.
        let function = tool.get("function").unwrap_or(tool);
        let param = match tool.get("function") {
            Some(_) => format!("tools[{index}].function"),
            None => format!("tools[{index}]"),
        };
        let name = function.get("name").and_then(Value::as_str).filter(|name| is_name(name)).ok_or_else(|| {
            let message = format!("{param}.name must be a text of 1 to 128 letters, digits, `_`, `-`, `.` or `:`");
            ApiError::invalid(&param, message)
        })?;
        if tools.iter().any(|other| other.tool.name == name) {
            return Err(ApiError::invalid(&param, format!("{param}.name: {name:?} is there twice")));
        }
        let parameters = function.get("parameters").filter(|value| !value.is_null()).cloned();
        let parameters = parameters.unwrap_or_else(|| json!({ "type": "object", "properties": {} }));
        if !parameters.is_object() {
            let param = format!("{param}.parameters");
            return Err(ApiError::invalid(&param, format!("{param} must be a JSON schema")));
        }
        let description = function.get("description").and_then(Value::as_str).unwrap_or_default();
        let mut declared = json!({ "name": name, "description": description });
        // What a request leaves out, the model is not shown; what it gives back, some requests say.
        for field in ["parameters", "response"] {
            if let Some(given) = function.get(field).filter(|given| !given.is_null()) {
                declared[field] = given.clone();
            }
        }
        let declaration = json!({ "type": "function", "function": declared });
        let param = format!("{param}.parameters");
        tools.push(Declared { tool: Tool { name: name.into(), parameters }, declaration, param });
    }
    let parallel = fields.get("parallel_tool_calls").is_none() || fields.flag("parallel_tool_calls")?;
    let choice = read_choice(fields, &tools, parallel)?;
    Ok((tools, choice))
}

fn read_choice(fields: Fields<'_>, tools: &[Declared], parallel: bool) -> Result<ToolChoice, ApiError> {
    let choice = match fields.get("tool_choice") {
        None => ToolChoice::Auto { parallel },
        Some(Value::String(word)) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto { parallel },
            "required" | "any" => ToolChoice::Required { name: None, parallel },
            other => {
                let message = format!("tool_choice is {other:?}; expected none, auto, required or a function");
                return Err(ApiError::invalid("tool_choice", message));
            }
        },
        Some(Value::Object(object)) => {
            let function = object.get("function").and_then(|function| function.get("name"));
            let Some(name) = function.or(object.get("name")).and_then(Value::as_str) else {
                return Err(ApiError::invalid("tool_choice", "tool_choice.function.name must be a text"));
            };
            if !tools.iter().any(|tool| tool.tool.name == name) {
                return Err(ApiError::invalid(
                    "tool_choice",
                    format!("tool_choice: there is no tool {name:?} among tools"),
                ));
            }
            ToolChoice::Required { name: Some(name.into()), parallel }
        }
        Some(other) => return Err(ApiError::invalid("tool_choice", format!("tool_choice cannot be {other}"))),
    };
    match choice {
        ToolChoice::Required { .. } if tools.is_empty() => {
            Err(ApiError::invalid("tool_choice", "tool_choice asks for a call, but there are no tools"))
        }
        choice => Ok(choice),
    }
}

fn is_name(name: &str) -> bool {
    let is_fine = |c: char| c.is_alphanumeric() || "_-.:".contains(c);
    (1..=128).contains(&name.len()) && name.chars().all(is_fine)
}
