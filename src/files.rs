//! Plans and models on disk: telling one from the other, reading a plan with errors that name it, writing one whole or
//! not at all.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use gemma4c_models::gguf::{FileInfo, Gguf};
use gemma4c_models::{checkpoint, gemma4};
use gemma4c_plan::{ModelFile, Plan, START, own_bytes};
use tempfile::NamedTempFile;

use crate::error::Error;

/// A plan is small; a file beyond this is something else, and is not read into memory to find out.
const LARGEST: u64 = 1 << 30;

/// Whether a path is that of a model, where a plan would do as well: a GGUF file, a checkpoint's folder, a file of one.
pub fn is_model(path: &Path) -> Result<bool, Error> {
    Ok(checkpoint::is_checkpoint(path) || start(path)?.starts_with(b"GGUF"))
}

/// Opens a model, whatever kind of file or folder it is.
pub fn open_model(path: &Path) -> Result<Gguf, Error> {
    Ok(gemma4::open(path)?)
}

/// The text of a chat template.
pub fn read_template(path: &Path) -> Result<String, Error> {
    const LARGEST: u64 = 4 << 20;
    if regular(path)?.len() > LARGEST {
        return Err(Error::WrongFile { path: path.into(), why: "is too long for a chat template".into() });
    }
    fs::read_to_string(path).map_err(Error::read(path))
}

/// Whether a file is a plan, where a model is wanted.
pub fn is_plan(path: &Path) -> Result<bool, Error> {
    Ok(!checkpoint::is_checkpoint(path) && start(path)?.starts_with(b"gemma4c\0"))
}

/// The first eight bytes of a file, or all it has.
fn start(path: &Path) -> Result<Vec<u8>, Error> {
    regular(path)?;
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(8).read_to_end(&mut bytes));
    read.map_err(Error::read(path))?;
    Ok(bytes)
}

/// Opening a pipe would wait for whoever writes to it.
pub fn regular(path: &Path) -> Result<Metadata, Error> {
    let info = fs::metadata(path).map_err(Error::read(path))?;
    match info.is_file() {
        true => Ok(info),
        false => Err(Error::WrongFile { path: path.into(), why: "is not a regular file".into() }),
    }
}

/// Reads and checks a plan, but not the weights behind it.
pub fn read_plan(path: &Path) -> Result<Plan, Error> {
    let wrong = |why: String| Error::WrongFile { path: path.into(), why };
    let file_bytes = regular(path)?.len();
    let file = File::open(path).map_err(Error::read(path))?;
    let mut bytes = Vec::new();
    (&file).take(START as u64).read_to_end(&mut bytes).map_err(Error::read(path))?;
    if bytes.starts_with(b"GGUF") {
        let path = path.display();
        return Err(wrong(format!("is a model, not a plan: run `gemma4c compile {path} -o PLAN.bin` first")));
    }
    let own = own_bytes(&bytes).map_err(Error::within(path))?;
    if own > LARGEST {
        return Err(wrong(format!("is not a plan: it says it has {own} bytes")));
    }
    file.take(own.saturating_sub(START as u64)).read_to_end(&mut bytes).map_err(Error::read(path))?;
    Plan::from_start(&bytes, file_bytes).map_err(Error::within(path))
}

/// Writes a plan under its name only once it is complete, and returns its size.
pub fn write_plan(plan: &Plan, path: &Path) -> Result<u64, Error> {
    let bytes = plan.to_bytes()?;
    write_whole(path, &bytes).map_err(Error::write(path))?;
    Ok(bytes.len() as u64)
}

/// Writes a file under its name only once it is complete.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = new_file(path)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// A file that gets its name once it is complete, with `persist`: nobody meets half of it, and a failure leaves
/// nothing.
pub fn new_file(path: &Path) -> io::Result<NamedTempFile> {
    // Readable as any new file is, not only for its owner as temporary ones are.
    let mode = Permissions::from_mode(0o666);
    tempfile::Builder::new().permissions(mode).tempfile_in(folder(path))
}

/// The folder a file is in; the current one for a bare name.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Named relative to the plan where it is in the plan's folder or below, so that the two can move together.
pub fn model_file(file: &FileInfo, folder: &Path) -> Result<ModelFile, Error> {
    let absolute = |path: &Path| path.canonicalize().map_err(Error::read(path));
    // A cache of downloads has links that say which model it is, to files that do not.
    let path = absolute(self::folder(&file.path))?.join(file.path.file_name().unwrap_or_default());
    let path = path.strip_prefix(absolute(folder)?).unwrap_or(&path);
    let name = path.to_str();
    let name = name.ok_or_else(|| Error::WrongFile { path: path.into(), why: "is not a name in UTF-8".into() })?;
    Ok(ModelFile { path: name.into(), bytes: file.len, header_bytes: file.header_len })
}
