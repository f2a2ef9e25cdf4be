//! The stateless part of the Responses API: the order of its events, and that they add up to the whole.

use serde_json::{Value, json};

use crate::support::{Response, Server, options};

/// Names and data of a stream's events.
fn events(response: &Response) -> Vec<(String, Value)> {
    let event = |text: &str| {
        let (name, data) = text.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        let name = name.strip_prefix("event: ").expect("a name").to_owned();
        assert_eq!(data["type"], name.as_str());
        (name, data)
    };
    response.text.split("\n\n").filter(|text| !text.is_empty()).map(event).collect()
}

/// Ids and times are each answer's own.
fn without_ids(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let own = ["id", "call_id", "created_at", "cached_tokens", "cache_write_tokens"];
            fields
                .iter()
                .filter(|(key, _)| !own.contains(&key.as_str()))
                .map(|(k, v)| (k.clone(), without_ids(v)))
                .collect()
        }
        Value::Array(list) => list.iter().map(without_ids).collect(),
        other => other.clone(),
    }
}

#[test]
fn events_come_in_order_and_add_up_to_the_whole() {
    let server = Server::new(options(), 2);
    let tool = json!({ "type": "function", "name": "now", "parameters": { "type": "object", "properties": {} } });
    let schema = json!({ "format": { "type": "json_schema", "name": "x", "schema": { "enum": ["a", "b"] } } });
    for (more, names) in [
        (
            json!({ "text": schema }),
            &[
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
            ][..],
        ),
        (
            json!({ "tools": [tool, { "type": "web_search" }], "tool_choice": "required", "parallel_tool_calls": false }),
            &["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"],
        ),
    ] {
        let mut request = json!({ "model": "tiny", "instructions": "Be brief", "input": "Hi", "seed": 3, "store": false, "max_output_tokens": 60 });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let whole = server.post("/v1/responses", &request).json();
        assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")), "{whole}");
        request["stream"] = json!(true);
        let streamed = server.post("/v1/responses", &request);
        let events = events(&streamed);
        for (number, (_, data)) in events.iter().enumerate() {
            assert_eq!(data["sequence_number"], number);
        }
        let mut expected = vec!["response.created".to_owned(), "response.in_progress".into()];
        expected.extend(names.iter().map(|name| format!("response.{name}")));
        expected.push("response.completed".into());
        let mut found: Vec<String> = events.iter().map(|(name, _)| name.clone()).collect();
        found.dedup();
        assert_eq!(found, expected);
        let last = &events.last().unwrap().1["response"];
        // What the first has written, the second has read.
        let [written, read] = [&whole, last].map(|response| {
            let details = &response["usage"]["input_tokens_details"];
            ["cached_tokens", "cache_write_tokens"].map(|name| details[name].as_u64().unwrap())
        });
        assert!(written[0] + written[1] > 0, "{whole}");
        assert_eq!(read, [written[0] + written[1], 0]);
        assert_eq!(without_ids(last), without_ids(&whole));
        assert_eq!(last["output"][0], events[events.len() - 2].1["item"]);
        assert!(!streamed.text.contains("[DONE]"));
    }
}

#[test]
fn history_comes_with_every_request() {
    let server = Server::new(options(), 2);
    let input = json!([
        { "role": "user", "content": [{ "type": "input_text", "text": "What time is it?" }] },
        { "type": "reasoning", "summary": [], "content": [{ "type": "reasoning_text", "text": "Hm" }] },
        { "type": "function_call", "call_id": "a", "name": "now", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "a", "output": "noon" },
        { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "Noon", "annotations": [] }] },
        { "type": "message", "role": "user", "content": "Thanks" },
    ]);
    let request =
        json!({ "input": input, "max_output_tokens": 2, "temperature": 0, "include": [], "prompt_cache_key": "x" });
    let answer = server.post("/v1/responses", &request).json();
    assert!(["completed", "incomplete"].contains(&answer["status"].as_str().unwrap()), "{answer}");
    if answer["status"] == "incomplete" {
        assert_eq!(answer["incomplete_details"]["reason"], "max_output_tokens");
    }
    let request = json!({ "input": "Hi", "max_output_tokens": 1, "temperature": 0.7, "top_p": 0.95 });
    let text = server.post("/v1/responses", &request).text;
    assert!(text.contains("\"temperature\":0.7,") && text.contains("\"top_p\":0.95,"), "{text}");
    for (more, word) in [
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "background": true }), "background"),
        (json!({ "input": 7 }), "input"),
        (json!({ "input": [{ "type": "function_call" }] }), "input[0]"),
        (json!({ "text": { "format": { "type": "xml" } } }), "xml"),
    ] {
        let mut request = json!({ "input": "Hi" });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = server.post("/v1/responses", &request);
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert!(refused.json()["error"]["message"].as_str().unwrap().contains(word), "{}", refused.text);
    }
}
