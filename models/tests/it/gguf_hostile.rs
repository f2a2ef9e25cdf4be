//! The reader against files that lie: mutated headers, cut files, absurd counts. Whatever the bytes say, opening ends
//! soon, does not panic, and allocates no more than the file's size and 64 MB.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::counting_allocator::peak_during;
use gemma4c_blocks::DType;
use gemma4c_models::gguf::{FromValue, Gguf, GgufError, Value, Writer};

const SLACK: usize = 64 << 20;

/// Numbers that break arithmetic done on trust.
const NASTY: [u64; 9] = [0, 1, 7, 0x7fff_ffff, 0xffff_ffff, 1 << 32, 1 << 60, (1 << 63) - 1, u64::MAX];

/// A file with a bit of everything in its header.
fn base(path: &Path) -> Vec<u8> {
    let mut writer = Writer::with_alignment(64).unwrap();
    writer.set("general.architecture", "gemma4").unwrap();
    writer.set("gemma4.block_count", 2u32).unwrap();
    writer.set("gemma4.rope.freq_base", 1e6f32).unwrap();
    writer.set("split.count", 1u16).unwrap();
    writer.set_array("gemma4.feed_forward_length", [64i32, 128]).unwrap();
    writer.set_array("gemma4.attention.sliding_window_pattern", [true, false]).unwrap();
    writer.set_array("tokenizer.ggml.tokens", ["<pad>", "▁the", "é"]).unwrap();
    writer.set_array("tokenizer.ggml.scores", [-1000f32; 3]).unwrap();
    for (name, dims, dtype) in [
        ("token_embd.weight", &[256u64, 3][..], DType::Q6K),
        ("blk.0.attn_q.weight", &[32, 4], DType::Q8_0),
        ("blk.0.ffn_down_exps.weight", &[32, 2, 3], DType::Q4_0),
        ("output_norm.weight", &[32], DType::F32),
    ] {
        writer.tensor(name, dims, dtype).unwrap();
    }
    writer.create(path).unwrap().finish().unwrap();
    std::fs::read(path).unwrap()
}

/// Opens the file and, where that works, reads all there is to read.
fn read_everything(path: &Path) -> Result<u64, GgufError> {
    let gguf = Gguf::open(path)?;
    let metadata = gguf.metadata();
    let mut seen = metadata.len() as u64;
    for (key, value) in metadata.iter() {
        seen += value.to_string().len() as u64;
        if let Value::Array(array) = value {
            seen += array.iter().filter_map(u32::from_value).map(u64::from).fold(0, u64::wrapping_add);
            seen += array.strings().into_iter().flatten().map(|s| s.len() as u64).sum::<u64>();
        }
        let layers = metadata.u32("gemma4.block_count").unwrap_or(2);
        seen += metadata.per_layer_u32(key, layers).map_or(0, |v| v.len() as u64);
        seen += metadata.per_layer_bool(key, layers).map_or(0, |v| v.len() as u64);
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor(&tensor.name), Some(tensor));
        assert!(!tensor.dims().is_empty());
        seen += gguf.data(tensor).iter().map(|&b| u64::from(b)).sum::<u64>() + u64::from(tensor.dtype().is_ok());
    }
    Ok(seen ^ gguf.fingerprint(gguf.tensors()))
}

struct Arena {
    folder: tempfile::TempDir,
    cases: usize,
    refused: usize,
    started: Instant,
}

impl Arena {
    fn new() -> Arena {
        Arena { folder: tempfile::tempdir().unwrap(), cases: 0, refused: 0, started: Instant::now() }
    }

    fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("hostile.gguf")
    }

    /// Opens `bytes` as a file and keeps the three promises.
    fn check(&mut self, bytes: &[u8], what: impl Fn() -> String) {
        let path = self.file();
        // Written over in place: some file systems flush a file that is cut to nothing and written anew.
        let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        let start = Instant::now();
        let caught = std::panic::catch_unwind(|| peak_during(|| read_everything(&path).map_err(|e| e.to_string())));
        let (result, peak) = caught.unwrap_or_else(|_| panic!("{}: a panic", what()));
        assert!(peak <= bytes.len() + SLACK, "{}: {peak} bytes held for a file of {}", what(), bytes.len());
        assert!(start.elapsed() < Duration::from_secs(10), "{}: {:?}", what(), start.elapsed());
        if let Err(message) = result {
            assert!(message.len() < 1000, "{}: {message}", what());
            self.refused += 1;
        }
        self.cases += 1;
    }

    fn report(&self, name: &str) {
        eprintln!("{name}: {} cases, {} refused, {:?}", self.cases, self.refused, self.started.elapsed());
    }
}

#[test]
fn every_cut_is_refused() {
    let mut arena = Arena::new();
    let bytes = base(&arena.file());
    let data = Gguf::open(arena.file()).unwrap().tensors().iter().map(|t| t.offset + t.len).max().unwrap() as usize;
    for len in 0..data {
        arena.check(&bytes[..len], || format!("cut to {len}"));
    }
    assert_eq!(arena.refused, data, "only the padding after the last tensor may be missing");
    arena.report("cuts");
}

#[test]
fn every_byte_and_every_number_of_the_header_may_be_anything() {
    let mut arena = Arena::new();
    let bytes = base(&arena.file());
    let header = Gguf::open(arena.file()).unwrap().files()[0].header_len as usize;
    for at in 0..header {
        for flip in [0x01, 0x04, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= flip;
            arena.check(&bytes, || format!("byte {at} ^ {flip:#x}"));
        }
        for number in NASTY {
            let mut bytes = bytes.clone();
            let end = (at + 8).min(header);
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            arena.check(&bytes, || format!("bytes {at}..{end} = {number:#x}"));
        }
    }
    assert!(arena.refused > arena.cases / 2, "most such files are broken: {} of {}", arena.refused, arena.cases);
    arena.report("single mutations");
}

#[test]
fn random_mutations_pile_up() {
    let mut arena = Arena::new();
    let original = base(&arena.file());
    let mut state = 0x5eed_u64;
    let mut below = move |n: usize| {
        // Splitmix64: any mix will do, as long as it is the same on every machine.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    };
    for case in 0..20_000 {
        let mut bytes = original.clone();
        for _ in 0..1 + below(4) {
            let at = below(bytes.len());
            let run = below(24).min(bytes.len() - at);
            match below(6) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..at + run)),
                2 => drop(bytes.splice(at..at, vec![below(256) as u8; run])),
                3 => {
                    let from = below(bytes.len() - run);
                    bytes.copy_within(from..from + run, at);
                }
                4 => bytes[at..at + run].fill(below(256) as u8),
                _ => {
                    let number = NASTY[below(NASTY.len())].to_le_bytes();
                    let end = (at + 8).min(bytes.len());
                    bytes[at..end].copy_from_slice(&number[..end - at]);
                }
            }
            if bytes.is_empty() {
                break;
            }
        }
        arena.check(&bytes, || format!("case {case}"));
    }
    arena.report("piled mutations");
}

/// A header of `keys` and `tensors` entries of the least size with distinct names, `pad` zeros behind it.
fn crowd(keys: u64, tensors: u64, pad: usize) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(keys.to_le_bytes());
    let name = |bytes: &mut Vec<u8>, i: u64| {
        let name = format!("{i:x}");
        bytes.extend((name.len() as u64).to_le_bytes());
        bytes.extend(name.as_bytes());
    };
    for i in 0..keys {
        name(&mut bytes, i);
        bytes.extend([0, 0, 0, 0, 1]);
    }
    for i in 0..tensors {
        name(&mut bytes, i);
        bytes.extend([0; 16]);
    }
    bytes.resize(bytes.len() + pad, 0);
    bytes
}

#[test]
fn crowds_of_entries_stay_within_bounds() {
    let mut arena = Arena::new();
    let most = gemma4c_models::gguf::MAX_ENTRIES;
    arena.check(&crowd(most, most, 64), || "as many entries as allowed".into());
    assert_eq!(arena.refused, 0);
    arena.check(&crowd(most + 1, 0, 64), || "a key too many".into());
    arena.check(&crowd(0, most + 1, 64), || "a tensor too many".into());
    assert_eq!(arena.refused, 2);

    // One array of 2^60 strings, and one that claims exactly what the file could hold if all were empty.
    for count in [1u64 << 60, (8 << 20) / 8] {
        let mut bytes = crowd(0, 0, 0);
        bytes[16] = 1;
        bytes.extend(1u64.to_le_bytes());
        bytes.extend([b'k', 9, 0, 0, 0, 8, 0, 0, 0]);
        bytes.extend(count.to_le_bytes());
        bytes.resize(bytes.len() + (8 << 20), 0);
        arena.check(&bytes, || format!("{count} strings"));
    }
    assert_eq!(arena.refused, 3);
    arena.report("crowds");
}
