//! Pinned host memory: the device copies from and to it asynchronously, and kernels can read it over the bus
//! (zero-copy).

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::{Context, CudaError, Device};
use super::streams::Stream;

/// Bytes of the host that the device may reach.
pub struct Pinned {
    context: Arc<Context>,
    host: NonNull<u8>,
    bytes: usize,
    address: sys::CUdeviceptr,
}

// SAFETY: the memory is owned by this value alone; the driver may free it from any thread.
#[allow(unsafe_code)]
unsafe impl Send for Pinned {}

impl Device {
    /// Pinned memory; what it holds is arbitrary.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned, CudaError> {
        self.context.enter()?;
        let pinning = || CudaError::driver(format!("pinning {bytes} bytes of host memory"));
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: freed by the value's drop, and by nobody else. The driver refuses an allocation of nothing.
        #[allow(unsafe_code)]
        let host = unsafe { result::malloc_host(bytes.max(16), flags) }.map_err(pinning())?;
        let Some(pointer) = NonNull::new(host.cast::<u8>()) else {
            return Err(CudaError::Driver {
                doing: format!("pinning {bytes} bytes of host memory"),
                code: "nothing".into(),
            });
        };
        let mut pinned = Pinned { context: Arc::clone(&self.context), host: pointer, bytes, address: 0 };
        // SAFETY: the pointer was given by the driver just now, with the flag that maps it.
        #[allow(unsafe_code)]
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut pinned.address, host, 0) }.result().map_err(pinning())?;
        Ok(pinned)
    }
}

impl Pinned {
    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The device address of the mapped memory.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated with this length and alive as long as `self`; its pages come from the system, so every byte
        // has a value. Whoever queues a copy into it promises not to look before it is done.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts(self.host.as_ptr(), self.bytes)
        }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(self.host.as_ptr(), self.bytes)
        }
    }

    /// Queues a copy of these bytes to an address of the device.
    ///
    /// # Safety
    /// As many bytes must lie at `to`, and the bytes here must not change before the copy is done.
    #[allow(unsafe_code)]
    pub unsafe fn copy_to(&self, from: Range<usize>, to: u64, stream: Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        let bytes = &self.as_slice()[from];
        // SAFETY: the range lies in this memory; the rest is the caller's promise.
        unsafe { result::memcpy_htod_async(to, bytes, self.context.handle_of(stream)) }
            .map_err(CudaError::driver(format!("copying {} bytes to the GPU", bytes.len())))
    }

    /// Queues a copy from an address of the device to these bytes.
    ///
    /// # Safety
    /// As many bytes must lie at `from`, and the bytes here must not be looked at before the copy is done.
    #[allow(unsafe_code)]
    pub unsafe fn copy_from(&mut self, from: u64, to: Range<usize>, stream: Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        let stream = self.context.handle_of(stream);
        let bytes = &mut self.as_mut_slice()[to];
        let copying = CudaError::driver(format!("copying {} bytes from the GPU", bytes.len()));
        // SAFETY: the range lies in this memory; the rest is the caller's promise.
        unsafe { result::memcpy_dtoh_async(bytes, from, stream) }.map_err(copying)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated by us, freed once.
            #[allow(unsafe_code)]
            let _ = unsafe { result::free_host(self.host.as_ptr().cast::<c_void>()) };
        }
    }
}
