//! Which files a command reads and which it writes, from the types of its arguments: a `PathBuf` is read, an
//! `OutputFile` is written.
//!
//! So a new command, and a new argument of an old one, is covered by what it is declared as. A command does not check
//! its own outputs.

use std::any::TypeId;
use std::iter;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::{Arg, ArgMatches, Command};
use gemma4c_runtime::ModelLocation;

use super::generation::DraftArg;
use crate::files;
use crate::output::{self, Input, OutputFile};

/// Refuses outputs that would overwrite what the command reads, or each other, before anything runs.
pub fn protect(command: &Command, matches: &ArgMatches) -> Result<()> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    let Some(command) = command.find_subcommand(name) else { return Ok(()) };
    let mut read: Vec<PathBuf> = values(command, matches);
    read.extend(values::<DraftArg>(command, matches).iter().filter_map(DraftArg::file).map(Path::to_path_buf));
    output::protect(move || expand(&read));
    let written: Vec<OutputFile> = values(command, matches);
    for (at, path) in written.iter().enumerate() {
        let taken = !path.is_stdout() && written[..at].contains(path);
        ensure!(!taken, "{} is given for two outputs: give each a name of its own", path.display());
        output::may_be_written(path)?;
    }
    Ok(())
}

/// Whether an argument's values are of this type.
pub fn is_of<T: 'static>(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<T>()
}

/// What was given for all arguments of a type.
fn values<T: Clone + Send + Sync + 'static>(command: &Command, matches: &ArgMatches) -> Vec<T> {
    let matching = command.get_arguments().filter(|arg| is_of::<T>(arg));
    matching.flat_map(|arg| matches.get_many::<T>(arg.get_id().as_str()).into_iter().flatten().cloned()).collect()
}

/// These files, and those that they bring along: the other parts of a split model, the models of a plan.
fn expand(read: &[PathBuf]) -> Vec<Input> {
    let mut inputs: Vec<Input> = read.iter().filter_map(|path| Input::find(path, "read by this command")).collect();
    for path in read.iter().filter(|path| path.exists()) {
        // A file that is neither is an error of the command, which says so better.
        if files::is_model(path).unwrap_or(false) {
            let what = format!("a part of {}", path.display());
            let files = files::open_model(path).map(|model| model.files().to_vec()).unwrap_or_default();
            inputs.extend(files.iter().filter_map(|file| Input::find(&file.path, &what)));
        } else if files::is_plan(path).unwrap_or(false) {
            inputs.extend(models_of(path, read));
        }
    }
    inputs
}

/// The models of a plan, wherever its run may find them: beside it, or where another argument says.
fn models_of(path: &Path, read: &[PathBuf]) -> Vec<Input> {
    let Ok(plan) = files::read_plan(path) else { return Vec::new() };
    let what = format!("the model of {}", path.display());
    let elsewhere = read.iter().filter(|other| *other != path).map(Some);
    let locations =
        iter::once(None).chain(elsewhere).map(|given| ModelLocation { plan: path.into(), given: given.cloned() });
    let files = locations.flat_map(|location| location.candidates(&plan));
    files.filter_map(|file| Input::find(&file, &what)).collect()
}
