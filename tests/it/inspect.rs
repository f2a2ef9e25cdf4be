//! What `gemma4c inspect` tells of a GPU plan: the text as snapshots of a plan made by hand, the rest on one that was
//! compiled.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use crate::common::{Place, cuda_plan, golden};
use crate::support;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::nvrtc::{Cache, Compiler, Job, Options, Source, Toolchain};
use serde_json::Value;

/// A folder with `plan.bin`, made by hand.
static BY_HAND: LazyLock<Place> = LazyLock::new(|| {
    let place = Place::new();
    let plan = cuda_plan::with_cuda(cuda_plan::unfused(&place), cuda_plan::FUSED);
    place.write("plan.bin", plan.to_bytes().expect("a plan that can be written"));
    place
});

/// A folder with `plan.bin` as the compiler makes it, where there is NVRTC.
static COMPILED: LazyLock<Option<Place>> = LazyLock::new(|| {
    support::toolchain()?;
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --arch sm_90a --chunk 32 --ctx 256");
    Some(place)
});

fn json(place: &Place) -> Value {
    serde_json::from_str(&place.ok("inspect plan.bin --json")).expect("JSON")
}

#[test]
fn the_text_tells_memory_passes_and_phases() {
    assert_text!("plans", "inspect", BY_HAND.ok("inspect plan.bin --gpu h100"));
}

#[test]
fn a_phase_is_told_launch_by_launch() {
    let decode = BY_HAND.ok("inspect plan.bin --phase decode");
    assert_text!("plans", "inspect-phase", decode);
    assert!(decode.contains("H200"), "the default of sm_90a");
    let prefill = BY_HAND.ok("inspect plan.bin --phase prefill-8");
    assert!(prefill.contains("from here on: the asked row alone"), "{prefill}");
    let refused = BY_HAND.refused("inspect plan.bin --phase encode");
    assert_eq!(refused, "error: there is no phase `encode`: the plan has `decode`, `prefill 8`\n");
}

#[test]
fn what_a_plan_has_not_cannot_be_shown() {
    let (cpu, model) = (("cpu.bin", "is a plan for the CPU"), ("model.gguf", "is a model"));
    for (line, files) in
        [("--phase decode", &[cpu, model][..]), ("--cuda folder", &[cpu, model]), ("--html page.html", &[model])]
    {
        for (file, what) in files {
            let refused = BY_HAND.refused(&format!("inspect {file} {line}"));
            assert!(refused.contains(what), "{refused}");
        }
    }
    assert!(BY_HAND.refused("inspect plan.bin --gpu voodoo2").contains("there are h200, "));
}

/// The keys that programs rely on, and that the counts fit each other.
#[test]
fn json_has_what_programs_rely_on() {
    let Some(place) = &*COMPILED else { return };
    let plan = json(place);
    assert_eq!((plan["model"]["layers"].as_u64(), plan["arch"].as_str()), (Some(6), Some("sm_90a")));
    for pass in plan["passes"].as_array().expect("passes") {
        assert!(pass["name"].is_string() && pass["applied"].is_u64(), "{pass}");
        let refused = pass["refused"].as_array().expect("refusals");
        assert!(refused.iter().all(|r| r["node"].is_string() && r["reason"].is_string()), "{pass}");
        let nodes: BTreeSet<&str> = refused.iter().filter_map(|refusal| refusal["node"].as_str()).collect();
        assert_eq!(nodes.len(), refused.len(), "a node is refused twice: {pass}");
    }
    // Six layers of q, k and v, out, gate and up, down, and two per-layer products, and the LM head; prefill's are in
    // bf16.
    let int8 = plan["passes"].as_array().and_then(|passes| passes.iter().find(|pass| pass["name"] == "int8"));
    assert_eq!(int8.map(|pass| &pass["applied"]), Some(&Value::from(6 * 6 + 1)));
    let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"));
    let memory = &plan["memory"];
    let parts: u64 = ["weights", "kv", "arena", "host"].iter().map(|part| number(memory, part)).sum();
    assert_eq!(number(memory, "total"), parts);
    // A page holds caches of one kind, and is as large as those of the other kind need it.
    let (layout, caches) = (&plan["kv_layout"], plan["caches"].as_array().expect("caches").iter());
    assert_eq!(number(layout, "pages") * number(layout, "page_bytes"), number(memory, "kv"));
    assert!(caches.map(|cache| number(cache, "bytes")).sum::<u64>() <= number(memory, "kv"));
    let phases = plan["phases"].as_array().expect("phases");
    assert_eq!(
        phases.iter().map(|p| (p["name"].as_str().unwrap_or(""), number(p, "rows"))).collect::<Vec<_>>(),
        [("decode", 1), ("prefill 32", 32)]
    );
    for phase in phases {
        let steps = phase["steps"].as_array().expect("steps");
        assert_eq!(number(phase, "launches"), steps.len() as u64 + 1, "the pick is a launch");
        let of_layer = |layer: u64| steps.iter().filter(|step| step["layer"].as_u64() == Some(layer)).count() as u64;
        let by_layer: Vec<u64> = (0..6).map(of_layer).collect();
        assert_eq!(number(phase, "launches_per_layer"), *by_layer.iter().max().expect("layers"));
        let elsewhere = number(phase, "launches") - by_layer.iter().sum::<u64>();
        assert_eq!(number(phase, "launches_outside_layers"), elsewhere);
        assert_eq!(number(phase, "bytes_read"), steps.iter().map(|step| number(step, "bytes")).sum::<u64>());
        assert_eq!(number(phase, "flops"), steps.iter().map(|step| number(step, "flops")).sum::<u64>());
        assert!(number(phase, "arena_bytes") <= number(memory, "arena"));
        for step in steps {
            assert!(step["kernel"].is_string() && step["nodes"].is_array() && number(step, "block") > 0, "{step}");
            assert_eq!(step["grid"].as_array().map(Vec::len), Some(3), "{step}");
            let reason = step["reason"].as_str().unwrap_or_default();
            assert!(!reason.is_empty(), "{step}");
            // What was measured of whole plans, of some model, says nothing of this step.
            let words = format!("{reason} {}", step["runner_up"]);
            assert!(!["tokens/s", "E4B", "H200"].iter().any(|foreign| words.contains(foreign)), "{words}");
            let is_measured = step["kernel"] == "matvec" || step["kernel"] == "attention_step";
            assert!(step["runner_up"].is_string() || !is_measured && step["runner_up"].is_null(), "{step}");
        }
    }
    // Every value of a layer that a GPU computes is computed by some launch of decode.
    let nodes: BTreeSet<&str> = (phases[0]["steps"].as_array().expect("steps").iter())
        .flat_map(|step| step["nodes"].as_array().expect("nodes"))
        .filter_map(Value::as_str)
        .collect();
    for name in ["attention.q_raw", "attention.mixed", "gated.product", "layer.out"] {
        assert!((0..6).all(|layer| nodes.contains(format!("blk.{layer}.{name}").as_str())), "{name}: {nodes:?}");
    }
}

/// The texts in the folder are what the machine code was made of: they compile, and to the same bytes.
#[test]
fn every_kernels_text_compiles_as_it_is() {
    let Some(place) = &*COMPILED else { return };
    place.ok("inspect plan.bin --cuda kernels");
    let plan = gemma4c_plan::Plan::from_bytes(&place.read("plan.bin")).expect("a plan");
    let cuda = plan.cuda.expect("a GPU plan");
    let compiler = Compiler { toolchain: Toolchain::find().expect("NVRTC"), cache: Cache::from_env() };
    let instances: Vec<String> = cuda.program.kernels.iter().map(|kernel| format!("// {}", kernel.instance)).collect();
    let files = std::fs::read_dir(place.path("kernels")).expect("a folder");
    let mut sources = Vec::new();
    for file in files {
        let path = file.expect("a file").path();
        let text = std::fs::read_to_string(&path).expect("text");
        let first = text.lines().next().expect("a line");
        let at = instances.iter().position(|instance| instance == first).unwrap_or_else(|| panic!("{first}"));
        assert!(text.ends_with(&cuda.code[at].source), "{}", path.display());
        sources.push(Source { name: cuda.program.kernels[at].name.clone(), text });
    }
    assert_eq!(sources.len(), instances.len(), "a file for each kernel");
    let job = |source| Job { source, arch: Arch::Sm90a, options: Options::default() };
    let jobs: Vec<Job<'_>> = sources.iter().map(job).collect();
    for compiled in compiler.compile_all(&jobs) {
        assert!(!compiled.unwrap_or_else(|error| panic!("{error}")).cubin.bytes.is_empty());
    }
}

/// Every element is closed by its own end, and in order.
fn check_nesting(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page;
    while let Some((_, tag)) = rest.split_once('<') {
        let (inside, behind) = tag.split_once('>').expect("a tag ends");
        rest = behind;
        let name = inside.split([' ', '/', '\n']).find(|part| !part.is_empty()).unwrap_or("");
        match inside {
            _ if inside.starts_with('!') || ["meta", "input"].contains(&name) || inside.ends_with('/') => {}
            _ if inside.starts_with('/') => assert_eq!(open.pop(), Some(name), "before {:.80}", behind),
            // Their text is not of this language.
            _ if ["style", "script"].contains(&name) => {
                rest = behind.split_once(&format!("</{name}>")).expect("an end").1;
            }
            _ => open.push(name),
        }
    }
    assert_eq!(open, Vec::<&str>::new(), "left open");
}

/// The values of an attribute.
fn attributes<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    let start = format!(" {name}=\"");
    page.split(start.as_str()).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

#[test]
fn the_page_is_whole_and_needs_no_other_file() {
    let mut plans = vec![(&*BY_HAND, "plan.bin"), (&*BY_HAND, "cpu.bin")];
    plans.extend(COMPILED.as_ref().map(|place| (place, "plan.bin")));
    for (place, plan) in plans {
        assert_eq!(place.ok(&format!("inspect {plan} --html page.html")), "");
        let page = String::from_utf8(place.read("page.html")).expect("text");
        place.ok(&format!("inspect {plan} --html again.html"));
        assert_eq!(page.as_bytes(), place.read("again.html"), "the same plan, the same page");
        assert!(page.starts_with("<!doctype html>") && page.len() < 5_000_000, "{} bytes", page.len());
        check_nesting(&page);
        for outside in ["http:", "https:", " src=", "url(", "@import", "<link"] {
            assert!(!page.contains(outside), "the page asks for {outside}");
        }
        let ids = attributes(&page, "id");
        let unique: BTreeSet<&str> = ids.iter().copied().collect();
        assert_eq!(unique.len(), ids.len(), "an id is there twice");
        for link in attributes(&page, "href") {
            assert!(unique.contains(link.strip_prefix('#').expect("a link within the page")), "{link} leads nowhere");
        }
        // A plan for the CPU has none.
        let plan: Value = serde_json::from_str(&place.ok(&format!("inspect {plan} --json"))).expect("JSON");
        for kernel in plan["kernels"].as_array().into_iter().flatten() {
            let label = kernel["label"].as_str().expect("a label");
            assert!(unique.contains(format!("k-{label}").as_str()), "{label}");
        }
        let drawings = page.matches("<svg class=\"layer\"").count();
        assert!(drawings >= 2, "a sliding and a global layer, not {drawings}");
    }
}

/// What the page of a CPU plan counts is what the plan says.
#[test]
fn the_page_of_a_cpu_plan_counts_its_bytes() {
    BY_HAND.ok("inspect cpu.bin --html own_page.html");
    let page = String::from_utf8(BY_HAND.read("own_page.html")).expect("text");
    let plan: Value = serde_json::from_str(&BY_HAND.ok("inspect cpu.bin --json")).expect("JSON");
    for part in ["weights", "kv", "arena"] {
        let digits = plan["memory"][part].as_u64().expect("bytes").to_string();
        let shown: String = page.chars().filter(|c| *c != '\u{202f}').collect();
        assert!(shown.contains(&format!(">{digits} B<")), "{part}: {digits} bytes");
    }
    let steps = plan["phases"][0]["launches"].as_u64().expect("steps");
    assert!(page.contains(&format!("<b>{steps}</b><span>steps, one an operation</span>")));
    let graph = BY_HAND.ok("inspect cpu.bin --graph");
    assert!(graph.lines().all(|line| page.contains(&line.replace('>', "&gt;"))), "the graph is shown whole");
}

/// The text, the JSON, the page's card and its section say one sum: towers and a drafter count.
#[test]
fn the_page_says_what_inspect_says_of_memory() {
    let assets = concat!(env!("CARGO_MANIFEST_DIR"), "/assets");
    let place = Place::new();
    let (model, drafter) = (format!("{assets}/austen_q4_0.gguf"), format!("{assets}/austen_draft_q8_0.gguf"));
    place.ok(&format!("compile {model} --draft {drafter} -o drafted.bin --target cpu"));
    for (place, plan) in [(&place, "drafted.bin"), (&*BY_HAND, "cpu.bin"), (&*BY_HAND, "plan.bin")] {
        let text = place.ok(&format!("inspect {plan}"));
        let row = |name: &str| text.lines().find_map(|line| line.strip_prefix(&format!("  {name} "))).map(str::trim);
        let (bytes, total) = row("total").and_then(|row| row.split_once("  ")).expect("a total");
        let json: Value = serde_json::from_str(&place.ok(&format!("inspect {plan} --json"))).expect("JSON");
        assert_eq!(json["memory"]["total"].to_string(), bytes, "{plan}");
        place.ok(&format!("inspect {plan} --html summed.html"));
        let page = String::from_utf8(place.read("summed.html")).expect("text");
        assert!(page.contains(&format!("<h3>{total} in all</h3>")), "{plan}: {total}");
        let (card, what) = match row("on the device") {
            Some(row) => (row.split_once("  ").expect("bytes, then words").1, "on the device"),
            None => (total, "of memory, weights mapped"),
        };
        assert!(page.contains(&format!("<b>{card}</b><span>{what}</span>")), "{plan}: {card} {what}");
    }
}

/// A model's name may be anything.
#[test]
fn the_page_shows_names_and_does_not_run_them() {
    let place = Place::new();
    let mut plan = cuda_plan::with_cuda(cuda_plan::unfused(&place), cuda_plan::FUSED);
    plan.model.name = Some("<script>alert(1)</script>".into());
    plan.cuda.as_mut().expect("a GPU plan").program.passes[0].about = "a <b>bold\" pass".into();
    place.write("plan.bin", plan.to_bytes().expect("a plan that can be written"));
    place.ok("inspect plan.bin --html page.html");
    let page = String::from_utf8(place.read("page.html")).expect("text");
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;") && !page.contains("<script>alert"));
    assert!(page.contains("a &lt;b&gt;bold&quot; pass"));
    check_nesting(&page);
}

/// Any file is told from its header: what it is, what types its weights have, and whether it runs.
#[test]
fn a_file_of_any_kind_is_told() {
    for (name, lines) in [
        (
            "formats/e_mix_ud_q3_k_xl.gguf",
            &[
                "file           a Gemma 4 model",
                "  tables            1 q6_k, 1 q8_0 ",
                "1 q2_k, ",
                "runs           yes",
            ][..],
        ),
        ("formats/m_nvfp4.gguf", &["6 nvfp4", " 4.50 bits a weight", "unusual        19 scales of activations"]),
        ("converted/a_e2b.mmproj.q8_0.gguf", &["file           a projector", "23 q8_0", "runs           yes"]),
        ("converted/a_e2b_assistant.Q4_K_M.gguf", &["file           a drafter", "runs           yes"]),
        ("ggml-vocab-gemma-4.gguf", &["a vocabulary alone", "runs           no: it has no weights"]),
    ] {
        let Some(folder) = golden::folder() else { return };
        let file = folder.join(name);
        let place = Place::new();
        let text = place.ok(&format!("inspect '{}'", file.display()));
        for line in lines {
            assert!(text.contains(line), "{name} without `{line}`:\n{text}");
        }
        let told: Value =
            serde_json::from_str(&place.ok(&format!("inspect '{}' --json", file.display()))).expect("JSON");
        assert_eq!(told["contents"]["runs"].as_bool(), Some(text.contains("runs           yes")), "{name}");
    }
}

/// An adapter is told by what it changes: by itself it neither runs nor does not.
#[test]
fn an_adapter_is_told_by_its_pairs() {
    let Some(folder) = golden::folder() else { return };
    let (file, place) = (folder.join("lora/d_r4.gguf"), Place::new());
    let text = place.ok(&format!("inspect '{}'", file.display()));
    for line in
        ["file           an adapter (LoRA), beside a model", "changes        26 pairs in ", "runs           with any"]
    {
        assert!(text.contains(line), "without `{line}`:\n{text}");
    }
    let told: Value = serde_json::from_str(&place.ok(&format!("inspect '{}' --json", file.display()))).expect("JSON");
    assert_eq!((&told["form"], &told["pairs"]), (&Value::from("GGUF"), &Value::from(26)));
}

/// A type that no model is read in is named once, with the number of its tensors; nothing of it is left out.
#[test]
fn types_that_are_not_read_are_named_and_counted() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    let mut bytes = place.read("model.gguf");
    // Of every matrix's entry in the table of tensors: two dimensions, their sizes, and the type, which was 8.
    let mut changed = 0;
    for name in ["attn_q.weight", "attn_output.weight"] {
        let places: Vec<usize> =
            (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(name.as_bytes())).collect();
        for at in places {
            let ty = at + name.len() + 4 + 16;
            assert_eq!(bytes[ty..ty + 4], 8u32.to_le_bytes());
            bytes[ty..ty + 4].copy_from_slice(&19u32.to_le_bytes());
            changed += 1;
        }
    }
    place.write("odd.gguf", bytes);
    let refused = place.refused("compile odd.gguf -o plan.bin");
    let named = format!("iq1_s in {changed} tensors, which no model is read in");
    assert!(refused.contains(&named) && refused.lines().count() == 1, "{refused}");
    let text = place.ok("inspect odd.gguf");
    assert!(
        text.contains(&format!("{changed} iq1_s")) && text.contains("runs           no: this file has iq1_s"),
        "{text}"
    );
}
