//! Single words copied back from the device while it keeps running: the tokens of the decode loop.

use super::{CudaError, Device, Event, Pinned, Stream};

/// Words in flight, at most.
const SLOTS: usize = 16;

/// A ring of words in pinned memory. Each is copied in the copy stream, after the launches queued before it.
pub(super) struct Words {
    ring: Pinned,
    slots: Vec<Slot>,
    /// The oldest word in flight, and how many there are.
    first: usize,
    count: usize,
}

struct Slot {
    /// Passes when the launch that computes the word is done.
    ready: Event,
    /// Passes when the word has arrived on the host.
    here: Event,
}

impl Words {
    pub fn new(device: &Device) -> Result<Words, CudaError> {
        let slot = |_| Ok(Slot { ready: device.event(false)?, here: device.event(false)? });
        let slots = (0..SLOTS).map(slot).collect::<Result<_, CudaError>>()?;
        Ok(Words { ring: device.pinned(SLOTS * 4)?, slots, first: 0, count: 0 })
    }

    /// Queues the copy of the word at an address of the device.
    #[allow(unsafe_code)]
    pub fn send(&mut self, address: u64) -> Result<(), CudaError> {
        assert!(self.count < SLOTS, "{SLOTS} words are on their way and nobody receives them");
        let index = (self.first + self.count) % SLOTS;
        let slot = &self.slots[index];
        slot.ready.record(Stream::Launches)?;
        slot.ready.block_stream(Stream::Copies)?;
        // SAFETY: the caller's address has a word; nobody looks at it here before `here` has passed.
        unsafe { self.ring.copy_from(address, index * 4..index * 4 + 4, Stream::Copies) }?;
        slot.here.record(Stream::Copies)?;
        self.count += 1;
        Ok(())
    }

    /// The oldest word, once it is here.
    pub fn receive(&mut self) -> Result<u32, CudaError> {
        assert!(self.count > 0, "no word is on its way");
        let index = self.first;
        (self.first, self.count) = ((index + 1) % SLOTS, self.count - 1);
        self.slots[index].here.wait()?;
        let bytes = &self.ring.as_slice()[index * 4..index * 4 + 4];
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }
}
