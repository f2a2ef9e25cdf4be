//! Tools and the choice among them, as those of a chat.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::tools::{self, Declared, ToolChoice};

pub fn read(fields: Fields<'_>) -> Result<(Vec<Declared>, ToolChoice), ApiError> {
    let list = fields.list("tools")?.unwrap_or_default().iter().enumerate();
    let functions = list.map(|(index, tool)| function(&format!("tools[{index}]"), tool)).collect::<Result<_, _>>()?;
    let mut of_chat = Map::new();
    of_chat.insert("tools".into(), Value::Array(functions));
    if let Some(choice) = fields.object("tool_choice")? {
        let (word, parallel) = choice_of_chat(choice)?;
        of_chat.insert("tool_choice".into(), word);
        of_chat.insert("parallel_tool_calls".into(), parallel.into());
    }
    let (mut declared, choice) = tools::read(Fields(&of_chat))?;
    for (index, tool) in declared.iter_mut().enumerate() {
        tool.param = format!("tools[{index}].input_schema");
    }
    Ok((declared, choice))
}

fn function(param: &str, tool: &Value) -> Result<Value, ApiError> {
    let wrong = |field: &str, message: &str| {
        let param = format!("{param}.{field}");
        ApiError::invalid(&param, format!("{param} {message}"))
    };
    match &tool["type"] {
        Value::Null => {}
        Value::String(kind) if kind == "custom" => {}
        Value::String(kind) => {
            let message = "is no tool of this server: declare tools by name, description and input_schema";
            return Err(wrong("type", &format!("{kind:?} {message}")));
        }
        _ => return Err(wrong("type", "must be a text")),
    }
    if !matches!(tool["description"], Value::Null | Value::String(_)) {
        return Err(wrong("description", "must be a text"));
    }
    if !tool["input_schema"].is_object() {
        return Err(wrong("input_schema", "must be a JSON schema"));
    }
    let [name, description, schema] = ["name", "description", "input_schema"].map(|field| &tool[field]);
    Ok(json!({ "type": "function", "name": name, "description": description, "parameters": schema }))
}

/// A chat's word for the choice, and whether several calls may come.
fn choice_of_chat(choice: Fields<'_>) -> Result<(Value, bool), ApiError> {
    let within = |error: ApiError| error.within("tool_choice");
    let word = match choice.text("type").map_err(within)? {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => match choice.text("name").map_err(within)? {
            Some(name) => json!({ "name": name }),
            None => return Err(ApiError::invalid("tool_choice.name", "tool_choice.name is missing")),
        },
        _ => {
            let param = "tool_choice.type";
            return Err(ApiError::invalid(param, format!("{param} must be auto, any, tool or none")));
        }
    };
    Ok((word, !choice.flag("disable_parallel_tool_use").map_err(within)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(request: Value) -> Result<(Vec<Declared>, ToolChoice), ApiError> {
        read(Fields(request.as_object().expect("an object")))
    }

    #[test]
    fn the_model_is_shown_what_a_chat_shows_it() {
        let schema = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
        let tool = json!({ "name": "f", "description": "d", "input_schema": schema, "cache_control": {} });
        let function = json!({ "name": "f", "description": "d", "parameters": schema });
        let chat = json!({ "tools": [{ "type": "function", "function": function }] });
        let (of_chat, _) = tools::read(Fields(chat.as_object().expect("an object"))).expect("it is right");
        for (choice, expected) in [
            (Value::Null, ToolChoice::Auto { parallel: true }),
            (json!({ "type": "auto" }), ToolChoice::Auto { parallel: true }),
            (json!({ "type": "none" }), ToolChoice::None),
            (
                json!({ "type": "any", "disable_parallel_tool_use": true }),
                ToolChoice::Required { name: None, parallel: false },
            ),
            (json!({ "type": "tool", "name": "f" }), ToolChoice::Required { name: Some("f".into()), parallel: true }),
        ] {
            let (declared, choice) = tools(json!({ "tools": [tool], "tool_choice": choice })).expect("it is right");
            assert_eq!(choice, expected);
            assert_eq!(declared[0].declaration, of_chat[0].declaration);
            assert_eq!(declared[0].param, "tools[0].input_schema");
        }
    }

    #[test]
    fn what_is_wrong_is_called_what_the_request_calls_it() {
        let tool = |more: Value| {
            let mut tool = json!({ "name": "f", "input_schema": {} });
            tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ "tools": [tool] })
        };
        let choice = |choice: Value| json!({ "tools": [{ "name": "f", "input_schema": {} }], "tool_choice": choice });
        for (request, param) in [
            (json!({ "tools": 7 }), "tools"),
            (json!({ "tools": [7] }), "tools[0].input_schema"),
            (tool(json!({ "type": "web_search_20250305" })), "tools[0].type"),
            (tool(json!({ "type": 7 })), "tools[0].type"),
            (tool(json!({ "name": 7 })), "tools[0]"),
            (tool(json!({ "description": 7 })), "tools[0].description"),
            (tool(json!({ "input_schema": null })), "tools[0].input_schema"),
            (choice(json!("auto")), "tool_choice"),
            (choice(json!({})), "tool_choice.type"),
            (choice(json!({ "type": "one" })), "tool_choice.type"),
            (choice(json!({ "type": "tool" })), "tool_choice.name"),
            (choice(json!({ "type": "tool", "name": "g" })), "tool_choice"),
            (choice(json!({ "type": "any", "disable_parallel_tool_use": 1 })), "tool_choice.disable_parallel_tool_use"),
            (json!({ "tool_choice": { "type": "any" } }), "tool_choice"),
        ] {
            let error = tools(request.clone()).err().unwrap_or_else(|| panic!("{request} was taken"));
            assert_eq!(error.param.as_deref(), Some(param), "{request}");
            assert!(error.message.starts_with(param), "{}", error.message);
        }
    }
}
