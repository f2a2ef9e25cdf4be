//! From a JSON schema to the form of its values. Every keyword of the standard is enforced, or means nothing to a
//! validator, or is refused by its name.
//!
//! The standard is draft 2020-12; of older drafts, what is still written: `definitions`, lists in `items`, truth values
//! in `exclusiveMinimum`. Keywords that the standard does not know are ignored, as it says.

use serde_json::Value;

use super::form::{Form, List, Object, Schema};
use super::keywords::{
    Fields, TYPES, complement, constant, count, is_trivial, list, numbers, object, pattern, texts, types, unsupported,
    without, wrong,
};
use super::meet::{Definitions, settle, settle_list};
use super::references::References;
use super::refusal::Refusal;
use super::text::{Pattern, Text};

/// Keywords that say something of one type, and of no other.
const NUMBERS: [&str; 5] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
const TEXTS: [&str; 4] = ["minLength", "maxLength", "pattern", "format"];
const LISTS: [&str; 7] =
    ["items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"];
const OBJECTS: [&str; 8] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "unevaluatedProperties",
];
/// Keywords whose schemas say more of the same value.
const IN_PLACE: [&str; 8] = ["allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "contains"];

pub fn read(schema: &Value) -> Result<Schema, Refusal> {
    let mut reader =
        Reader { references: References::new(schema), definitions: Definitions::default(), known: Vec::new() };
    let form = reader.schema(schema, schema, 0)?;
    let schema = settle(form, reader.definitions)?;
    match &schema.form {
        Form::Nothing(keyword) => Err(Refusal::new(keyword, "leaves no value that could follow the schema")),
        _ => Ok(schema),
    }
}

struct Reader<'a> {
    references: References<'a>,
    definitions: Definitions,
    /// The schemas that are referred to, by the index of their definition.
    known: Vec<&'a Value>,
}

impl<'a> Reader<'a> {
    fn schema(&mut self, schema: &'a Value, root: &'a Value, depth: usize) -> Result<Form, Refusal> {
        self.definitions.spend(depth)?;
        let fields = match schema {
            Value::Bool(true) => return Ok(Form::Any),
            Value::Bool(false) => return Ok(Form::Nothing("false".into())),
            Value::Object(fields) => fields,
            other => return Err(wrong("schema", "an object, true or false", other)),
        };
        let root = if References::is_resource(schema) { schema } else { root };
        let depth = depth + 1;
        refuse(fields)?;
        let mut form = self.typed(fields, root, depth)?;
        if let Some(value) = fields.get("const") {
            form = self.definitions.meet(form, constant(value)?, depth)?;
        }
        if let Some(values) = list(fields, "enum")? {
            let values: Result<Vec<Form>, Refusal> = values.iter().map(constant).collect();
            let values = match Form::either(values?) {
                Form::Nothing(_) => Form::Nothing("enum".into()),
                form => form,
            };
            form = self.definitions.meet(form, values, depth)?;
        }
        if let Some(reference) = fields.get("$ref") {
            let referred = self.reference(reference, root, depth)?;
            form = self.definitions.meet(form, referred, depth)?;
        }
        for schema in list(fields, "allOf")?.unwrap_or_default() {
            let other = self.schema(schema, root, depth)?;
            form = self.definitions.meet(form, other, depth)?;
        }
        if let Some(schemas) = list(fields, "anyOf")? {
            let other = Form::either(self.schemas(schemas, root, depth)?);
            form = self.definitions.meet(form, other, depth)?;
        }
        if let Some(schemas) = list(fields, "oneOf")? {
            form = self.one_of(form, schemas, root, depth)?;
        }
        self.conditions(form, fields, root, depth)
    }

    fn schemas(&mut self, schemas: &'a [Value], root: &'a Value, depth: usize) -> Result<Vec<Form>, Refusal> {
        schemas.iter().map(|schema| self.schema(schema, root, depth)).collect()
    }

    /// Alternatives of which exactly one holds: those that exclude each other.
    fn one_of(&mut self, form: Form, schemas: &'a [Value], root: &'a Value, depth: usize) -> Result<Form, Refusal> {
        let mut forms = Vec::new();
        for other in self.schemas(schemas, root, depth)? {
            // What the schema says beside it may tell them apart.
            forms.push(self.definitions.meet(form.clone(), other, depth)?);
        }
        forms.retain(|form| !form.is_nothing());
        for (at, one) in forms.iter().enumerate() {
            for other in &forms[..at] {
                if !self.definitions.excludes(one, other, depth)? {
                    let reason =
                        "is supported where its schemas exclude each other: a value must not follow two of them";
                    return Err(Refusal::new("oneOf", reason));
                }
            }
        }
        match forms.is_empty() {
            true => Ok(Form::Nothing("oneOf".into())),
            false => Ok(Form::either(forms)),
        }
    }

    /// `not`, `if` and what depends on the presence of a property.
    fn conditions(
        &mut self,
        mut form: Form,
        fields: &'a Fields,
        root: &'a Value,
        depth: usize,
    ) -> Result<Form, Refusal> {
        if let Some(schema) = fields.get("not") {
            let other = complement(schema).ok_or_else(|| {
                Refusal::new("not", "is supported with `type`, with one name in `required`, true and false")
            })?;
            form = self.definitions.meet(form, other, depth)?;
        }
        let branches = ["then", "else"].map(|keyword| fields.get(keyword).filter(|schema| !is_trivial(schema)));
        if let (Some(condition), [then, otherwise]) = (fields.get("if"), branches)
            && (then.is_some() || otherwise.is_some())
        {
            let other = complement(condition).ok_or_else(|| {
                Refusal::new("if", "is supported with `type`, with one name in `required`, true and false")
            })?;
            let mut ways = Vec::new();
            for (way, schema) in [(self.schema(condition, root, depth)?, then), (other, otherwise)] {
                let also = schema.map_or(Ok(Form::Any), |schema| self.schema(schema, root, depth))?;
                ways.push(self.definitions.meet(way, also, depth)?);
            }
            form = self.definitions.meet(form, Form::either(ways), depth)?;
        }
        for (name, schema) in object(fields, "dependentSchemas")?.into_iter().flatten() {
            let then = self.schema(schema, root, depth)?;
            form = self.dependent(form, name, then, depth)?;
        }
        for (name, names) in object(fields, "dependentRequired")?.into_iter().flatten() {
            let names = names.as_array().ok_or_else(|| wrong("dependentRequired", "lists of names", names))?;
            let required = names.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
            let then = Form::Object(Object { required, ..Object::default() });
            form = self.dependent(form, name, then, depth)?;
        }
        Ok(form)
    }

    /// Whoever has the property follows `then`.
    fn dependent(&mut self, form: Form, name: &str, then: Form, depth: usize) -> Result<Form, Refusal> {
        let with = Object { required: [name.to_owned()].into(), ..Object::default() };
        let with = self.definitions.settle_object(with, depth)?;
        let with = self.definitions.meet(with, then, depth)?;
        let mut ways = without(name);
        ways.push(with);
        self.definitions.meet(form, Form::either(ways), depth)
    }

    fn reference(&mut self, reference: &'a Value, root: &'a Value, depth: usize) -> Result<Form, Refusal> {
        let text = reference.as_str().ok_or_else(|| wrong("$ref", "a text", reference))?;
        let found = self.references.find(text, root).ok_or_else(|| {
            Refusal::new(
                "$ref",
                format!("points to nothing in the schema: {:?}", text.chars().take(100).collect::<String>()),
            )
        })?;
        let (target, root) = found;
        if let Some(index) = self.known.iter().position(|known| std::ptr::eq(*known, target)) {
            return Ok(Form::Refer(index));
        }
        let index = self.known.len();
        self.known.push(target);
        self.definitions.forms.push(None);
        let form = self.schema(target, root, depth)?;
        self.definitions.forms[index] = Some(match form {
            Form::Refer(other) if other == index => Form::Nothing("$ref".into()),
            form => form,
        });
        Ok(Form::Refer(index))
    }

    /// What the keywords say that are of one type each.
    fn typed(&mut self, fields: &'a Fields, root: &'a Value, depth: usize) -> Result<Form, Refusal> {
        let has = |keywords: &[&str]| keywords.iter().any(|keyword| fields.contains_key(*keyword));
        let types = types(fields)?;
        if types.is_none() && !has(&NUMBERS) && !has(&TEXTS) && !has(&LISTS) && !has(&OBJECTS) {
            return Ok(Form::Any);
        }
        let types = types.unwrap_or_else(|| TYPES.into_iter().filter(|name| *name != "integer").collect());
        let mut forms = Vec::new();
        for name in types {
            forms.push(match name {
                "null" => Form::Null,
                "boolean" => Form::Boolean(None),
                "integer" => numbers(fields, true)?,
                "number" => numbers(fields, false)?,
                "string" => texts(fields)?,
                "array" => self.lists(fields, root, depth)?,
                _ => self.objects(fields, root, depth)?,
            });
        }
        match forms.is_empty() {
            true => Ok(Form::Nothing("type".into())),
            false => Ok(Form::either(forms)),
        }
    }

    fn lists(&mut self, fields: &'a Fields, root: &'a Value, depth: usize) -> Result<Form, Refusal> {
        let (first, rest) = match fields.get("items") {
            // As drafts before 2020-12 wrote it.
            Some(Value::Array(first)) => (&first[..], fields.get("additionalItems")),
            items => (list(fields, "prefixItems")?.unwrap_or_default(), items),
        };
        let unevaluated = fields.get("unevaluatedItems").filter(|schema| !is_trivial(schema));
        if unevaluated.is_some() && IN_PLACE.iter().any(|keyword| fields.contains_key(*keyword)) {
            return Err(Refusal::new("unevaluatedItems", "is not supported beside other schemas of the same value"));
        }
        let rest = match rest.or(unevaluated) {
            None => Form::Any,
            Some(schema) => self.schema(schema, root, depth)?,
        };
        let distinct = match fields.get("uniqueItems") {
            None => false,
            Some(Value::Bool(distinct)) => *distinct,
            Some(other) => return Err(wrong("uniqueItems", "true or false", other)),
        };
        Ok(settle_list(List {
            first: self.schemas(first, root, depth)?,
            rest: Box::new(rest),
            least: count(fields, "minItems")?.unwrap_or(0),
            most: count(fields, "maxItems")?,
            distinct,
        }))
    }

    fn objects(&mut self, fields: &'a Fields, root: &'a Value, depth: usize) -> Result<Form, Refusal> {
        let unevaluated = fields.get("unevaluatedProperties").filter(|schema| !is_trivial(schema));
        if unevaluated.is_some() && IN_PLACE.iter().any(|keyword| fields.contains_key(*keyword)) {
            let reason = "is not supported beside other schemas of the same value";
            return Err(Refusal::new("unevaluatedProperties", reason));
        }
        let others = fields.get("additionalProperties").or(unevaluated);
        let mut found = Object {
            others: Box::new(others.map_or(Ok(Form::Any), |schema| self.schema(schema, root, depth))?),
            speaks_of_others: others.is_some() || fields.contains_key("patternProperties"),
            least: count(fields, "minProperties")?.unwrap_or(0),
            most: count(fields, "maxProperties")?,
            ..Object::default()
        };
        for (text, schema) in object(fields, "patternProperties")?.into_iter().flatten() {
            found.patterns.push((pattern("patternProperties", text)?, self.schema(schema, root, depth)?));
        }
        for (name, schema) in object(fields, "properties")?.into_iter().flatten() {
            let mut form = self.schema(schema, root, depth)?;
            for (pattern, also) in &found.patterns {
                self.definitions.spend(depth)?;
                if pattern.matches(name) {
                    form = self.definitions.meet(form, also.clone(), depth)?;
                }
            }
            found.properties.push((name.clone(), form));
        }
        for name in list(fields, "required")?.unwrap_or_default() {
            let name = name.as_str().ok_or_else(|| wrong("required", "a list of names", name))?;
            found.required.insert(name.into());
        }
        if let Some(schema) = fields.get("propertyNames").filter(|schema| !is_trivial(schema)) {
            let names = self.schema(schema, root, depth)?;
            let names = self.definitions.meet(Form::Text(Text::default()), names, depth)?;
            found = with_names(found, &names)?;
        }
        self.definitions.settle_object(found, depth)
    }
}

/// An object whose names follow a form: those that are not listed have one pattern.
fn with_names(mut object: Object, names: &Form) -> Result<Object, Refusal> {
    let names: Vec<&Text> = match names {
        Form::Nothing(_) => Vec::new(),
        Form::Text(text) => vec![text],
        Form::Either(forms) => {
            let texts = forms.iter().map(|form| if let Form::Text(text) = form { Some(text) } else { None });
            texts.collect::<Option<_>>().ok_or_else(|| unsupported("propertyNames"))?
        }
        _ => return Err(unsupported("propertyNames")),
    };
    let regex: Option<Vec<String>> = names.iter().map(|text| text.regex()).collect();
    let Some(regex) = regex.filter(|_| object.patterns.is_empty()) else {
        let reason = "is supported with one `pattern` or with lengths, and without `patternProperties`";
        return Err(Refusal::new("propertyNames", reason));
    };
    let nothing = || Form::Nothing("propertyNames".into());
    for (name, form) in &mut object.properties {
        if !names.iter().any(|text| text.allows(name)) {
            *form = nothing();
        }
    }
    let others = std::mem::replace(&mut *object.others, nothing());
    if !regex.is_empty() {
        object.patterns.push((Pattern(format!("(?:{})", regex.join("|"))), others));
    }
    object.speaks_of_others = true;
    Ok(object)
}

/// Keywords that nothing here can enforce.
fn refuse(fields: &Fields) -> Result<(), Refusal> {
    for keyword in ["$dynamicRef", "$recursiveRef", "dependencies"] {
        if fields.contains_key(keyword) {
            return Err(unsupported(keyword));
        }
    }
    // Without `contains`, its counts mean nothing; with none wanted, it means nothing.
    let wanted = fields.get("minContains").is_none_or(|least| least != 0) || fields.contains_key("maxContains");
    if fields.contains_key("contains") && wanted {
        return Err(unsupported("contains"));
    }
    Ok(())
}
