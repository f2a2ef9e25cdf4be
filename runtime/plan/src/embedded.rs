//! Weights in the plan's own file, behind everything else.
//!
//! They are gigabytes, so reading a plan does not read them and compares sizes only. Every [`CHUNK`] has a checksum in
//! the plan; a start looks at [`spread`] of them, which notices a download that stopped half way, and `gemma4c inspect
//! --check-weights` at all.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::cuda::{CudaProgram, LoadPart};
use crate::{Plan, Weight};

/// Bytes that have one checksum together.
pub const CHUNK: u64 = 4 << 20;
/// The weights start at a multiple of this, in the file.
pub const PAGE: u64 = 4096;
/// Every tensor starts at a multiple of this, among the weights.
const ALIGNMENT: u64 = 64;
/// Checksums that a start compares.
const SPREAD: u64 = 16;

/// What lies behind a plan: the last `bytes` of its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Embedded {
    pub form: EmbeddedForm,
    pub bytes: u64,
    pub sums: Sums,
}

/// Their layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EmbeddedForm {
    /// The tensors as they are in the model's files, in the order of the plan, whose offsets are among these: for a
    /// CPU.
    Tensors,
    /// The memory of a GPU, once loaded: its weights, but for copies that it makes itself, then the tables on the host.
    Regions,
}

/// xxh3 of each [`CHUNK`], the last one shorter. Written as plain bytes: a plan is as long whatever they are, so that
/// it can be written before they are known.
#[derive(Clone, PartialEq, Eq)]
pub struct Sums(pub Vec<u64>);

impl Embedded {
    /// Makes a plan one that has its weights with it, with checksums to be filled in. `None` where no file could hold
    /// them.
    pub fn prepare(plan: &mut Plan) -> Option<()> {
        if plan.cuda.is_none() {
            let (offsets, _) = tensors(&plan.weights)?;
            let stored = plan.weights.iter_mut().zip(offsets).filter(|(weight, _)| !weight.is_reserved());
            for (weight, offset) in stored {
                (weight.offset, weight.pieces) = (offset, Vec::new());
            }
        }
        let (form, bytes) = size(plan)?;
        let sums = Sums(vec![0; usize::try_from(bytes.div_ceil(CHUNK)).ok()?]);
        plan.embedded = Some(Embedded { form, bytes, sums });
        Some(())
    }

    /// Whether the offsets of the plan's weights are among these, and not in the model's files.
    pub fn has_tensors(&self) -> bool {
        self.form == EmbeddedForm::Tensors
    }

    /// Where they start in the file of a plan whose own bytes are `plan_bytes`.
    pub const fn start(plan_bytes: u64) -> u64 {
        plan_bytes.next_multiple_of(PAGE)
    }

    /// Chunks that a start looks at: the first, the last, and some between.
    pub fn spread(&self) -> impl Iterator<Item = usize> + use<> {
        let last = (self.sums.0.len() as u64).saturating_sub(1);
        let chosen = (0..SPREAD).map(move |i| (last * i / (SPREAD - 1)) as usize);
        let mut before = None;
        let first_time = move |at: &usize| before.replace(*at) != Some(*at);
        chosen.filter(first_time).take(self.sums.0.len())
    }

    /// The bytes of a chunk, among the weights.
    pub fn chunk(&self, at: usize) -> std::ops::Range<u64> {
        let start = at as u64 * CHUNK;
        start..(start + CHUNK).min(self.bytes)
    }

    /// Whether these are the bytes of a chunk.
    pub fn is_chunk(&self, at: usize, bytes: &[u8]) -> bool {
        self.sums.0.get(at) == Some(&xxh3_64(bytes))
    }

    /// What must hold of them in that plan.
    pub(crate) fn check(&self, plan: &Plan) -> Result<(), String> {
        same_layout(plan)?;
        let (form, bytes) = size(plan).ok_or("embedded weights larger than any file")?;
        let chunks = bytes.div_ceil(CHUNK);
        if (self.form, self.bytes, self.sums.0.len() as u64) != (form, bytes, chunks) {
            let (own, found) = (self.sums.0.len(), self.bytes);
            let is = format!("{found} bytes of embedded weights as {:?} in {own} chunks", self.form);
            return Err(format!("{is}, expected {bytes} as {form:?} in {chunks}"));
        }
        let starts =
            if self.has_tensors() { tensors(&plan.weights).map_or(vec![], |(starts, _)| starts) } else { vec![] };
        match std::iter::zip(&plan.weights, starts).find(|(weight, start)| weight.offset != *start) {
            Some((weight, start)) => {
                Err(format!("{} lies at {} of the embedded weights, expected {start}", weight.name, weight.offset))
            }
            None => Ok(()),
        }
    }
}

/// The form in which a plan's weights are embedded, and their bytes; `None` on overflow.
fn size(plan: &Plan) -> Option<(EmbeddedForm, u64)> {
    match &plan.cuda {
        Some(cuda) => Some((EmbeddedForm::Regions, regions_end(&cuda.program)?)),
        None => Some((EmbeddedForm::Tensors, tensors(&plan.weights)?.1)),
    }
}

/// Whether all of a plan's programs read the same weights from the same places, so that one image serves all of them;
/// else which two differ, and in what.
pub fn same_layout(plan: &Plan) -> Result<(), String> {
    let Some(first) = &plan.cuda else { return Ok(()) };
    let one = &first.program;
    for other in plan.others.iter().map(|cuda| &cuda.program) {
        let differ =
            |what: &str| Err(format!("the programs for {} and {} lay {what} out differently", one.gpu, other.gpu));
        let mut loads = one.loads.iter().zip(&other.loads);
        if let Some((a, b)) = loads.find(|(a, b)| {
            a.weight != b.weight
                || a.parts.len() != b.parts.len()
                || !std::iter::zip(&a.parts, &b.parts).all(|(x, y)| same_part(one, x, other, y))
        }) {
            let weight = plan.weights.get(a.weight.min(b.weight).index());
            return differ(weight.map_or("a tensor", |weight| &weight.name));
        }
        if one.loads.len() != other.loads.len() || one.constants != other.constants {
            return differ("tensors and tables");
        }
        if one.memory.host != other.memory.host {
            return differ("the host's tables");
        }
    }
    Ok(())
}

/// Kernels are counted by each program for itself, so they are compared by what they are.
fn same_part(one: &CudaProgram, a: &LoadPart, other: &CudaProgram, b: &LoadPart) -> bool {
    let instance =
        |program: &CudaProgram, kernel: u32| program.kernels.get(kernel as usize).map(|k| k.instance.clone());
    match (*a, *b) {
        (
            LoadPart::Kernel { kernel: x, .. },
            LoadPart::Kernel { kernel: y, order, to, row_count, row_bytes, per_block },
        ) => {
            let renamed = LoadPart::Kernel { kernel: x, order, to, row_count, row_bytes, per_block };
            *a == renamed && instance(one, x) == instance(other, y)
        }
        (a, b) => a == b,
    }
}

/// Where every tensor lies among the weights, and where they end; `None` on overflow. What is reserved is not there.
fn tensors(weights: &[Weight]) -> Option<(Vec<u64>, u64)> {
    let mut end = 0u64;
    let mut starts = Vec::with_capacity(weights.len());
    for weight in weights {
        if weight.is_reserved() {
            starts.push(0);
            continue;
        }
        let start = end.checked_next_multiple_of(ALIGNMENT)?;
        end = start.checked_add(weight.bytes)?;
        starts.push(start);
    }
    Some((starts, end))
}

/// Where the tables on the host start among the weights; those on the device, as far as they are loaded, start at 0.
pub fn host_start(program: &CudaProgram) -> Option<u64> {
    program.loaded_bytes().checked_next_multiple_of(PAGE)
}

fn regions_end(program: &CudaProgram) -> Option<u64> {
    match program.memory.host {
        0 => Some(program.loaded_bytes()),
        host => host_start(program)?.checked_add(host),
    }
}

/// Takes the weights' bytes in order and makes their checksums.
#[derive(Default)]
pub struct Summing {
    done: Vec<u64>,
    chunk: Xxh3Default,
    taken: u64,
}

impl Summing {
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (CHUNK - self.taken).min(bytes.len() as u64);
            let (these, rest) = bytes.split_at(room as usize);
            self.chunk.update(these);
            self.taken += room;
            bytes = rest;
            if self.taken == CHUNK {
                self.end_chunk();
            }
        }
    }

    pub fn finish(mut self) -> Sums {
        if self.taken > 0 {
            self.end_chunk();
        }
        Sums(self.done)
    }

    fn end_chunk(&mut self) {
        self.done.push(self.chunk.digest());
        self.chunk.reset();
        self.taken = 0;
    }
}

impl Serialize for Sums {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        serializer.serialize_bytes(&bytes)
    }
}

impl<'de> Deserialize<'de> for Sums {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sums, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Sums;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("checksums")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Sums, E> {
                let (sums, rest) = bytes.as_chunks::<8>();
                match rest.is_empty() {
                    true => Ok(Sums(sums.iter().map(|sum| u64::from_le_bytes(*sum)).collect())),
                    false => Err(E::custom("half a checksum")),
                }
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

impl std::fmt::Debug for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} checksums", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_do_not_depend_on_how_the_bytes_came() {
        let bytes: Vec<u8> = (0..2 * CHUNK + 100).map(|i| (i * 7 % 251) as u8).collect();
        let by = |piece: usize| {
            let mut summing = Summing::default();
            bytes.chunks(piece).for_each(|piece| summing.update(piece));
            summing.finish()
        };
        let whole = by(bytes.len());
        assert_eq!(whole.0.len(), 3);
        assert!([1 << 20, (1 << 22) - 1, 1_000_003].into_iter().all(|piece| by(piece) == whole));
        let embedded = Embedded { form: EmbeddedForm::Tensors, bytes: bytes.len() as u64, sums: whole };
        for at in 0..3 {
            let range = embedded.chunk(at);
            let mut chunk = bytes[range.start as usize..range.end as usize].to_vec();
            assert!(embedded.is_chunk(at, &chunk) && !embedded.is_chunk(at + 1, &chunk));
            chunk[50] ^= 1;
            assert!(!embedded.is_chunk(at, &chunk));
        }
    }

    #[test]
    fn a_start_looks_at_chunks_from_first_to_last_and_at_none_twice() {
        let spread = |chunks: usize| {
            let sums = Sums(vec![0; chunks]);
            Embedded { form: EmbeddedForm::Tensors, bytes: 0, sums }.spread().collect::<Vec<_>>()
        };
        assert_eq!((spread(0), spread(1), spread(3)), (vec![], vec![0], vec![0, 1, 2]));
        let many = spread(4000);
        assert_eq!((many.len(), many[0], many[15]), (16, 0, 3999));
        assert!(many.windows(2).all(|two| two[0] < two[1]));
    }
}
