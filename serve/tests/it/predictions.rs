//! Drafts: answers are the same with them, and they are counted.

use serde_json::{Value, json};

use crate::support::{Server, options};

/// What a client gets, but for its name, its time and what was guessed.
fn answer(server: &Server, request: &Value) -> (Value, Value) {
    let response = server.post("/v1/chat/completions", request);
    assert_eq!(response.status, 200, "{}", response.text);
    let mut answer = response.json();
    let details = answer["usage"]["completion_tokens_details"].take();
    (json!([answer["choices"], answer["usage"]]), details)
}

/// Grammars, schemas, biases, penalties, stop strings, log probabilities and several choices.
#[test]
fn answers_are_the_same_with_drafts() {
    let (plain, drafting) = (Server::new(options(), 4), Server::drafting(options(), 4, 3));
    let mut drafted = 0;
    for form in [
        json!({}),
        json!({ "temperature": 1.0, "seed": 3, "n": 3, "logprobs": true, "top_logprobs": 2 }),
        json!({ "structured_outputs": { "regex": "(ab|abc)+" } }),
        json!({ "structured_outputs": { "regex": "(ab|abc)+" }, "temperature": 1.0, "seed": 1, "n": 2 }),
        json!({ "structured_outputs": { "json": { "type": "array", "items": { "type": "integer" } } } }),
        json!({ "structured_outputs": { "regex": "(xy)*z?" }, "stop": ["yxyxyx"] }),
        json!({ "presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 1.0, "seed": 5 }),
    ] {
        let mut request = json!({
            "model": "tiny", "messages": [{ "role": "user", "content": "abababab xyxyxy" }], "temperature": 0,
            "max_tokens": 24,
        });
        for (key, value) in form.as_object().expect("fields") {
            request[key] = value.clone();
        }
        let (expected, details) = answer(&plain, &request);
        assert!(details["accepted_prediction_tokens"].is_null());
        let (ours, details) = answer(&drafting, &request);
        assert_eq!(ours, expected, "{form}");
        drafted += details["accepted_prediction_tokens"].as_u64().unwrap_or(0);
        drafted += details["rejected_prediction_tokens"].as_u64().unwrap_or(0);
    }
    assert!(drafted > 20, "{drafted}");
}

#[test]
fn drafts_are_counted() {
    let server = Server::drafting(options(), 1, 3);
    let token = server.post("/tokenize", &json!({ "content": " the" })).json()["tokens"][0].to_string();
    let request = json!({
        "model": "tiny", "prompt": "x", "logit_bias": { token: 100 }, "temperature": 0, "max_tokens": 12,
    });
    let usage = server.post("/v1/completions", &request).json()["usage"].take();
    // Nothing is known of the first three tokens. Then there are two rounds of four tokens, and one token for which
    // nothing is worth guessing.
    let details = &usage["completion_tokens_details"];
    assert_eq!(
        (&usage["completion_tokens"], &details["accepted_prediction_tokens"], &details["rejected_prediction_tokens"]),
        (&json!(12), &json!(6), &json!(0)),
        "{usage}"
    );
    let metrics = server.get("/metrics").text;
    for line in [
        "vllm:spec_decode_num_drafts_total{model_name=\"tiny\"} 2",
        "vllm:spec_decode_num_draft_tokens_total{model_name=\"tiny\"} 6",
        "vllm:spec_decode_num_accepted_tokens_total{model_name=\"tiny\"} 6",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"tiny\",position=\"2\"} 2",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"tiny\",position=\"3\"} 0",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}\n{metrics}");
    }
}
