//! The open connections: how many there may be, and which one is closed for a new one.
//!
//! A client that only holds connections open must not keep others out. At the limit of `--max-connections`, the
//! connections that have waited longest for their client are closed: those without a request, and those with an
//! incomplete request. A connection whose request is being served is never closed for another one, so one client may
//! not take all connections: [`shares`](super::shares) sets the limit.

use super::followed_body::{RequestBody, ResponseBody, Sent};
use super::guard::Peer;
use super::shares::ConnectionShares;
use super::slot::{Clock, Closed, SERVING, Slot};
use super::stall::ReadLimits;
use crate::output::{OutputBudget, Unread};
use crate::tenant::Networks;
use axum::body::{Body, HttpBody};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// This fraction of the connections is closed at a time, so that the search costs little per connection.
const EVICTED_FRACTION: usize = 64;
/// Extra connections beyond a limit. Probes are answered on them; other requests get 503.
const EXTRA: usize = 16;

/// All open connections.
#[derive(Debug)]
pub struct OpenConnections {
    max_connections: usize,
    open: Mutex<OpenState>,
    clock: Arc<Clock>,
    output: Arc<OutputBudget>,
}

#[derive(Debug, Default)]
struct OpenState {
    slots: HashMap<u64, Arc<Slot>>,
    shares: ConnectionShares,
    extra: usize,
}

/// An open connection. Dropping it frees its place.
#[derive(Debug)]
pub struct OpenConnection {
    all: Arc<OpenConnections>,
    id: u64,
    slot: Arc<Slot>,
}

impl OpenConnections {
    /// A registry of at most `max_connections` connections. Their unread output counts in `output`.
    pub fn new(max_connections: usize, output: Arc<OutputBudget>) -> Arc<Self> {
        Arc::new(Self {
            max_connections: max_connections.max(1),
            open: Mutex::default(),
            clock: Arc::default(),
            output,
        })
    }

    /// Enters a new connection of `peer`, for which others may be closed. If all connections of the server or of the
    /// client are being served, the new one is extra; `None` if there are too many extra ones. Without a peer, only the
    /// total number counts.
    pub fn open(self: &Arc<Self>, peer: Option<Peer>) -> Option<OpenConnection> {
        self.enter(peer.map(|Peer(address)| Networks::from_address(address)), None)
    }

    fn enter(self: &Arc<Self>, networks: Option<Networks>, connection: Option<Arc<Slot>>) -> Option<OpenConnection> {
        let id = self.clock.now();
        let mut open = self.entries();
        if open.regular() >= self.max_connections {
            open.close_longest_waiting(|_| true);
        }
        let mut full = open.regular() >= self.max_connections;
        if let Some(networks) = networks
            && let Some(saturated) =
                open.shares.saturated(networks, self.max_connections.saturating_sub(open.regular()))
        {
            // Only the client's own connections are closed for it.
            full |= !open.close_longest_waiting(|slot| slot.networks.is_some_and(|networks| saturated.has(networks)));
        }
        if full && open.extra >= EXTRA {
            return None;
        }
        let slot = Arc::new(Slot::new((id, self.clock.clone()), connection, networks, full, self.output.clone()));
        open.insert(id, slot.clone());
        drop(open);
        Some(OpenConnection { all: self.clone(), id, slot })
    }

    /// Closes the connections that have waited longest, because the process ran out of file descriptors.
    pub fn close_some(&self) {
        self.entries().close_longest_waiting(|_| true);
    }

    /// Closes connections with the most unread output while memory is short. Returns their number.
    pub fn close_unread(&self) -> usize {
        let mut open = self.entries();
        let unread =
            |(id, slot): (&u64, &Arc<Slot>)| Some((*id, slot.outbox().unread())).filter(|(_, it)| it.bytes > 0);
        let (ids, unread): (Vec<u64>, Vec<Unread>) = open.slots.iter().filter_map(unread).unzip();
        let largest = self.output.settle(&unread);
        // A client that has read everything waits for the server: its response takes the events, or is refused.
        let lags = |id: &u64| open.slots.get(id).is_some_and(|slot| slot.outbox().unwritten() > 0);
        let closed: Vec<u64> = largest.into_iter().map(|place| ids[place]).filter(lags).collect();
        for slot in closed.iter().filter_map(|id| open.remove(*id)) {
            slot.close(Closed::Unread);
        }
        closed.len()
    }

    /// Closes connections that have a stream whose client reads it too slowly. Streams share a socket, so a slow reader
    /// of one stream does not stop the socket.
    pub fn close_slow(&self, limits: ReadLimits) {
        let mut open = self.entries();
        let slow: Vec<u64> =
            open.slots.iter().filter(|(_, slot)| slot.reads_slowly(limits)).map(|(id, _)| *id).collect();
        for slot in slow.iter().filter_map(|id| open.remove(*id)) {
            log::debug!("a connection is closed: its client reads a stream too slowly (--min-read-rate)");
            slot.close(Closed::Unread);
        }
    }

    fn entries(&self) -> MutexGuard<'_, OpenState> {
        // Nothing that can panic runs under the lock.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenState {
    /// Number of connections that are not extra.
    fn regular(&self) -> usize {
        self.slots.len() - self.extra
    }

    fn insert(&mut self, id: u64, slot: Arc<Slot>) {
        self.extra += usize::from(slot.is_extra);
        slot.networks.into_iter().for_each(|networks| self.shares.enter(networks));
        self.slots.insert(id, slot);
    }

    fn remove(&mut self, id: u64) -> Option<Arc<Slot>> {
        let slot = self.slots.remove(&id)?;
        self.extra -= usize::from(slot.is_extra);
        slot.networks.into_iter().for_each(|networks| self.shares.leave(networks));
        Some(slot)
    }

    /// Closes the connections that have waited longest among those that `may` be closed, at most one in
    /// [`EVICTED_FRACTION`]. Returns false if none waits.
    fn close_longest_waiting(&mut self, may: impl Fn(&Slot) -> bool) -> bool {
        let candidates = self.slots.iter().filter(|(_, slot)| may(slot));
        let all: Vec<(u64, u64)> = candidates.map(|(id, slot)| (slot.waiting_since(), *id)).collect();
        let max_count = (all.len() / EVICTED_FRACTION).max(1);
        let mut waiting: Vec<(u64, u64)> = all.into_iter().filter(|(since, _)| *since != SERVING).collect();
        let count = max_count.min(waiting.len());
        if count > 0 {
            waiting.select_nth_unstable(count - 1);
        }
        for (_, id) in &waiting[..count] {
            // The place is free immediately; the connection ends soon after.
            if let Some(slot) = self.remove(*id) {
                slot.close(Closed::Evicted);
            }
        }
        count > 0
    }
}

impl OpenConnection {
    /// True if the connection is beyond the server's or its client's limit.
    pub fn is_extra(&self) -> bool {
        self.slot.is_extra
    }

    /// Enters a stream of this connection, which counts as a connection of its own. `None` if there are too many.
    pub fn open_stream(&self) -> Option<Self> {
        let stream = self.all.enter(self.slot.networks, Some(self.slot.clone()))?;
        self.slot.begin_stream();
        Some(stream)
    }

    /// Resolves when this connection has to be closed.
    pub async fn closed(&self) -> Closed {
        self.slot.closed().await
    }

    /// State shared with the socket and the bodies of the connection.
    pub(super) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    /// Follows a request. The connection waits for its client while the body arrives, and is being served afterwards.
    pub fn receive(&self, body: Body) -> Body {
        if body.is_end_stream() {
            self.slot.serve();
            return body;
        }
        Body::new(RequestBody { body, slot: self.slot.clone() })
    }

    /// Follows a response. After it was sent, the connection waits for its client again.
    pub fn respond(&self, body: Body) -> Body {
        Body::new(ResponseBody { body, sent: Sent(self.slot.clone()) })
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.all.entries().remove(self.id);
        self.slot.end_stream();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn connections(max_connections: usize) -> Arc<OpenConnections> {
        OpenConnections::new(max_connections, Arc::new(OutputBudget::new(1 << 20)))
    }

    fn peer(address: &str) -> Option<Peer> {
        Some(Peer(address.parse().unwrap()))
    }

    fn is_closed(connection: &OpenConnection) -> bool {
        connection.closed().now_or_never().is_some()
    }

    #[tokio::test]
    async fn the_connection_that_waits_longest_makes_place() {
        let all = connections(3);
        let [served, idle, receiving] = [0; 3].map(|_| all.open(None).unwrap());
        drop(served.receive(Body::empty()));
        let _body = receiving.receive(Body::from("half"));
        let new = all.open(None).unwrap();
        assert_eq!([&served, &idle, &receiving].map(is_closed), [false, true, false]);
        let newer = all.open(None).unwrap();
        assert_eq!([&served, &receiving, &new].map(is_closed), [false, true, false]);
        drop((new.receive(Body::empty()), newer.receive(Body::empty())));
        assert!(all.open(None).unwrap().is_extra(), "all are being served");
        drop(served.respond(Body::from("done")));
        assert!(!all.open(None).unwrap().is_extra() && is_closed(&served));
    }

    #[test]
    fn closed_connections_make_place() {
        let all = connections(2);
        for _ in 0..9 {
            let [a, b] = [0; 2].map(|_| all.open(None).unwrap());
            drop([&a, &b].map(|connection| connection.receive(Body::empty())));
            assert!(!a.is_extra() && !b.is_extra());
            let extra: Vec<_> = std::iter::from_fn(|| all.open(None)).take(99).collect();
            extra.iter().for_each(|connection| drop(connection.receive(Body::empty())));
            assert!(extra.iter().all(OpenConnection::is_extra));
        }
    }

    #[test]
    fn an_address_that_is_served_on_many_connections_leaves_some_to_others() {
        let all = connections(100);
        let served = |address: &str| {
            let connection = all.open(peer(address)).unwrap();
            drop(connection.receive(Body::empty()));
            connection
        };
        let greedy: Vec<_> = (0..80).map(|_| served("10.0.0.1")).collect();
        assert_eq!(greedy.iter().filter(|connection| !connection.is_extra()).count(), 75);
        let neighbour = served("10.0.0.2");
        let network: Vec<_> = (3..20).map(|last| served(&format!("10.0.0.{last}"))).collect();
        let other = served("10.0.1.1");
        assert!(!neighbour.is_extra() && !other.is_extra(), "another address, and another network");
        assert!(network.iter().any(OpenConnection::is_extra), "the addresses of a network leave some as well");
        drop(greedy);
        assert!(!served("10.0.0.1").is_extra());
    }

    #[tokio::test]
    async fn a_flood_of_half_heads_closes_its_own_connections() {
        let all = connections(100);
        let idle = all.open(peer("10.0.1.1")).unwrap();
        let flood: Vec<_> = (0..1000).map(|_| all.open(peer("10.0.0.1")).unwrap()).collect();
        assert!(!flood.iter().any(OpenConnection::is_extra) && !is_closed(&idle));
        assert_eq!(flood.iter().filter(|connection| is_closed(connection)).count(), 1000 - 75);
    }

    #[tokio::test]
    async fn a_connection_that_leaves_too_much_unread_is_closed() {
        let all = connections(9);
        let [small, large] = [0; 2].map(|_| all.open(None).unwrap());
        small.slot().outbox().add_chunk(400 << 10);
        large.slot().outbox().add_chunk(600 << 10);
        assert_eq!(all.close_unread(), 0, "it fits");
        small.slot().outbox().add_chunk(100 << 10);
        assert_eq!(all.close_unread(), 1);
        assert_eq!(large.closed().now_or_never(), Some(Closed::Unread));
        assert!(!is_closed(&small));
    }
}
