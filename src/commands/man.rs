//! `gemma4c man`: the manual, made from the descriptions that the help texts are made from.

use anyhow::Result;
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::Outcome;
use crate::output::{self, OutputFolder};

/// Print the manual page, or write a page for every command.
///
/// To read it at once: gemma4c man | man -l -
#[derive(clap::Args)]
pub struct Args {
    /// Write the pages of all commands into this folder, such as ~/.local/share/man/man1.
    #[arg(short, long, value_name = "DIR")]
    output: Option<OutputFolder>,
}

/// What the environment decides.
const VARIABLES: [(&str, &str); 8] = [
    ("GEMMA4C_CACHE", "The folder of the cache. Without it: gemma4c in $XDG_CACHE_HOME, or in ~/.cache."),
    (
        "XDG_STATE_HOME",
        "Where the lines of chats at a terminal are kept, in gemma4c/history. Without it: ~/.local/state.",
    ),
    ("GEMMA4C_NVRTC", "The NVRTC library, or the folder it is in. Without it: where `gemma4c doctor` says it looked."),
    ("CUDA_HOME, CUDA_PATH, VIRTUAL_ENV, CONDA_PREFIX", "Where NVRTC is looked for besides."),
    ("CUDA_VISIBLE_DEVICES", "Which GPUs the driver shows; gemma4c takes the first of them."),
    ("RAYON_NUM_THREADS", "Threads that compute on the CPU. Without it: as many as there are cores."),
    ("CXX", "The C++ compiler of `gemma4c kernels --check --device host`."),
    ("NO_COLOR", "Set to anything: help texts have no colours."),
];

const CODES: [(&str, &str); 3] =
    [("0", "Done."), ("1", "A check failed."), ("2", "An error, named on standard error.")];

pub fn run(args: &Args) -> Result<Outcome> {
    let mut described = crate::command_line();
    described.build();
    let Some(folder) = &args.output else {
        output::print(&page(&described)?)?;
        return Ok(Outcome::Done);
    };
    folder.create()?;
    let commands = described.get_subcommands().filter(|command| command.get_name() != "help");
    for command in std::iter::once(&described).chain(commands) {
        let name = command.get_display_name().unwrap_or(command.get_name());
        output::write_whole(&folder.file(&format!("{name}.1")), page(command)?.as_bytes())?;
    }
    Ok(Outcome::Done)
}

/// A command's page: what clap knows of it, then what holds for all.
fn page(command: &Command) -> Result<String> {
    let mut page = Vec::new();
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    Man::new(command.clone()).title(name).manual("gemma4c").render(&mut page)?;
    let mut common = Roff::new();
    for (title, rows) in [("ENVIRONMENT", &VARIABLES[..]), ("EXIT STATUS", &CODES[..])] {
        common.control("SH", [title]);
        for (name, meaning) in rows {
            common.control("TP", []).text([bold(*name)]).text([roman(*meaning)]);
        }
    }
    common.to_writer(&mut page)?;
    Ok(String::from_utf8(page)?)
}
