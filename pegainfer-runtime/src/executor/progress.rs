//! How far a transfer is.

use pegainfer_core::kv::disk::SlotKind;
use pegainfer_core::kv::tiers::{BlockCopy, Transfer, TransferDone};
use pegainfer_core::tensor::OpError;
use std::time::{Duration, Instant};

/// A transfer, and what is done of it.
#[derive(Debug)]
pub(super) struct Progress {
    pub transfer: Transfer,
    /// Number of blocks that were copied; with a disk, number of blocks and states that it has to copy.
    pub begun: usize,
    /// When its first block was copied.
    pub since: Option<Instant>,
}

impl Progress {
    pub fn new(transfer: Transfer) -> Self {
        Self { transfer, begun: 0, since: None }
    }

    /// The end of the transfer by an error.
    pub fn failed(&self, error: &OpError) -> TransferDone {
        let took = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        TransferDone { id: self.transfer.id, result: Err(error.to_string()), took }
    }

    /// Number of blocks and states.
    pub fn all(&self) -> usize {
        self.transfer.blocks.len() + self.transfer.states.len()
    }

    /// The next one that a disk has to copy, if any is left.
    pub fn next(&self) -> Option<(SlotKind, BlockCopy)> {
        let kind = if self.begun < self.transfer.blocks.len() { SlotKind::Block } else { SlotKind::State };
        Some((kind, self.transfer.copy(self.begun)?))
    }
}
