//! The thread that publishes the events of one engine.

use super::config::KvEventsConfig;
use super::counters::{Counters, Restart};
use super::event::{Event, encode, split};
use super::mirror::Mirror;
use super::outbox::Outbox;
use super::sockets::{Shared, accept, connect, replayer, subscriber};
use crate::adapters::Adapters;
use crate::zmtp::{Endpoint, Role};
use pegainfer_core::adapter::AdapterId;
use pegainfer_core::engine::EngineHandle;
use pegainfer_core::kv::BlockPool;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Changes of this time make one batch.
const INTERVAL: Duration = Duration::from_millis(10);
/// Maximum number of blocks of a batch: about 0.6 MB of text, or 1.2 MB of images. A dump of a large index has larger
/// ones.
const BATCH_BLOCKS: usize = 8192;
/// Maximum time for which the last batches are sent.
const LINGER: Duration = Duration::from_millis(500);

/// Where subscribers are.
#[derive(Debug)]
pub(super) enum Socket {
    /// They connect to this socket.
    Listens(TcpListener),
    /// One listens there.
    Connects(Endpoint),
}

/// What one engine's publisher needs.
pub(super) struct Publisher {
    pub config: KvEventsConfig,
    pub engine: EngineHandle,
    /// Number of the engine.
    pub rank: u16,
    /// Its KV blocks.
    pub pool: BlockPool,
    pub adapters: Option<Arc<Adapters>>,
    pub socket: Socket,
    pub replay: Option<TcpListener>,
    pub counters: Arc<Counters>,
}

/// A publisher at work.
struct Running {
    config: KvEventsConfig,
    engine: EngineHandle,
    rank: u16,
    pool: BlockPool,
    /// True after the engine was lost, and nothing is cached any more.
    is_lost: bool,
    adapters: Option<Arc<Adapters>>,
    mirror: Mirror,
    shared: Shared,
    all_sent: mpsc::Receiver<()>,
}

impl Publisher {
    /// Publishes until `stop` is sent or dropped.
    pub fn run(self, stop: oneshot::Receiver<()>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return log::error!("KV events are not published: {error}"),
        };
        runtime.block_on(self.publish(stop));
    }

    async fn publish(self, stop: oneshot::Receiver<()>) {
        let Self { config, engine, rank, pool, adapters, socket, replay, counters } = self;
        let outbox = Outbox::new(config.buffer_steps, config.hwm, replay.is_some());
        let (shared, all_sent) = Shared::new(outbox, counters, &config.topic);
        let accepting = match open(socket, replay, &shared) {
            Ok(tasks) => tasks,
            Err(error) => return log::error!("KV events are not published: {error}"),
        };
        let (mirror, is_lost) = (Mirror::new(engine.limits().image_token), false);
        let mut running = Running { config, engine, rank, pool, is_lost, adapters, mirror, shared, all_sent };
        // Subscribers of an earlier process forget what they know.
        running.send(vec![Event::Cleared]);
        running.follow(stop).await;
        accepting.iter().for_each(tokio::task::JoinHandle::abort);
        running.end().await;
    }
}

/// Starts the tasks that connect or accept connections. Returns the latter.
fn open(
    socket: Socket,
    replay: Option<TcpListener>,
    shared: &Shared,
) -> std::io::Result<Vec<tokio::task::JoinHandle<()>>> {
    let mut tasks = Vec::new();
    let of_task = shared.clone();
    match socket {
        Socket::Listens(listener) => {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let serve = move |connection| subscriber(connection, of_task.clone());
            tasks.push(tokio::spawn(accept(listener, Role::Publisher, serve)));
        }
        Socket::Connects(endpoint) => drop(tokio::spawn(connect(endpoint, of_task))),
    }
    if let Some(listener) = replay {
        let (listener, of_task) = (tokio::net::TcpListener::from_std(listener)?, shared.clone());
        let serve = move |connection| replayer(connection, of_task.clone());
        tasks.push(tokio::spawn(accept(listener, Role::Router, serve)));
    }
    Ok(tasks)
}

impl Running {
    async fn follow(&mut self, mut stop: oneshot::Receiver<()>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = &mut stop => return,
                _ = ticks.tick() => self.poll(),
            }
        }
    }

    /// Publishes the changes since the last time.
    fn poll(&mut self) {
        if self.is_lost {
            return;
        }
        if !self.engine.engines()[usize::from(self.rank)].is_alive() {
            self.is_lost = true;
            return self.clear();
        }
        let changes = self.pool.take_changes();
        let adapters = self.adapters.clone();
        let names = |id: AdapterId| adapters.as_ref().and_then(|adapters| adapters.name_of(id));
        if changes.lost {
            self.mirror.replace(self.pool.stored_runs(), &names);
            self.restart(Restart::Lost);
            return;
        }
        let events = self.mirror.apply(changes.list, &names);
        if !events.is_empty() {
            self.send(events);
        }
    }

    /// Publishes events, or everything if the sequence is full.
    fn send(&mut self, events: Vec<Event>) {
        let payloads = self.encode(events, BATCH_BLOCKS);
        let mut outbox = self.shared.outbox();
        if !outbox.fits(&payloads) {
            drop(outbox);
            return self.restart(Restart::Full);
        }
        self.shared.counters.published(payloads.len());
        payloads.into_iter().for_each(|payload| outbox.push(payload));
        drop(outbox);
        self.shared.changed.send_modify(|_| {});
    }

    /// Begins the sequence again with everything that is cached.
    fn restart(&self, reason: Restart) {
        let mut events = vec![Event::Cleared];
        events.extend(self.mirror.dump());
        // The dump takes at most half of the sequence.
        let batches = (self.config.buffer_steps / 2).max(1) as usize;
        let payloads = self.encode(events, BATCH_BLOCKS.max((self.mirror.len() + 1).div_ceil(batches)));
        let (blocks, reason_name) = (self.mirror.len(), reason.name());
        log::debug!("KV events of engine {} begin again ({reason_name}) with {blocks} blocks", self.rank);
        self.shared.counters.restarted(reason);
        self.shared.counters.published(payloads.len());
        self.shared.outbox().restart(payloads);
        self.shared.changed.send_modify(|_| {});
    }

    fn encode(&self, events: Vec<Event>, blocks: usize) -> Vec<Vec<u8>> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let groups = split(events, blocks);
        groups.iter().map(|events| encode(events, time, self.rank, self.config.layout)).collect()
    }

    /// Publishes that nothing is cached any more.
    fn clear(&mut self) {
        self.mirror = Mirror::new(self.engine.limits().image_token);
        self.send(vec![Event::Cleared]);
    }

    /// Publishes that nothing is cached any more, and waits a moment for subscribers to read it.
    async fn end(mut self) {
        self.clear();
        self.shared.changed.send_modify(|is_closing| *is_closing = true);
        drop(self.shared);
        // Ends when every subscriber's connection has dropped its sender.
        let _ = timeout(LINGER, self.all_sent.recv()).await;
    }
}
