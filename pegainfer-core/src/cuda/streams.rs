//! Streams of a GPU: the main one, on which ops run in order, and side streams for small independent ops.
//!
//! Streams for copies run beside the steps; nothing waits for them but the host.
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
    /// Streams of copies beside the steps.
    copies: Vec<Lane>,
    current: Current,
}

/// The stream that ops go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Current {
    Main,
    Side(usize),
    Copy(usize),
}

impl Lane {
    fn new(context: &Arc<CudaContext>, workspace: usize) -> Result<Self, OpError> {
        let stream = context.new_stream().map_err(error(OP))?;
        let workspace = DeviceBuffer::zeroed(context, &stream, workspace).map_err(error("cuda: workspace"))?;
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
        let (context, main) = (context.clone(), Lane::new(context, WORKSPACE_BYTES)?);
        let (sides, used, copies) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { context, main, sides, used, copies, current: Current::Main })
    }

    /// The stream that ops go to.
    pub(super) fn current(&self) -> &Lane {
        match self.current {
            Current::Main => &self.main,
            Current::Side(side) => &self.sides[side],
            Current::Copy(copy) => &self.copies[copy],
        }
    }

    pub(super) fn current_mut(&mut self) -> &mut Lane {
        match self.current {
            Current::Main => &mut self.main,
            Current::Side(side) => &mut self.sides[side],
            Current::Copy(copy) => &mut self.copies[copy],
        }
    }

    /// All streams.
    pub(super) fn all(&self) -> impl Iterator<Item = &Lane> {
        std::iter::once(&self.main).chain(&self.sides).chain(&self.copies)
    }

    /// Creates side streams until there are `count`, each with its own workspace. Not allowed during graph capture.
    pub fn open(&mut self, count: usize) -> Result<(), OpError> {
        self.context.bind_to_thread().map_err(error(OP))?;
        while self.sides.len() < count {
            let lane = Lane::new(&self.context, WORKSPACE_BYTES)?;
            lane.stream.synchronize().map_err(error(OP))?;
            self.sides.push(lane);
            self.used.push(false);
        }
        Ok(())
    }

    /// Sends ops to side stream `side` until [`leave`](Self::leave), after the current work of the main stream. Returns
    /// false and changes nothing if that stream is not open.
    pub fn enter(&mut self, side: usize) -> Result<bool, OpError> {
        assert!(self.current == Current::Main, "a side stream of a side stream");
        let Some(lane) = self.sides.get_mut(side) else { return Ok(false) };
        lane.wait_for(&self.main)?;
        self.used[side] = true;
        self.current = Current::Side(side);
        Ok(true)
    }

    /// Sends ops to the main stream again.
    pub fn leave(&mut self) {
        self.current = Current::Main;
    }

    /// Creates streams for copies until there are `count`, whose ops have no workspace.
    pub fn open_copies(&mut self, count: usize) -> Result<(), OpError> {
        self.context.bind_to_thread().map_err(error(OP))?;
        while self.copies.len() < count {
            self.copies.push(Lane::new(&self.context, 0)?);
        }
        Ok(())
    }

    /// Makes later work of the streams for copies wait for the work that the main stream has now.
    pub fn start_copies(&mut self) -> Result<(), OpError> {
        let Self { main, copies, .. } = self;
        copies.iter_mut().try_for_each(|copy| copy.wait_for(main))
    }

    /// Sends ops to this stream for copies until [`leave`](Self::leave).
    pub fn enter_copies(&mut self, copy: usize) {
        assert!(
            self.current == Current::Main && copy < self.copies.len(),
            "no stream for copies, or one within another"
        );
        self.current = Current::Copy(copy);
    }

    /// The streams for copies.
    pub(super) fn copies(&self) -> impl Iterator<Item = &CudaStream> {
        self.copies.iter().map(|lane| &*lane.stream)
    }

    /// Makes later work of the main stream wait for the side streams.
    pub fn join(&mut self) -> Result<(), OpError> {
        let Self { main, sides, used, .. } = self;
        let mut in_use = sides.iter().zip(used).filter_map(|(side, used)| std::mem::take(used).then_some(side));
        in_use.try_for_each(|side| main.wait_for(side))
    }
}
