//! The grammar of a call, in Gemma's notation, from the JSON schemas of the tools.
//!
//! Keys are bare and sorted as the chat template sorts them, strings lie between quote tokens and have no escapes. What the notation cannot keep a model to
//! (patterns, formats, sums of schemas) is left open rather than refused: a schema that is looser than it should be is still a call.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::language::Tool;

const MOST_RULES: usize = 4000;
const DEEPEST: usize = 24;

/// Rules that every grammar has.
const COMMON: &str = r#"
TEXT: /(?s:.+)/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/
KEY: /[A-Za-z_][A-Za-z0-9_.\-]{0,63}/
boolean: "true" | "false"
any: string | NUMBER | boolean | "null" | any_object | any_list
any_object: "{" (any_pair ("," any_pair)*)? "}"
any_pair: KEY ":" any
any_list: "[" (any ("," any)*)? "]"
"#;

/// Builds a grammar rule by rule.
struct Rules<'a> {
    text: String,
    count: usize,
    quote: u32,
    /// Where references of the current tool point to.
    root: &'a Value,
    /// References that have a rule.
    referenced: BTreeMap<String, String>,
}

/// The grammar of what follows the marker of a call, up to and with its end.
pub fn lark<'a>(tools: impl Iterator<Item = &'a Tool>, quote: u32, close: u32) -> Result<String, ApiError> {
    let mut text = format!("{COMMON}string: <[{quote}]> TEXT? <[{quote}]>\n");
    let (mut starts, mut count) = (Vec::new(), 0);
    for tool in tools {
        let root = &tool.parameters;
        let mut rules = Rules { text, count, quote, root, referenced: BTreeMap::new() };
        let arguments = rules.object(root, 0)?;
        starts.push(format!("{} {arguments} <[{close}]>", literal(&format!("call:{}", tool.name))));
        (text, count) = (rules.text, rules.count);
    }
    _ = writeln!(text, "start: {}", starts.join(" | "));
    Ok(text)
}

/// A text that must come as it stands.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

impl Rules<'_> {
    fn rule(&mut self, body: &str) -> Result<String, ApiError> {
        self.count += 1;
        if self.count > MOST_RULES {
            return Err(ApiError::bad_request("invalid_schema", "the schemas of the tools are too large"));
        }
        let name = format!("r{}", self.count);
        _ = writeln!(self.text, "{name}: {body}");
        Ok(name)
    }

    fn value(&mut self, schema: &Value, depth: usize) -> Result<String, ApiError> {
        if depth > DEEPEST {
            return Ok("any".into());
        }
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            return self.reference(reference, depth);
        }
        if let Some(only) = schema.get("const") {
            return Ok(self.constant(only));
        }
        if let Some(Value::Array(values)) = schema.get("enum")
            && !values.is_empty()
        {
            let values: Vec<String> = values.iter().map(|value| self.constant(value)).collect();
            return self.rule(&values.join(" | "));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(all)) = schema.get(key)
                && !all.is_empty()
            {
                let all: Result<Vec<String>, ApiError> = all.iter().map(|one| self.value(one, depth + 1)).collect();
                return self.rule(&all?.join(" | "));
            }
        }
        match schema.get("type") {
            Some(Value::String(kind)) => self.typed(kind, schema, depth),
            Some(Value::Array(kinds)) if !kinds.is_empty() => {
                let kinds = kinds.iter().filter_map(Value::as_str);
                let kinds: Result<Vec<String>, ApiError> = kinds.map(|kind| self.typed(kind, schema, depth)).collect();
                self.rule(&kinds?.join(" | "))
            }
            _ if schema.get("properties").is_some() => self.object(schema, depth),
            _ => Ok("any".into()),
        }
    }

    fn typed(&mut self, kind: &str, schema: &Value, depth: usize) -> Result<String, ApiError> {
        // Some write types as Google's own API does.
        Ok(match kind.to_ascii_lowercase().as_str() {
            "string" => return self.string(schema),
            "integer" => "INTEGER".into(),
            "number" => "NUMBER".into(),
            "boolean" => "boolean".into(),
            "null" => "\"null\"".into(),
            "array" => return self.list(schema, depth),
            "object" => return self.object(schema, depth),
            _ => "any".into(),
        })
    }

    fn string(&mut self, schema: &Value) -> Result<String, ApiError> {
        let length = |key: &str| schema.get(key).and_then(Value::as_u64).filter(|length| *length <= 1000);
        let (least, most) = (length("minLength"), length("maxLength"));
        if least.is_none() && most.is_none() {
            return Ok("string".into());
        }
        let most = most.map_or(String::new(), |most| most.to_string());
        let quote = self.quote;
        self.rule(&format!("<[{quote}]> /(?s:.{{{},{most}}})/ <[{quote}]>", least.unwrap_or(0)))
    }

    fn list(&mut self, schema: &Value, depth: usize) -> Result<String, ApiError> {
        let item = match schema.get("items") {
            Some(items) if items.is_object() => self.value(items, depth + 1)?,
            _ => "any".into(),
        };
        let count = |key: &str| schema.get(key).and_then(Value::as_u64).filter(|count| *count <= 1000);
        let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
        if most == Some(0) {
            return Ok("\"[]\"".into());
        }
        let more = match most {
            Some(most) => format!("(\",\" {item}){{{},{}}}", least.saturating_sub(1), most.max(1) - 1),
            None => format!("(\",\" {item}){{{},}}", least.saturating_sub(1)),
        };
        let items = if least == 0 { format!("({item} {more})?") } else { format!("{item} {more}") };
        self.rule(&format!("\"[\" {items} \"]\""))
    }

    fn object(&mut self, schema: &Value, depth: usize) -> Result<String, ApiError> {
        let none = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
        if properties.is_empty() {
            let is_closed = depth == 0 || schema.get("additionalProperties") == Some(&Value::Bool(false));
            return Ok(if is_closed { "\"{}\"" } else { "any_object" }.into());
        }
        let required: Vec<&str> =
            schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let mut sorted: Vec<(&String, &Value)> = properties.iter().collect();
        sorted.sort_by_key(|(key, _)| key.to_lowercase());
        // From the last to the first: what follows when something came before, and when nothing did.
        let (mut after_some, mut after_none) = (String::new(), Some(String::new()));
        for (key, schema) in sorted.into_iter().rev() {
            let value = self.value(schema, depth + 1)?;
            let (here, later) = (literal(&format!("{key}:")), literal(&format!(",{key}:")));
            let is_required = required.contains(&key.as_str());
            let first = format!("{here} {value} {after_some}");
            after_none = Some(match after_none.filter(|_| !is_required) {
                None => self.rule(&first)?,
                Some(rest) if rest.is_empty() => self.rule(&format!("({first})?"))?,
                Some(rest) => self.rule(&format!("{first} | {rest}"))?,
            });
            let more = match is_required {
                true => format!("{later} {value} {after_some}"),
                false => format!("({later} {value})? {after_some}"),
            };
            after_some = self.rule(&more)?;
        }
        let pairs = after_none.unwrap_or_default();
        self.rule(&format!("\"{{\" {pairs} \"}}\""))
    }

    fn reference(&mut self, reference: &str, depth: usize) -> Result<String, ApiError> {
        if let Some(name) = self.referenced.get(reference) {
            return Ok(name.clone());
        }
        let target = reference.strip_prefix('#').and_then(|path| self.root.pointer(path));
        let Some(target) = target else {
            let message = format!("$ref {reference:?} of a tool's schema points to nothing in that schema");
            return Err(ApiError::bad_request("invalid_schema", message));
        };
        self.count += 1;
        let name = format!("ref{}", self.count);
        self.referenced.insert(reference.into(), name.clone());
        let body = self.value(target, depth + 1)?;
        _ = writeln!(self.text, "{name}: {body}");
        Ok(name)
    }

    /// One value, as the notation writes it.
    fn constant(&self, value: &Value) -> String {
        let quote = self.quote;
        match value {
            Value::String(text) if text.is_empty() => format!("(<[{quote}]> <[{quote}]>)"),
            Value::String(text) => format!("(<[{quote}]> {} <[{quote}]>)", literal(text)),
            Value::Array(list) => {
                let items: Vec<String> = list.iter().map(|item| self.constant(item)).collect();
                format!("(\"[\" {} \"]\")", items.join(" \",\" "))
            }
            Value::Object(fields) => {
                let mut sorted: Vec<(&String, &Value)> = fields.iter().collect();
                sorted.sort_by_key(|(key, _)| key.to_lowercase());
                let pair = |(key, value): (&String, &Value)| {
                    format!("{} {}", literal(&format!("{key}:")), self.constant(value))
                };
                let pairs: Vec<String> = sorted.into_iter().map(pair).collect();
                format!("(\"{{\" {} \"}}\")", pairs.join(" \",\" "))
            }
            other => literal(&other.to_string()),
        }
    }
}
