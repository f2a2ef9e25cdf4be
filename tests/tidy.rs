//! Keeps the invariants of ARCHITECTURE.md: what the crates may import, what a file must and must not contain.
//!
//! Everything is read from `cargo metadata` and from the tree, so that a rule is broken by the change that breaks it and not
//! by a review that missed it. Each rule is a function from what it looks at to what is wrong with it; the last test plants a
//! fault for every one that reads sources, because a rule that finds nothing may be blind. A message says what to do.

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/functions.rs"]
mod functions;
#[path = "tidy/pages.rs"]
mod pages;
#[path = "tidy/source.rs"]
mod source;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;
use source::{Source, tree};

// -- What may import what ------------------------------------------------------------------------------------------------

/// Our crates, and which of them each may import. In this order none imports a later one.
const CRATES: [(&str, &[&str]); 13] = [
    ("gemma4c-blocks", &[]),
    ("gemma4c-ops", &[]),
    ("gemma4c-plan", &["gemma4c-blocks", "gemma4c-ops"]),
    ("gemma4c-graph", &["gemma4c-blocks", "gemma4c-ops"]),
    ("gemma4c-hub-standin", &[]),
    ("gemma4c-hub", &["gemma4c-hub-standin"]),
    ("gemma4c-dsl-macros", &[]),
    ("gemma4c-dsl", &["gemma4c-dsl-macros"]),
    ("gemma4c-runtime", &["gemma4c-blocks", "gemma4c-plan"]),
    ("gemma4c-models", &["gemma4c-blocks", "gemma4c-dsl", "gemma4c-graph", "gemma4c-plan"]),
    ("gemma4c-codegen", &["gemma4c-blocks", "gemma4c-dsl", "gemma4c-graph", "gemma4c-plan"]),
    // Of the compile side it has what its tests make a tiny model with.
    (
        "gemma4c-serve",
        &["gemma4c-blocks", "gemma4c-codegen", "gemma4c-graph", "gemma4c-models", "gemma4c-plan", "gemma4c-runtime"],
    ),
    // The program, where all of them meet.
    (
        "gemma4c",
        &[
            "gemma4c-blocks",
            "gemma4c-codegen",
            "gemma4c-dsl",
            "gemma4c-graph",
            "gemma4c-hub",
            "gemma4c-hub-standin",
            "gemma4c-models",
            "gemma4c-plan",
            "gemma4c-runtime",
            "gemma4c-serve",
        ],
    ),
];

/// Crates of others that shape whatever touches them, and the only crates of ours that may.
const HOMES: [(&str, &[&str]); 30] = [
    ("anyhow", &["gemma4c"]),
    ("assert_cmd", &["gemma4c"]),
    ("axum", &["gemma4c-serve"]),
    ("clap", &["gemma4c"]),
    ("clap_complete", &["gemma4c"]),
    ("clap_mangen", &["gemma4c"]),
    ("corosensei", &["gemma4c-dsl"]),
    ("cudarc", &["gemma4c-runtime"]),
    ("futures-util", &["gemma4c-serve"]),
    ("hyper", &["gemma4c-serve"]),
    ("hyper-util", &["gemma4c-serve"]),
    ("indicatif", &["gemma4c"]),
    ("libloading", &["gemma4c-codegen", "gemma4c-dsl", "gemma4c-runtime"]),
    ("llguidance", &["gemma4c-serve"]),
    ("memmap2", &["gemma4c-models", "gemma4c-runtime"]),
    ("minijinja", &["gemma4c-models"]),
    ("minijinja-contrib", &["gemma4c-models"]),
    ("petgraph", &["gemma4c-graph"]),
    ("proc-macro2", &["gemma4c-dsl-macros"]),
    ("quote", &["gemma4c-dsl-macros"]),
    ("rcgen", &["gemma4c-hub-standin"]),
    ("ring", &["gemma4c-hub", "gemma4c-hub-standin"]),
    ("rustix", &["gemma4c-hub"]),
    ("rustls", &["gemma4c-hub-standin"]),
    ("rustyline", &["gemma4c"]),
    ("signal-hook", &["gemma4c"]),
    ("subtle", &["gemma4c-serve"]),
    ("syn", &["gemma4c-dsl-macros"]),
    ("tokio", &["gemma4c-serve"]),
    ("toktrie", &["gemma4c-serve"]),
];

#[test]
fn our_crates_import_one_way() {
    let packages = packages();
    assert_eq!(packages.len(), CRATES.len(), "the crates of the workspace and of the table here differ");
    let mut wrong = Vec::new();
    for Package { name, dependencies, .. } in &packages {
        let Some((_, may_import)) = CRATES.iter().find(|(ours, _)| ours == name) else {
            wrong.push(format!("{name} is new: give it a row here and in ARCHITECTURE.md"));
            continue;
        };
        let imports = dependencies.iter().map(|d| d.name.as_str()).filter(|d| d.starts_with("gemma4c"));
        wrong.extend(imports.filter(|d| !may_import.contains(d)).map(|d| format!("{name} imports {d}")));
    }
    none("A crate of ours imports what it must not know. Move the code; move the test to tests/:", wrong);
}

/// Crates whose files import each other one way only.
const WITHOUT_CIRCLES: [&str; 14] = [
    "blocks/src/",
    "codegen/src/",
    "dsl/src/",
    "dsl/macros/src/",
    "graph/src/",
    "hub/src/",
    "hub/standin/src/",
    "models/src/",
    "ops/src/",
    "python/src/",
    "runtime/src/",
    "runtime/plan/src/",
    "serve/src/",
    "src/",
];

#[test]
fn files_import_one_way() {
    let found = WITHOUT_CIRCLES.iter().flat_map(|folder| circles::circles(sources(), folder)).collect();
    none("files of a crate import each other in a circle; move what both need to a file of its own:", found);
}

#[test]
fn circles_of_imports_are_seen() {
    let circles = |files: &[(&str, &str)]| {
        let sources: Vec<Source> = files.iter().map(|(path, text)| Source::new(path, text)).collect();
        circles::circles(&sources, "x/src/")
    };
    let lib = ("x/src/lib.rs", "mod a;\nmod b;\npub use b::Name;\n");
    assert_eq!(circles(&[lib, ("x/src/a.rs", "use crate::Name;\n"), ("x/src/b.rs", "pub struct Name;\n")]), [""; 0]);
    let found = circles(&[lib, ("x/src/a.rs", "use crate::Name;\n"), ("x/src/b.rs", "fn f() { super::a::g() }\n")]);
    assert_eq!(found, ["x/src/a.rs -> x/src/b.rs -> x/src/a.rs"]);
    // A folder's own file and the files in it, through names in braces.
    let folder = ("x/src/a/mod.rs", "mod c;\nuse c::{deep::One, Two};\npub struct Three;\n");
    let found = circles(&[lib, folder, ("x/src/a/c.rs", "use super::Three;\n")]);
    assert_eq!(found, ["x/src/a/c.rs -> x/src/a/mod.rs -> x/src/a/c.rs"]);
    // A name that is only passed on is no import; nor is what tests use.
    let folder = ("x/src/a/mod.rs", "mod c;\npub use c::Two;\npub struct Three;\n#[cfg(test)]\nuse c::Four;\n");
    assert_eq!(circles(&[lib, folder, ("x/src/a/c.rs", "use super::Three;\n")]), [""; 0]);
}

#[test]
fn crates_of_others_stay_at_home() {
    let mut wrong = Vec::new();
    for Package { name, dependencies, .. } in &packages() {
        for dependency in dependencies {
            let home = HOMES.iter().find(|(outside, _)| *outside == dependency.name);
            if home.is_some_and(|(_, homes)| !homes.contains(&name.as_str())) {
                wrong.push(format!("{name} imports {}", dependency.name));
            }
        }
    }
    none("A crate is imported outside its home. Ask the crate that has it for what you need:", wrong);
}

#[test]
fn every_dependency_is_used_and_explained() {
    let packages = packages();
    let dependencies = packages.iter().flat_map(|p| &p.dependencies);
    let used: BTreeSet<String> = dependencies.map(|d| d.name.clone()).collect();
    let declared = declared_dependencies(&read("Cargo.toml"));
    assert!(declared.contains("serde"), "the list of [workspace.dependencies] was not found in Cargo.toml");
    let mut unused: Vec<String> = declared.difference(&used).cloned().collect();
    for Package { name, folder, dependencies, .. } in &packages {
        let folders = ["src/", "tests/"].map(|part| format!("{folder}{part}"));
        let own = |source: &&Source| folders.iter().any(|folder| source.path.starts_with(folder));
        let code: String = sources().iter().filter(own).map(|s| s.code.as_str()).collect();
        let is_mentioned = |dependency: &&Dependency| mentions(&code, &dependency.name.replace('-', "_"));
        unused.extend(dependencies.iter().filter(|d| !is_mentioned(d)).map(|d| format!("{name}: {}", d.name)));
    }
    none("A dependency nobody uses. Delete its line:", unused);

    let architecture = read("ARCHITECTURE.md");
    let rows: Vec<&str> = architecture.lines().filter_map(|line| line.strip_prefix("| ")?.split('|').next()).collect();
    let has_row = |name: &String| rows.iter().any(|crates| crates.contains(&format!("`{name}`")));
    let is_explained = |name: &String| name.starts_with("gemma4c") || has_row(name);
    let unexplained = used.into_iter().filter(|name| !is_explained(name)).collect();
    none("A dependency without a reason. Give it a row in ARCHITECTURE.md:", unexplained);
    let is_mapped = |package: &&Package| architecture.contains(&format!("`{}`", package.name));
    let unmapped = packages.iter().filter(|p| !is_mapped(p)).map(|p| p.name.clone()).collect();
    none("A crate the code map of ARCHITECTURE.md does not name:", unmapped);
}

/// `cargo build` and `cargo test` need no GPU, no CUDA toolkit and no other compiler.
#[test]
fn building_needs_nothing_but_rust() {
    let mut wrong = Vec::new();
    for Package { name, dependencies, has_build_script, .. } in &packages() {
        if *has_build_script {
            wrong.push(format!("{name} has a build script"));
        }
        for Dependency { features, .. } in dependencies.iter().filter(|d| d.name == "cudarc") {
            let loads = features.iter().any(|f| f.ends_with("dynamic-loading"));
            if !loads || features.iter().any(|f| f.ends_with("-linking")) {
                wrong.push(format!("{name} links CUDA: cudarc must load its libraries at run time (dynamic-loading)"));
            }
        }
    }
    none("Building must need nothing but Rust:", wrong);
}

// -- What a file must and must not contain -------------------------------------------------------------------------------

/// The files that may be unsafe, and what for.
const UNSAFE: [(&str, &str); 29] = [
    ("codegen/src/nvrtc/sys.rs", "calls NVRTC"),
    ("dsl/src/host.rs", "loads kernels compiled for the host"),
    ("dsl/src/intrinsics/asynchronous.rs", "finishes copies in a simulated GPU's memory"),
    ("dsl/src/intrinsics/tiles.rs", "reads and brings tiles of a simulated GPU's memory"),
    ("dsl/src/intrinsics/warpgroup.rs", "reads tiles of a simulated GPU's memory as late as the product is waited for"),
    ("dsl/src/sim/cluster.rs", "runs coroutines on stacks of their own"),
    ("dsl/src/sim/mbarrier.rs", "finishes bulk copies in a simulated GPU's memory"),
    ("dsl/src/sim/memory.rs", "is a simulated GPU's memory, checked at every access"),
    ("dsl/src/sim/stacks.rs", "says where a coroutine's stack starts"),
    ("dsl/src/sim/thread.rs", "finds the coroutine that is running"),
    ("models/src/gguf/map.rs", "maps model files"),
    ("models/tests/support/counting_allocator.rs", "counts what a test allocates"),
    ("runtime/src/cpu/ops/prefetch.rs", "asks for a mapped file's bytes before they are read"),
    ("runtime/src/cuda/backend.rs", "launches a plan's kernels, and copies beside them"),
    ("runtime/src/cuda/device.rs", "calls the CUDA driver"),
    ("runtime/src/cuda/graph.rs", "calls the CUDA driver"),
    ("runtime/src/cuda/green.rs", "calls the CUDA driver"),
    ("runtime/src/cuda/launch.rs", "calls the CUDA driver"),
    ("runtime/src/cuda/load.rs", "launches a plan's kernels, and copies beside them"),
    ("runtime/src/cuda/load_image.rs", "copies weights to a GPU"),
    ("runtime/src/cuda/pinned.rs", "calls the CUDA driver, and is memory that it gives"),
    ("runtime/src/cuda/profile.rs", "replays a plan's kernels"),
    ("runtime/src/cuda/streams.rs", "calls the CUDA driver"),
    ("runtime/src/cuda/words.rs", "copies from a GPU while it runs"),
    ("runtime/src/machine.rs", "calls the CUDA driver"),
    ("runtime/src/map.rs", "maps model files"),
    ("serve/src/memory.rs", "calls glibc's malloc_trim"),
    ("runtime/src/cuda/cublaslt.rs", "calls cuBLASLt, a yardstick"),
    ("src/commands/kernels/gpu.rs", "launches kernels on a GPU"),
];

const MOST_LINES: usize = 600;

#[test]
fn unsafe_stays_where_it_must_be() {
    let sources = sources();
    let found =
        sources.iter().filter(|s| !unsafe_lines(s).is_empty() && !UNSAFE.iter().any(|(path, _)| *path == s.path));
    none(
        "Unsafe code outside the listed files. Find a safe way; if it touches CUDA, a mapped file or a stack, list it here:",
        found.map(|s| s.path.clone()).collect(),
    );
    let is_unsafe = |path: &str| sources.iter().any(|s| s.path == path && !unsafe_lines(s).is_empty());
    let stale = UNSAFE.iter().filter(|(path, _)| !is_unsafe(path));
    none("Listed as unsafe, but it is not. Delete the line here:", stale.map(|(path, _)| path.to_string()).collect());
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    check("Put a `// SAFETY:` comment right before it:", unexplained_unsafe);
}

#[test]
fn every_file_says_what_it_is() {
    check("Start the file with a `//!` comment: what it is, why, and what it leaves to others:", silent_start);
}

#[test]
fn files_fit_in_the_head() {
    check("Too long to hold in the head. Split it by topic:", too_long);
}

#[test]
fn nothing_is_left_unfinished() {
    check("Finish it or leave it out; a plan for later goes into docs/ledger.md:", unfinished);
}

#[test]
fn libraries_print_nothing() {
    check("Return it, or an error; only programs print:", chatty);
}

#[test]
fn texts_name_no_machine_and_no_day() {
    check("Say it without the path of one machine and without a date:", machine_or_day);
}

/// Every operation has a meaning the CPU can run, and something that tests it.
#[test]
fn every_op_has_a_meaning_and_a_case() {
    let sources = sources();
    let ops = ops(&read("ops/src/op.rs"));
    assert!(ops.len() >= 43, "the names of the operations were not found in ops/src/op.rs: {ops:?}");
    let executor = &sources.iter().find(|s| s.path == "runtime/src/cpu/executor.rs").expect("the executor").code;
    let without = ops.iter().filter(|(variant, _)| !mentions(executor, &format!("Op::{variant}")));
    none("An operation the CPU backend does not run:", without.map(|(_, name)| name.clone()).collect());

    let snapshots = sources.iter().filter(|s| s.path.ends_with(".snap")).map(|s| s.text.as_str());
    let cases: String = sources.iter().map(Source::test_code).chain(snapshots).collect::<Vec<_>>().join("\n");
    let has_case = |(variant, name): &(String, String)| {
        mentions(&cases, &format!("Op::{variant}")) || cases.contains(&format!("= {name}("))
    };
    let without = ops.iter().filter(|op| !has_case(op));
    none("An operation no test and no snapshot of a graph shows:", without.map(|(_, name)| name.clone()).collect());
}

#[test]
fn every_snapshot_belongs_to_a_test() {
    let sources = sources();
    let mut wrong = Vec::new();
    for snapshot in sources.iter().filter(|s| s.path.ends_with(".snap")) {
        wrong.extend(orphaned(snapshot, sources).map(|why| format!("{}: {why}", snapshot.path)));
    }
    none("A snapshot nobody compares with. Delete it, or mend the test it was for:", wrong);
}

/// A rule that finds nothing may be blind: each is shown a fault, and the same without the fault.
#[test]
fn the_rules_see_planted_faults() {
    let rust = |text: &str| Source::new("planted/src/lib.rs", text);
    let sees = |rule: fn(&Source) -> Vec<String>, fault: &str, fine: &str| {
        assert_eq!(rule(&rust(fault)).len(), 1, "not seen: {fault}");
        assert_eq!(rule(&rust(fine)), Vec::<String>::new(), "seen, but fine: {fine}");
    };
    sees(
        unexplained_unsafe,
        "fn f() {\n    // It works.\n    unsafe { g() }\n}",
        "// SAFETY: g asks for nothing.\nunsafe { g() }",
    );
    sees(
        unexplained_unsafe,
        "unsafe impl Send for A {}",
        "// SAFETY: it is.\n#[allow(unsafe_code)]\nunsafe impl Send for A {}",
    );
    sees(unexplained_unsafe, "// SAFETY: too far.\n\n\n\n\nunsafe { g() }", "type F = unsafe extern \"C\" fn();");
    sees(silent_start, "//! .\n", "//! What it is and why.\n");
    sees(silent_start, "use std::fs;\n", "//! What it is and why.\nuse std::fs;\n");
    sees(too_long, &"\n".repeat(MOST_LINES + 1), &"\n".repeat(MOST_LINES));
    let body = |lines: usize| format!("fn f() {{{}}}\nfn g() {{}}", "\n".repeat(lines - 1));
    sees(functions::long, &body(151), &body(150));
    let kernel = |parameters: usize| format!("#[kernel]\nfn f({}) {{}}", "x: Input<f32>, ".repeat(parameters));
    sees(functions::many_parameters, &kernel(9), &kernel(8));
    sees(functions::many_parameters, &kernel(9), &kernel(9).replace("kernel", "inline"));
    let device = |constants: usize| format!("#[device]\nfn f<{}>() {{}}", "const N: u32, ".repeat(constants));
    sees(functions::many_parameters, &device(9), &device(8));
    sees(unfinished, "fn f() { todo!() }", "fn f() { print(\"todo!()\") }");
    sees(unfinished, "#[ignore = \"slow\"]\n#[test]\nfn f() {}", "// #[ignore] hides a test.");
    sees(unfinished, "// FIXME: sometimes wrong", "let hex = 0xfixme;");
    sees(chatty, "fn f() { println!(); }", "#[cfg(test)]\nmod tests { fn f() { eprintln!(); } }");
    sees(machine_or_day, &format!("let a = \"/{}/me/model.gguf\";", "home"), "let a = \"models/home/x\";");
    sees(machine_or_day, &format!("// Since 20{}.", "25-06-01"), "let a = 2025 - 06 - 01;");
    let test = Source::new("models/tests/a.rs", "insta::assert_snapshot!(\"kept\", text);");
    let sources = [test];
    let snapshot = |header: &str| Source::new("snapshots/kept.snap", &format!("---\n{header}\n---\nbody\n"));
    for (header, orphan) in [
        ("source: models/tests/a.rs\nexpression: text", false),
        ("source: models/tests/a.rs\nexpression: other", true),
        ("source: models/tests/a.rs", false),
        ("source: models/tests/gone.rs\nexpression: text", true),
        ("expression: text", true),
    ] {
        assert_eq!(orphaned(&snapshot(header), &sources).is_some(), orphan, "{header}");
    }
}

// -- The rules -----------------------------------------------------------------------------------------------------------

/// Lines that open an unsafe block, implementation or function; types of unsafe functions are harmless.
fn unsafe_lines(source: &Source) -> Vec<usize> {
    let opens = |line: &str| {
        let after: Vec<&str> = line.split("unsafe").skip(1).collect();
        mentions(line, "unsafe") && after.iter().any(|rest| [" {", " impl", " fn "].iter().any(|o| rest.starts_with(o)))
    };
    source.code.lines().enumerate().filter(|(_, line)| opens(line)).map(|(number, _)| number).collect()
}

fn unexplained_unsafe(source: &Source) -> Vec<String> {
    let (code, comments): (Vec<&str>, Vec<&str>) = (source.code.lines().collect(), source.comments.lines().collect());
    let is_comment = |line: usize| !comments[line].trim().is_empty();
    let is_explained = |line: usize| {
        // An attribute or the head of the statement may stand between.
        let nearest = (0..line).rev().take(3).find(|l| is_comment(*l));
        let block = nearest.map(|last| (0..=last).rev().take_while(|l| is_comment(*l)));
        block.is_some_and(|mut lines| lines.any(|l| comments[l].contains("SAFETY:")))
    };
    // What an unsafe function asks for is its trait's or its own documentation's to say.
    let lines = unsafe_lines(source).into_iter().filter(|line| !code[*line].contains("unsafe fn "));
    lines.filter(|line| !is_explained(*line)).map(|line| format!("{}:{}", source.path, line + 1)).collect()
}

fn silent_start(source: &Source) -> Vec<String> {
    let says =
        source.text.strip_prefix("//! ").and_then(|text| text.lines().next()).is_some_and(|line| line.len() > 15);
    match source.is_rust() && !says {
        true => vec![source.path.clone()],
        false => Vec::new(),
    }
}

fn too_long(source: &Source) -> Vec<String> {
    match source.text.lines().count() {
        lines if source.is_rust() && lines > MOST_LINES => vec![format!("{} has {lines} lines", source.path)],
        _ => Vec::new(),
    }
}

fn unfinished(source: &Source) -> Vec<String> {
    const CODE: [&str; 4] = ["todo!", "unimplemented!", "dbg!", "#[ignore"];
    let in_code = source.places(&source.code, |line| CODE.iter().any(|word| line.contains(word)));
    let in_comments = |line: &str| ["TODO", "FIXME", "XXX"].iter().any(|word| mentions(line, word));
    [in_code, source.places(&source.comments, in_comments)].concat()
}

fn chatty(source: &Source) -> Vec<String> {
    const WORDS: [&str; 4] = ["print!", "println!", "eprint!", "eprintln!"];
    let is_program = source.path.starts_with("src/") || source.path.ends_with("/src/main.rs");
    let is_library = source.path.contains("/src/") && !is_program;
    let end = source.code.len() - source.test_code().len();
    let code = if is_library { &source.code[..end] } else { "" };
    source.places(code, |line| WORDS.iter().any(|word| line.contains(word)))
}

fn machine_or_day(source: &Source) -> Vec<String> {
    let is_day = |text: &str| {
        let shape = b"0000-00-00";
        text.as_bytes().windows(shape.len()).any(|window| {
            let fits = |(c, s): (&u8, &u8)| if *s == b'-' { c == s } else { c.is_ascii_digit() };
            window.starts_with(b"20") && window.iter().zip(shape).all(fits)
        })
    };
    let is_machine = |line: &str| {
        ["root", "home", "work", "tmp"].iter().any(|folder| {
            let starts_path = |c: char| !c.is_alphanumeric() && !"._-/}~*".contains(c);
            let is_whole = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || "_-".contains(c));
            let folder = format!("/{folder}");
            let mut places = line.match_indices(&folder);
            places.any(|(at, _)| line[..at].ends_with(starts_path) && is_whole(&line[at + folder.len()..]))
        })
    };
    // A ledger without days would not say which figure is the newer one, nor a table of files since when each was checked.
    let is_ledger = ["BENCHMARKS.md", "docs/ledger.md", "docs/formats.md"].contains(&source.path.as_str());
    match source.path.starts_with("LICENSE") {
        true => Vec::new(),
        false => source.places(&source.text, |line| (is_day(line) && !is_ledger) || is_machine(line)),
    }
}

/// Why a snapshot has no test, by what insta writes into its header: the test's file and the expression it showed.
fn orphaned(snapshot: &Source, sources: &[Source]) -> Option<String> {
    let header = snapshot.text.strip_prefix("---\n")?.split("\n---").next()?;
    let field = |name: &str| header.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let Some(path) = field("source:") else { return Some("no `source` in its header".into()) };
    let Some(test) = sources.iter().find(|s| s.path == path) else { return Some(format!("{path} is not there")) };
    let letters = |text: &str| text.replace('\\', "").split_whitespace().collect::<String>();
    let stem = Path::new(&snapshot.path).file_stem()?.to_string_lossy().into_owned();
    let own_name = stem.rsplit("__").next()?.to_string();
    let shown = field("expression:").map_or(own_name, |expression| expression.trim_matches('"').to_string());
    (!letters(&test.text).contains(&letters(&shown))).then(|| format!("{path} has no `{shown}`"))
}

/// Variants and names of the operations, from the rows of their table: `gather(tokens) => Gather { table: WeightId };`.
fn ops(text: &str) -> Vec<(String, String)> {
    let row = |line: &str| {
        let (written, variant) = line.strip_suffix(';')?.split_once(") => ")?;
        let (name, _) = written.trim().split_once('(')?;
        Some((variant.split(' ').next()?.to_string(), name.to_string()))
    };
    let (_, table) = text.split_once("\noperations! {\n").unwrap_or_default();
    table.lines().take_while(|line| *line != "}").filter_map(row).collect()
}

/// Whether `word` stands in `text` and is not part of a longer one.
fn mentions(text: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut places = text.match_indices(word);
    places.any(|(at, _)| !text[..at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word))
}

// -- Reading the project -------------------------------------------------------------------------------------------------

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The tree, read once.
fn sources() -> &'static [Source] {
    static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(|| tree(root()));
    assert!(SOURCES.iter().any(|s| s.path == "tests/tidy.rs"), "the tree was not found at {}", root().display());
    &SOURCES
}

/// Runs a rule over the whole tree.
#[track_caller]
fn check(remedy: &str, rule: fn(&Source) -> Vec<String>) {
    none(remedy, sources().iter().flat_map(rule).collect());
}

#[track_caller]
fn none(remedy: &str, found: Vec<String>) {
    assert!(found.is_empty(), "{remedy}\n  {}", found.join("\n  "));
}

/// What cargo says of one of our crates.
struct Package {
    name: String,
    /// From the root, with a `/` at its end; empty for the root itself.
    folder: String,
    /// Of every kind: what a test imports, it knows too.
    dependencies: Vec<Dependency>,
    has_build_script: bool,
}

struct Dependency {
    name: String,
    features: Vec<String>,
    is_for_tests: bool,
}

/// The packages of the workspace. Needs no network.
fn packages() -> Vec<Package> {
    let cargo = std::env::var("CARGO").unwrap_or("cargo".into());
    let arguments = ["metadata", "--format-version", "1", "--no-deps", "--offline"];
    let output = Command::new(cargo).args(arguments).current_dir(root()).output().expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let dependency = |value: &Value| Dependency {
        name: text(&value["name"]),
        features: list(&value["features"]).iter().map(text).collect(),
        is_for_tests: value["kind"] == "dev",
    };
    let folder = |manifest: &str| {
        let folder = Path::new(manifest).parent()?.strip_prefix(text(&metadata["workspace_root"])).ok()?.to_str()?;
        Some(if folder.is_empty() { String::new() } else { format!("{folder}/") })
    };
    let package = |value: &Value| Package {
        name: text(&value["name"]),
        folder: folder(&text(&value["manifest_path"])).expect("packages lie in the workspace"),
        dependencies: list(&value["dependencies"]).iter().map(dependency).collect(),
        has_build_script: list(&value["targets"]).iter().any(|t| list(&t["kind"]).contains(&"custom-build".into())),
    };
    list(&metadata["packages"]).iter().map(package).collect()
}

/// The names in `[workspace.dependencies]`.
fn declared_dependencies(manifest: &str) -> BTreeSet<String> {
    let lines = manifest.lines().skip_while(|line| *line != "[workspace.dependencies]").skip(1);
    let names = lines.take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once(" = "));
    names.map(|(name, _)| name.to_string()).collect()
}
