//! Memory is what was said beforehand. The limits here are on what a process has of its own, mapped files not counted;
//! only Linux keeps such a limit.

#![cfg(target_os = "linux")]

use std::process::{Command, Stdio};

use crate::common::{Place, finish};
use gemma4c_blocks::DType;
use gemma4c_models::synth::{self, Preset};
use serde_json::Value;

/// A command that may have so many megabytes.
fn limited(place: &Place, megabytes: u64, line: &str) -> Command {
    let inner = place.command(line);
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -d {} && exec \"$0\" \"$@\"", megabytes << 10));
    shell.arg(inner.get_program()).args(inner.get_args());
    shell.current_dir(place.path(".")).stdin(Stdio::null());
    shell
}

/// What a plan says it needs is what it needs: weights stay in the mapped file, whatever the type they are stored in.
#[test]
fn running_takes_what_the_plan_says() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --ctx 256");
    let plan: Value = serde_json::from_str(&place.ok("inspect plan.bin --json")).expect("JSON");
    let bytes = |what: &str| plan["memory"][what].as_u64().expect("bytes");
    let most = ((bytes("kv") + bytes("arena")) >> 20) + 256;
    let ran = finish(&mut limited(&place, most, "run plan.bin -p hello -n 20"));
    assert_eq!(ran.code, Some(0), "within {most} MB\n{}", ran.stderr);

    // The limit is felt: with a fraction of what the plan says there is no running it.
    place.ok("compile model.gguf -o long.bin --ctx 8192 --chunk 4096");
    let ran = finish(&mut limited(&place, 64, "run long.bin -p hello -n 1"));
    assert_ne!(ran.code, Some(0), "a limit of 64 MB is no limit here");
}

/// A model of full size with a vocabulary of full size: the compiler looks at headers, not at weights.
#[test]
fn compiling_a_large_model_takes_little() {
    let place = Place::new();
    let options = synth::Options::new(Preset::E2b, DType::Q8_0);
    synth::write_header(&options, &place.path("e2b.gguf")).expect("a header is written");
    let ran = finish(&mut limited(&place, 300, "compile e2b.gguf -o plan.bin --target cpu"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
}
