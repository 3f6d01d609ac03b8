//! Waits at exit, up to a limit, for a writer thread: its disk may hang.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Delay between two attempts to queue the request.
const PAUSE: Duration = Duration::from_millis(5);

/// Asks the thread that reads `queue` to write everything, with a message that carries the channel for its report.
/// Returns true if the report arrived within `limit`. The queue may be full while the disk hangs.
pub fn flush<M>(queue: &SyncSender<M>, message: impl FnOnce(SyncSender<()>) -> M, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    let (done, written) = sync_channel(1);
    let mut message = message(done);
    loop {
        message = match queue.try_send(message) {
            Ok(()) => break,
            Err(TrySendError::Disconnected(_)) => return false,
            Err(TrySendError::Full(message)) if Instant::now() < deadline => message,
            Err(TrySendError::Full(_)) => return false,
        };
        std::thread::sleep(PAUSE);
    }
    written.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hangs_is_waited_for_no_longer_than_the_limit() {
        let limit = Duration::from_millis(50);
        // The queue is full, or has one free place, and nobody reads it.
        for free in [0, 1] {
            let (queue, unread) = sync_channel(1 + free);
            queue.send(None).unwrap();
            let started = Instant::now();
            assert!(!flush(&queue, Some, limit));
            assert!(started.elapsed() >= limit && started.elapsed() < Duration::from_secs(10));
            drop(unread);
            assert!(!flush(&queue, Some, Duration::from_secs(60)), "nobody will ever read it");
        }
    }

    #[test]
    fn a_full_queue_is_waited_for() {
        let (queue, messages) = sync_channel(1);
        queue.send(None).unwrap();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(4 * PAUSE);
            messages.iter().flatten().for_each(|done: SyncSender<()>| done.send(()).unwrap());
        });
        assert!(flush(&queue, Some, Duration::from_secs(10)));
        drop(queue);
        thread.join().unwrap();
    }
}
