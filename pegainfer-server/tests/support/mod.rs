//! What the HTTP tests share: a scripted engine, a server on a free port, and a small blocking client.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

pub mod client;
pub mod hub;
pub mod mock;
pub mod process;

use pegainfer_core::engine::{EngineConfig, EngineHandle, StepEngine};
use pegainfer_server::checkpoint::Checkpoint;
use pegainfer_server::openai::AppState;
use pegainfer_server::serve::serve;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The bundled checkpoint.
pub fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny")
}

/// A server on a free port of this machine.
pub struct TestServer {
    pub address: SocketAddr,
    pub engine: EngineHandle,
    runtime: Runtime,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<anyhow::Result<()>>>,
}

/// What differs between tests.
pub struct Setup {
    pub strict: bool,
    pub max_queued: usize,
    pub names: Vec<String>,
    /// Where tokenizer and template come from.
    pub model_dir: PathBuf,
}

impl Default for Setup {
    fn default() -> Self {
        Self { strict: false, max_queued: 64, names: vec!["tiny".into()], model_dir: model_dir() }
    }
}

impl TestServer {
    /// Starts the real router over `engine`.
    pub fn start<E: StepEngine>(engine: E, setup: Setup) -> Self {
        let engine = EngineHandle::spawn(engine, EngineConfig { max_queued: setup.max_queued }).unwrap();
        Self::over(engine, setup)
    }

    /// Starts the real router over a running engine.
    pub fn over(engine: EngineHandle, setup: Setup) -> Self {
        let checkpoint = Checkpoint::load(&setup.model_dir).unwrap();
        let state: Arc<AppState> = AppState::new(engine.clone(), checkpoint, setup.names, setup.strict);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = runtime.spawn(serve(
            listener,
            state,
            async move {
                let _ = stopped.await;
            },
            Duration::from_secs(2),
        ));
        Self { address, engine, runtime, stop: Some(stop), serving: Some(serving) }
    }

    /// Sends what SIGTERM sends.
    pub fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits for the server to end after [`stop`](Self::stop).
    pub fn join(&mut self) {
        let serving = self.serving.take().unwrap();
        self.runtime.block_on(serving).unwrap().unwrap();
    }

    /// Waits until nothing is running or waiting.
    pub fn wait_idle(&self) {
        wait_until("the engine is idle", || {
            let stats = self.engine.stats();
            stats.running == 0 && stats.waiting == 0
        });
    }
}

/// Polls `condition` for at most ten seconds.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "gave up waiting until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
