//! Results, on stdout and in files. A closed pipe ends the program quietly, so nothing here panics on it as `println!`
//! would.
//!
//! All files that commands write are opened here, and none of them takes the place of a file that the command reads:
//! `may_be_written` is where both are compared.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};

use anyhow::{Context, Result, bail, ensure};
use clap::builder::{MapValueParser, PathBufValueParser, TypedValueParser, ValueParserFactory};
use tempfile::NamedTempFile;

use crate::files;

/// A file that a command writes, by its argument's type: an argument that is a `PathBuf` is a file that the command
/// reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFile(PathBuf);

/// A folder that a command writes files into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFolder(PathBuf);

impl OutputFile {
    /// `-`: results go to standard output.
    pub fn is_stdout(&self) -> bool {
        self.0 == Path::new("-")
    }
}

impl OutputFolder {
    pub fn file(&self, name: &str) -> OutputFile {
        OutputFile(self.0.join(name))
    }

    /// Makes the folder where it is not there.
    pub fn create(&self) -> Result<()> {
        fs::create_dir_all(&self.0).with_context(|| format!("cannot write {}", self.0.display()))
    }
}

macro_rules! argument {
    ($type:ident) => {
        impl From<PathBuf> for $type {
            fn from(path: PathBuf) -> $type {
                $type(path)
            }
        }

        impl AsRef<Path> for $type {
            fn as_ref(&self) -> &Path {
                &self.0
            }
        }

        impl Deref for $type {
            type Target = Path;

            fn deref(&self) -> &Path {
                &self.0
            }
        }

        impl ValueParserFactory for $type {
            type Parser = MapValueParser<PathBufValueParser, fn(PathBuf) -> $type>;

            fn value_parser() -> Self::Parser {
                PathBufValueParser::new().map($type)
            }
        }
    };
}
argument!(OutputFile);
argument!(OutputFolder);

/// A file that the command reads.
pub struct Input {
    /// Device and inode: links to a file are the file.
    identity: (u64, u64),
    /// What it is, in words that follow "it is".
    what: String,
}

impl Input {
    /// `None` where there is no such file.
    pub fn find(path: &Path, what: impl Into<String>) -> Option<Input> {
        Some(Input { identity: identity(path)?, what: what.into() })
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|info| (info.dev(), info.ino()))
}

type Inputs = LazyLock<Vec<Input>, Box<dyn FnOnce() -> Vec<Input> + Send>>;

/// One command runs in a process, and its inputs are known when its arguments are.
static INPUTS: OnceLock<Inputs> = OnceLock::new();

/// From here on no output may be one of these files. They are looked for when the first output is about to be written.
pub fn protect(inputs: impl FnOnce() -> Vec<Input> + Send + 'static) {
    // Whoever comes second is a test in the same process, and has inputs of its own to lose.
    _ = INPUTS.set(LazyLock::new(Box::new(inputs)));
}

/// Writes a result.
pub fn print(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

fn print_bytes(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}

/// A file that gets its name once it is complete, with `persist`.
pub fn new_file(path: &OutputFile) -> Result<NamedTempFile> {
    refuse_pipe(path)?;
    may_be_written(path)?;
    files::new_file(path).with_context(|| format!("cannot write {}", path.display()))
}

/// Refuses standard output for what is not written from its beginning to its end.
pub fn refuse_pipe(path: &OutputFile) -> Result<()> {
    ensure!(!path.is_stdout(), "-: this result is written in several places, so it cannot go to a pipe: give a file");
    Ok(())
}

/// Writes a file under its name only once it is complete, or to standard output.
pub fn write_whole(path: &OutputFile, bytes: &[u8]) -> Result<()> {
    if path.is_stdout() {
        return print_bytes(bytes);
    }
    may_be_written(path)?;
    files::write_whole(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Opens a file that grows: what is in it stays, and the caller decides how much of that counts.
pub fn open_kept(path: &OutputFile) -> Result<File> {
    may_be_written(path)?;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    file.with_context(|| format!("cannot write {}", path.display()))
}

/// Refuses what would fail after much work, or take the place of a file that the command reads, of a folder, a device
/// or a pipe: a file renamed to `/dev/null` would be the new one.
pub fn may_be_written(path: &OutputFile) -> Result<()> {
    if path.is_stdout() {
        return Ok(());
    }
    let is_input = |input: &&Input| identity(path) == Some(input.identity);
    if let Some(input) = INPUTS.get().and_then(|inputs| inputs.iter().find(is_input)) {
        bail!("{} would be overwritten, and it is {}: give another name", path.display(), input.what);
    }
    let other = fs::metadata(path).is_ok_and(|info| !info.is_file());
    ensure!(!other, "cannot write {}: it is there, and not a regular file", path.display());
    let folder = files::folder(path);
    ensure!(folder.is_dir(), "cannot write {}: there is no folder {}", path.display(), folder.display());
    Ok(())
}

/// An error and its causes in one line. Some errors name their cause themselves; it is not told twice.
pub fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            text += if text.is_empty() { "" } else { ": " };
            text += &cause;
        }
    }
    text
}

/// Whether an error only says that nobody reads stdout any more.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Bytes as people say them: `4.58 GB`.
pub fn bytes(n: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.2} {}", units[unit]) }
}
