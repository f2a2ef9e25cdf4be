//! Adapters that requests choose by name: each request gets what it would get alone, through every API, whatever else
//! runs.

use std::collections::BTreeSet;
use std::thread;

use gemma4c_serve::{Named, Offer, Options, Room, ServeError, start};
use serde_json::{Value, json};

use crate::seats::{NAMES, SEATED, SEATS, ask, listed, loading, metric, named, path, plan, question, requests_of};
use crate::seats::{serve, shown};
use crate::support::{Server, TINY, offer, options};

const ALL: [&str; 6] = ["tiny", "ada", "bea", "cleo", "dora", "eva"];

#[test]
fn a_request_gets_the_adapter_that_it_names_and_no_other() {
    let server = serve(&NAMES, options(), 2);
    let texts: Vec<String> = ALL.iter().map(|model| ask(&server, model, 1)).collect();
    assert_eq!(texts.iter().collect::<BTreeSet<_>>().len(), ALL.len(), "all answers differ: {texts:?}");
    // The model with seats is the model without.
    let without = Server::new(options(), 1);
    assert_eq!(ask(&without, "tiny", 1), texts[0]);
    // An adapter is the same in whichever seat, with whichever others.
    for (name, text) in NAMES.iter().zip(&texts[1..]) {
        let alone = serve(&[name], options(), 1);
        assert_eq!(ask(&alone, name, 1), *text, "{name}");
        assert_eq!(ask(&alone, "tiny", 1), texts[0]);
    }
    // A tag that says nothing is left out; who names nobody gets the model.
    let mut request = question("bea", 1);
    request["model"] = "bea:latest".into();
    assert_eq!(server.post("/v1/completions", &request).json()["choices"][0]["text"], texts[2]);
    request.as_object_mut().unwrap().remove("model");
    let answer = server.post("/v1/completions", &request).json();
    assert_eq!((&answer["model"], &answer["choices"][0]["text"]), (&json!("tiny"), &json!(texts[0])));
    assert_eq!((requests_of(&server, "ada"), requests_of(&server, "bea")), (Some(1), Some(2)));
    let unknown = server.post("/v1/completions", &question("fay", 1));
    let message = r#"there is no model "fay" here; there is "tiny", "ada", "bea", "cleo", "dora", "eva""#;
    assert_eq!((unknown.status, &unknown.json()["error"]["message"]), (404, &json!(message)));
}

/// Under load, with several choices and streams among them.
#[test]
fn five_adapters_and_none_together_say_what_each_says_alone() {
    let server = serve(&NAMES, options(), 4);
    let alone: Vec<Vec<String>> =
        ALL.iter().map(|model| (0..3).map(|seed| ask(&server, model, seed)).collect()).collect();
    thread::scope(|scope| {
        for client in 0..6 {
            let (server, alone) = (&server, &alone);
            scope.spawn(move || {
                for turn in 0..12 {
                    let (at, seed) = ((client + 5 * turn) % ALL.len(), (client + turn) % 3);
                    let mut request = question(ALL[at], seed);
                    match turn % 3 {
                        0 => assert_eq!(ask(server, ALL[at], seed), alone[at][seed]),
                        1 => {
                            request["stream"] = true.into();
                            let events = server.post("/v1/completions", &request).events();
                            assert!(events.iter().all(|event| event["model"] == ALL[at]));
                            let text: String =
                                events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
                            assert_eq!(text, alone[at][seed]);
                        }
                        _ => {
                            request["n"] = 2.into();
                            let answer = server.post("/v1/completions", &request).json();
                            assert_eq!(answer["choices"][0]["text"], alone[at][seed]);
                            assert_ne!(answer["choices"][1]["text"], alone[at][seed]);
                        }
                    }
                }
            });
        }
    });
    assert_eq!((metric(&server, "adapters_loaded"), metric(&server, "adapter_seats_taken")), (5.0, 5.0));
}

/// The same text through each API, under the adapter's name.
#[test]
fn every_api_knows_adapters() {
    let server = serve(&["ada", "bea"], options(), 2);
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let chat = |model: &str| {
        let request = json!({ "model": model, "messages": messages, "temperature": 0, "max_tokens": 9 });
        let answer = server.post("/v1/chat/completions", &request);
        assert_eq!(answer.status, 200, "{}", answer.text);
        (answer.json()["choices"][0]["message"]["content"].clone(), answer.json()["model"].clone())
    };
    let texts = ["tiny", "ada", "bea"].map(|model| chat(model).0);
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
    for (model, text) in [("tiny", &texts[0]), ("ada", &texts[1]), ("bea", &texts[2])] {
        assert_eq!(chat(model).1, model);
        let anthropic = json!({ "model": model, "messages": messages, "temperature": 0, "max_tokens": 9 });
        let anthropic = server.post("/v1/messages", &anthropic).json();
        assert_eq!((&anthropic["content"][0]["text"], &anthropic["model"]), (text, &json!(model)));
        let response = json!({ "model": model, "input": "Hi", "temperature": 0, "max_output_tokens": 9 });
        let response = server.post("/v1/responses", &response).json();
        let said = response.pointer("/output/0/content/0/text").unwrap_or_else(|| panic!("{response}"));
        assert_eq!((said, &response["model"]), (text, &json!(model)));
        let options = json!({ "temperature": 0, "num_predict": 9 });
        let ollama = json!({ "model": model, "messages": messages, "options": options, "stream": false });
        let ollama = server.post("/api/chat", &ollama).json();
        assert_eq!((&ollama["message"]["content"], &ollama["model"]), (text, &json!(model)));
        let generate = json!({ "model": model, "prompt": "Hi", "options": options, "stream": false });
        assert_eq!(server.post("/api/generate", &generate).json()["response"], *text);
        let prompt = server.post("/tokenize", &json!({ "model": model, "messages": messages })).json();
        let llama = json!({ "model": model, "prompt": prompt["tokens"], "n_predict": 9, "temperature": 0 });
        let llama = server.post("/completion", &llama).json();
        assert_eq!((&llama["content"], &llama["model"]), (text, &json!(model)));
        assert_eq!(server.get(&format!("/props?model={model}")).json()["model_alias"], model);
    }
    assert_eq!(server.get("/props?model=cleo").status, 404);
}

#[test]
fn lists_say_what_an_adapter_is_of() {
    let server = serve(&["ada", "bea"], options(), 1);
    let list = server.get("/v1/models").json();
    let [tiny, ada, bea] = list["data"].as_array().unwrap().as_slice() else { panic!("{list}") };
    assert_eq!((&tiny["id"], tiny.get("parent")), (&json!("tiny"), None));
    for (name, model) in [("ada", ada), ("bea", bea)] {
        let expected = [json!(name), json!(shown(name)), json!("tiny"), json!(512)];
        assert_eq!(["id", "root", "parent", "max_model_len"].map(|field| model[field].clone()), expected);
        assert_eq!(server.get(&format!("/v1/models/{name}")).json(), *model);
    }
    assert_eq!(server.get("/v1/models/cleo").status, 404);
    for path in ["/api/tags", "/api/ps"] {
        let list = server.get(path).json();
        let models = list["models"].as_array().unwrap();
        let of = |model: &Value| (model["name"].clone(), model["details"]["parent_model"].clone());
        let listed: Vec<(Value, Value)> = models.iter().map(of).collect();
        let expected = [("tiny:latest", ""), ("ada:latest", "tiny"), ("bea:latest", "tiny")];
        assert_eq!(listed, expected.map(|(name, parent)| (json!(name), json!(parent))));
        let digests: BTreeSet<String> = models.iter().map(|model| model["digest"].to_string()).collect();
        assert_eq!(digests.len(), 3, "{list}");
        assert!(models[1]["size"].as_u64().unwrap() > 0);
    }
    let show = server.post("/api/show", &json!({ "model": "ada" })).json();
    assert_eq!(show["details"]["parent_model"], "tiny");
    assert!(show["modelfile"].as_str().unwrap().contains(&format!("\nADAPTER {}\n", shown("ada"))), "{show}");
    assert_eq!(server.post("/api/pull", &json!({ "model": "bea", "stream": false })).status, 200);
    let version = server.get("/version").json();
    assert_eq!((&version["adapter_seats"], &version["adapter_rank"]), (&json!(SEATS), &json!(16)));
}

/// What one adapter's requests have read is not read by another's.
#[test]
fn a_kept_prefix_is_of_its_adapter_alone() {
    let server = serve(&["ada", "bea"], options(), 1);
    let long = "Once upon a time there was a king. ".repeat(4);
    let messages = json!([{ "role": "system", "content": long }, { "role": "user", "content": "Hi" }]);
    let ask = |model: &str, more: Value| {
        let mut request = json!({ "model": model, "messages": messages, "max_tokens": 6, "temperature": 0 });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post("/v1/chat/completions", &request).json();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        (answer["choices"][0]["message"]["content"].clone(), cached.unwrap_or_else(|| panic!("{answer}")))
    };
    let none = json!({});
    for model in ["ada", "tiny", "bea"] {
        let (text, cached) = ask(model, none.clone());
        assert_eq!(cached, 0, "{model}");
        let (again, cached) = ask(model, none.clone());
        assert!(cached > 0 && again == text, "{model}");
    }
    let half = json!({ "lora": [{ "id": 0, "scale": 0.5 }] });
    assert_eq!(ask("ada", half.clone()).1, 0, "another strength is another adapter");
    assert!(ask("ada", half).1 > 0);
    // Without strength an adapter is the model.
    let (text, _) = ask("tiny", none);
    let off = ask("ada", json!({ "lora": [{ "id": 0, "scale": 0 }] }));
    assert!(off.1 > 0 && off.0 == text);
}

/// llama-server's way to choose: by a number, with a scale.
#[test]
fn a_request_may_choose_by_number() {
    let server = serve(&["ada", "bea"], loading(), 1);
    let list = server.get("/lora-adapters").json();
    let entry =
        |id: u32, name: &str, scale: f64| json!({ "id": id, "name": name, "path": shown(name), "scale": scale });
    assert_eq!(list, json!([entry(0, "ada", 1.0), entry(1, "bea", 1.0)]));
    let complete = |model: &str, lora: Value| {
        let request = json!({ "model": model, "prompt": "Once", "n_predict": 9, "temperature": 0, "ignore_eos": true, "lora": lora });
        let answer = server.post("/completion", &request);
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()["content"].as_str().unwrap().to_owned()
    };
    let none = json!([]);
    let [tiny, ada, bea] = ["tiny", "ada", "bea"].map(|model| complete(model, none.clone()));
    assert!(tiny != ada && tiny != bea && ada != bea);
    assert_eq!(complete("tiny", json!([{ "id": 0, "scale": 1 }])), ada);
    assert_eq!(complete("tiny", json!([{ "id": 0, "scale": 0 }, { "id": 1, "scale": 1.0 }])), bea);
    assert_eq!(complete("tiny", json!([{ "id": 0, "scale": 0 }])), tiny);
    assert_eq!(complete("ada", json!([{ "id": 0, "scale": 0 }])), tiny);
    let stronger = complete("ada", json!([{ "id": 0, "scale": 1.5 }]));
    assert!(stronger != ada && stronger != tiny);
    assert_eq!(complete("tiny", json!([{ "id": 0, "scale": 1.5 }])), stronger);
    let chat = |lora: Value| {
        let messages = json!([{ "role": "user", "content": "Hi" }]);
        let request = json!({ "messages": messages, "temperature": 0, "max_tokens": 6, "lora": lora });
        server.post("/v1/chat/completions", &request).json()["choices"][0]["message"]["content"].clone()
    };
    assert_ne!(chat(json!([{ "id": 1, "scale": 1 }])), chat(none.clone()));
    // The scale of whoever does not say it.
    let set = |body: Value| server.post("/lora-adapters", &body);
    let done = set(json!([{ "id": 0, "scale": 1.5 }]));
    assert_eq!((done.status, done.json()), (200, json!({ "success": true })));
    assert_eq!(server.get("/lora-adapters").json(), json!([entry(0, "ada", 1.5), entry(1, "bea", 1.0)]));
    assert_eq!((complete("ada", none.clone()), complete("bea", none.clone())), (stronger, bea));
    assert_eq!(set(json!([{ "id": 0, "scale": 0 }])).status, 200);
    assert_eq!(complete("ada", none.clone()), tiny);
    for (body, word) in [
        (json!({}), "the body must be a list"),
        (
            json!([{ "id": 7, "scale": 1 }]),
            "lora[0].id: there is no adapter 7 of this model; there is 0 (ada), 1 (bea)",
        ),
        (json!([{ "id": 1, "scale": 2 }, { "id": 2, "scale": 1 }]), "lora[1].id: there is no adapter 2"),
        (json!([{ "id": 0, "scale": "x" }]), "lora[0].scale must be a number"),
    ] {
        let refused = set(body);
        assert!(refused.status == 400 && refused.text.contains(word), "{}", refused.text);
    }
    assert_eq!(server.get("/lora-adapters").json()[1]["scale"], 1.0, "a list is taken whole or not at all");
    for (model, lora, word) in [
        ("tiny", json!([{ "id": 0, "scale": 1 }, { "id": 1, "scale": 1 }]), "lora: a request has one adapter; 2 have"),
        ("tiny", json!([{ "id": 9, "scale": 1 }]), "lora[0].id: there is no adapter 9"),
        ("ada", json!([{ "id": 1, "scale": 1 }]), "the model \\\"ada\\\" is an adapter; 1 is another, \\\"bea\\\""),
        ("tiny", json!("ada"), "lora must be a list"),
    ] {
        for path in ["/completion", "/v1/completions"] {
            let refused = server.post(path, &json!({ "model": model, "prompt": "x", "lora": lora }));
            assert!(refused.status == 400 && refused.text.contains(word), "{path}: {}", refused.text);
            assert_eq!(refused.json()["error"]["param"], "lora");
        }
    }
}

/// A model that has left the memory gets its adapters again, those that came over HTTP too.
#[test]
fn a_model_that_returns_has_its_adapters() {
    let folder = TINY.folder.path();
    let one = offer("one", plan(512, 3), folder, 2, None, |device| device);
    let two = offer("two", plan(256, 2), folder, 2, None, |device| device);
    let offers = vec![Offer { adapters: named(&["ada", "bea"]), ..one }, Offer { adapters: named(&["cleo"]), ..two }];
    let server = Server::of(offers, Options { room: Room { models: 1, ..Room::default() }, ..loading() });
    let names = ["one", "ada", "bea", "two", "cleo"];
    let texts = names.map(|name| ask(&server, name, 4));
    assert_eq!(texts.iter().collect::<BTreeSet<_>>().len(), 4, "one and two are the same model: {texts:?}");
    assert_eq!(texts[0], texts[3]);
    let load = json!({ "lora_name": "dora", "lora_path": "dora.gguf", "model": "one" });
    assert_eq!(server.post("/v1/load_lora_adapter", &load).status, 200);
    let dora = ask(&server, "dora", 4);
    let load = json!({ "lora_name": "other", "lora_path": "dora.gguf", "model": "two" });
    assert_eq!(server.post("/v1/load_lora_adapter", &load).status, 200);
    assert_eq!(ask(&server, "other", 4), dora);
    for _ in 0..2 {
        assert_eq!(names.map(|name| ask(&server, name, 4)), texts);
        assert_eq!((ask(&server, "dora", 4), ask(&server, "other", 4)), (dora.clone(), dora.clone()));
    }
    // One that goes while its model is away does not come back.
    ask(&server, "two", 4);
    assert_eq!(server.post("/v1/unload_lora_adapter", &json!({ "lora_name": "ada" })).status, 200);
    assert_eq!(listed(&server), ["bea", "dora", "cleo", "other"]);
    assert_eq!(ask(&server, "bea", 4), texts[2]);
    assert_eq!(server.post("/v1/completions", &question("ada", 4)).status, 404);
    let parents = server.get("/v1/models").json();
    let parents: Vec<Value> = parents["data"].as_array().unwrap().iter().map(|model| model["parent"].clone()).collect();
    assert_eq!(json!(parents), json!([null, "one", "one", null, "two", "two"]));
    // A name is one adapter's in the whole server, and a model's adapters are its own.
    let taken = json!({ "lora_name": "cleo", "lora_path": "ada.gguf", "model": "one", "load_inplace": true });
    assert!(server.post("/v1/load_lora_adapter", &taken).text.contains("is taken, by the model \\\"two\\\""));
    let foreign = json!({ "model": "one", "prompt": "x", "lora": [{ "id": 9, "scale": 1 }] });
    assert!(server.post("/v1/completions", &foreign).text.contains("there is 1 (bea), 2 (dora)"));
    assert_eq!(server.get("/lora-adapters?model=two").json()[0]["name"], "cleo");
}

/// Adapters that do not fit are told before a server begins.
#[test]
fn a_server_does_not_begin_with_what_does_not_fit() {
    let refused = |adapters: Vec<Named>, more: fn(Options) -> Options| {
        let offer = Offer { adapters, ..crate::seats::seated_offer(&[], 1, |device| device) };
        match start(vec![offer], more(options())) {
            Err(error @ (ServeError::Seating(_) | ServeError::Folder { .. } | ServeError::NoSeats)) => {
                error.to_string()
            }
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it has begun"),
        }
    };
    let named = |name: &str, file: &str| Named { name: name.into(), path: path(file) };
    let same = |options: Options| options;
    for (adapters, word) in [
        (vec![named("a b", "ada")], "adapter \"a b\": an adapter's name is at most 128 letters"),
        (vec![named("ada", "ada"), named("ada", "bea")], "the adapter \"ada\" has the name of"),
        (vec![named("tiny", "ada")], "the adapter \"tiny\" has the name of"),
        (vec![named("fay", "missing")], "adapter \"fay\": "),
        (
            NAMES.iter().map(|name| named(name, name)).chain([named("fay", "ada")]).collect(),
            "compile it with --adapters 6",
        ),
    ] {
        let told = refused(adapters, same);
        assert!(told.contains(word), "{told}");
    }
    let nowhere = |options: Options| Options { adapter_folders: Some(vec!["/nowhere/at/all".into()]), ..options };
    assert!(refused(Vec::new(), nowhere).starts_with("--lora-dir /nowhere/at/all: "));
    let plain = offer("tiny", TINY.plan.clone(), TINY.folder.path(), 1, None, |device| device);
    let told = start(vec![Offer { adapters: vec![named("ada", "ada")], ..plain }], options()).map(|_| ()).unwrap_err();
    assert!(told.to_string().contains("seats for 0 adapters, and 1 are named"), "{told}");
    let plain = offer("tiny", TINY.plan.clone(), TINY.folder.path(), 1, None, |device| device);
    let told = start(vec![plain], loading()).map(|_| ()).unwrap_err();
    assert!(matches!(told, ServeError::NoSeats), "{told}");
    assert_eq!(SEATED.plan.model.seats.map(|seats| seats.count), Some(SEATS));
}
