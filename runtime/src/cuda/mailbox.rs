//! Bytes in flight to the device, in pinned memory, so that the writer need not wait for the copy.
//!
//! The buffer has two halves: one is filled while the bytes of the other leave. Whoever fills faster than the device
//! works waits for the older half, never for all that is queued.

use rayon::prelude::*;

use super::{CudaError, Device, Event, Pinned, Stream};

/// Bytes of a half, at least: the tokens of dozens of chunks. As many go in at once, at most.
pub(super) const MAILBOX: usize = 1 << 20;

/// Floats that a core takes at a time.
const FLOATS_A_TASK: usize = 1 << 14;

/// A pinned buffer for bytes that are copied in the stream of launches.
pub(super) struct Mailbox {
    pinned: Pinned,
    half: usize,
    /// Whether the second half is being filled, and how far the half that is.
    in_second: bool,
    used: usize,
    /// For each half: passes when its bytes have left.
    left: [Event; 2],
}

impl Mailbox {
    pub fn new(device: &Device, half: usize) -> Result<Mailbox, CudaError> {
        let (pinned, left) = (device.pinned(2 * half)?, [device.event(false)?, device.event(false)?]);
        Ok(Mailbox { pinned, half, in_second: false, used: 0, left })
    }

    pub fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    /// Adds at most [`MAILBOX`] bytes, which are to be copied in the stream of launches. They stay unchanged until they
    /// have left.
    pub fn put(&mut self, bytes: &[u8]) -> Result<std::ops::Range<usize>, CudaError> {
        let place = self.next(bytes.len())?;
        self.pinned.as_mut_slice()[place.clone()].copy_from_slice(bytes);
        Ok(place)
    }

    /// The same of floats, by all cores: a picture is megabytes, and one core fills memory slower than the bus empties
    /// it.
    pub fn put_floats(&mut self, values: &[f32]) -> Result<std::ops::Range<usize>, CudaError> {
        let place = self.next(4 * values.len())?;
        let bytes = self.pinned.as_mut_slice()[place.clone()].as_chunks_mut().0;
        bytes.par_chunks_mut(FLOATS_A_TASK).zip(values.par_chunks(FLOATS_A_TASK)).for_each(|(bytes, values)| {
            bytes.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
        });
        Ok(place)
    }

    /// The place of so many bytes.
    fn next(&mut self, bytes: usize) -> Result<std::ops::Range<usize>, CudaError> {
        if self.used + bytes > self.half {
            self.left[usize::from(self.in_second)].record(Stream::Launches)?;
            (self.in_second, self.used) = (!self.in_second, 0);
            // An event that was never recorded has passed.
            self.left[usize::from(self.in_second)].wait()?;
        }
        let start = if self.in_second { self.half } else { 0 } + self.used;
        let place = start..start + bytes;
        self.used = (self.used + bytes).next_multiple_of(16);
        Ok(place)
    }
}
