//! Copies of blocks and states between the device, the host and a disk.

use crate::kv::disk::SlotHeader;
use std::time::Duration;

/// Number of a transfer, never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From blocks of the device to slots of the host.
    Store,
    /// From slots of the host to blocks of the device.
    Load,
    /// From slots of the host to slots of the disk.
    Write,
    /// From slots of the disk to slots of the host.
    Read,
    /// Nowhere: slots of the disk are emptied, so that the next start does not find their blocks.
    Erase,
}

/// One block of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Block or state of the device, or slot of the disk.
    pub block: u32,
    /// Slot of the host.
    pub slot: u32,
}

/// Blocks to be copied. Nobody else writes the source or touches the target until it is done, except that steps in
/// flight may read a slot for a state that is loaded: that copy comes after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Number.
    pub id: TransferId,
    /// Which way.
    pub direction: Direction,
    /// The blocks.
    pub blocks: Vec<BlockCopy>,
    /// States, whose slots of the device, the host and the disk have numbers of their own. A transfer that writes or
    /// erases has either blocks or states.
    pub states: Vec<BlockCopy>,
    /// Headers of the blocks or states if they are written to a disk.
    pub headers: Vec<SlotHeader>,
}

impl Transfer {
    /// A transfer of blocks, without a number.
    pub(super) fn new(direction: Direction, blocks: Vec<BlockCopy>) -> Self {
        Self { id: TransferId(u64::MAX), direction, blocks, states: Vec::new(), headers: Vec::new() }
    }

    /// The copy with this number: blocks come first, then states.
    pub fn copy(&self, number: usize) -> Option<BlockCopy> {
        self.blocks.iter().chain(&self.states).nth(number).copied()
    }
}

/// The end of a transfer.
#[derive(Debug, Clone)]
pub struct TransferDone {
    /// Its number.
    pub id: TransferId,
    /// Checksum of the bytes of each block, and then of each state, as they were copied from or to the device, or why
    /// nothing can be said of any of them.
    pub result: Result<Vec<u64>, String>,
    /// Time from the start of the copy.
    pub took: Duration,
}
