//! The two CUDA streams, one for launches and one for copies beside them, and the events that order them.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::{Context, CudaError, Device};

/// A CUDA stream. Work in one stream runs in order; only [`Event`]s order the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Launches,
    Copies,
}

impl Context {
    pub(super) fn handle_of(&self, stream: Stream) -> sys::CUstream {
        match stream {
            Stream::Launches => self.stream,
            Stream::Copies => self.copies,
        }
    }
}

/// A CUDA event. One that was never recorded counts as passed.
pub struct Event {
    context: Arc<Context>,
    pub(super) event: sys::CUevent,
}

// SAFETY: the driver's handle may be used from any thread that has made the context current.
#[allow(unsafe_code)]
unsafe impl Send for Event {}

impl Device {
    /// An event. Only a timed one can be asked for [`Event::since`]; the others are cheaper.
    pub fn event(&self, timed: bool) -> Result<Event, CudaError> {
        self.context.enter()?;
        let flags = match timed {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let event = result::event::create(flags).map_err(CudaError::driver("creating an event"))?;
        Ok(Event { context: Arc::clone(&self.context), event })
    }
}

impl Event {
    /// Records the event: it passes once everything queued in the stream so far is done.
    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: event and stream are alive.
        #[allow(unsafe_code)]
        unsafe { result::event::record(self.event, self.context.handle_of(stream)) }
            .map_err(CudaError::driver("recording an event"))
    }

    /// Work queued in the stream from now on waits for the event; the host does not.
    pub fn block_stream(&self, stream: Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive.
        #[allow(unsafe_code)]
        unsafe { result::stream::wait_event(self.context.handle_of(stream), self.event, flags) }
            .map_err(CudaError::driver("waiting for an event on the GPU"))
    }

    /// Blocks the host until the event has passed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the event is alive.
        #[allow(unsafe_code)]
        unsafe { result::event::synchronize(self.event) }.map_err(CudaError::driver("waiting for the GPU"))
    }

    /// Milliseconds from `earlier` to this one; both are timed and have passed.
    pub fn since(&self, earlier: &Event) -> Result<f32, CudaError> {
        self.context.enter()?;
        // SAFETY: both events are alive.
        #[allow(unsafe_code)]
        unsafe { result::event::elapsed(earlier.event, self.event) }.map_err(CudaError::driver("timing"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by us, destroyed once; the driver keeps what is still waited for.
            #[allow(unsafe_code)]
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
