//! The model inside this library, for examples and first steps: a small Gemma 4 that was trained on Jane Austen's
//! novels (`assets/README.md`), and a drafter for it. Weights are mapped from files, as those of any model are, so they
//! are written to some first.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::files;

// Statics: of a constant every unit of code that names it would have a copy.
pub(crate) static MODEL: &[u8] = include_bytes!("../../assets/austen_q4_0.gguf");
pub(crate) static DRAFTER: &[u8] = include_bytes!("../../assets/austen_draft_q8_0.gguf");

/// Writes the model of `gemma4c demo` to a folder, and returns its path: 11 million parameters that have read Jane
/// Austen and nothing else.
///
/// ```
/// let folder = tempfile::tempdir().unwrap();
/// let gguf = gemma4c::demo_model(folder.path())?;
/// assert!(gguf.ends_with("austen.gguf"));
/// # Ok::<(), gemma4c::Error>(())
/// ```
pub fn demo_model(folder: impl AsRef<Path>) -> Result<PathBuf, Error> {
    write(folder.as_ref().join("austen.gguf"), MODEL)
}

/// Writes the drafter of that model to a folder, and returns its path.
///
/// ```
/// let folder = tempfile::tempdir().unwrap();
/// assert!(gemma4c::demo_drafter(folder.path())?.ends_with("austen_draft.gguf"));
/// # Ok::<(), gemma4c::Error>(())
/// ```
pub fn demo_drafter(folder: impl AsRef<Path>) -> Result<PathBuf, Error> {
    write(folder.as_ref().join("austen_draft.gguf"), DRAFTER)
}

fn write(path: PathBuf, bytes: &[u8]) -> Result<PathBuf, Error> {
    files::write_whole(&path, bytes).map_err(Error::write(&path))?;
    Ok(path)
}
