//! Words copied back from the device while it keeps running: the tokens of the decode loop, one for each row.

use super::{CudaError, Device, Event, Pinned, Stream};

/// Copies in flight, at most.
const SLOTS: usize = 16;

/// A ring of copies in pinned memory. Each is made in the copy stream, after the launches queued before it.
pub(super) struct Words {
    ring: Pinned,
    slots: Vec<Slot>,
    /// Bytes of a copy, at most.
    most: usize,
    /// The oldest copy in flight, and how many there are.
    first: usize,
    count: usize,
}

struct Slot {
    /// Passes when the launch that computes the words is done.
    ready: Event,
    /// Passes when the words have arrived on the host.
    here: Event,
    /// Bytes in flight.
    bytes: usize,
}

impl Words {
    /// For copies of at most that many words.
    pub fn new(device: &Device, most: usize) -> Result<Words, CudaError> {
        let slot = |_| Ok(Slot { ready: device.event(false)?, here: device.event(false)?, bytes: 0 });
        let slots = (0..SLOTS).map(slot).collect::<Result<_, CudaError>>()?;
        Ok(Words { ring: device.pinned(SLOTS * most * 4)?, slots, most: most * 4, first: 0, count: 0 })
    }

    /// Queues the copy of so many bytes at an address of the device.
    #[allow(unsafe_code)]
    pub fn send(&mut self, address: u64, bytes: usize) -> Result<(), CudaError> {
        assert!(self.count < SLOTS, "{SLOTS} copies are in flight and nobody receives them");
        assert!(bytes <= self.most, "a copy of {bytes} bytes, and room for {}", self.most);
        let index = (self.first + self.count) % SLOTS;
        let slot = &mut self.slots[index];
        slot.bytes = bytes;
        slot.ready.record(Stream::Launches)?;
        slot.ready.block_stream(Stream::Copies)?;
        let place = index * self.most..index * self.most + bytes;
        // SAFETY: the caller's address has as many bytes; nobody looks at them here before `here` has passed.
        unsafe { self.ring.copy_from(address, place, Stream::Copies) }?;
        slot.here.record(Stream::Copies)?;
        self.count += 1;
        Ok(())
    }

    /// The words of the oldest copy, once they are here.
    pub fn receive(&mut self) -> Result<Vec<u32>, CudaError> {
        assert!(self.count > 0, "nothing is in flight");
        let index = self.first;
        (self.first, self.count) = ((index + 1) % SLOTS, self.count - 1);
        self.slots[index].here.wait()?;
        let bytes = &self.ring.as_slice()[index * self.most..][..self.slots[index].bytes];
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}
