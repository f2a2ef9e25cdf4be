//! Where this library is, if it is not inside a program of ours: a module of another program has a file of its own, and
//! its dependencies are wherever a package manager has put them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;
use std::{env, fs};

use gemma4c_codegen::nvrtc;

use crate::error::Error;

static FILE: OnceLock<PathBuf> = OnceLock::new();

/// Says which file this library was loaded from, and in which folders the packages are that it needs. Once, before
/// anything else; what comes later is not heeded.
pub fn set(file: PathBuf, packages: Vec<PathBuf>) {
    if FILE.set(file).is_ok() {
        nvrtc::came_with(packages);
    }
}

/// What tells this build from another: the size of the file that it is in, and when that was written.
pub(crate) fn build() -> Result<String, Error> {
    let here = match FILE.get() {
        Some(file) => file.clone(),
        None => env::current_exe().map_err(Error::read(Path::new("this program's own file")))?,
    };
    let info = fs::metadata(&here).map_err(Error::read(&here))?;
    let written = info.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    Ok(format!("{} {written:?}", info.len()))
}
