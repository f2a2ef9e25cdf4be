//! Opens a model from one file or from all parts of a split one.
//!
//! The first part holds the model's metadata; every part says which one it is and how many there are (`split.no`, from
//! 0, and `split.count`) and holds a share of `split.tensors.count` tensors. The metadata decide whether a
//! file is a part, its name only where the others lie.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{Fault, GgufError};
use super::header::{self, Parsed, sorted};
use super::limits::MAX_ENTRIES;
use super::map::Mapping;
use super::metadata::Metadata;
use super::value::FromValue;
use super::{FileInfo, Gguf, Header};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

struct Part {
    path: PathBuf,
    map: Arc<Mapping>,
    header: Parsed,
}

impl Gguf {
    /// Opens the file at `path` and, where it is part of a split model, all other parts beside it.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        open(path.as_ref())
    }
}

fn open(path: &Path) -> Result<Gguf, GgufError> {
    let given = Part::open(path.into(), 0)?;
    match given.split_key(COUNT) {
        None | Some(0 | 1) => assemble(vec![given]),
        Some(count) => open_parts(given, count),
    }
}

fn open_parts(given: Part, count: u64) -> Result<Gguf, GgufError> {
    let Some(stem) = stem_of_part(&given.path, count) else {
        return Err(given.fault(Fault::SplitName { count }));
    };
    let folder = given.path.parent().unwrap_or(Path::new("")).to_path_buf();
    drop(given);
    let mut parts = Vec::new();
    for part in 1..=count {
        let path = folder.join(format!("{stem}-{part:05}-of-{count:05}.gguf"));
        if !path.exists() {
            return Err(GgufError::MissingPart { path, part, count });
        }
        let opened = Part::open(path, parts.len())?;
        opened.expect(NUMBER, part - 1)?;
        opened.expect(COUNT, count)?;
        parts.push(opened);
    }
    let claimed = parts[0].split_key(TENSORS);
    let tensors: usize = parts.iter().map(|p| p.header.tensors.len()).sum();
    if claimed.is_some() {
        parts[0].expect(TENSORS, tensors as u64)?;
    }
    assemble(parts)
}

/// `STEM` of `STEM-0000X-of-0000N.gguf`.
fn stem_of_part(path: &Path, count: u64) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let rest = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, number) = rest.rsplit_once('-')?;
    let number: u64 = number.parse().ok().filter(|_| number.len() >= 5)?;
    (1..=count).contains(&number).then(|| stem.to_string())
}

fn assemble(parts: Vec<Part>) -> Result<Gguf, GgufError> {
    let first = parts[0].path.clone();
    let mut files = Vec::with_capacity(parts.len());
    let mut maps = Vec::with_capacity(parts.len());
    let mut tensors = Vec::new();
    let mut metadata = None;
    for Part { path, map, header } in parts {
        files.push(FileInfo { path, len: map.len() as u64, header_len: header.len as u64 });
        metadata.get_or_insert_with(|| Metadata::new(map.clone(), header.entries, header.by_key));
        maps.push(map);
        tensors.extend(header.tensors);
        if tensors.len() as u64 > MAX_ENTRIES {
            let fault = Fault::Count {
                what: "tensors in all its parts",
                claimed: tensors.len() as u64,
                limit: MAX_ENTRIES,
                len: files.iter().map(|f| f.len as usize).sum(),
            };
            return Err(GgufError::Malformed { path: first, fault });
        }
    }
    let by_name = sorted(&tensors, |t| &t.name).map_err(|t| GgufError::Malformed {
        path: files[t.file].path.clone(),
        fault: Fault::DuplicateTensor(t.name.to_string()),
    })?;
    let metadata = metadata.expect("a model has at least one part");
    let header = Header { metadata, tensors, by_name, aliases: None };
    Ok(Gguf { files, maps, header, notes: Vec::new() })
}

impl Part {
    fn open(path: PathBuf, file: usize) -> Result<Part, GgufError> {
        let map = Arc::new(Mapping::open(&path)?);
        match header::parse(&map, file, map.len() as u64) {
            Ok(header) => Ok(Part { path, map, header }),
            Err(fault) => Err(GgufError::Malformed { path, fault }),
        }
    }

    fn fault(self, fault: Fault) -> GgufError {
        GgufError::Malformed { path: self.path, fault }
    }

    fn split_key(&self, key: &str) -> Option<u64> {
        header::value(&self.header.entries, &self.map, key).and_then(u64::from_value)
    }

    fn expect(&self, key: &'static str, expected: u64) -> Result<(), GgufError> {
        let found = self.split_key(key);
        if found == Some(expected) {
            return Ok(());
        }
        let found = found.map_or("missing".into(), |n| n.to_string());
        Err(GgufError::Malformed { path: self.path.clone(), fault: Fault::Split { key, found, expected } })
    }
}
