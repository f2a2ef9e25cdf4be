//! JSON schemas, for answers in JSON and for the arguments of tools alike.
//!
//! One front end ([`read`]) turns a schema into a [`Form`](form::Form): references resolved, `allOf` merged, every
//! keyword enforced or refused by its name. Two back ends write the grammar of a form: [`json`] for JSON text, [`call`]
//! for Gemma's notation of a call. What one enforces, the other does too, since neither sees the schema. What no
//! grammar can say, that items differ from each other, is checked token by token ([`distinct`]).

pub mod call;
pub mod distinct;
pub mod json;

mod form;
mod formats;
mod keywords;
mod meet;
mod narrow;
mod number;
mod read;
mod references;
mod refusal;
mod text;

use serde_json::Value;

pub use form::Schema;

use crate::error::ApiError;

/// Bytes of a schema.
const LONGEST: usize = 256 << 10;

impl Schema {
    pub fn read(schema: &Value, param: &str) -> Result<Schema, ApiError> {
        let bytes = schema.to_string().len();
        if bytes > LONGEST {
            let message = format!("{param} must have at most {LONGEST} bytes; found {bytes}");
            return Err(ApiError::schema(param, message));
        }
        let read = read::read(schema).and_then(|schema| json::check(&schema).map(|()| schema));
        read.map_err(|refusal| refusal.error(param))
    }
}
