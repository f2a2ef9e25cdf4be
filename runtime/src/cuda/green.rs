//! Part of a GPU: a green context, which has so many of its SMs and no others.
//!
//! For timing: a program that is shaped for fewer SMs than this GPU has can be run on that many of them. The driver
//! hands SMs out in steps of its own (eight on Hopper); a number that it would round is refused here, because a
//! measurement must be of what was asked for.

use cudarc::driver::{result, sys};

/// Why there is no such part.
pub(super) enum Refused {
    Driver(result::DriverError),
    /// The driver gives another number.
    Given(u32),
}

impl From<result::DriverError> for Refused {
    fn from(error: result::DriverError) -> Refused {
        Refused::Driver(error)
    }
}

/// A green context, and the context that stands for it in all calls.
pub(super) struct Green {
    handle: sys::CUgreenCtx,
    pub(super) context: sys::CUcontext,
}

impl Green {
    /// That many SMs of a device, whose primary context must be retained for as long as this lives.
    pub(super) fn new(device: sys::CUdevice, multiprocessors: u32) -> Result<Green, Refused> {
        let all = {
            let mut all = std::mem::MaybeUninit::<sys::CUdevResource>::zeroed();
            // SAFETY: the device is the driver's own, and the call fills the struct in.
            #[allow(unsafe_code)]
            unsafe {
                let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
                sys::cuDeviceGetDevResource(device, all.as_mut_ptr(), kind).result()?;
                all.assume_init()
            }
        };
        // With room for the largest clusters where that gives the number; what it takes to keep them may round it.
        let largest = sys::CUdevSmResourceSplit_flags::CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE as u32;
        let mut given = 0;
        for flags in [largest, 0] {
            match split(&all, multiprocessors, flags) {
                Ok((part, count)) if count == multiprocessors => return Ok(Green::of(device, part)?),
                Ok((_, count)) => given = count,
                // The larger demand may be one that the driver does not know.
                Err(error) if flags == 0 => return Err(error.into()),
                Err(_) => {}
            }
        }
        Err(Refused::Given(given))
    }

    fn of(device: sys::CUdevice, mut part: sys::CUdevResource) -> Result<Green, result::DriverError> {
        let (mut description, mut handle, mut context) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: each call takes what the one before it has made, and writes one handle.
        #[allow(unsafe_code)]
        unsafe {
            sys::cuDevResourceGenerateDesc(&mut description, &mut part, 1).result()?;
            sys::cuGreenCtxCreate(&mut handle, description, device, flags).result()?;
            if let Err(error) = sys::cuCtxFromGreenCtx(&mut context, handle).result() {
                let _ = sys::cuGreenCtxDestroy(handle);
                return Err(error);
            }
        }
        Ok(Green { handle, context })
    }

    /// A stream whose launches run on these SMs.
    pub(super) fn stream(&self) -> Result<sys::CUstream, result::DriverError> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the green context is alive, and the call writes one handle.
        #[allow(unsafe_code)]
        unsafe { sys::cuGreenCtxStreamCreate(&mut stream, self.handle, flags, 0) }.result()?;
        Ok(stream)
    }

    /// Ends it; its streams must be gone.
    pub(super) fn destroy(&self) {
        // SAFETY: called once, by the drop of the context that owns it, after its streams are destroyed.
        #[allow(unsafe_code)]
        let _ = unsafe { sys::cuGreenCtxDestroy(self.handle) };
    }
}

/// A part of at least so many SMs, and how many it has.
fn split(
    all: &sys::CUdevResource,
    multiprocessors: u32,
    flags: u32,
) -> Result<(sys::CUdevResource, u32), result::DriverError> {
    let (mut part, mut rest) = (*all, *all);
    let mut groups = 1;
    // SAFETY: the resource is the device's own; one group is asked for, and there is room for one and for the rest. The
    // part is one of SMs, so that its union holds their number.
    #[allow(unsafe_code)]
    unsafe {
        sys::cuDevSmResourceSplitByCount(&mut part, &mut groups, all, &mut rest, flags, multiprocessors).result()?;
        Ok((part, if groups == 0 { 0 } else { part.__bindgen_anon_1.sm.smCount }))
    }
}
