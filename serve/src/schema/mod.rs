//! JSON schemas, for answers in JSON and for the arguments of tools alike.
//!
//! One front end ([`read`]) turns a schema into a [`Form`]: references resolved, `allOf` merged, every keyword enforced or refused by its name. Two back ends write
//! the grammar of a form: [`json`] for JSON text, [`call`] for Gemma's notation of a call. What one enforces, the other does too, since neither sees the schema.
//! What no grammar can say, that items differ from each other, is checked token by token ([`distinct`]).

pub mod call;
pub mod distinct;
pub mod json;

mod form;
mod formats;
mod keywords;
mod meet;
mod number;
mod read;
mod references;
mod text;

use serde_json::Value;

use form::Form;

use crate::error::ApiError;

/// Bytes of a schema.
const LONGEST: usize = 256 << 10;

/// Why a schema cannot be enforced.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub keyword: String,
    pub reason: String,
}

impl Refusal {
    fn new(keyword: &str, reason: impl Into<String>) -> Refusal {
        Refusal { keyword: keyword.into(), reason: reason.into() }
    }

    /// As a client is told, with the field of the request that has the schema.
    pub fn error(&self, param: &str) -> ApiError {
        let Refusal { keyword, reason } = self;
        ApiError::schema(param, format!("{param}: {keyword:?} {reason}"))
    }
}

/// A schema that can be enforced.
#[derive(Clone, Debug)]
pub struct Schema {
    pub form: Form,
    /// What [`Form::Refer`] names.
    pub defined: Vec<Form>,
}

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

    /// Whether something holds of a form anywhere in it.
    fn any(&self, holds: &dyn Fn(&Form) -> bool) -> bool {
        fn any(form: &Form, holds: &dyn Fn(&Form) -> bool) -> bool {
            holds(form) || form.parts().into_iter().any(|part| any(part, holds))
        }
        self.defined.iter().chain([&self.form]).any(|form| any(form, holds))
    }

    /// Whether some items or names have to differ, which no grammar can say.
    pub fn has_distinct(&self) -> bool {
        self.any(&|form| match form {
            Form::List(list) => list.distinct,
            Form::Object(object) => object.counts_others(),
            _ => false,
        })
    }

    /// The forms that a value may have, with neither references nor alternatives.
    fn plain<'a>(&'a self, form: &'a Form, found: &mut Vec<&'a Form>) {
        let mut open = vec![form];
        let mut referred = Vec::new();
        while let Some(form) = open.pop() {
            match form {
                Form::Either(forms) => open.extend(forms),
                Form::Refer(index) if !referred.contains(index) => {
                    referred.push(*index);
                    open.extend(self.defined.get(*index));
                }
                Form::Refer(_) => {}
                form => found.push(form),
            }
        }
    }
}
