//! Tells whether the weights under a plan are still those it was compiled from.
//!
//! A plan refers to byte ranges of GGUF files. Hashing gigabytes at every start is out of the question, so the
//! fingerprint covers what changes when a model is converted, quantised, fine-tuned or cut: the size of every file,
//! its header (metadata and tensor table), and the first and last bytes of every tensor. It does not notice a
//! byte flipped in the middle of a tensor: it guards against mix-ups, not against tampering.
//!
//! Compiler and runtime both compute it, each from its own view of the files, hence the plain arguments.

use xxhash_rust::xxh3::Xxh3Default;

/// Bytes read from either end of a tensor.
const EDGE: usize = 4096;

/// One GGUF file.
#[derive(Clone, Copy, Debug)]
pub struct FileBytes<'a> {
    /// All of it.
    pub bytes: &'a [u8],
    /// How much of it is metadata and tensor table.
    pub header_len: u64,
}

/// The fingerprint of `files` and of the tensors in them, given as (file index, offset, length) in a fixed order;
/// `None` where a header or a tensor lies outside its file.
pub fn fingerprint(files: &[FileBytes<'_>], tensors: impl Iterator<Item = (usize, u64, u64)>) -> Option<u64> {
    let mut hash = Xxh3Default::new();
    for file in files {
        hash.update(&(file.bytes.len() as u64).to_le_bytes());
        hash.update(&file.header_len.to_le_bytes());
        hash.update(range(file.bytes, 0, file.header_len)?);
    }
    for (file, offset, len) in tensors {
        let data = range(files.get(file)?.bytes, offset, len)?;
        for number in [file as u64, offset, len] {
            hash.update(&number.to_le_bytes());
        }
        hash.update(&data[..data.len().min(EDGE)]);
        hash.update(&data[data.len().saturating_sub(EDGE)..]);
    }
    Some(hash.digest())
}

fn range(bytes: &[u8], start: u64, len: u64) -> Option<&[u8]> {
    let start = usize::try_from(start).ok()?;
    bytes.get(start..start.checked_add(usize::try_from(len).ok()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENSORS: [(usize, u64, u64); 2] = [(0, 100, 9_000), (0, 10_000, 50)];

    fn of(bytes: &[u8]) -> Option<u64> {
        fingerprint(&[FileBytes { bytes, header_len: 100 }], TENSORS.into_iter())
    }

    #[test]
    fn it_sees_header_size_and_edges_but_not_the_middle() {
        let bytes = vec![7u8; 20_000];
        let plain = of(&bytes);
        let with = |at: usize| {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            of(&changed)
        };
        for seen in [0, 99, 100, 100 + EDGE - 1, 9_099, 9_099 - (EDGE - 1), 10_000, 10_049] {
            assert_ne!(with(seen), plain, "byte {seen}");
        }
        for unseen in [100 + EDGE, 9_099 - EDGE, 9_500, 19_999] {
            assert_eq!(with(unseen), plain, "byte {unseen}");
        }
        assert_ne!(of(&bytes[..19_999]), plain);
    }

    #[test]
    fn a_range_outside_its_file_has_none() {
        let bytes = [0u8; 64];
        let file = FileBytes { bytes: &bytes, header_len: 8 };
        let one = |tensor| fingerprint(&[file], std::iter::once(tensor));
        assert!(one((0, 8, 56)).is_some());
        for outside in [(0, 8, 57), (0, 65, 0), (1, 0, 1), (0, u64::MAX, 1), (0, 1, u64::MAX)] {
            assert_eq!(one(outside), None, "{outside:?}");
        }
        assert_eq!(fingerprint(&[FileBytes { bytes: &bytes, header_len: 65 }], std::iter::empty()), None);
    }
}
