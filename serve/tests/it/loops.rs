//! Answers that go round in circles.

use serde_json::{Value, json};

use crate::support::{Response, Server, options};

/// A model that says one token for ever.
fn ask(server: &Server, more: Value) -> Response {
    let mut body = json!({ "prompt": "x", "max_tokens": 1200, "logit_bias": { "5": 100 }, "temperature": 0 });
    body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
    server.post("/v1/completions", &body)
}

#[test]
fn an_answer_that_goes_round_ends_and_says_why() {
    let server = Server::of_models(&[("long", 2048)], options(), 2);
    let (finish, tokens) = ("/choices/0/finish_reason", "/usage/completion_tokens");
    let of = |answer: &Value, path: &str| answer.pointer(path).cloned().expect("a field");
    let ended = ask(&server, json!({})).json();
    assert_eq!((of(&ended, finish), of(&ended, tokens)), (json!("repetition"), json!(1025)));
    for more in [json!({ "detect_repetition": false }), json!({ "ignore_eos": true })] {
        let whole = ask(&server, more).json();
        assert_eq!((of(&whole, finish), of(&whole, tokens)), (json!("length"), json!(1200)));
    }
    let streamed = ask(&server, json!({ "stream": true })).events();
    assert_eq!(streamed.last().map(|event| of(event, finish)), Some(json!("repetition")));
    let wrong = ask(&server, json!({ "detect_repetition": 1 }));
    assert_eq!((wrong.status, wrong.json()["error"]["param"].clone()), (400, json!("detect_repetition")));
}

#[test]
fn dry_breaks_a_circle() {
    let server = Server::of_models(&[("long", 512)], options(), 2);
    let body = json!({ "max_tokens": 60, "detect_repetition": false, "logprobs": 0 });
    let tokens = |more: Value| {
        let mut body = body.clone();
        body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
        ask(&server, body).json()["choices"][0]["logprobs"]["tokens"].as_array().expect("tokens").clone()
    };
    let round = tokens(json!({}));
    assert!(round.iter().all(|token| *token == round[0]), "{round:?}");
    for off in [json!({ "dry_multiplier": 0 }), json!({ "dry_multiplier": 9, "dry_penalty_last_n": 0 })] {
        assert_eq!(tokens(off), round);
    }
    let longest_run = |tokens: &[Value]| {
        let runs = tokens.chunk_by(|one, other| one == other);
        runs.map(<[Value]>::len).max().expect("tokens")
    };
    // The fourth in a row costs 60, the fifth 105, which is more than it is worth.
    let dry = tokens(json!({ "dry_multiplier": 60 }));
    assert_eq!(longest_run(&dry), 4, "{dry:?}");
    let none = json!({ "dry_multiplier": 60, "dry_sequence_breakers": [round[0]] });
    assert_eq!(tokens(none), round, "nothing goes across a breaker");
    // The same at llama-server's own path, whose names these are.
    let own = json!({ "prompt": "x", "n_predict": 60, "logit_bias": [[5, 100]], "temperature": 0, "return_tokens": true, "dry_multiplier": 60 });
    let own = server.post("/completion", &own).json()["tokens"].as_array().expect("tokens").clone();
    assert_eq!((own.len(), longest_run(&own)), (dry.len(), 4), "{own:?}");
    for (field, wrong) in [
        ("dry_multiplier", json!(-1)),
        ("dry_base", json!(0.5)),
        ("dry_allowed_length", json!("two")),
        ("dry_penalty_last_n", json!(-2)),
        ("dry_sequence_breakers", json!([1])),
    ] {
        let refused = ask(&server, json!({ field: wrong }));
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(field)));
    }
}
