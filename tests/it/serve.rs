//! The server as a process, and the load that another process puts on it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use gemma4c_plan::Plan;
use serde_json::Value;

use crate::common::adapter::{seated, write_adapter};
use crate::common::{Place, golden};

/// A server and its address. What it says of requests is of no interest.
fn start(place: &Place, line: &str) -> (Child, String) {
    let mut server = place.command(&format!("{line} --log off")).stdout(Stdio::piped()).spawn().unwrap();
    let url = first_line(&mut server);
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    (server, url)
}

/// What a server prints when it is ready.
fn first_line(server: &mut Child) -> String {
    let mut url = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut url).unwrap();
    url.trim().into()
}

/// A server of a model that reads pictures and sounds, and a picture.
pub fn start_with_towers(place: &Place, folder: &Path) -> (Child, String, String) {
    let file = |name: &str| folder.join("vision").join(name).display().to_string();
    let (model, projector) = (file("v_tiny_e.gguf"), file("v_tiny_e.mmproj.gguf"));
    place.ok(&format!("compile {model} --mmproj {projector} -o seeing.bin --target cpu --ctx 1024 --image-tokens 70"));
    let (server, url) = start(place, "serve seeing.bin --port 0 --alias tiny --sequences 4 --media-url-allow *");
    (server, url, file("v_tiny_e.png"))
}

/// Ends a server as whoever runs it would.
pub fn end(mut server: Child) {
    let id = server.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert_eq!(server.wait().unwrap().code(), Some(0));
}

/// Adapters that have no place are refused before anything is loaded, with what to do.
#[test]
fn adapters_without_a_place_are_refused() {
    let place = Place::new();
    place.ok("synth tiny-dense --layers 2 -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64");
    for (line, told) in [
        (
            "plan.bin --lora a=b.gguf",
            "plan.bin has seats for 0 adapters, and 1 are named: compile it with --adapters 1",
        ),
        ("plan.bin --adapters 2", "--adapters is for a GGUF model; plan.bin is a plan"),
        ("plan.bin --rank 32", "--rank is for a GGUF model; plan.bin is a plan"),
        ("plan.bin --lora-loading --lora-dir .", "no plan has seats for them: compile one with --adapters N"),
        ("plan.bin --lora-loading", "--lora-dir <DIR>"),
        ("plan.bin --lora-dir .", "--lora-loading"),
        (
            "plan.bin --lora b.gguf",
            "--lora FILE is for a GGUF model; plan.bin is a plan: --lora NAME=FILE is for its seats",
        ),
        ("model.gguf --rank 16", "--rank is about seats for adapters: it needs --adapters or --lora NAME=PATH"),
        ("model.gguf --lora a=b.gguf --lora c=d.gguf --adapters 1", "--adapters 1: 2 adapters are named"),
        ("model.gguf --lora a=missing.gguf", "missing.gguf"),
        ("model.gguf --lora a:b=c.gguf", "an adapter's name is at most 128 letters"),
        (
            "model.gguf plan.bin --lora a=b.gguf",
            "--lora a=...: 2 models are given; say whose it is: --lora a@MODEL=...",
        ),
        ("model.gguf plan.bin --lora a@x=b.gguf", "no model that is given is called x"),
        ("model.gguf model.gguf --lora a@model.gguf=b.gguf", "2 models that are given are called model.gguf"),
        ("model.gguf --adapters 300", "300 is not in 1..=256"),
    ] {
        let refused = place.refused(&format!("serve {line} --port 0"));
        assert!(refused.contains(told), "{line}: {refused}");
    }
}

/// The text of an answer to a fixed question.
fn ask(url: &str, model: &str) -> String {
    let body = format!(r#"{{"model": "{model}", "prompt": "Once", "max_tokens": 8, "temperature": 0}}"#);
    let answer: Value = post(url, "/v1/completions", &body).parse().expect("JSON");
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

/// The body of an answer.
fn post(url: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).unwrap();
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split_once("\r\n\r\n").expect("a head").1.to_owned()
}

/// A model is compiled with the seats that its adapters need, and one with seats answers alike; clients load from the
/// folder that was opened.
#[test]
fn a_server_seats_adapters() {
    let place = Place::new();
    place.ok("synth tiny-dense --layers 2 -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o seats.bin --target cpu --ctx 64 --adapters 2 --rank 32");
    let matrices = seated(&Plan::from_bytes(&place.read("seats.bin")).expect("a plan"));
    std::fs::create_dir(place.path("more")).unwrap();
    for (name, rank, seed) in [("a.gguf", 4, 1), ("b.gguf", 20, 2), ("more/c.gguf", 32, 3)] {
        write_adapter(&place.path(name), &matrices, rank, seed);
    }
    let names = ["tiny", "a", "b"];
    let of_model = "serve model.gguf --device cpu --ctx 64 --port 0 --alias tiny --lora a=a.gguf --lora b=b.gguf";
    let (server, url) = start(&place, of_model);
    let texts = names.map(|name| ask(&url, name));
    assert!(texts[0] != texts[1] && texts[0] != texts[2] && texts[1] != texts[2], "{texts:?}");
    assert!(post(&url, "/v1/load_lora_adapter", "{}").contains("--lora-loading"));
    end(server);
    let line = "serve seats.bin --port 0 --alias tiny --lora b=b.gguf --lora-loading --lora-dir more";
    let (server, url) = start(&place, line);
    assert_eq!([ask(&url, "tiny"), ask(&url, "b")], [texts[0].clone(), texts[2].clone()]);
    assert!(load(&url, "../a.gguf").contains("below the folders that --lora-dir names"));
    assert_eq!(load(&url, "c.gguf"), "Success: LoRA adapter 'new' added successfully.");
    assert!(!texts.contains(&ask(&url, "new")));
    end(server);
    // Room for four where nobody says how many, of the usual rank.
    let line =
        "serve model.gguf --device cpu --ctx 64 --port 0 --alias tiny --lora-loading --lora-dir . --lora-dir more";
    let (server, url) = start(&place, line);
    let refused = load(&url, "b.gguf");
    assert!(refused.contains("has rank 20, and the plan's seats take 16 at most"), "{refused}");
    assert_eq!(load(&url, "a.gguf"), "Success: LoRA adapter 'new' added successfully.");
    assert_eq!(ask(&url, "new"), texts[1]);
    end(server);
    let refused = place.refused("serve model.gguf --device cpu --port 0 --lora a=a.gguf --lora b=b.gguf --rank 16");
    assert!(refused.contains("--rank 16: the adapter b has rank 20"), "{refused}");
}

fn load(url: &str, path: &str) -> String {
    post(url, "/v1/load_lora_adapter", &format!(r#"{{"lora_name": "new", "lora_path": "{path}"}}"#))
}

fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|ran| ran.status.success())
}

/// Runs a script of `scripts/` by node.
fn node(script: &str, arguments: &[&str]) {
    let script = format!("{}/scripts/{script}", env!("CARGO_MANIFEST_DIR"));
    let tried = Command::new("node").arg(script).args(arguments).output().unwrap();
    assert!(tried.status.success(), "{}", String::from_utf8_lossy(&tried.stderr));
}

/// Without a browser, where there is node.
#[test]
fn the_page_reads_markdown_and_keeps_conversations() {
    match runs("node") {
        true => node("test-markdown.mjs", &[]),
        false => crate::skipped::not_checked("node, which tries the page's Markdown"),
    }
}

/// In a browser, where there is one: the chat, and a plan's page.
#[test]
fn the_page_works_in_a_browser() {
    if !runs("chromium") || !runs("node") {
        crate::skipped::not_checked("chromium and node, in which the page is tried");
        return;
    }
    let place = Place::new();
    let model = "a_model_whose_name_is_longer_than_a_line_of_a_phone_and_has_no_place_to_break_it_Q4_0.gguf";
    std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/austen_q4_0.gguf"), place.path(model)).unwrap();
    place.ok(&format!("compile {model} -o plan.bin --target cpu --ctx 1024"));
    place.ok("inspect plan.bin --html plan.html");
    let (server, url) = start(&place, "serve plan.bin --port 0 --sequences 2");
    node("test-page.mjs", &[&url, "--plan", place.path("plan.html").to_str().unwrap()]);
    end(server);
    let Some(folder) = golden::folder() else { return };
    let (server, url, picture) = start_with_towers(&place, &folder);
    node("test-page.mjs", &[&url, "--drop", &picture]);
    end(server);
}

#[test]
fn a_server_answers_load_and_ends_when_it_is_told_to() {
    let place = Place::new();
    place.ok("synth tiny-dense --layers 2 -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 256");
    let (server, url) = start(&place, "serve plan.bin --port 0 --alias tiny --sequences 4");
    let load =
        format!("load {url} --requests 20 --concurrency 6 -p 20 -n 10 --prefix 8 --good-ttft 60000 --json load.json");
    let told = place.ok(&load);
    assert!(told.starts_with("20 requests in ") && told.contains(" 0 failed; 400 tokens in, 200 out\n"), "{told}");
    let figures: Value = serde_json::from_slice(&place.read("load.json")).unwrap();
    assert_eq!((&figures["completed"], &figures["total_output_tokens"]), (&20.into(), &200.into()));
    assert!(figures["p99_itl_ms"].as_f64().unwrap() > 0.0 && figures["request_goodput"].as_f64().unwrap() > 0.0);
    place.ok(&format!("load {url} --requests 4 --rate 100 -p 4 -n 2"));
    // A prompt beyond the context is the request's fault, and said as such.
    let refused = place.run(&format!("load {url} --requests 3 -p 300 -n 2"));
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(
        refused.stdout.starts_with("0 requests in ") && refused.stdout.contains(" 0 failed;"),
        "{}",
        refused.stdout
    );
    assert!(refused.stderr.contains("[3 requests were refused: "), "{}", refused.stderr);
    assert!(refused.stderr.contains("the first: status 400: "), "{}", refused.stderr);
    end(server);
    assert!(place.refused(&format!("load {url}")).contains(&format!("no answer from {url}")));
}

/// Each request is a line on standard error, as text or as JSON; a server that listens at a name prints the name.
#[test]
fn a_server_says_what_became_of_each_request() {
    let place = Place::new();
    place.ok("synth tiny-dense --layers 2 -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64");
    let served = |more: &str| {
        let line = format!("serve plan.bin --port 0 --alias tiny {more}");
        let mut server = place.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let url = first_line(&mut server);
        place.ok(&format!("load {url} --requests 3 --concurrency 1 -p 4 -n 2"));
        let mut errors = server.stderr.take().unwrap();
        end(server);
        let mut said = String::new();
        errors.read_to_string(&mut said).unwrap();
        (url, said)
    };
    let (url, said) = served("--host localhost");
    assert!(url.starts_with("http://localhost:"), "{url}");
    let line = said.lines().rfind(|line| line.contains(" POST /v1/")).expect("a line for a request");
    assert!(line.contains(" 200 model=tiny prompt=4 cached=") && line.contains(" output=2 ttft="), "{line}");
    assert!(line.contains(" finish=length id=req_"), "{line}");
    let (url, said) = served("--log json --host 127.0.0.1");
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let asked = lines.iter().filter(|line| line["event"] == "request" && line["output_tokens"] == 2);
    assert_eq!(asked.count(), 3, "{said}");
    assert_eq!(served("--log off").1, "");
    assert!(place.refused("serve plan.bin --port 0 --host no.such.host.invalid").contains("no.such.host.invalid"));
}

#[test]
fn what_cannot_be_served_is_refused_before_anybody_is_told() {
    let place = Place::new();
    place.ok("synth tiny-dense --layers 2 -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64");
    std::fs::write(place.path("keys"), "# none\n").unwrap();
    for (line, word) in [
        ("serve plan.bin --port 0 --api-keys keys", "has no key"),
        ("serve plan.bin --port 0 --api-keys nowhere", "cannot read nowhere"),
        ("serve plan.bin --port 0 --sequences 0", "--sequences 0"),
        ("serve nowhere.bin --port 0", "nowhere.bin"),
    ] {
        assert!(place.refused(line).contains(word), "{line}: {}", place.refused(line));
    }
}
