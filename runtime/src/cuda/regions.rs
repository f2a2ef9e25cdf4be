//! A plan's memory on a device: one allocation a region, made once.

use gemma4c_plan::cuda::{Memory, Range, Region};

use super::{Buffer, CudaError, Device, Pinned};

pub(super) struct Regions {
    weights: Buffer,
    kv: Buffer,
    arena: Buffer,
    /// These two are nothing in most plans.
    seats: Option<Buffer>,
    host: Option<Pinned>,
}

impl Regions {
    /// All zero, except the weights, which hold anything.
    pub fn allocate(device: &Device, memory: &Memory) -> Result<Regions, CudaError> {
        let host = match memory.host {
            0 => None,
            bytes => {
                let mut host = device.pinned(bytes as usize)?;
                host.as_mut_slice().fill(0);
                Some(host)
            }
        };
        let seats = match memory.seats {
            0 => None,
            bytes => {
                let seats = device.allocate(bytes as usize)?;
                seats.fill(0)?;
                Some(seats)
            }
        };
        let regions = Regions {
            weights: device.allocate(memory.weights as usize)?,
            kv: device.allocate(memory.kv as usize)?,
            arena: device.allocate(memory.arena as usize)?,
            seats,
            host,
        };
        regions.kv.fill(0)?;
        regions.arena.fill(0)?;
        Ok(regions)
    }

    /// The device address of a range.
    pub fn address(&self, range: &Range) -> u64 {
        let start = match range.region {
            Region::Weights => self.weights.address(),
            Region::Kv => self.kv.address(),
            Region::Arena => self.arena.address(),
            Region::Seats => self.seats.as_ref().map_or(0, Buffer::address),
            Region::Host => self.host.as_ref().map_or(0, Pinned::address),
        };
        start + range.offset
    }

    /// Writes to the start of a range, at once.
    pub fn write(&mut self, to: &Range, bytes: &[u8]) -> Result<(), CudaError> {
        let start = to.offset as usize;
        match to.region {
            Region::Weights => self.weights.write_at(start, bytes),
            Region::Kv => self.kv.write_at(start, bytes),
            Region::Arena => self.arena.write_at(start, bytes),
            Region::Seats => self.seats.as_mut().map_or(Ok(()), |seats| seats.write_at(start, bytes)),
            Region::Host => {
                self.host(to)[..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// The bytes of a range of [`Region::Host`].
    pub fn host(&mut self, range: &Range) -> &mut [u8] {
        let host = self.host.as_mut().map_or(&mut [][..], Pinned::as_mut_slice);
        // In range: the plan was checked.
        &mut host[range.offset as usize..][..range.bytes as usize]
    }
}
