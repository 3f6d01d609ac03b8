//! The sockets of a publisher: one for subscribers, one for those who ask for earlier batches.

use super::counters::Counters;
use super::outbox::{Next, Outbox};
use crate::zmtp::{Connection, Endpoint, Incoming, Role};
use std::io::{ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{sleep, timeout};

/// Maximum number of connections of one socket.
const MAX_CONNECTIONS: usize = 64;
/// Maximum number of subscriptions of one subscriber.
const MAX_SUBSCRIPTIONS: usize = 64;
/// A silent connection is tested at this interval.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum time to connect to a subscriber that listens.
const CONNECT: Duration = Duration::from_secs(5);
/// First and last pause between attempts to connect.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// Answer to a request for earlier batches: there are no more.
const END: [u8; 8] = [0xff; 8];

/// What the sockets of an engine's events share. Clones are handles.
#[derive(Clone)]
pub(super) struct Shared {
    outbox: Arc<Mutex<Outbox>>,
    /// Changes when a batch is added, and becomes true before the publisher ends.
    pub changed: watch::Sender<bool>,
    pub counters: Arc<Counters>,
    pub topic: Arc<str>,
    /// Dropped by each connection when it has sent everything.
    _sending: mpsc::Sender<()>,
}

impl Shared {
    pub fn new(outbox: Outbox, counters: Arc<Counters>, topic: &str) -> (Self, mpsc::Receiver<()>) {
        let (_sending, all_sent) = mpsc::channel(1);
        let outbox = Arc::new(Mutex::new(outbox));
        (Self { outbox, changed: watch::Sender::new(false), counters, topic: topic.into(), _sending }, all_sent)
    }

    /// The batches. Nothing waits while they are locked.
    pub fn outbox(&self) -> MutexGuard<'_, Outbox> {
        // Nothing that can panic runs under the lock.
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Accepts connections, and serves each of them with `serve`.
pub(super) async fn accept<F: Future<Output = Result<()>> + Send + 'static>(
    listener: TcpListener,
    role: Role,
    serve: impl Fn(Connection) -> F + Clone + Send + Sync + 'static,
) {
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                log::warn!("KV events: no connection can be accepted: {error}");
                sleep(PAUSES[1]).await;
                continue;
            }
        };
        let Ok(permit) = free.clone().try_acquire_owned() else {
            log::warn!("KV events: a connection is closed, because there are {MAX_CONNECTIONS}");
            continue;
        };
        let serve = serve.clone();
        tokio::spawn(async move {
            let served = match Connection::open(stream, role).await {
                Ok(connection) => serve(connection).await,
                Err(error) => Err(error),
            };
            log_end(served);
            drop(permit);
        });
    }
}

/// Connects to a subscriber that listens, again and again until the publisher ends.
pub(super) async fn connect(endpoint: Endpoint, shared: Shared) {
    let (mut changed, mut pause, mut is_told) = (shared.changed.subscribe(), PAUSES[0], false);
    loop {
        let opened = async { Connection::open(TcpStream::connect(endpoint.target()).await?, Role::Publisher).await };
        let opened = tokio::select! {
            () = closing(&mut changed) => return,
            opened = timeout(CONNECT, opened) => opened.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())),
        };
        match opened {
            Ok(connection) => {
                log::info!("KV events: connected to {endpoint}");
                (pause, is_told) = (PAUSES[0], false);
                log_end(subscriber(connection, shared.clone()).await);
            }
            Err(error) if !is_told => {
                is_told = true;
                log::warn!("KV events: {endpoint} cannot be reached, trying again: {error}");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = closing(&mut changed) => return,
            () = sleep(pause) => pause = (2 * pause).min(PAUSES[1]),
        }
    }
}

fn log_end(served: Result<()>) {
    if let Err(error) = served {
        log::debug!("KV events: a connection has ended: {error}");
    }
}

/// Sends a subscriber what it subscribed to, from then on.
pub(super) async fn subscriber(mut connection: Connection, shared: Shared) -> Result<()> {
    let (mut changed, mut topics) = (shared.changed.subscribe(), Vec::<Vec<u8>>::new());
    let mut place = None;
    loop {
        tokio::select! {
            incoming = connection.receive() => {
                match incoming? {
                    Incoming::Subscribe(topic) if topics.len() < MAX_SUBSCRIPTIONS => topics.push(topic),
                    Incoming::Subscribe(_) => {
                        log::warn!("KV events: a subscriber is disconnected after {MAX_SUBSCRIPTIONS} subscriptions");
                        return Ok(());
                    }
                    Incoming::Cancel(topic) => {
                        if let Some(at) = topics.iter().position(|own| *own == topic) {
                            topics.swap_remove(at);
                        }
                    }
                    Incoming::Ping(context) => connection.pong(&context).await?,
                    Incoming::Message(_) => {}
                }
                let is_subscribed = topics.iter().any(|topic| shared.topic.as_bytes().starts_with(topic));
                place = if is_subscribed { place.or_else(|| Some(shared.outbox().end())) } else { None };
            }
            _ = changed.changed() => {}
            () = sleep(PING_INTERVAL) => connection.ping().await?,
        }
        let is_closing = *changed.borrow_and_update();
        while let Some(place) = &mut place {
            let Some(Next { batch, missed }) = shared.outbox().next(place) else { break };
            shared.counters.missed(missed);
            let sequence = batch.sequence.to_be_bytes();
            connection.send(&[shared.topic.as_bytes(), &sequence, &batch.payload]).await?;
        }
        if is_closing {
            return Ok(());
        }
    }
}

/// Waits until the publisher ends.
async fn closing(changed: &mut watch::Receiver<bool>) {
    // It fails only if the publisher is gone.
    drop(changed.wait_for(|is_closing| *is_closing).await);
}

/// Answers requests for the batches from a sequence number on: an empty frame and the number.
pub(super) async fn replayer(mut connection: Connection, shared: Shared) -> Result<()> {
    let mut changed = shared.changed.subscribe();
    loop {
        let frames = tokio::select! {
            () = closing(&mut changed) => return Ok(()),
            incoming = connection.receive() => match incoming? {
                Incoming::Message(frames) => frames,
                Incoming::Ping(context) => {
                    connection.pong(&context).await?;
                    continue;
                }
                Incoming::Subscribe(_) | Incoming::Cancel(_) => continue,
            },
            () = sleep(PING_INTERVAL) => {
                connection.ping().await?;
                continue;
            }
        };
        let request = match &frames[..] {
            [empty, number] if empty.is_empty() => number.first_chunk::<8>().filter(|_| number.len() == 8),
            _ => None,
        };
        let Some(first) = request else {
            log::warn!("KV events: a connection is closed, because its request is not an empty frame and 8 bytes");
            return Ok(());
        };
        let generation = shared.outbox().generation();
        for sequence in u64::from_be_bytes(*first)..=u64::MAX {
            let Some(batch) = shared.outbox().replay(generation, sequence) else { break };
            let sequence = sequence.to_be_bytes();
            connection.send(&[b"", shared.topic.as_bytes(), &sequence, &batch.payload]).await?;
        }
        connection.send(&[b"", b"", &END, b""]).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// What the sockets share, and the stream of a peer of this type after its handshake with `serve`.
    async fn served<F: Future<Output = Result<()>> + Send + 'static>(
        role: Role,
        peer: &str,
        serve: impl Fn(Connection, Shared) -> F + Clone + Send + Sync + 'static,
    ) -> (Shared, mpsc::Receiver<()>, TcpStream) {
        let (shared, all_sent) = Shared::new(Outbox::new(1000, 2, true), Arc::default(), "topic");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let of_task = shared.clone();
        tokio::spawn(accept(listener, role, move |connection| serve(connection, of_task.clone())));
        let mut stream = TcpStream::connect(address).await.unwrap();
        shake_hands(&mut stream, peer).await;
        (shared, all_sent, stream)
    }

    /// The handshake of a peer of this type.
    async fn shake_hands(stream: &mut TcpStream, peer: &str) {
        let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1];
        greeting.extend(b"NULL");
        greeting.resize(64, 0);
        stream.write_all(&greeting).await.unwrap();
        let ready = [&[4, 22 + peer.len() as u8][..], b"\x05READY\x0bSocket-Type\0\0\0", &[peer.len() as u8]].concat();
        stream.write_all(&[&ready, peer.as_bytes()].concat()).await.unwrap();
        let mut head = vec![0; 64 + 2];
        stream.read_exact(&mut head).await.unwrap();
        let mut body = vec![0; head[65].into()];
        stream.read_exact(&mut body).await.unwrap();
    }

    /// The frames of the next message.
    async fn message(stream: &mut TcpStream) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let flags = stream.read_u8().await.unwrap();
            let size =
                if flags & 2 == 0 { stream.read_u8().await.unwrap().into() } else { stream.read_u64().await.unwrap() };
            let mut body = vec![0; size as usize];
            stream.read_exact(&mut body).await.unwrap();
            frames.push(body);
            if flags & 1 == 0 {
                return frames;
            }
        }
    }

    fn publish(shared: &Shared, payload: Vec<u8>) {
        shared.outbox().push(payload);
        shared.changed.send_modify(|_| {});
    }

    fn number(frame: &[u8]) -> u64 {
        u64::from_be_bytes(frame.try_into().unwrap())
    }

    #[tokio::test]
    async fn a_subscriber_that_does_not_read_misses_batches_and_costs_no_memory() {
        let (shared, mut all_sent, mut stream) = served(Role::Publisher, "SUB", subscriber).await;
        publish(&shared, vec![0]);
        stream.write_all(&[0, 4, 1, b't', b'o', b'p']).await.unwrap();
        sleep(Duration::from_millis(100)).await;
        for i in 1..100 {
            publish(&shared, vec![i; 1 << 20]);
            sleep(Duration::from_millis(1)).await;
        }
        let first = message(&mut stream).await;
        assert_eq!((&first[0][..], number(&first[1])), (&b"topic"[..], 1), "it does not get what was before");
        let mut numbers = vec![1];
        while *numbers.last().unwrap() < 99 {
            let [_, sequence, payload] = &message(&mut stream).await[..] else { panic!() };
            assert!(payload.iter().all(|byte| u64::from(*byte) == number(sequence)));
            numbers.push(number(sequence));
        }
        assert!(numbers.is_sorted() && numbers[numbers.len() - 2..] == [98, 99], "{numbers:?}");
        let missed = 99 - numbers.len() as u64;
        assert!(missed > 10 && shared.counters.missed_batches() == missed, "{numbers:?}");
        publish(&shared, vec![7]);
        shared.changed.send_modify(|is_closing| *is_closing = true);
        assert_eq!(message(&mut stream).await[2], [7], "the last batch is sent before the connection closes");
        drop(shared);
        // The task that accepts connections has the last sender.
        assert!(timeout(Duration::from_millis(100), all_sent.recv()).await.is_err());
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn earlier_batches_can_be_asked_for() {
        let (shared, _all_sent, mut stream) = served(Role::Router, "DEALER", replayer).await;
        (0..3).for_each(|i| publish(&shared, vec![i; 5]));
        let request = |number: u64| [&[1, 0, 0, 8][..], &number.to_be_bytes()].concat();
        for (first, expected) in [(0, vec![0, 1, 2]), (2, vec![2]), (3, vec![]), (u64::MAX, vec![])] {
            stream.write_all(&request(first)).await.unwrap();
            for sequence in expected {
                let payload = vec![sequence as u8; 5];
                let frames = [vec![], b"topic".to_vec(), u64::to_be_bytes(sequence).to_vec(), payload];
                assert_eq!(message(&mut stream).await, frames);
            }
            assert_eq!(message(&mut stream).await, [vec![], vec![], END.to_vec(), vec![]]);
        }
        stream.write_all(&[0, 3, b'a', b'b', b'c']).await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "a malformed request closes the connection");
    }

    #[tokio::test]
    async fn the_publisher_connects_until_it_ends() {
        let (shared, mut all_sent) = Shared::new(Outbox::new(10, 0, false), Arc::default(), "topic");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
        tokio::spawn(connect(endpoint, shared.clone()));
        for i in 0..2 {
            let mut stream = listener.accept().await.unwrap().0;
            shake_hands(&mut stream, "SUB").await;
            stream.write_all(&[0, 1, 1]).await.unwrap();
            sleep(Duration::from_millis(100)).await;
            publish(&shared, vec![i]);
            assert_eq!(message(&mut stream).await[2], [i], "after {i} connections");
        }
        shared.changed.send_modify(|is_closing| *is_closing = true);
        drop(shared);
        assert_eq!(all_sent.recv().await, None);
    }

    #[tokio::test]
    async fn one_peer_cannot_subscribe_without_end() {
        let (_shared, _all_sent, mut stream) = served(Role::Publisher, "SUB", subscriber).await;
        for _ in 0..=MAX_SUBSCRIPTIONS {
            stream.write_all(&[0, 2, 1, b'x']).await.unwrap();
        }
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }
}
