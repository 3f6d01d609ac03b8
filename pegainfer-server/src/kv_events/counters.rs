//! What a publisher has done, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one engine's events.
#[derive(Debug, Default)]
pub struct Counters {
    batches: AtomicU64,
    missed: AtomicU64,
    restarts: [AtomicU64; Restart::ALL.len()],
}

/// Why a sequence began again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// It had as many batches as are kept.
    Full,
    /// There were more changes than the publisher could read.
    Lost,
}

impl Restart {
    /// All reasons, in the order of the counters.
    pub const ALL: [Self; 2] = [Self::Full, Self::Lost];

    /// Its name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Lost => "lost",
        }
    }
}

impl Counters {
    /// Published batches.
    pub fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Batches that a subscriber missed because it was too slow, of all subscribers together.
    pub fn missed_batches(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// Number of times that the sequence began again for this reason.
    pub fn restarts(&self, reason: Restart) -> u64 {
        self.restarts[reason as usize].load(Ordering::Relaxed)
    }

    pub(super) fn published(&self, batches: usize) {
        self.batches.fetch_add(batches as u64, Ordering::Relaxed);
    }

    pub(super) fn missed(&self, batches: u64) {
        self.missed.fetch_add(batches, Ordering::Relaxed);
    }

    pub(super) fn restarted(&self, reason: Restart) {
        self.restarts[reason as usize].fetch_add(1, Ordering::Relaxed);
    }
}
