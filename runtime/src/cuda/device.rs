//! A GPU and its memory.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::green::{Green, Refused};
use crate::machine::{self, Gpu};

/// A call of the driver that failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    #[error(transparent)]
    Machine(#[from] machine::GpuError),
    #[error("this machine has no NVIDIA GPU that the driver sees")]
    NoGpu,
    #[error("GPU {ordinal} was asked for, but there are {count}")]
    NoDevice { ordinal: usize, count: usize },
    #[error("the NVIDIA driver is for CUDA {}.{}, at least {}.{} is needed: update the driver", found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10)]
    OldDriver { found: i32, needed: i32 },
    #[error(
        "{gpu} has {all} SMs, of which the driver gives {given} where {asked} are asked for: ask for a number it has, a multiple of 8 on most GPUs"
    )]
    Multiprocessors { gpu: String, asked: u32, given: u32, all: u32 },
    #[error("kernel {kernel} takes parameters of {expected:?} bytes, the launch has {found:?}")]
    Arguments { kernel: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("{doing}: the driver answers {code}")]
    Driver { doing: String, code: String },
}

impl CudaError {
    pub(super) fn driver(doing: impl Into<String>) -> impl FnOnce(result::DriverError) -> CudaError {
        let doing = doing.into();
        move |error| CudaError::Driver { doing, code: format!("{:?}", error.0) }
    }
}

/// The oldest driver that has every call made here: a missing one would end the process.
const OLDEST_DRIVER: i32 = 12080;

/// The device's context and streams; shared by everything that lives on it.
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// The SMs that it is restricted to.
    green: Option<Green>,
    /// The stream of launches, and of copies that are ordered with them.
    pub(super) stream: sys::CUstream,
    /// The stream of copies that overlap with launches.
    pub(super) copies: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread; each call makes the context current first.
#[allow(unsafe_code)]
unsafe impl Send for Context {}
// SAFETY: as above; the driver does its own locking.
#[allow(unsafe_code)]
unsafe impl Sync for Context {}

impl Context {
    /// Makes this device the calling thread's.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        #[allow(unsafe_code)]
        unsafe { result::ctx::set_current(self.context) }.map_err(CudaError::driver("selecting the GPU"))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            // SAFETY: everything on the device holds an `Arc` of this, so nothing is left that uses stream or context.
            #[allow(unsafe_code)]
            unsafe {
                let _ = result::stream::destroy(self.stream);
                let _ = result::stream::destroy(self.copies);
                if let Some(green) = &self.green {
                    green.destroy();
                }
                let _ = result::primary_ctx::release(self.device);
            }
        }
    }
}

/// One GPU, opened.
#[derive(Clone)]
pub struct Device {
    pub(super) context: Arc<Context>,
    pub gpu: Gpu,
}

impl Device {
    /// Opens GPU `ordinal`.
    pub fn open(ordinal: usize) -> Result<Device, CudaError> {
        Device::open_part(ordinal, None)
    }

    /// Opens that many SMs of GPU `ordinal`, or all.
    pub fn open_part(ordinal: usize, multiprocessors: Option<u32>) -> Result<Device, CudaError> {
        let gpus = machine::gpus()?;
        let count = gpus.len();
        if count == 0 {
            return Err(CudaError::NoGpu);
        }
        let mut gpu = gpus.into_iter().nth(ordinal).ok_or(CudaError::NoDevice { ordinal, count })?;
        let opening = || CudaError::driver(format!("opening {}", gpu.name));
        let mut version = 0;
        // SAFETY: writes one number.
        #[allow(unsafe_code)]
        unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(opening())?;
        if version < OLDEST_DRIVER {
            return Err(CudaError::OldDriver { found: version, needed: OLDEST_DRIVER });
        }
        let device = result::device::get(ordinal as i32).map_err(opening())?;
        // SAFETY: the handle is the driver's own; the context is released when the last user of it is gone.
        #[allow(unsafe_code)]
        let primary = unsafe { result::primary_ctx::retain(device) }.map_err(opening())?;
        let some = multiprocessors.filter(|count| *count != gpu.multiprocessors);
        let green = some.map(|asked| Green::new(device, asked).map_err(|why| refused(&gpu, asked, why))).transpose()?;
        let context = green.as_ref().map_or(primary, |green| green.context);
        // SAFETY: retained just now.
        #[allow(unsafe_code)]
        unsafe { result::ctx::set_current(context) }.map_err(opening())?;
        let stream = || match &green {
            Some(green) => green.stream(),
            None => result::stream::create(result::stream::StreamKind::NonBlocking),
        };
        let (stream, copies) = (stream().map_err(opening())?, stream().map_err(opening())?);
        gpu.multiprocessors = some.unwrap_or(gpu.multiprocessors);
        Ok(Device { context: Arc::new(Context { device, context, green, stream, copies }), gpu })
    }

    /// Memory on the device; what it holds is not defined.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, CudaError> {
        self.context.enter()?;
        // SAFETY: freed by the buffer's drop, and by nobody else. The driver refuses an allocation of nothing.
        #[allow(unsafe_code)]
        let address = unsafe { result::malloc_sync(bytes.max(16)) }
            .map_err(CudaError::driver(format!("allocating {bytes} bytes on {}", self.gpu.name)))?;
        Ok(Buffer { context: Arc::clone(&self.context), address, bytes })
    }

    /// A buffer with these bytes.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer, CudaError> {
        let buffer = self.allocate(bytes.len())?;
        buffer.write(bytes)?;
        Ok(buffer)
    }

    /// Free and total bytes of the device's memory.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.context.enter()?;
        result::mem_get_info().map_err(CudaError::driver("asking for free memory"))
    }

    /// Queues a copy within the device's memory, after the launches before it.
    ///
    /// # Safety
    /// As many bytes must lie at both addresses, must not overlap, and must stay allocated until the copy is done.
    #[allow(unsafe_code)]
    pub unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.context.stream) }
            .map_err(CudaError::driver(format!("copying {bytes} bytes on the GPU")))
    }

    /// Waits until everything queued is done, in both streams.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the streams live as long as the context.
        #[allow(unsafe_code)]
        unsafe {
            result::stream::synchronize(self.context.stream).map_err(CudaError::driver("waiting for the GPU"))?;
            result::stream::synchronize(self.context.copies).map_err(CudaError::driver("waiting for the GPU's copies"))
        }
    }

    /// The driver's handle of the stream that launches are queued in, for another library to queue its own there. It
    /// lives as long as the device.
    pub fn stream(&self) -> *mut std::ffi::c_void {
        self.context.stream.cast()
    }

    /// Milliseconds the GPU spends on what `work` launches.
    pub fn time(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<f32, CudaError> {
        self.context.enter()?;
        let timing = || CudaError::driver("timing");
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(timing());
        let (start, end) = (event()?, event()?);
        // SAFETY: both events and the stream are alive; the events are destroyed below and used nowhere else.
        #[allow(unsafe_code)]
        unsafe {
            result::event::record(start, self.context.stream).map_err(timing())?;
            let outcome = work();
            result::event::record(end, self.context.stream).map_err(timing())?;
            result::event::synchronize(end).map_err(timing())?;
            let elapsed = result::event::elapsed(start, end).map_err(timing());
            let _ = (result::event::destroy(start), result::event::destroy(end));
            outcome.and(elapsed)
        }
    }
}

fn refused(gpu: &Gpu, asked: u32, why: Refused) -> CudaError {
    let (name, all) = (gpu.name.clone(), gpu.multiprocessors);
    match why {
        Refused::Given(given) => CudaError::Multiprocessors { gpu: name, asked, given, all },
        Refused::Driver(error) => CudaError::driver(format!("asking for {asked} of the {all} SMs of {name}"))(error),
    }
}

/// Memory on a device.
pub struct Buffer {
    context: Arc<Context>,
    pub(super) address: sys::CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Overwrites the buffer from its start; waits until it is done.
    ///
    /// On the device's own stream: the driver's synchronous copy may return while the last bytes are in flight, and
    /// launches on our stream would not wait for them.
    pub fn write(&self, bytes: &[u8]) -> Result<(), CudaError> {
        self.write_at(0, bytes)
    }

    /// The same from byte `start` on.
    pub fn write_at(&self, start: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let fits = start.checked_add(bytes.len()).is_some_and(|end| end <= self.bytes);
        assert!(fits, "{} bytes at {start} do not fit a buffer of {}", bytes.len(), self.bytes);
        self.context.enter()?;
        let copying = || CudaError::driver(format!("copying {} bytes to the GPU", bytes.len()));
        // SAFETY: the range lies within the allocation, and the source lives until the stream has been waited for.
        #[allow(unsafe_code)]
        unsafe {
            result::memcpy_htod_async(self.address + start as u64, bytes, self.context.stream).map_err(copying())?;
            result::stream::synchronize(self.context.stream).map_err(copying())
        }
    }

    /// The buffer's bytes, once everything launched before is done.
    pub fn read(&self) -> Result<Vec<u8>, CudaError> {
        self.context.enter()?;
        let mut bytes = vec![0; self.bytes];
        // SAFETY: the stream is alive; source and destination have the same length, and the call waits for the copy.
        #[allow(unsafe_code)]
        unsafe {
            result::stream::synchronize(self.context.stream).map_err(CudaError::driver("waiting for the GPU"))?;
            result::memcpy_dtoh_sync(&mut bytes, self.address).map_err(CudaError::driver("copying from the GPU"))?;
        }
        Ok(bytes)
    }

    /// Sets every byte, before whatever is launched next.
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: exactly the allocation.
        #[allow(unsafe_code)]
        unsafe { result::memset_d8_async(self.address, byte, self.bytes, self.context.stream) }
            .map_err(CudaError::driver("filling memory"))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated by us, freed once; the driver waits for launches that use it.
            #[allow(unsafe_code)]
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
