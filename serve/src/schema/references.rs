//! Where `$ref` points: by JSON pointer, by anchor, or to a part of the schema with an `$id`. Nothing is fetched.

use serde_json::Value;

/// A document, and the parts of it that have a name of their own.
pub struct References<'a> {
    /// Absolute names, and what they name.
    resources: Vec<(String, &'a Value)>,
}

impl<'a> References<'a> {
    pub fn new(document: &'a Value) -> References<'a> {
        let mut references = References { resources: Vec::new() };
        references.collect(document, "", 0);
        if !References::is_resource(document) {
            references.resources.push((String::new(), document));
        }
        references
    }

    /// Whether references inside start anew here.
    pub fn is_resource(schema: &Value) -> bool {
        schema.get("$id").and_then(Value::as_str).is_some_and(|id| !id.is_empty() && !id.starts_with('#'))
    }

    fn collect(&mut self, schema: &'a Value, base: &str, depth: usize) {
        if depth > 64 {
            return;
        }
        let id = schema.get("$id").and_then(Value::as_str).filter(|_| References::is_resource(schema));
        let base = id.map_or(base.to_owned(), |id| join(base, id.trim_end_matches('#')));
        if id.is_some() {
            self.resources.push((base.clone(), schema));
        }
        children(schema).into_iter().for_each(|child| self.collect(child, &base, depth + 1));
    }

    /// What a reference in the resource `root` points to, and the resource that has it.
    pub fn find(&self, reference: &str, root: &'a Value) -> Option<(&'a Value, &'a Value)> {
        let (address, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let root = match address {
            "" => root,
            address => {
                let base = self.resources.iter().find(|(_, resource)| std::ptr::eq(*resource, root));
                let wanted = join(base.map_or("", |(name, _)| name), address);
                self.resources.iter().find(|(name, _)| !name.is_empty() && *name == wanted)?.1
            }
        };
        let fragment = decode(fragment)?;
        match fragment.as_str() {
            "" => Some((root, root)),
            pointer if pointer.starts_with('/') => point(pointer, root),
            name => Some((anchor(name, root, 0)?, root)),
        }
    }
}

/// Follows a JSON pointer. Below a part with a name of its own, that part is the resource.
fn point<'a>(pointer: &str, root: &'a Value) -> Option<(&'a Value, &'a Value)> {
    let (mut found, mut resource) = (root, root);
    for part in pointer.split('/').skip(1) {
        let part = part.replace("~1", "/").replace("~0", "~");
        found = match found {
            Value::Array(items) => items.get(part.parse::<usize>().ok()?)?,
            found => found.get(&part)?,
        };
        if References::is_resource(found) {
            resource = found;
        }
    }
    Some((found, resource))
}

fn anchor<'a>(name: &str, schema: &'a Value, depth: usize) -> Option<&'a Value> {
    let is = |keyword: &str| schema.get(keyword).and_then(Value::as_str) == Some(name);
    if is("$anchor") || is("$dynamicAnchor") {
        return Some(schema);
    }
    let inner = children(schema).into_iter().filter(|child| !References::is_resource(child) && depth < 64);
    inner.into_iter().find_map(|child| anchor(name, child, depth + 1))
}

/// The schemas right inside a schema; values of `const` and `enum` are none.
fn children(schema: &Value) -> Vec<&Value> {
    let Value::Object(fields) = schema else { return Vec::new() };
    let mut found = Vec::new();
    for (keyword, value) in fields {
        match (keyword.as_str(), value) {
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(schemas)) => found.extend(schemas),
            (
                "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas",
                Value::Object(schemas),
            ) => found.extend(schemas.values()),
            (
                "additionalProperties"
                | "items"
                | "additionalItems"
                | "not"
                | "if"
                | "then"
                | "else"
                | "contains"
                | "propertyNames"
                | "unevaluatedItems"
                | "unevaluatedProperties",
                schema,
            ) => found.push(schema),
            _ => {}
        }
    }
    found
}

/// `%25` is a percent sign.
fn decode(text: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, after @ ..] = rest {
        rest = match (first, after) {
            (b'%', [high, low, after @ ..]) => {
                let digits = [*high, *low];
                bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
                after
            }
            _ => {
                bytes.push(*first);
                after
            }
        };
    }
    String::from_utf8(bytes).ok()
}

/// A name relative to another. Paths that go up are left as they are, and then name nothing.
fn join(base: &str, name: &str) -> String {
    let scheme = name.split_once(':').is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    });
    if scheme || base.is_empty() {
        return name.into();
    }
    let authority = base.find("://").map_or(0, |at| at + 3);
    let host = base[authority..].find('/').map_or(base.len(), |at| authority + at);
    match name.starts_with('/') {
        true => format!("{}{name}", &base[..host]),
        false => format!("{}{name}", &base[..base.rfind('/').filter(|at| *at >= host).map_or(base.len(), |at| at + 1)]),
    }
}
