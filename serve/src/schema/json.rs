//! The grammar of JSON text: the form, written once more as a schema of the few keywords that the grammar's compiler
//! takes exactly.

use serde_json::{Map, Value, json};

use super::form::{Form, List, Object, Schema};
use super::number::Number;
use super::refusal::Refusal;
use super::text::{Pattern, Text, may_match};

/// Between two tokens of JSON: a space, or a line break and the indentation of a few levels. Without a bound a model
/// may go on for ever.
const SPACE: &str = r" |\n {0,12}";
/// After a backslash. Without `u` a character has one spelling, so that a listed name cannot come as one that is not.
const ESCAPES: &str = "nrbtf\\\"";
/// With it, where a schema asks for characters that have no other.
const ALL_ESCAPES: &str = "nrbtf\\\"u";

/// The schema, as llguidance takes it.
pub fn grammar(schema: &Schema) -> Value {
    let mut top = match value(&schema.form) {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    let defined = schema.defined.iter().enumerate().map(|(index, form)| (index.to_string(), value(form)));
    top.insert("$defs".into(), Value::Object(defined.collect()));
    let escapes = if needs_codes(schema) { ALL_ESCAPES } else { ESCAPES };
    top.insert("x-guidance".into(), json!({ "whitespace_pattern": SPACE, "json_allowed_escapes": escapes }));
    Value::Object(top)
}

/// Whether a schema asks for characters that JSON writes by their code alone.
fn needs_codes(schema: &Schema) -> bool {
    let is_code = |character: char| character < ' ' && !"\n\r\t\u{8}\u{c}".contains(character);
    schema.any(&|form| match form {
        Form::Text(text) => match &text.only {
            Some(only) => only.contains(is_code),
            None => {
                let plain = Pattern(r"[^\x00-\x07\x0B\x0E-\x1F]*".into());
                let patterns = [&text.patterns[..], &[plain]].concat();
                !text.patterns.is_empty() && !may_match(&patterns, text.least, text.most)
            }
        },
        Form::Object(object) => object.properties.iter().any(|(name, _)| name.contains(is_code)),
        _ => false,
    })
}

/// Refuses what the grammar could not keep apart: a listed name, and the same name written by codes.
pub(super) fn check(schema: &Schema) -> Result<(), Refusal> {
    let hides = |form: &Form| match form {
        Form::Object(object) => object.is_open() && !object.properties.is_empty(),
        _ => false,
    };
    match needs_codes(schema) && schema.any(&hides) {
        true => Err(Refusal::new("additionalProperties", "must be false where a schema has control characters")),
        false => Ok(()),
    }
}

fn value(form: &Form) -> Value {
    match form {
        Form::Any => json!({}),
        Form::Nothing(_) => json!(false),
        Form::Null => json!({ "type": "null" }),
        Form::Boolean(None) => json!({ "type": "boolean" }),
        Form::Boolean(Some(only)) => json!({ "const": only }),
        Form::Number(number) => self::number(number),
        Form::Text(text) => self::text(text),
        Form::List(list) => self::list(list),
        Form::Object(object) => self::object(object),
        Form::Either(forms) => json!({ "anyOf": forms.iter().map(value).collect::<Vec<_>>() }),
        Form::Refer(index) => json!({ "$ref": format!("#/$defs/{index}") }),
    }
}

pub(super) fn number(number: &Number) -> Value {
    if let Some(only) = &number.only {
        return json!({ "const": only });
    }
    let mut found = Map::new();
    found.insert("type".into(), if number.whole { "integer" } else { "number" }.into());
    let bounds = [(number.least, "minimum", "exclusiveMinimum"), (number.most, "maximum", "exclusiveMaximum")];
    for (bound, included, excluded) in bounds {
        if let Some(bound) = bound {
            found.insert(if bound.excluded { excluded } else { included }.into(), bound.value.into());
        }
    }
    if let Some(multiple) = number.multiple {
        found.insert("multipleOf".into(), multiple.value().into());
    }
    Value::Object(found)
}

fn text(text: &Text) -> Value {
    if let Some(only) = &text.only {
        return json!({ "const": only });
    }
    let mut found = Map::new();
    found.insert("type".into(), "string".into());
    if text.least > 0 {
        found.insert("minLength".into(), text.least.into());
    }
    if let Some(most) = text.most {
        found.insert("maxLength".into(), most.into());
    }
    let patterns: Vec<String> = text.patterns.iter().map(|pattern| format!("^(?:{})$", pattern.0)).collect();
    match &patterns[..] {
        [] => {}
        [one] => _ = found.insert("pattern".into(), one.as_str().into()),
        all => {
            let all: Vec<Value> = all.iter().map(|one| json!({ "type": "string", "pattern": one })).collect();
            found.insert("allOf".into(), all.into());
        }
    }
    Value::Object(found)
}

fn list(list: &List) -> Value {
    let mut found = json!({ "type": "array", "minItems": list.least, "items": value(&list.rest) });
    if !list.first.is_empty() {
        found["prefixItems"] = list.first.iter().map(value).collect();
    }
    if let Some(most) = list.most {
        found["maxItems"] = most.into();
    }
    found
}

fn object(object: &Object) -> Value {
    let properties: Map<String, Value> =
        object.properties.iter().map(|(name, form)| (name.clone(), value(form))).collect();
    let patterns: Map<String, Value> =
        object.patterns.iter().map(|(pattern, form)| (format!("^(?:{})$", pattern.0), value(form))).collect();
    let mut found = json!({
        "type": "object",
        "properties": properties,
        "additionalProperties": value(&object.others),
        "required": object.required,
    });
    if !patterns.is_empty() {
        found["patternProperties"] = patterns.into();
    }
    if object.least > 0 {
        found["minProperties"] = object.least.into();
    }
    if let Some(most) = object.most {
        found["maxProperties"] = most.into();
    }
    found
}
