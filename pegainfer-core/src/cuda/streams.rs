//! Streams of a GPU: the main one, on which ops run in order, and side streams for small independent ops.
//!
//! A side stream starts after the work that the main stream has when an op enters it ([`Streams::enter`]). The main
//! stream continues after all used side streams when they are joined ([`Streams::join`]). A captured graph then has
//! branches.

use super::memory::DeviceBuffer;
use super::overlap::OverlapCheck;
use super::status::error;
use crate::tensor::OpError;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use std::sync::Arc;

const OP: &str = "cuda: stream";

/// Size in bytes of the workspace that kernels share for partial results of split reductions, packed activations and
/// intermediates of an op. Launchers choose splits and passes to fit; the largest pass is the routed experts of 4,096
/// tokens of DeepSeek-V4-Flash on two GPUs. The workspace never grows, so captured graphs can hold its address.
pub const WORKSPACE_BYTES: usize = 160 << 20;

/// Number of `u32` counters for synchronisation between the blocks of a kernel. They are zero between kernels.
pub const COUNTERS: usize = 16 << 10;

/// A stream, and the memory that each op on it has exclusively.
pub(super) struct Lane {
    pub stream: Arc<CudaStream>,
    pub workspace: DeviceBuffer,
    pub counters: DeviceBuffer,
    pub overlap: OverlapCheck,
    /// True if the next kernel follows a wait for other streams and so cannot overlap earlier ones.
    pub waits: bool,
    /// Recorded on it when another stream is to wait for it.
    reached: CudaEvent,
}

/// All streams of a GPU.
pub(crate) struct Streams {
    context: Arc<CudaContext>,
    pub(super) main: Lane,
    sides: Vec<Lane>,
    /// Side streams used since the last join, by index.
    used: Vec<bool>,
    /// The side stream that ops go to now; `None`: the main one.
    current: Option<usize>,
}

impl Lane {
    fn new(context: &Arc<CudaContext>) -> Result<Self, OpError> {
        let stream = context.new_stream().map_err(error(OP))?;
        let workspace = DeviceBuffer::zeroed(context, &stream, WORKSPACE_BYTES).map_err(error("cuda: workspace"))?;
        let counters = DeviceBuffer::zeroed(context, &stream, COUNTERS * size_of::<u32>());
        let counters = counters.map_err(error("cuda: counters"))?;
        let reached = context.new_event(None).map_err(error(OP))?;
        Ok(Self { stream, workspace, counters, overlap: OverlapCheck::new(), waits: false, reached })
    }

    /// Makes later work of this stream wait for the work that `other` has now.
    fn wait_for(&mut self, other: &Self) -> Result<(), OpError> {
        other.reached.record(&other.stream).map_err(error(OP))?;
        self.stream.wait(&other.reached).map_err(error(OP))?;
        self.waits = true;
        Ok(())
    }
}

impl Streams {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, OpError> {
        let (context, main) = (context.clone(), Lane::new(context)?);
        Ok(Self { context, main, sides: Vec::new(), used: Vec::new(), current: None })
    }

    /// The stream that ops go to.
    pub(super) fn current(&self) -> &Lane {
        self.current.map_or(&self.main, |side| &self.sides[side])
    }

    pub(super) fn current_mut(&mut self) -> &mut Lane {
        match self.current {
            Some(side) => &mut self.sides[side],
            None => &mut self.main,
        }
    }

    /// All streams.
    pub(super) fn all(&self) -> impl Iterator<Item = &Lane> {
        std::iter::once(&self.main).chain(&self.sides)
    }

    /// Creates side streams until there are `count`, each with its own workspace. Not allowed during graph capture.
    pub fn open(&mut self, count: usize) -> Result<(), OpError> {
        self.context.bind_to_thread().map_err(error(OP))?;
        while self.sides.len() < count {
            let lane = Lane::new(&self.context)?;
            lane.stream.synchronize().map_err(error(OP))?;
            self.sides.push(lane);
            self.used.push(false);
        }
        Ok(())
    }

    /// Sends ops to side stream `side` until [`leave`](Self::leave), after the current work of the main stream. Returns
    /// false and changes nothing if that stream is not open.
    pub fn enter(&mut self, side: usize) -> Result<bool, OpError> {
        assert!(self.current.is_none(), "a side stream of a side stream");
        let Some(lane) = self.sides.get_mut(side) else { return Ok(false) };
        lane.wait_for(&self.main)?;
        self.used[side] = true;
        self.current = Some(side);
        Ok(true)
    }

    /// Sends ops to the main stream again.
    pub fn leave(&mut self) {
        self.current = None;
    }

    /// Makes later work of the main stream wait for the side streams.
    pub fn join(&mut self) -> Result<(), OpError> {
        let Self { main, sides, used, .. } = self;
        let mut in_use = sides.iter().zip(used).filter_map(|(side, used)| std::mem::take(used).then_some(side));
        in_use.try_for_each(|side| main.wait_for(side))
    }
}
