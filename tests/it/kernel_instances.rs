//! What plans launch is what is reviewed, compiled and checked for spills: no instance more, none less.
//!
//! The list is made by lowering the full sizes (`src/launched/`). Here it is compiled for every architecture with no GPU, shown (an instance
//! as what it chooses, how many plans launch it, and what it takes of an SM), and held against the snapshots that are in the tree
//! and against plans that were made the way a user makes them.
//!
//! Registers are those of the NVRTC that the test script fetches; another version compiles everything all the same, and its
//! registers are its own. Beside its registers an instance has the key of its compilation, a hash of the compiler, its arguments and the
//! text: what has the key that was reviewed is not compiled again, because it would give the same. One in eight is, and all of it with
//! `GEMMA4C_EXHAUSTIVE=1`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::LazyLock;

use crate::common::Place;
use crate::common::lowered::{self, header};
use crate::skipped::not_checked;
use crate::support;
use gemma4c::launched;
use gemma4c::launched::recipes::{FEWEST, SIZES};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::families::{self, FAMILIES, Family, NamedInstance};
use gemma4c_codegen::kernels::product::warpgroups::Source;
use gemma4c_codegen::nvrtc::{Cache, Compiler, Job, Options, Version};
use gemma4c_codegen::resources::{Usage, measure};
use gemma4c_dsl::KernelDef;
use gemma4c_models::synth::Preset;

const TABLES_ARE_OF: Version = Version { major: 13, minor: 0 };

/// The architectures, the one that names instances first.
const ARCHITECTURES: [Arch; 6] = [Arch::Sm90a, Arch::Sm89, Arch::Sm80, Arch::Sm120a, Arch::Sm100a, Arch::Sm103a];

/// Instances of a kernel that are enough to see that an architecture compiles it, and what it takes there.
const FEW: usize = 2;

/// The instances of an architecture, family by family; of those that a few plans stand for, a few of each kernel.
fn instances(arch: Arch) -> &'static [NamedInstance] {
    static FOUND: [LazyLock<Vec<NamedInstance>>; 6] = [
        LazyLock::new(|| of(ARCHITECTURES[0])),
        LazyLock::new(|| of(ARCHITECTURES[1])),
        LazyLock::new(|| of(ARCHITECTURES[2])),
        LazyLock::new(|| of(ARCHITECTURES[3])),
        LazyLock::new(|| of(ARCHITECTURES[4])),
        LazyLock::new(|| of(ARCHITECTURES[5])),
    ];
    fn of(arch: Arch) -> Vec<NamedInstance> {
        let few = FEWEST.contains(&arch);
        let all = FAMILIES.iter().flat_map(|family| family.kernels.iter().copied());
        // Kernels that no plan launches are plain, and the same for all.
        let all: Vec<&'static KernelDef> =
            all.filter(|kernel| !few || !launched::WITHOUT_PLAN.contains(&kernel.name)).collect();
        let mut found = launched::instances(arch, &all).expect("the full sizes can be lowered");
        if few && arch != Arch::Sm89 {
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            found.retain(|named| {
                let count = counts.entry(named.instance.def.name).or_default();
                *count += 1;
                *count <= FEW
            });
        }
        found
    }
    &FOUND[place_of(arch)]
}

fn place_of(arch: Arch) -> usize {
    ARCHITECTURES.iter().position(|known| *known == arch).expect("all are listed")
}

/// An instance that some architectures have.
struct Shared {
    named: &'static NamedInstance,
    architectures: Vec<Arch>,
}

impl Shared {
    /// Which architectures it is for, where it is not for the first.
    fn heading(&self) -> String {
        let names: Vec<&str> = self.architectures.iter().map(|arch| arch.name()).collect();
        let only =
            if self.architectures[0] == ARCHITECTURES[0] { "".into() } else { format!(" ({})", names.join(", ")) };
        format!("{}: {}{only}", self.named.instance.def.name, self.named.label)
    }
}

/// The instances of all architectures, each text once.
static ALL: LazyLock<Vec<Shared>> = LazyLock::new(|| {
    let mut all: Vec<Shared> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for arch in ARCHITECTURES {
        for named in instances(arch) {
            match places.get(&named.source().text) {
                Some(at) => {
                    let known: &mut Shared = &mut all[*at];
                    known.architectures.push(arch);
                }
                None => {
                    places.insert(named.source().text, all.len());
                    all.push(Shared { named, architectures: vec![arch] });
                }
            }
        }
    }
    all
});

/// What an instance takes on one architecture.
#[derive(Clone, Debug, PartialEq)]
struct Taken {
    registers: u32,
    /// Bytes of registers that are stored to memory and loaded.
    spilled: u32,
    stack: u32,
    /// Bytes of shared memory that the launch does not ask for.
    besides: u32,
    /// The identity of the compilation that said so.
    key: u64,
}

impl Taken {
    fn of(usage: &Usage, named: &NamedInstance, key: u64) -> Taken {
        let Usage { resources, shared_bytes, .. } = usage;
        Taken {
            registers: resources.registers,
            spilled: resources.spill_stores + resources.spill_loads,
            stack: resources.stack_bytes,
            besides: (*shared_bytes as u32).abs_diff(named.instance.shared_bytes() as u32),
            key,
        }
    }

    /// As it is written: `96 + 40 spilled [0123456789abcdef]`.
    fn parse(text: &str) -> Option<Taken> {
        let (sizes, key) = text.strip_suffix(']')?.split_once(" [")?;
        let mut sizes = sizes.split(" + ");
        let mut taken = Taken {
            registers: sizes.next()?.parse().ok()?,
            spilled: 0,
            stack: 0,
            besides: 0,
            key: u64::from_str_radix(key, 16).ok()?,
        };
        for size in sizes {
            let (bytes, what) = size.split_once(' ')?;
            let bytes = bytes.parse().ok()?;
            match what {
                SPILLED => taken.spilled = bytes,
                STACK => taken.stack = bytes,
                BESIDES => taken.besides = bytes,
                _ => return None,
            }
        }
        Some(taken)
    }
}

const SPILLED: &str = "spilled";
const STACK: &str = "stack";
const BESIDES: &str = "shared besides";

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.registers)?;
        for (bytes, what) in [(self.spilled, SPILLED), (self.stack, STACK), (self.besides, BESIDES)] {
            if bytes > 0 {
                write!(f, " + {bytes} {what}")?;
            }
        }
        write!(f, " [{:016x}]", self.key)
    }
}

impl Shared {
    /// The instance as it is reviewed: where it is launched first, what it chooses, how it is launched, and last, where it was compiled, what
    /// it takes. The kernel's own text is a snapshot of its kernel.
    fn shown(&self, taken: Option<&[(Arch, &Taken)]>) -> String {
        let NamedInstance { instance, plans, .. } = self.named;
        let mut text = format!("{}\n", self.heading());
        let shown = instance.to_string();
        let chosen = shown.strip_prefix(instance.def.name).unwrap_or(&shown).trim_matches(['[', ']']);
        let mut line = String::new();
        for choice in chosen.split_inclusive(", ") {
            if line.len() + choice.trim_end().len() > WIDTH {
                text += &format!("    {}\n", std::mem::take(&mut line).trim_end());
            }
            line += choice;
        }
        if !line.is_empty() {
            text += &format!("    {line}\n");
        }
        let launched = match plans {
            0 => "no plan".to_owned(),
            1 => "1 plan".to_owned(),
            several => format!("{several} plans"),
        };
        text += &format!("    {} threads, {} bytes shared, {launched}\n", instance.block(), instance.shared_bytes());
        if let Some(taken) = taken {
            let on = |(arch, taken): &(Arch, &Taken)| format!("{arch} {taken}");
            text += &format!("{REGISTERS}{}\n", taken.iter().map(on).collect::<Vec<_>>().join(", "));
        }
        text
    }
}

/// Columns that the choices of an instance take.
const WIDTH: usize = 150;
/// Where the line begins that follows from compiling.
const REGISTERS: &str = "    registers: ";
const MOST_LINES: usize = 10;

/// What compiling gave for each text. `None` without the NVRTC that the snapshots are of.
fn taken() -> Option<BTreeMap<String, Vec<(Arch, &'static Taken)>>> {
    let mut all: BTreeMap<String, Vec<(Arch, &Taken)>> = BTreeMap::new();
    for arch in ARCHITECTURES {
        let (version, taken) = compiled(arch).as_ref()?;
        if *version != TABLES_ARE_OF {
            not_checked(&format!("registers are shown of NVRTC {TABLES_ARE_OF}, this one is {version}"));
            return None;
        }
        for (named, taken) in instances(arch).iter().zip(taken) {
            all.entry(named.source().text).or_default().push((arch, taken));
        }
    }
    Some(all)
}

/// The instances of a family, kernel by kernel.
fn of_family(family: &Family) -> impl Iterator<Item = &'static Shared> {
    family.kernels.iter().flat_map(|kernel| ALL.iter().filter(move |shared| shared.named.instance.def == *kernel))
}

#[test]
fn every_instance_has_its_header() {
    let Some(taken) = taken() else { return };
    for family in FAMILIES {
        let shown = |shared: &Shared| shared.shown(Some(&taken[&shared.named.source().text]));
        let instances: String = of_family(family).map(shown).collect();
        insta::with_settings!({
            snapshot_path => format!("../../snapshots/kernels/{}", family.name),
            prepend_module_to_snapshot => false,
            description => family.about,
        }, { insta::assert_snapshot!("instances", instances) });
    }
}

/// A kernel that falls out of all plans is noticed, and so is one that comes into them.
#[test]
fn every_kernel_is_launched_by_a_plan_or_is_known_not_to_be() {
    let of_plans = ALL.iter().filter(|shared| !shared.named.label.starts_with("no plan"));
    let launched: BTreeSet<&str> = of_plans.map(|shared| shared.named.instance.def.name).collect();
    let known: BTreeSet<&str> = FAMILIES.iter().flat_map(|family| family.kernels).map(|kernel| kernel.name).collect();
    let without: BTreeSet<&str> = known.difference(&launched).copied().collect();
    assert_eq!(without, BTreeSet::from(launched::WITHOUT_PLAN));
    for kernel in known {
        assert!(ALL.iter().any(|shared| shared.named.instance.def.name == kernel), "kernel {kernel} has no instance");
    }
    // Cases reach every device function that a plan does.
    let of_cases = families::device_functions();
    for shared in ALL.iter() {
        for device in shared.named.instance.devices() {
            let is_known = of_cases.iter().any(|known| known.name == device.name && known.cuda == device.cuda);
            assert!(is_known, "{}: no case reaches {}", shared.heading(), device.name);
        }
    }
}

#[test]
fn an_architecture_has_each_text_and_each_label_once() {
    for arch in ARCHITECTURES {
        let (mut texts, mut labels) = (BTreeSet::new(), BTreeSet::new());
        for named in instances(arch) {
            let what = format!("{}: {}", named.instance.def.name, named.label);
            assert!(arch.has_all_of(&named.instance), "{arch} does not have {what}");
            assert!(texts.insert(named.source().text), "{what} is there twice");
            assert!(labels.insert(what.clone()), "two instances are called {what}");
        }
    }
}

/// Every type of a file's matrices has kernels that were compiled: to gather, repack and multiply by one row and by many.
#[test]
fn every_type_is_launched_in_every_role() {
    for dtype in DType::ALL {
        let decoder = gemma4c_codegen::kernels::values::value(dtype);
        let format = gemma4c_codegen::kernels::matvec::formats::format(dtype);
        let decode = gemma4c_codegen::kernels::product::decode::decode(dtype);
        let of_team = gemma4c_codegen::kernels::product::team::decode_of_team(dtype);
        let many_rows = match Source::without_copy(dtype) {
            Some(Source::Planes(_)) => "product_team",
            // Weights that are bf16 are read as they are.
            Some(Source::Copy) => "product_wgmma",
            None => "product",
        };
        for (kernel, function) in [
            ("gather", decoder),
            ("matmul_exact", decoder),
            ("matvec", if format.joined { format.two_dots } else { format.dot }),
            ("expert_geglu", format.dot),
            (many_rows, if many_rows == "product_team" { of_team } else { decode }),
        ] {
            let reaches = |named: &&NamedInstance| {
                let decodes = named.instance.devices().iter().any(|device| device.name == function.name);
                named.instance.def.name == kernel && (decodes || kernel == "product_wgmma")
            };
            assert!(instances(Arch::Sm90a).iter().any(|named| reaches(&named)), "no {kernel} of {dtype}");
        }
    }
}

// -- What is in the tree, and what users' plans launch -----------------------------------------------------------------------

/// What one side has and the other has not, in words; nothing where they are the same.
fn differences(tabled: &BTreeSet<String>, launched: &BTreeSet<String>) -> Vec<String> {
    let missing = launched.difference(tabled).map(|name| format!("missing, but launched: {name}"));
    let extra = tabled.difference(launched).map(|name| format!("there, but not launched: {name}"));
    missing.chain(extra).collect()
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn snapshot_of(family: &Family) -> String {
    format!("snapshots/kernels/{}/instances.snap", family.name)
}

/// The instances that a snapshot shows, each without its registers.
fn listed(snapshot: &str) -> BTreeSet<String> {
    let body = snapshot.splitn(3, "---\n").nth(2).unwrap_or_default();
    let mut found: Vec<String> = Vec::new();
    for line in body.lines().filter(|line| !line.starts_with(REGISTERS)) {
        match found.last_mut() {
            Some(instance) if line.starts_with(' ') => instance.push_str(&format!("{line}\n")),
            _ => found.push(format!("{line}\n")),
        }
    }
    found.into_iter().collect()
}

/// The same without NVRTC: what the snapshots in the tree list, against what plans launch.
#[test]
fn tables_and_snapshots_list_what_plans_launch_and_nothing_else() {
    for family in FAMILIES {
        let path = snapshot_of(family);
        let snapshot = read(&path);
        let launched: BTreeSet<String> = of_family(family).map(|shared| shared.shown(None)).collect();
        let found = differences(&listed(&snapshot), &launched);
        assert!(found.is_empty(), "{path}\n{}\n(INSTA_UPDATE=always writes it anew)", found.join("\n"));
        let long = launched.iter().find(|shown| shown.lines().count() >= MOST_LINES);
        assert_eq!(long, None, "{path}: an instance of more than {MOST_LINES} lines");
    }

    // The comparison sees an instance too many and one too few.
    let one =
        "matvec: e4b q8_0, decode, layer 0, ffn_down\n    K = 10240\n    640 threads, 13184 bytes shared, 2 plans\n";
    let snapshot = format!("---\nsource: a.rs\n---\n{one}{REGISTERS}sm_90a 102\n");
    let of_snapshot = listed(&snapshot);
    let one = BTreeSet::from([one.to_owned()]);
    assert_eq!(differences(&of_snapshot, &one), Vec::<String>::new());
    assert_eq!(differences(&of_snapshot, &BTreeSet::new()).len(), 1);
    assert_eq!(differences(&BTreeSet::new(), &one).len(), 1);
}

/// Plans as `gemma4c compile` makes them, from files: each kernel they launch is in the list. The longest context launches the same.
#[test]
fn what_a_users_plan_launches_is_in_the_list() {
    let place = Place::new();
    let model = place.path("model.gguf");
    let known: BTreeSet<String> = instances(Arch::Sm90a).iter().map(|named| named.instance.to_string()).collect();
    let mut lowered_as: Vec<(Preset, DType, lowered::Options)> = Vec::new();
    lowered_as.extend(SIZES.map(|preset| (preset, DType::Q8_0, lowered::Options::default())));
    lowered_as.extend(SIZES.map(|preset| (preset, DType::Q4_0, lowered::Options::default())));
    lowered_as.push((
        Preset::E4b,
        DType::Q4_0,
        lowered::Options { context: Some(131_072), ..lowered::Options::default() },
    ));
    lowered_as.push((Preset::Moe26bA4b, DType::Q4_0, lowered::Options::default().with_copies()));
    let mut before = None;
    for (preset, dtype, lowered_as) in lowered_as {
        if before.replace((preset, dtype)) != Some((preset, dtype)) {
            header(&model, preset, dtype);
        }
        let program = lowered::plan(&model, &lowered_as).cuda.expect("a GPU plan").program;
        let missing: Vec<&str> = program
            .kernels
            .iter()
            .map(|kernel| kernel.instance.as_str())
            .filter(|name| !known.contains(*name))
            .collect();
        assert!(missing.is_empty(), "{} {dtype} launches\n  {}", preset.name(), missing.join("\n  "));
    }
}

// -- Compiled, with no GPU -----------------------------------------------------------------------------------------------

/// Decode kernels that spill registers, a few words a thread, where none should: one that does pays for it in every token.
const SPILLING: [(&str, &[Arch]); 5] = [
    ("attention_rows: e4b q8_0, 128 sequences, gemm, decode 128, layer 0, attention.mixed", &[Arch::Sm90a]),
    ("attention_rows: e4b q8_0, 128 sequences, gemm, decode 32, layer 5, attention.mixed", &[Arch::Sm90a]),
    ("attention_rows: e4b q8_0, 128 sequences, gemm, decode 8, layer 5, attention.mixed", &[Arch::Sm90a]),
    ("expert_down: 26b-a4b f32, decode, layer 0, ffn_down + ffn_down_exps", &[Arch::Sm90a]),
    ("matvec: 26b-a4b q4_k_m, decode, layer 1, attn_v", &[Arch::Sm90a]),
];
/// Bytes that each of them stores and loads, at most.
const MOST_SPILLED: u32 = 96;

/// Whether decode kernels are looked at for spills.
#[derive(PartialEq)]
enum Spills {
    Allowed,
    Listed,
}

/// An NVRTC, and what it says that instances take.
type Compiled = (Version, Vec<Taken>);

/// What was reviewed, by the key of its compilation.
static REVIEWED: LazyLock<HashMap<u64, Taken>> = LazyLock::new(|| {
    let mut all = HashMap::new();
    for family in FAMILIES {
        let snapshot = read(&snapshot_of(family));
        for line in snapshot.lines().filter_map(|line| line.strip_prefix(REGISTERS)) {
            let of_architectures = line.split(", ").filter_map(|one| Taken::parse(one.split_once(' ')?.1));
            all.extend(of_architectures.map(|taken| (taken.key, taken)));
        }
    }
    all
});

/// Of what was reviewed, one in so many is compiled all the same: a table that is wrong, or another compiler of the same version, is noticed.
const COMPILED_ANYWAY: u64 = 8;

/// What every instance of an architecture takes; `None` where there is no NVRTC.
fn compiled(arch: Arch) -> &'static Option<Compiled> {
    static COMPILED: [LazyLock<Option<Compiled>>; 6] = [
        LazyLock::new(|| of(ARCHITECTURES[0])),
        LazyLock::new(|| of(ARCHITECTURES[1])),
        LazyLock::new(|| of(ARCHITECTURES[2])),
        LazyLock::new(|| of(ARCHITECTURES[3])),
        LazyLock::new(|| of(ARCHITECTURES[4])),
        LazyLock::new(|| of(ARCHITECTURES[5])),
    ];
    fn of(arch: Arch) -> Option<Compiled> {
        let toolchain = support::toolchain()?;
        let version = toolchain.version();
        let compiler = Compiler { toolchain, cache: Cache::from_env() };
        let key =
            |named: &NamedInstance| compiler.key(Job { source: &named.source(), arch, options: Options::default() });
        let keys: Vec<u64> = instances(arch).iter().map(key).collect();
        let everything = std::env::var_os("GEMMA4C_EXHAUSTIVE").is_some();
        let reviewed = |key: &u64| REVIEWED.get(key).filter(|_| !everything && !key.is_multiple_of(COMPILED_ANYWAY));
        let (again, named): (Vec<u64>, Vec<NamedInstance>) = keys
            .iter()
            .zip(instances(arch))
            .filter(|(key, _)| reviewed(key).is_none())
            .map(|(k, n)| (*k, n.clone()))
            .unzip();
        let usages = measure(&compiler, arch, &named).unwrap_or_else(|errors| {
            let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
            panic!("{} of the instances do not compile for {arch}:\n\n{}", texts.len(), texts.join("\n\n"))
        });
        // A product that the assembler makes wait for its predecessor still gives the right result, at a fraction of the speed.
        for Usage { kernel, label, resources, warnings, .. } in
            usages.iter().filter(|usage| ["product_wgmma", "product_tiles"].contains(&usage.kernel))
        {
            assert!(warnings.is_empty() && !resources.spills(), "{kernel}: {label}: {resources:?}, {warnings:?}");
        }
        let mut measured =
            usages.iter().zip(&named).zip(&again).map(|((usage, named), key)| Taken::of(usage, named, *key));
        let taken = keys.iter().map(|key| reviewed(key).cloned().or_else(|| measured.next()));
        Some((version, taken.map(|taken| taken.expect("compiled, if it was not reviewed")).collect()))
    }
    &COMPILED[place_of(arch)]
}

/// Compiles everything for one architecture, and looks at what must not spill.
fn check(arch: Arch, spills: Spills) {
    let Some((version, taken)) = compiled(arch) else { return };
    if spills == Spills::Allowed {
        return;
    }
    let spilling = instances(arch).iter().zip(taken).filter(|(named, taken)| named.is_decode() && taken.spilled > 0);
    let spilling: BTreeMap<String, u32> = spilling
        .map(|(named, taken)| (format!("{}: {}", named.instance.def.name, named.label), taken.spilled))
        .collect();
    let found: BTreeSet<&str> = spilling.keys().map(String::as_str).collect();
    let listed = SPILLING.iter().filter(|(_, architectures)| architectures.contains(&arch));
    let listed: BTreeSet<&str> = listed.map(|(name, _)| *name).collect();
    // Another version's registers are its own.
    assert!(found == listed || *version != TABLES_ARE_OF, "decode kernels that spill registers on {arch}: {found:#?}");
    for (name, spilled) in spilling {
        assert!(spilled <= MOST_SPILLED, "{name} spills {spilled} bytes");
    }
}

#[test]
fn what_was_reviewed_is_read_as_it_is_written() {
    let plain = Taken { registers: 96, spilled: 0, stack: 0, besides: 0, key: 0x0123_4567_89ab_cdef };
    assert_eq!(plain.to_string(), "96 [0123456789abcdef]");
    for taken in [plain.clone(), Taken { spilled: 40, stack: 16, besides: 1024, key: 7, ..plain }] {
        assert_eq!(Taken::parse(&taken.to_string()), Some(taken));
    }
    for bad in ["", "96", "96 [xyz]", "96 + 40 [0]", "96 + 40 lost [0]", "many [0]"] {
        assert_eq!(Taken::parse(bad), None, "{bad}");
    }
}

#[test]
fn every_instance_compiles_for_sm_90a_and_decode_kernels_spill_nothing() {
    check(Arch::Sm90a, Spills::Listed);
}

/// A few plans stand for each of these (`recipes::FEWEST`).
#[test]
fn what_stands_for_the_other_architectures_compiles() {
    for arch in FEWEST {
        check(arch, if arch == Arch::Sm89 { Spills::Listed } else { Spills::Allowed });
    }
}
