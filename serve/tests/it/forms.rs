//! Answers that must have a form: a random model says nothing that its expression, grammar or tools do not allow.
//! `schemas` has the JSON schemas.

use serde_json::{Map, Value, json};

use crate::support::{Server, options};

#[test]
fn answers_follow_expressions_choices_and_grammars() {
    let server = Server::new(options(), 4);
    for (form, fits) in [
        (
            json!({ "structured_outputs": { "regex": "[a-c]{3}-[0-9]+x?" } }),
            (&|text: &str| text.as_bytes()[3] == b'-') as &dyn Fn(&str) -> bool,
        ),
        (json!({ "structured_outputs": { "choice": ["yes", "no \"way\"", "é"] } }), &|text| {
            ["yes", "no \"way\"", "é"].contains(&text)
        }),
        (json!({ "guided_choice": ["a"] }), &|text| text == "a"),
        (json!({ "grammar": "start: \"a\" b \"c\"\nb: \"b\" | \"[\" b \"]\"" }), &|text| {
            text.starts_with('a') && text.ends_with('c')
        }),
        (json!({ "structured_outputs": { "json": { "enum": [1, 2] } } }), &|text| ["1", "2"].contains(&text)),
        (json!({ "json_schema": { "const": { "a": [] } } }), &|text| {
            serde_json::from_str::<Value>(text).unwrap() == json!({ "a": [] })
        }),
    ] {
        for seed in 0..3 {
            let mut request = json!({ "prompt": "Say", "seed": seed, "max_tokens": 60, "n": 2, "stream": false });
            request.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
            let answer = server.post("/v1/completions", &request).json();
            for choice in answer["choices"].as_array().unwrap_or_else(|| panic!("{answer}")) {
                let is_done = choice["finish_reason"] == "stop";
                assert!(!is_done || fits(choice["text"].as_str().unwrap()), "{choice} {form}");
            }
        }
    }
    let request = json!({ "messages": [{ "role": "user", "content": "Hi" }], "response_format": { "type": "json_object" }, "max_tokens": 20 });
    let answer = server.post("/v1/chat/completions", &request).json();
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with('{'), "{answer}");
}

#[test]
fn forms_that_cannot_be_followed_are_refused() {
    let server = Server::new(options(), 1);
    let deep = (0..60).fold(json!({}), |schema, _| json!({ "type": "array", "items": schema }));
    let patterns: Map<String, Value> = (0..400).map(|n| (format!("^p{n}$"), json!({}))).collect();
    let names: Map<String, Value> = (0..400).map(|n| (format!("n{n}"), json!({}))).collect();
    for (form, word) in [
        (json!({ "json_schema": { "type": "array", "contains": { "type": "string" } } }), "contains"),
        (json!({ "json_schema": { "enum": (0..60_000).collect::<Vec<u32>>(), "type": "integer" } }), "bytes"),
        (json!({ "json_schema": { "patternProperties": patterns, "properties": names } }), "too large"),
        (json!({ "json_schema": { "type": "cat" } }), "cat"),
        (json!({ "structured_outputs": { "regex": "(" } }), "regular expression"),
        (json!({ "structured_outputs": { "regex": "x".repeat(300_000) } }), "bytes"),
        (json!({ "structured_outputs": { "choice": [] } }), "choice"),
        (json!({ "grammar": "start: nothing" }), "grammar"),
        (json!({ "response_format": { "type": "xml" } }), "xml"),
        (json!({ "response_format": { "type": "json_schema" } }), "schema"),
    ] {
        let mut request = json!({ "prompt": "Say", "max_tokens": 5 });
        request.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
        let response = server.post("/v1/completions", &request);
        assert_eq!(response.status, 400, "{form} {}", response.text);
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(word), "{message}");
    }
    // What looks costly is worked out only as far as it is needed.
    let costly = "(((a{1,1000}){1,1000}){1,1000})b";
    for form in [json!({ "json_schema": deep }), json!({ "structured_outputs": { "regex": costly } })] {
        let mut request = json!({ "prompt": "x", "max_tokens": 5 });
        request.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
        assert_eq!(server.post("/v1/completions", &request).status, 200);
    }
    assert_eq!(server.get("/health").status, 200);
}

fn tools() -> Value {
    let weather = json!({ "type": "object", "required": ["city", "days"], "properties": {
        "days": { "type": "integer" }, "city": { "type": "string", "maxLength": 8 }, "unit": { "enum": ["C", "F"] },
        "tags": { "type": "array", "items": { "type": "boolean" }, "maxItems": 2 },
        "at": { "$ref": "#/$defs/point" },
    }, "$defs": { "point": { "type": "object", "properties": { "x": { "type": "number" }, "next": { "$ref": "#/$defs/point" } } } } });
    let function = |name: &str, parameters: Value| json!({ "type": "function", "function": { "name": name, "description": "A tool", "parameters": parameters } });
    json!([function("weather", weather), function("now", json!({ "type": "object", "properties": {} }))])
}

fn ask(server: &Server, seed: usize, more: Value) -> Value {
    let mut request = json!({
        "messages": [{ "role": "user", "content": "Hi" }], "tools": tools(), "seed": seed, "max_tokens": 300,
    });
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let response = server.post("/v1/chat/completions", &request);
    assert_eq!(response.status, 200, "{}", response.text);
    if request["stream"] == true {
        let mut message = json!({ "content": "", "tool_calls": [] });
        let mut finish = Value::Null;
        for event in response.events() {
            let choice = &event["choices"][0];
            for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                let calls = message["tool_calls"].as_array_mut().unwrap();
                match call.get("id") {
                    Some(_) => {
                        assert_eq!(call["index"], calls.len());
                        calls.push(json!({ "function": call["function"] }));
                    }
                    None => {
                        let function = &mut calls[call["index"].as_u64().unwrap() as usize]["function"];
                        assert!(call["function"].get("name").is_none(), "{call}");
                        let text = [&function["arguments"], &call["function"]["arguments"]]
                            .map(|text| text.as_str().unwrap())
                            .concat();
                        function["arguments"] = text.into();
                    }
                }
            }
            if !choice["finish_reason"].is_null() {
                finish = choice["finish_reason"].clone();
            }
        }
        return json!({ "message": message, "finish_reason": finish });
    }
    response.json()["choices"][0].clone()
}

/// Name and arguments of each call; checks what its schema asks for.
fn calls(choice: &Value) -> Vec<(String, Value)> {
    let read = |call: &Value| {
        let arguments = call["function"]["arguments"].as_str().expect("arguments");
        let arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {arguments}"));
        let name = call["function"]["name"].as_str().expect("a name").to_owned();
        if name == "weather" {
            assert!(arguments["city"].as_str().is_some_and(|city| city.chars().count() <= 8), "{arguments}");
            assert!(arguments["days"].is_i64() || arguments["days"].is_u64(), "{arguments}");
            assert!(arguments.get("unit").is_none_or(|unit| unit == "C" || unit == "F"), "{arguments}");
            assert!(arguments.get("at").is_none_or(Value::is_object), "{arguments}");
        } else {
            assert_eq!(arguments, json!({}));
        }
        (name, arguments)
    };
    choice["message"]["tool_calls"].as_array().into_iter().flatten().map(read).collect()
}

#[test]
fn tools_are_called_as_the_request_says() {
    let server = Server::new(options(), 4);
    let mut done = 0;
    for seed in 0..8 {
        let stream = seed % 2 == 1;
        let one =
            ask(&server, seed, json!({ "tool_choice": "required", "parallel_tool_calls": false, "stream": stream }));
        if one["finish_reason"] == "tool_calls" {
            done += 1;
            assert_eq!(calls(&one).len(), 1, "{one}");
        }
        let named = json!({ "type": "function", "function": { "name": "now" } });
        let now = ask(&server, seed, json!({ "tool_choice": named, "parallel_tool_calls": false }));
        assert_eq!((calls(&now), &now["finish_reason"]), (vec![("now".into(), json!({}))], &json!("tool_calls")));
        assert_eq!(now["message"]["content"], Value::Null);
        let none = ask(&server, seed, json!({ "tool_choice": "none", "max_tokens": 40 }));
        assert!(none["message"].get("tool_calls").is_none() && none["finish_reason"] != "tool_calls", "{none}");
    }
    assert!(done >= 6, "{done}");
    // The marker is likely, and everything after it follows the grammar, which begins with the marker.
    let open = server.post("/detokenize", &json!({ "tokens": [48] })).json()["content"].clone();
    assert_eq!(open, "<|tool_call>");
    let bias = json!({ "48": 8 });
    let auto = ask(&server, 3, json!({ "logit_bias": bias, "max_tokens": 500 - 40 }));
    if auto["finish_reason"] == "tool_calls" {
        assert!(!calls(&auto).is_empty(), "{auto}");
    }
    // The prompt's answer to a call, and another call in history.
    let history = json!([{ "role": "user", "content": "Hi" },
        { "role": "assistant", "content": null, "tool_calls": [{ "id": "a", "type": "function", "function": { "name": "now", "arguments": "{}" } }] },
        { "role": "tool", "tool_call_id": "a", "content": "noon" }]);
    let answered = ask(&server, 1, json!({ "messages": history, "max_tokens": 4 }));
    assert!(answered["finish_reason"].is_string());
}
