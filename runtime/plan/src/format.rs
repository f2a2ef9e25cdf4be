//! The bytes of plan.bin.
//!
//! ```text
//! magic      8 bytes  "gemma4c\0"
//! version    u32
//! sections   u32
//! length     u64      of all this, to the end of the last body
//! checksum   u64      xxh3 of all that precedes and of the table
//! table      sections x { kind u32, zero u32, offset u64, length u64, xxh3 u64 }
//! bodies     postcard, back to back, in the order of the table
//! weights    where the plan has its weights with it: zeros up to a whole page, then the weights, to the end of the file
//! ```
//! All little-endian. Nothing in it depends on time, place or thread count: the same plan gives the same bytes. Reading
//! checks magic, version, length, table and checksums before any body is decoded, and [`crate::validate`] checks what
//! the bodies say, so that whoever holds a [`Plan`] need not check again.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::cuda::{Code, Cuda, CudaProgram};
use crate::embedded::Embedded;
use crate::tower::{MOST_TOWERS, Tower};
use crate::{Plan, Weight, validate};

const MAGIC: &[u8; 8] = b"gemma4c\0";
/// The format this build reads and writes.
pub const VERSION: u32 = 16;
/// Bytes of the header.
pub const START: usize = 32;
const ENTRY: usize = 32;
const CHECKSUM_AT: usize = 24;
/// GPUs that a plan may have programs for.
const MOST_PROGRAMS: usize = 16;

/// The sections, in the order they are written. All are required.
const SECTIONS: [&str; 11] =
    ["model", "target", "weights", "program", "text", "report", "cuda", "code", "embedded", "towers", "drafter"];
/// The most bytes of each. A real plan's are far smaller; together with the bounds on lists they keep what a hostile
/// file can make a reader allocate below 64 MB and the machine code's own size.
const LARGEST: [u64; 11] =
    [1 << 20, 1 << 10, 1 << 21, 1 << 22, 1 << 24, 1 << 22, 1 << 22, 1 << 28, 1 << 20, 1 << 20, 1 << 20];

/// The weights as they are decoded.
#[derive(Deserialize)]
struct Weights(#[serde(deserialize_with = "crate::list::at_most::<16384, _, _>")] Vec<Weight>);

/// The towers as they are decoded.
#[derive(Deserialize)]
struct Towers(#[serde(deserialize_with = "crate::list::at_most::<MOST_TOWERS, _, _>")] Vec<Tower>);

/// The programs for GPUs as they are decoded.
#[derive(Deserialize)]
struct Programs(#[serde(deserialize_with = "crate::list::at_most::<MOST_PROGRAMS, _, _>")] Vec<CudaProgram>);

/// The code of one program's kernels as it is decoded.
#[derive(Deserialize)]
struct Codes(#[serde(deserialize_with = "crate::list::at_most::<4096, _, _>")] Vec<Code>);

/// The code of all programs.
#[derive(Deserialize)]
struct AllCode(#[serde(deserialize_with = "crate::list::at_most::<MOST_PROGRAMS, _, _>")] Vec<Codes>);

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
    /// The bytes of plan.bin up to its weights, if reading them will give this plan back.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PlanError> {
        let bytes = self.encoded()?;
        // Whoever compiles should hear of a plan that cannot be run, not whoever runs it.
        Plan::from_start(&bytes, self.file_bytes(bytes.len() as u64))?;
        Ok(bytes)
    }

    /// Bytes of the file of a plan whose own bytes are `own`.
    fn file_bytes(&self, own: u64) -> u64 {
        self.embedded.as_ref().map_or(own, |weights| Embedded::start(own).saturating_add(weights.bytes))
    }

    /// The checksum in its header, which covers every section: plans with the same one are the same, weights with them
    /// included.
    pub fn checksum(&self) -> Result<u64, PlanError> {
        Ok(u64_at(&self.encoded()?, CHECKSUM_AT))
    }

    fn encoded(&self) -> Result<Vec<u8>, PlanError> {
        let bodies: [Vec<u8>; SECTIONS.len()] = [
            encode(0, &self.model)?,
            encode(1, &self.target)?,
            encode(2, &self.weights)?,
            encode(3, &self.program)?,
            encode(4, &(&self.vocab, &self.sampling))?,
            encode(5, &self.report)?,
            encode(6, &self.programs().map(|cuda| &cuda.program).collect::<Vec<_>>())?,
            encode(7, &self.programs().map(|cuda| &cuda.code).collect::<Vec<_>>())?,
            encode(8, &self.embedded)?,
            encode(9, &self.towers)?,
            encode(10, &self.drafter)?,
        ];
        let start = START + SECTIONS.len() * ENTRY;
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

    /// Reads a plan and checks all of it but the weights behind it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Plan, PlanError> {
        let own = bytes.get(..START).map_or(Ok(u64::MAX), own_bytes)?.min(bytes.len() as u64);
        Plan::from_start(&bytes[..own as usize], bytes.len() as u64)
    }

    /// The same from [`own_bytes`] of a file, or all it has, and the file's length.
    pub fn from_start(bytes: &[u8], file_bytes: u64) -> Result<Plan, PlanError> {
        let sections = read_table(bytes)?;
        let (vocab, sampling) = decode(4, sections[4])?;
        let Weights(weights) = decode(2, sections[2])?;
        let Programs(programs) = decode(6, sections[6])?;
        let AllCode(code) = decode(7, sections[7])?;
        let Towers(towers) = decode(9, sections[9])?;
        if programs.len() != code.len() {
            return Err(PlanError::Invalid(format!(
                "{} programs for GPUs, and code for {}",
                programs.len(),
                code.len()
            )));
        }
        let mut programs = programs
            .into_iter()
            .zip(code)
            .map(|(program, Codes(code))| Cuda { program, code })
            .collect::<Vec<_>>()
            .into_iter();
        let plan = Plan {
            model: decode(0, sections[0])?,
            target: decode(1, sections[1])?,
            weights,
            program: decode(3, sections[3])?,
            cuda: programs.next(),
            others: programs.collect(),
            vocab,
            sampling,
            report: decode(5, sections[5])?,
            embedded: decode(8, sections[8])?,
            towers,
            drafter: decode(10, sections[10])?,
        };
        validate::check(&plan).map_err(PlanError::Invalid)?;
        match plan.file_bytes(bytes.len() as u64) {
            expected if expected == file_bytes => Ok(plan),
            needed if needed > file_bytes => {
                Err(PlanError::Cut { what: "the whole with its weights", needed, found: file_bytes })
            }
            expected => Err(PlanError::Length { expected, found: file_bytes }),
        }
    }
}

/// How many bytes of a file its plan takes, weights not counted, by the first [`START`] of them.
pub fn own_bytes(start: &[u8]) -> Result<u64, PlanError> {
    let magic = &start[..start.len().min(8)];
    if magic != MAGIC {
        return Err(PlanError::Magic { found: String::from_utf8_lossy(magic).into_owned() });
    }
    if start.len() < START {
        return Err(PlanError::Cut { what: "the header", needed: START as u64, found: start.len() as u64 });
    }
    match u32_at(start, 8) {
        VERSION => Ok(u64_at(start, 16)),
        found => Err(PlanError::Version { found }),
    }
}

fn header_checksum(header: &[u8], table: &[u8]) -> u64 {
    xxh3_64(&[&header[..START - 8], table].concat())
}

fn read_table(bytes: &[u8]) -> Result<[&[u8]; SECTIONS.len()], PlanError> {
    let length = own_bytes(bytes)?;
    let cut = |what, needed: u64| Err(PlanError::Cut { what, needed, found: bytes.len() as u64 });
    let table_end = START + SECTIONS.len() * ENTRY;
    if bytes.len() < table_end {
        return cut("the section table", table_end as u64);
    }
    if length > bytes.len() as u64 {
        return cut("the whole", length);
    }
    let table = &bytes[START..table_end];
    let (expected, found) = (u64_at(bytes, CHECKSUM_AT), header_checksum(bytes, table));
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
    let mut sections = [&bytes[..0]; SECTIONS.len()];
    let mut start = (START + table.len()) as u64;
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
