//! The two things a GPU does at the same time, launches and copies, and the events that order them.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::{Context, CudaError, Device};

/// A queue of work. What is in one lane happens in order; two lanes know of each other only through [`Event`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Launches,
    Copies,
}

impl Context {
    pub(super) fn stream_of(&self, lane: Lane) -> sys::CUstream {
        match lane {
            Lane::Launches => self.stream,
            Lane::Copies => self.copies,
        }
    }
}

/// A moment in a lane. One that was never recorded has passed already.
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
    /// Passes once everything queued in the lane so far is done.
    pub fn record(&self, lane: Lane) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: event and stream are alive.
        #[allow(unsafe_code)]
        unsafe { result::event::record(self.event, self.context.stream_of(lane)) }
            .map_err(CudaError::driver("recording an event"))
    }

    /// The same as a step of a graph that is being recorded: it passes anew at every replay.
    pub fn record_in_graph(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: event and stream are alive; the graph's owner keeps the event.
        #[allow(unsafe_code)]
        unsafe { sys::cuEventRecordWithFlags(self.event, self.context.stream, flags) }
            .result()
            .map_err(CudaError::driver("recording an event in a graph"))
    }

    /// What is queued in the lane from now on waits for the event; the host does not.
    pub fn holds(&self, lane: Lane) -> Result<(), CudaError> {
        self.context.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive.
        #[allow(unsafe_code)]
        unsafe { result::stream::wait_event(self.context.stream_of(lane), self.event, flags) }
            .map_err(CudaError::driver("waiting for an event on the GPU"))
    }

    /// Waits here until it has passed.
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
