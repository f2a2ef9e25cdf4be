//! The bytes of plan.bin.
//!
//! ```text
//! magic      8 bytes  "gemma4c\0"
//! version    u32      2
//! sections   u32
//! length     u64      of the whole file
//! checksum   u64      xxh3 of all that precedes and of the table
//! table      sections x { kind u32, zero u32, offset u64, length u64, xxh3 u64 }
//! bodies     postcard, back to back, in the order of the table
//! ```
//! All little-endian. Nothing in it depends on time, place or thread count: the same plan gives the same bytes. Reading
//! checks magic, version, length, table and checksums before any body is decoded, and [`crate::validate`] checks what the
//! bodies say, so that whoever holds a [`Plan`] need not check again.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::cuda::{Code, Cuda, CudaProgram};
use crate::{Plan, Weight, validate};

const MAGIC: &[u8; 8] = b"gemma4c\0";
/// The format this build reads and writes.
pub const VERSION: u32 = 2;
const HEADER: usize = 32;
const ENTRY: usize = 32;

/// The sections, in the order they are written. All are required.
const SECTIONS: [&str; 8] = ["model", "target", "weights", "program", "text", "report", "cuda", "code"];
/// The most bytes of each. A real plan's are far smaller; together with the bounds on lists they keep what a hostile file can
/// make a reader allocate below 64 MB and the machine code's own size.
const LARGEST: [u64; 8] = [1 << 20, 1 << 10, 1 << 21, 1 << 22, 1 << 24, 1 << 22, 1 << 22, 1 << 28];

/// The weights as they are decoded.
#[derive(Deserialize)]
struct Weights(#[serde(deserialize_with = "crate::list::at_most::<16384, _, _>")] Vec<Weight>);

/// The kernels' code as it is decoded.
#[derive(Deserialize)]
struct Codes(#[serde(deserialize_with = "crate::list::at_most::<4096, _, _>")] Vec<Code>);

/// Why a file is not a plan this build can run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("not a plan: the file starts with {found:?}, expected {:?}", String::from_utf8_lossy(MAGIC))]
    Magic { found: String },
    #[error("plan version {found}, this gemma4c reads version {VERSION}: compile the model again")]
    Version { found: u32 },
    #[error("the plan is cut: {what} needs {needed} bytes, the file has {found}")]
    Cut { what: &'static str, needed: u64, found: u64 },
    #[error("the plan is damaged: it says it has {expected} bytes, the file has {found}")]
    Length { expected: u64, found: u64 },
    #[error("the plan is damaged: the checksum of {what} is {found:016x}, expected {expected:016x}")]
    Checksum { what: &'static str, expected: u64, found: u64 },
    #[error("the plan is damaged: section table entry {index} is {found}, expected {expected}")]
    Table { index: usize, expected: String, found: String },
    #[error("the plan is damaged: section {section} does not decode: {why}")]
    Decode { section: &'static str, why: String },
    #[error("the plan contradicts itself: {0}")]
    Invalid(String),
}

impl Plan {
    /// The bytes of plan.bin, if reading them will give this plan back.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PlanError> {
        let bytes = self.encoded()?;
        // Whoever compiles should hear of a plan that cannot be run, not whoever runs it.
        Plan::from_bytes(&bytes)?;
        Ok(bytes)
    }

    fn encoded(&self) -> Result<Vec<u8>, PlanError> {
        let bodies: [Vec<u8>; 8] = [
            encode(0, &self.model)?,
            encode(1, &self.target)?,
            encode(2, &self.weights)?,
            encode(3, &self.program)?,
            encode(4, &(&self.vocab, &self.sampling))?,
            encode(5, &self.report)?,
            encode(6, &self.cuda.as_ref().map(|cuda| &cuda.program))?,
            encode(7, &self.cuda.as_ref().map_or(&[][..], |cuda| &cuda.code))?,
        ];
        let start = HEADER + SECTIONS.len() * ENTRY;
        let length = start + bodies.iter().map(Vec::len).sum::<usize>();
        let mut table = Vec::new();
        let mut offset = start as u64;
        for (kind, body) in bodies.iter().enumerate() {
            table.extend((kind as u32).to_le_bytes());
            table.extend(0u32.to_le_bytes());
            table.extend(offset.to_le_bytes());
            table.extend((body.len() as u64).to_le_bytes());
            table.extend(xxh3_64(body).to_le_bytes());
            offset += body.len() as u64;
        }
        let mut out = Vec::with_capacity(length);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((SECTIONS.len() as u32).to_le_bytes());
        out.extend((length as u64).to_le_bytes());
        let checksum = header_checksum(&out, &table);
        out.extend(checksum.to_le_bytes());
        out.extend(table);
        bodies.iter().for_each(|body| out.extend(body));
        Ok(out)
    }

    /// Reads a plan and checks all of it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Plan, PlanError> {
        let sections = read_table(bytes)?;
        let (vocab, sampling) = decode(4, sections[4])?;
        let Weights(weights) = decode(2, sections[2])?;
        let program: Option<CudaProgram> = decode(6, sections[6])?;
        let Codes(code) = decode(7, sections[7])?;
        if program.is_none() && !code.is_empty() {
            return Err(PlanError::Invalid(format!("{} kernels and no program for them", code.len())));
        }
        let plan = Plan {
            model: decode(0, sections[0])?,
            target: decode(1, sections[1])?,
            weights,
            program: decode(3, sections[3])?,
            cuda: program.map(|program| Cuda { program, code }),
            vocab,
            sampling,
            report: decode(5, sections[5])?,
        };
        validate::check(&plan).map_err(PlanError::Invalid)?;
        Ok(plan)
    }
}

fn header_checksum(header: &[u8], table: &[u8]) -> u64 {
    xxh3_64(&[&header[..HEADER - 8], table].concat())
}

fn read_table(bytes: &[u8]) -> Result<[&[u8]; 8], PlanError> {
    let magic = &bytes[..bytes.len().min(8)];
    if magic != MAGIC {
        return Err(PlanError::Magic { found: String::from_utf8_lossy(magic).into_owned() });
    }
    let need = |what, needed: usize| match bytes.len() < needed {
        true => Err(PlanError::Cut { what, needed: needed as u64, found: bytes.len() as u64 }),
        false => Ok(()),
    };
    need("the header", HEADER)?;
    let version = u32_at(bytes, 8);
    if version != VERSION {
        return Err(PlanError::Version { found: version });
    }
    need("the section table", HEADER + SECTIONS.len() * ENTRY)?;
    let length = u64_at(bytes, 16);
    if length > bytes.len() as u64 {
        return Err(PlanError::Cut { what: "the whole", needed: length, found: bytes.len() as u64 });
    }
    let table = &bytes[HEADER..HEADER + SECTIONS.len() * ENTRY];
    let (expected, found) = (u64_at(bytes, 24), header_checksum(bytes, table));
    if expected != found {
        return Err(PlanError::Checksum { what: "the header", expected, found });
    }
    let wrong = |index, expected: String, found: String| Err(PlanError::Table { index, expected, found });
    let (count, len) = (u32_at(bytes, 12) as usize, bytes.len() as u64);
    if length != len {
        return Err(PlanError::Length { expected: length, found: len });
    }
    if count != SECTIONS.len() {
        return wrong(0, format!("the first of {}", SECTIONS.len()), format!("the first of {count}"));
    }
    let mut sections = [&bytes[..0]; 8];
    let mut start = (HEADER + table.len()) as u64;
    for (i, entry) in table.chunks_exact(ENTRY).enumerate() {
        let (kind, offset, size, checksum) = (u32_at(entry, 0), u64_at(entry, 8), u64_at(entry, 16), u64_at(entry, 24));
        let end = start.checked_add(size).filter(|end| *end <= len && size <= LARGEST[i]);
        let (Some(end), true) = (end, kind == i as u32 && offset == start) else {
            let expected = format!("kind {i} at {start}, at most {} bytes", LARGEST[i].min(len - start));
            return wrong(i, expected, format!("kind {kind} at {offset}, {size} bytes"));
        };
        let body = &bytes[start as usize..end as usize];
        if xxh3_64(body) != checksum {
            return Err(PlanError::Checksum { what: SECTIONS[i], expected: checksum, found: xxh3_64(body) });
        }
        (sections[i], start) = (body, end);
    }
    match start == len {
        true => Ok(sections),
        false => Err(PlanError::Length { expected: start, found: len }),
    }
}

fn encode<T: Serialize>(section: usize, value: &T) -> Result<Vec<u8>, PlanError> {
    postcard::to_allocvec(value)
        .map_err(|e| PlanError::Decode { section: SECTIONS[section], why: e.to_string() })
        .and_then(|body| match body.len() as u64 <= LARGEST[section] {
            true => Ok(body),
            false => Err(PlanError::Invalid(format!("section {} is {} bytes", SECTIONS[section], body.len()))),
        })
}

fn decode<T: DeserializeOwned>(section: usize, body: &[u8]) -> Result<T, PlanError> {
    let fail = |why: String| PlanError::Decode { section: SECTIONS[section], why };
    let (value, rest) = postcard::take_from_bytes(body).map_err(|e| match e {
        // The decoder keeps no words of ours.
        postcard::Error::SerdeDeCustom => fail("a list is too long, or a choice does not exist".into()),
        other => fail(other.to_string()),
    })?;
    if rest.is_empty() { Ok(value) } else { Err(fail(format!("{} bytes are left over", rest.len()))) }
}

fn u32_at(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]])
}

fn u64_at(b: &[u8], i: usize) -> u64 {
    u32_at(b, i) as u64 | (u32_at(b, i + 4) as u64) << 32
}
