//! Support of the HTTP tests: a scripted engine, a server on a free port, and a small blocking client.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[cfg(target_os = "linux")]
pub mod attack;
pub mod balancer;
pub mod client;
pub mod grpc;
pub mod hub;
pub mod mock;
pub mod on_demand;
pub mod process;
pub mod proxy;
pub mod served;
pub mod temp_dir;
#[cfg(unix)]
pub mod terminal;
#[cfg(target_os = "linux")]
pub mod usage;
#[cfg(target_os = "linux")]
pub mod watch;

use clap::Parser;
use mock::{Control, MockEngine};
use pegainfer_core::engine::{EngineConfig, EngineHandle, StepEngine};
use pegainfer_models::args::TaskArg;
use pegainfer_models::engine;
use pegainfer_server::app::{App, Options};
use pegainfer_server::cli::Cli;
use pegainfer_server::text_service::Checkpoint;
use pegainfer_text::Tokenizer;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use temp_dir::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Held by tests that measure time or memory, so that they run one after the other.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A failed test poisons it.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bundled checkpoint.
pub fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny")
}

/// A copy of the bundled checkpoint with a chat template that never ends.
pub fn endless_template(name: &str) -> TempDir {
    let dir = TempDir::new(name);
    for file in std::fs::read_dir(model_dir()).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, dir.0.join(path.file_name().unwrap())).unwrap();
    }
    let endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
    std::fs::write(dir.0.join("chat_template.jinja"), endless).unwrap();
    dir
}

/// Tokenizer of the bundled checkpoint.
pub fn tokenizer() -> Tokenizer {
    Tokenizer::load(&model_dir()).unwrap()
}

/// A directory with the bundled tokenizer and a template with calls as tags, which shows reasoning between calls.
pub fn tags_template() -> TempDir {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let dir = TempDir::new(&format!("tags-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(model_dir().join(file), dir.0.join(file)).unwrap();
    }
    std::fs::write(dir.0.join("chat_template.jinja"), include_str!("../fixtures/agents/tags.jinja")).unwrap();
    dir
}

/// A server on a free port of this machine.
pub struct TestServer {
    pub address: SocketAddr,
    /// Where gRPC is served.
    pub grpc: SocketAddr,
    pub engine: EngineHandle,
    runtime: Runtime,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
}

/// Settings that differ between tests.
pub struct Setup {
    pub options: Options,
    pub max_queued: usize,
    /// Time without progress after which the engine counts as stuck.
    pub step_deadline: Duration,
    pub names: Vec<String>,
    /// Directory of tokenizer and template.
    pub model_dir: PathBuf,
    pub task: TaskArg,
}

impl Default for Setup {
    fn default() -> Self {
        let options = Options { drain_timeout: Duration::from_secs(2), ..Options::default() };
        Self {
            options,
            max_queued: 64,
            step_deadline: Duration::from_secs(30),
            names: vec!["tiny".into()],
            model_dir: model_dir(),
            task: TaskArg::Auto,
        }
    }
}

impl Setup {
    fn config(&self) -> EngineConfig {
        let (max_queued, step_deadline) = (self.max_queued, self.step_deadline);
        EngineConfig { max_queued, step_deadline, ..EngineConfig::default() }
    }
}

impl TestServer {
    /// Starts the real router over `engine`.
    pub fn start<E: StepEngine>(engine: E, setup: Setup) -> Self {
        let engine = EngineHandle::spawn(engine, setup.config()).unwrap();
        Self::over(engine, setup)
    }

    /// Starts the real router over several engines.
    pub fn start_all<E: StepEngine>(engines: Vec<E>, setup: Setup) -> Self {
        let spawn = |engine| EngineHandle::spawn(engine, setup.config()).unwrap();
        Self::over(EngineHandle::join(engines.into_iter().map(spawn).collect()), setup)
    }

    /// Starts the real router over an engine that replies to every request with `reply`.
    pub fn replying(reply: &str) -> (Self, Arc<Control>) {
        let (engine, control) = MockEngine::replying(reply);
        (Self::start(engine, Setup::default()), control)
    }

    /// Serves the bundled checkpoint with default options.
    pub fn bundled() -> Self {
        Self::bundled_with(Setup::default().options)
    }

    /// Serves the bundled checkpoint.
    pub fn bundled_with(options: Options) -> Self {
        let args = Cli::parse_from(["pegainfer"]).serve.engine;
        let setup = Setup { options, ..Setup::default() };
        Self::over(engine::load(&model_dir(), &args).unwrap().handle, setup)
    }

    /// Starts the real router over a running engine.
    pub fn over(engine: EngineHandle, setup: Setup) -> Self {
        let mut checkpoint = Checkpoint::load_for(&setup.model_dir, setup.task).unwrap();
        checkpoint.origin = Some(setup.model_dir.display().to_string());
        let app = App::new(engine.clone(), checkpoint, setup.names, setup.options);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let grpc_listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let grpc = grpc_listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let asked = app.asked_to_stop();
        let serving = runtime.spawn(app.serve_ports(listener, Some(grpc_listener), async move {
            tokio::select! {
                _ = stopped => {}
                () = asked => {}
            }
        }));
        Self { address, grpc, engine, runtime, stop: Some(stop), serving: Some(serving) }
    }

    /// Starts the real router over `engine` with these options.
    pub fn with<E: StepEngine>(engine: E, options: Options) -> Self {
        Self::start(engine, Setup { options, ..Setup::default() })
    }

    /// Starts the shutdown, as SIGTERM does.
    pub fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits for the server to end after [`stop`](Self::stop).
    pub fn join(&mut self) {
        let serving = self.serving.take().unwrap();
        self.runtime.block_on(serving).unwrap();
    }

    /// Waits until nothing is running or waiting.
    pub fn wait_idle(&self) {
        wait_until("the engine is idle", || {
            let stats = self.engine.stats();
            stats.running == 0 && stats.waiting == 0
        });
    }
}

/// The server of an application on a free port of this machine.
pub struct AppServer {
    pub address: SocketAddr,
    _runtime: Runtime,
}

impl AppServer {
    pub fn start(app: App) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(app.serve(listener, std::future::pending()));
        Self { address, _runtime: runtime }
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
