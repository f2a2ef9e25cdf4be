//! Results on stdout. A closed pipe is an end, not an accident, so nothing here panics on it as `println!` would.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Writes a result.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Refuses to write over a folder, a device or a pipe: a file that is renamed to its name would take the place of
/// `/dev/null`, and opening a pipe would wait for a reader.
pub fn may_be_written(path: &Path) -> anyhow::Result<()> {
    let other = fs::metadata(path).is_ok_and(|info| !info.is_file());
    anyhow::ensure!(!other, "cannot write {}: it is there, and not a regular file", path.display());
    Ok(())
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
