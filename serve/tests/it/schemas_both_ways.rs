//! A schema means the same as `response_format` and as the parameters of a tool: each keyword is enforced in both, or
//! refused in both with the same words.

use serde_json::{Value, json};

use crate::schemas::Way;
use crate::support::{Server, options};

type Check = fn(&Value) -> bool;

fn differ(value: &Value) -> bool {
    let items = value.as_array().expect("a list");
    (0..items.len()).all(|at| !items[..at].contains(&items[at]))
}

fn length(value: &Value) -> usize {
    value.as_str().expect("a string").chars().count()
}

/// Schemas whose values end soon, and what their values are.
fn schemas() -> Vec<(Value, Check)> {
    vec![
        (json!({ "type": "integer", "minimum": 3, "maximum": 12, "multipleOf": 3 }), |v| {
            v.as_i64().is_some_and(|n| n % 3 == 0 && (3..=12).contains(&n))
        }),
        (json!({ "type": "number", "exclusiveMinimum": 0.5, "maximum": 2, "multipleOf": 0.25 }), |v| {
            [0.75, 1.0, 1.25, 1.5, 1.75, 2.0].contains(&v.as_f64().unwrap())
        }),
        (json!({ "type": "integer", "const": 2.0 }), |v| v.as_f64() == Some(2.0)),
        (json!({ "enum": [2.0, 1.5, "é\n\"", { "a b": [] }] }), |v| {
            [json!(2), json!(2.0), json!(1.5), json!("é\n\""), json!({ "a b": [] })].contains(v)
        }),
        (json!({ "type": "string", "pattern": "^[ab]{2,3}$" }), |v| {
            (2..=3).contains(&length(v)) && v.as_str().unwrap().bytes().all(|b| b == b'a' || b == b'b')
        }),
        (json!({ "type": "string", "allOf": [{ "pattern": "a$" }, { "pattern": "^[a-c]{1,4}$" }] }), |v| {
            v.as_str().is_some_and(|text| text.ends_with('a') && text.len() <= 4)
        }),
        (json!({ "type": "string", "format": "date" }), |v| length(v) == 10),
        (json!({ "type": "string", "format": "no-such-format", "minLength": 2.0, "maxLength": 3.0 }), |v| {
            (2..=3).contains(&length(v))
        }),
        (json!({ "type": "STRING", "maxLength": 2 }), |v| length(v) <= 2),
        (json!({ "allOf": [{ "type": "integer", "minimum": 1 }, { "maximum": 2 }] }), |v| v == 1 || v == 2),
        (json!({ "not": { "type": ["object", "array", "string", "number"] } }), |v| v.is_null() || v.is_boolean()),
        (json!({ "type": ["string", "null"], "if": { "type": "null" }, "else": { "maxLength": 2 } }), |v| {
            v.is_null() || length(v) <= 2
        }),
        (
            json!({ "oneOf": [{ "type": "integer", "maximum": 3, "minimum": 0 }, { "type": "integer", "minimum": 4, "maximum": 9 }] }),
            |v| v.as_i64().is_some_and(|n| (0..=9).contains(&n)),
        ),
        (
            json!({ "type": "array", "items": { "enum": ["a", "b", "c", 1] }, "uniqueItems": true, "minItems": 4 }),
            |v| differ(v) && v.as_array().unwrap().len() == 4,
        ),
        (
            json!({ "type": "array", "items": { "$ref": "#/$defs/few" }, "uniqueItems": true, "minItems": 3, "$defs": { "few": { "type": "integer", "minimum": 0, "maximum": 3 } } }),
            differ,
        ),
        (
            json!({ "type": "array", "items": { "type": "string", "pattern": "^[ab]{1,2}$" }, "uniqueItems": true, "minItems": 3, "maxItems": 3 }),
            differ,
        ),
        (
            json!({ "type": "array", "items": { "type": "array", "items": { "type": "boolean" }, "maxItems": 2 }, "uniqueItems": true, "minItems": 2, "maxItems": 3 }),
            differ,
        ),
        (
            json!({ "type": "array", "prefixItems": [{ "type": "string", "maxLength": 2 }], "items": { "type": "integer", "minimum": 0, "maximum": 5 }, "minItems": 2, "maxItems": 3 }),
            |v| length(&v[0]) <= 2 && v[1].as_i64().is_some_and(|n| (0..=5).contains(&n)),
        ),
        (
            json!({ "type": "object", "properties": { "a": { "const": 1 }, "b": { "const": 2 } }, "minProperties": 1, "additionalProperties": false }),
            |v| !v.as_object().unwrap().is_empty(),
        ),
        (
            json!({ "type": "object", "minProperties": 2, "maxProperties": 2, "patternProperties": { "^[ab]$": { "type": "boolean" } }, "additionalProperties": false }),
            |v| v.as_object().unwrap().len() == 2,
        ),
        (
            json!({ "type": "object", "properties": { "a": { "const": 1 }, "b": { "const": 2 } }, "required": ["a"], "dependentRequired": { "a": ["b"] }, "additionalProperties": false }),
            |v| v["b"] == 2,
        ),
        (
            json!({ "type": "object", "properties": { "x:y z": { "const": 1 }, "": { "type": "null" } }, "required": ["x:y z", ""], "additionalProperties": false }),
            |v| v["x:y z"] == 1 && v[""].is_null(),
        ),
        (
            json!({ "type": "object", "propertyNames": { "enum": ["a", "b"] }, "minProperties": 2, "additionalProperties": { "type": "null" } }),
            |v| v["a"].is_null() && v.get("b").is_some(),
        ),
        (json!({ "type": "string", "const": "a\u{1}b" }), |v| v == "a\u{1}b"),
        (json!({ "$ref": "#/$defs/a~1b%25~0c", "$defs": { "a/b%~c": { "const": 7 } } }), |v| v == 7),
        (json!({ "$ref": "#here", "$defs": { "x": { "$anchor": "here", "const": "y" } } }), |v| v == "y"),
        (
            json!({ "$ref": "other", "$id": "https://example.org/root", "$defs": { "x": { "$id": "other", "$ref": "#/$defs/y", "$defs": { "y": { "const": "z" } } } } }),
            |v| v == "z",
        ),
    ]
}

#[test]
fn every_kind_of_schema_is_followed_both_ways() {
    let server = Server::new(options(), 4);
    for (number, (mut schema, check)) in schemas().into_iter().enumerate() {
        // With a name of its own, its references stay right inside another.
        schema.as_object_mut().unwrap().entry("$id").or_insert("urn:schema".into());
        let schema = json!({ "type": "object", "properties": { "x": schema }, "required": ["x"], "additionalProperties": false });
        for way in Way::BOTH {
            let mut request = way.request(&schema);
            (request["seed"], request["max_tokens"], request["n"]) = (number.into(), 100.into(), 3.into());
            let response = server.post("/v1/chat/completions", &request);
            assert_eq!(response.status, 200, "{schema} {}", response.text);
            let mut ended = 0;
            for choice in response.json()["choices"].as_array().expect("choices") {
                let (text, has_ended) = way.read(choice);
                if has_ended {
                    ended += 1;
                    let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
                    assert!(check(&value["x"]), "{way:?} {text} {schema}");
                }
            }
            assert!(ended > 0, "{way:?} {schema} {}", response.text);
        }
    }
}

#[test]
fn what_cannot_be_enforced_is_refused_with_the_same_words() {
    let server = Server::new(options(), 1);
    let string = json!({ "type": "string" });
    let cases = [
        ("not", json!({ "not": { "minimum": 3 } })),
        ("if", json!({ "if": { "properties": { "a": { "const": 1 } } }, "then": { "required": ["b"] } })),
        ("propertyNames", json!({ "type": "object", "propertyNames": { "pattern": "a", "maxLength": 3 } })),
        (
            "unevaluatedProperties",
            json!({ "allOf": [{ "properties": { "a": true } }], "unevaluatedProperties": false }),
        ),
        ("unevaluatedItems", json!({ "anyOf": [{ "prefixItems": [true] }], "unevaluatedItems": false })),
        ("contains", json!({ "type": "array", "contains": string })),
        ("$dynamicRef", json!({ "$dynamicRef": "#a" })),
        ("dependencies", json!({ "dependencies": { "a": ["b"] } })),
        ("oneOf", json!({ "oneOf": [{ "type": "string" }, { "maxLength": 5, "type": "string" }] })),
        ("patternProperties", json!({ "patternProperties": { "a": { "type": "null" }, "b": string } })),
        ("pattern", json!({ "pattern": "^(?=a)" })),
        ("type", json!({ "type": "text" })),
        ("multipleOf", json!({ "multipleOf": 0 })),
        ("minimum", json!({ "type": "integer", "minimum": 3, "maximum": 2 })),
        ("uniqueItems", json!({ "type": "array", "items": { "type": "boolean" }, "uniqueItems": true, "minItems": 3 })),
        ("$ref", json!({ "$ref": "https://example.org/schema" })),
        ("$ref", json!({ "$ref": "#/$defs/nobody" })),
        ("$ref", json!({ "type": "object", "properties": { "again": { "$ref": "#" } }, "required": ["again"] })),
        ("false", json!(false)),
        ("properties", json!({ "properties": 3 })),
        ("const", json!({ "const": 9007199254740993u64 })),
    ];
    for (keyword, schema) in cases {
        // Deep inside another.
        let schema = json!({ "type": "object", "properties": { "x": schema }, "required": ["x"] });
        let refusal = |path: &str, request: &Value, param: &str| {
            let response = server.post(path, request);
            assert_eq!(response.status, 400, "{keyword} {}", response.text);
            let error = &response.json()["error"];
            assert_eq!((&error["code"], &error["param"]), (&json!("invalid_schema"), &json!(param)), "{error}");
            error["message"].as_str().expect("a message").replace(param, "")
        };
        let [format, tool] = Way::BOTH.map(|way| way.request(&schema));
        let said = refusal("/v1/chat/completions", &format, "response_format.json_schema.schema");
        assert!(said.contains(&format!("{keyword:?}")), "{keyword}: {said}");
        assert_eq!(said, refusal("/v1/chat/completions", &tool, "tools[0].function.parameters"));
        let request = json!({ "prompt": "x", "json_schema": schema });
        assert_eq!(said, refusal("/v1/completions", &request, "json_schema"));
        let tools = json!([{ "type": "function", "name": "f", "parameters": schema, "strict": true }]);
        let request = json!({ "input": "Hi", "tools": tools });
        assert_eq!(said, refusal("/v1/responses", &request, "tools[0].parameters"));
        let request =
            json!({ "input": "Hi", "text": { "format": { "type": "json_schema", "name": "x", "schema": schema } } });
        assert_eq!(said, refusal("/v1/responses", &request, "text.format.schema"));
    }
}

#[test]
fn a_call_that_is_cut_leaves_nothing_of_its_notation_in_the_text() {
    let server = Server::new(options(), 4);
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string", "maxLength": 3 } }, "required": ["city"] });
    let mut request = Way::Parameters.request(&schema);
    let mut names = 0;
    for most in 1..=12 {
        request["max_tokens"] = most.into();
        request["stream"] = false.into();
        let answer = server.post("/v1/chat/completions", &request).json();
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"].as_str().unwrap_or_default(), "", "{answer}");
        names += usize::from(message["tool_calls"][0]["function"]["name"] == "f");
        request["stream"] = true.into();
        for event in server.post("/v1/chat/completions", &request).events() {
            assert_eq!(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default(), "", "{event}");
        }
        let tools = json!([{ "type": "function", "name": "f", "parameters": schema }]);
        let answer = json!({ "input": "Hi", "tools": tools, "tool_choice": "required", "max_output_tokens": most });
        let answer = server.post("/v1/responses", &answer);
        assert!(!answer.text.contains("tool_call>") && !answer.text.contains("call:"), "{}", answer.text);
    }
    assert!((1..12).contains(&names), "{names} of 12 were cut after the name");
}
