//! CUDA graphs: launches captured once and replayed, with no host work between two kernels.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::{Context, CudaError, Device};

/// Recorded launches, in order.
pub struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver's handle may be used from any thread that has made the context current.
#[allow(unsafe_code)]
unsafe impl Send for Graph {}

impl Device {
    /// Records what `work` launches, instead of running it. A dependent launch stays dependent in the graph. Nothing may
    /// be allocated, copied or waited for meanwhile: the driver refuses it.
    pub fn record(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        self.context.enter()?;
        let recording = || CudaError::driver("recording a graph");
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the context; the recording is ended whatever `work` says, since a stream that
        // records runs nothing.
        #[allow(unsafe_code)]
        let (outcome, ended) = unsafe {
            result::stream::begin_capture(self.context.stream, mode).map_err(recording())?;
            let outcome = work();
            (outcome, result::stream::end_capture(self.context.stream))
        };
        // A failed launch also breaks the recording; the launch's error says more.
        outcome?;
        let graph = ended.map_err(recording())?;
        // SAFETY: the graph was recorded just now; the executable does not need it any more.
        #[allow(unsafe_code)]
        let executable = unsafe {
            let executable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).map_err(recording());
            let _ = result::graph::destroy(graph);
            executable?
        };
        Ok(Graph { context: Arc::clone(&self.context), executable })
    }
}

impl Graph {
    /// Queues all of it; it runs after what was queued before.
    ///
    /// # Safety
    /// The buffers and functions of the recorded launches must still be alive when it runs, and what
    /// [`Function::launch`](super::Function::launch) asks for must hold for each.
    #[allow(unsafe_code)]
    pub unsafe fn replay(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: executable and stream are alive; the caller's promise covers what it runs.
        unsafe { result::graph::launch(self.executable, self.context.stream) }
            .map_err(CudaError::driver("replaying a graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: instantiated by us, destroyed once; the driver keeps what is still running.
            #[allow(unsafe_code)]
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}
