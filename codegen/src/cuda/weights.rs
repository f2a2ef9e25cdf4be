//! Where every weight is on the device, in which layout, and how it gets there.
//!
//! A weight is placed when the first launch asks for it, in the form that launch reads: planes for the matrix-vector
//! products, bf16 rows for prefill's, blocks as they are in the file for gathers and exact products, floats for norms.
//! Matrices that a product stacks are placed one after the other; whoever wants one of them alone finds it there.

use gemma4c_blocks::DType;
use gemma4c_dsl::Filled;
use gemma4c_graph::{Weight, WeightId};
use gemma4c_plan::cuda::{Constant, Launch, Load, LoadArgument, LoadPart, Range, Region};

use super::error::LowerError;
use super::launch::{Kernels, Span, bind_fixed};
use crate::kernels::matvec::formats::side_arguments;
use crate::kernels::plain::product;
use crate::kernels::planes::{WeightPlane, planes};
use crate::kernels::product::widen;
use crate::kernels::repack::{self, repacks};
use crate::kernels::tower::sound::waves;
use crate::kernels::values::value_arguments;

/// Every range starts at a multiple of this.
const ALIGNMENT: u64 = 256;

/// A matrix, or several stacked on each other, as planes.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub dtype: DType,
    pub k: u32,
    pub rows: u64,
    planes: Vec<(WeightPlane, Range)>,
}

impl Matrix {
    /// The range of a plane.
    pub fn plane(&self, name: &str) -> Span {
        self.planes.iter().find(|(plane, _)| plane.name == name).map_or(Span::Unused, |(_, range)| Span::Fixed(*range))
    }

    /// Bytes of all planes.
    pub fn bytes(&self) -> u64 {
        self.planes.iter().map(|(_, range)| range.bytes).sum()
    }

    /// What every kernel that reads it takes by itself.
    pub fn codes(&self) -> Span {
        self.plane("codes")
    }

    /// What a kernel's slot `side` takes: all other planes.
    pub fn side(&self) -> Filled<Span> {
        side_arguments(self.dtype, |name| self.plane(name))
    }
}

/// A stack of matrices in one form.
#[derive(Debug)]
struct Placed {
    weights: Vec<WeightId>,
    /// The first row of each.
    first_rows: Vec<u64>,
    matrix: Matrix,
}

/// The weights of a plan.
pub struct Weights<'a> {
    /// All that the plan's graphs read, in the plan's order.
    table: &'a [Weight],
    /// Bytes placed so far, on the device and in the host's pinned memory.
    pub device_bytes: u64,
    pub host_bytes: u64,
    /// What is reserved for adapters: where each is, and the bytes of all.
    banks: Vec<(WeightId, Range)>,
    pub seat_bytes: u64,
    /// Tables that do not fit the budget.
    on_host: Vec<WeightId>,
    stacks: Vec<Placed>,
    rounded: Vec<Rounded>,
    verbatim: Vec<(WeightId, Range)>,
    distances: Vec<(WeightId, Range)>,
    parts: Vec<Vec<LoadPart>>,
    pub constants: Vec<Constant>,
    /// What is launched once, when everything is loaded.
    pub prepare: Vec<Launch>,
}

impl<'a> Weights<'a> {
    /// `reserved` are the weights for adapters, in the table's order: they lie one behind the other, so that neighbours are
    /// one matrix.
    pub fn new(table: &'a [Weight], on_host: Vec<WeightId>, reserved: &[WeightId]) -> Weights<'a> {
        let parts = vec![Vec::new(); table.len()];
        let mut seat_bytes = 0;
        let bank = |weight: &WeightId| {
            let bytes = table[weight.index()].bytes().unwrap_or(0);
            let range = Range { region: Region::Seats, offset: seat_bytes, bytes };
            seat_bytes += bytes;
            (*weight, range)
        };
        let banks = reserved.iter().map(bank).collect();
        Weights {
            table,
            device_bytes: 0,
            host_bytes: 0,
            banks,
            seat_bytes,
            on_host,
            stacks: Vec::new(),
            rounded: Vec::new(),
            verbatim: Vec::new(),
            distances: Vec::new(),
            parts,
            constants: Vec::new(),
            prepare: Vec::new(),
        }
    }

    /// The loads, in the order of the graph's weights.
    pub fn loads(&self) -> Vec<Load> {
        let with_parts = self.parts.iter().enumerate().filter(|(_, parts)| !parts.is_empty());
        let load = |(index, parts): (usize, &Vec<LoadPart>)| {
            let rows = self.rows(WeightId(index as u32));
            Load { weight: WeightId(index as u32), rows, parts: parts.clone() }
        };
        with_parts.map(load).collect()
    }

    fn rows(&self, weight: WeightId) -> u64 {
        self.table[weight.index()].dims.iter().skip(1).product()
    }

    fn reserve(&mut self, bytes: u64) -> Range {
        let offset = self.device_bytes;
        self.device_bytes = (offset + bytes).next_multiple_of(ALIGNMENT);
        Range { region: Region::Weights, offset, bytes }
    }

    /// A tensor's bytes as they are in the file.
    pub fn blocks(&mut self, weight: WeightId) -> Span {
        if let Some((_, range)) = self.verbatim.iter().find(|(known, _)| *known == weight) {
            return Span::Fixed(*range);
        }
        let bytes = self.table[weight.index()].bytes().unwrap_or(0);
        let range = if self.on_host.contains(&weight) {
            let offset = self.host_bytes;
            self.host_bytes = (offset + bytes).next_multiple_of(ALIGNMENT);
            Range { region: Region::Host, offset, bytes }
        } else {
            self.reserve(bytes)
        };
        self.verbatim.push((weight, range));
        self.parts[weight.index()].push(LoadPart::Copy { to: range });
        Span::Fixed(range)
    }

    /// What is reserved for the adapters of all seats in place of a matrix: rows of bf16, seat after seat. `None` where
    /// nothing is.
    pub fn bank(&self, weight: WeightId) -> Option<Span> {
        self.banks.iter().find(|(bank, _)| *bank == weight).map(|(_, range)| Span::Fixed(*range))
    }

    /// A tensor of floats: norms, scales, routers.
    pub fn floats(&mut self, weight: WeightId) -> Result<Span, LowerError> {
        let w = &self.table[weight.index()];
        if w.dtype != DType::F32 {
            return Err(LowerError::NotFloats { tensor: w.name.clone(), dtype: w.dtype });
        }
        Ok(self.blocks(weight))
    }

    /// A table the compiler has computed: the same values twice are one table.
    pub fn constant(&mut self, name: &str, values: Vec<f32>) -> Span {
        let same = |known: &&Constant| known.values.iter().map(|v| v.to_bits()).eq(values.iter().map(|v| v.to_bits()));
        if let Some(known) = self.constants.iter().find(same) {
            return Span::Fixed(known.to);
        }
        let to = self.reserve(values.len() as u64 * 4);
        self.constants.push(Constant { name: name.to_owned(), to, values });
        Span::Fixed(to)
    }

    /// Matrices of one type and width, stacked, as rows of bf16: made on the device from their planes.
    pub fn rounded(&mut self, weights: &[WeightId], kernels: &mut Kernels) -> Result<Span, LowerError> {
        let first = &self.table[weights[0].index()];
        let (dtype, k) = (first.dtype, first.dim(0));
        let matrix = self.matrix(weights, kernels)?;
        if dtype == DType::BF16 {
            // They are planes of themselves.
            return Ok(matrix.codes());
        }
        let rows: u64 = weights.iter().map(|w| self.rows(*w)).sum();
        for known in &self.rounded {
            if let Some(at) = known.weights.windows(weights.len()).position(|window| window == weights) {
                let before: u64 = known.weights[..at].iter().map(|w| self.rows(*w)).sum();
                let (offset, bytes) = (known.range.offset + before * k * 2, rows * k * 2);
                return Ok(Span::Fixed(Range { offset, bytes, ..known.range }));
            }
        }
        let units = widen::units(dtype, rows, k).ok_or_else(|| LowerError::NoKernel {
            tensor: first.name.clone(),
            dtype,
            shape: format!("{rows} x {k}"),
            phase: "loading".into(),
            why: "it has too many values to be copied by one launch".into(),
        })?;
        let range = self.reserve(rows * k * 2);
        let instance = widen::instance(dtype)?;
        let arguments = widen::widen::Arguments { codes: matrix.codes(), out: Span::Fixed(range), units }
            .with_slot(widen::widen::slot::side, matrix.side());
        let arguments = bind_fixed(arguments, &instance)?;
        let kernel = kernels.index(instance);
        self.prepare.push(Launch { kernel, grid: widen::grid(dtype, units), arguments, programmatic: false });
        self.rounded.push(Rounded { weights: weights.to_vec(), range });
        Ok(Span::Fixed(range))
    }

    /// What queries of a sound's rows are multiplied by for each distance up to `reach`: `W t_d`. Made on the device
    /// when the file is loaded.
    pub fn by_distance(&mut self, weight: WeightId, reach: u32, kernels: &mut Kernels) -> Result<Span, LowerError> {
        if let Some((_, range)) = self.distances.iter().find(|(known, _)| *known == weight) {
            return Ok(Span::Fixed(*range));
        }
        let w = &self.table[weight.index()];
        let (dtype, k, outputs) = (w.dtype, w.dim(0) as u32, w.dim(1) as u32);
        let x = self.constant(&format!("waves of {reach} distances, {k} wide"), waves(reach, k));
        let range = self.reserve(reach as u64 * outputs as u64 * 4);
        let values = value_arguments(dtype, self.blocks(weight));
        let instance = product::instance(dtype)?;
        let arguments = product::matmul_exact::Arguments { x, out: Span::Fixed(range), k, outputs }
            .with_slot(product::matmul_exact::slot::value, values);
        let arguments = bind_fixed(arguments, &instance)?;
        let (kernel, grid) = (kernels.index(instance), product::grid(outputs, reach));
        self.prepare.push(Launch { kernel, grid, arguments, programmatic: false });
        self.distances.push((weight, range));
        Ok(Span::Fixed(range))
    }

    /// Matrices of one type and width, stacked, as planes.
    pub fn matrix(&mut self, weights: &[WeightId], kernels: &mut Kernels) -> Result<Matrix, LowerError> {
        if let Some(found) = find(&self.stacks, weights, self.table) {
            return Ok(found);
        }
        let first = &self.table[weights[0].index()];
        let (dtype, k) = (first.dtype, first.dim(0));
        let rows: Vec<u64> = weights.iter().map(|w| self.rows(*w)).collect();
        let total: u64 = rows.iter().sum();
        let repacks = repacks(dtype)?;
        let mut placed = Vec::new();
        for plane in planes(dtype) {
            let range = self.reserve(plane.total_bytes(total, k));
            let row_bytes = k / plane.per as u64 * plane.bytes as u64;
            let mut first_row = 0;
            for (weight, rows) in weights.iter().zip(&rows) {
                let to = Range { offset: range.offset + first_row * row_bytes, bytes: rows * row_bytes, ..range };
                let part = match repacks.iter().find(|repack| repack.plane == plane) {
                    None => LoadPart::Copy { to },
                    Some(repack) => LoadPart::Kernel {
                        kernel: kernels.index(repack.instance.clone()),
                        order: [LoadArgument::Blocks, LoadArgument::Out, LoadArgument::Count],
                        to,
                        row_count: repack.count(1, k),
                        row_bytes,
                        per_block: repack::BLOCK_THREADS,
                    },
                };
                self.parts[weight.index()].push(part);
                first_row += rows;
            }
            placed.push((plane, range));
        }
        let matrix = Matrix { dtype, k: k as u32, rows: total, planes: placed };
        let first_rows = rows.iter().scan(0, |at, rows| Some(std::mem::replace(at, *at + rows))).collect();
        self.stacks.push(Placed { weights: weights.to_vec(), first_rows, matrix: matrix.clone() });
        Ok(matrix)
    }
}

/// bf16 rows of a stack: all of it, or a part.
#[derive(Debug)]
struct Rounded {
    weights: Vec<WeightId>,
    range: Range,
}

/// Weights that are stored one after the other in a stack, as a matrix of their own, where its planes start at whole
/// words.
fn find(stacks: &[Placed], weights: &[WeightId], table: &[Weight]) -> Option<Matrix> {
    stacks.iter().find_map(|stack| {
        let at = stack.weights.windows(weights.len()).position(|window| window == weights)?;
        let rows: u64 = weights.iter().map(|w| table[w.index()].dims.iter().skip(1).product::<u64>()).sum();
        let (k, first) = (stack.matrix.k as u64, stack.first_rows[at]);
        let part = |(plane, range): &(WeightPlane, Range)| {
            let row_bytes = k / plane.per as u64 * plane.bytes as u64;
            let offset = range.offset + first * row_bytes;
            let whole = at == 0 && weights.len() == stack.weights.len();
            let bytes = if whole { range.bytes } else { (rows * row_bytes).next_multiple_of(16).min(range.bytes) };
            offset.is_multiple_of(16).then_some((*plane, Range { offset, bytes, ..*range }))
        };
        let planes = stack.matrix.planes.iter().map(part).collect::<Option<Vec<_>>>()?;
        Some(Matrix { rows, planes, ..stack.matrix.clone() })
    })
}
