//! The field `lora` of a request, as llama-server's clients send it: adapters by their numbers, each with a scale.

use std::ops::RangeInclusive;

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;

/// Beyond it nothing of a model is left.
const SCALES: RangeInclusive<f64> = -100.0..=100.0;
/// Entries of a list.
const MOST: usize = 1024;

/// Adapters that a list names, and how strong each is to be: of a request's, one at most is on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked(pub Vec<(u32, f32)>);

impl Asked {
    /// Of a request; `None` where it leaves the choice to `model`.
    pub fn read(fields: Fields<'_>) -> Result<Option<Asked>, ApiError> {
        let Some(list) = fields.list("lora")?.filter(|list| !list.is_empty()) else { return Ok(None) };
        let asked = Asked::read_list("lora", list)?;
        match asked.0.iter().filter(|(_, scale)| *scale != 0.0).count() {
            0 | 1 => Ok(Some(asked)),
            several => {
                let message = format!("lora: a request has one adapter; {several} have a scale other than 0");
                Err(ApiError::invalid("lora", message))
            }
        }
    }

    /// A list of objects with `id` and `scale`.
    pub fn read_list(param: &str, list: &[Value]) -> Result<Asked, ApiError> {
        let wrong = |message: String| ApiError::invalid(param, message);
        if list.len() > MOST {
            return Err(wrong(format!("{param} must have at most {MOST} entries; found {}", list.len())));
        }
        let mut read: Vec<(u32, f32)> = Vec::new();
        for (index, entry) in list.iter().enumerate() {
            let place = format!("{param}[{index}]");
            let Value::Object(entry) = entry else {
                return Err(wrong(format!("{place} must be an object with id and scale")));
            };
            let fields = Fields(entry);
            let within = |error: ApiError| wrong(format!("{place}.{}", error.message));
            let id = fields.count("id", 0, u32::MAX.into()).map_err(within)?;
            let scale = fields.number("scale", SCALES).map_err(within)?;
            let (Some(id), Some(scale)) = (id, scale) else {
                let missing = if id.is_none() { "id" } else { "scale" };
                return Err(wrong(format!("{place}.{missing} is missing")));
            };
            if read.iter().any(|(other, _)| u64::from(*other) == id) {
                return Err(wrong(format!("{place}.id: {id} is named twice")));
            }
            read.push((id as u32, scale as f32));
        }
        Ok(Asked(read))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(lora: Value) -> Result<Option<Asked>, ApiError> {
        let body = json!({ "lora": lora });
        Asked::read(Fields(body.as_object().unwrap()))
    }

    #[test]
    fn one_adapter_is_on_at_most() {
        assert_eq!(read(json!(null)), Ok(None));
        assert_eq!(read(json!([])), Ok(None));
        assert_eq!(read(json!([{ "id": 3, "scale": 0.5 }])), Ok(Some(Asked(vec![(3, 0.5)]))));
        let others_off = read(json!([{ "id": 0, "scale": 0 }, { "id": 1, "scale": 1 }])).unwrap().unwrap();
        assert_eq!(others_off, Asked(vec![(0, 0.0), (1, 1.0)]));
        for (wrong, word) in [
            (json!("x"), "a list"),
            (json!([1]), "lora[0] must be"),
            (json!([{ "id": 1 }]), "lora[0].scale is missing"),
            (json!([{ "scale": 1 }]), "lora[0].id is missing"),
            (json!([{ "id": -1, "scale": 1 }]), "lora[0].id must be"),
            (json!([{ "id": 0, "scale": 1e9 }]), "lora[0].scale must be a number from -100 to 100"),
            (json!([{ "id": 0, "scale": 1 }, { "id": 0, "scale": 1 }]), "lora[1].id: 0 is named twice"),
            (json!([{ "id": 0, "scale": 1 }, { "id": 1, "scale": 1 }]), "lora: a request has one adapter; 2 have"),
            (json!(vec![json!({}); 1025]), "at most 1024"),
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.param.as_deref() == Some("lora") && error.message.contains(word), "{}", error.message);
        }
    }
}
