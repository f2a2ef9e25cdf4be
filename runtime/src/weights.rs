//! The weights under a plan: in the model's files, found, mapped and checked to be the ones the plan was compiled from;
//! or in the plan's own file, behind it. Tensors that the files store otherwise than the plan wants them are made of
//! their bytes, row by row, while they are loaded.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use gemma4c_blocks::finite::first_not_finite;
use gemma4c_blocks::recipe::Fault;
use gemma4c_plan::fingerprint::{FileBytes, fingerprint};
use gemma4c_plan::{ModelFile, Piece, Plan, Weight, WeightId};
use memmap2::Mmap;
use rayon::prelude::*;

use crate::embedded::EmbeddedWeights;
use crate::error::RuntimeError;
use crate::map::{ModelLocation, map_file};

impl ModelLocation {
    /// Where the plan's model lies, and it is the one the plan was compiled from: its first file, from which the others
    /// are found.
    pub fn file(&self, plan: &Plan) -> Result<PathBuf, RuntimeError> {
        let first = self.files(plan)?.into_iter().next();
        first.ok_or(RuntimeError::ModelMissing { name: String::new(), looked: Vec::new() })
    }

    /// Every path at which a run may find a file of the plan's models, there or not.
    pub fn candidates(&self, plan: &Plan) -> Vec<PathBuf> {
        (0..plan.model.files.len()).flat_map(|index| places(plan, index, self)).collect()
    }

    /// All files of the plan's models, in the plan's order.
    pub fn files(&self, plan: &Plan) -> Result<Vec<PathBuf>, RuntimeError> {
        Ok(Weights::in_model(plan, self)?.files.into_iter().map(|(path, _)| path).collect())
    }
}

/// The mapped files that a plan's tensors are in.
pub(crate) struct Weights {
    maps: Vec<Mmap>,
    files: Vec<(PathBuf, File)>,
    /// Where offsets count from, in a plan's own file.
    inside: Option<u64>,
    /// By the weight's index: tensors that were made in memory. Empty until [`Weights::make`], and for all others.
    made: Vec<Vec<u8>>,
}

impl Weights {
    /// The tensors, wherever they are.
    pub fn open(plan: &Plan, location: &ModelLocation) -> Result<Weights, RuntimeError> {
        match &plan.embedded {
            Some(embedded) if embedded.has_tensors() => {
                let EmbeddedWeights { path, file, map, start, .. } = EmbeddedWeights::open(embedded, location)?;
                Ok(Weights { maps: vec![map], files: vec![(path, file)], inside: Some(start), made: Vec::new() })
            }
            _ => Weights::in_model(plan, location),
        }
    }

    /// The tensors in the model's files.
    fn in_model(plan: &Plan, location: &ModelLocation) -> Result<Weights, RuntimeError> {
        let mut opened = Vec::new();
        let mut maps = Vec::new();
        for (index, file) in plan.model.files.iter().enumerate() {
            let path = find(plan, index, location).map_err(|error| match error {
                RuntimeError::ModelMissing { name, looked } if plan.embedded.is_some() => {
                    RuntimeError::RepackedAlone { name, looked }
                }
                other => other,
            })?;
            let (bytes, handle) = map(&path, file)?;
            maps.push(bytes);
            opened.push((path, handle));
        }
        let files: Vec<FileBytes<'_>> = std::iter::zip(&maps, &plan.model.files)
            .map(|(bytes, file)| FileBytes { bytes, header_len: file.header_bytes })
            .collect();
        let spans = plan.weights.iter().flat_map(Weight::spans);
        let tensors = spans.map(|span| (span.file as usize, span.offset, span.bytes));
        // `None` is a plan whose header length lies beyond its file: no model has that fingerprint.
        let (expected, found) =
            (plan.model.fingerprint, fingerprint(&files, tensors).unwrap_or(!plan.model.fingerprint));
        match opened.first() {
            Some((path, _)) if expected != found => {
                Err(RuntimeError::ModelChanged { path: path.clone(), expected, found })
            }
            _ => Ok(Weights { maps, files: opened, inside: None, made: Vec::new() }),
        }
    }

    /// The file that a weight is in, and where.
    fn place(&self, weight: &Weight) -> (usize, u64) {
        match self.inside {
            Some(start) => (0, start + weight.offset),
            None => (weight.file as usize, weight.offset),
        }
    }

    /// Makes in memory, on all cores, what the files do not have as it is: for a CPU, which reads weights where they
    /// are.
    pub fn make(&mut self, plan: &Plan) -> Result<(), RuntimeError> {
        self.made = vec![Vec::new(); plan.weights.len()];
        for (index, weight) in plan.weights.iter().enumerate().filter(|(_, weight)| is_made(weight)) {
            let mut bytes = vec![0; weight.bytes as usize];
            self.read(weight, 0, &mut bytes)?;
            self.made[index] = bytes;
        }
        Ok(())
    }

    /// Bytes of memory that [`Weights::make`] takes.
    pub fn bytes_to_make(plan: &Plan) -> u64 {
        plan.weights.iter().filter(|weight| is_made(weight)).map(|weight| weight.bytes).sum()
    }

    /// The bytes of a weight of the plan these files were opened for. One that the files do not have as it is must have
    /// been made.
    pub fn bytes(&self, plan: &Plan, id: WeightId) -> &[u8] {
        let weight = &plan.weights[id.index()];
        if !weight.pieces.is_empty() {
            return &self.made[id.index()];
        }
        let (file, offset) = self.place(weight);
        // In range: the plan was checked against the files' lengths, and the files have these lengths.
        &self.maps[file][offset as usize..][..weight.bytes as usize]
    }

    /// Reads whole blocks of a weight from its byte `from` on, on all cores and past the map: each byte is wanted once,
    /// so mapping its page would only cost time, and a file that was cut meanwhile is an error and not the end of the
    /// process. Of a weight that is made of pieces, whole rows.
    pub fn read(&self, weight: &Weight, from: u64, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        if !weight.pieces.is_empty() {
            return self.make_rows(weight, from, bytes);
        }
        let (file, offset) = self.place(weight);
        let (path, file) = &self.files[file];
        let some = at_a_time(weight);
        bytes.par_chunks_mut(some).enumerate().try_for_each(|(index, bytes)| {
            let from = from + (index * some) as u64;
            let failed = |source| RuntimeError::Io { path: path.clone(), source };
            file.read_exact_at(bytes, offset + from).map_err(failed)?;
            check_numbers(weight, from, bytes)
        })
    }

    fn make_rows(&self, weight: &Weight, from: u64, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        let row_bytes = weight.dtype.row_bytes(weight.dim(0)).unwrap_or(1).max(1);
        let first = from / row_bytes;
        let end = first + bytes.len() as u64 / row_bytes;
        let mut parts = Vec::new();
        let (mut rest, mut piece_start) = (bytes, 0);
        for piece in &weight.pieces {
            let piece_end = piece_start + piece.rows;
            let wanted = first.max(piece_start)..piece_end.min(end);
            piece_start = piece_end;
            if wanted.is_empty() {
                continue;
            }
            let start = piece_end - piece.rows;
            let (own, after) = rest.split_at_mut(((wanted.end - wanted.start) * row_bytes) as usize);
            rest = after;
            let some = (AT_A_TIME as u64 / row_bytes).max(1) * row_bytes;
            let cut = own.chunks_mut(some as usize).enumerate();
            parts.extend(cut.map(|(at, out)| (piece, start, wanted.start + at as u64 * (some / row_bytes), out)));
        }
        parts.into_par_iter().try_for_each_init(Vec::new, |buffer, (piece, start, row, out)| {
            self.make_some(weight, piece, row - start, out, buffer).map_err(|error| error.of_rows(weight, row))?;
            check_numbers(weight, row * row_bytes, out)
        })
    }

    /// Makes rows of a piece from its row `first` on; `buffer` is working memory.
    fn make_some(
        &self,
        weight: &Weight,
        piece: &Piece,
        first: u64,
        out: &mut [u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(), Unmade> {
        let columns = weight.dim(0);
        let rows = weight.dtype.row_bytes(columns).map_or(0, |bytes| out.len() as u64 / bytes.max(1));
        let shapes = piece.recipe.inputs(weight.dtype, columns).unwrap_or_default();
        let places: Option<Vec<(u64, u64)>> = shapes.iter().map(|shape| shape.of_rows(first, rows)).collect();
        let places = places.ok_or(Unmade::Fault(Fault::Misfit))?;
        buffer.resize(places.iter().map(|(_, bytes)| *bytes as usize).sum(), 0);
        let (mut inputs, mut rest) = (Vec::new(), buffer.as_mut_slice());
        for ((start, bytes), span) in places.into_iter().zip(&piece.inputs) {
            let (input, after) = rest.split_at_mut(bytes as usize);
            let (path, file) = &self.files[span.file as usize];
            let failed = |source| Unmade::Read(RuntimeError::Io { path: path.clone(), source });
            file.read_exact_at(input, span.offset + start).map_err(failed)?;
            inputs.push(&*input);
            rest = after;
        }
        piece.recipe.make(weight.dtype, columns as usize, first, &inputs, out).map_err(Unmade::Fault)
    }

    /// Reads all weights through the map, on all cores: each of their values is a number. Those that are made of pieces
    /// were checked as they were made.
    pub fn check(&self, plan: &Plan) -> Result<(), RuntimeError> {
        let weights = plan.weights.par_iter().enumerate().filter(|(_, weight)| weight.pieces.is_empty());
        weights.try_for_each(|(index, weight)| {
            let bytes = self.bytes(plan, WeightId(index as u32));
            let parts = bytes.par_chunks(at_a_time(weight)).enumerate();
            parts.try_for_each(|(index, bytes)| check_numbers(weight, (index * at_a_time(weight)) as u64, bytes))
        })
    }
}

/// Whether loading makes its rows. What is reserved for adapters is not loaded.
fn is_made(weight: &Weight) -> bool {
    !weight.pieces.is_empty() && !weight.is_reserved()
}

/// Why rows could not be made.
enum Unmade {
    Read(RuntimeError),
    Fault(Fault),
}

impl Unmade {
    /// The same of rows of a weight from `first` on, in words.
    fn of_rows(self, weight: &Weight, first: u64) -> RuntimeError {
        let tensor = weight.name.clone();
        match self {
            Unmade::Read(error) => error,
            Unmade::Fault(Fault::Misfit) => RuntimeError::Unmade { tensor },
            Unmade::Fault(Fault::BadScale(bad)) => {
                let row = first + bad.row as u64;
                let expert = (weight.dims.len() == 3).then(|| row / weight.dim(1));
                let of = expert.map_or(String::new(), |expert| format!(" of expert {expert}"));
                RuntimeError::BadScale { tensor, of, row, column: bad.column, scale: bad.scale }
            }
        }
    }
}

/// Bytes that one core reads at a time, about.
const AT_A_TIME: usize = 1 << 20;

/// Bytes of a weight that one core reads at a time: whole blocks.
fn at_a_time(weight: &Weight) -> usize {
    let block = weight.dtype.layout().bytes;
    AT_A_TIME / block * block
}

/// Blocks of a weight from its byte `from` on hold numbers: one that is none would make an answer of nothing but NaN.
fn check_numbers(weight: &Weight, from: u64, blocks: &[u8]) -> Result<(), RuntimeError> {
    let layout = weight.dtype.layout();
    match first_not_finite(weight.dtype, blocks) {
        None => Ok(()),
        Some(at) => {
            let value = from / layout.bytes as u64 * layout.len as u64 + at as u64;
            Err(RuntimeError::NoNumber { tensor: weight.name.clone(), value })
        }
    }
}

/// Where a plan's file of this number is.
fn find(plan: &Plan, index: usize, location: &ModelLocation) -> Result<PathBuf, RuntimeError> {
    let (file, looked) = (&plan.model.files[index], places(plan, index, location));
    match looked.iter().find(|p| p.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(RuntimeError::ModelMissing { name: name(file).to_string_lossy().into_owned(), looked }),
    }
}

fn name(file: &ModelFile) -> &OsStr {
    Path::new(&file.path).file_name().unwrap_or(file.path.as_ref())
}

/// Where a file of a plan's model may be, the likeliest place first.
fn places(plan: &Plan, index: usize, location: &ModelLocation) -> Vec<PathBuf> {
    let file = &plan.model.files[index];
    let name = name(file);
    let said = [location.folder().join(&file.path), location.folder().join(name)];
    let beside = |given: &Path| if given.is_dir() { given.join(name) } else { given.with_file_name(name) };
    let is_adapter = plan.model.adapters.iter().any(|adapter| adapter.file as usize == index);
    let only_one = plan.model.files.len() == plan.model.adapters.len() + 1;
    let mut places = match &location.given {
        // Adapters of several folders have one name. They stay where they were when the model is given elsewhere.
        Some(given) if is_adapter => said.into_iter().chain([beside(given)]).collect(),
        Some(given) if only_one && !given.is_dir() => vec![given.clone()],
        // Of a split model one part was named; the others are beside it.
        Some(given) => vec![beside(given)],
        None => said.to_vec(),
    };
    places.dedup();
    places
}

fn map(path: &Path, expected: &ModelFile) -> Result<(Mmap, File), RuntimeError> {
    let (map, file) = map_file(path)?;
    match map.len() as u64 {
        found if found == expected.bytes => Ok((map, file)),
        found => Err(RuntimeError::ModelSize { path: path.into(), expected: expected.bytes, found }),
    }
}
