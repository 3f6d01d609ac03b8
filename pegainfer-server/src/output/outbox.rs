//! Unread output of one connection.

use super::Unread;
use crate::tenant::Tenant;
use pegainfer_core::engine::Backlog;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Unread output of a connection, and an extension of each request.
#[derive(Debug, Default)]
pub struct Outbox {
    /// True if several responses share the socket: their bytes leave the queues of HTTP/2 before they are written.
    is_shared: bool,
    /// Bytes of bodies that the connection was given and the socket has not written.
    unwritten: AtomicU64,
    /// Bytes that the socket has written since the connection began.
    written: AtomicU64,
    response: Mutex<Current>,
    /// Notified when the connection has to find out whether the client is still there.
    probe: Notify,
}

/// The response that is being sent.
#[derive(Debug, Default)]
struct Current {
    tenant: Tenant,
    /// Events of its choices that the response has not taken.
    backlogs: Vec<Arc<Backlog>>,
}

impl Outbox {
    /// The outbox of a socket that several responses share. [`unqueue`](Self::unqueue) counts the bytes that leave.
    pub fn shared() -> Self {
        Self { is_shared: true, ..Self::default() }
    }

    /// Begins a request of `tenant`.
    pub fn begin(&self, tenant: Tenant) {
        *self.current() = Current { tenant, backlogs: Vec::new() };
    }

    /// Counts the events of a choice.
    pub fn watch(&self, backlog: Arc<Backlog>) {
        self.current().backlogs.push(backlog);
    }

    /// Ends the response, after it was handed over or dropped.
    pub fn end(&self) {
        self.current().backlogs = Vec::new();
    }

    /// Counts bytes that the connection was given to send.
    pub fn add_chunk(&self, bytes: usize) {
        self.unwritten.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts bytes that the socket has written. Heads and framing are included, so the count stops at 0: a body
    /// follows its head.
    pub fn wrote(&self, bytes: usize) {
        self.written.fetch_add(bytes as u64, Ordering::Relaxed);
        if !self.is_shared {
            self.unqueue(bytes);
        }
    }

    /// Counts bytes that do not wait any more.
    pub fn unqueue(&self, bytes: usize) {
        let less = |unwritten: u64| Some(unwritten.saturating_sub(bytes as u64));
        // The closure gives a value each time, so this cannot fail.
        let _ = self.unwritten.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Asks the response to send something soon, so that the connection finds out whether the client is still there.
    pub fn probe(&self) {
        self.probe.notify_one();
    }

    /// Resolves when the response has to send something.
    pub async fn probed(&self) {
        self.probe.notified().await;
    }

    /// Bytes that the socket has written so far.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Bytes that the connection was given to send and the socket has not written.
    pub fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }

    /// Unread output now.
    pub fn unread(&self) -> Unread {
        let current = self.current();
        let queued: usize = current.backlogs.iter().map(|backlog| backlog.bytes()).sum();
        Unread { tenant: current.tenant, bytes: self.unwritten() + queued as u64 }
    }

    /// Tenant and events of the response that is being sent.
    pub fn tenant(&self) -> Tenant {
        self.current().tenant
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        // Nothing that can panic runs under the lock.
        self.response.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_do_not_wait() {
        let outbox = Outbox::default();
        outbox.wrote(100);
        outbox.add_chunk(1000);
        outbox.wrote(300);
        assert_eq!((outbox.unread().bytes, outbox.written()), (700, 400), "the head came before the body");
        outbox.wrote(701);
        assert_eq!(outbox.unread().bytes, 0);
        let tenant = Tenant { id: 7, has_key: true };
        outbox.begin(tenant);
        outbox.add_chunk(5);
        assert_eq!(outbox.unread(), Unread { tenant, bytes: 5 });
    }
}
