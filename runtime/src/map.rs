//! Where the files of a model and a plan are, and how they are mapped for reading.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::RuntimeError;

/// Where to look for a plan's weights.
#[derive(Clone, Debug, Default)]
pub struct ModelLocation {
    /// The plan's file: paths in the plan are relative to its folder, a moved model is looked for there, and weights
    /// that the plan has with it are in it.
    pub plan: PathBuf,
    /// A file, or a folder with the files, that wins over what the plan says.
    pub given: Option<PathBuf>,
}

impl ModelLocation {
    pub(crate) fn folder(&self) -> &Path {
        self.plan.parent().unwrap_or(Path::new(""))
    }
}

/// All of a file.
pub(crate) fn map_file(path: &Path) -> Result<(Mmap, File), RuntimeError> {
    let failed = |source| RuntimeError::Io { path: path.into(), source };
    let file = File::open(path).map_err(failed)?;
    // SAFETY: read-only, and every slice borrows from the map. Should another process rewrite the file meanwhile, the
    // numbers change; should it cut the file, touching a lost page ends this process. Offsets are checked against the
    // length.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
    Ok((map, file))
}
