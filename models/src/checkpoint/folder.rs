//! The files of a checkpoint: which tensor is in which, and the small ones beside them.
//!
//! A checkpoint is a folder. With an index, the index says which shards there are; without one it is
//! `model.safetensors`, or all safetensors files together.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::error::{CheckpointError, Fault, shown};
use super::safetensors::{self, MOST_TENSORS, Stored};
use crate::gguf::{FileInfo, Mapping};

const INDEX: &str = "model.safetensors.index.json";
const ENDING: &str = ".safetensors";
/// Files that belong to a checkpoint besides the tensors, any of which names it.
const BESIDE: [&str; 4] = ["config.json", INDEX, "tokenizer.json", "hf_quant_config.json"];
/// Bytes of a file of settings, and of one that lists tensors or tokens: several times what any model has.
const MOST_SETTINGS: usize = 4 << 20;
const MOST_LISTING: usize = 256 << 20;
/// Shards of one checkpoint.
const MOST_SHARDS: usize = 1024;

/// Whether a path names a checkpoint: a folder, or one of its files.
pub fn is_checkpoint(path: &Path) -> bool {
    let is_known = |name: &str| name.ends_with(ENDING) || BESIDE.contains(&name);
    path.is_dir() || path.file_name().and_then(|name| name.to_str()).is_some_and(is_known)
}

/// A checkpoint's tensors, and where it is.
pub struct Folder {
    pub path: PathBuf,
    /// The files with tensors, and their bytes.
    pub files: Vec<(FileInfo, Arc<Mapping>)>,
    tensors: Vec<(u32, Stored)>,
    /// Indices of `tensors`.
    by_name: HashMap<Box<str>, u32>,
}

impl Folder {
    pub fn open(given: &Path) -> Result<Folder, CheckpointError> {
        let (path, only) = match given.is_dir() {
            true => (given.to_path_buf(), None),
            false => (given.parent().unwrap_or(Path::new("")).to_path_buf(), given.file_name()),
        };
        let path = if path.as_os_str().is_empty() { PathBuf::from(".") } else { path };
        let index = match path.join(INDEX).is_file() {
            true => Some(read_json::<Index>(&path, INDEX)?),
            false => None,
        };
        let mut folder = Folder { path, files: Vec::new(), tensors: Vec::new(), by_name: HashMap::new() };
        let only = only.and_then(|name| name.to_str()).filter(|name| name.ends_with(ENDING));
        match (index, only) {
            (Some(index), only) if only.is_none_or(|file| index.files.iter().any(|shard| **shard == *file)) => {
                folder.open_shards(&index)?;
            }
            (_, Some(file)) => folder.open_file(file, |_| true)?,
            (_, None) => {
                let names = folder.without_index()?;
                names.iter().try_for_each(|file| folder.open_file(file, |_| true))?;
            }
        }
        Ok(folder)
    }

    /// The safetensors files of a folder that has no index.
    fn without_index(&self) -> Result<Vec<String>, CheckpointError> {
        if self.path.join("model.safetensors").is_file() {
            return Ok(vec!["model.safetensors".into()]);
        }
        let failed = |source| CheckpointError::Io { path: self.path.clone(), source };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            names.extend(name.to_str().filter(|name| name.ends_with(ENDING)).map(str::to_owned));
        }
        names.sort_unstable();
        let within = CheckpointError::within(&self.path);
        match names.len() {
            0 => Err(within(Fault::Lacks("safetensors file"))),
            1..=MOST_SHARDS => all_parts(&names).map_err(within).map(|()| names),
            many => Err(within(Fault::key("the number of safetensors files", many, format!("at most {MOST_SHARDS}")))),
        }
    }

    fn open_shards(&mut self, index: &Index) -> Result<(), CheckpointError> {
        for (shard, file) in (0u32..).zip(&index.files) {
            if !self.path.join(&**file).exists() {
                let tensors = index.tensors.iter().filter(|(_, of)| *of == shard).count();
                let why = format!("{INDEX} says that {tensors} tensors are in it");
                let fault = Fault::MissingShard { file: shown(file), why };
                return Err(CheckpointError::within(&self.path)(fault));
            }
            let own: HashMap<&str, ()> =
                index.tensors.iter().filter(|(_, of)| *of == shard).map(|(name, _)| (&**name, ())).collect();
            self.open_file(file, |name| own.contains_key(name))?;
        }
        let missing = index.tensors.iter().find(|(name, _)| !self.by_name.contains_key(name));
        match missing {
            Some((name, shard)) => {
                let path = self.path.join(&*index.files[*shard as usize]);
                Err(CheckpointError::within(&path)(Fault::tensor(name, format!("is missing: {INDEX} says it is here"))))
            }
            None => Ok(()),
        }
    }

    /// Adds those tensors of a file that are wanted.
    fn open_file(&mut self, name: &str, is_wanted: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
        let path = self.path.join(name);
        let map = Arc::new(Mapping::open(&path)?);
        let within = CheckpointError::within(&path);
        let parsed = safetensors::parse(&map).map_err(&within)?;
        let file = self.files.len() as u32;
        for tensor in parsed.tensors.into_iter().filter(|tensor| is_wanted(&tensor.name)) {
            if self.tensors.len() == MOST_TENSORS {
                return Err(within(Fault::key("the number of tensors", "more", format!("at most {MOST_TENSORS}"))));
            }
            if self.by_name.insert(tensor.name.clone(), self.tensors.len() as u32).is_some() {
                return Err(within(Fault::tensor(&tensor.name, "is in another file, too")));
            }
            self.tensors.push((file, tensor));
        }
        self.files.push((FileInfo { path: path.clone(), len: map.len() as u64, header_len: parsed.len }, map));
        Ok(())
    }

    /// A tensor, and the index of its file.
    pub fn tensor(&self, name: &str) -> Option<(u32, &Stored)> {
        let (file, tensor) = &self.tensors[*self.by_name.get(name)? as usize];
        Some((*file, tensor))
    }

    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// All tensors' names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(_, tensor)| &*tensor.name)
    }

    /// A tensor's bytes.
    pub fn bytes(&self, file: u32, tensor: &Stored) -> &[u8] {
        // Checked against the file's length when it was opened.
        &self.files[file as usize].1[tensor.offset as usize..][..tensor.bytes as usize]
    }

    /// The path of the file that a tensor is in; the folder where there is none.
    pub fn path_of(&self, name: &str) -> &Path {
        self.tensor(name).map_or(&self.path, |(file, _)| &self.files[file as usize].0.path)
    }
}

/// Names like `model-00002-of-00004.safetensors` are all there.
fn all_parts(names: &[String]) -> Result<(), Fault> {
    let part = |name: &str| -> Option<(String, u32, u32)> {
        let (rest, count) = name.strip_suffix(ENDING)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        Some((stem.to_owned(), number.parse().ok()?, count.parse().ok()?))
    };
    let Some((stem, _, count)) = names.first().and_then(|name| part(name)) else { return Ok(()) };
    let name_of = |number: u32| format!("{stem}-{number:05}-of-{count:05}{ENDING}");
    match (1..=count.min(MOST_SHARDS as u32)).map(name_of).find(|name| !names.contains(name)) {
        Some(file) => Err(Fault::MissingShard { file, why: format!("it is one of {count} shards") }),
        None => Ok(()),
    }
}

/// Reads a JSON file of a folder.
pub fn read_json<T: for<'de> Deserialize<'de>>(folder: &Path, name: &str) -> Result<T, CheckpointError> {
    let path = folder.join(name);
    let map = Mapping::open(&path)?;
    let most = if [INDEX, "tokenizer.json"].contains(&name) { MOST_LISTING } else { MOST_SETTINGS };
    if map.len() > most {
        let fault = Fault::key("its length", format!("{} bytes", map.len()), format!("at most {most}"));
        return Err(CheckpointError::within(&path)(fault));
    }
    serde_json::from_slice(&map).map_err(|error| {
        let why = shown(&error.to_string());
        CheckpointError::within(&path)(Fault::Json { what: "its JSON", why })
    })
}

/// Reads a JSON file that may not be there.
pub fn read_optional<T: for<'de> Deserialize<'de>>(folder: &Path, name: &str) -> Result<Option<T>, CheckpointError> {
    if folder.join(name).exists() { read_json(folder, name).map(Some) } else { Ok(None) }
}

/// Which tensor is in which file.
struct Index {
    /// In the order in which they are first named.
    files: Vec<Box<str>>,
    /// Names, and indices of `files`.
    tensors: Vec<(Box<str>, u32)>,
}

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Index, D::Error> {
        #[derive(Deserialize)]
        struct Outer {
            weight_map: Places,
        }
        struct Places(Index);
        impl<'de> Deserialize<'de> for Places {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Places, D::Error> {
                deserializer.deserialize_map(Pairs).map(Places)
            }
        }
        Ok(Outer::deserialize(deserializer)?.weight_map.0)
    }
}

struct Pairs;

impl<'de> Visitor<'de> for Pairs {
    type Value = Index;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors' names and files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
        let mut index = Index { files: Vec::new(), tensors: Vec::new() };
        while let Some((name, file)) = map.next_entry::<Cow<'de, str>, Cow<'de, str>>()? {
            // A name and no path: an index leads nowhere else.
            if !file.ends_with(ENDING) || file.contains(['/', '\\', '\0']) || file.len() > 255 {
                return Err(A::Error::custom(format!("{} is no name of a safetensors file", shown(&file))));
            }
            let known = index.files.iter().position(|other| **other == *file);
            if known.is_none() && index.files.len() == MOST_SHARDS || index.tensors.len() == MOST_TENSORS {
                return Err(A::Error::custom(format!("at most {MOST_TENSORS} tensors in {MOST_SHARDS} files")));
            }
            let shard = known.unwrap_or_else(|| {
                index.files.push(file.into_owned().into_boxed_str());
                index.files.len() - 1
            });
            index.tensors.push((name.into_owned().into_boxed_str(), shard as u32));
        }
        Ok(index)
    }
}
