//! The bytes of a file: a read-only mapping of all of it, the one place of this crate that is `unsafe`; or the header
//! of a file that does not exist.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use memmap2::Advice;

use super::GgufError;

pub(crate) enum Mapping {
    File(memmap2::Mmap),
    /// Of a model that is only described.
    Header(Vec<u8>),
}

impl Mapping {
    pub fn open(path: &Path) -> Result<Mapping, GgufError> {
        let failed = |source| GgufError::Io { path: path.into(), source };
        // Asked before opening: a FIFO would block the open itself.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(GgufError::NotAFile { path: path.into() });
        }
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the mapping is private and read-only, and lives as long as every slice borrowed from it. What cannot
        // be ruled out is another process that rewrites the file meanwhile. Changed bytes give wrong numbers, never a
        // read out of bounds: every offset is checked against the length taken here, and text is checked anew
        // whenever it is read. A file cut shorter while it is mapped kills this process (SIGBUS) when a lost page is
        // touched; that is the price of not copying gigabytes, and model files are replaced, not edited.
        #[allow(unsafe_code)]
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed)?;
        Ok(Mapping::File(map))
    }

    /// Runs something that reads a few pages here and there: a page that is touched brings no others with it, which
    /// would be most of a model's bytes. Advice that the system does not take costs time and changes no result.
    pub fn scattered<T>(maps: &[Arc<Mapping>], read: impl FnOnce() -> T) -> T {
        let advise = |advice| {
            for map in maps {
                if let Mapping::File(map) = &**map {
                    let _ = map.advise(advice);
                }
            }
        };
        advise(Advice::Random);
        let result = read();
        advise(Advice::Normal);
        result
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Mapping::File(map) => map,
            Mapping::Header(bytes) => bytes,
        }
    }
}
