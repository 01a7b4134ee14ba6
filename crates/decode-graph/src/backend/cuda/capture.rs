//! Capture that always ends, and the graph that comes out of it.

use std::sync::Arc;

use cust::sys::{CUgraph, CUgraphExec};
use gpu_slab::cuda::{CudaAllocation, CudaStream, DriverError};

use super::driver::{self, NODE_KERNEL, call};
use super::modules::Modules;

/// Which calls of the process a capture forbids while it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Calls that could disturb a capture fail in every thread.
    Global = 0,
    /// In this thread only.
    #[default]
    ThreadLocal = 1,
    /// In none.
    Relaxed = 2,
}

/// A stream that is being captured. Dropping it ends the capture and throws away what was
/// recorded, so the stream can be used again after an error and after a panic.
struct Capture<'a> {
    stream: &'a CudaStream,
    running: bool,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a CudaStream, mode: CaptureMode) -> Result<Self, DriverError> {
        // SAFETY: the stream is alive.
        unsafe { call!(cuStreamBeginCapture_v2(stream.as_raw(), mode as i32)) }?;
        Ok(Self { stream, running: true })
    }

    fn end(mut self) -> Result<Recorded, DriverError> {
        self.running = false;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is being captured by this thread; the driver writes one handle.
        let ended = unsafe { call!(cuStreamEndCapture(self.stream.as_raw(), &mut graph)) };
        let recorded = Recorded(graph);
        ended.map(|()| recorded)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.running {
            let mut graph = std::ptr::null_mut();
            // SAFETY: as in `end`. A capture that was disturbed ends with an error and no graph.
            let _ = unsafe { driver::cuStreamEndCapture(self.stream.as_raw(), &mut graph) };
            drop(Recorded(graph));
        }
    }
}

/// A graph that was recorded and cannot run yet.
struct Recorded(CUgraph);

impl Recorded {
    /// How many of its nodes are kernels.
    fn kernel_nodes(&self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: the graph is alive; without a place for nodes the driver writes their number.
        unsafe { call!(cuGraphGetNodes(self.0, std::ptr::null_mut(), &mut count)) }?;
        let mut nodes = vec![std::ptr::null_mut(); count];
        // SAFETY: there is room for as many nodes as `count` says.
        unsafe { call!(cuGraphGetNodes(self.0, nodes.as_mut_ptr(), &mut count)) }?;
        nodes.truncate(count);
        let mut kernels = 0;
        for node in nodes {
            let mut kind = -1;
            // SAFETY: the node is the graph's; the driver writes one number.
            unsafe { call!(cuGraphNodeGetType(node, &mut kind)) }?;
            kernels += usize::from(kind == NODE_KERNEL);
        }
        Ok(kernels)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: ended by a capture; an executable does not need its graph.
            let _ = unsafe { driver::cuGraphDestroy(self.0) };
        }
    }
}

/// A captured graph, on the device and ready to run.
///
/// It keeps the kernels and the memory that it points at alive, and is destroyed before them.
pub struct CudaGraph {
    raw: CUgraphExec,
    kernel_nodes: usize,
    allocation: CudaAllocation,
    stream: CudaStream,
    _modules: Arc<Modules>,
}

// SAFETY: the handle may be used from any thread by one at a time, as `&mut` makes sure.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// Captures what `record` queues on the stream.
    pub(super) fn capture<E: From<DriverError>>(
        stream: &CudaStream,
        mode: CaptureMode,
        allocation: CudaAllocation,
        modules: Arc<Modules>,
        record: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let capture = Capture::begin(stream, mode)?;
        record()?;
        let recorded = capture.end()?;
        let kernel_nodes = recorded.kernel_nodes()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is alive; the driver writes one handle.
        unsafe { call!(cuGraphInstantiateWithFlags(&mut raw, recorded.0, 0)) }?;
        let stream = stream.clone();
        let graph = Self { raw, kernel_nodes, allocation, stream, _modules: modules };
        // SAFETY: graph and stream are alive and of one context.
        unsafe { call!(cuGraphUpload(graph.raw, graph.stream.as_raw())) }?;
        Ok(graph)
    }

    /// Kernel nodes, as the driver counts them.
    pub fn kernel_nodes(&self) -> usize {
        self.kernel_nodes
    }

    /// Whether it was captured over this memory.
    pub(super) fn is_over(&self, allocation: &CudaAllocation) -> bool {
        self.allocation.is(allocation)
    }

    /// Queues one run on the stream that it was captured on.
    pub(super) fn launch(&mut self) -> Result<(), DriverError> {
        let context = self.stream.context();
        context.make_current()?;
        context.count_launch();
        // SAFETY: graph and stream are alive, and so is all that the graph points at.
        unsafe { call!(cuGraphLaunch(self.raw, self.stream.as_raw())) }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // It may still be running. Errors are those of that run, or of a driver shutting down.
        let _ = self.stream.synchronize();
        if self.stream.context().make_current().is_ok() {
            // SAFETY: instantiated by `capture`, launched by nobody any more.
            let _ = unsafe { driver::cuGraphExecDestroy(self.raw) };
        }
    }
}
