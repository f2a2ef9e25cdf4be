//! Keywords that need no other schema: types, numbers, strings and single values; and the values that do not follow a
//! simple schema.

use serde_json::{Map, Value};

use super::form::{Form, List, Object};
use super::formats;
use super::number::{Bound, Decimal, Number};
use super::refusal::Refusal;
use super::text::{LONGEST, Pattern, Text};

pub const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

pub type Fields = Map<String, Value>;

pub fn wrong(keyword: &str, expected: &str, found: &Value) -> Refusal {
    let mut found: String = found.to_string().chars().take(60).collect();
    found.retain(|character| !character.is_control());
    Refusal::new(keyword, format!("must be {expected}; found {found}"))
}

pub fn unsupported(keyword: &str) -> Refusal {
    Refusal::new(keyword, "is not supported")
}

pub fn list<'v>(fields: &'v Fields, keyword: &str) -> Result<Option<&'v [Value]>, Refusal> {
    match fields.get(keyword) {
        None => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(other) => Err(wrong(keyword, "a list", other)),
    }
}

pub fn object<'v>(fields: &'v Fields, keyword: &str) -> Result<Option<&'v Fields>, Refusal> {
    match fields.get(keyword) {
        None => Ok(None),
        Some(Value::Object(object)) => Ok(Some(object)),
        Some(other) => Err(wrong(keyword, "an object", other)),
    }
}

/// A count; 2.0 is one.
pub fn count(fields: &Fields, keyword: &str) -> Result<Option<u64>, Refusal> {
    let Some(value) = fields.get(keyword) else { return Ok(None) };
    let whole = |number: &f64| number.fract() == 0.0 && *number >= 0.0;
    let count = value.as_u64().or_else(|| value.as_f64().filter(whole).map(|number| number as u64));
    count.map(Some).ok_or_else(|| wrong(keyword, "a whole number that is not negative", value))
}

fn number(fields: &Fields, keyword: &str) -> Result<Option<f64>, Refusal> {
    let Some(value) = fields.get(keyword) else { return Ok(None) };
    value.as_f64().map(Some).ok_or_else(|| wrong(keyword, "a number", value))
}

/// A schema that every value follows.
pub fn is_trivial(schema: &Value) -> bool {
    schema == &Value::Bool(true) || schema.as_object().is_some_and(Map::is_empty)
}

pub fn types(fields: &Fields) -> Result<Option<Vec<&'static str>>, Refusal> {
    let known = |value: &Value| {
        // Some write types as Google's own API does.
        let name = value.as_str().map(str::to_ascii_lowercase);
        let known = TYPES.into_iter().find(|known| Some(*known) == name.as_deref());
        known.ok_or_else(|| wrong("type", &format!("one of {}", TYPES.join(", ")), value))
    };
    match fields.get("type") {
        None => Ok(None),
        Some(Value::Array(names)) => names.iter().map(known).collect::<Result<_, _>>().map(Some),
        Some(name) => Ok(Some(vec![known(name)?])),
    }
}

pub fn numbers(fields: &Fields, whole: bool) -> Result<Form, Refusal> {
    let bound = |inclusive: &str, exclusive: &str| -> Result<[Option<Bound>; 2], Refusal> {
        let included = number(fields, inclusive)?;
        let (excluded, is_excluded) = match fields.get(exclusive) {
            // As draft 4 wrote it.
            Some(Value::Bool(is_excluded)) => (None, *is_excluded),
            _ => (number(fields, exclusive)?, false),
        };
        let included = included.map(|value| Bound { value, excluded: is_excluded });
        Ok([included, excluded.map(|value| Bound { value, excluded: true })])
    };
    let [least, above] = bound("minimum", "exclusiveMinimum")?;
    let [most, below] = bound("maximum", "exclusiveMaximum")?;
    let multiple = match fields.get("multipleOf") {
        None => None,
        Some(Value::Number(multiple)) if multiple.as_f64().is_some_and(|multiple| multiple > 0.0) => {
            let reason = || Refusal::new("multipleOf", format!("has too many digits: {multiple}"));
            Some(Decimal::read(multiple).ok_or_else(reason)?)
        }
        Some(other) => return Err(wrong("multipleOf", "a number above 0", other)),
    };
    let inclusive = Number { whole, least, most, multiple, only: None };
    inclusive.meet(Number { least: above, most: below, ..Number::default() })
}

pub fn texts(fields: &Fields) -> Result<Form, Refusal> {
    let (least, most) = (count(fields, "minLength")?.unwrap_or(0), count(fields, "maxLength")?);
    let mut found = Text { least, most, ..Text::default() };
    if let Some(value) = fields.get("pattern") {
        let text = value.as_str().ok_or_else(|| wrong("pattern", "a text", value))?;
        found.patterns.push(pattern("pattern", text)?);
    }
    if let Some(value) = fields.get("format") {
        let name = value.as_str().ok_or_else(|| wrong("format", "a text", value))?;
        if let Some((regex, longest)) = formats::format(name) {
            found.patterns.push(Pattern(regex));
            found.most = [found.most, longest].into_iter().flatten().min();
        }
    }
    if found.least > LONGEST {
        return Err(Refusal::new("minLength", format!("must be at most {LONGEST}; found {least}")));
    }
    Ok(found.settle())
}

pub fn pattern(keyword: &str, text: &str) -> Result<Pattern, Refusal> {
    Pattern::search(text).ok_or_else(|| {
        let text: String = text.chars().take(100).collect();
        Refusal::new(
            keyword,
            format!("has a regular expression that is not supported (no look-around, no back-references): {text:?}"),
        )
    })
}

/// One value and no other.
pub fn constant(value: &Value) -> Result<Form, Refusal> {
    Ok(match value {
        Value::Null => Form::Null,
        Value::Bool(value) => Form::Boolean(Some(*value)),
        Value::Number(number) => Form::Number(Number::only(number)?),
        Value::String(text) => Form::Text(Text::only(text)),
        Value::Array(items) => Form::List(List {
            first: items.iter().map(constant).collect::<Result<_, _>>()?,
            rest: Box::new(Form::Nothing("const".into())),
            least: items.len() as u64,
            most: Some(items.len() as u64),
            distinct: false,
        }),
        Value::Object(fields) => {
            let property = |(name, value): (&String, &Value)| Ok((name.clone(), constant(value)?));
            Form::Object(Object {
                properties: fields.iter().map(property).collect::<Result<_, Refusal>>()?,
                others: Box::new(Form::Nothing("const".into())),
                speaks_of_others: true,
                required: fields.keys().cloned().collect(),
                ..Object::default()
            })
        }
    })
}

/// Values of every type, but for objects with this property.
pub fn without(name: &str) -> Vec<Form> {
    let mut forms = Form::types();
    forms.pop();
    let properties = vec![(name.to_owned(), Form::Nothing("not".into()))];
    forms.push(Form::Object(Object { properties, ..Object::default() }));
    forms
}

/// All values that do not follow a schema, where a grammar can say which.
pub fn complement(schema: &Value) -> Option<Form> {
    let fields = match schema {
        Value::Bool(true) => return Some(Form::Nothing("not".into())),
        Value::Bool(false) => return Some(Form::Any),
        schema => schema.as_object()?,
    };
    let annotations = ["title", "description", "$comment", "default", "examples"];
    let others = fields.keys().filter(|keyword| !annotations.contains(&keyword.as_str())).count();
    let types = types(fields).ok()?;
    if others == 0 {
        return Some(Form::Nothing("not".into()));
    }
    let outside = |types: &[&str]| -> Option<Vec<Form>> {
        let has_number = types.contains(&"number");
        if types.contains(&"integer") && !has_number {
            return None;
        }
        let names = ["null", "boolean", "number", "string", "array", "object"];
        Some(
            names
                .into_iter()
                .zip(Form::types())
                .filter(|(name, _)| !types.contains(name))
                .map(|(_, form)| form)
                .collect(),
        )
    };
    match (types, fields.get("required").and_then(Value::as_array)) {
        (Some(types), None) if others == 1 => Some(match outside(&types)? {
            forms if forms.is_empty() => Form::Nothing("not".into()),
            forms => Form::either(forms),
        }),
        (types, Some(names)) if others == 1 + usize::from(types.is_some()) => {
            let [Value::String(name)] = &names[..] else { return None };
            match types {
                None => {
                    // Only an object can lack a property, so all else follows the schema.
                    Some(without(name).pop()?)
                }
                Some(types) if types == ["object"] => Some(Form::either(without(name))),
                Some(_) => None,
            }
        }
        _ => None,
    }
}
