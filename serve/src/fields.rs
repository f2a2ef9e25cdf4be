//! Reading the fields of a request. Unknown ones are left alone, since clients add some every month; one of the wrong
//! type or out of range is refused by its name, with the limit and with what was found.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// A number as it was written: the shortest that is this f32 and no other, 0.95 and not 0.949999988079071.
pub fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, |number| json!(number))
}

/// The fields of a request's JSON object.
#[derive(Clone, Copy)]
pub struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A field that is there and not null.
    pub fn get(self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
        let mut found = found.to_string();
        if found.len() > 80 {
            let end = (0..=80).rev().find(|at| found.is_char_boundary(*at)).unwrap_or(0);
            found.truncate(end);
            found.push('…');
        }
        ApiError::invalid(name, format!("{name} must be {expected}; found {found}"))
    }

    pub fn number(self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(Fields::wrong(name, &format!("a number from {} to {}", range.start(), range.end()), value)),
        }
    }

    pub fn count(self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        // Some clients write 16.0.
        let whole = value
            .as_u64()
            .or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..=9e15).contains(x)).map(|x| x as u64));
        match whole.filter(|count| (least..=most).contains(count)) {
            Some(count) => Ok(Some(count)),
            None => Err(Fields::wrong(name, &format!("a whole number from {least} to {most}"), value)),
        }
    }

    /// Whether a limit is llama-server's word for none, -1.
    pub fn is_unlimited(self, name: &str) -> bool {
        self.get(name).and_then(Value::as_i64) == Some(-1)
    }

    pub fn flag(self, name: &str) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(Fields::wrong(name, "true or false", value)),
        }
    }

    pub fn text(self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(Fields::wrong(name, "a text", value)),
        }
    }

    pub fn object(self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Fields(fields))),
            Some(value) => Err(Fields::wrong(name, "an object", value)),
        }
    }

    pub fn list(self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(value) => Err(Fields::wrong(name, "a list", value)),
        }
    }

    /// A text, or a list of a few.
    pub fn texts(self, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let expected = format!("a text or a list of at most {most} texts");
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text.clone()]),
            Some(value @ Value::Array(list)) if list.len() <= most => {
                let text = |item: &Value| item.as_str().map(String::from);
                list.iter().map(text).collect::<Option<_>>().ok_or_else(|| Fields::wrong(name, &expected, value))
            }
            Some(value) => Err(Fields::wrong(name, &expected, value)),
        }
    }

    /// A seed may be negative: all 64 bits count.
    pub fn seed(self) -> Result<Option<u64>, ApiError> {
        match self.get("seed") {
            None => Ok(None),
            Some(value) => match value.as_u64().or(value.as_i64().map(|seed| seed as u64)) {
                Some(seed) => Ok(Some(seed)),
                None => Err(Fields::wrong("seed", "a whole number of 64 bits", value)),
            },
        }
    }
}
