//! Models by name, through the program: from a hub on this machine to an answer.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::sync::Arc;

use gemma4c_hub_standin::{Faults, Repositories, Standin};

use crate::common::{Place, Ran, finish};

const ASSETS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets");
const ANSWER: &str = "-p 'She was' -n 12 --seed 0 --device cpu";

/// The demo's model and its drafter, with TLS.
fn hub() -> Standin {
    let asset = |name: &str| Arc::new(fs::read(format!("{ASSETS}/{name}")).expect("an asset"));
    let files = [
        ("austen-Q4_0.gguf", asset("austen_q4_0.gguf")),
        ("mtp-austen-Q8_0.gguf", asset("austen_draft_q8_0.gguf")),
        ("austen-IQ1_S.gguf", Arc::new(vec![0; 100])),
    ];
    let files: BTreeMap<_, _> = files.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
    let empty = BTreeMap::from([("README.md".to_owned(), Arc::new(b"no model".to_vec()))]);
    let repositories: Repositories =
        BTreeMap::from([("jane/austen-GGUF".to_owned(), files), ("jane/austen".to_owned(), empty)]);
    Standin::start(repositories, true).expect("two free ports")
}

/// A command with the hub's address and its certificate, and a cache in the place's folder.
fn command(place: &Place, hub: &Standin, line: &str) -> Command {
    place.write("hub.pem", hub.certificate.as_deref().expect("a certificate"));
    let mut command = place.command(line);
    for unset in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy"] {
        command.env_remove(unset);
    }
    command.env("HF_HOME", place.path("hf")).env("GEMMA4C_CACHE", place.path("cache"));
    command.env("HF_ENDPOINT", &hub.endpoint).env("SSL_CERT_FILE", place.path("hub.pem"));
    command
}

fn run(place: &Place, hub: &Standin, line: &str) -> Ran {
    finish(&mut command(place, hub, line))
}

/// What is printed that is the same on every machine.
fn notes(ran: &Ran) -> Vec<&str> {
    ran.stderr.lines().filter(|line| line.starts_with("[jane/")).collect()
}

#[test]
fn a_name_is_enough_for_an_answer() {
    let (place, hub) = (Place::new(), hub());
    let ran = run(&place, &hub, &format!("run jane/austen-GGUF {ANSWER}"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let [note] = notes(&ran)[..] else { panic!("{}", ran.stderr) };
    let chosen = "[jane/austen-GGUF: Q4_0, 6.44 MB, with drafter mtp-austen-Q8_0.gguf, 1.54 MB; of IQ1_S, Q4_0 the largest of \
                  at most 8 bits whose weights fit into ";
    assert!(note.starts_with(chosen) && note.ends_with(", four fifths of the memory of this machine]"), "{note}");
    assert!(ran.stderr.contains("[fetched 7.99 MB in "), "{}", ran.stderr);
    let of_file = place.ok(&format!("run {ASSETS}/austen_q4_0.gguf {ANSWER}"));
    assert_eq!(ran.stdout, of_file);

    // Now it is here, and so is its plan.
    hub.sent();
    let again = run(&place, &hub, &format!("run jane/austen-GGUF {ANSWER}"));
    assert_eq!((again.stdout.as_str(), hub.sent()), (of_file.as_str(), 0));
    assert!(!again.stderr.contains("[fetched ") && !again.stderr.contains("[compiled "), "{}", again.stderr);
    let mut offline = command(&place, &hub, &format!("run jane/austen-GGUF:q4_0 --no-draft {ANSWER}"));
    let offline = finish(offline.env("HF_HUB_OFFLINE", "1"));
    assert_eq!(offline.stdout, of_file);
    assert_eq!(notes(&offline), ["[jane/austen-GGUF: Q4_0, 6.44 MB; as asked for]"]);

    let pulled = run(&place, &hub, "pull jane/austen-GGUF");
    let paths: Vec<&str> = pulled.stdout.lines().collect();
    let [model, drafter] = paths[..] else { panic!("{}", pulled.stdout) };
    assert_eq!(fs::read(model).unwrap(), fs::read(format!("{ASSETS}/austen_q4_0.gguf")).unwrap());
    assert!(drafter.ends_with("mtp-austen-Q8_0.gguf"), "{drafter}");
    let inspected = run(&place, &hub, "inspect jane/austen-GGUF");
    assert!(inspected.stdout.starts_with("model          austen\n"), "{}", inspected.stdout);
    let compiled = run(&place, &hub, "compile jane/austen-GGUF --target cpu -o plan.bin");
    assert!(compiled.stderr.contains(" of its drafter, context"), "{}", compiled.stderr);
}

#[test]
fn a_cut_model_is_resumed_and_a_damaged_one_refused() {
    let (place, hub) = (Place::new(), hub());
    let whole = 6_443_520;
    hub.set(Faults { cut_after: Some(whole * 3 / 10), ..Faults::default() });
    let cut = run(&place, &hub, "pull jane/austen-GGUF --no-draft");
    assert_eq!((cut.code, cut.stdout.as_str()), (Some(2), ""));
    assert!(cut.stderr.contains("error: cannot reach "));
    hub.set(Faults::default());
    hub.sent();
    let resumed = run(&place, &hub, "pull jane/austen-GGUF --no-draft");
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    let sent = hub.sent();
    assert!((whole / 2..whole * 9 / 10).contains(&sent), "what had arrived is not fetched again: {sent}");

    let place = Place::new();
    hub.set(Faults { flipped: Some(("austen-Q4_0.gguf".into(), 5_000_000)), ..Faults::default() });
    let damaged = run(&place, &hub, "pull jane/austen-GGUF");
    assert_eq!(damaged.code, Some(2));
    assert!(damaged.stderr.contains("austen-Q4_0.gguf arrived damaged: its SHA-256 is"), "{}", damaged.stderr);
}

#[test]
fn what_is_wrong_with_a_name_is_said() {
    let (place, hub) = (Place::new(), hub());
    let errors = |line: &str| {
        let ran = run(&place, &hub, line);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{line}: {}", ran.stderr);
        let error = ran.stderr.lines().filter(|line| !line.starts_with('[')).collect::<Vec<_>>().join("\n");
        error.replace(&hub.endpoint, "HUB")
    };
    let lines = [
        "run jane/nothing -p x",
        "run jane/austen -p x",
        "serve jane/austen-GGUF:Q8_0",
        "bench jane/austen-GGUF:IQ1_S",
        "pull austen",
        "pull jane/austen.gguf",
        "run nothing.gguf -p x",
        "run hub.pem --no-draft -p x",
        "compile hub.pem --no-mmproj -o plan.bin",
    ];
    let found: Vec<String> = lines.iter().map(|line| format!("$ gemma4c {line}\n{}\n", errors(line))).collect();
    assert_text!("errors", "names", found.join("\n"));
}
