//! llama-server's own paths: events right to the byte, the same text as through OpenAI's API, and what its web UI reads
//! and sends.

use std::thread;

use gemma4c_serve::Options;
use serde_json::{Value, json};

use crate::slow::{long, slow, until};
use crate::support::{Response, Server, options};

/// The id of a word that is one token.
fn token(server: &Server, word: &str) -> u64 {
    let tokens = server.post("/tokenize", &json!({ "content": word })).json();
    let [token] = tokens["tokens"].as_array().unwrap().as_slice() else { panic!("{tokens}") };
    token.as_u64().unwrap()
}

/// Looks at the times of an answer and replaces them.
fn normalised(text: &str, timings: &Value) -> String {
    let of = |name: &str| timings[name].as_f64().unwrap_or_else(|| panic!("{name}: {timings}"));
    assert!(of("prompt_ms") > 0.0 && of("predicted_ms") > 0.0, "{timings}");
    for part in ["prompt", "predicted"] {
        let (count, time) = (of(&format!("{part}_n")), of(&format!("{part}_ms")));
        assert!((of(&format!("{part}_per_token_ms")) - time / count).abs() < 1e-6, "{timings}");
        assert!((of(&format!("{part}_per_second")) - count / time * 1e3).abs() < 1e-3, "{timings}");
    }
    // As text: a number that is read and written again may end in another digit.
    let start = text.find("\"timings\":").expect("timings") + "\"timings\":".len();
    let end = start + text[start..].find('}').expect("their end") + 1;
    format!("{}TIMINGS{}", &text[..start], &text[end..])
}

#[test]
fn events_are_right_to_the_byte() {
    let server = Server::new(options(), 1);
    let the = token(&server, " the");
    let mut request = json!({
        "prompt": "Once", "n_predict": 2, "temperature": 0, "seed": 7, "logit_bias": [[the, 100]], "stream": true,
    });
    let prompt = server.post("/tokenize", &json!({ "prompt": "Once" })).json();
    let text = server.post("/detokenize", &json!({ "tokens": prompt["tokens"] })).json()["content"].clone();
    let streamed = server.post("/completion", &request);
    assert!(streamed.head.contains("\r\ncontent-type: text/event-stream"), "{}", streamed.head);
    let last = streamed.events().pop().unwrap();
    let settings = "{\"n_predict\":2,\"max_tokens\":2,\"seed\":7,\"temperature\":0.0,\"top_k\":64,\"top_p\":0.95,\"min_p\":0.0,\"repeat_last_n\":-1,\"repeat_penalty\":1.0,\"presence_penalty\":0.0,\"frequency_penalty\":0.0,\"stop\":[],\"n_probs\":0,\"stream\":STREAM,\"n_ctx\":512}";
    let rest = |stream: bool, cached: u64| {
        format!(
            "\"model\":\"tiny\",\"tokens_predicted\":2,\"tokens_evaluated\":{},\"tokens_cached\":{cached},\"truncated\":false,\"stop_type\":\"limit\",\"stopping_word\":\"\",\"generation_settings\":{},\"prompt\":{text},\"timings\":TIMINGS}}",
            prompt["count"],
            settings.replace("STREAM", &stream.to_string()),
        )
    };
    let piece = format!("data: {{\"index\":0,\"content\":\" the\",\"tokens\":[{the}],\"stop\":false}}\n\n");
    let expected = format!(
        "{piece}{piece}data: {{\"index\":0,\"content\":\"\",\"tokens\":[],\"stop\":true,{}\n\n",
        rest(true, last["tokens_cached"].as_u64().unwrap())
    );
    assert_eq!(normalised(&streamed.text, &last["timings"]), expected);
    request["stream"] = false.into();
    for (more, tokens) in [(json!(false), "[]".into()), (json!(true), format!("[{the},{the}]"))] {
        request["return_tokens"] = more;
        for path in ["/completion", "/completions"] {
            let whole = server.post(path, &request);
            let answer = whole.json();
            let cached = answer["tokens_cached"].as_u64().unwrap();
            let expected = format!(
                "{{\"index\":0,\"content\":\" the the\",\"tokens\":{tokens},\"stop\":true,{}",
                rest(false, cached)
            );
            assert_eq!(normalised(&whole.text, &answer["timings"]), expected);
            assert_eq!(answer["timings"]["cache_n"], cached);
        }
    }
}

#[test]
fn the_same_request_has_the_same_text_as_through_openais_api() {
    let server = Server::new(options(), 2);
    for seed in 0..3 {
        let ours = json!({
            "prompt": "Once upon", "seed": seed, "max_tokens": 20, "top_k": 30, "top_p": 0.9, "min_p": 0.01,
            "temperature": 1.5, "repetition_penalty": 1.1, "repeat_last_n": 5, "frequency_penalty": 0.25,
            "stop": ["e"], "logit_bias": { "300": -5 },
        });
        let ours = server.post("/v1/completions", &ours).json();
        for stream in [true, false] {
            let request = json!({
                "prompt": "Once upon", "seed": seed, "n_predict": 20, "top_k": 30, "top_p": 0.9, "min_p": 0.01,
                "temperature": 1.5, "repeat_penalty": 1.1, "repeat_last_n": 5, "frequency_penalty": 0.25,
                "stop": ["e"], "logit_bias": [[300, -5]], "stream": stream, "typical_p": 1.0, "mirostat": 0,
                "cache_prompt": seed == 0, "id_slot": -1, "samplers": ["top_k", "top_p"], "grammar": "",
            });
            let (text, last) = joined(&server.post("/completion", &request), stream);
            assert_eq!(json!(text), ours["choices"][0]["text"]);
            let word = if last["stop_type"] == "word" { "e" } else { "" };
            assert_eq!(last["stopping_word"], word, "{last}");
            let is_cut = last["stop_type"] == "limit";
            assert_eq!(is_cut, ours["choices"][0]["finish_reason"] == "length", "{last}");
        }
        // A rendered chat, continued, is the chat's answer.
        let messages = json!([{ "role": "system", "content": "Be brief" }, { "role": "user", "content": "Hi" }]);
        let template = server.post("/apply-template", &json!({ "messages": messages })).json();
        assert!(template["prompt"].as_str().unwrap().starts_with("<|turn>system\nBe brief<turn|>\n"), "{template}");
        let request = json!({ "prompt": template["prompt"], "seed": seed, "n_predict": 12 });
        let chat = json!({ "messages": messages, "seed": seed, "max_tokens": 12 });
        let chat = server.post("/v1/chat/completions", &chat).json();
        let answer = server.post("/completion", &request).json();
        assert_eq!(answer["content"], chat["choices"][0]["message"]["content"]);
        assert_eq!(answer["tokens_evaluated"], chat["usage"]["prompt_tokens"]);
        // The same prompt as ids, and with its first token said by the client.
        let ids = server.post("/tokenize", &json!({ "messages": messages })).json()["tokens"].clone();
        let with_bos = format!("<bos>{}", template["prompt"].as_str().unwrap());
        for prompt in [ids, json!(with_bos)] {
            let again = server.post("/completion", &json!({ "prompt": prompt, "seed": seed, "n_predict": 12 })).json();
            assert_eq!((&again["content"], &again["prompt"]), (&answer["content"], &answer["prompt"]));
        }
    }
}

/// All content of an answer, and its last object.
fn joined(response: &Response, stream: bool) -> (String, Value) {
    assert_eq!(response.status, 200, "{}", response.text);
    let pieces = if stream { response.events() } else { vec![response.json()] };
    let text = pieces.iter().map(|piece| piece["content"].as_str().unwrap()).collect();
    assert!(pieces[..pieces.len() - 1].iter().all(|piece| piece["stop"] == false));
    let last = pieces.last().unwrap().clone();
    assert_eq!(last["stop"], true);
    (text, last)
}

#[test]
fn probabilities_schemas_and_caches_are_as_asked_for() {
    let server = Server::new(options(), 1);
    let the = token(&server, " the");
    for stream in [false, true] {
        let bias = json!([[the, 100]]);
        let request = json!({ "prompt": "A", "n_predict": 3, "n_probs": 2, "logit_bias": bias, "stream": stream });
        let response = server.post("/completion", &request);
        let pieces = if stream { response.events() } else { vec![response.json()] };
        let listed = pieces.iter().flat_map(|piece| piece["completion_probabilities"].as_array().into_iter().flatten());
        let listed: Vec<&Value> = listed.collect();
        assert_eq!(listed.len(), 3, "{}", response.text);
        for entry in listed {
            let top = entry["top_logprobs"].as_array().unwrap();
            assert!(top.len() == 2 && top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64(), "{entry}");
            for entry in top.iter().chain([entry]) {
                assert!(entry["id"].is_u64() && entry["token"].is_string() && entry["bytes"].is_array(), "{entry}");
                assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
            }
        }
    }
    assert!(
        !server.post("/completion", &json!({ "prompt": "A", "n_predict": 1, "n_probs": 0 })).text.contains("probab")
    );
    let schema = json!({ "prompt": "A", "json_schema": { "enum": [1, 2] }, "n_predict": 5 });
    let answer = server.post("/completion", &schema).json();
    assert!(["1", "2"].contains(&answer["content"].as_str().unwrap()) && answer["stop_type"] == "eos", "{answer}");
    // A prefix is kept for the next unless a request says no.
    let long = "Once upon a time there was a king. ".repeat(4);
    let messages = json!([{ "role": "system", "content": long }, { "role": "user", "content": "Hi" }]);
    let prompt = server.post("/tokenize", &json!({ "messages": messages })).json()["tokens"].clone();
    server.post("/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 1 }));
    let cached = |more: bool| {
        let request = json!({ "prompt": prompt, "n_predict": 1, "cache_prompt": more });
        server.post("/completion", &request).json()["tokens_cached"].as_u64().unwrap()
    };
    assert!(cached(true) > 0);
    assert_eq!(cached(false), 0);
    // Each piece of a stream says what it took, where that is asked for.
    let request =
        json!({ "prompt": "A", "n_predict": 2, "stream": true, "timings_per_token": true, "ignore_eos": true });
    let events = server.post("/completion", &request).events();
    let counts: Vec<u64> = events.iter().map(|event| event["timings"]["predicted_n"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.last() == Some(&2), "{counts:?}");
}

#[test]
fn bad_fields_are_refused_by_name() {
    let server = Server::new(options(), 1);
    for (more, param) in [
        (json!({ "prompt": null }), "prompt"),
        (json!({ "prompt": {} }), "prompt"),
        (json!({ "prompt": ["a", "b"] }), "prompt"),
        (json!({ "prompt": [[1], [2]] }), "prompt"),
        (json!({ "prompt": [2, 99_999_999] }), "prompt"),
        (json!({ "prompt": [2, -1] }), "prompt"),
        (json!({ "prompt": { "prompt_string": "a", "multimodal_data": ["AAAA"] } }), "prompt"),
        (json!({ "n_predict": -2 }), "n_predict"),
        (json!({ "n_predict": "many" }), "n_predict"),
        (json!({ "temperature": 9 }), "temperature"),
        (json!({ "seed": "x" }), "seed"),
        (json!({ "stop": 7 }), "stop"),
        (json!({ "stop": vec!["a"; 65] }), "stop"),
        (json!({ "n_probs": 50 }), "n_probs"),
        (json!({ "n_probs": "two" }), "n_probs"),
        (json!({ "repeat_penalty": 0 }), "repeat_penalty"),
        (json!({ "repeat_last_n": 1.5 }), "repeat_last_n"),
        (json!({ "json_schema": { "type": "cat" } }), "json_schema"),
        (json!({ "grammar": "root ::= \"a\"" }), "grammar"),
        (json!({ "grammar": 1 }), "grammar"),
        (json!({ "logit_bias": [[1]] }), "logit_bias"),
        (json!({ "logit_bias": 1 }), "logit_bias"),
        (json!({ "logit_bias": [[1, 500]] }), "logit_bias"),
        (json!({ "stream": 1 }), "stream"),
        (json!({ "return_tokens": 1 }), "return_tokens"),
        (json!({ "cache_prompt": "no" }), "cache_prompt"),
        (json!({ "timings_per_token": "no" }), "timings_per_token"),
        (json!({ "mirostat": 2 }), "mirostat"),
        (json!({ "dry_multiplier": -1 }), "dry_multiplier"),
        (json!({ "lora": [{ "id": 0 }] }), "lora"),
        (json!({ "post_sampling_probs": true }), "post_sampling_probs"),
    ] {
        let mut request = json!({ "prompt": "Hi", "n_predict": 2 });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post("/completion", &request);
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!(param)), "{more} {error}");
        assert!(error["message"].as_str().unwrap().starts_with(param), "{error}");
    }
    let none = server.post("/apply-template", &json!({}));
    assert_eq!((none.status, &none.json()["error"]["param"]), (400, &json!("messages")));
    let long = server.post("/completion", &json!({ "prompt": "x ".repeat(10 << 20) }));
    assert_eq!(long.json()["error"]["code"], "context_length_exceeded");
    // `false` is never.
    let request = json!({ "prompt": "Hi", "n_predict": 2, "logit_bias": [[300, false]] });
    assert_eq!(server.post("/completion", &request).status, 200);
}

#[test]
fn props_and_slots_say_what_runs() {
    let server = slow(options(), 2);
    let props = server.get("/props").json();
    let plan = &crate::support::TINY.plan;
    assert_eq!(props["default_generation_settings"]["n_ctx"], 512);
    let params = &props["default_generation_settings"]["params"];
    assert_eq!((&params["temperature"], &params["top_k"], &params["n_predict"]), (&json!(1.0), &json!(64), &json!(-1)));
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(2), &json!(plan.model.files[0].path)));
    assert_eq!(props["modalities"], json!({ "vision": false, "audio": false, "video": false }));
    assert_eq!(props["chat_template"], *plan.vocab.as_ref().unwrap().chat_template.as_ref().unwrap());
    assert_eq!((&props["bos_token"], &props["model_alias"]), (&json!("<bos>"), &json!("tiny")));
    let busy = || {
        let slots = server.get("/slots").json();
        let slots = slots.as_array().unwrap().clone();
        assert!(slots.len() == 2 && slots.iter().enumerate().all(|(id, slot)| slot["id"] == id));
        slots.iter().filter(|slot| slot["is_processing"] == true).count()
    };
    assert_eq!((busy(), server.get("/slots?fail_on_no_slot=1").status), (0, 200));
    thread::scope(|scope| {
        let running = [(); 2].map(|()| scope.spawn(|| server.post("/v1/completions", &long(false)).status));
        until("both slots are busy", || busy() == 2);
        assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 503);
        assert_eq!(running.map(|thread| thread.join().unwrap()), [200, 200]);
    });
    until("they are free", || busy() == 0);
}

/// As the web UI of llama-server sends it, with all of its settings.
#[test]
fn its_web_ui_gets_an_answer_with_timings() {
    let server = Server::new(Options { max_output: 9, ..options() }, 1);
    let mut request = json!({
        "messages": [{ "role": "system", "content": "Be brief" }, { "role": "user", "content": [{ "type": "text", "text": "Hi" }] }],
        "stream": true, "return_progress": true, "reasoning_format": "auto", "model": "tiny", "temperature": 0.8,
        "max_tokens": -1, "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
        "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": 64, "repeat_penalty": 1.1,
        "presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        "backend_sampling": false, "timings_per_token": true,
    });
    let answer = server.post("/v1/chat/completions", &request);
    assert_eq!(answer.status, 200, "{}", answer.text);
    let events = answer.events();
    let last = events.last().unwrap();
    assert!(!last["choices"][0]["finish_reason"].is_null(), "{last}");
    let count = last["timings"]["predicted_n"].as_u64().unwrap();
    assert!((1..=9).contains(&count) && last["timings"]["prompt_n"].as_u64().unwrap() > 0, "{last}");
    request["timings_per_token"] = false.into();
    assert!(!server.post("/v1/chat/completions", &request).text.contains("timings"));
    // Its penalty is that of the others under another name.
    let text = |name: &str, value: f64| {
        let request = json!({ "prompt": "Hi", "seed": 1, "max_tokens": 30, "temperature": 0, name: value });
        server.post("/v1/completions", &request).json()["choices"][0]["text"].clone()
    };
    assert_eq!(text("repeat_penalty", 3.0), text("repetition_penalty", 3.0));
    assert_ne!(text("repeat_penalty", 3.0), text("repeat_penalty", 1.0));
}
