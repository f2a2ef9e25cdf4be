//! What values a schema allows, type by type. This is all that is left of a schema: the grammars are written from it.

use std::collections::BTreeSet;

use super::number::Number;
use super::text::{Pattern, Text};

/// A schema that can be enforced.
#[derive(Clone, Debug)]
pub struct Schema {
    pub form: Form,
    /// What [`Form::Refer`] names.
    pub defined: Vec<Form>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    Any,
    /// No value at all, because of this keyword.
    Nothing(String),
    Null,
    /// Either, or this one.
    Boolean(Option<bool>),
    Number(Number),
    Text(Text),
    List(List),
    Object(Object),
    Either(Vec<Form>),
    /// One of the schema's definitions.
    Refer(usize),
}

#[derive(Clone, Debug, PartialEq)]
pub struct List {
    pub first: Vec<Form>,
    pub rest: Box<Form>,
    pub least: u64,
    pub most: Option<u64>,
    /// No two items are equal.
    pub distinct: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// In the order of the schema, which is the order of an answer in JSON.
    pub properties: Vec<(String, Form)>,
    pub patterns: Vec<(Pattern, Form)>,
    /// Of names that none of the above has.
    pub others: Box<Form>,
    /// The schema says something of other names.
    pub speaks_of_others: bool,
    pub required: BTreeSet<String>,
    pub least: u64,
    pub most: Option<u64>,
}

impl Default for List {
    fn default() -> List {
        List { first: Vec::new(), rest: Box::new(Form::Any), least: 0, most: None, distinct: false }
    }
}

impl Default for Object {
    fn default() -> Object {
        Object {
            properties: Vec::new(),
            patterns: Vec::new(),
            others: Box::new(Form::Any),
            speaks_of_others: false,
            required: BTreeSet::new(),
            least: 0,
            most: None,
        }
    }
}

impl Object {
    pub fn property(&self, name: &str) -> Option<&Form> {
        self.properties.iter().find(|(other, _)| other == name).map(|(_, form)| form)
    }

    /// Whether names that are not listed may come.
    pub fn is_open(&self) -> bool {
        !self.others.is_nothing() || self.patterns.iter().any(|(_, form)| !form.is_nothing())
    }

    /// Whether names that are not listed count: one that comes twice counts once.
    pub fn counts_others(&self) -> bool {
        self.is_open() && self.least > self.required.len() as u64
    }
}

impl Form {
    /// Every type, one beside the other.
    pub fn types() -> Vec<Form> {
        vec![
            Form::Null,
            Form::Boolean(None),
            Form::Number(Number::default()),
            Form::Text(Text::default()),
            Form::List(List::default()),
            Form::Object(Object::default()),
        ]
    }

    /// One of several; those that allow nothing are left out.
    pub fn either(forms: Vec<Form>) -> Form {
        let (mut kept, mut nothing) = (Vec::new(), None);
        for form in forms {
            match form {
                Form::Any => return Form::Any,
                Form::Nothing(_) => nothing = nothing.or(Some(form)),
                Form::Either(inner) => kept.extend(inner),
                // Of a few; that many are all different is not worth finding out.
                form if kept.len() < 64 && kept.contains(&form) => {}
                form => kept.push(form),
            }
        }
        match (kept.len(), nothing) {
            (0, nothing) => nothing.unwrap_or(Form::Nothing("anyOf".into())),
            (1, _) => kept.remove(0),
            _ => Form::Either(kept),
        }
    }

    pub fn is_nothing(&self) -> bool {
        matches!(self, Form::Nothing(_))
    }

    /// The forms that this one is made of.
    pub fn parts(&self) -> Vec<&Form> {
        match self {
            Form::Either(forms) => forms.iter().collect(),
            Form::List(list) => list.first.iter().chain([&*list.rest]).collect(),
            Form::Object(object) => {
                let named = object.properties.iter().map(|(_, form)| form);
                let matched = object.patterns.iter().map(|(_, form)| form);
                named.chain(matched).chain([&*object.others]).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl Schema {
    /// Whether something holds of a form anywhere in it.
    pub(super) fn any(&self, holds: &dyn Fn(&Form) -> bool) -> bool {
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
    pub(super) fn plain<'a>(&'a self, form: &'a Form, found: &mut Vec<&'a Form>) {
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
