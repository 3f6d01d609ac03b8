//! Launches recorded once and replayed as one.

use super::{Cuda, error};
use crate::tensor::OpError;
use cudarc::driver::{CudaContext, result, sys};
use std::fmt;
use std::sync::Arc;

/// A captured sequence of launches, with the addresses and arguments of the capture: a replay reads and writes the same
/// tensors with their current contents.
pub struct Graph {
    context: Arc<CudaContext>,
    exec: sys::CUgraphExec,
}

// SAFETY: the handle is the driver's, valid on every thread that has the context bound.
unsafe impl Send for Graph {}

impl Cuda {
    /// Records launches instead of running them until [`end_capture`](Self::end_capture).
    pub(crate) fn begin_capture(&mut self) -> Result<(), OpError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not capturing: `end_capture` follows every `begin_capture`.
        unsafe { result::stream::begin_capture(self.streams.main.stream.cu_stream(), mode) }
            .map_err(error("graph: capture"))
    }

    /// Builds a graph of the launches since [`begin_capture`](Self::begin_capture); always ends the capture.
    pub(crate) fn end_capture(&mut self) -> Result<Graph, OpError> {
        // SAFETY: the stream is alive and capturing.
        let graph = unsafe { result::stream::end_capture(self.streams.main.stream.cu_stream()) }
            .map_err(error("graph: capture"))?;
        // SAFETY: the graph is valid; the executable one does not refer to it.
        let made = unsafe {
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            result::graph::destroy(graph).and(made)
        };
        let exec = made.map_err(error("graph: instantiate"))?;
        Ok(Graph { context: self.context.clone(), exec })
    }

    /// Runs a graph after all earlier launches.
    pub(crate) fn replay(&mut self, graph: &Graph) -> Result<(), OpError> {
        self.completes_pending();
        // SAFETY: graph and stream are alive.
        unsafe { result::graph::launch(graph.exec, self.streams.main.stream.cu_stream()) }
            .map_err(error("graph: launch"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handle came from `instantiate` and is destroyed once.
        let freed = self.context.bind_to_thread().and_then(|()| unsafe { result::graph::exec_destroy(self.exec) });
        if let Err(error) = freed {
            log::debug!("a graph was not freed: {error}");
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}
