//! `gemma4c inspect`: what is in a plan, a model or an adapter.

use std::path::PathBuf;

use anyhow::{Result, bail};
use gemma4c_codegen::target::Target;
use gemma4c_graph::to_dot;
use gemma4c_models::adapter;
use gemma4c_models::gemma4::{self, AudioConfig, Config, VisionConfig};
use gemma4c_models::gguf::Gguf;
use gemma4c_plan::Plan;
use gemma4c_runtime::{EmbeddedWeights, ModelLocation};
use serde_json::Value;

use super::Outcome;
use super::by_name::ByNameArgs;
use crate::by_name::Beside;
use crate::device::Device;
use crate::output::{self, OutputFile, OutputFolder};
use crate::report::facts::Facts;
use crate::report::file::{self, Kind};
use crate::report::{self, cpu, html, json, model, text};
use crate::{files, progress};

/// Show what is in a plan, in a GGUF file (a model, a projector, a drafter) or in an adapter.
///
/// For a file: what it is, the types of its weights, what is unusual, and whether this program runs it.
///
/// For a GPU plan: what was fused, what was not and why, every launch with the least time it can take (its floor), and
/// every byte of memory.
#[derive(clap::Args)]
pub struct Args {
    /// A plan, a GGUF file or an adapter, or a model's name.
    #[arg(value_name = "FILE|NAME")]
    file: PathBuf,

    #[command(flatten)]
    view: View,

    /// The GPU whose bandwidth and FLOP/s give the floors, and whose program is shown if the plan has one for it
    /// [default: the plan's first]
    #[arg(long, value_name = "NAME", value_parser = Target::find)]
    gpu: Option<&'static Target>,
}

/// What is shown; a summary where nothing is asked for.
#[derive(clap::Args)]
#[group(multiple = false)]
struct View {
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,

    /// Print the dataflow graph as text, equal layers folded.
    #[arg(long)]
    graph: bool,

    /// For a model: print one layer's dataflow as a Graphviz drawing.
    #[arg(long, value_name = "LAYER")]
    dot: Option<u32>,

    /// For a GPU plan: list the launches of one phase, such as decode.
    #[arg(long, value_name = "NAME")]
    phase: Option<String>,

    /// For a plan: write a page for a browser. It is one self-contained file.
    #[arg(long, value_name = "OUT.html")]
    html: Option<OutputFile>,

    /// For a GPU plan: write the CUDA C text of every kernel into this folder, one file each.
    #[arg(long, value_name = "DIR")]
    cuda: Option<OutputFolder>,

    /// For a plan with embedded weights: read all of them and compare their checksums (opening a plan compares a few).
    #[arg(long)]
    check_weights: bool,
}

pub fn run(mut args: Args) -> Result<Outcome> {
    let beside = Beside { projector: false, drafter: false };
    if let Some(brought) = ByNameArgs::default().bring(&args.file, Device::Auto, beside)? {
        args.file = brought.model;
    }
    let args = &args;
    let text = match adapter::is_adapter(&args.file) {
        true => of_adapter(args)?,
        false if files::is_model(&args.file)? => of_model(args)?,
        false => of_plan(args)?,
    };
    output::print(&text)?;
    Ok(Outcome::Done)
}

fn of_adapter(args: &Args) -> Result<String> {
    let view = &args.view;
    let asks_more = view.graph || view.dot.is_some() || view.phase.is_some() || view.html.is_some();
    if asks_more || view.cuda.is_some() || view.check_weights {
        bail!("{0} is an adapter: compile a model with it (--lora {0}) and inspect the plan", args.file.display());
    }
    let summary = adapter::read(&args.file)?.summary();
    if view.json { pretty(&report::adapter::json(&summary)) } else { Ok(report::adapter::text(&summary)) }
}

fn of_model(args: &Args) -> Result<String> {
    let file = files::open_model(&args.file)?;
    let view = &args.view;
    if view.check_weights {
        bail!("{} is a model: --check-weights looks at a plan that has its weights with it", args.file.display());
    }
    if view.phase.is_some() || view.html.is_some() || view.cuda.is_some() {
        bail!(
            "{0} is a model: a plan has phases and kernels; run `gemma4c compile {0} -o PLAN.bin` first",
            args.file.display()
        );
    }
    if view.dot.is_some() || view.graph {
        let config = Config::read(&file)?;
        let graph = gemma4::graph(&file, &config)?;
        return match view.dot {
            Some(layer) if layer as usize >= config.layers.len() => {
                bail!("there is no layer {layer}: the model has {}, counted from 0", config.layers.len())
            }
            Some(layer) => Ok(to_dot(&graph, |l| l == layer)),
            None => Ok(gemma4c_graph::to_text(&graph)),
        };
    }
    let kind = Kind::of(&file);
    let (config, runs) = opened(&file, kind);
    if view.json {
        let mut all = config.as_ref().map_or_else(|| Value::Object(Default::default()), model::json);
        all["contents"] = file::json(&file, kind, &runs);
        return pretty(&all);
    }
    let described = config.map_or_else(String::new, |config| model::text(&config) + "\n");
    Ok(described + &file::text(&file, kind, &runs))
}

/// The config of a text model, if it can be read, and why the file does not run, if it does not.
fn opened(file: &Gguf, kind: Kind) -> (Option<Config>, Result<(), String>) {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    match kind {
        Kind::Text => match Config::read(file) {
            Ok(config) => {
                let graph = gemma4::graph(file, &config).map(drop).map_err(|error| told(&error));
                (Some(config), graph)
            }
            Err(error) => (None, Err(told(&error))),
        },
        Kind::Projector => {
            let sound = AudioConfig::read(file).map(drop).map_err(|error| told(&error));
            (None, VisionConfig::read(file).map(drop).map_err(|error| told(&error)).or(sound))
        }
        Kind::Drafter => (None, Ok(())),
        Kind::VocabularyOnly => (Config::read(file).ok(), Err("it has no weights".into())),
        Kind::Other => (None, Config::read(file).map(drop).map_err(|error| told(&error))),
    }
}

fn of_plan(args: &Args) -> Result<String> {
    let mut plan = files::read_plan(&args.file)?;
    let wanted = plan.programs().position(|cuda| args.gpu.is_some_and(|gpu| cuda.program.gpu.key == gpu.key));
    if let Some(index) = wanted {
        plan.show(index);
    }
    let view = &args.view;
    if view.dot.is_some() {
        bail!("--dot draws a model: give the GGUF file");
    }
    if view.graph {
        return Ok(plan.report);
    }
    if view.check_weights {
        return check_weights(args, &plan);
    }
    if let Some(path) = &view.html {
        output::write_whole(path, html::page(&plan, args.gpu).as_bytes())?;
        return Ok(String::new());
    }
    let Some(facts) = Facts::of(&plan) else { return of_cpu_plan(args, &plan) };
    let own = facts.target();
    let gpu = args.gpu.unwrap_or(&own);
    if let Some(name) = &view.phase {
        let Some(phase) = facts.phases.iter().find(|phase| phase.phase.name == name.replace('-', " ")) else {
            let names: Vec<String> = facts.phases.iter().map(|phase| format!("`{}`", phase.phase.name)).collect();
            bail!("there is no phase `{name}`: the plan has {}", names.join(", "));
        };
        return Ok(text::steps(&facts, phase, gpu));
    }
    match &view.cuda {
        Some(folder) => write_sources(&facts, folder),
        None if view.json => pretty(&json::plan(&facts, gpu)),
        None => Ok(text::plan(&facts, gpu)),
    }
}

fn of_cpu_plan(args: &Args, plan: &Plan) -> Result<String> {
    let view = &args.view;
    if view.phase.is_some() || view.cuda.is_some() {
        bail!("{} is a plan for the CPU: it has no kernels and no phases to show", args.file.display());
    }
    if view.json { pretty(&cpu::json(plan)) } else { Ok(cpu::text(plan)) }
}

fn check_weights(args: &Args, plan: &Plan) -> Result<String> {
    let path = args.file.display();
    let Some(embedded) = &plan.embedded else {
        bail!("{path} has no weights with it: they are in the model file, whose fingerprint every run compares");
    };
    let weights = EmbeddedWeights::open(embedded, &ModelLocation { plan: args.file.clone(), given: None })?;
    let bar = progress::bytes("comparing checksums", embedded.bytes);
    let checked = weights.check_all(&mut |done, _| bar.set_position(done));
    bar.finish_and_clear();
    checked?;
    Ok(format!("{path}: {} of weights, all as they were compiled\n", output::bytes(embedded.bytes)))
}

fn pretty(value: &Value) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// One file a kernel, which compiles as it is.
fn write_sources(facts: &Facts<'_>, folder: &OutputFolder) -> Result<String> {
    folder.create()?;
    let program = facts.program();
    let arch = &program.gpu.architecture;
    for ((kernel, label), code) in program.kernels.iter().zip(&facts.labels).zip(&facts.cuda.code) {
        let head = format!(
            "// {}\n// {} threads a block, {} bytes of dynamic shared memory.\n\
             // nvcc -cubin -std=c++17 --fmad=false -arch={arch} {label}.cu\n\n",
            kernel.instance, kernel.block, kernel.shared
        );
        output::write_whole(&folder.file(&format!("{label}.cu")), (head + &code.source).as_bytes())?;
    }
    Ok(format!("{}: {} kernels\n", folder.display(), program.kernels.len()))
}
