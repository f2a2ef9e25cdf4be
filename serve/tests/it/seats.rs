//! A tiny model with seats, adapters for it, and servers of both.

use std::path::PathBuf;
use std::sync::LazyLock;

use gemma4c_plan::{Plan, Seats};
use gemma4c_runtime::engine::Device;
use gemma4c_serve::{Named, Offer, Options};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::adapter::{seated, write_adapter};
use crate::support::{Server, TINY, compile_seated, offer};

pub const SEATS: u32 = 5;
pub const NAMES: [&str; SEATS as usize] = ["ada", "bea", "cleo", "dora", "eva"];

/// A plan with seats, and a folder with an adapter for each: `ada.gguf` and so on, and `other.gguf`.
pub struct Seated {
    pub folder: TempDir,
    pub plan: Plan,
}

pub static SEATED: LazyLock<Seated> = LazyLock::new(|| {
    let plan = plan(512, SEATS);
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (seed, name) in (1..).zip(NAMES.into_iter().chain(["other"])) {
        write_adapter(&folder.path().join(format!("{name}.gguf")), &seated(&plan), 4, seed);
    }
    Seated { folder, plan }
});

/// The tiny model with another context and so many seats.
pub fn plan(context: u32, seats: u32) -> Plan {
    let seats = Seats { count: seats, rank: 16 };
    compile_seated(&TINY.folder.path().join("model.gguf"), context, Some(seats))
}

pub fn path(name: &str) -> PathBuf {
    SEATED.folder.path().join(format!("{name}.gguf"))
}

/// A path as a request has it.
pub fn shown(name: &str) -> String {
    path(name).to_str().expect("UTF-8").to_owned()
}

pub fn named(names: &[&str]) -> Vec<Named> {
    names.iter().map(|name| Named { name: (*name).into(), path: path(name) }).collect()
}

/// A model called `tiny` with some of the adapters in its seats.
pub fn seated_offer(
    names: &[&str],
    sequences: u32,
    wrapped: impl Fn(Box<dyn Device>) -> Box<dyn Device> + Send + Sync + 'static,
) -> Offer {
    let offer = offer("tiny", SEATED.plan.clone(), TINY.folder.path(), sequences, None, wrapped);
    Offer { adapters: named(names), ..offer }
}

pub fn serve(names: &[&str], options: Options, sequences: u32) -> Server {
    Server::of(vec![seated_offer(names, sequences, |device| device)], options)
}

/// Where clients load adapters from the folder of all of them.
pub fn loading() -> Options {
    Options { adapter_folders: Some(vec![SEATED.folder.path().into()]), ..crate::support::options() }
}

/// What a model answers to a prompt with a seed.
pub fn ask(server: &Server, model: &str, seed: usize) -> String {
    let response = server.post("/v1/completions", &question(model, seed));
    assert_eq!(response.status, 200, "{}", response.text);
    let answer = response.json();
    assert_eq!(answer["model"], model);
    answer["choices"][0]["text"].as_str().expect("a text").to_owned()
}

pub fn question(model: &str, seed: usize) -> Value {
    let prompt = format!("It is a truth universally acknowledged, {seed}");
    json!({ "model": model, "prompt": prompt, "max_tokens": 12, "seed": seed, "temperature": 1, "ignore_eos": true })
}

/// The value of a metric of ours.
pub fn metric(server: &Server, name: &str) -> f64 {
    let text = server.get("/metrics").text;
    let line = text.lines().find(|line| line.starts_with(&format!("gemma4c:{name}{{"))).expect("the metric");
    line.rsplit(' ').next().expect("a value").parse().expect("a number")
}

/// Requests that have chosen an adapter.
pub fn requests_of(server: &Server, adapter: &str) -> Option<u64> {
    let label = format!("adapter=\"{adapter}\"}} ");
    let text = server.get("/metrics").text;
    let line =
        text.lines().find(|line| line.starts_with("gemma4c:adapter_requests_total{") && line.contains(&label))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// The names of adapters, as they are listed.
pub fn listed(server: &Server) -> Vec<String> {
    let list = server.get("/v1/models").json();
    let models = list["data"].as_array().expect("a list").iter().filter(|model| model["parent"].is_string());
    models.map(|model| model["id"].as_str().expect("a name").to_owned()).collect()
}
