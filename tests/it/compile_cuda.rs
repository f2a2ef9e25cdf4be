//! GPU plans of the full sizes, compiled where no GPU is: how many launches, how much work, how much memory.
//!
//! The models are headers whose weights are a hole on the disk. Most of it needs no kernel's machine code.

use crate::common::Place;
use crate::common::lowered::{self, Options, header};
use crate::support;
use gemma4c_blocks::DType;
use gemma4c_models::synth::Preset;
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{Argument, CudaStep, Form, Range};
use serde_json::Value;

/// `inspect --json` of the plan of a full size.
fn inspected(place: &Place, preset: Preset, dtype: DType, options: &Options) -> Value {
    let model = place.path("model.gguf");
    header(&model, preset, dtype);
    let plan = lowered::plan(&model, options);
    place.write("plan.bin", plan.to_bytes().expect("a plan that can be written"));
    serde_json::from_str(&place.ok("inspect plan.bin --json")).expect("JSON")
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

/// Gate and up leave the outputs behind the last full round of groups as floats; down finds all four parts where they
/// were left.
#[test]
fn spread_outputs_are_read_where_they_were_left() {
    let place = Place::new();
    let model = place.path("model.gguf");
    for (preset, dtype, width, floats, layers) in
        [(Preset::E4b, DType::Q8_0, 10_240, 1792, 42), (Preset::Dense31b, DType::Q4_0, 21_504, 384, 60)]
    {
        header(&model, preset, dtype);
        let decode = lowered::plan(&model, &Options::default()).cuda.expect("a GPU plan").program.phases.remove(0);
        let mixed = |step: &CudaStep| {
            step.outputs.iter().find_map(|output| match output.form {
                Form::Mixed { loose } => Some((loose, output.place)),
                _ => None,
            })
        };
        let left: Vec<_> = decode.steps.windows(2).filter_map(|pair| Some((mixed(&pair[0])?, pair))).collect();
        assert_eq!(left.len(), layers, "one in every layer");
        for ((loose, place), pair) in left {
            assert_eq!(loose, floats);
            let whole = width - u64::from(loose);
            let part = |offset: u64, bytes: u64| Range { offset: place.offset + offset, bytes, ..place };
            let groups = whole / 32 * 4;
            let parts = [
                part(0, whole),
                part(whole, groups),
                part(whole + groups, groups),
                part(whole + 2 * groups, u64::from(loose) * 4),
            ];
            assert_eq!(parts[3].offset + parts[3].bytes, place.offset + place.bytes);
            for (step, part) in pair.iter().flat_map(|step| parts.map(|part| (step, part))) {
                assert!(step.launch.arguments.contains(&Argument::Memory(part)), "{part:?} of {place:?}");
            }
        }
    }
}

/// Decode is bound by launches as much as by bytes: a budget that a change must not break unnoticed.
#[test]
fn decode_keeps_its_budget_of_launches() {
    let place = Place::new();
    for (preset, dtype, in_a_layer, outside) in [
        (Preset::E2b, DType::Q8_0, 7, 6),
        (Preset::E4b, DType::Q8_0, 7, 6),
        (Preset::Dense12b, DType::Q4_0, 5, 6),
        (Preset::Dense31b, DType::Q4_0, 5, 6),
        // One launch more: the router between attention and the mixture.
        (Preset::Moe26bA4b, DType::Q4_0, 6, 6),
    ] {
        let plan = inspected(&place, preset, dtype, &Options::default());
        let decode = &plan["phases"][0];
        assert_eq!(decode["name"], "decode");
        let (most, around) = (number(decode, "launches_per_layer"), number(decode, "launches_outside_layers"));
        eprintln!("{}: {most} a layer, {around} outside, {} in all", preset.name(), decode["launches"]);
        assert!(most <= in_a_layer, "{}: {most} launches a layer, {in_a_layer} are allowed", preset.name());
        assert!(around <= outside, "{}: {around} launches outside the layers, {outside} are allowed", preset.name());
    }
}

/// A prompt's rows read an expert once, however many chose it; where copies are asked for, its own are the first that a
/// budget leaves out.
#[test]
fn experts_are_read_once_by_all_rows_and_copied_where_memory_allows() {
    let place = Place::new();
    let plan = |vram| {
        let options = Options { vram, ..Options::default() }.with_copies();
        inspected(&place, Preset::Moe26bA4b, DType::Q4_0, &options)
    };
    let prefill = |plan: &Value| plan["phases"].as_array().expect("phases").last().expect("a phase").clone();
    // Kernels of a layer's steps, and whether they read copies.
    let copied = |plan: &Value, node: &str| -> bool {
        let phase = prefill(plan);
        let reads = |step: &&Value| step["nodes"].as_array().expect("nodes").iter().any(|name| name == node);
        let step = phase["steps"].as_array().expect("steps").iter().find(reads).expect("a step").clone();
        let kernel = step["kernel"].as_str().expect("a name").to_owned();
        kernel.starts_with("product_wgmma") || kernel.starts_with("product_tiles")
    };
    let device = |plan: &Value| number(&plan["memory"], "device");
    let all = plan(None);
    assert!(copied(&all, "blk.0.experts.down") && copied(&all, "blk.0.gated.out"));
    let fewer = plan(Some(device(&all) - 1));
    assert!(!copied(&fewer, "blk.0.experts.down") && copied(&fewer, "blk.0.gated.out"));
    // Then no copy is kept: weights are widened for one product after another, in the memory of two of them, as long as
    // that fits.
    let passing = plan(Some(device(&fewer) - 1));
    assert!(!copied(&passing, "blk.0.experts.down") && copied(&passing, "blk.0.gated.out"));
    let none = plan(Some(device(&passing) - 1));
    assert!(!copied(&none, "blk.0.experts.down") && !copied(&none, "blk.0.gated.out"));
    assert_eq!(number(&passing["memory"], "weights"), number(&none["memory"], "weights"));
    assert!(device(&passing) - device(&none) <= 2 * 2 * 9216 * 2816);
    let refusals = &none["passes"].as_array().expect("passes").iter().find(|pass| pass["name"] == "widened-weights");
    let reason = refusals.map(|pass| pass["refused"][0]["reason"].clone());
    assert_eq!(reason, Some(Value::from("the budget of memory has no room for it")));
    // 128 experts, of which each row goes to 8: gate, up and down of 704 x 2816 values, of 4.5 bits in the file. The
    // last of the 30 layers works on the asked row alone.
    let values = 29 * 128 * 3 * 704 * 2816;
    assert!(device(&all) - device(&fewer) > values * 2 - (1 << 30));
    let (bytes, weights) = (number(&prefill(&none), "bytes_read"), number(&none["memory"], "weights"));
    let around = number(&none["memory"], "kv") + 2048 * 30 * 1_100_000;
    assert!(bytes > values * 9 / 16 && bytes < weights + around, "{bytes} bytes");
}

/// Sequences come before copies of weights; what a budget leaves becomes pages, down to those of one sequence.
#[test]
fn sequences_come_before_copies_and_pages_fill_the_budget() {
    let place = Place::new();
    let plan = |sequences, vram| {
        let options = Options { sequences, snapshots: Some(2), vram, ..Options::default() }.with_copies();
        inspected(&place, Preset::Dense12b, DType::Q4_0, &options)
    };
    let device = |plan: &Value| number(&plan["memory"], "device");
    let one = plan(1, None);
    let many = plan(4, None);
    let (layout, of_one) = (&many["kv_layout"], &one["kv_layout"]);
    // 40 sliding layers of 8 heads of 256 values and 8 full ones of a head of 512, in f16.
    let page = number(layout, "page_bytes");
    assert_eq!(page, 128 * 40 * 2 * 8 * 512);
    assert_eq!((number(&layout["sliding"], "rows"), number(&layout["sliding"], "pages_of_a_sequence")), (128, 10));
    assert_eq!((number(&layout["full"], "rows"), number(&layout["full"], "pages_of_a_sequence")), (2560, 4));
    // And two snapshots of eleven pages.
    assert_eq!((number(layout, "pages"), number(of_one, "pages")), (4 * 14 + 22, 14 + 22));
    assert_eq!(number(&many["memory"], "kv"), 78 * page);
    assert_eq!(many["sequences"]["of_whole_context"], 4);
    let text = place.ok("inspect plan.bin");
    assert!(text.contains("room for 4 sequences of 8192 tokens\n"), "{text}");

    // A byte less, and the copies go before any sequence does.
    let smaller = plan(4, Some(device(&many) - 1));
    assert!(number(&smaller["memory"], "weights") < number(&many["memory"], "weights"));
    assert_eq!(smaller["kv_layout"], many["kv_layout"]);
    // Then the memory into which weights are widened for one product after another.
    let smallest = plan(4, Some(device(&smaller) - 1));
    assert_eq!(number(&smallest["memory"], "weights"), number(&smaller["memory"], "weights"));
    assert_eq!(smallest["kv_layout"], many["kv_layout"]);
    // Then pages, as many as fill the budget.
    let budget = device(&smallest) - 50 * page - 1;
    let least = plan(4, Some(budget));
    assert_eq!(number(&least["memory"], "weights"), number(&smallest["memory"], "weights"));
    let pages = number(&least["kv_layout"], "pages");
    assert!(device(&least) <= budget && device(&least) + page > budget, "{pages} pages");
    let (whole, each) = (&least["sequences"]["of_whole_context"], &least["sequences"]["tokens_of_each"]);
    assert_eq!((pages, whole.as_u64(), each.as_u64()), (27, Some(1), Some(640)));
    let text = place.ok("inspect plan.bin");
    assert!(text.contains("room for 1 sequence of 8192 tokens, or 4 sequences of 640"), "{text}");
    // One whole sequence is the least.
    let least = device(&smallest) - (78 - 14) * page;
    assert_eq!(number(&plan(4, Some(least))["kv_layout"], "pages"), 14);
}

/// The layers without keys of their own, and the LM head, are computed for the asked row alone.
#[test]
fn prefill_leaves_dead_rows_out() {
    let place = Place::new();
    for (preset, own_keys, percent) in [(Preset::E4b, 24, 58.0), (Preset::E2b, 15, 30.0)] {
        let plan = inspected(&place, preset, DType::Q8_0, &Options::default());
        let full = inspected(&place, preset, DType::Q8_0, &Options::default().without(&["dead-rows"]));
        let phases = |plan: &Value| plan["phases"].as_array().expect("phases").clone();
        for (phase, full) in phases(&plan).iter().zip(&phases(&full)).skip(1) {
            let steps = phase["steps"].as_array().expect("steps");
            for step in steps {
                let is_of_the_tail = step["layer"].as_u64().is_some_and(|layer| layer >= own_keys);
                let is_head = step["nodes"].as_array().expect("nodes").iter().any(|node| node == "head.out");
                if is_of_the_tail || is_head {
                    assert_eq!(number(step, "rows"), 1, "{} {}: {step}", preset.name(), phase["name"]);
                }
            }
            let layers = steps.iter().filter_map(|step| step["layer"].as_u64());
            assert_eq!(layers.max(), Some(number(&plan["model"], "layers") - 1), "the tail is there");
            let share = 100.0 * number(phase, "flops") as f64 / number(full, "flops") as f64;
            eprintln!("{} {}: {share:.1} % of the full work", preset.name(), phase["name"]);
            assert!((share - percent).abs() <= 3.0, "{} {}: {share} %", preset.name(), phase["name"]);
        }
    }
}

/// Bytes as the pages have them.
fn gigabytes(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

/// What a plan takes is known before a GPU is seen, and docs/compile.md says it: its table is what the compiler says
/// today. What a sliding layer costs follows from its window, not from the context.
#[test]
fn the_pages_tell_the_memory_of_full_sizes() {
    let place = Place::new();
    let page = include_str!("../../docs/compile.md");
    let mut rows = Vec::new();
    for (preset, dtype, name, longest) in [
        (Preset::E4b, DType::Q8_0, "E4B Q8_0", 131_072),
        (Preset::Dense12b, DType::Q4_0, "12B Q4_0", 262_144),
        (Preset::Moe26bA4b, DType::Q4_0, "26B-A4B Q4_0", 262_144),
        (Preset::Dense31b, DType::Q4_0, "31B Q4_0", 262_144),
    ] {
        let mut shortest: Option<(Vec<(bool, u64)>, u64)> = None;
        for context in [4096, 32_768, longest] {
            let options = Options { context: Some(context), ..Options::default() };
            let plan = inspected(&place, preset, dtype, &options);
            let bytes = |part: &str| gigabytes(number(&plan["memory"], part));
            let parts = ["weights", "kv", "arena", "host", "total"].map(bytes).join(" | ");
            rows.push(format!("| {name} | {context} | {parts} |"));

            let caches = plan["caches"].as_array().expect("caches").iter();
            let caches: Vec<_> = caches.map(|c| (c["window"].is_u64(), number(c, "bytes"))).collect();
            // What a page has beyond the rows of its layers is little: a full page's are as many as fit.
            let all: u64 = caches.iter().map(|(_, bytes)| bytes).sum();
            let layout = &plan["kv_layout"];
            let of_a_sequence = |kind: &str| number(&layout[kind], "pages_of_a_sequence");
            let (windows, full) = (of_a_sequence("sliding"), of_a_sequence("full"));
            let pages = (windows + full) * number(layout, "page_bytes");
            assert!(all <= pages && all * 20 >= pages * 19, "{name}: {all} bytes of layers in {pages}");
            let (before, full_before) = shortest.get_or_insert_with(|| (caches.clone(), full));
            for ((slides, before), (_, after)) in before.iter().zip(&caches) {
                let (pages_before, pages) = if *slides { (1, 1) } else { (*full_before, full) };
                assert_eq!(*after * pages_before, before * pages, "{name}: a layer at a context of {context}");
            }
            assert!(caches.iter().any(|(slides, _)| *slides), "{name} has sliding layers");
        }
        // Copies lie behind all that is loaded, so that a plan with its weights has none of them in its file.
        let options = Options { context: Some(4096), ..Options::default() };
        let program =
            |options: &Options| lowered::plan(&place.path("model.gguf"), options).cuda.expect("a GPU plan").program;
        let without_copies = program(&options).memory.weights;
        let with_copies = program(&options.with_copies());
        assert!(with_copies.memory.weights > without_copies, "{name}: there are copies");
        assert!(with_copies.loaded_bytes() <= without_copies, "{name}: a file would have copies in it");
        // Ten pages of 128 for a window of 1024 and 256 rows; 8 heads of 256, keys and values, two bytes each.
        if preset == Preset::Dense12b {
            let of_a_window = shortest.expect("caches").0.into_iter().find(|(slides, _)| *slides).expect("it slides").1;
            assert_eq!(of_a_window, 10 * 128 * 8 * 256 * 2 * 2);
        }
    }
    let missing: Vec<&String> = rows.iter().filter(|row| !page.lines().any(|line| line == *row)).collect();
    assert!(
        missing.is_empty(),
        "The table of memory in docs/compile.md says otherwise. It should be\n{}",
        rows.join("\n")
    );
}

/// The most memory a command had at a time, in bytes.
#[cfg(target_os = "linux")]
fn peak_memory(place: &Place, line: &str) -> u64 {
    use std::process::Stdio;
    let mut command = place.command(line);
    command.stdout(Stdio::null()).stderr(Stdio::null()).env("GEMMA4C_CACHE", place.path("cache"));
    let mut child = command.spawn().expect("the binary starts");
    let mut most = 0;
    loop {
        let ended = child.try_wait().expect("a child");
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let peak: Option<u64> =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        most = most.max(peak.unwrap_or(0) * 1024);
        if let Some(status) = ended {
            assert!(status.success(), "gemma4c {line}");
            return most;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Kernels and all. How long it takes is a benchmark's business.
#[cfg(target_os = "linux")]
#[test]
fn the_largest_size_compiles_in_little_memory() {
    if support::toolchain().is_none() {
        return;
    }
    let place = Place::new();
    header(&place.path("model.gguf"), Preset::Dense31b, DType::Q4_0);
    let most = peak_memory(&place, "compile model.gguf -o plan.bin --target cuda --arch sm_90a");
    assert!((1..1_000_000_000).contains(&most), "{most} bytes");
}

/// Each compile has a cache of its own, so the second finds nothing of the first. NVRTC 13.0 does not always choose the
/// same instructions for one text (docs/ledger.md), so the machine code is left out; whatever else is in the plan is
/// ours.
#[test]
fn two_compiles_that_share_nothing_differ_in_nothing_but_machine_code() {
    if support::toolchain().is_none() {
        return;
    }
    let place = Place::new();
    place.ok("synth tiny-moe -q q4_0 -o model.gguf");
    let compile = |cache: &str, plan: &str| {
        let line = format!("compile model.gguf -o {plan} --target cuda --arch sm_90a --ctx 256 --chunk 64");
        let ran = place.command(&line).env("GEMMA4C_CACHE", place.path(cache)).output().expect("it runs");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let mut plan = Plan::from_bytes(&place.read(plan)).expect("a plan");
        let program = plan.cuda.as_mut().expect("a program for a GPU");
        let code: usize = program.code.iter_mut().map(|code| std::mem::take(&mut code.image.0).len()).sum();
        assert!(code > 0, "no machine code");
        plan
    };
    assert!(compile("one", "one.bin") == compile("other", "other.bin"), "the plans differ");
}
