//! Waiting for any of several masks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Counts the computations of all sharing trackers that ended with a mask or a failure, and wakes waiting threads.
#[derive(Debug, Default)]
pub struct MaskSignal {
    ended: Mutex<u64>,
    changed: Condvar,
}

impl MaskSignal {
    /// Number of computations that have ended.
    pub fn ended(&self) -> u64 {
        *self.lock()
    }

    /// Waits until more than `seen` computations have ended, for at most `limit`.
    pub fn wait(&self, seen: u64, limit: Duration) {
        // Even if poisoned, the caller reads the masks again.
        let _ = self.changed.wait_timeout_while(self.lock(), limit, |ended| *ended <= seen);
    }

    /// Records that a computation has ended.
    pub(super) fn notify(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        // A number cannot be half-written.
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
