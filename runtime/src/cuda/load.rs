//! Loads the weights: file → pinned slot → device → repacking kernels.
//!
//! The bytes go in batches of whole rows, each as large as a slot. While the device copies and repacks one batch, all
//! cores read the next from the file; an event says when a slot may be used again. Slots live only as long as this.

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{CudaProgram, LoadArgument, LoadPart, Region};
use rayon::prelude::*;

use super::regions::Regions;
use super::{Argument, Buffer, CudaError, Device, Event, Function, Launch, Pinned, Stream};
use crate::RuntimeError;
use crate::weights::Weights;

/// Bytes of a slot: a few hundred microseconds of transfer, so that launches and waits do not count.
pub(super) const SLOT: usize = 32 << 20;
/// One is read, one is copied, one is repacked.
pub(super) const SLOTS: usize = 3;
/// Alignment of a tensor's rows in a slot: enough for every load kernel.
const ALIGNMENT: usize = 256;
/// What one core reads at a time.
pub(super) const READ: usize = 1 << 20;

/// Bytes on the device while weights are loaded, beyond the plan's own.
pub(super) const STAGING: u64 = (SLOT * SLOTS) as u64;

/// Whole rows of one tensor, and where in a slot they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    load: usize,
    first_row: u64,
    rows: u64,
    row_bytes: usize,
    at: usize,
}

impl Piece {
    fn bytes(&self) -> usize {
        self.rows as usize * self.row_bytes
    }
}

/// Cuts everything that goes through slots of `slot` bytes into batches, in the order of the plan.
fn batches(plan: &Plan, program: &CudaProgram, slot: usize) -> Result<Vec<Vec<Piece>>, RuntimeError> {
    let mut batches: Vec<Vec<Piece>> = Vec::new();
    let mut free: std::ops::Range<usize> = 0..0;
    for (index, load) in program.loads.iter().enumerate() {
        if !load.parts.iter().any(goes_to_the_device) {
            continue;
        }
        let weight = &plan.weights[load.weight.index()];
        let row_bytes = usize::try_from(weight.bytes / load.rows).unwrap_or(usize::MAX);
        if row_bytes > slot {
            return Err(RuntimeError::LongRow { tensor: weight.name.clone(), bytes: row_bytes, most: slot });
        }
        // A kernel counts in 32 bits.
        let counted = load.parts.iter().map(|part| match part {
            LoadPart::Kernel { row_count, .. } => i32::MAX as u64 / (*row_count).max(1),
            LoadPart::Copy { .. } => u64::MAX,
        });
        let most = counted.min().unwrap_or(u64::MAX).max(1);
        let mut first_row = 0;
        while first_row < load.rows {
            let at = free.start.next_multiple_of(ALIGNMENT);
            let room = (free.end.saturating_sub(at) / row_bytes.max(1)) as u64;
            let rows = room.min(load.rows - first_row).min(most);
            if rows == 0 {
                batches.push(Vec::new());
                free = 0..slot;
                continue;
            }
            let piece = Piece { load: index, first_row, rows, row_bytes, at };
            free.start = at + piece.bytes();
            first_row += rows;
            if let Some(batch) = batches.last_mut() {
                batch.push(piece);
            }
        }
    }
    Ok(batches)
}

fn goes_to_the_device(part: &LoadPart) -> bool {
    !matches!(part, LoadPart::Copy { to } if to.region == Region::Host)
}

/// Kernels that loading needs, in order, each once.
pub(super) fn kernels(program: &CudaProgram) -> Vec<usize> {
    let parts = program.loads.iter().flat_map(|load| &load.parts);
    let mut kernels: Vec<usize> = parts
        .filter_map(|part| match part {
            LoadPart::Kernel { kernel, .. } => Some(*kernel as usize),
            LoadPart::Copy { .. } => None,
        })
        .collect();
    kernels.sort_unstable();
    kernels.dedup();
    kernels
}

/// A slot: host memory that is filled, device memory that kernels read.
struct Slot {
    pinned: Pinned,
    staging: Buffer,
    /// The host's bytes are on the device.
    copied: Event,
    /// The device's bytes are no longer needed.
    used: Event,
}

/// What loading works with.
pub(super) struct Loader<'a> {
    pub device: &'a Device,
    pub plan: &'a Plan,
    pub program: &'a CudaProgram,
    pub weights: &'a Weights,
    /// By kernel index, at least [`kernels`].
    pub functions: &'a [Option<Function>],
    pub regions: &'a mut Regions,
}

impl Loader<'_> {
    /// Fills the weights and the tables; `progress` is told the bytes done and the bytes there are.
    pub fn load(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), RuntimeError> {
        for constant in &self.program.constants {
            let bytes: Vec<u8> = constant.values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.regions.write(&constant.to, &bytes)?;
        }
        let batches = batches(self.plan, self.program, SLOT)?;
        let through_slots = batches.iter().flatten().map(|piece| piece.bytes() as u64).sum::<u64>();
        let total = through_slots + self.host_bytes();
        let mut done = 0;
        progress(0, total);
        let slots = (0..SLOTS.min(batches.len())).map(|_| self.slot()).collect::<Result<Vec<_>, CudaError>>()?;
        let mut slots = slots;
        for (index, batch) in batches.iter().enumerate() {
            let slot = &mut slots[index % SLOTS];
            slot.copied.wait()?;
            self.fill(batch, slot.pinned.as_mut_slice())?;
            self.send(batch, slot)?;
            done += batch.iter().map(|piece| piece.bytes() as u64).sum::<u64>();
            progress(done, total);
        }
        // Runs while the device still works on the last batches.
        self.read_host_tables(done, total, progress)?;
        Ok(self.device.synchronize()?)
    }

    fn slot(&self) -> Result<Slot, CudaError> {
        Ok(Slot {
            pinned: self.device.pinned(SLOT)?,
            staging: self.device.allocate(SLOT)?,
            copied: self.device.event(false)?,
            used: self.device.event(false)?,
        })
    }

    /// Reads a batch from the files, on all cores.
    fn fill(&self, batch: &[Piece], slot: &mut [u8]) -> Result<(), RuntimeError> {
        let mut reads = Vec::new();
        let (mut rest, mut start) = (slot, 0);
        for piece in batch {
            let (bytes, after) = rest.split_at_mut(piece.at - start).1.split_at_mut(piece.bytes());
            (rest, start) = (after, piece.at + piece.bytes());
            let weight = &self.plan.weights[self.program.loads[piece.load].weight.index()];
            reads.push((weight, piece.first_row * piece.row_bytes as u64, bytes));
        }
        reads.into_par_iter().try_for_each(|(weight, from, bytes)| self.weights.read(weight, from, bytes))
    }

    /// Queues a filled slot's copies and the kernels that read them.
    #[allow(unsafe_code)]
    fn send(&self, batch: &[Piece], slot: &Slot) -> Result<(), CudaError> {
        slot.used.block_stream(Stream::Copies)?;
        for piece in batch {
            let bytes = piece.at..piece.at + piece.bytes();
            let parts = &self.program.loads[piece.load].parts;
            for part in parts.iter().filter(|part| goes_to_the_device(part)) {
                if let LoadPart::Copy { to } = part {
                    let to = self.regions.address(to) + piece.first_row * piece.row_bytes as u64;
                    // SAFETY: the part is as large as the tensor, as was checked; the slot is not filled again before
                    // `copied` has passed.
                    unsafe { slot.pinned.copy_to(bytes.clone(), to, Stream::Copies) }?;
                }
            }
            if parts.iter().any(|part| matches!(part, LoadPart::Kernel { .. })) {
                let to = slot.staging.address() + piece.at as u64;
                // SAFETY: a slot's two sides are equally large; else as above.
                unsafe { slot.pinned.copy_to(bytes, to, Stream::Copies) }?;
            }
        }
        slot.copied.record(Stream::Copies)?;
        slot.copied.block_stream(Stream::Launches)?;
        for piece in batch {
            for part in &self.program.loads[piece.load].parts {
                let LoadPart::Kernel { kernel, order, to, row_count, row_bytes, per_block } = *part else { continue };
                let function = self.functions[kernel as usize].as_ref().expect("loaded before the weights");
                let count = (row_count * piece.rows) as u32;
                let launch = Launch {
                    grid: [count.div_ceil(per_block), 1, 1],
                    block: self.program.kernels[kernel as usize].block,
                    dependent: false,
                };
                let arguments = order.map(|argument| match argument {
                    LoadArgument::Blocks => Argument::Address(slot.staging.address() + piece.at as u64, 0),
                    LoadArgument::Out => Argument::Address(self.regions.address(&to) + piece.first_row * row_bytes, 0),
                    LoadArgument::Count => Argument::U32(count),
                });
                // SAFETY: rows and places were checked against the regions; that a kernel writes `row_bytes` for a row
                // of `row_count` is the compiler's promise.
                unsafe { function.launch(launch, &arguments) }?;
            }
        }
        slot.used.record(Stream::Launches)
    }

    /// Bytes that stay on the host.
    fn host_bytes(&self) -> u64 {
        let parts = self.program.loads.iter().flat_map(|load| &load.parts);
        parts.filter(|part| !goes_to_the_device(part)).map(bytes_of).sum()
    }

    fn read_host_tables(
        &mut self,
        mut done: u64,
        total: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), RuntimeError> {
        for load in &self.program.loads {
            for part in load.parts.iter().filter(|part| !goes_to_the_device(part)) {
                let LoadPart::Copy { to } = part else { continue };
                let weight = &self.plan.weights[load.weight.index()];
                self.weights.read(weight, 0, self.regions.host(to))?;
                done += bytes_of(part);
                progress(done, total);
            }
        }
        Ok(())
    }
}

fn bytes_of(part: &LoadPart) -> u64 {
    match part {
        LoadPart::Copy { to } | LoadPart::Kernel { to, .. } => to.bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support;

    fn cut(slot: usize) -> Result<Vec<Vec<Piece>>, RuntimeError> {
        let plan = support::plan();
        batches(&plan, &plan.cuda.as_ref().unwrap().program, slot)
    }

    /// 12 rows of 34 bytes, and 64 of 18.
    #[test]
    fn every_row_goes_through_a_slot_once_and_in_order() {
        for slot in [34, 100, 256, 257, 300, 400, 1000, 1 << 20] {
            let batches = cut(slot).unwrap();
            let mut next = [0, 0];
            for batch in &batches {
                assert!(!batch.is_empty());
                let mut end = 0;
                for piece in batch {
                    assert!(piece.at >= end && piece.at.is_multiple_of(ALIGNMENT) && piece.rows > 0);
                    assert_eq!(piece.row_bytes, [34, 18][piece.load]);
                    assert_eq!(piece.first_row, next[piece.load]);
                    next[piece.load] += piece.rows;
                    end = piece.at + piece.bytes();
                }
                assert!(end <= slot, "{end} bytes in a slot of {slot}");
            }
            assert_eq!(next, [12, 64], "slots of {slot}");
        }
        assert_eq!(cut(1 << 20).unwrap().len(), 1, "small tensors share a slot");
    }

    #[test]
    fn a_row_that_fits_no_slot_is_an_error_that_names_it() {
        let error = cut(33).unwrap_err().to_string();
        assert_eq!(error, "a row of token_embd.weight has 34 bytes, 33 at most can be loaded at once");
    }

    #[test]
    fn no_launch_counts_beyond_its_parameter() {
        let mut plan = support::plan();
        let program = &mut plan.cuda.as_mut().unwrap().program;
        if let LoadPart::Kernel { row_count, .. } = &mut program.loads[1].parts[0] {
            *row_count = i32::MAX as u64 / 10;
        }
        let batches = batches(&plan, &plan.cuda.as_ref().unwrap().program, 1 << 20).unwrap();
        let counted: Vec<u64> = batches.iter().flatten().filter(|p| p.load == 1).map(|p| p.rows).collect();
        assert_eq!(counted, [10, 10, 10, 10, 10, 10, 4]);
    }

    #[test]
    fn what_stays_on_the_host_takes_no_slot() {
        let mut plan = support::plan();
        let program = &mut plan.cuda.as_mut().unwrap().program;
        program.loads[0].parts.truncate(1);
        assert!(batches(&plan, &plan.cuda.as_ref().unwrap().program, 4096).unwrap()[0].iter().all(|p| p.load == 1));
        assert_eq!(kernels(&plan.cuda.unwrap().program), [0]);
    }
}
