//! How far a transfer is.

use pegainfer_core::kv::tiers::Transfer;
use std::time::Instant;

/// A transfer, and what is done of it.
#[derive(Debug)]
pub(super) struct Progress {
    pub transfer: Transfer,
    /// Number of blocks that were copied, or that the disk has to copy.
    pub begun: usize,
    pub checksums: Vec<u64>,
    /// When its first block was copied.
    pub since: Option<Instant>,
}

impl Progress {
    pub fn new(transfer: Transfer) -> Self {
        Self { transfer, begun: 0, checksums: Vec::new(), since: None }
    }

    /// True if no block is left to begin with.
    pub fn is_begun(&self) -> bool {
        self.begun == self.transfer.blocks.len()
    }
}
