//! Anthropic's Messages: streams to the byte, the same text as of a chat, tools and thoughts both ways, and the name of
//! whatever is wrong.

use std::time::Duration;

use gemma4c_serve::{Deadlines, Options};
use serde_json::{Value, json};

use crate::seeing::{base64, png, seeing};
use crate::slow::slow;
use crate::support::{Response, Server, options};

fn with(request: &Value, more: Value) -> Value {
    let mut request = request.clone();
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

fn ask(text: &str) -> Value {
    json!({ "model": "tiny", "max_tokens": 12, "messages": [{ "role": "user", "content": text }], "seed": 7 })
}

fn message(server: &Server, request: &Value) -> Value {
    let answer = server.post("/v1/messages", request);
    assert_eq!(answer.status, 200, "{request} {}", answer.text);
    answer.json()
}

fn chat(server: &Server, request: &Value) -> Value {
    let answer = server.post("/v1/chat/completions", request);
    assert_eq!(answer.status, 200, "{request} {}", answer.text);
    answer.json()
}

/// A template that opens a thought, which a random model does not.
const THINKS: &str = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}<|turn>model\n\
     {% if enable_thinking %}<|channel>thought\n{% endif %}";

fn tool() -> Value {
    let schema = json!({
        "type": "object", "properties": { "city": { "type": "string", "maxLength": 6 }, "days": { "type": "integer" } },
        "required": ["city", "days"],
    });
    json!({ "name": "get_weather", "description": "The weather", "input_schema": schema, "cache_control": { "type": "ephemeral" } })
}

fn tool_of_chat() -> Value {
    let tool = tool();
    let function = json!({
        "name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"],
    });
    json!({ "type": "function", "function": function })
}

/// Names and data of a stream's events.
fn events(stream: &Response) -> Vec<(String, Value)> {
    let event = |text: &str| {
        let (name, data) = text.split_once('\n').expect("two lines");
        let name = name.strip_prefix("event: ").expect("a name").to_owned();
        (name, serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON"))
    };
    stream.text.split("\n\n").filter(|text| !text.is_empty()).map(event).collect()
}

/// What a stream must be, byte for byte: the whole answer with its own ids, and each block's text in these deltas.
fn rendered(whole: &Value, ids: &Value, deltas: &[Vec<String>]) -> String {
    let usage = &whole["usage"];
    let event = |name: &str, data: String| format!("event: {name}\ndata: {{\"type\":\"{name}\",{data}}}\n\n");
    let mut out = event(
        "message_start",
        format!(
            r#""message":{{"id":{},"type":"message","role":"assistant","model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,"usage":{{"input_tokens":{},"output_tokens":0,"cache_read_input_tokens":{},"cache_creation_input_tokens":0}}}}"#,
            ids["message"], usage["input_tokens"], usage["cache_read_input_tokens"]
        ),
    );
    for (index, (block, deltas)) in whole["content"].as_array().unwrap().iter().zip(deltas).enumerate() {
        let (start, kind, field) = match block["type"].as_str().unwrap() {
            "text" => (r#"{"type":"text","text":""}"#.to_owned(), "text_delta", "text"),
            "thinking" => (r#"{"type":"thinking","thinking":"","signature":""}"#.into(), "thinking_delta", "thinking"),
            _ => {
                let start = format!(
                    r#"{{"type":"tool_use","id":{},"name":{},"input":{{}}}}"#,
                    ids["calls"][index], block["name"]
                );
                (start, "input_json_delta", "partial_json")
            }
        };
        out += &event("content_block_start", format!(r#""index":{index},"content_block":{start}"#));
        let mut delta = |kind: &str, field: &str, text: &Value| {
            let data = format!(r#""index":{index},"delta":{{"type":"{kind}","{field}":{text}}}"#);
            out += &event("content_block_delta", data);
        };
        deltas.iter().for_each(|text| delta(kind, field, &json!(text)));
        if kind == "thinking_delta" {
            delta("signature_delta", "signature", &block["signature"]);
        }
        out += &event("content_block_stop", format!(r#""index":{index}"#));
    }
    let (reason, stop) = (&whole["stop_reason"], &whole["stop_sequence"]);
    let delta = format!(r#"{{"stop_reason":{reason},"stop_sequence":{stop}}}"#);
    let output = &usage["output_tokens"];
    out += &event("message_delta", format!(r#""delta":{delta},"usage":{{"output_tokens":{output}}}"#));
    out + "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
}

/// Holds the stream of a request to its whole answer, which is given back.
fn check_stream(server: &Server, request: &Value) -> Value {
    // What the first has written, all others read.
    message(server, request);
    let whole = message(server, request);
    let stream = server.post("/v1/messages?beta=true", &with(request, json!({ "stream": true })));
    assert!(stream.head.contains("content-type: text/event-stream"), "{}", stream.head);
    let (mut deltas, mut calls) = (Vec::new(), Vec::new());
    let events = events(&stream);
    for (name, data) in &events {
        match name.as_str() {
            "content_block_start" => {
                deltas.push(Vec::new());
                calls.push(data["content_block"]["id"].clone());
            }
            "content_block_delta" if data["delta"]["type"] != "signature_delta" => {
                let delta = &data["delta"];
                let text = ["text", "thinking", "partial_json"].iter().find_map(|field| delta[*field].as_str());
                deltas.last_mut().expect("a block").push(text.expect("a text").to_owned());
            }
            _ => {}
        }
    }
    for (block, deltas) in whole["content"].as_array().unwrap().iter().zip(&deltas) {
        let joined = deltas.concat();
        match block["type"].as_str().unwrap() {
            "tool_use" => assert_eq!(serde_json::from_str::<Value>(&joined).unwrap(), block["input"]),
            kind => assert_eq!(joined, block[kind].as_str().unwrap()),
        }
    }
    let ids = json!({ "message": events[0].1["message"]["id"], "calls": calls });
    assert_eq!(stream.text, rendered(&whole, &ids, &deltas));
    assert!(ids["message"].as_str().unwrap().starts_with("msg_") && ids["message"] != whole["id"]);
    whole
}

#[test]
fn a_stream_is_the_whole_message_to_the_byte() {
    let server = Server::new(options(), 2);
    let text = check_stream(&server, &ask("Hi"));
    assert_eq!(
        (&text["type"], &text["role"], &text["model"]),
        (&json!("message"), &json!("assistant"), &json!("tiny"))
    );
    assert_eq!((&text["content"][0]["type"], &text["stop_sequence"]), (&json!("text"), &Value::Null));
    assert_eq!((&text["stop_reason"], &text["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(12)));
    let keys: Vec<&String> = text.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"]);

    let format = json!({ "format": { "type": "json_schema", "schema": { "enum": ["a", "b"] } } });
    let formed = check_stream(&server, &with(&ask("Hi"), json!({ "output_config": format, "max_tokens": 60 })));
    assert_eq!(formed["stop_reason"], "end_turn");
    assert!(["\"a\"", "\"b\""].contains(&formed["content"][0]["text"].as_str().unwrap()), "{formed}");

    // What came is cut at a text that is known to come.
    let whole = text["content"][0]["text"].as_str().unwrap();
    let characters: Vec<char> = whole.chars().collect();
    let stop: String = characters[characters.len() / 2..characters.len() / 2 + 2].iter().collect();
    let stopped = check_stream(&server, &with(&ask("Hi"), json!({ "stop_sequences": ["~~~~", stop] })));
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    let before = &whole[..whole.find(&stop).expect("it comes")];
    let said = stopped["content"].as_array().unwrap().first().map_or("", |block| block["text"].as_str().unwrap());
    assert_eq!(said, before);
}

#[test]
fn calls_go_both_ways() {
    let server = seeing(options());
    let choice = json!({ "type": "any", "disable_parallel_tool_use": true });
    let tools = json!({ "tools": [tool()], "tool_choice": choice, "max_tokens": 300, "system": [{ "type": "text", "text": "Be brief" }] });
    let request = with(&ask("Weather?"), tools);
    let called = check_stream(&server, &request);
    let call = &called["content"][0];
    assert_eq!(
        (&called["stop_reason"], &call["type"], &call["name"]),
        (&json!("tool_use"), &json!("tool_use"), &json!("get_weather"))
    );
    let keys: Vec<&String> = call["input"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["city", "days"]);
    assert!(call["id"].as_str().unwrap().starts_with("toolu_"));

    let of_chat = json!({
        "messages": [{ "role": "system", "content": "Be brief" }, { "role": "user", "content": "Weather?" }],
        "tools": [tool_of_chat()], "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 300, "seed": 7,
    });
    let answer = chat(&server, &of_chat);
    let function = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert_eq!((&function["name"], &arguments), (&call["name"], &call["input"]));
    let prompt =
        |usage: &Value| usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(prompt(&called["usage"]), answer["usage"]["prompt_tokens"].as_u64().unwrap());

    // The history with the result, in the words of each. A picture in a result is the user's, behind it.
    let picture = base64(&png([200, 30, 30]));
    let source = json!({ "type": "base64", "media_type": "image/png", "data": picture });
    let result = json!({ "type": "tool_result", "tool_use_id": "toolu_1", "content": [{ "type": "text", "text": "21 degrees" }, { "type": "image", "source": source }] });
    let failed =
        json!({ "type": "tool_result", "tool_use_id": "toolu_2", "is_error": true, "content": "no such city" });
    let call = |id: &str| json!({ "type": "tool_use", "id": id, "name": "get_weather", "input": { "city": "Paris", "days": 3 } });
    let own = json!([{ "type": "thinking", "thinking": "Look", "signature": "x" }, { "type": "text", "text": "Let me see." }, call("toolu_1"), call("toolu_2")]);
    let request = json!({
        "model": "tiny", "max_tokens": 12, "seed": 5, "tools": [tool()], "tool_choice": { "type": "none" },
        "messages": [
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "content": own },
            { "role": "user", "content": [failed, result, { "type": "text", "text": "And now?" }] },
        ],
    });
    let call = |id: &str| json!({ "id": id, "type": "function", "function": { "name": "get_weather", "arguments": "{\"city\":\"Paris\",\"days\":3}" } });
    let data = json!({ "url": format!("data:image/png;base64,{picture}") });
    let of_chat = json!({
        "max_tokens": 12, "seed": 5, "tools": [tool_of_chat()], "tool_choice": "none",
        "messages": [
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "content": "Let me see.", "reasoning": "Look", "tool_calls": [call("toolu_1"), call("toolu_2")] },
            { "role": "tool", "tool_call_id": "toolu_2", "content": { "error": "no such city" } },
            { "role": "tool", "tool_call_id": "toolu_1", "content": "21 degrees" },
            { "role": "user", "content": [{ "type": "image_url", "image_url": data }, { "type": "text", "text": "And now?" }] },
        ],
    });
    check_same(&server, &request, &of_chat);
}

/// Both get the same text for prompts of the same length, and so does a count of its tokens.
fn check_same(server: &Server, request: &Value, of_chat: &Value) -> Value {
    let (ours, theirs) = (message(server, request), chat(server, of_chat));
    let blocks = ours["content"].as_array().unwrap();
    let joined = |kind: &str| blocks.iter().filter_map(|block| block[kind].as_str()).collect::<String>();
    let answer = &theirs["choices"][0]["message"];
    assert_eq!(joined("text"), answer["content"].as_str().unwrap_or_default(), "{request}");
    assert_eq!(joined("thinking"), answer["reasoning"].as_str().unwrap_or_default(), "{request}");
    let usage = &ours["usage"];
    let prompt = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(prompt, theirs["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!(usage["output_tokens"], theirs["usage"]["completion_tokens"]);
    let mut counted = request.clone();
    counted.as_object_mut().unwrap().remove("max_tokens");
    let count = server.post("/v1/messages/count_tokens?beta=true", &counted);
    assert_eq!((count.status, count.json()), (200, json!({ "input_tokens": prompt })), "{}", count.text);
    ours
}

#[test]
fn the_same_request_gets_the_same_text_as_a_chat() {
    let server = Server::new(options(), 2);
    let text = |text: &str| json!({ "type": "text", "text": text });
    let document =
        json!({ "type": "document", "source": { "type": "text", "media_type": "text/plain", "data": "A fact." } });
    for (ours, theirs) in [
        (json!({ "messages": [{ "role": "user", "content": "Hi" }] }), json!([{ "role": "user", "content": "Hi" }])),
        (
            json!({ "system": "Be brief", "messages": [
                { "role": "user", "content": [text("Hi"), text("there")] },
                { "role": "assistant", "content": [text("Yes")] },
                { "role": "user", "content": "More" },
            ] }),
            json!([
                { "role": "system", "content": "Be brief" },
                { "role": "user", "content": [text("Hi"), text("there")] },
                { "role": "assistant", "content": "Yes" },
                { "role": "user", "content": "More" },
            ]),
        ),
        // Two messages of a user are one turn.
        (
            json!({ "messages": [{ "role": "user", "content": [document] }, { "role": "user", "content": "What is it?" }] }),
            json!([{ "role": "user", "content": [text("A fact."), text("What is it?")] }]),
        ),
        // What a client says for Anthropic's accounts is not for the model.
        (
            json!({
                "system": [text("x-anthropic-billing-header: cc_version=2; cch=1a2b3;"), text("You are "), text("brief")],
                "messages": [{ "role": "user", "content": "Hi <|turn>model" }], "metadata": { "user_id": "x" },
                "thinking": { "type": "disabled" },
            }),
            json!([{ "role": "system", "content": "You are brief" }, { "role": "user", "content": "Hi <|turn>model" }]),
        ),
    ] {
        for sampling in
            [json!({ "temperature": 0 }), json!({ "seed": 11, "top_p": 0.9, "top_k": 40, "temperature": 0.8 })]
        {
            let ours = with(&with(&ours, json!({ "max_tokens": 10 })), sampling.clone());
            check_same(&server, &ours, &with(&json!({ "messages": theirs, "max_tokens": 10 }), sampling));
        }
    }
}

#[test]
fn pictures_are_those_of_a_chat() {
    let server = seeing(options());
    let picture = base64(&png([10, 200, 30]));
    let text = json!({ "type": "text", "text": "What is it?" });
    let data = format!("data:image/png;base64,{picture}");
    let of_chat = json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": data } }, text] }], "max_tokens": 8, "temperature": 0 });
    for source in
        [json!({ "type": "base64", "media_type": "image/png", "data": picture }), json!({ "type": "url", "url": data })]
    {
        let content = json!([{ "type": "image", "source": source, "cache_control": { "type": "ephemeral" } }, text]);
        let request =
            json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 8, "temperature": 0 });
        let answer = check_same(&server, &request, &of_chat);
        assert!(answer["usage"]["cache_read_input_tokens"].as_u64().is_some(), "{answer}");
    }
}

#[test]
fn thoughts_are_blocks_that_are_signed() {
    let server = Server::with_template(THINKS);
    let request = |thinking: Value| with(&ask("Hi"), json!({ "thinking": thinking, "max_tokens": 24 }));
    let limited = request(json!({ "type": "enabled", "budget_tokens": 6 }));
    let thought = check_stream(&server, &limited);
    let kinds: Vec<&str> = thought["content"].as_array().unwrap().iter().map(|b| b["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text"], "{thought}");
    assert_eq!(thought["content"][0]["signature"].as_str().unwrap().len(), 32);
    let of_chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 24, "seed": 7, "reasoning_effort": "high", "thinking_token_budget": 6 });
    check_same(&server, &limited, &of_chat);
    let adaptive = check_stream(&server, &request(json!({ "type": "adaptive" })));
    assert_eq!(adaptive["content"][0]["type"], "thinking");
    let without = check_stream(&server, &request(json!({ "type": "disabled" })));
    assert_eq!(without["content"][0]["type"], "text");
}

#[test]
fn every_bad_field_is_named() {
    let server = Server::new(options(), 2);
    let user = |content: Value| json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "user", "content": content }] });
    let image = |source: Value| user(json!([{ "type": "image", "source": source }]));
    let source = json!({ "type": "base64", "media_type": "image/png", "data": "AAAA" });
    for (more, field) in [
        (json!({ "max_tokens": null }), "max_tokens is missing"),
        (json!({ "max_tokens": 0 }), "max_tokens must be a whole number from 1"),
        (json!({ "messages": null }), "messages is missing"),
        (json!({ "messages": [{ "role": "tool", "content": "x" }] }), "messages[0].role must be user or assistant"),
        (
            json!({ "messages": [{ "role": "user", "content": "x" }, { "role": "assistant", "content": "{" }] }),
            "messages[1]: the last message must be the user's",
        ),
        (json!({ "system": [{ "type": "image" }] }), "system[0].type must be text"),
        (
            image(json!({ "type": "base64", "media_type": "image/tiff", "data": "AAAA" })),
            "messages[1].content[0].source.media_type must be one of image/jpeg",
        ),
        (image(source), "messages[1].content[0]: the plan has no tower for pictures"),
        (
            user(
                json!([{ "type": "document", "source": { "type": "base64", "media_type": "application/pdf", "data": "" } }]),
            ),
            "messages[1].content[0].source.type must be text",
        ),
        (
            user(json!([{ "type": "tool_result", "tool_use_id": "toolu_9" }])),
            "messages[1].content[0].tool_use_id: no tool_use",
        ),
        (
            user(json!([{ "type": "web_search_tool_result" }])),
            "messages[1].content[0].type is \"web_search_tool_result\"",
        ),
        (json!({ "temperature": 3 }), "temperature must be a number"),
        (json!({ "top_p": "x" }), "top_p must be a number"),
        (json!({ "top_k": -7 }), "top_k must be a whole number"),
        (json!({ "stream": "yes" }), "stream must be true or false"),
        (json!({ "stop_sequences": "x" }), "stop_sequences must be a list"),
        (json!({ "stop_sequences": [7] }), "stop_sequences must be a text or a list of at most 64 texts"),
        (json!({ "metadata": 7 }), "metadata must be an object"),
        (json!({ "n": 2 }), "n must be 1"),
        (json!({ "thinking": { "type": "enabled" } }), "thinking.budget_tokens must be a whole number"),
        (
            json!({ "thinking": { "type": "enabled", "budget_tokens": -1 } }),
            "thinking.budget_tokens must be a whole number",
        ),
        (json!({ "thinking": { "type": "deep" } }), "thinking.type must be enabled, adaptive or disabled"),
        (json!({ "thinking": true }), "thinking must be an object"),
        (
            json!({ "tools": [tool(), { "type": "web_search_20250305", "name": "web_search" }] }),
            "tools[1].type \"web_search_20250305\" is no tool of this server",
        ),
        (json!({ "tools": [{ "name": "f" }] }), "tools[0].input_schema must be a JSON schema"),
        (json!({ "tools": [{ "name": "a b", "input_schema": {} }] }), "tools[0].name must be a text"),
        (
            json!({ "tools": [{ "name": "f", "input_schema": { "type": "object", "properties": { "a": { "pattern": "(" } } } }] }),
            "tools[0].input_schema",
        ),
        (
            json!({ "tools": [tool()], "tool_choice": { "type": "tool", "name": "g" } }),
            "tool_choice: there is no tool \"g\"",
        ),
        (json!({ "tool_choice": { "type": "any" } }), "tool_choice asks for a call, but there are no tools"),
        (json!({ "mcp_servers": [{ "url": "x" }] }), "mcp_servers: this server runs no tools"),
        (json!({ "container": "x" }), "container: this server runs no tools"),
        (json!({ "output_config": { "format": { "type": "xml" } } }), "output_config.format.type must be json_schema"),
        (json!({ "output_config": { "format": 7 } }), "output_config.format must be an object"),
        (
            json!({ "output_config": { "format": { "type": "json_schema", "schema": { "type": "x" } } } }),
            "output_config.format.schema",
        ),
        (user(json!("x ".repeat(2000))), "prompt is too long: This model's maximum context length is 512 tokens"),
    ] {
        let refused = server.post("/v1/messages", &with(&ask("Hi"), more.clone()));
        let error = refused.json();
        assert_eq!((refused.status, &error["type"]), (400, &json!("error")), "{more} {error}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(field), "{message}");
        assert_eq!(error.as_object().unwrap().len() + error["error"].as_object().unwrap().len(), 4, "{error}");
    }
}

#[test]
fn clients_find_what_they_look_for() {
    let server = Server::new(Options { api_keys: "secret".into(), ..options() }, 2);
    let send = |method: &str, path: &str, headers: &str, body: &Value| {
        let headers = format!("connection: close\r\n{headers}");
        let body = if body.is_null() { String::new() } else { body.to_string() };
        Response::read(server.send(method, path, &headers, body.as_bytes()))
    };
    let root = send("HEAD", "/", "", &Value::Null);
    assert_eq!((root.status, root.text.as_str()), (200, ""));
    let headers = "x-api-key: secret\r\nanthropic-version: any\r\nanthropic-beta: a-1,b-2\r\n";
    let answer = send("POST", "/v1/messages?beta=true", headers, &ask("Hi"));
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert!(answer.head.contains("\r\nrequest-id: req_"), "{}", answer.head);
    // More than there is space for is a limit that is never reached.
    let long = send(
        "POST",
        "/v1/messages",
        headers,
        &with(&ask("Hi"), json!({ "max_tokens": 64_000, "stop_sequences": ["e", "a", "\n", " "] })),
    );
    assert_eq!(long.status, 200, "{}", long.text);
    for (headers, request, status, kind) in [
        ("", ask("Hi"), 401, "authentication_error"),
        (headers, with(&ask("Hi"), json!({ "model": "claude-sonnet-4-5" })), 404, "not_found_error"),
        (headers, json!([]), 400, "invalid_request_error"),
    ] {
        let refused = send("POST", "/v1/messages", headers, &request);
        assert_eq!((refused.status, &refused.json()["error"]["type"]), (status, &json!(kind)), "{}", refused.text);
    }
    let wrong = send("GET", "/v1/messages", headers, &Value::Null);
    assert_eq!((wrong.status, &wrong.json()["type"]), (405, &json!("error")));
    let any = Server::new(Options { takes_any_model: true, ..options() }, 1);
    assert_eq!(message(&any, &with(&ask("Hi"), json!({ "model": "claude-sonnet-4-5" })))["model"], "tiny");
}

#[test]
fn a_stream_that_fails_says_so_in_an_event() {
    let deadlines = Deadlines { queue: Duration::from_secs(9), whole: Duration::from_secs(1) };
    let server = slow(Options { deadlines, ping: Duration::from_millis(1), ..options() }, 1);
    let request = with(&ask("Once upon a time"), json!({ "max_tokens": 450, "stream": true, "ignore_eos": true }));
    let stream = server.post("/v1/messages", &request);
    assert!(stream.text.contains("\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n"), "{}", stream.text);
    let (name, data) = events(&stream).pop().expect("an event");
    assert_eq!((name.as_str(), &data["type"], &data["error"]["type"]), ("error", &json!("error"), &json!("api_error")));
    assert!(!stream.text.contains("message_stop"));
}
