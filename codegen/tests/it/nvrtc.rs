//! NVRTC end to end, on a machine without a GPU: found, called, cached, and clear when something is wrong.

use crate::support;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::nvrtc::{Cache, Compiler, Job, NvrtcError, Options, Places, Source, Toolchain};
use std::fs;
use std::path::{Path, PathBuf};

fn source(name: &str, text: &str) -> Source {
    Source { name: name.to_owned(), text: text.to_owned() }
}

/// Reverses tiles of 256 values: enough to use shared memory, a barrier and a few registers.
fn reverse() -> Source {
    source(
        "reverse",
        r#"
extern "C" __global__ void reverse(float* output, const float* input) {
    __shared__ float tile[256];
    int first = blockIdx.x * 256;
    tile[threadIdx.x] = input[first + threadIdx.x];
    __syncthreads();
    output[first + threadIdx.x] = tile[255 - threadIdx.x];
}
"#,
    )
}

/// Keeps 64 values alive at once: they fit in registers unless told to use 24.
fn greedy() -> Source {
    source(
        "greedy",
        r#"
extern "C" __global__ void greedy(float* output, const float* input) {
    float kept[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) kept[i] = input[i * 32 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; i++) output[i * 32 + threadIdx.x] = kept[i] * kept[(i * 7 + 3) % 64];
}
"#,
    )
}

/// The error of a kernel that must not compile.
fn refusal(toolchain: &Toolchain, source: &Source) -> String {
    toolchain.compile(source, Arch::Sm90a, Options::default()).expect_err("the kernel is broken").to_string()
}

fn assert_error_snapshot(name: &str, error: &str) {
    insta::with_settings!({
        snapshot_path => "../../../snapshots/errors",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!(name, error) });
}

#[test]
fn one_kernel_compiles_for_every_architecture() {
    let Some(toolchain) = support::toolchain() else { return };
    for arch in Arch::ALL {
        let cubin = toolchain.compile(&reverse(), arch, Options::default()).unwrap();
        assert_eq!(&cubin.bytes[..4], b"\x7fELF", "{arch}");
        assert_eq!(cubin.resources.shared_bytes, 1024, "{arch}");
        assert!((4..64).contains(&cubin.resources.registers), "{arch}: {:?}", cubin.resources);
        assert!(!cubin.resources.spills() && cubin.resources.stack_bytes == 0, "{arch}: {:?}", cubin.resources);
        assert_eq!(cubin.warnings().next(), None, "{arch}");
        let again = toolchain.compile(&reverse(), arch, Options::default()).unwrap();
        assert!(again == cubin, "{arch}: two compilations of one text differ");
    }
}

/// PTX is a text with a zero byte at its end, as a driver takes it, and no assembler has said what it takes.
#[test]
fn a_kernel_compiles_to_ptx_for_gpus_that_nobody_compiled_for() {
    let Some(toolchain) = support::toolchain() else { return };
    let ptx = toolchain.compile(&reverse(), Arch::Compute80, Options::default()).unwrap();
    let (zero, text) = ptx.bytes.split_last().unwrap();
    let text = std::str::from_utf8(text).unwrap();
    assert!(*zero == 0 && !text.contains('\0'), "{text}");
    assert!(text.contains("\n.target sm_80\n") && text.contains(".visible .entry reverse("), "{text}");
    assert_eq!(ptx.resources, Default::default());
    let wrong = Source { name: "not_there".into(), ..reverse() };
    let error = toolchain.compile(&wrong, Arch::Compute80, Options::default()).unwrap_err().to_string();
    assert!(error.contains("not_there"), "{error}");
}

/// The assembler refuses what an architecture lacks, so it can check what we say of each.
#[test]
fn the_architectures_have_what_we_say_they_have() {
    let Some(toolchain) = support::toolchain() else { return };
    type Fact = fn(Arch) -> bool;
    let facts: [(&str, Fact, &str); 3] = [
        ("programmatic dependent launch", Arch::has_pdl, "griddepcontrol.wait;"),
        ("wgmma", Arch::has_wgmma, "wgmma.fence.sync.aligned;"),
        ("TMA", Arch::has_tma, "cp.async.bulk.commit_group;"),
    ];
    for (fact, is_said_of, instruction) in facts {
        let text = format!("extern \"C\" __global__ void probe() {{ asm volatile(\"{instruction}\"); }}\n");
        for arch in Arch::ALL {
            let compiled = toolchain.compile(&source("probe", &text), arch, Options::default());
            assert_eq!(compiled.is_ok(), is_said_of(arch), "{fact} on {arch}: {compiled:?}");
        }
    }
}

#[test]
fn spills_are_reported_when_registers_run_out() {
    let Some(toolchain) = support::toolchain() else { return };
    let roomy = toolchain.compile(&greedy(), Arch::Sm89, Options::default()).unwrap().resources;
    assert!(!roomy.spills() && roomy.registers >= 64, "{roomy:?}");
    let tight = toolchain.compile(&greedy(), Arch::Sm89, Options { max_registers: Some(24) }).unwrap().resources;
    assert!(tight.spill_stores > 0 && tight.spill_loads > 0 && tight.stack_bytes > 0, "{tight:?}");
    assert!(tight.registers <= 24, "{tight:?}");
}

#[test]
fn warnings_survive_a_successful_compilation() {
    let Some(toolchain) = support::toolchain() else { return };
    let text = "extern \"C\" __global__ void idle() { int forgotten = 3; }\n";
    let cubin = toolchain.compile(&source("idle", text), Arch::Sm80, Options::default()).unwrap();
    let warnings: Vec<&str> = cubin.warnings().collect();
    assert!(matches!(warnings[..], [warning] if warning.contains("forgotten")), "{warnings:?}");
}

#[test]
fn a_broken_kernel_shows_its_log_and_its_numbered_lines() {
    let Some(toolchain) = support::toolchain() else { return };
    let mut broken = reverse();
    broken.text = broken.text.replace("tile[threadIdx.x] =", "tiles[threadIdx.x] =");
    assert_error_snapshot("nvrtc-broken-kernel", &refusal(&toolchain, &broken));
}

#[test]
fn refused_inline_assembly_shows_the_lines_the_assembler_saw() {
    let Some(toolchain) = support::toolchain() else { return };
    let text = "extern \"C\" __global__ void assembly(int* output) { asm volatile(\"mistake.u32 %0;\" :: \"r\"(output[0])); }\n";
    let error = refusal(&toolchain, &source("assembly", text));
    assert!(error.starts_with("kernel `assembly` does not compile for sm_90a:"), "{error}");
    let marked = error.lines().find(|line| line.starts_with('>'));
    assert!(marked.is_some_and(|line| line.contains("mistake.u32")), "{error}");
}

/// With resource usage asked for, the assembler leaves this error out of the log.
#[test]
fn too_much_shared_memory_says_so() {
    let Some(toolchain) = support::toolchain() else { return };
    let mut huge = reverse();
    huge.text = huge.text.replace("tile[256]", "tile[256000]");
    let error = refusal(&toolchain, &huge);
    assert!(error.contains("too much shared data"), "{error}");
}

#[test]
fn a_text_without_the_promised_kernel_names_what_it_has() {
    let Some(toolchain) = support::toolchain() else { return };
    let misnamed = Source { name: "forward".to_owned(), ..reverse() };
    let expected =
        "the source of kernel `forward` has no `extern \"C\" __global__` function of that name; it has `reverse`";
    assert_eq!(refusal(&toolchain, &misnamed), expected);
    assert!(refusal(&toolchain, &source("nothing", "")).ends_with("it has no kernel"));
    assert!(refusal(&toolchain, &source("cut", "// \0")).contains("its source contains a NUL character"));
}

#[test]
fn a_deeply_nested_expression_does_not_exhaust_the_stack() {
    let Some(toolchain) = support::toolchain() else { return };
    let (open, close) = ("(".repeat(2000), " + 1.0f)".repeat(2000));
    let text = format!("extern \"C\" __global__ void deep(float* v) {{ v[0] = {open}v[0]{close}; }}\n");
    toolchain.compile(&source("deep", &text), Arch::Sm90a, Options::default()).unwrap();
}

fn reverse_on_hopper(compiler: &Compiler) -> (bool, Vec<u8>) {
    let job = Job { source: &reverse(), arch: Arch::Sm90a, options: Options::default() };
    let compiled = compiler.compile(job).expect("the kernel compiles");
    (compiled.from_cache, compiled.cubin.bytes)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder is there");
    entries.map(|entry| entry.expect("the folder is readable").path()).collect()
}

#[test]
fn a_second_compilation_comes_from_the_cache_and_a_damaged_entry_does_not() {
    let Some(toolchain) = support::toolchain() else { return };
    let folder = tempfile::tempdir().unwrap();
    let compiler = Compiler { toolchain, cache: Cache::at(folder.path().join("cubins")) };
    let (from_cache, bytes) = reverse_on_hopper(&compiler);
    assert!(!from_cache);
    assert_eq!(reverse_on_hopper(&compiler), (true, bytes.clone()));

    let entries = files(compiler.cache.folder().unwrap());
    let [entry] = &entries[..] else { panic!("one entry and no temporary file: {entries:?}") };
    let mut damaged = fs::read(entry).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(entry, damaged).unwrap();
    assert_eq!(reverse_on_hopper(&compiler), (false, bytes.clone()), "a damaged entry is compiled again");
    assert_eq!(reverse_on_hopper(&compiler), (true, bytes), "and replaced");
}

#[test]
fn whatever_changes_the_result_changes_the_entry() {
    let Some(toolchain) = support::toolchain() else { return };
    let folder = tempfile::tempdir().unwrap();
    let compiler = Compiler { toolchain, cache: Cache::at(folder.path()) };
    let (reverse, greedy) = (reverse(), greedy());
    let job = Job { source: &reverse, arch: Arch::Sm90a, options: Options::default() };
    let jobs = [
        job,
        Job { arch: Arch::Sm120a, ..job },
        Job { options: Options { max_registers: Some(32) }, ..job },
        Job { source: &greedy, ..job },
    ];
    assert!(compiler.compile_all(&jobs).into_iter().all(|result| !result.unwrap().from_cache));
    assert_eq!(files(folder.path()).len(), jobs.len());
    assert!(compiler.compile_all(&jobs).into_iter().all(|result| result.unwrap().from_cache));
}

#[test]
fn an_unwritable_cache_costs_time_only_and_is_noted() {
    let Some(toolchain) = support::toolchain() else { return };
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("a file where the folder should be");
    fs::write(&blocked, "").unwrap();
    let compiler = Compiler { toolchain, cache: Cache::at(&blocked) };
    assert!(!reverse_on_hopper(&compiler).0);
    assert!(!reverse_on_hopper(&compiler).0);
    assert!(compiler.cache.problem().is_some_and(|problem| problem.contains("a file where the folder should be")));
}

#[test]
fn many_kernels_come_back_in_order_with_every_failure() {
    let Some(toolchain) = support::toolchain() else { return };
    let compiler = Compiler { toolchain, cache: Cache::off() };
    let sources: Vec<Source> = (0..24)
        .map(|index| {
            let value = if index % 10 == 7 { "missing".to_owned() } else { index.to_string() };
            let text = format!("extern \"C\" __global__ void k{index}(int* output) {{ output[0] = {value}; }}\n");
            source(&format!("k{index}"), &text)
        })
        .collect();
    let jobs: Vec<Job<'_>> =
        sources.iter().map(|source| Job { source, arch: Arch::Sm80, options: Options::default() }).collect();
    for (index, result) in compiler.compile_all(&jobs).into_iter().enumerate() {
        let name = format!("k{index}");
        match result {
            Ok(compiled) => assert!(compiled.cubin.log.contains(&format!("'{name}'")), "{name}"),
            Err(NvrtcError::Refused { kernel, .. }) => assert!(kernel == name && index % 10 == 7, "{name}: {kernel}"),
            Err(other) => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn a_missing_library_lists_every_place_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("toolkit/lib64");
    fs::create_dir_all(&broken).unwrap();
    fs::write(broken.join("libnvrtc.so.13"), "not a library").unwrap();
    let place = |name: &str, path: Option<&str>| (name.to_owned(), path.map(|path| folder.path().join(path)));
    let places = Places {
        source_tree: Some(folder.path().join("tree")),
        prefixes: vec![
            place("$CUDA_HOME", Some("toolkit")),
            place("$CUDA_PATH", None),
            place("/usr/local/cuda*", None),
            place("$VIRTUAL_ENV", Some("")),
        ],
        ..Places::default()
    };
    let error = Toolchain::find_in(&places).unwrap_err().to_string();
    assert_error_snapshot("nvrtc-not-found", &error.replace(&*folder.path().to_string_lossy(), "FOLDER"));
}

#[test]
fn a_named_place_is_used_or_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let named = |path: &Path| Toolchain::find_in(&Places { named: Some(path.to_owned()), ..Places::from_env() });
    let error = named(folder.path()).unwrap_err().to_string();
    assert!(error.starts_with("GEMMA4C_NVRTC=") && error.contains("no libnvrtc in it"), "{error}");

    let Some(found) = support::toolchain() else { return };
    let library = found.path();
    for path in [library, library.parent().unwrap()] {
        assert_eq!(named(path).unwrap().path(), library);
    }
    assert!(found.to_string().contains(&format!("NVRTC {} at {}", found.version(), library.display())));
}

/// The loader knows a library that is in the process already by its name: for this test it is on the library path.
#[test]
fn the_library_path_names_the_file_behind_it() {
    let Some(found) = support::toolchain() else { return };
    let by_name = Toolchain::find_in(&Places { library_path: true, ..Places::default() }).unwrap();
    assert_eq!(by_name.path(), fs::canonicalize(found.path()).unwrap());
    assert!(by_name.to_string().ends_with("(through the library path)"), "{by_name}");
}

/// Every installation we know keeps the library in a folder of its own; a link to the real one stands for each.
#[test]
fn the_known_installations_are_recognised() {
    let Some(found) = support::toolchain() else { return };
    let folder = tempfile::tempdir().unwrap();
    let layouts = [
        "lib64",
        "lib",
        "targets/x86_64-linux/lib",
        "nvidia/cu13/lib",
        "nvidia/cuda_nvrtc/lib",
        "lib/python3.12/site-packages/nvidia/cu13/lib",
        "lib/python3/dist-packages/nvidia/cuda_nvrtc/lib",
    ];
    for (index, layout) in layouts.into_iter().enumerate() {
        let prefix = folder.path().join(index.to_string());
        let link = prefix.join(layout);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(found.path().parent().unwrap(), &link).unwrap();
        let places = Places { prefixes: vec![(layout.to_owned(), Some(prefix))], ..Places::default() };
        let toolchain = Toolchain::find_in(&places).unwrap();
        assert!(toolchain.path().starts_with(&link), "{layout}: {toolchain}");
    }
}

/// What came with the library goes before what else is there, and before the library path.
#[test]
fn packages_that_came_along_go_first() {
    let Some(found) = support::toolchain() else { return };
    let folder = tempfile::tempdir().unwrap();
    let packages = folder.path().join("site-packages");
    let link = packages.join("nvidia/cu13/lib");
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(found.path().parent().unwrap(), &link).unwrap();
    let packages = vec![folder.path().join("nothing"), packages];
    let toolchain = Toolchain::find_in(&Places { packages, library_path: true, ..Places::default() }).unwrap();
    assert!(toolchain.path().starts_with(&link), "{toolchain}");
    assert!(toolchain.to_string().ends_with("(through the installed packages)"), "{toolchain}");
}
