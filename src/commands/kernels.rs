//! `gemma4c kernels`: the kernel library, listed, printed, checked and measured.

mod bench;
mod check;
mod gpu;
mod timed;

use std::fmt::Write;

use anyhow::{Context, Result, bail};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::families::{FAMILIES, Family, NamedInstance};
use gemma4c_codegen::nvrtc::{Cache, Compiler, Toolchain};
use gemma4c_codegen::resources::{measure, table};
use gemma4c_dsl::KernelDef;

use super::Outcome;
use crate::launched;
use crate::output::print;

/// List the kernels, print their texts, check them, measure them.
///
/// A kernel is one Rust function. Its CUDA C text is printed from it; an instance chooses its compile-time parameters.
/// Instances are those that plans of the five sizes launch, each under the place where it is launched first.
#[derive(clap::Args)]
pub struct Args {
    /// One kernel; all of them if not given.
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// The kernels of one family.
    #[arg(long, value_name = "NAME")]
    family: Option<String>,

    /// Print the Rust source.
    #[arg(long)]
    rust: bool,

    /// Print the CUDA C text.
    #[arg(long)]
    cuda: bool,

    /// With --cuda: the whole text of this instance, as NVRTC gets it.
    #[arg(long, value_name = "LABEL", requires = "cuda")]
    instance: Option<String>,

    /// Compile every instance and show its registers, shared memory, stack and spills. Needs NVRTC and no GPU.
    #[arg(long, conflicts_with_all = ["rust", "cuda"])]
    sass_stats: bool,

    /// The architecture whose plans' instances are meant: sm_80, sm_89, sm_90a, sm_100a, sm_103a or sm_120a.
    #[arg(long, default_value = "sm_90a")]
    arch: Arch,

    /// Run every case, and compare with its oracle.
    #[arg(long, conflicts_with_all = ["rust", "cuda", "sass_stats"])]
    check: bool,

    /// Where --check runs.
    #[arg(long, value_enum, default_value = "sim")]
    device: check::Where,

    /// Measure on the GPU the launches of the five sizes' decode plans, beside its highest read bandwidth, and the
    /// products of prefill, beside cuBLASLt where the machine has it.
    #[arg(long, conflicts_with_all = ["rust", "cuda", "sass_stats", "check"])]
    bench: bool,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let selection = Selection::of(args.name.as_deref(), args.family.as_deref())?;
    if args.check {
        return check::run(&selection, args.device);
    }
    let text = match () {
        () if args.bench => return bench::run(&selection),
        () if args.sass_stats => sass_stats(&selection, args.arch)?,
        () if args.instance.is_some() => {
            whole_text(&selection, args.arch, args.instance.as_deref().unwrap_or_default())?
        }
        () if args.rust || args.cuda => texts(&selection, args.rust, args.cuda),
        () if args.name.is_some() => {
            selection.kernels().map(|kernel| about(kernel, args.arch)).collect::<Result<String>>()?
        }
        () => list(&selection),
    };
    print(&text)?;
    Ok(Outcome::Done)
}

/// The kernels a command is about.
struct Selection {
    families: Vec<(&'static Family, Vec<&'static KernelDef>)>,
}

impl Selection {
    fn of(kernel: Option<&str>, family: Option<&str>) -> Result<Selection> {
        if let Some(name) = family
            && !FAMILIES.iter().any(|family| family.name == name)
        {
            let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            bail!("no family of kernels is called `{name}`; there are {}", names.join(", "));
        }
        let mut families = Vec::new();
        for known in FAMILIES.iter().filter(|known| family.is_none_or(|name| known.name == name)) {
            let is_asked = |def: &&&KernelDef| kernel.is_none_or(|name| def.name == name);
            let kernels: Vec<&'static KernelDef> = known.kernels.iter().filter(is_asked).copied().collect();
            if !kernels.is_empty() {
                families.push((known, kernels));
            }
        }
        if families.is_empty() {
            let rows = FAMILIES.iter().filter(|known| family.is_none_or(|name| known.name == name)).map(|known| {
                let names: Vec<&str> = known.kernels.iter().map(|kernel| kernel.name).collect();
                format!("\n  {}: {}", known.name, names.join(", "))
            });
            bail!("no kernel is called `{}`; there are{}", kernel.unwrap_or_default(), rows.collect::<String>());
        }
        Ok(Selection { families })
    }

    fn kernels(&self) -> impl Iterator<Item = &'static KernelDef> {
        self.families.iter().flat_map(|(_, kernels)| kernels.iter().copied())
    }

    fn instances(&self, arch: Arch) -> Result<Vec<NamedInstance>> {
        launched::instances(arch, &self.kernels().collect::<Vec<_>>())
    }
}

/// The first sentence of a kernel's description, on one line of the list.
fn summary(kernel: &KernelDef) -> String {
    const LONGEST: usize = 72;
    let paragraph: Vec<&str> = kernel.doc.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let paragraph = paragraph.join(" ");
    let sentence = paragraph.split_once(". ").map_or(paragraph.trim_end_matches('.'), |(first, _)| first);
    match sentence.char_indices().nth(LONGEST) {
        None => sentence.to_owned(),
        Some((end, _)) => format!("{} …", sentence[..end].rsplit_once(' ').map_or("", |(whole_words, _)| whole_words)),
    }
}

fn list(selection: &Selection) -> String {
    let mut text = String::new();
    for (family, kernels) in &selection.families {
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = writeln!(text, "{gap}{}: {}", family.name, family.about);
        for kernel in kernels {
            let _ = writeln!(text, "  {:24} {}", kernel.name, summary(kernel));
        }
    }
    text
}

/// One kernel: what it does, what it takes, and the labels of its instances.
fn about(kernel: &'static KernelDef, arch: Arch) -> Result<String> {
    let mut text = format!("{}\n\n{}\n", kernel.name, kernel.doc);
    let _ = writeln!(text, "\nparameters");
    for param in kernel.params {
        let _ = writeln!(text, "  {}", param.declare(&param.full_name()));
    }
    if !(kernel.constants.is_empty() && kernel.types.is_empty()) {
        let constants = kernel.constants.iter().map(|constant| format!("{} {}", constant.ty, constant.name));
        let types = kernel.types.iter().map(|name| format!("element type {name}"));
        let all: Vec<String> = constants.chain(types).collect();
        let _ = writeln!(text, "\nchosen at compile time\n  {}", all.join("\n  "));
    }
    for slot in kernel.slots {
        let params: Vec<String> = slot.params.iter().map(|(name, ty)| format!("{name}: {ty}")).collect();
        let _ = writeln!(text, "\nslot {}({}) -> {}", slot.name, params.join(", "), slot.output);
    }
    let _ = writeln!(text, "\ninstances for {arch}");
    for named in launched::instances(arch, &[kernel])? {
        let _ = writeln!(text, "  {}", named.label);
    }
    Ok(text)
}

fn texts(selection: &Selection, rust: bool, cuda: bool) -> String {
    let one = |kernel: &KernelDef| {
        let parts = [(rust, kernel.rust), (cuda, kernel.cuda)];
        let parts: Vec<&str> = parts.into_iter().filter(|(wanted, _)| *wanted).map(|(_, text)| text.trim()).collect();
        parts.join("\n\n") + "\n"
    };
    selection.kernels().map(one).collect::<Vec<_>>().join("\n")
}

fn whole_text(selection: &Selection, arch: Arch, label: &str) -> Result<String> {
    let instances = selection.instances(arch)?;
    let found = instances.iter().find(|named| named.label == label);
    found.map(|named| named.source().text).with_context(|| {
        let labels: Vec<String> =
            instances.iter().map(|named| format!("\n  {}: {}", named.instance.def.name, named.label)).collect();
        format!("no instance is called `{label}`; there are{}", labels.concat())
    })
}

fn sass_stats(selection: &Selection, arch: Arch) -> Result<String> {
    let compiler = Compiler { toolchain: Toolchain::find()?, cache: Cache::from_env() };
    let usages = measure(&compiler, arch, &selection.instances(arch)?).map_err(|errors| {
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        anyhow::anyhow!("{}", texts.join("\n\n"))
    })?;
    Ok(table(&usages))
}
