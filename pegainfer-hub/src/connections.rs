//! The connections of one download, shared by its files and their segments.

use std::sync::{Condvar, Mutex, PoisonError};

/// Maximum number of connections of one model. One connection to the hub gets 20 to 100 MB/s.
pub(super) const CONNECTIONS: usize = 8;

/// The connections that are not in use.
pub(super) struct Connections {
    free: Mutex<usize>,
    returned: Condvar,
}

impl Default for Connections {
    fn default() -> Self {
        Self { free: Mutex::new(CONNECTIONS), returned: Condvar::new() }
    }
}

/// A connection in use; free again when dropped.
pub(super) struct Connection<'a>(&'a Connections);

impl Connections {
    /// Waits for a free connection.
    pub(super) fn take(&self) -> Connection<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = self.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        Connection(self)
    }
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn no_more_connections_are_in_use_than_there_are() {
        let (connections, used, most) = (Connections::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 * CONNECTIONS {
                scope.spawn(|| {
                    let _connection = connections.take();
                    most.fetch_max(used.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    used.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert!(most.into_inner() <= CONNECTIONS);
        assert_eq!(connections.free.into_inner().unwrap(), CONNECTIONS);
    }
}
