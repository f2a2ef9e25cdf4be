//! The server as a process, and the load that another process puts on it.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

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
