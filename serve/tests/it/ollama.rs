//! ollama's API: lines right to the byte, the same text as through OpenAI's, each bad field named, and what clients ask
//! before they ask for an answer.

use std::time::Duration;

use gemma4c_serve::{Deadlines, Options};
use serde_json::{Value, json};

use crate::slow::slow;
use crate::support::{Response, Server, options};

/// Times as they are in no two answers.
const TIMES: [&str; 5] = ["created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"];

fn lines(response: &Response) -> Vec<Value> {
    assert!(response.head.contains("\r\ncontent-type: application/x-ndjson"), "{}", response.head);
    assert!(response.text.ends_with('\n'), "{}", response.text);
    response.text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// The text of an answer with its times called T, after looking at them.
fn normalised(text: &str) -> String {
    let mut normalised = text.to_owned();
    for line in text.lines() {
        let read: Value = serde_json::from_str(line).unwrap();
        for time in TIMES {
            let Some(found) = read.get(time) else { continue };
            match found {
                Value::String(date) => assert!(date.len() == 30 && date.ends_with('Z') && date.as_bytes()[10] == b'T'),
                nanoseconds => assert!(nanoseconds.as_u64().is_some_and(|n| n < 60_000_000_000), "{time}: {found}"),
            }
            normalised = normalised.replacen(&format!("\"{time}\":{found}"), &format!("\"{time}\":T"), 1);
        }
    }
    normalised
}

const ENDS: &str = "\"total_duration\":T,\"load_duration\":T,\"prompt_eval_count\":PROMPT,\"prompt_eval_duration\":T,\"eval_count\":1,\"eval_duration\":T}";

#[test]
fn lines_are_right_to_the_byte() {
    let server = Server::new(options(), 1);
    let hi = json!([{ "role": "user", "content": "Hi" }]);
    let count = server.post("/tokenize", &json!({ "messages": hi })).json()["count"].clone();
    let ends = ENDS.replace("PROMPT", &count.to_string());
    // A schema that leaves one answer, which is one token.
    let mut chat = json!({ "model": "tiny:latest", "messages": hi, "format": { "const": 7 } });
    let mut generate = json!({ "model": "tiny", "prompt": "Hi", "format": { "const": 7 } });
    let chat_line = |content: &str, done: &str| {
        format!(
            "{{\"model\":\"tiny:latest\",\"created_at\":T,\"message\":{{\"role\":\"assistant\",\"content\":\"{content}\"}},\"done\":{done}"
        )
    };
    let generate_line = |content: &str, done: &str| {
        format!("{{\"model\":\"tiny\",\"created_at\":T,\"response\":\"{content}\",\"done\":{done}")
    };
    let stop = format!("true,\"done_reason\":\"stop\",{ends}");
    for (path, request, line) in [
        ("/api/chat", &mut chat, &chat_line as &dyn Fn(&str, &str) -> String),
        ("/api/generate", &mut generate, &generate_line),
    ] {
        let streamed = server.post(path, request);
        assert_eq!(streamed.status, 200, "{}", streamed.text);
        lines(&streamed);
        assert_eq!(normalised(&streamed.text), format!("{}\n{}\n", line("7", "false}"), line("", &stop)));
        request["stream"] = false.into();
        let whole = server.post(path, request);
        assert!(whole.head.contains("\r\ncontent-type: application/json"), "{}", whole.head);
        assert_eq!(normalised(&whole.text), line("7", &stop));
    }
}

/// The durations of an answer that takes its time are where that went.
#[test]
fn durations_are_measured() {
    let server = slow(options(), 1);
    let options = json!({ "num_predict": 200, "seed": 1 });
    let request = json!({ "prompt": "Once", "raw": true, "options": options, "stream": false });
    let started = std::time::Instant::now();
    let answer = server.post("/api/generate", &request).json();
    let whole = started.elapsed().as_nanos() as u64;
    let of = |name: &str| answer[name].as_u64().unwrap_or_else(|| panic!("{name} {answer}"));
    let count = of("eval_count");
    // Three milliseconds a token, of which the first is the prompt's.
    assert!(of("eval_duration") >= (count - 1) * 3_000_000, "{answer}");
    let parts = of("load_duration") + of("prompt_eval_duration") + of("eval_duration");
    assert!(parts <= of("total_duration") && of("total_duration") <= whole, "{answer} {whole}");
    assert!(of("prompt_eval_duration") > 0 && of("load_duration") > 0);
}

/// Text, thoughts and calls of a streamed or of a whole answer.
fn said(response: &Response) -> (String, String, Vec<Value>, Value) {
    assert_eq!(response.status, 200, "{}", response.text);
    let (mut text, mut thinking, mut calls, mut last) = (String::new(), String::new(), Vec::new(), Value::Null);
    for line in response.text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let from = line.get("message").unwrap_or(&line);
        text.push_str(from.get("content").or(from.get("response")).and_then(Value::as_str).expect("a text"));
        thinking.push_str(from.get("thinking").and_then(Value::as_str).unwrap_or_default());
        calls.extend(from.get("tool_calls").and_then(Value::as_array).into_iter().flatten().cloned());
        assert!(last.is_null(), "something follows the end: {}", response.text);
        if line["done"] == true {
            last = line["done_reason"].clone();
        }
    }
    (text, thinking, calls, last)
}

#[test]
fn the_same_request_has_the_same_text_through_each_api() {
    let server = Server::new(options(), 2);
    let messages = json!([{ "role": "system", "content": "Be brief" }, { "role": "user", "content": "Hi <turn|>" }]);
    for seed in 0..4 {
        let think = seed % 2 == 1;
        let asked = json!({
            "messages": messages, "seed": seed, "max_tokens": 20, "top_k": 30, "top_p": 0.9, "min_p": 0.01,
            "temperature": 1.5, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25,
            "repeat_last_n": 8, "reasoning_effort": if think { "high" } else { "none" },
            "stop": ["zz", "e"],
        });
        let ours = server.post("/v1/chat/completions", &asked).json();
        let (expected, finish) = (&ours["choices"][0]["message"]["content"], &ours["choices"][0]["finish_reason"]);
        let options = json!({
            "seed": seed, "num_predict": 20, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5,
            "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_last_n": 8,
            "stop": ["zz", "e"], "num_ctx": 131_072, "num_gpu": 99, "mirostat": 0,
        });
        let think = if seed == 3 { json!("high") } else { json!(think) };
        for stream in [true, false] {
            let more = json!({ "options": options, "think": think, "stream": stream, "keep_alive": "5m" });
            let with = |mut request: Value| {
                request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                request
            };
            for (path, request) in [
                ("/api/chat", with(json!({ "model": "tiny", "messages": messages }))),
                ("/api/generate", with(json!({ "model": "tiny", "system": "Be brief", "prompt": "Hi <turn|>" }))),
            ] {
                let (text, _, calls, reason) = said(&server.post(path, &request));
                assert_eq!((&json!(text), &reason, calls.len()), (expected, finish, 0), "{path} {stream}");
            }
        }
        // A prompt that is taken as it is.
        let asked = json!({ "prompt": "Once upon", "seed": seed, "max_tokens": 12 });
        let ours = server.post("/v1/completions", &asked).json();
        let options = json!({ "seed": seed, "num_predict": 12 });
        let raw = server.post("/api/generate", &json!({ "prompt": "Once upon", "raw": true, "options": options }));
        assert_eq!(json!(said(&raw).0), ours["choices"][0]["text"]);
    }
    // Markers of a raw prompt are markers: it is the rendered chat.
    let template = server.post("/apply-template", &json!({ "messages": messages })).json();
    let options = json!({ "seed": 5, "num_predict": 12 });
    let raw = json!({ "prompt": template["prompt"], "raw": true, "options": options, "stream": false });
    let hi = json!([messages[0], { "role": "user", "content": "Hi" }]);
    let chat = json!({ "messages": messages, "options": options, "stream": false });
    let count = |answer: Response| answer.json()["prompt_eval_count"].as_u64().unwrap();
    // The client's own marker is text in a chat and a marker here.
    assert!(count(server.post("/api/generate", &raw)) < count(server.post("/api/chat", &chat)));
    let template = server.post("/apply-template", &json!({ "messages": hi })).json();
    let raw = json!({ "prompt": template["prompt"], "raw": true, "options": options, "stream": false });
    let chat = json!({ "messages": hi, "options": options, "stream": false });
    let (raw, chat) = (server.post("/api/generate", &raw).json(), server.post("/api/chat", &chat).json());
    assert_eq!(
        (&raw["response"], &raw["prompt_eval_count"]),
        (&chat["message"]["content"], &chat["prompt_eval_count"])
    );
}

#[test]
fn a_limit_ends_at_the_context_and_minus_one_is_none() {
    let server = Server::new(Options { max_output: 7, ..options() }, 1);
    for (most, count) in [(json!(-1), 7), (json!(-2), 7), (json!(null), 7), (json!(3), 3), (json!(0), 0)] {
        for raw in [false, true] {
            let options = json!({ "num_predict": most, "seed": -1, "stop": ["\u{1}"] });
            let request = json!({ "prompt": "Hi", "raw": raw, "options": options, "stream": false });
            let answer = server.post("/api/generate", &request).json();
            let found = answer["eval_count"].as_u64().unwrap_or_else(|| panic!("{answer}"));
            assert!(found == count || found < count && answer["done_reason"] == "stop", "{most} {answer}");
        }
    }
    let options = json!({ "num_predict": 100_000, "temperature": 0 });
    let answer = server.post("/api/generate", &json!({ "prompt": "Hi", "options": options, "stream": false })).json();
    let tokens = answer["eval_count"].as_u64().unwrap() + answer["prompt_eval_count"].as_u64().unwrap();
    assert!(answer["done_reason"] == "stop" || tokens == 512, "{answer}");
}

fn tools() -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string", "maxLength": 4 } }, "required": ["city"] });
    json!([{ "type": "function", "function": { "name": "weather", "description": "A tool", "parameters": parameters } }])
}

/// A random model calls tools now and then.
#[test]
fn tools_are_called_with_objects_and_results_are_read() {
    let server = Server::new(options(), 4);
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let mut called = 0;
    for seed in 0..200 {
        let asked = json!({ "messages": messages, "tools": tools(), "seed": seed, "max_tokens": 300, "temperature": 2, "top_k": 0, "top_p": 1 });
        let ours = server.post("/v1/chat/completions", &asked).json();
        let choice = &ours["choices"][0];
        let Some(calls) = choice["message"]["tool_calls"].as_array() else { continue };
        called += 1;
        let parse = |call: &Value| serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()).ok();
        let expected: Vec<Value> = calls
            .iter()
            .filter_map(|call| Some(json!({ "function": { "name": "weather", "arguments": parse(call)? } })))
            .collect();
        for stream in [true, false] {
            let options = json!({ "seed": seed, "num_predict": 300, "temperature": 2, "top_k": 0, "top_p": 1 });
            let request = json!({ "messages": messages, "tools": tools(), "options": options, "stream": stream });
            let (text, _, calls, reason) = said(&server.post("/api/chat", &request));
            assert_eq!(
                (&json!(text), &calls),
                (&json!(choice["message"]["content"].as_str().unwrap_or("")), &expected)
            );
            assert_eq!(reason == "length", choice["finish_reason"] == "length", "{ours}");
        }
        if called == 3 {
            break;
        }
    }
    assert!(called > 0, "no seed has called");
    // The other way: arguments are an object, and a result names its tool.
    let call = json!([{ "function": { "name": "weather", "arguments": { "city": "Rome" } } }]);
    let server = Server::with_template("{{ messages | tojson }}{{ tools | tojson }}");
    for name in ["tool_name", "name"] {
        let history = json!([messages[0], { "role": "assistant", "content": "", "thinking": "Hm", "tool_calls": call },
            { "role": "tool", name: "weather", "content": "21" }]);
        let request =
            json!({ "messages": history, "tools": tools(), "options": { "num_predict": 1 }, "stream": false });
        let answer = server.post("/api/chat", &request);
        assert_eq!(answer.status, 200, "{}", answer.text);
        let mut theirs = history.clone();
        theirs[2] = json!({ "role": "tool", "name": "weather", "content": "21" });
        let count = server.post("/tokenize", &json!({ "messages": theirs, "tools": tools() })).json()["count"].clone();
        assert_eq!(answer.json()["prompt_eval_count"], count);
    }
}

/// An answer that begins within the model's thoughts.
#[test]
fn thoughts_have_their_own_field() {
    let server = Server::with_template("<|turn>model\n<|channel>thought\n");
    for stream in [true, false] {
        for (path, request) in [
            ("/api/chat", json!({ "messages": [{ "role": "user", "content": "Hi" }] })),
            ("/api/generate", json!({ "prompt": "Hi" })),
        ] {
            let mut request = request;
            request["think"] = true.into();
            request["stream"] = stream.into();
            request["options"] = json!({ "num_predict": 12, "seed": 3 });
            let (_, thinking, ..) = said(&server.post(path, &request));
            let asked = json!({ "messages": [{ "role": "user", "content": "Hi" }], "reasoning_effort": "low", "max_tokens": 12, "seed": 3 });
            let ours = server.post("/v1/chat/completions", &asked).json();
            assert_eq!(json!(thinking), ours["choices"][0]["message"]["reasoning_content"], "{path}");
            assert!(!thinking.is_empty());
        }
    }
}

#[test]
fn a_request_without_a_text_loads_the_model() {
    let server = Server::new(options(), 1);
    for (path, more, reason) in [
        ("/api/chat", json!({ "messages": [] }), "load"),
        ("/api/chat", json!({}), "load"),
        ("/api/chat", json!({ "messages": [], "keep_alive": 0 }), "unload"),
        ("/api/generate", json!({}), "load"),
        ("/api/generate", json!({ "prompt": "", "keep_alive": -1 }), "load"),
        ("/api/generate", json!({ "prompt": "", "keep_alive": "0s" }), "unload"),
    ] {
        let mut request = more;
        request["model"] = "tiny".into();
        let answer = server.post(path, &request);
        let text = match path {
            "/api/chat" => "\"message\":{\"role\":\"assistant\",\"content\":\"\"}",
            _ => "\"response\":\"\"",
        };
        let expected =
            format!("{{\"model\":\"tiny\",\"created_at\":T,{text},\"done\":true,\"done_reason\":\"{reason}\"}}");
        assert_eq!((answer.status, normalised(&answer.text)), (200, expected));
    }
    let in_memory = || server.get("/api/ps").json()["models"].clone();
    assert_eq!(in_memory(), json!([]));
    server.post("/api/generate", &json!({ "model": "tiny" }));
    assert_eq!(in_memory()[0]["name"], "tiny:latest");
}

#[test]
fn bad_fields_are_refused_by_the_clients_names() {
    let server = Server::new(options(), 1);
    let chat = |more: Value| {
        let mut request = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hi" }] });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("/api/chat", request)
    };
    let generate = |more: Value| {
        let mut request = json!({ "model": "tiny", "prompt": "Hi" });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("/api/generate", request)
    };
    let message = |message: Value| chat(json!({ "messages": [{ "role": "user", "content": "Hi" }, message] }));
    let option = |name: &str, value: Value| chat(json!({ "options": { name: value } }));
    for ((path, request), start) in [
        (option("temperature", json!(3)), "options.temperature must be a number from 0 to 2; found 3"),
        (option("temperature", json!("hot")), "options.temperature must be"),
        (option("top_k", json!(1.5)), "options.top_k must be"),
        (option("top_p", json!(2)), "options.top_p must be"),
        (option("min_p", json!([])), "options.min_p must be"),
        (option("seed", json!("x")), "options.seed must be"),
        (option("num_predict", json!(-3)), "options.num_predict must be"),
        (option("num_predict", json!(1e300)), "options.num_predict must be"),
        (option("num_ctx", json!(-5)), "options.num_ctx must be"),
        (option("stop", json!([1])), "options.stop must be"),
        (option("repeat_penalty", json!(0)), "options.repeat_penalty must be"),
        (option("repeat_last_n", json!(-2)), "options.repeat_last_n must be"),
        (option("presence_penalty", json!(9)), "options.presence_penalty must be"),
        (option("frequency_penalty", json!({})), "options.frequency_penalty must be"),
        (option("mirostat", json!(2)), "options.mirostat is not supported"),
        (option("typical_p", json!(0.5)), "options.typical_p is not supported"),
        (chat(json!({ "options": [] })), "options must be an object"),
        (chat(json!({ "think": "very" })), "think must be true, false"),
        (chat(json!({ "think": 1 })), "think must be"),
        (chat(json!({ "stream": "yes" })), "stream must be true or false"),
        (chat(json!({ "keep_alive": "soon" })), "keep_alive must be"),
        (chat(json!({ "keep_alive": [] })), "keep_alive must be"),
        (chat(json!({ "format": "xml" })), "format must be \"json\" or a JSON schema"),
        (chat(json!({ "format": { "type": "cat" } })), "format"),
        (chat(json!({ "messages": "Hi" })), "messages must be a list"),
        (chat(json!({ "tools": {} })), "tools must be a list"),
        (chat(json!({ "tools": [{ "type": "function", "function": {} }] })), "tools[0].function.name must be"),
        (message(json!("Hi")), "messages[1] must be an object"),
        (message(json!({ "role": "cat", "content": "" })), "messages[1].role is \"cat\""),
        (message(json!({ "content": "Hi" })), "messages[1].role must be"),
        (message(json!({ "role": "user", "content": [] })), "messages[1].content must be a text"),
        (message(json!({ "role": "assistant", "thinking": 1 })), "messages[1].thinking must be a text"),
        (message(json!({ "role": "assistant", "tool_calls": [{}] })), "messages[1].tool_calls[0].function.name must"),
        (message(json!({ "role": "tool", "content": "21" })), "messages[1] is a tool's result without its call"),
        (message(json!({ "role": "user", "images": "AAAA" })), "messages[1].images must be a list"),
        (message(json!({ "role": "user", "images": [7] })), "messages[1].images[0] must be a file in base64"),
        (
            message(json!({ "role": "user", "content": "Hi", "images": ["AAAA"] })),
            "messages[1].images[0]: the plan has no tower for pictures; it reads text",
        ),
        (
            message(json!({ "role": "user", "images": ["UklGRiQAAABXQVZFZm10IBAA"] })),
            "messages[1].images[0]: the plan has no tower for sounds",
        ),
        (generate(json!({ "images": ["AAAA"], "system": "x" })), "images[0]: the plan has no tower for pictures"),
        (generate(json!({ "images": ["AAAA"], "raw": true })), "images has no place"),
        (generate(json!({ "system": "x", "raw": true })), "system has no place"),
        (generate(json!({ "suffix": "x" })), "suffix is not supported"),
        (generate(json!({ "template": "x" })), "template is not supported"),
        (generate(json!({ "context": [1, 2] })), "context is not supported"),
        (generate(json!({ "raw": 1 })), "raw must be true or false"),
        (generate(json!({ "prompt": 1 })), "prompt must be a text"),
        (generate(json!({ "system": [] })), "system must be a text"),
        (generate(json!({ "prompt": "x ".repeat(2000), "raw": true })), "This model's maximum context length is 512"),
        (generate(json!({ "prompt": "x ".repeat(2000) })), "This model's maximum context length is 512"),
    ] {
        let answer = server.post(path, &request);
        assert_eq!(answer.status, 400, "{request} {}", answer.text);
        let error = answer.json();
        let fields: Vec<&String> = error.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["error"]);
        assert!(error["error"].as_str().unwrap().starts_with(start), "{error} {start}");
    }
    let other = server.post("/api/chat", &json!({ "model": "llama3", "messages": [] }));
    assert_eq!(
        (other.status, other.json()),
        (404, json!({ "error": "there is no model \"llama3\" here; there is \"tiny\"" }))
    );
    let garbage = server.request("POST", "/api/chat", b"{");
    assert!(garbage.status == 400 && garbage.json()["error"].is_string());
    let method = server.get("/api/chat");
    assert_eq!((method.status, method.json()), (405, json!({ "error": "/api/chat is not for GET" })));
    // What a template before the empty text would have been said to be.
    let empty = json!({ "suffix": "", "template": "", "context": [], "prompt": "Hi", "format": "", "options": { "num_predict": 1 } });
    assert_eq!(server.post("/api/generate", &empty).status, 200);
}

#[test]
fn a_stream_that_fails_says_so_in_its_last_line() {
    let deadlines = Deadlines { queue: Duration::from_secs(9), whole: Duration::from_millis(60) };
    let server = slow(Options { deadlines, ..options() }, 1);
    let options = json!({ "num_predict": 400, "temperature": 0 });
    let response = server.post("/api/generate", &json!({ "prompt": "Hi", "raw": true, "options": options }));
    let lines = lines(&response);
    let error = lines.last().unwrap();
    assert_eq!(error, &json!({ "error": "the answer was not complete within 0 seconds" }));
    assert!(lines[..lines.len() - 1].iter().all(|line| line["done"] == false));
}

#[test]
fn a_stream_that_has_nothing_to_say_says_an_empty_line_of_its_kind() {
    let server = slow(Options { ping: Duration::from_millis(1), ..options() }, 1);
    let request = json!({ "prompt": "Hi", "options": { "num_predict": 20, "seed": 2 } });
    let lines = lines(&server.post("/api/generate", &request));
    assert!(lines.iter().any(|line| line["done"] == false && line["response"] == ""), "{lines:?}");
}

#[test]
fn the_model_is_listed_shown_and_pulled() {
    let server = Server::new(options(), 3);
    let version = server.get("/version").json();
    let tags = server.get("/api/tags").json();
    let model = &tags["models"][0];
    let details = json!({
        "parent_model": "", "format": "gguf", "family": "gemma4", "families": ["gemma4"],
        "parameter_size": model["details"]["parameter_size"], "quantization_level": "Q8_0",
    });
    let plan = &crate::support::TINY.plan;
    let parameters: u64 = plan.weights.iter().map(|weight| weight.dims.iter().product::<u64>()).sum();
    assert_eq!(
        (&model["name"], &model["model"], &model["details"]),
        (&json!("tiny:latest"), &json!("tiny:latest"), &details)
    );
    assert_eq!((&model["size"], &model["digest"]), (&json!(plan.model.files[0].bytes), &version["plan_hash"]));
    assert!(model["modified_at"].as_str().unwrap().ends_with('Z'));
    let size = details["parameter_size"].as_str().unwrap();
    let number: f64 = size[..size.len() - 1].parse().unwrap();
    let unit = match &size[size.len() - 1..] {
        "K" => 1e3,
        "M" => 1e6,
        other => panic!("{other}"),
    };
    assert!((number * unit - parameters as f64).abs() <= 0.05 * unit, "{size} {parameters}");

    let shown = server.post("/api/show", &json!({ "model": "tiny" })).json();
    assert_eq!(shown["details"], details);
    assert_eq!(shown["capabilities"], json!(["completion", "thinking"]));
    assert_eq!(shown["template"], *plan.vocab.as_ref().unwrap().chat_template.as_ref().unwrap());
    let info = &shown["model_info"];
    assert_eq!(
        (&info["general.architecture"], &info["general.parameter_count"]),
        (&json!("gemma4"), &json!(parameters))
    );
    assert_eq!((&info["gemma4.block_count"], &info["gemma4.embedding_length"]), (&json!(2), &json!(plan.model.hidden)));
    assert_eq!(info["gemma4.context_length"], plan.model.trained_context);
    assert!(shown["parameters"].as_str().unwrap().contains("temperature "), "{shown}");
    let calling = Server::with_template("{% if tools %}{{ enable_thinking }}{% endif %}");
    let shown = calling.post("/api/show", &json!({ "name": "tiny:latest" })).json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));

    let running = server.get("/api/ps").json();
    let running = &running["models"][0];
    // On a CPU, no memory of a GPU.
    assert_eq!(
        (&running["size_vram"], &running["context_length"], &running["details"]),
        (&json!(0), &json!(512), &details)
    );
    assert_eq!(running["expires_at"], "9999-12-31T23:59:59Z");
    let version = server.get("/api/version").json();
    assert!(version["version"].as_str().unwrap().split('.').all(|part| part.parse::<u32>().is_ok()), "{version}");

    for (request, kind) in [
        (json!({ "model": "tiny" }), "application/x-ndjson"),
        (json!({ "name": "tiny:latest", "stream": true }), "application/x-ndjson"),
        (json!({ "model": "tiny", "stream": false }), "application/json"),
    ] {
        let pulled = server.post("/api/pull", &request);
        assert_eq!((pulled.status, pulled.text.as_str()), (200, "{\"status\":\"success\"}\n"));
        assert!(pulled.head.contains(&format!("\r\ncontent-type: {kind}\r\n")), "{}", pulled.head);
    }
    let other = server.post("/api/pull", &json!({ "model": "ggml-org/gemma-4-E4B-it-GGUF" }));
    let message = other.json()["error"].as_str().unwrap().to_owned();
    assert!(other.status == 404 && message.ends_with("gemma4c serve ggml-org/gemma-4-E4B-it-GGUF"), "{message}");
    for path in ["/api/show", "/api/pull"] {
        for (request, status, word) in [
            (json!({}), 400, "model is missing"),
            (json!({ "model": 1 }), 400, "model must be a text"),
            (json!([]), 400, "object"),
            (json!({ "model": "x" }), 404, "\"x\""),
        ] {
            let answer = server.post(path, &request);
            assert_eq!(answer.status, status, "{path} {request} {}", answer.text);
            assert!(answer.json()["error"].as_str().unwrap().contains(word), "{}", answer.text);
        }
    }
    let embed = json!({ "model": "tiny", "input": "Hi" });
    assert!(
        server.post("/api/embed", &embed).json()["error"].as_str().unwrap().starts_with("embeddings are not served")
    );
    for (method, path) in
        [("POST", "create"), ("DELETE", "delete"), ("POST", "copy"), ("POST", "push"), ("POST", "blobs/sha256:0")]
    {
        let refused = server.request(method, &format!("/api/{path}"), b"{}");
        assert_eq!(refused.status, 400, "{path}");
        assert!(refused.json()["error"].as_str().unwrap().contains("gemma4c serve NAME"), "{}", refused.text);
    }
    assert_eq!(server.get("/api/nothing").json(), json!({ "error": "there is nothing at /api/nothing" }));
}

#[test]
fn whoever_looks_for_ollama_finds_it_and_browsers_find_the_page() {
    let server = Server::new(Options { api_keys: "secret".into(), ..options() }, 1);
    let get = |method: &str, accept: &str| {
        Response::read(server.send(method, "/", &format!("{accept}connection: close\r\n"), b""))
    };
    for accept in ["", "accept: */*\r\n", "accept: application/json\r\n", "accept: application/x-ndjson\r\n"] {
        let answer = get("GET", accept);
        assert_eq!((answer.status, answer.text.as_str()), (200, "Ollama is running"));
        let head = get("HEAD", accept);
        assert_eq!((head.status, head.text.as_str()), (200, ""));
    }
    let page = get("GET", "accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n");
    assert!(page.text.starts_with("<!doctype html>"), "{}", page.text);
    let refused = server.get("/api/tags");
    assert_eq!(refused.status, 401);
    assert!(refused.json()["error"].as_str().unwrap().contains("API key"), "{}", refused.text);
}

/// As Home Assistant's integration and Open WebUI send them: fields that other clients leave out.
#[test]
fn requests_of_known_clients_are_answered() {
    let server = Server::new(Options { max_output: 6, ..options() }, 1);
    let assistant = json!({
        "model": "tiny:latest", "stream": true, "format": null, "keep_alive": "-1s", "think": false,
        "options": { "num_ctx": 8192 },
        "messages": [
            { "role": "system", "content": "You are a voice assistant for Home Assistant." },
            { "role": "user", "content": "turn on the light" },
            { "role": "assistant", "content": "", "thinking": null, "images": null, "tool_name": null,
              "tool_calls": [{ "function": { "name": "HassTurnOn", "arguments": { "name": "light" } } }] },
            { "role": "tool", "content": "{\"success\": true}" },
        ],
        "tools": [{ "type": "function", "function": {
            "name": "HassTurnOn", "description": "Turns on a device",
            "parameters": { "type": "object", "required": [], "properties": {
                "name": { "type": "string" }, "domain": { "type": "array", "items": { "type": "string" } } } },
        } }],
    });
    let webui = json!({
        "model": "tiny:latest", "stream": true,
        "messages": [{ "role": "user", "content": "Hi" }],
        "options": { "temperature": 0.7, "num_ctx": 4096, "stop": ["END"], "num_keep": 24, "use_mmap": true, "num_gpu": 1 },
        "metadata": { "chat_id": "a" }, "session_id": "b", "features": { "web_search": false },
    });
    for request in [assistant, webui] {
        let (_, _, _, reason) = said(&server.post("/api/chat", &request));
        assert!(reason == "stop" || reason == "length", "{reason}");
    }
    // Open WebUI asks these before; titles it asks for in one piece, through OpenAI's API of the same server.
    assert_eq!(server.get("/api/version").status, 200);
    assert_eq!(server.post("/api/show", &json!({ "name": "tiny:latest", "verbose": false })).status, 200);
    let title = json!({ "model": "tiny:latest", "messages": [{ "role": "user", "content": "A title" }], "stream": false, "max_completion_tokens": 5 });
    assert_eq!(server.post("/v1/chat/completions", &title).status, 200);
}
