//! Waiting for any of several masks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Counts the masks that became ready, or failed, of all trackers that share it, and wakes who waits for the next one.
#[derive(Debug, Default)]
pub struct MaskSignal {
    ended: Mutex<u64>,
    changed: Condvar,
}

impl MaskSignal {
    /// Computations that have ended so far.
    pub fn ended(&self) -> u64 {
        *self.lock()
    }

    /// Waits until more than `seen` computations have ended, at most `limit`.
    pub fn wait(&self, seen: u64, limit: Duration) {
        // Poisoned or not, the caller looks at the masks again.
        let _ = self.changed.wait_timeout_while(self.lock(), limit, |ended| *ended <= seen);
    }

    /// A computation has ended.
    pub(super) fn notify(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        // A number cannot be half-written.
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
