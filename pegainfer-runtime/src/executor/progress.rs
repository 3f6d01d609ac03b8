//! How far a transfer is.

use pegainfer_core::kv::tiers::{Transfer, TransferDone};
use pegainfer_core::tensor::OpError;
use std::time::{Duration, Instant};

/// A transfer, and what is done of it.
#[derive(Debug)]
pub(super) struct Progress {
    pub transfer: Transfer,
    /// Number of blocks that were copied, or that the disk has to copy.
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

    /// True if no block is left to begin with.
    pub fn is_begun(&self) -> bool {
        self.begun == self.transfer.blocks.len()
    }
}
