//! What goes wrong: bad requests, clients that go away, full queues, and a server that is told to end.

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use gemma4c_serve::{Deadlines, Options, QueueLimits};
use serde_json::{Value, json};

use crate::slow::{failing, long, slow, slowed, until};
use crate::support::{Response, Server, options};

#[test]
fn every_error_names_what_is_wrong() {
    let server = Server::new(options(), 2);
    let chat = |more: Value| {
        let mut request = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 2 });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("/v1/chat/completions", request)
    };
    for ((path, request), status, code, word) in [
        (chat(json!({ "model": "gpt-4" })), 404, "model_not_found", "gpt-4"),
        (chat(json!({ "temperature": 3 })), 400, "invalid_value", "temperature"),
        (chat(json!({ "temperature": "hot" })), 400, "invalid_value", "temperature"),
        (chat(json!({ "top_p": -1 })), 400, "invalid_value", "top_p"),
        (chat(json!({ "n": 17 })), 400, "invalid_value", "16"),
        (chat(json!({ "n": 0 })), 400, "invalid_value", "n "),
        (chat(json!({ "stop": ["a", "b", "c", "d", "e"] })), 400, "invalid_value", "stop"),
        (chat(json!({ "logprobs": true, "top_logprobs": 21 })), 400, "invalid_value", "20"),
        (chat(json!({ "top_logprobs": 2 })), 400, "invalid_value", "logprobs"),
        (chat(json!({ "logit_bias": { "x": 1 } })), 400, "invalid_value", "logit_bias"),
        (
            chat(json!({ "max_tokens": 1000 })),
            400,
            "context_length_exceeded",
            "This model's maximum context length is 512 tokens. However, you requested 10",
        ),
        (chat(json!({ "max_tokens": -2 })), 400, "invalid_value", "max_tokens"),
        (chat(json!({ "max_tokens": 1e300 })), 400, "invalid_value", "max_tokens"),
        (chat(json!({ "seed": "x" })), 400, "invalid_value", "seed"),
        (chat(json!({ "messages": [] })), 400, "invalid_value", "messages"),
        (chat(json!({ "messages": "Hi" })), 400, "invalid_value", "messages"),
        (chat(json!({ "messages": [{ "role": "cat", "content": "" }] })), 400, "invalid_value", "cat"),
        (
            chat(json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] })),
            400,
            "invalid_value",
            "messages[0].content[0].image_url must be a URL",
        ),
        (
            chat(
                json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "data:," } }] }] }),
            ),
            400,
            "invalid_value",
            "messages[0].content[0]: the plan has no tower for pictures; it reads text",
        ),
        (
            chat(json!({ "messages": [{ "role": "user", "content": [{ "type": "file", "file": {} }] }] })),
            400,
            "invalid_value",
            "messages[0].content[0] is of type \"file\"",
        ),
        (
            chat(json!({ "messages": [{ "role": "user", "content": "x ".repeat(2000) }] })),
            400,
            "context_length_exceeded",
            "This model's maximum context length is 512 tokens. However, you requested ",
        ),
        (chat(json!({ "cache_salt": "x".repeat(300) })), 400, "invalid_value", "cache_salt"),
        (chat(json!({ "tools": [{ "type": "function", "function": {} }] })), 400, "invalid_value", "name"),
        (chat(json!({ "tool_choice": "required" })), 400, "invalid_value", "tool_choice"),
        (("/v1/completions", json!({})), 400, "invalid_value", "prompt"),
        (("/v1/completions", json!({ "prompt": [99999999] })), 400, "invalid_value", "99999999"),
        (("/v1/completions", json!({ "prompt": [] })), 400, "invalid_value", "empty"),
        (("/v1/embeddings", json!({ "input": "x" })), 501, "unsupported", "embed"),
        (("/nowhere", json!({})), 404, "unknown_url", "/nowhere"),
        (("/health", json!({})), 405, "method_not_allowed", "POST"),
        (("/v1/completions", json!([])), 400, "json_parse_error", "object"),
    ] {
        let response = server.post(path, &request);
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["code"]), (status, &json!(code)), "{path} {request} {error}");
        assert!(error["message"].as_str().expect("a message").contains(word), "{error}");
        assert!(error["type"].is_string() && error.get("param").is_some(), "{error}");
        assert!(response.head.contains("content-type: application/json"), "{}", response.head);
    }
    assert_eq!(server.metric("num_requests_running"), 0.0);
}

#[test]
fn garbage_is_refused_and_leaves_nothing_behind() {
    let server = Server::new(options(), 2);
    for body in
        [&b""[..], b"{", b"\xff\xfe", b"nul", b"[[[[", b"{\"prompt\":\"\xc3\"}", b"{\"a\":1e999}", b"\"\\ud800\""]
    {
        for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"] {
            let response = server.request("POST", path, body);
            assert_eq!(response.status, 400, "{body:?} {}", response.text);
            assert!(response.json()["error"]["code"].is_string());
        }
    }
    // Deeper than any parser should follow.
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    assert_eq!(server.request("POST", "/v1/completions", &deep).status, 400);
    let response = Response::read({
        let mut stream = server.connect();
        stream
            .write_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90000000\r\nconnection: close\r\n\r\n",
            )
            .unwrap();
        stream
    });
    assert_eq!((response.status, &response.json()["error"]["code"]), (413, &json!("body_too_large")));
    // A text that cannot fit is refused before it is encoded.
    let huge = "x ".repeat(10 << 20);
    for body in [json!({ "prompt": huge }), json!({ "messages": [{ "role": "user", "content": huge }] })] {
        let path = if body.get("prompt").is_some() { "/v1/completions" } else { "/v1/chat/completions" };
        assert_eq!(server.post(path, &body).json()["error"]["code"], "context_length_exceeded");
    }
    // Heads that are none, and connections that are cut within one.
    for bytes in [&b"\x16\x03\x01\x02"[..], b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/comp"] {
        let mut stream = server.connect();
        stream.write_all(bytes).unwrap();
    }
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn whoever_goes_away_takes_the_request_along() {
    let server = slow(options(), 2);
    let body = |stream| long(stream).to_string().into_bytes();
    // In the middle of a stream, before an answer, and while waiting for a slot.
    let mut streams: Vec<_> = (0..12).map(|i| server.send("POST", "/v1/completions", "", &body(i % 2 == 0))).collect();
    let mut first = [0; 64];
    streams[0].read_exact(&mut first).unwrap();
    assert!(server.metric("num_requests_waiting") > 0.0);
    drop(streams);
    until("everything is free again", || {
        server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0.0
            && server.metric("kv_cache_usage_perc") == 0.0
    });
}

#[test]
fn a_full_queue_is_said_at_once() {
    let queue = QueueLimits { requests: 1, prompt_tokens: 1000 };
    let server = slowed(Options { queue, ..options() }, 1, Duration::from_millis(50));
    let body = long(false).to_string().into_bytes();
    let _running = server.send("POST", "/v1/completions", "", &body);
    until("the first runs", || server.metric("num_requests_running") == 1.0);
    let _waiting = server.send("POST", "/v1/completions", "connection: close\r\n", &body);
    until("the second waits", || server.metric("num_requests_waiting") == 1.0);
    let refused = server.post("/v1/completions", &long(false));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("queue_full")));
    assert!(refused.head.contains("\r\nretry-after: "), "{}", refused.head);
}

#[test]
fn a_request_that_has_waited_too_long_is_told_so() {
    let deadlines = Deadlines { queue: Duration::from_millis(100), whole: Duration::from_secs(600) };
    let server = slowed(Options { deadlines, ..options() }, 1, Duration::from_millis(50));
    let body = long(false).to_string().into_bytes();
    // On a machine that is busy the first may be too late as well.
    let mut running = server.send("POST", "/v1/completions", "", &body);
    until("one runs", || {
        let runs = server.metric("num_requests_running") == 1.0;
        if !runs && server.metric("num_requests_waiting") == 0.0 {
            running = server.send("POST", "/v1/completions", "", &body);
        }
        runs
    });
    let late = server.post("/v1/completions", &long(false));
    assert_eq!((late.status, &late.json()["error"]["code"]), (504, &json!("queue_timeout")));
    until("it has left the queue", || server.metric("num_requests_waiting") == 0.0);
}

#[test]
fn an_answer_that_takes_too_long_is_cut_with_an_error() {
    let deadlines = Deadlines { queue: Duration::from_secs(9), whole: Duration::from_millis(60) };
    let server = slow(Options { deadlines, ..options() }, 1);
    let response = server.post("/v1/completions", &long(true));
    let events = response.events();
    assert_eq!(events.last().expect("an event")["error"]["code"], "deadline", "{}", response.text);
    assert!(!response.text.contains("[DONE]"));
    assert_eq!(server.post("/v1/completions", &long(false)).status, 504);
    until("it is free again", || server.metric("num_requests_running") == 0.0);
}

#[test]
fn a_signal_lets_running_requests_finish() {
    let server = slow(options(), 2);
    let mut stream = server.send("POST", "/v1/completions", "connection: close\r\n", long(true).to_string().as_bytes());
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    // A connection that was there before.
    let mut idle = server.connect();
    server.signal();
    until("it drains", || server.get("/health").status == 503);
    let refused = server.post("/v1/completions", &long(false));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("draining")));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]\n\n") && rest.contains("\"finish_reason\":\"length\""), "{rest}");
    server.wait();
    assert_eq!(idle.read(&mut first).unwrap_or(0), 0);
}

#[test]
fn a_second_signal_ends_now_with_an_error_event() {
    let server = slow(options(), 1);
    let mut stream = server.send("POST", "/v1/completions", "connection: close\r\n", long(true).to_string().as_bytes());
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    server.signal();
    until("it drains", || server.get("/health").status == 503);
    server.signal();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"code\":\"draining\"") && !rest.contains("[DONE]"), "{rest}");
    server.wait();
}

#[test]
fn keys_open_what_is_not_free() {
    let server = Server::new(Options { api_keys: "secret\n".into(), ..options() }, 1);
    let refused = server.get("/v1/models");
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (401, &json!("invalid_api_key")));
    assert_eq!((server.get("/health").status, server.get("/metrics").status), (200, 200));
    // A browser has no key before it shows the page.
    for path in ["/", "/page/style.css", "/page/chat.mjs"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert_eq!(server.get("/page/keys").status, 401);
    let header = "authorization: Bearer secret\r\nconnection: close\r\n";
    assert_eq!(Response::read(server.send("GET", "/v1/models", header, b"")).status, 200);
}

#[test]
fn a_device_that_fails_is_told_to_everybody_at_once() {
    let server = failing(false);
    let body = |stream| long(stream).to_string().into_bytes();
    let send = |stream| server.send("POST", "/v1/completions", "connection: close\r\n", &body(stream));
    // One that streams, one that does not, and one that waits for its turn.
    let waiting = [send(true), send(false), send(false)].map(|stream| thread::spawn(move || Response::read(stream)));
    let answers = waiting.map(|thread| thread.join().unwrap());
    for answer in answers {
        assert!(
            answer.text.contains("an illegal memory access") && answer.text.contains("internal_error"),
            "{answer:?}"
        );
        assert!(!answer.text.contains("[DONE]"));
    }
    let health = server.get("/health");
    assert_eq!((health.status, &health.json()["error"]["code"]), (503, &json!("failed")));
    assert_eq!(server.post("/v1/completions", &long(false)).status, 503);
}

#[test]
fn a_panic_is_told_too() {
    let server = failing(true);
    let answer = server.post("/v1/completions", &long(true));
    assert!(answer.text.contains("the engine has ended") && !answer.text.contains("[DONE]"), "{}", answer.text);
    until("it is told", || server.get("/health").status == 503);
    assert!(server.get("/health").text.contains("panicked"));
}

#[test]
fn prefixes_are_kept_from_those_with_another_salt() {
    let server = Server::new(options(), 2);
    let cached = |salt: Value| {
        let system = json!({ "role": "system", "content": "Be brief. ".repeat(5) });
        let messages = json!([system, { "role": "user", "content": "Hi" }]);
        let request = json!({ "messages": messages, "max_tokens": 1, "cache_salt": salt });
        let answer = server.post("/v1/chat/completions", &request).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    };
    assert_eq!(cached(json!("a")), 0);
    assert!(cached(json!("a")) > 0);
    assert_eq!((cached(json!("b")), cached(Value::Null)), (0, 0));
}
