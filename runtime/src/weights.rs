//! The model's files under a plan: found, mapped, and checked to be the ones the plan was compiled from.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use gemma4c_plan::fingerprint::{FileBytes, fingerprint};
use gemma4c_plan::{ModelFile, Plan, Weight};
use memmap2::Mmap;

use crate::RuntimeError;

/// Where to look for a plan's model files.
#[derive(Clone, Debug, Default)]
pub struct ModelLocation {
    /// The folder the plan lies in: paths in the plan are relative to it, and a moved model is looked for there.
    pub plan_dir: PathBuf,
    /// A file, or a folder with the files, that wins over what the plan says.
    pub given: Option<PathBuf>,
}

impl ModelLocation {
    /// Where the plan's model lies, and it is the one the plan was compiled from: its first file, from which the others are
    /// found.
    pub fn file(&self, plan: &Plan) -> Result<PathBuf, RuntimeError> {
        let first = Weights::open(plan, self)?.files.into_iter().next();
        let (path, _) = first.ok_or(RuntimeError::ModelMissing { name: String::new(), looked: Vec::new() })?;
        Ok(path)
    }
}

/// The mapped files of a model.
pub(crate) struct Weights {
    maps: Vec<Mmap>,
    files: Vec<(PathBuf, File)>,
}

impl Weights {
    pub fn open(plan: &Plan, location: &ModelLocation) -> Result<Weights, RuntimeError> {
        let mut opened = Vec::new();
        let mut maps = Vec::new();
        for file in &plan.model.files {
            let path = find(file, location, plan.model.files.len() == 1)?;
            let (bytes, handle) = map(&path, file)?;
            maps.push(bytes);
            opened.push((path, handle));
        }
        let files: Vec<FileBytes<'_>> = std::iter::zip(&maps, &plan.model.files)
            .map(|(bytes, file)| FileBytes { bytes, header_len: file.header_bytes })
            .collect();
        let tensors = plan.weights.iter().map(|w| (w.file as usize, w.offset, w.bytes));
        // `None` is a plan whose header length lies beyond its file: no model has that fingerprint.
        let (expected, found) =
            (plan.model.fingerprint, fingerprint(&files, tensors).unwrap_or(!plan.model.fingerprint));
        match opened.first() {
            Some((path, _)) if expected != found => {
                Err(RuntimeError::ModelChanged { path: path.clone(), expected, found })
            }
            _ => Ok(Weights { maps, files: opened }),
        }
    }

    /// The bytes of a weight of the plan these files were opened for.
    pub fn bytes(&self, weight: &Weight) -> &[u8] {
        // In range: the plan was checked against the files' lengths, and the files have these lengths.
        &self.maps[weight.file as usize][weight.offset as usize..][..weight.bytes as usize]
    }

    /// Reads bytes of a weight from its byte `from` on, past the map: each byte is wanted once, so mapping its page would only
    /// cost time, and a file that was cut meanwhile is an error and not the end of the process.
    pub fn read(&self, weight: &Weight, from: u64, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        let (path, file) = &self.files[weight.file as usize];
        let failed = |source| RuntimeError::Io { path: path.clone(), source };
        file.read_exact_at(bytes, weight.offset + from).map_err(failed)
    }
}

fn find(file: &ModelFile, location: &ModelLocation, only_one: bool) -> Result<PathBuf, RuntimeError> {
    let name = Path::new(&file.path).file_name().unwrap_or(file.path.as_ref());
    let mut looked = match &location.given {
        Some(given) if given.is_dir() => vec![given.join(name)],
        Some(given) if only_one => vec![given.clone()],
        // Of a split model one part was named; the others lie beside it.
        Some(given) => vec![given.with_file_name(name)],
        None => vec![location.plan_dir.join(&file.path), location.plan_dir.join(name)],
    };
    looked.dedup();
    match looked.iter().find(|p| p.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(RuntimeError::ModelMissing { name: name.to_string_lossy().into_owned(), looked }),
    }
}

fn map(path: &Path, expected: &ModelFile) -> Result<(Mmap, File), RuntimeError> {
    let failed = |source| RuntimeError::Io { path: path.into(), source };
    let file = File::open(path).map_err(failed)?;
    // SAFETY: read-only, and every slice borrows from the map. Should another process rewrite the file meanwhile, the
    // numbers change; should it cut the file, touching a lost page ends this process. Offsets are checked against the length.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
    match map.len() as u64 {
        found if found == expected.bytes => Ok((map, file)),
        found => Err(RuntimeError::ModelSize { path: path.into(), expected: expected.bytes, found }),
    }
}
