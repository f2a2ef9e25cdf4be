//! Embedded weights: they follow the plan in its own file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use gemma4c_plan::embedded::Embedded;
use memmap2::Mmap;
use rayon::prelude::*;

use crate::error::RuntimeError;
use crate::map::{ModelLocation, map_file};

/// Chunks that are compared between two reports of progress.
const AT_ONCE: usize = 64;

/// The last bytes of a plan's file, mapped.
pub struct EmbeddedWeights {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) map: Mmap,
    /// Where they start in the file.
    pub(crate) start: u64,
    embedded: Embedded,
}

impl EmbeddedWeights {
    /// Some of them are compared with their checksums: enough to notice a file of which a part never arrived, and too
    /// few to be waited for.
    pub fn open(embedded: &Embedded, location: &ModelLocation) -> Result<EmbeddedWeights, RuntimeError> {
        let path = location.plan.clone();
        let (map, file) = map_file(&path)?;
        let (needed, found) = (embedded.bytes, map.len() as u64);
        let Some(start) = found.checked_sub(needed) else {
            return Err(RuntimeError::WeightsCut { path, needed, found });
        };
        let weights = EmbeddedWeights { path, file, map, start, embedded: embedded.clone() };
        embedded.spread().try_for_each(|chunk| weights.check(chunk))?;
        Ok(weights)
    }

    /// Compares all of them with their checksums, on all cores; `progress` is told the bytes done and the bytes there
    /// are.
    pub fn check_all(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), RuntimeError> {
        let chunks: Vec<usize> = (0..self.embedded.sums.0.len()).collect();
        for some in chunks.chunks(AT_ONCE) {
            some.par_iter().try_for_each(|chunk| self.check(*chunk))?;
            progress(some.last().map_or(0, |last| self.embedded.chunk(*last).end), self.embedded.bytes);
        }
        Ok(())
    }

    fn check(&self, chunk: usize) -> Result<(), RuntimeError> {
        let range = self.embedded.chunk(chunk);
        match self.embedded.is_chunk(chunk, &self.bytes()[range.start as usize..range.end as usize]) {
            true => Ok(()),
            false => {
                Err(RuntimeError::WeightsDamaged { path: self.path.clone(), first: range.start, last: range.end - 1 })
            }
        }
    }

    /// All of them.
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.start as usize..]
    }

    /// Reads from their byte `from` on, past the map: each byte is wanted once.
    pub(crate) fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        let failed = |source| RuntimeError::Io { path: self.path.clone(), source };
        self.file.read_exact_at(bytes, self.start + from).map_err(failed)
    }
}
