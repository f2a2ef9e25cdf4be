//! Results, on stdout and in files. A closed pipe ends the program quietly, so nothing here panics on it as `println!` would.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tempfile::NamedTempFile;

/// Writes a result.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// A file that gets its name once it is complete, with `persist`: nobody meets half of it, and a failure leaves nothing.
pub fn new_file(path: &Path) -> Result<NamedTempFile> {
    may_be_written(path)?;
    // Readable as any new file is, not only for its owner as temporary ones are.
    let mode = Permissions::from_mode(0o666);
    let file = tempfile::Builder::new().permissions(mode).tempfile_in(folder(path));
    file.with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a file under its name only once it is complete.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let cannot_write = || format!("cannot write {}", path.display());
    let mut file = new_file(path)?;
    file.write_all(bytes).with_context(cannot_write)?;
    file.persist(path).with_context(cannot_write)?;
    Ok(())
}

/// Refuses what would fail after much work, or take the place of a folder, a device or a pipe: a file renamed to `/dev/null`
/// would be the new one.
pub fn may_be_written(path: &Path) -> Result<()> {
    let other = fs::metadata(path).is_ok_and(|info| !info.is_file());
    ensure!(!other, "cannot write {}: it is there, and not a regular file", path.display());
    let folder = folder(path);
    ensure!(folder.is_dir(), "cannot write {}: there is no folder {}", path.display(), folder.display());
    Ok(())
}

/// The folder a file lies in; the current one for a bare name.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
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
