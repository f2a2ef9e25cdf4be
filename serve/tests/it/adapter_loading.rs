//! Adapters that come and go while a server runs: what is right, what is refused, and that nothing is left behind.

use std::fs;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

use gemma4c_serve::Options;
use serde_json::{Value, json};

use crate::adapter::{seated, write_adapter};
use crate::seats::{NAMES, SEATED, ask, listed, loading, metric, path, question, requests_of, seated_offer};
use crate::seats::{serve, shown};
use crate::slow::{delayed, until};
use crate::support::{Response, Server, options};

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

fn load(server: &Server, name: &str, file: &str) {
    let answer = server.post(LOAD, &json!({ "lora_name": name, "lora_path": shown(file) }));
    let expected = format!("Success: LoRA adapter '{name}' added successfully.");
    assert_eq!((answer.status, answer.text.as_str()), (200, expected.as_str()));
    assert!(answer.head.contains("\r\ncontent-type: text/plain"), "{}", answer.head);
}

fn replace(server: &Server, name: &str, file: &str) -> Response {
    server.post(LOAD, &json!({ "lora_name": name, "lora_path": shown(file), "load_inplace": true }))
}

fn unload(server: &Server, name: &str) {
    let answer = server.post(UNLOAD, &json!({ "lora_name": name }));
    let expected = format!("Success: LoRA adapter '{name}' removed successfully.");
    assert_eq!((answer.status, answer.text.as_str()), (200, expected.as_str()));
}

/// A server whose tokens take a while, with some adapters in its seats.
fn slow(names: &[&str], sequences: u32) -> Server {
    Server::of(vec![seated_offer(names, sequences, delayed(Duration::from_millis(4)))], loading())
}

/// A request that takes more than a second there.
fn long(model: &str) -> Value {
    let mut request = question(model, 1);
    (request["max_tokens"], request["temperature"]) = (json!(300), json!(0));
    request
}

/// The words of a long answer.
fn text(answer: &Response) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["choices"][0]["text"].as_str().expect("a text").to_owned()
}

fn running(server: &Server) -> f64 {
    server.metric("num_requests_running")
}

#[test]
fn an_adapter_that_is_loaded_answers_as_one_that_was_there() {
    let before = serve(&["ada", "bea"], options(), 1);
    let [tiny, ada, bea] = ["tiny", "ada", "bea"].map(|model| ask(&before, model, 2));
    let server = serve(&[], loading(), 1);
    assert_eq!((listed(&server).len(), metric(&server, "adapter_seats"), requests_of(&server, "ada")), (0, 5.0, None));
    load(&server, "ada", "ada");
    load(&server, "bea", "bea");
    assert_eq!(["tiny", "ada", "bea"].map(|model| ask(&server, model, 2)), [tiny, ada.clone(), bea.clone()]);
    assert_eq!((listed(&server), requests_of(&server, "ada")), (vec!["ada".to_owned(), "bea".into()], Some(1)));
    assert_eq!(server.get("/v1/models/ada").json()["root"], shown("ada"));
    unload(&server, "ada");
    assert_eq!(server.post("/v1/completions", &question("ada", 2)).status, 404);
    assert_eq!((listed(&server), requests_of(&server, "ada")), (vec!["bea".to_owned()], None));
    assert_eq!((metric(&server, "adapters_loaded"), metric(&server, "adapter_seats_taken")), (1.0, 1.0));
    // Under another name, in the seat that is free again; by a path from the folder, which a folder of PEFT is as well.
    let answer = server.post(LOAD, &json!({ "lora_name": "org/ada-2.0", "lora_path": "./ada.gguf" }));
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!((ask(&server, "org/ada-2.0", 2), ask(&server, "bea", 2)), (ada, bea));
    assert_eq!(server.get("/v1/models/org/ada-2.0").json()["parent"], "tiny");
    // Numbers are not given twice.
    let ids: Vec<Value> =
        server.get("/lora-adapters").json().as_array().unwrap().iter().map(|adapter| adapter["id"].clone()).collect();
    assert_eq!(ids, [json!(1), json!(2)]);
}

/// Names come, go and change their weights all the time, while others are asked and answer what they answer alone.
#[test]
fn requests_go_on_while_adapters_come_and_go() {
    let server = serve(&["ada", "bea"], loading(), 4);
    let texts: Vec<[String; 3]> =
        (0..3).map(|seed| ["tiny", "ada", "bea"].map(|model| ask(&server, model, seed))).collect();
    load(&server, "cleo", "cleo");
    let cleo: Vec<String> = (0..3).map(|seed| ask(&server, "cleo", seed)).collect();
    unload(&server, "cleo");
    thread::scope(|scope| {
        let (server, texts, cleo) = (&server, &texts, &cleo);
        for client in 0..3 {
            scope.spawn(move || {
                for turn in 0..20 {
                    let (at, seed) = ((client + turn) % 3, turn % 3);
                    assert_eq!(ask(server, ["tiny", "ada", "bea"][at], seed), texts[seed][at]);
                }
            });
        }
        for (name, others) in [("first", false), ("second", true)] {
            scope.spawn(move || {
                for turn in 0..8 {
                    load(server, name, "cleo");
                    assert_eq!(ask(server, name, turn % 3), cleo[turn % 3]);
                    if others {
                        assert_eq!(replace(server, name, "ada").status, 200);
                        assert_eq!(ask(server, name, turn % 3), texts[turn % 3][1]);
                    }
                    unload(server, name);
                }
            });
        }
    });
    until("seats that were left are free", || metric(&server, "adapter_seats_taken") == 2.0);
    assert_eq!(listed(&server), ["ada", "bea"]);
    assert_eq!((metric(&server, "adapters_loaded"), running(&server)), (2.0, 0.0));
}

/// New requests are refused at once, those that run end as they would have.
#[test]
fn unloading_waits_for_those_who_use_it() {
    let server = slow(&["ada", "bea"], 2);
    let alone = text(&server.post("/v1/completions", &long("ada")));
    thread::scope(|scope| {
        let answers = [(); 2].map(|()| scope.spawn(|| server.post("/v1/completions", &long("ada"))));
        until("both run", || running(&server) == 2.0);
        let going = scope.spawn(|| {
            let started = Instant::now();
            unload(&server, "ada");
            (started.elapsed(), running(&server))
        });
        until("the name is gone", || listed(&server) == ["bea"]);
        assert_eq!(running(&server), 2.0);
        let refused = server.post("/v1/completions", &question("ada", 1));
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (404, &json!("model_not_found")));
        let twice = server.post(UNLOAD, &json!({ "lora_name": "ada" }));
        assert_eq!((twice.status, &twice.json()["error"]["code"]), (404, &json!("adapter_not_found")));
        assert_eq!((metric(&server, "adapters_loaded"), metric(&server, "adapter_seats_taken")), (1.0, 2.0));
        // The name may come back meanwhile, in another seat.
        load(&server, "ada", "cleo");
        assert_eq!(metric(&server, "adapter_seats_taken"), 3.0);
        let (waited, still_running) = going.join().unwrap();
        assert!(waited > Duration::from_millis(100) && still_running == 0.0, "{waited:?}, {still_running} running");
        assert_eq!(answers.map(|answer| text(&answer.join().unwrap())), [alone.clone(), alone.clone()]);
    });
    assert_eq!(metric(&server, "adapter_seats_taken"), 2.0);
    assert_ne!(text(&server.post("/v1/completions", &long("ada"))), alone);
}

/// The name has the new weights at once; requests that run keep theirs, streams too.
#[test]
fn loading_in_place_leaves_those_who_run_alone() {
    let server = slow(&["ada", "bea"], 4);
    let [old, new] = ["ada", "bea"].map(|model| text(&server.post("/v1/completions", &long(model))));
    let id = server.get("/lora-adapters").json()[0]["id"].clone();
    let mut request = long("ada");
    request["stream"] = true.into();
    thread::scope(|scope| {
        let whole = scope.spawn(|| server.post("/v1/completions", &long("ada")));
        let stream = scope.spawn(|| server.post("/v1/completions", &request));
        until("both run", || running(&server) == 2.0);
        assert_eq!(replace(&server, "ada", "bea").status, 200);
        assert_eq!(running(&server), 2.0, "nobody was waited for");
        assert_eq!(text(&server.post("/v1/completions", &long("ada"))), new);
        assert_eq!(text(&whole.join().unwrap()), old);
        let pieces = stream.join().unwrap().events();
        let streamed: String = pieces.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert_eq!(streamed, old);
    });
    until("the old seat is free", || metric(&server, "adapter_seats_taken") == 2.0);
    let list = server.get("/lora-adapters").json();
    assert_eq!((&list[0]["id"], &list[0]["path"]), (&id, &json!(shown("bea"))));
}

/// Without a free seat the name's own is used: whoever asks for it waits until those before have ended.
#[test]
fn loading_in_place_goes_on_when_all_seats_are_taken() {
    let server = slow(&NAMES, 3);
    let longest = |model: &str| {
        let mut request = long(model);
        request["max_tokens"] = json!(400);
        request
    };
    let [ada, bea] = ["ada", "bea"].map(|model| text(&server.post("/v1/completions", &longest(model))));
    thread::scope(|scope| {
        let old = scope.spawn(|| server.post("/v1/completions", &longest("ada")));
        until("it runs", || running(&server) == 1.0);
        let replacing = scope.spawn(|| replace(&server, "ada", "bea"));
        // Until the file is read, the name still stands for the old weights.
        thread::sleep(Duration::from_millis(400));
        let new = scope.spawn(|| server.post("/v1/completions", &longest("ada")));
        assert_eq!(ask(&server, "cleo", 1), ask(&server, "cleo", 1), "others go on");
        for path in [LOAD, UNLOAD] {
            let busy =
                server.post(path, &json!({ "lora_name": "ada", "lora_path": shown("ada"), "load_inplace": true }));
            assert_eq!((busy.status, &busy.json()["error"]["code"]), (409, &json!("adapter_loading")), "{}", busy.text);
        }
        assert_eq!(text(&old.join().unwrap()), ada);
        assert_eq!(replacing.join().unwrap().status, 200);
        assert_eq!(text(&new.join().unwrap()), bea);
    });
    assert_eq!((metric(&server, "adapters_loaded"), metric(&server, "adapter_seats_taken")), (5.0, 5.0));
    let full = server.post(LOAD, &json!({ "lora_name": "fay", "lora_path": shown("ada") }));
    assert_eq!((full.status, &full.json()["error"]["code"]), (400, &json!("no_seat")));
    assert!(full.text.contains("all 5 seats for adapters are taken"), "{}", full.text);
    assert_eq!(text(&server.post("/v1/completions", &longest("ada"))), bea);
}

/// Whoever goes away leaves nothing half done.
#[test]
fn clients_that_go_away_leave_nothing_behind() {
    let server = slow(&["ada"], 2);
    let send_and_go = |path: &str, body: Value| {
        let stream = server.send("POST", path, "", body.to_string().as_bytes());
        thread::sleep(Duration::from_millis(30));
        // With a reset: nobody is there any more.
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        drop(stream);
    };
    thread::scope(|scope| {
        let answer = scope.spawn(|| server.post("/v1/completions", &long("ada")));
        until("it runs", || running(&server) == 1.0);
        send_and_go(UNLOAD, json!({ "lora_name": "ada" }));
        send_and_go(LOAD, json!({ "lora_name": "bea", "lora_path": shown("bea") }));
        until("one goes, one comes", || listed(&server) == ["bea"]);
        assert_eq!(answer.join().unwrap().status, 200);
    });
    until("the seat is free", || metric(&server, "adapter_seats_taken") == 1.0);
    // A request whose client is gone sits nowhere.
    send_and_go("/v1/completions", long("bea"));
    until("nobody runs", || running(&server) == 0.0);
    unload(&server, "bea");
    assert_eq!((metric(&server, "adapters_loaded"), metric(&server, "adapter_seats_taken")), (0.0, 0.0));
    load(&server, "ada", "ada");
    // One that closes its side alone still gets its answer.
    let mut half = server.send("POST", UNLOAD, "connection: close\r\n", br#"{"lora_name": "ada"}"#);
    half.flush().unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    assert_eq!(Response::read(half).status, 200);
}

#[test]
fn what_is_wrong_is_told_and_changes_nothing() {
    let server = serve(&["ada"], loading(), 1);
    let before = ask(&server, "ada", 3);
    fs::write(path("broken"), b"GGUF and no more").unwrap();
    let other = tempfile::tempdir().unwrap();
    let outside = other.path().join("outside.gguf");
    write_adapter(&outside, &seated(&SEATED.plan), 4, 9);
    _ = symlink(&outside, path("link"));
    let good = json!({ "lora_name": "bea", "lora_path": shown("bea") });
    for (more, status, word) in [
        (json!({ "lora_name": null }), 400, "lora_name is missing"),
        (json!({ "lora_name": 7 }), 400, "lora_name must be a text"),
        (json!({ "lora_name": "a b" }), 400, "lora_name: an adapter's name is at most 128 letters"),
        (json!({ "lora_name": "x".repeat(129) }), 400, "lora_name: "),
        (json!({ "lora_name": "tiny" }), 400, "lora_name: \\\"tiny\\\" is taken, by the model"),
        (json!({ "lora_name": "ada" }), 400, "The lora adapter 'ada' has already been loaded. If you want to load"),
        (json!({ "lora_path": null }), 400, "lora_path is missing"),
        (json!({ "lora_path": [] }), 400, "lora_path must be a text"),
        (json!({ "lora_path": "missing.gguf" }), 400, "below the folders that --lora-dir names"),
        (json!({ "lora_path": "/etc/passwd" }), 400, "below the folders that --lora-dir names"),
        (json!({ "lora_path": outside }), 400, "below the folders that --lora-dir names"),
        (json!({ "lora_path": "link.gguf" }), 400, "below the folders that --lora-dir names"),
        (json!({ "lora_path": "x/".repeat(5000) }), 400, "below the folders that --lora-dir names"),
        (json!({ "lora_path": shown("broken") }), 400, "lora_path: "),
        (json!({ "load_inplace": "yes" }), 400, "load_inplace"),
        (json!({ "model": "nobody" }), 404, "there is no model \\\"nobody\\\""),
    ] {
        let mut body = good.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post(LOAD, &body);
        assert!(answer.status == status && answer.text.contains(word), "{more}: {} {}", answer.status, answer.text);
    }
    assert_eq!(server.request("POST", LOAD, b"[]").status, 400);
    assert_eq!(server.request("POST", LOAD, b"{").status, 400);
    assert_eq!(server.get(LOAD).status, 405);
    for (body, status) in [(json!({}), 400), (json!({ "lora_name": [] }), 400), (json!({ "lora_name": "tiny" }), 404)] {
        assert_eq!(server.post(UNLOAD, &body).status, status, "{body}");
    }
    assert_eq!((listed(&server), metric(&server, "adapter_seats_taken")), (vec!["ada".to_owned()], 1.0));
    // One that cannot be read leaves the name what it was.
    assert_eq!(replace(&server, "ada", "broken").status, 400);
    assert_eq!(ask(&server, "ada", 3), before);
    assert_eq!(metric(&server, "adapter_seats_taken"), 1.0);
}

#[test]
fn without_the_switch_nothing_changes() {
    let server = serve(&["ada"], options(), 1);
    for path in [LOAD, UNLOAD] {
        let refused = server.post(path, &json!({ "lora_name": "ada", "lora_path": shown("ada") }));
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (404, &json!("loading_is_off")));
        assert!(refused.text.contains("--lora-loading"), "{}", refused.text);
    }
    let refused = server.post("/lora-adapters", &json!([{ "id": 0, "scale": 0 }]));
    assert!(refused.status == 501 && refused.text.contains("--lora-loading"), "{}", refused.text);
    assert_eq!((listed(&server), &server.get("/lora-adapters").json()[0]["scale"]), (vec!["ada".into()], &json!(1.0)));
    // Keys open these paths as all others.
    let server = serve(&["ada"], Options { api_keys: "secret".into(), ..loading() }, 1);
    assert_eq!(server.post(UNLOAD, &json!({ "lora_name": "ada" })).status, 401);
    assert_eq!(server.get("/lora-adapters").status, 401);
    let headers = "connection: close\r\nauthorization: Bearer secret\r\n";
    let body = br#"{"lora_name": "ada"}"#;
    assert_eq!(Response::read(server.send("POST", UNLOAD, headers, body)).status, 200);
}
