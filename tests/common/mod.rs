//! What the whole-program tests share: a folder to run the real binary in, its results as numbers, the golden files,
//! and one way to take a snapshot.

#![allow(dead_code, unused_macros, reason = "every test binary takes in all of this and uses its part")]

pub mod adapter;
pub mod cuda_plan;
pub mod gguf;
pub mod golden;
pub mod lowered;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

/// Compares a text with `snapshots/AREA/NAME.snap`.
macro_rules! assert_text {
    ($area:literal, $name:expr, $text:expr) => {
        insta::with_settings!({
            snapshot_path => concat!(env!("CARGO_MANIFEST_DIR"), "/snapshots/", $area),
            prepend_module_to_snapshot => false,
        }, { insta::assert_snapshot!($name, $text) })
    };
}

/// How a command ended.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A folder of its own in which commands run, so that what they read and write has bare names in every message.
pub struct Place {
    folder: TempDir,
}

impl Place {
    pub fn new() -> Place {
        Place { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The binary with these arguments, in this folder. In `line` words are separated by spaces; '…' holds one
    /// together.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemma4c"));
        command.args(words(line)).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env("COLUMNS", "100").env("TERM", "dumb").env_remove("RAYON_NUM_THREADS");
        command
    }

    pub fn run(&self, line: &str) -> Ran {
        finish(&mut self.command(line))
    }

    /// Runs what must work and returns what it printed.
    pub fn ok(&self, line: &str) -> String {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(0), "gemma4c {line}\n{}{}", ran.stdout, ran.stderr);
        ran.stdout
    }

    /// Runs what must be refused the way everything is: code 2, one message on stderr, nothing on stdout. Returns the
    /// message.
    pub fn refused(&self, line: &str) -> String {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(2), "gemma4c {line}\n{}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.stdout, "", "gemma4c {line}");
        assert_eq!(ran.stderr.matches("error: ").count(), 1, "gemma4c {line}\n{}", ran.stderr);
        assert!(ran.stderr.starts_with("error: "), "gemma4c {line}\n{}", ran.stderr);
        ran.stderr
    }

    /// Computes logits (`line` is all but the plan's and the result's names) and returns the result's tensors.
    pub fn logits(&self, plan: &str, line: &str) -> Tensors {
        self.ok(&format!("logits {plan} -o logits.safetensors {line}"));
        Tensors::read(&self.path("logits.safetensors"))
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).expect("the folder can be written");
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }
}

pub fn finish(command: &mut Command) -> Ran {
    let output = command.output().expect("the binary starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is text");
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn words(line: &str) -> Vec<String> {
    let mut words = vec![];
    for (i, part) in line.split('\'').enumerate() {
        match i % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_string)),
            _ => words.push(part.to_string()),
        }
    }
    words
}

/// Ids as the command line takes them.
pub fn ids(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// A prompt of random tokens below `vocab`, the same on every machine.
pub fn random_tokens(seed: u64, count: usize, vocab: u32) -> Vec<u32> {
    let mut random = Random(seed);
    (0..count).map(|_| random.below(vocab as u64) as u32).collect()
}

/// Splitmix64: any mix will do, as long as it is the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n.max(1)
    }
}

/// The tensors of a safetensors file: f32 as they are, integers as the floats they equal.
#[derive(PartialEq)]
pub struct Tensors(BTreeMap<String, Tensor>);

#[derive(Clone)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Equal to the bit.
impl PartialEq for Tensor {
    fn eq(&self, other: &Tensor) -> bool {
        let bits = |tensor: &Tensor| tensor.values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        self.shape == other.shape && bits(self) == bits(other)
    }
}

impl Tensors {
    pub fn read(path: &Path) -> Tensors {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let tensor = |view: safetensors::tensor::TensorView<'_>| {
            let words = view.data().as_chunks::<4>().0.iter();
            let values = match view.dtype() {
                Dtype::F32 => words.map(|w| f32::from_le_bytes(*w)).collect(),
                Dtype::I16 => {
                    view.data().as_chunks::<2>().0.iter().map(|w| f32::from(i16::from_le_bytes(*w))).collect()
                }
                Dtype::U8 => view.data().iter().map(|byte| f32::from(*byte)).collect(),
                Dtype::I32 => words.map(|w| i32::from_le_bytes(*w) as f32).collect(),
                other => panic!("{}: a tensor of {other:?}", path.display()),
            };
            Tensor { shape: view.shape().to_vec(), values }
        };
        Tensors(file.iter().map(|(name, view)| (name.to_string(), tensor(view))).collect())
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.find(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.get(name).values.iter().map(|v| *v as u32).collect()
    }
}

impl Tensor {
    pub fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    pub fn rows(&self, range: std::ops::Range<usize>) -> &[f32] {
        &self.values[range.start * self.width()..range.end * self.width()]
    }

    pub fn row(&self, row: usize) -> &[f32] {
        self.rows(row..row + 1)
    }
}

/// Hashes and sizes follow from kernels and weights; the words around them are what is reviewed.
pub fn without_numbers(text: &str) -> String {
    let mut out = String::new();
    for word in text.split_inclusive(|c: char| !c.is_alphanumeric()) {
        let end = word.trim_end_matches(|c: char| !c.is_alphanumeric()).len();
        out += match &word[..end] {
            hash if hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()) => "HASH",
            size if size.len() > 4 && size.bytes().all(|b| b.is_ascii_digit()) => "BYTES",
            other => other,
        };
        out += &word[end..];
    }
    out
}
