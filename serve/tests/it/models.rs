//! Several models in one server: loaded when they are asked for, unloaded when another needs the room or nobody asks.

use std::thread;
use std::time::{Duration, Instant};

use gemma4c_serve::{Options, Room};
use serde_json::{Value, json};

use crate::support::{Server, options};

const NAMES: [&str; 3] = ["one", "two", "three"];

fn server(room: Room, sequences: u32) -> Server {
    // Another context makes another plan; they answer alike.
    Server::of_models(&[("one", 512), ("two", 256), ("three", 384)], Options { room, ..options() }, sequences)
}

fn ask(server: &Server, model: &str, seed: usize) -> Value {
    let prompt = format!("It is a truth universally acknowledged, {seed}");
    let body = json!({ "model": model, "prompt": prompt, "max_tokens": 8, "seed": seed, "temperature": 1 });
    let response = server.post("/v1/completions", &body);
    assert_eq!(response.status, 200, "{}", response.text);
    let answer = response.json();
    assert_eq!(answer["model"], model);
    answer["choices"][0]["text"].clone()
}

/// The models in memory.
fn loaded(server: &Server) -> Vec<String> {
    let list = server.get("/v1/models").json();
    let models = list["data"].as_array().expect("a list").iter();
    let here = models.filter(|model| model["status"]["value"] == "loaded");
    here.map(|model| model["id"].as_str().expect("a name").to_owned()).collect()
}

fn loads(server: &Server, model: &str) -> u64 {
    let text = server.get("/metrics").text;
    let name = format!("gemma4c:model_loads_total{{model_name=\"{model}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).expect("a count")
}

#[test]
fn a_model_comes_when_it_is_asked_for_and_the_oldest_goes() {
    let server = server(Room { models: 2, ..Room::default() }, 2);
    assert_eq!(loaded(&server), ["one"]);
    let alone = ask(&server, "one", 1);
    assert_eq!(ask(&server, "two", 1), alone);
    assert_eq!(loaded(&server), ["one", "two"]);
    ask(&server, "one", 2);
    ask(&server, "three", 1);
    assert_eq!(loaded(&server), ["one", "three"], "two was not asked for the longest");
    assert_eq!(ask(&server, "two", 1), alone, "a model that comes again answers as before");
    assert_eq!((loads(&server, "one"), loads(&server, "two"), loads(&server, "three")), (1, 2, 1));
    // Who names nobody gets the first.
    let body = json!({ "prompt": "x", "max_tokens": 1 });
    assert_eq!(server.post("/v1/completions", &body).json()["model"], "one");
    // A tag that says nothing is left out.
    assert_eq!(server.post("/v1/completions", &json!({ "model": "two:latest", "prompt": "x" })).status, 200);
    let unknown = server.post("/v1/completions", &json!({ "model": "four", "prompt": "x" }));
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["message"], r#"there is no model "four" here; there is "one", "two", "three""#);
    assert_eq!(unknown.json()["error"]["param"], "model");
    let facts = server.get("/version").json();
    assert_eq!(facts["models"].as_array().map(Vec::len), Some(3));
    assert_eq!((&facts["model"], &facts["models"][1]["context"]), (&json!("one"), &json!(256)));
}

/// Every request is answered, each as if its model were alone, although they take each other's place all the time.
#[test]
fn requests_that_alternate_lose_nothing() {
    let server = server(Room::default(), 4);
    let alone: Vec<Value> = (0..6).map(|seed| ask(&server, "one", seed)).collect();
    thread::scope(|scope| {
        for client in 0..6 {
            let (server, alone) = (&server, &alone);
            scope.spawn(move || {
                for turn in 0..6 {
                    let seed = (client + turn) % 6;
                    assert_eq!(ask(server, NAMES[(client + 2 * turn) % 3], seed), alone[seed]);
                }
            });
        }
    });
    assert_eq!(loaded(&server).len(), 1);
    let text = server.get("/metrics").text;
    for name in NAMES {
        assert!(loads(&server, name) >= 2, "{text}");
        assert!(text.contains(&format!("vllm:num_requests_running{{model_name=\"{name}\"}} 0\n")), "{text}");
    }
    assert_eq!(text.matches("# TYPE vllm:num_requests_running gauge").count(), 1);
}

/// What the dashboard asks for is what the server tells.
#[test]
fn every_metric_of_the_dashboard_is_told() {
    let server = server(Room::default(), 1);
    let text = server.get("/metrics").text;
    let dashboard: Value = serde_json::from_str(include_str!("../../../deploy/grafana.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let expressions: Vec<&str> = targets.map(|target| target["expr"].as_str().expect("a text")).collect();
    assert!(expressions.len() >= 12, "{expressions:?}");
    let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    for expression in expressions {
        let names = expression.split(|c| !is_part_of_name(c)).filter(|word| word.contains(':'));
        let names: Vec<&str> = names.collect();
        assert!(!names.is_empty(), "{expression}");
        for name in names {
            assert!(text.contains(&format!("\n{name}{{model_name=\"one\"")), "{name} of {expression}");
        }
    }
}

#[test]
fn a_stream_keeps_its_model_until_its_end() {
    let server = server(Room::default(), 1);
    let body = json!({ "model": "one", "prompt": "x", "max_tokens": 200, "stream": true, "ignore_eos": true });
    let stream = server.send("POST", "/v1/completions", "connection: close\r\n", body.to_string().as_bytes());
    let read = thread::spawn(move || crate::support::Response::read(stream));
    while server.get("/metrics").text.contains("vllm:num_requests_running{model_name=\"one\"} 0") {
        thread::sleep(Duration::from_millis(2));
    }
    ask(&server, "two", 1);
    assert_eq!(loaded(&server), ["two"]);
    let answer = read.join().expect("a reader");
    assert!(answer.text.ends_with("data: [DONE]\n\n"), "{}", answer.text);
    assert_eq!(answer.events().iter().filter(|event| event["choices"][0]["finish_reason"] == "length").count(), 1);
}

#[test]
fn a_model_that_nobody_uses_goes() {
    let idle = Duration::from_millis(300);
    let server = server(Room { models: 3, idle: Some(idle), bytes: None }, 1);
    let before = ask(&server, "two", 3);
    let started = Instant::now();
    while !loaded(&server).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", loaded(&server));
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(ask(&server, "two", 3), before);
}
