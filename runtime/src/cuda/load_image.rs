//! Loads embedded weights. They are stored in the plan's file in their device layout, so they are only copied.

use gemma4c_plan::cuda::{CudaProgram, Range, Region};
use gemma4c_plan::embedded::host_start;
use rayon::prelude::*;

use super::load::{READ, SLOT, SLOTS};
use super::regions::Regions;
use super::{CudaError, Device, Event, Pinned, Stream};
use crate::RuntimeError;
use crate::embedded::EmbeddedWeights;

/// Fills the weights' regions; `progress` is told the bytes done and the bytes there are.
#[allow(unsafe_code)]
pub(super) fn load_image(
    device: &Device,
    program: &CudaProgram,
    inside: &EmbeddedWeights,
    regions: &mut Regions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), RuntimeError> {
    let (weights, host_bytes) = (program.loaded_bytes(), program.memory.host);
    let total = weights + host_bytes;
    progress(0, total);
    let batches = weights.div_ceil(SLOT as u64) as usize;
    let slot = |_| Ok((device.pinned(SLOT)?, device.event(false)?));
    let mut slots = (0..SLOTS.min(batches)).map(slot).collect::<Result<Vec<(Pinned, Event)>, CudaError>>()?;
    for batch in 0..batches {
        let start = (batch * SLOT) as u64;
        let bytes = SLOT.min((weights - start) as usize);
        let (pinned, copied) = &mut slots[batch % SLOTS];
        copied.wait()?;
        read(inside, start, &mut pinned.as_mut_slice()[..bytes])?;
        let to = regions.address(&Range { region: Region::Weights, offset: start, bytes: bytes as u64 });
        // SAFETY: the region has these bytes; the slot is not filled again before `copied` has passed.
        unsafe { pinned.copy_to(0..bytes, to, Stream::Copies) }?;
        copied.record(Stream::Copies)?;
        progress(start + bytes as u64, total);
    }
    if host_bytes > 0 {
        // Runs while the device still works on the last batches.
        let host = regions.host(&Range { region: Region::Host, offset: 0, bytes: host_bytes });
        // It did not overflow when the plan was checked.
        read(inside, host_start(program).unwrap_or(weights), host)?;
        progress(total, total);
    }
    Ok(device.synchronize()?)
}

/// On all cores.
fn read(inside: &EmbeddedWeights, from: u64, bytes: &mut [u8]) -> Result<(), RuntimeError> {
    let reads = bytes.par_chunks_mut(READ).enumerate();
    reads.try_for_each(|(i, bytes)| inside.read(from + (i * READ) as u64, bytes))
}
