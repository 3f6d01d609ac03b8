//! KV events: messages to routers about the blocks that the engines have cached, in vLLM's format over ZeroMQ.
//!
//! Each engine has a thread, a publisher. Every 10 ms it takes the changes of the engine's block pool and sends them as
//! one batch of [events](event). From a [`mirror`] of the index it sends everything again when the [`outbox`] begins a
//! new sequence. The engine itself only writes a bounded log.

mod config;
mod counters;
mod event;
mod mirror;
mod outbox;
mod publisher;
mod sockets;

pub use config::{KvEventsConfig, KvEventsFlag, parse};
pub use counters::{Counters, Restart};
pub use event::Layout;

use crate::adapters::Adapters;
use crate::zmtp::{Endpoint, EndpointError};
use anyhow::{Context, Result, anyhow};
use pegainfer_core::engine::EngineHandle;
use pegainfer_core::kv::Naming;
use publisher::{Publisher, Socket};
use schemars::JsonSchema;
use serde::Serialize;
use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// Where the events of one engine are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct KvEventSource {
    /// Name of the model.
    pub model: String,
    /// Number of the engine.
    pub data_parallel_rank: u16,
    /// Where subscribers connect, or what the publisher connects to.
    pub endpoint: String,
    /// Where earlier batches can be asked for.
    pub replay_endpoint: Option<String>,
    /// First frame of every message.
    pub topic: String,
    /// Protocol of the endpoints.
    pub transport: &'static str,
    /// Encoding of batches.
    pub encoding: &'static str,
    /// `map` or `array`: how an event is encoded.
    pub layout: &'static str,
    /// Number of batches that can be asked for.
    pub buffer_steps: u32,
    /// Maximum number of batches that wait for a slow subscriber.
    pub hwm: u32,
    /// Maximum number of blocks whose changes wait for the publisher.
    pub max_queue_size: u32,
}

/// The sockets of a model's events, before it is loaded: a port in use is reported at once.
#[derive(Debug)]
pub struct BoundKvEvents {
    config: KvEventsConfig,
    /// Sockets, for each engine.
    sockets: Vec<(Socket, Option<TcpListener>)>,
    sources: Vec<KvEventSource>,
}

/// The publishers of a model. They publish that nothing is cached when this is dropped, which takes a moment.
#[derive(Debug)]
pub struct KvEvents {
    sources: Vec<KvEventSource>,
    counters: Vec<Arc<Counters>>,
    threads: Vec<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl BoundKvEvents {
    /// Listens for subscribers of the events of this number of engines.
    ///
    /// # Errors
    /// A port is in use, or the address is not one of this machine.
    pub fn bind(config: &KvEventsConfig, engines: usize) -> Result<Self> {
        let (mut sockets, mut sources) = (Vec::new(), Vec::new());
        let host = own_address();
        for rank in 0..engines {
            let rank = u16::try_from(rank).context("there are too many engines")?;
            let bound = bind_rank(config, rank, &host);
            let (socket, endpoint, replay) = bound.map_err(|error| anyhow!("--kv-events-config: {error}"))?;
            let (replay, replay_endpoint) = replay.unzip();
            sockets.push((socket, replay));
            sources.push(KvEventSource {
                model: String::new(),
                data_parallel_rank: rank,
                endpoint,
                replay_endpoint,
                topic: config.topic.clone(),
                transport: "zmq",
                encoding: "msgpack",
                layout: config.layout.name(),
                buffer_steps: config.buffer_steps,
                hwm: config.hwm,
                max_queue_size: config.max_queue_size,
            });
        }
        Ok(Self { config: config.clone(), sockets, sources })
    }

    /// Publishes the events of the engines of `model`, which have not served a request yet.
    ///
    /// # Errors
    /// An engine has no KV blocks, or a thread cannot be started.
    pub fn publish(self, model: &str, engine: &EngineHandle, adapters: Option<&Arc<Adapters>>) -> Result<KvEvents> {
        let Self { config, sockets, mut sources } = self;
        sources.iter_mut().for_each(|source| model.clone_into(&mut source.model));
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).context("the system has no random numbers")?;
        let mut events = KvEvents { sources, counters: Vec::new(), threads: Vec::new() };
        for ((rank, cell), (socket, replay)) in (0..).zip(engine.engines()).zip(sockets) {
            let pool = cell.pool().context("--kv-events-config: the model has no KV cache")?.clone();
            pool.name_blocks(Naming::new(&secret, model));
            pool.watch_changes(config.max_queue_size as usize);
            let counters = Arc::new(Counters::default());
            events.counters.push(counters.clone());
            let (config, adapters) = (config.clone(), adapters.cloned());
            let engine = engine.clone();
            let publisher = Publisher { config, engine, rank, pool, adapters, socket, replay, counters };
            let (stop, stopped) = oneshot::channel();
            let thread = std::thread::Builder::new().name("kv-events".into()).spawn(move || publisher.run(stopped));
            events.threads.push((stop, thread.context("the thread that publishes KV events cannot be started")?));
        }
        for source in &events.sources {
            let replay =
                source.replay_endpoint.as_ref().map_or(String::new(), |replay| format!(", replay on {replay}"));
            log::info!("KV events of {} on {}{replay}", source.model, source.endpoint);
        }
        Ok(events)
    }
}

/// The sockets of an engine's publisher, and their endpoints.
type BoundRank = (Socket, String, Option<(TcpListener, String)>);

fn bind_rank(config: &KvEventsConfig, rank: u16, host: &str) -> Result<BoundRank, EndpointError> {
    let endpoint = config.endpoint.of_rank(rank)?;
    let (socket, endpoint) = if endpoint.is_bound() {
        let (listener, bound) = endpoint.listen(host)?;
        (Socket::Listens(listener), bound.to_string())
    } else {
        let name = endpoint.to_string();
        (Socket::Connects(endpoint), name)
    };
    let listen = |replay: Endpoint| {
        let (listener, bound) = replay.listen(host)?;
        Ok((listener, bound.to_string()))
    };
    let replay = config.replay_endpoint.as_ref().map(|replay| replay.of_rank(rank).and_then(listen)).transpose()?;
    Ok((socket, endpoint, replay))
}

/// An address of this machine that others can probably reach: that of its route to other networks.
fn own_address() -> String {
    // No packet is sent.
    let found = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("10.255.255.255:1")?;
        socket.local_addr()
    });
    found.map_or_else(|_| "127.0.0.1".to_owned(), |address| address.ip().to_string())
}

impl KvEvents {
    /// Where the events of each engine are.
    pub fn sources(&self) -> &[KvEventSource] {
        &self.sources
    }

    /// The counters of each engine's events.
    pub fn counters(&self) -> &[Arc<Counters>] {
        &self.counters
    }
}

impl Drop for KvEvents {
    fn drop(&mut self) {
        // All of them are asked to end before the first one is waited for.
        let threads = std::mem::take(&mut self.threads);
        let threads: Vec<JoinHandle<()>> = threads
            .into_iter()
            .map(|(stop, thread)| {
                // It fails only if the thread has ended.
                let _ = stop.send(());
                thread
            })
            .collect();
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a thread that published KV events panicked");
            }
        }
    }
}
