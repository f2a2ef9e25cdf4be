//! CUDA graphs: launches added one by one, each with the launches it waits for, and replayed with no host work between
//! two kernels.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::{Context, CudaError, Device};
use super::launch::{Argument, Function, Launch, Stored};
use super::streams::Event;

/// A graph under construction.
pub struct GraphBuilder {
    context: Arc<Context>,
    graph: sys::CUgraph,
}

/// A launch or an event in a graph that is being built; good for that graph alone.
#[derive(Clone, Copy)]
pub struct Node(sys::CUgraphNode);

impl Device {
    /// A graph of nothing.
    pub fn graph(&self) -> Result<GraphBuilder, CudaError> {
        self.context.enter()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes one handle, which the builder destroys.
        #[allow(unsafe_code)]
        unsafe { sys::cuGraphCreate(&mut graph, 0) }.result().map_err(CudaError::driver("creating a graph"))?;
        Ok(GraphBuilder { context: Arc::clone(&self.context), graph })
    }
}

impl GraphBuilder {
    /// Adds a launch that runs after those it names. A dependent launch may start before they end: its edges are
    /// programmatic, and its kernel waits itself.
    pub fn launch(
        &mut self,
        function: &Function,
        launch: Launch,
        arguments: &[Argument<'_>],
        after: &[Node],
    ) -> Result<Node, CudaError> {
        self.context.enter()?;
        let adding = || CudaError::driver(format!("adding kernel {} to a graph", function.name));
        let mut stored = function.stored(arguments)?;
        // Little-endian on every machine CUDA runs on: the low bytes of a word are the narrower argument.
        let mut pointers: Vec<_> = stored.iter_mut().map(|stored| (stored as *mut Stored).cast()).collect();
        let parameters = sys::CUDA_KERNEL_NODE_PARAMS {
            func: function.function,
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: function.shared,
            kernelParams: pointers.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        let mut node = std::ptr::null_mut();
        // SAFETY: the graph is ours; the driver copies parameters and arguments, of which there are as many as the
        // kernel has.
        #[allow(unsafe_code)]
        unsafe { sys::cuGraphAddKernelNode_v2(&mut node, self.graph, std::ptr::null(), 0, &parameters) }
            .result()
            .map_err(adding())?;
        let edge = match launch.dependent {
            true => sys::CUgraphEdgeData {
                // It activates once all blocks have triggered their dependents or ended.
                from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
                to_port: 0,
                type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
                reserved: [0; 5],
            },
            false => sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] },
        };
        let from: Vec<sys::CUgraphNode> = after.iter().map(|node| node.0).collect();
        let (to, edges) = (vec![node; from.len()], vec![edge; from.len()]);
        // SAFETY: all nodes are of this graph, and the three lists are equally long.
        #[allow(unsafe_code)]
        unsafe { sys::cuGraphAddDependencies_v2(self.graph, from.as_ptr(), to.as_ptr(), edges.as_ptr(), from.len()) }
            .result()
            .map_err(adding())?;
        Ok(Node(node))
    }

    /// Adds an event that passes, anew at every replay, once what it names has ended.
    pub fn event(&mut self, event: &Event, after: &[Node]) -> Result<Node, CudaError> {
        self.context.enter()?;
        let from: Vec<sys::CUgraphNode> = after.iter().map(|node| node.0).collect();
        let mut node = std::ptr::null_mut();
        // SAFETY: the nodes are of this graph; who replays it keeps the event.
        #[allow(unsafe_code)]
        unsafe { sys::cuGraphAddEventRecordNode(&mut node, self.graph, from.as_ptr(), from.len(), event.event) }
            .result()
            .map_err(CudaError::driver("adding an event to a graph"))?;
        Ok(Node(node))
    }

    /// The graph, on the device and ready to run.
    pub fn finish(self) -> Result<Graph, CudaError> {
        self.context.enter()?;
        // SAFETY: the graph is ours and complete; the executable does not need it any more.
        #[allow(unsafe_code)]
        let executable = unsafe { result::graph::instantiate(self.graph, sys::CUgraphInstantiate_flags(0)) }
            .map_err(CudaError::driver("instantiating a graph"))?;
        let graph = Graph { context: Arc::clone(&self.context), executable };
        // SAFETY: executable and stream are alive.
        #[allow(unsafe_code)]
        unsafe { sys::cuGraphUpload(executable, self.context.stream) }
            .result()
            .map_err(CudaError::driver("uploading a graph"))?;
        Ok(graph)
    }
}

impl Drop for GraphBuilder {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by us, destroyed once.
            #[allow(unsafe_code)]
            let _ = unsafe { result::graph::destroy(self.graph) };
        }
    }
}

/// Launches that are replayed as one.
pub struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver's handle may be used from any thread that has made the context current.
#[allow(unsafe_code)]
unsafe impl Send for Graph {}

impl Graph {
    /// Queues all of it; it runs after what was queued before.
    ///
    /// # Safety
    /// The buffers, functions and events of what was added must still be alive when it runs, what
    /// [`Function::launch`] asks for must hold for each launch, and no two that touch the same memory may run at once.
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
