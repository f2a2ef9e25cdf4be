//! Cubins kept on disk between runs, by the content they were made from.
//!
//! An entry may vanish, be cut or be flipped at any time; it is then compiled again and never trusted. Nothing here
//! fails: a cache that cannot be written costs time only, and says so once (`problem`).

use super::job::Cubin;
use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Larger than any cubin of ours by far: a file beyond it is not an entry.
const LARGEST_ENTRY: u64 = 64 << 20;
const CHECKSUM_BYTES: usize = 16;

/// The identity of a compilation: equal keys, equal cubins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u128);

impl Key {
    /// A key over the parts in order. Each is hashed with its length, so that no text can pose as two parts.
    pub fn of(parts: &[&str]) -> Key {
        let mut hash = Xxh3::new();
        // To be counted up when the meaning of an entry changes.
        hash.update(b"gemma4c cubin 1");
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        Key(hash.digest128())
    }

    /// Its lower half, for tables: enough for the few thousand compilations of a tree.
    pub fn short(self) -> u64 {
        self.0 as u64
    }
}

/// A folder of compiled kernels. Any number of processes may share one.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    problem: OnceLock<String>,
}

impl Cache {
    /// `cubins` in `$GEMMA4C_CACHE`, or in gemma4c's folder of the user's cache (`$XDG_CACHE_HOME`, `~/.cache`).
    pub fn from_env() -> Cache {
        let variable = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let ours = env::var_os("GEMMA4C_CACHE").filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = ours.or_else(|| {
            let user = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))?;
            Some(user.join("gemma4c"))
        });
        match root {
            Some(root) => Cache::at(root.join("cubins")),
            None => {
                let problem = "no cache: none of GEMMA4C_CACHE, XDG_CACHE_HOME and HOME is set".to_owned();
                Cache { folder: None, problem: OnceLock::from(problem) }
            }
        }
    }

    /// A cache in that folder, which is made when the first cubin is stored.
    pub fn at(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: Some(folder.into()), problem: OnceLock::new() }
    }

    /// No cache, on purpose.
    pub fn off() -> Cache {
        Cache { folder: None, problem: OnceLock::new() }
    }

    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Why cubins are not being kept, if they are not. Known after the first compilation; for the caller to print once.
    pub fn problem(&self) -> Option<&str> {
        self.problem.get().map(String::as_str)
    }

    #[doc(hidden)]
    pub fn load(&self, key: Key) -> Option<Cubin> {
        let mut bytes = Vec::new();
        File::open(self.file(key)?).ok()?.take(LARGEST_ENTRY).read_to_end(&mut bytes).ok()?;
        let (checksum, content) = bytes.split_first_chunk::<CHECKSUM_BYTES>()?;
        if u128::from_le_bytes(*checksum) != xxh3_128(content) {
            return None;
        }
        postcard::from_bytes(content).ok()
    }

    #[doc(hidden)]
    pub fn store(&self, key: Key, cubin: &Cubin) {
        let Some(file) = self.file(key) else { return };
        if self.problem.get().is_some() {
            return;
        }
        if let Err(error) = write_whole(&file, cubin) {
            let folder = file.parent().unwrap_or(&file).display();
            // A second thread may have failed at the same time; one note is enough.
            let _ = self.problem.set(format!("no cache: cannot write to {folder}: {error}"));
        }
    }

    #[doc(hidden)]
    pub fn file(&self, key: Key) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{:032x}", key.0)))
    }
}

/// Writes under a temporary name and renames, so that a reader sees a whole entry or none.
fn write_whole(file: &Path, cubin: &Cubin) -> io::Result<()> {
    let folder = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let content = postcard::to_allocvec(cubin).map_err(io::Error::other)?;
    let mut temporary = tempfile::NamedTempFile::new_in(folder)?;
    temporary.write_all(&xxh3_128(&content).to_le_bytes())?;
    temporary.write_all(&content)?;
    temporary.persist(file)?;
    Ok(())
}
