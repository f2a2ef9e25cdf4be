//! Random JSON schemas with every keyword that is supported, and a plain checker for them: whatever a random model says
//! follows its schema.
//!
//! How many there are is `GEMMA4C_SCHEMAS`; what was asked and answered is written to the file `GEMMA4C_ANSWERS`, for a
//! checker of somebody else's making (`scripts/test-schemas.sh`).

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::support::{Server, options};

/// A small random number generator, so that a failure repeats.
struct Random(u64);

type Meaning = fn(&str) -> bool;

/// Patterns, and what they mean.
const PATTERNS: [(&str, Meaning); 4] = [
    ("^[a-c]{1,4}$", |text| (1..=4).contains(&text.len()) && text.bytes().all(|b| (b'a'..=b'c').contains(&b))),
    ("^(ab|cd){1,3}$", |text| {
        let pairs = text.as_bytes().chunks(2);
        (1..=3).contains(&pairs.len()) && pairs.into_iter().all(|pair| pair == b"ab" || pair == b"cd")
    }),
    (r"^\d{3}-\d{2}$", |text| {
        text.len() == 6 && text.bytes().enumerate().all(|(at, b)| if at == 3 { b == b'-' } else { b.is_ascii_digit() })
    }),
    // Anywhere.
    ("x[yz]", |text| text.contains("xy") || text.contains("xz")),
];

const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

fn has_format(text: &str, format: &str) -> bool {
    let numbers = |text: &str, separator: char, widths: &[usize]| {
        let parts: Vec<&str> = text.split(separator).collect();
        let is_number =
            |(part, width): (&&str, &usize)| part.len() == *width && part.bytes().all(|b| b.is_ascii_digit());
        parts.len() == widths.len() && parts.iter().zip(widths).all(is_number)
    };
    let is_date = |text: &str| numbers(text, '-', &[4, 2, 2]) && ("01".."13").contains(&&text[5..7]);
    let is_time = |text: &str| text.len() >= 9 && numbers(&text[..8], ':', &[2, 2, 2]) && &text[..2] < "24";
    match format {
        "date" => is_date(text),
        "time" => is_time(text),
        "date-time" => text.split_once(['T', 't']).is_some_and(|(date, time)| is_date(date) && is_time(time)),
        "duration" => {
            text.starts_with('P')
                && text.len() > 2
                && text.bytes().all(|b| b.is_ascii_digit() || b"PYMDTHSW".contains(&b))
        }
        "email" => text.split_once('@').is_some_and(|(name, host)| !name.is_empty() && !host.is_empty()),
        "hostname" => !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.'),
        "ipv4" => text.parse::<std::net::Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<std::net::Ipv6Addr>().is_ok(),
        "uuid" => {
            let widths: Vec<usize> = text.split('-').map(str::len).collect();
            widths == [8, 4, 4, 4, 12] && text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
        }
        "uri" => text.split_once(':').is_some_and(|(scheme, _)| scheme.starts_with(|c: char| c.is_ascii_alphabetic())),
        other => panic!("{other}"),
    }
}

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn string(&mut self) -> Value {
        match self.below(4) {
            0 => json!({ "type": "string", "minLength": self.below(3), "maxLength": 3 + self.below(5) }),
            1 => json!({ "type": "string", "pattern": PATTERNS[self.below(4) as usize].0, "maxLength": 8 }),
            2 => json!({ "type": "string", "format": FORMATS[self.below(10) as usize], "maxLength": 45 }),
            _ => json!({ "type": "string", "maxLength": 1 + self.below(6), "title": "A text", "examples": ["a"] }),
        }
    }

    fn number(&mut self) -> Value {
        let most = 10 + self.below(1000);
        match self.below(5) {
            0 => json!({ "type": "integer", "minimum": 0, "maximum": most }),
            1 => json!({ "type": "integer", "exclusiveMinimum": -50, "exclusiveMaximum": most, "default": 1 }),
            2 => json!({ "type": "integer", "multipleOf": 2 + self.below(9), "minimum": 0, "maximum": most }),
            3 => json!({ "type": "number", "minimum": -1.5, "maximum": most }),
            _ => json!({ "type": "number", "exclusiveMinimum": 0, "maximum": most, "description": "More than none" }),
        }
    }

    fn choice(&mut self) -> Value {
        match self.below(5) {
            0 => json!({ "enum": ["red", "green é", 7, null, false, [1], { "a": "b" }] }),
            1 => json!({ "const": ["x", 2] }),
            2 => json!({ "type": ["null", "boolean"] }),
            3 => json!({ "type": "null" }),
            _ => json!({ "type": "boolean" }),
        }
    }

    /// A schema whose values end soon.
    fn schema(&mut self, depth: u32) -> Value {
        let kinds = if depth == 0 { 5 } else { 11 };
        match self.below(kinds) {
            0 | 1 => self.string(),
            2 => self.number(),
            3 => self.choice(),
            4 => json!({ "$ref": if self.one_in(2) { "#/$defs/pair" } else { "#/definitions/word" } }),
            5 => {
                let (items, least) = (self.schema(depth - 1), self.below(2));
                json!({ "type": "array", "items": items, "minItems": least, "maxItems": least + 1 + self.below(2) })
            }
            6 => {
                let (first, second) = (self.schema(depth - 1), self.schema(0));
                json!({ "type": "array", "prefixItems": [first, second], "items": false, "minItems": self.below(3) })
            }
            7 => json!({ "anyOf": [self.schema(depth - 1), self.schema(depth - 1)] }),
            // Alternatives that cannot both be right.
            8 => json!({ "oneOf": [self.string(), self.number(), { "type": "null" }] }),
            9 => {
                let object = self.object(depth - 1);
                let more = json!({ "type": "object", "required": ["name"] });
                json!({ "allOf": [object, more] })
            }
            _ => self.object(depth - 1),
        }
    }

    fn object(&mut self, depth: u32) -> Value {
        let names = ["name", "Size", "a-b", "x_1"];
        let count = 1 + self.below(3) as usize;
        let properties: Map<String, Value> =
            names[..count].iter().map(|name| (name.to_string(), self.schema(depth))).collect();
        // Whose properties are counted has all of them.
        let is_counted = self.one_in(3);
        let required: Vec<&str> = names[..count].iter().copied().filter(|_| is_counted || self.one_in(2)).collect();
        let mut schema =
            json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
        if is_counted && self.one_in(2) {
            schema["patternProperties"] = json!({ "^k[0-9]$": self.schema(0) });
            (schema["minProperties"], schema["maxProperties"]) = (json!(count), json!(count + 1));
        } else if is_counted {
            // No more than these, though others could follow a schema too.
            schema["additionalProperties"] = json!({ "type": "boolean" });
            (schema["minProperties"], schema["maxProperties"]) = (json!(count), json!(count));
        } else if self.one_in(4) {
            schema["patternProperties"] = json!({ "^k[0-9]$": self.schema(0) });
        }
        schema
    }

    /// A whole schema, with what its references name.
    fn document(&mut self) -> Value {
        let mut schema = self.object(2);
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
        let word = json!({ "type": "string", "maxLength": 4 });
        schema["definitions"] = json!({ "word": word });
        let word = json!({ "$ref": "#/definitions/word" });
        let pair = json!({ "type": "object", "properties": { "w": word, "n": { "type": "integer", "minimum": 0, "maximum": 99 } },
            "required": ["w"], "additionalProperties": false });
        schema["$defs"] = json!({ "pair": pair });
        schema
    }
}

fn keywords(schema: &Value, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            found.insert(name.clone());
            keywords(value, found);
        }),
        Value::Array(items) => items.iter().for_each(|item| keywords(item, found)),
        _ => {}
    }
}

/// Whether a value follows a schema of those made here, which is part of a document.
fn follows(value: &Value, schema: &Value, document: &Value) -> bool {
    let Value::Object(fields) = schema else { return schema.as_bool() != Some(false) };
    fields.iter().all(|(name, asked)| follows_keyword(value, name, asked, schema, document))
}

fn follows_keyword(value: &Value, name: &str, asked: &Value, schema: &Value, document: &Value) -> bool {
    let follows = |value: &Value, schema: &Value| follows(value, schema, document);
    let list = || asked.as_array().expect("a list");
    let count_of = |schema: &&Value| follows(value, schema);
    let number = |compare: fn(f64, f64) -> bool| {
        value.as_f64().is_none_or(|value| compare(value, asked.as_f64().expect("a number")))
    };
    let length = value.as_str().map(|text| text.chars().count() as u64);
    let items = value.as_array().map(|items| items.len() as u64);
    let names = value.as_object().map(|fields| fields.len() as u64);
    let least = |found: Option<u64>| found.is_none_or(|found| found >= asked.as_u64().expect("a count"));
    let most = |found: Option<u64>| found.is_none_or(|found| found <= asked.as_u64().expect("a count"));
    match name {
        "type" => match asked {
            Value::Array(types) => types.iter().any(|one| has_type(value, one)),
            one => has_type(value, one),
        },
        "enum" => list().contains(value),
        "const" => asked == value,
        "anyOf" => list().iter().any(|schema| follows(value, schema)),
        "oneOf" => list().iter().filter(count_of).count() == 1,
        "allOf" => list().iter().all(|schema| follows(value, schema)),
        "$ref" => {
            let pointer = asked.as_str().expect("a reference").trim_start_matches('#');
            follows(value, document.pointer(pointer).expect("it is there"))
        }
        "minLength" => least(length),
        "maxLength" => most(length),
        "minItems" => least(items),
        "maxItems" => most(items),
        "minProperties" => least(names),
        "maxProperties" => most(names),
        "minimum" => number(|value, least| value >= least),
        "maximum" => number(|value, most| value <= most),
        "exclusiveMinimum" => number(|value, least| value > least),
        "exclusiveMaximum" => number(|value, most| value < most),
        "multipleOf" => number(|value, of| (value / of).fract() == 0.0),
        "pattern" => {
            let (_, fits) = PATTERNS.iter().find(|(pattern, _)| asked == pattern).expect("a pattern of ours");
            value.as_str().is_none_or(fits)
        }
        "format" => value.as_str().is_none_or(|text| has_format(text, asked.as_str().expect("a name"))),
        "prefixItems" => {
            value.as_array().is_none_or(|items| items.iter().zip(list()).all(|(item, schema)| follows(item, schema)))
        }
        "items" => {
            let before = schema["prefixItems"].as_array().map_or(0, Vec::len);
            value.as_array().is_none_or(|items| items.iter().skip(before).all(|item| follows(item, asked)))
        }
        "required" => value
            .as_object()
            .is_none_or(|fields| list().iter().all(|name| fields.contains_key(name.as_str().expect("a name")))),
        "properties" => value.as_object().is_none_or(|fields| {
            fields.iter().all(|(name, value)| asked.get(name).is_none_or(|schema| follows(value, schema)))
        }),
        "patternProperties" => value.as_object().is_none_or(|fields| {
            fields.iter().all(|(name, value)| !is_numbered(name) || follows(value, &asked["^k[0-9]$"]))
        }),
        "additionalProperties" => value.as_object().is_none_or(|fields| {
            let is_named = |name: &str| {
                schema["properties"].get(name).is_some()
                    || (schema.get("patternProperties").is_some() && is_numbered(name))
            };
            fields.iter().all(|(name, value)| is_named(name) || follows(value, asked))
        }),
        "$schema" | "$defs" | "definitions" | "title" | "description" | "default" | "examples" => true,
        other => panic!("{other}"),
    }
}

/// What `^k[0-9]$` means.
fn is_numbered(name: &str) -> bool {
    name.len() == 2 && name.starts_with('k') && name.as_bytes()[1].is_ascii_digit()
}

fn has_type(value: &Value, name: &Value) -> bool {
    match name.as_str().expect("a name") {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|value| value.fract() == 0.0),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other}"),
    }
}

/// White space between the tokens of JSON, at its longest.
fn longest_space(text: &str) -> usize {
    let (mut longest, mut run, mut in_string, mut is_escaped) = (0, 0, false, false);
    for character in text.chars() {
        run = if !in_string && character.is_whitespace() { run + 1 } else { 0 };
        longest = longest.max(run);
        in_string ^= character == '"' && !is_escaped;
        is_escaped = in_string && character == '\\' && !is_escaped;
    }
    longest
}

/// How a schema is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    ResponseFormat,
    Parameters,
}

impl Way {
    pub const BOTH: [Way; 2] = [Way::ResponseFormat, Way::Parameters];

    pub fn request(self, schema: &Value) -> Value {
        let mut request = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        match self {
            Way::ResponseFormat => {
                request["response_format"] =
                    json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
            }
            Way::Parameters => {
                request["tools"] = json!([{ "type": "function", "function": { "name": "f", "parameters": schema } }]);
                (request["tool_choice"], request["parallel_tool_calls"]) = ("required".into(), false.into());
            }
        }
        request
    }

    /// The JSON of an answer, and whether it came to an end.
    pub fn read(self, choice: &Value) -> (String, bool) {
        let (text, end) = match self {
            Way::ResponseFormat => (&choice["message"]["content"], "stop"),
            Way::Parameters => (&choice["message"]["tool_calls"][0]["function"]["arguments"], "tool_calls"),
        };
        (text.as_str().unwrap_or_default().into(), choice["finish_reason"] == end)
    }
}

#[test]
fn answers_follow_random_schemas() {
    let server = Server::new(options(), 4);
    let mut random = Random(5);
    let schemas = std::env::var("GEMMA4C_SCHEMAS").map_or(60, |count| count.parse().expect("a number"));
    let (mut ended, mut used, mut told) = (0, BTreeSet::new(), String::new());
    for seed in 0..schemas {
        let schema = random.document();
        keywords(&schema, &mut used);
        // Some are cut short on purpose.
        let is_cut = seed % 20 == 19;
        let way = Way::BOTH[seed / 2 % 2];
        let mut request = way.request(&schema);
        (request["seed"], request["max_tokens"]) = (seed.into(), (if is_cut { 3 } else { 400 }).into());
        let answer = server.post("/v1/chat/completions", &request).json();
        let choice = &answer["choices"][0];
        let (text, has_ended) = way.read(choice);
        let value = serde_json::from_str::<Value>(&text);
        match choice["finish_reason"].as_str() {
            Some(_) if has_ended => {
                ended += 1;
                let value = value.unwrap_or_else(|error| panic!("{error}: {text}"));
                assert!(follows(&value, &schema, &schema), "{text} {schema}");
            }
            Some("length") => {
                ended += usize::from(is_cut);
                assert!(value.map_or_else(|error| error.is_eof(), |_| true), "no prefix of JSON: {text}");
            }
            other => panic!("{other:?}: {answer} {schema}"),
        }
        // A line break, and six levels.
        assert!(longest_space(&text) <= 13, "{text}");
        let line = json!({ "schema": schema, "text": text, "finish_reason": choice["finish_reason"] });
        writeln!(told, "{line}").expect("a text takes everything");
    }
    if let Ok(path) = std::env::var("GEMMA4C_ANSWERS") {
        std::fs::write(path, told).expect("the answers are written");
    }
    assert!(ended * 100 >= schemas * 95, "{ended} of {schemas} came to an end");
    let all = "type enum const anyOf oneOf allOf $ref minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum \
        multipleOf items prefixItems minItems maxItems properties required additionalProperties patternProperties minProperties maxProperties \
        $schema $defs definitions title description default examples";
    let unused: Vec<&str> = all.split_whitespace().filter(|word| !used.contains(*word)).collect();
    assert!(unused.is_empty(), "no schema has {unused:?}");
}
