//! The way to a GPU without one: the real program on a stand-in for the driver's library, which holds every call to its
//! contract.
//!
//! Launches do nothing there, so no number is right; what is tested is everything around them. The kernels are real
//! cubins, and their parameters are compared with what a plan passes. Where there is no NVRTC, no plan can be compiled
//! and nothing is tested, which it says.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{LazyLock, OnceLock};

use crate::common;
use crate::common::{Place, Ran, finish};
use crate::support;
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{CudaStep, Launch, Phase, PhaseKind};

/// The stand-in, compiled once for all tests of this file.
fn library() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("stand-in-driver");
        std::fs::create_dir_all(&folder).unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/driver/libcuda.cpp");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let mut command = Command::new(compiler);
        command.args(["-std=c++17", "-O1", "-shared", "-fPIC", source, "-o"]).arg(folder.join("libcuda.so"));
        assert!(command.status().expect("there is a C++ compiler").success());
        folder
    });
    folder.clone()
}

/// A place with a tiny model, and a plan of it for GPUs; `None` without a compiler for one.
fn place() -> Option<Place> {
    let place = Place::new();
    for file in ["model.gguf", "plan.bin"] {
        place.write(file, compiled_once()?.read(file));
    }
    Some(place)
}

fn compiled_once() -> Option<&'static Place> {
    static COMPILED: LazyLock<Option<Place>> = LazyLock::new(compiled);
    COMPILED.as_ref()
}

fn compiled() -> Option<Place> {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    support::toolchain()?;
    place.ok("compile model.gguf -o plan.bin --target cuda --arch sm_90a --ctx 256 --chunk 48");
    Some(place)
}

/// Runs a command on the stand-in, under these settings of it.
fn run(place: &Place, line: &str, settings: &[(&str, &str)]) -> (Ran, BTreeMap<String, u64>) {
    let log = place.path("driver.log");
    let _ = std::fs::remove_file(&log);
    let mut command = place.command(line);
    command.env("LD_LIBRARY_PATH", library()).env("DRIVER_LOG", &log).envs(settings.iter().copied());
    let ran = finish(&mut command);
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let entry = |line: &str| line.split_once(' ').map(|(name, number)| (name.to_string(), number.parse().unwrap()));
    (ran, text.lines().filter_map(entry).collect())
}

#[test]
fn one_replay_a_token_and_nothing_allocated_after_the_first() {
    let Some(place) = place() else { return };
    for (line, tokens) in [
        ("run plan.bin --device cuda --tokens 2,3,4,5 -n 40 --temp 0", 40),
        ("run plan.bin --device cuda --tokens 2,3,4,5 -n 40 --temp 1 --top-k 8", 40),
        ("run plan.bin --device cuda --tokens 2,3,4,5 -n 1000 --temp 0", 253),
    ] {
        let (ran, log) = run(&place, line, &[]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(ran.stdout.split_whitespace().count(), tokens, "{line}");
        assert_eq!(log["cuGraphLaunch"], tokens as u64, "{line}: one replay a token");
        assert_eq!(
            (log["built_late"], log["launched_late"]),
            (0, 0),
            "{line}: all graphs are there before the first token"
        );
        assert_eq!(log["copied_from"], 4 * tokens as u64, "{line}: only tokens come back");
        assert_eq!((log["allocated_late"], log["left"]), (0, 0), "{line}");
    }
}

/// Drafts, their verification and what is kept of them are one replay. Every draft is right there: launches do nothing,
/// and all tokens are 0.
#[test]
fn one_replay_a_round() {
    if compiled_once().is_none() {
        return;
    }
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    place.ok("synth tiny-e -q q8_0 --draft -o drafter.gguf");
    place.ok("compile model.gguf --draft drafter.gguf -o plan.bin --target cuda --arch sm_90a --ctx 256 --chunk 48");
    for rule in ["--temp 0", "--temp 1 --top-k 8"] {
        let line = format!("run plan.bin --device cuda --tokens 2,3,4,5 -n 40 --draft 3 {rule}");
        let (ran, log) = run(&place, &line, &[]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(ran.stdout.split_whitespace().count(), 40, "{line}");
        // The prompt, ten rounds of four tokens, and one of two that was on its way when the last token came.
        assert_eq!(log["cuGraphLaunch"], 1 + 10 + 1, "{line}");
        assert_eq!(log["copied_from"], 4 * (1 + 10 * 4 + 2), "{line}: only what was kept comes back");
        assert_eq!((log["built_late"], log["launched_late"], log["allocated_late"]), (0, 0, 0), "{line}");
    }
}

/// The graphs are the plan's: a node for each launch of every run, and between two of them the edges of the steps.
#[test]
fn graphs_have_the_nodes_and_the_edges_of_the_plan() {
    let Some(place) = place() else { return };
    check_graphs(&place, false);
    // On one SM a tiny model's weights are widened beside other launches: that is a fork, and a join.
    place.ok("compile model.gguf -o plan.bin --target cuda --arch sm_90a --sms 1 --ctx 256 --chunk 256");
    check_graphs(&place, true);
}

fn check_graphs(place: &Place, joins: bool) {
    let plan = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let program = &plan.cuda.as_ref().unwrap().program;
    let (mut nodes, mut edges, mut programmatic) = (0, 0, 0);
    let mut add = |steps: &[CudaStep], first: usize, pick: &[Launch]| {
        nodes += steps.len() + pick.len();
        for step in steps {
            let own = step.after.iter().filter(|before| **before as usize >= first).count();
            edges += own;
            programmatic += if step.launch.programmatic { own } else { 0 };
        }
        // The steps of these plans end as a chain, so that a pick waits for the last.
        edges += pick.len();
        programmatic += pick.iter().filter(|launch| launch.programmatic).count();
    };
    for phase in &program.phases {
        for pick in [&[][..], &phase.pick_largest, &phase.pick_sampled] {
            add(&phase.steps, 0, pick);
        }
        let asked_from = phase.asked_from as usize;
        if phase.kind == PhaseKind::Prefill {
            add(&phase.steps[..asked_from], 0, &[]);
            for pick in [&[][..], &phase.pick_largest, &phase.pick_sampled] {
                add(&phase.steps[asked_from..], asked_from, pick);
            }
        }
    }
    let mut steps = program.phases.iter().flat_map(|phase| &phase.steps);
    assert_eq!(steps.any(|step| step.after.len() > 1), joins);
    let (ran, log) = run(place, "run plan.bin --device cuda --tokens 2,3 -n 2 --temp 0", &[]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let graphs = |phase: &Phase| if phase.kind == PhaseKind::Decode { 3 } else { 7 };
    assert_eq!(log["cuGraphInstantiate"], program.phases.iter().map(graphs).sum::<u64>());
    let found = [log["kernel_nodes"], log["edges"], log["programmatic_edges"]];
    assert_eq!(found, [nodes, edges, programmatic].map(|count| count as u64));
    assert!(programmatic > 0 && programmatic < edges);
}

#[test]
fn memory_is_what_the_plan_says_and_the_staging_goes() {
    let Some(place) = place() else { return };
    let (ran, log) = run(&place, "bench plan.bin --device cuda -p 8,100 -n 4 -r 2 -o json", &[]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let number = |name: &str| report["device_memory"][name].as_u64().unwrap();
    assert_eq!(number("planned"), number("taken"));
    assert!(log["most_device_bytes"] > number("planned"), "slots are there while weights are loaded");
    assert!(log["copied_to"] > report["loaded_bytes"].as_u64().unwrap());
    assert_eq!((log["allocated_late"], log["left"]), (0, 0));
    assert!(report["results"].as_array().unwrap().iter().all(|row| row["device_bytes_grown"] == 0));
}

/// Many requests later the device's memory is taken as it was when the plan was ready; a host cache is pinned once, and
/// used.
#[test]
fn an_engine_allocates_nothing_after_it_is_ready() {
    let Some(place) = place() else { return };
    place.ok("compile model.gguf -o chat.bin --target cuda --arch sm_90a --ctx 1024 --chunk 48");
    let (ran, log) = run(&place, "verify chat.bin --device cuda --company 1 --prompts 20 --decode 2", &[]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.stdout, ran.stderr);
    let memory = ran.stdout.lines().find_map(|line| line.strip_prefix("memory: ")).unwrap();
    let planned = memory.split(' ').next().unwrap();
    let taken = format!("{planned} bytes as planned, {planned} taken with kernels and graphs");
    assert_eq!(memory, format!("{taken}; nothing allocated since ready"));
    assert_eq!((log["allocated_late"], log["left"]), (0, 0));

    let chat = "bench chat.bin --device cuda --chat 3 --turn 6 -n 5 -r 1";
    let (ran, alone) = run(&place, &format!("{chat} --system 600"), &[]);
    assert!(ran.code == Some(0) && ran.stdout.contains("\n| 3 | 628 | 617 | 11 | "), "{}{}", ran.stdout, ran.stderr);
    let (ran, cached) = run(&place, &format!("{chat} --system 600 --host-cache 16MiB"), &[]);
    assert!(ran.code == Some(0) && ran.stdout.contains("\n| 3 | 628 | 617 | 11 | "), "{}{}", ran.stdout, ran.stderr);
    assert_eq!(cached["cuMemHostAlloc"], alone["cuMemHostAlloc"] + 1);
    assert!(cached["copied_from"] > alone["copied_from"], "the pages keep the latest turn, the host the system prompt");
    assert_eq!((cached["allocated_late"], cached["left"]), (0, 0));
    place.ok("compile model.gguf -o chat.bin --target cuda --arch sm_90a --ctx 1024 --chunk 48 --snapshots 0");
    let (ran, _) = run(&place, &format!("{chat} --system 960"), &[]);
    assert!(ran.code == Some(2) && ran.stderr.contains("and its snapshot take"), "{}", ran.stderr);
}

#[test]
fn logits_and_profiles_go_through_every_phase() {
    let Some(place) = place() else { return };
    let tokens = common::ids(&common::random_tokens(1, 120, 1024));
    for line in [
        format!("logits plan.bin --device cuda --tokens {tokens} --prefill 110 -o out.safetensors"),
        format!("logits plan.bin --device cuda --tokens {tokens} --prefill 60 --all --chunk 7 -o out.safetensors"),
        "profile plan.bin --device cuda -r 2 --trace trace.json".into(),
        "profile plan.bin --device cuda -r 2 --phase 32 -d 100".into(),
        "run plan.bin --device cuda -p hello -n 4 --top-k 0".into(),
    ] {
        let (ran, log) = run(&place, &line, &[]);
        assert_eq!(ran.code, Some(0), "{line}\n{}", ran.stderr);
        assert_eq!((log["left"], log["launched_late"]), (0, 0), "{line}: everything runs as a graph");
    }
    // Stamped kernels have a variable each, which is read once; nothing runs here, so nothing is in it.
    let (ran, log) = run(&place, "profile plan.bin --device cuda -r 2 --chain", &[]);
    assert!(ran.code == Some(0) && ran.stdout.ends_with("has left its times.\n"), "{}{}", ran.stdout, ran.stderr);
    assert!(log["cuMemcpyDtoH"] > 5 && log["cuModuleGetGlobal"] >= log["cuMemcpyDtoH"] && log["left"] == 0);
    let trace: serde_json::Value = serde_json::from_slice(&place.read("trace.json")).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 20);
}

/// `perplexity --against` has two plans loaded at once: on one GPU if it has room for both, on GPU and CPU otherwise.
#[test]
fn two_plans_share_a_gpu() {
    let Some(place) = place() else { return };
    place.write("ids.txt", "2 3 4 5 6\n7 8 9 10 11\n");
    let line = "perplexity plan.bin --tokens ids.txt --decode -o json --against plan.bin";
    let figures = |ran: &Ran| -> serde_json::Value { serde_json::from_str(&ran.stdout).expect(&ran.stderr) };
    let (both, log) = run(&place, line, &[]);
    // Launches leave zeros behind: every token is as likely as any other.
    assert!((figures(&both)["nll"].as_f64().unwrap() - 1024f64.ln()).abs() < 1e-12, "{}", both.stdout);
    assert_eq!((log["cuGraphLaunch"], log["left"]), (16, 0), "a replay for each of 2 x 4 tokens by each plan");
    let (one, log) = run(&place, &format!("{line} --against-device cpu"), &[]);
    assert_eq!((log["cuGraphLaunch"], log["left"]), (8, 0));
    assert!(figures(&one)["kl_mean"].as_f64().unwrap() > 0.0, "{}", one.stdout);

    // Room for one of them, as it loads, and not for the other.
    let (_, log) = run(&place, "run plan.bin --tokens 2,3 -n 1", &[]);
    let memory = (log["most_device_bytes"] + 1024).to_string();
    let (ran, _) = run(&place, line, &[("DRIVER_MEMORY", &memory)]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{}", ran.stderr);
    assert!(ran.stderr.starts_with("error: plan.bin: the plan needs "), "{}", ran.stderr);
}

/// A plan that has its weights with it needs nothing else: they are copied, once, and kernels make copies of them but
/// repack nothing.
#[test]
fn weights_in_the_plan_are_copied_as_they_are() {
    let Some(place) = place() else { return };
    place.ok("compile model.gguf -o whole.bin --target cuda --arch sm_90a --ctx 256 --chunk 48 --bf16-copies --embed-weights");
    let plan: serde_json::Value = serde_json::from_str(&place.ok("inspect whole.bin --json")).unwrap();
    let weights = plan["embedded"]["bytes"].as_u64().unwrap();
    assert!(weights < plan["memory"]["weights"].as_u64().unwrap(), "copies in bf16 are not in the file");
    let line = "--device cuda --tokens 2,3,4,5 -n 4 --temp 0";
    let (_, before) = run(&place, &format!("run plan.bin {line}"), &[]);
    std::fs::remove_file(place.path("model.gguf")).unwrap();
    let (ran, log) = run(&place, &format!("run whole.bin {line}"), &[]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.stdout.split_whitespace().count(), 4);
    assert_eq!(log["cuGraphLaunch"], 4);
    assert_eq!((log["allocated_late"], log["left"]), (0, 0));
    assert!((weights..weights + (1 << 16)).contains(&log["copied_to"]), "{} of {weights}", log["copied_to"]);
    let launches = |log: &BTreeMap<String, u64>| log["cuLaunchKernelEx"];
    assert!(
        launches(&log) < launches(&before),
        "{} launches, and {} where weights are repacked",
        launches(&log),
        launches(&before)
    );
    assert!(log["most_device_bytes"] < before["most_device_bytes"], "no staging");
}

/// A table that has no room on the device is on the host there, and in the file too.
#[test]
fn tables_on_the_host_come_from_the_plan_as_well() {
    let Some(place) = place() else { return };
    let line = "compile model.gguf --target cuda --arch sm_90a --ctx 256 --chunk 48";
    place.ok(&format!("{line} -o small.bin"));
    let memory = |plan: &str| -> serde_json::Value {
        let shown: serde_json::Value = serde_json::from_str(&place.ok(&format!("inspect {plan} --json"))).unwrap();
        shown["memory"].clone()
    };
    let budget = memory("small.bin")["device"].as_u64().unwrap() - 1;
    place.ok(&format!("{line} -o whole.bin --vram {budget} --embed-weights"));
    assert!(memory("whole.bin")["host"].as_u64().unwrap() > 0, "the budget is felt");
    std::fs::remove_file(place.path("model.gguf")).unwrap();
    let (ran, log) = run(&place, "run whole.bin --device cuda --tokens 2,3,4,5 -n 4 --temp 0", &[]);
    assert_eq!((ran.code, log["left"]), (Some(0), 0), "{}", ran.stderr);
}

/// Sizes follow from the kernels that a plan has just now; the words around them are what is reviewed.
fn without_sizes(text: &str) -> String {
    let is_size = |word: &&str| word.len() > 3 && word.bytes().all(|b| b.is_ascii_digit());
    text.split(' ').map(|word| if is_size(&word) { "BYTES" } else { word }).collect::<Vec<_>>().join(" ")
}

#[test]
fn whatever_the_driver_answers_ends_in_one_error() {
    let Some(place) = place() else { return };
    let mut texts = String::new();
    let mut record_refusal = |what: &str, line: &str, settings: &[(&str, &str)]| {
        let (ran, _) = run(&place, line, settings);
        assert_eq!((ran.code, ran.stdout.trim()), (Some(2), ""), "{what}\n{}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.stderr.matches("error: ").count(), 1, "{what}\n{}", ran.stderr);
        texts += &format!("-- {what}\n{}", without_sizes(&ran.stderr));
    };
    let line = "run plan.bin --device cuda --tokens 2,3,4,5 -n 8 --temp 0";
    record_refusal("no GPU", line, &[("DRIVER_GPUS", "0")]);
    record_refusal("a driver of long ago", line, &[("DRIVER_VERSION", "12020")]);
    record_refusal("a small GPU", line, &[("DRIVER_MEMORY", "65536")]);
    for (what, fail) in [
        ("a GPU that does not open", "cuDevicePrimaryCtxRetain:1:46"),
        ("memory that is gone at the last moment", "cuMemAlloc:2:2"),
        ("no memory to pin", "cuMemHostAlloc:1:2"),
        ("a kernel that the driver refuses", "cuModuleLoadData:1:209"),
        ("another kernel that it refuses", "cuModuleLoadData:9:209"),
        ("a copy that fails while loading", "cuMemcpyHtoDAsync:5:719"),
        ("a kernel that fails while loading", "cuStreamSynchronize:3:700"),
        ("a launch that the GPU has no room for", "cuLaunchKernelEx:1:701"),
        ("a graph that takes no kernel", "cuGraphAddKernelNode:7:1"),
        ("a graph that takes no edge", "cuGraphAddDependencies:7:1"),
        ("a graph that has no room on the GPU", "cuGraphUpload:1:2"),
        ("a graph that cannot be made", "cuGraphInstantiate:1:2"),
    ] {
        record_refusal(what, line, &[("DRIVER_FAIL", fail)]);
    }
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cuda --arch sm_89 --ctx 256 --chunk 48");
    let (ran, _) = run(&place, line, &[]);
    texts += &format!("-- a plan for another GPU\n{}", ran.stderr);
    assert_text!("errors", "gpu", texts);
}

/// A GPU that is lost between two tokens: what was written stays written, and the error is the last word.
#[test]
fn a_gpu_lost_on_the_way_is_an_error_after_what_was_said() {
    let Some(place) = place() else { return };
    let line = "run plan.bin --device cuda --tokens 2,3,4,5 -n 20 --temp 0";
    let (ran, _) = run(&place, line, &[("DRIVER_FAIL", "cuGraphLaunch:9:719")]);
    assert_eq!(ran.code, Some(2));
    assert_eq!(ran.stderr, "error: replaying a graph: the driver answers CUDA_ERROR_LAUNCH_FAILED\n");
    let said = ran.stdout.split_whitespace().count();
    assert!((1..9).contains(&said), "{:?}", ran.stdout);
}

/// The choice of a device is no guess: a plan for GPUs runs on one where there is one, else says that it does not.
#[test]
fn a_plan_for_gpus_runs_on_the_cpu_only_where_there_is_no_gpu() {
    let Some(place) = place() else { return };
    let line = "run plan.bin --tokens 2,3,4,5 -n 3 --temp 0";
    let (on_gpu, log) = run(&place, line, &[]);
    assert!(on_gpu.code == Some(0) && log["cuGraphLaunch"] == 3, "{}", on_gpu.stderr);
    let (on_cpu, _) = run(&place, line, &[("DRIVER_GPUS", "0")]);
    assert!(
        on_cpu.code == Some(0) && on_cpu.stderr.contains("[no GPU: the plan runs on the CPU]"),
        "{}",
        on_cpu.stderr
    );
    assert_eq!(on_cpu.stdout, place.ok("run plan.bin --tokens 2,3,4,5 -n 3 --temp 0 --device cpu"));
}

/// A plan for several GPUs: the one that is there decides, or whoever names one; part of a GPU is a smaller one.
#[test]
fn a_gpu_runs_the_program_that_fits_it() {
    let Some(place) = place() else { return };
    place.ok("compile model.gguf -o two.bin --gpu h100-pcie,h200 --ctx 256 --chunk 48");
    let chosen = |line: &str, expected: &str| {
        let (ran, log) = run(&place, &format!("run two.bin --tokens 2,3,4,5 -n 3 --temp 0 {line}"), &[]);
        assert_eq!(ran.code, Some(0), "{line}\n{}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{line}\n{}", ran.stderr);
        assert_eq!((log["cuGraphLaunch"], log["left"]), (3, 0), "{line}");
        log.get("cuGreenCtxCreate").copied()
    };
    assert_eq!(chosen("", "[Stand-in GPU with 132 SMs runs the program for H200 (sm_90a, 132 SMs)]"), None);
    let smaller = "runs the program for H100 PCIe (sm_90a, 114 SMs)]";
    assert_eq!(chosen("--program h100-pcie", &format!("[Stand-in GPU with 132 SMs {smaller}")), None);
    assert_eq!(chosen("--sms 120", &format!("[Stand-in GPU with 120 SMs {smaller}")), Some(1));
    for (line, expected) in [
        ("--sms 114", "Stand-in GPU has 132 SMs, of which the driver gives 120 where 114 are asked for"),
        ("--sms 140", "asking for 140 of the 132 SMs of Stand-in GPU: the driver answers CUDA_ERROR_INVALID_VALUE"),
        ("--program l40s", "the plan has no program for `l40s`; it has h100-pcie, h200"),
        ("--device cpu --sms 8", "--sms takes SMs from a GPU, but the plan runs on the CPU"),
        ("--device sim --sms 8", "--sms takes SMs from a GPU: a simulated one has none"),
    ] {
        let (ran, _) = run(&place, &format!("run two.bin --tokens 2,3 -n 1 {line}"), &[]);
        assert!(ran.code == Some(2) && ran.stderr.contains(expected), "{line}\n{}", ran.stderr);
    }
}

/// PTX goes to any GPU; nothing in it waits for its predecessor, so nothing is launched ahead of one.
#[test]
fn ptx_runs_where_nobody_compiled_for() {
    let Some(place) = place() else { return };
    place.ok("compile model.gguf -o any.bin --arch compute_80 --ctx 256 --chunk 48");
    let (ran, log) = run(&place, "run any.bin --device cuda --tokens 2,3,4,5 -n 3 --temp 0", &[]);
    assert_eq!((ran.code, log.get("cuGraphLaunch")), (Some(0), Some(&3)), "{}", ran.stderr);
    assert!(ran.stderr.contains("runs the program for any GPU from 8.0 on (compute_80, 108 SMs)]"), "{}", ran.stderr);
    assert!(place.ok("inspect any.bin").contains(" of PTX\n"));
    // Machine code of this very GPU comes first.
    place.ok("compile model.gguf -o both.bin --arch compute_80,sm_90a --ctx 256 --chunk 48");
    let (ran, _) = run(&place, "run both.bin --device cuda --tokens 2,3,4,5 -n 3 --temp 0", &[]);
    assert!(ran.stderr.contains("runs the program for H200 (sm_90a, 132 SMs)]"), "{}", ran.stderr);
    // What this machine's GPU is, its driver says.
    let (compiled, _) = run(&place, "compile model.gguf -o own.bin --ctx 256 --chunk 48", &[]);
    assert!(compiled.stderr.starts_with("own.bin: Stand-in GPU (sm_90a, 132 SMs): "), "{}", compiled.stderr);
    let (compiled, _) = run(&place, "compile model.gguf -o own.bin --sms 100 --ctx 256 --chunk 48", &[]);
    assert!(compiled.stderr.contains("Stand-in GPU with 100 SMs (sm_90a, 100 SMs): "), "{}", compiled.stderr);
}

/// `demo` uses what there is, and says what that is; where it cannot use a GPU, it says why.
#[test]
fn the_demo_runs_on_the_gpu_or_says_why_not() {
    let Some(place) = place() else { return };
    let (on_gpu, log) = run(&place, "demo", &[]);
    assert_eq!(on_gpu.code, Some(0), "{}{}", on_gpu.stdout, on_gpu.stderr);
    assert!(on_gpu.stdout.contains("device   Stand-in GPU, sm_90a by NVRTC"), "{}", on_gpu.stdout);
    assert!(on_gpu.stdout.contains("plan     6 layers, ") && on_gpu.stdout.contains(" launches a token, "));
    let drafted = on_gpu.stdout.lines().find(|line| line.starts_with("drafts   ")).expect("a line of drafts");
    assert!(drafted.contains(": 66 tokens in "), "{drafted}");
    assert!(log["cuGraphLaunch"] > 66 + 1 + 1, "66 tokens one by one, rounds, and the last logits each time");
    let page = String::from_utf8(place.read("gemma4c-demo/plan.html")).unwrap();
    assert!(page.contains("Compiled for Stand-in GPU (sm_90a, 132 SMs) by NVRTC"));
    for (why, settings) in [
        ("the CPU, because the driver sees no GPU", ("DRIVER_GPUS", "0")),
        ("the CPU, because nothing can be compiled for Stand-in GPU: ", ("GEMMA4C_NVRTC", "nowhere.so")),
    ] {
        let (on_cpu, _) = run(&place, "demo", &[settings]);
        assert_eq!(on_cpu.code, Some(0), "{}{}", on_cpu.stdout, on_cpu.stderr);
        assert!(
            on_cpu.stdout.contains(why) && on_cpu.stdout.contains("said Elizabeth, \"you are"),
            "{}",
            on_cpu.stdout
        );
        let (refused, _) = run(&place, "demo --device cuda", &[settings]);
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""));
        assert!(refused.stderr.starts_with("error: --device cuda: "), "{}", refused.stderr);
    }
}
