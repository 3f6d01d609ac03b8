//! `pegainfer serve`: start, serve, drain.

use crate::allocator;
use crate::app::{App, Options};
use crate::budget::Budget;
use crate::cli::http_args::HttpArgs;
use crate::cli::local_server::LoadedModel;
use crate::cli::{notify, signals, watch};
use crate::http;
use crate::record::Recorder;
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use pegainfer_bench::recording::Prompts;
use pegainfer_core::engine::{EngineHandle, EngineStats};
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine::family::LoadedEngine;
use pegainfer_terminal::values::{parse_bytes, parse_name};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

/// Interval between checks whether an engine still runs.
const CHECKED: Duration = Duration::from_millis(200);
/// The engine has to be idle for this long before freed memory is returned to the system.
const IDLE: Duration = Duration::from_secs(1);

/// Flags of `serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Checkpoint directory or GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B to download; the same as
    /// --model-path
    #[arg(value_name = "DIR|ID")]
    pub model: Option<String>,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Name that clients use for the model; repeatable [default: the name of the directory or id]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub served_model_name: Vec<String>,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Refuse requests with unknown fields instead of listing them in the header x-ignored-fields
    #[arg(long)]
    pub strict: bool,
    /// Keep the parts of coding agents' prompts that only identify a conversation. They are left out by default,
    /// because they defeat the prefix cache (docs/api/agents.md)
    #[arg(long)]
    pub no_prompt_normalization: bool,
    /// Record the requests in this file, which must not exist, for `pegainfer replay` (docs/operations/recording.md)
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Content of prompts in the recording
    #[arg(long, value_name = "WHAT", value_enum, default_value_t, requires = "record")]
    pub record_prompts: Prompts,
    /// End the recording at this size, such as 500M or 4G
    #[arg(long, value_name = "BYTES", default_value = "4G", value_parser = parse_bytes, requires = "record")]
    pub record_max_bytes: u64,
    /// Also record the schedule, for `pegainfer replay --schedule`. Needs --record-prompts ids and no
    /// --speculative-config
    #[arg(long, requires = "record")]
    pub record_steps: bool,
    /// Compare the time of each step with this ledger, measured on this device with the same flags
    /// (docs/operations/steps.md)
    #[arg(long, value_name = "FILE")]
    pub ledger: Option<PathBuf>,
    /// Flags of the HTTP server.
    #[command(flatten)]
    pub http: HttpArgs,
}

impl ServeArgs {
    /// The arguments with the model that comes without a flag as `--model-path`.
    pub(super) fn with_model_path(mut self) -> Self {
        self.engine.model_path = self.model.take().or(self.engine.model_path);
        self
    }
}

/// Runs until a signal arrives, or until the last engine has stopped, which is an error. `started` is when the process
/// started.
pub fn run(args: &ServeArgs, started: Instant) -> Result<()> {
    allocator::configure();
    http::raise_open_files();
    let runtime = async_runtime()?;
    runtime.block_on(async { signals::ignore_others() });
    // Reserve the port before loading the model, so that a port in use is reported immediately. Clients cannot connect
    // before `listen`.
    let socket = runtime.block_on(reserve(&args.host, args.port))?;
    let bound = socket.local_addr().context("the server's address is unknown")?.ip().to_canonical();
    let options = args.http.options(args.strict, bound.is_loopback())?;
    check_record_steps(args)?;
    let recorder = recorder(args)?;
    let options = Options { normalize_prompts: !args.no_prompt_normalization, recorder: recorder.clone(), ..options };
    if !bound.is_loopback() && options.api_keys.is_empty() {
        log::warn!("everybody who can reach {bound} may use this server: give --api-key-file, or --host 127.0.0.1");
    }
    let (tracer, scheme) = (options.tracer.clone(), if options.tls.is_some() { "https" } else { "http" });
    runtime.spawn(signals::reload_on_hangup(options.api_keys.clone(), options.admin_keys.clone(), options.tls.clone()));
    let LoadedModel { engine, checkpoint, source } = LoadedModel::load(&args.engine)?;
    announce(&engine, &source);
    if let Some(recorder) = recorder.as_ref().filter(|_| args.record_steps) {
        engine.handle.record_schedule(|engine| recorder.schedule(engine))?;
    }
    if let Some(file) = &args.ledger {
        watch::watch(file, &engine, &source, &args.engine, args.http.trace_dir.as_deref())?;
    }
    let load_summary = load_summary(&engine);
    let (handle, end) = (engine.handle.clone(), engine.handle.end());
    let engines = engine.handle.clone();
    let app = App::new(engine.handle, checkpoint, args.served_model_name.clone(), options);
    let tidy = tidy(handle, app.budget());
    let served: Result<()> = runtime.block_on(async {
        let listener = socket.listen(http::BACKLOG).context("the server cannot listen")?;
        let address = listener.local_addr().context("the server's address is unknown")?;
        let names = app.names().join(", ");
        allocator::return_freed();
        let ready = started.elapsed().as_secs_f64();
        log::info!("serving {names} on {scheme}://{address}, ready in {ready:.2} s: {load_summary}");
        let stop = async {
            tokio::select! {
                () = signals::stop() => {}
                () = stopped(&engines) => {}
            }
            notify::stopping();
        };
        let watchdog = notify::ready(engines.clone());
        tokio::select! {
            () = app.serve(listener, stop) => {}
            () = tidy => {}
            () = watchdog => {}
        }
        match engines.failure() {
            Some(why) => Err(anyhow!("the last engine has stopped: {why}")),
            None => Ok(()),
        }
    });
    drop(engines);
    // Blocking tasks that are still running must not delay the exit.
    runtime.shutdown_background();
    if let Some(tracer) = tracer {
        tracer.flush();
    }
    if let Some(recorder) = recorder {
        recorder.flush();
    }
    // The runtime's tasks may have held the last handles.
    end.wait();
    served
}

/// Resolves when every engine has stopped.
async fn stopped(engines: &EngineHandle) {
    while engines.failure().is_none() {
        tokio::time::sleep(CHECKED).await;
    }
    log::error!("no engine is left: the server answers what is open and exits, so that it can be started again");
}

/// The recorder, if `--record` is set.
fn recorder(args: &ServeArgs) -> Result<Option<Arc<Recorder>>> {
    let Some(file) = &args.record else { return Ok(None) };
    let model = args.engine.model_path.as_deref().unwrap_or("the bundled model");
    let recorder = Recorder::create(file, args.record_prompts, model, args.record_max_bytes);
    Ok(Some(recorder.with_context(|| format!("--record {} cannot be created", file.display()))?))
}

/// Refuses flags with which a recorded schedule could not be replayed.
fn check_record_steps(args: &ServeArgs) -> Result<()> {
    let (ids, drafts) = (args.record_prompts == Prompts::Ids, args.engine.speculative_config.is_some());
    ensure!(
        !args.record_steps || ids,
        "--record-steps: the prefix cache decides the schedule; give --record-prompts ids"
    );
    ensure!(!args.record_steps || !drafts, "--record-steps: drafts are not recorded; leave out --speculative-config");
    Ok(())
}

/// The async runtime. tokio panics if it cannot open files or start threads, so both are tried first.
fn async_runtime() -> Result<Runtime> {
    let files = http::max_open_files();
    ensure!(
        files > http::OTHER_FILES,
        "only {files} files may be open, the server itself needs {}: raise the limit (ulimit -n)",
        http::OTHER_FILES
    );
    let threads = available_parallelism().map_or(1, usize::from);
    try_threads(threads)
        .with_context(|| format!("{threads} threads cannot be started: raise the limit (ulimit -u)"))?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")
}

/// Starts `n` threads that are alive at the same time, then ends them.
fn try_threads(n: usize) -> std::io::Result<()> {
    let gate = Mutex::new(());
    std::thread::scope(|scope| {
        let _closed = gate.lock();
        (0..n).try_for_each(|_| std::thread::Builder::new().spawn_scoped(scope, || drop(gate.lock())).map(drop))
    })
}

/// Returns freed memory to the system when the engine has been idle for [`IDLE`] and after large request bodies. Also
/// logs changes of the engine's health.
async fn tidy(engine: EngineHandle, budget: Arc<Budget>) {
    let mut tidied = (engine.stats().steps, budget.large_bodies());
    let mut healthy = vec![true; engine.engines().len()];
    loop {
        let before = (engine.stats().steps, budget.large_bodies());
        tokio::time::sleep(IDLE).await;
        let EngineStats { steps, running, waiting, .. } = engine.stats();
        log_health(&engine, &mut healthy);
        let large_bodies = budget.large_bodies();
        let idle = steps == before.0 && steps != tidied.0 && running + waiting == 0;
        let read = large_bodies == before.1 && large_bodies != tidied.1;
        if idle || read {
            tidied = (steps, large_bodies);
            // It fails only if the task panics, which it does not.
            let _ = tokio::task::spawn_blocking(allocator::return_freed).await;
        }
    }
}

/// Logs which engines are healthy now and were not, or the other way round.
fn log_health(engine: &EngineHandle, healthy: &mut [bool]) {
    let several = healthy.len() > 1;
    for (i, (cell, was)) in engine.engines().iter().zip(healthy).enumerate() {
        let name = if several { format!("engine {i}") } else { "the engine".to_owned() };
        match (std::mem::replace(was, cell.is_healthy()), *was) {
            (true, false) => log::error!("{name} makes no progress; /health reports it"),
            (false, true) => log::info!("{name} makes progress again"),
            _ => {}
        }
    }
}

fn announce(engine: &LoadedEngine, source: &str) {
    let (limits, engines) = (engine.handle.limits(), engine.handle.engines().len());
    let on = if engines > 1 { format!("{engines} engines, each on {}", engine.device) } else { engine.device.clone() };
    log::info!("model: {} from {source}, on {on}", engine.family);
    log::info!(
        "KV cache{}: {} tokens ({} blocks of {}, {}), see --kv-cache-memory; context {} tokens, see --max-model-len; up to {} concurrent \
         requests, see --max-num-seqs",
        if engines > 1 { " of each" } else { "" },
        limits.kv_capacity_tokens(),
        limits.kv_blocks,
        limits.block_size,
        limits.kv_cache_dtype,
        limits.max_model_len,
        limits.max_num_seqs
    );
}

/// Summary of loading: time and memory.
fn load_summary(engine: &LoadedEngine) -> String {
    let (weights, seconds) = (engine.weight_bytes as f64 / 1e9, engine.weights_time.as_secs_f64());
    format!(
        "weights {weights:.2} GB in {seconds:.2} s ({:.1} GB/s), KV cache {} blocks ({:.2} GB)",
        weights / seconds.max(1e-9),
        engine.handle.stats().kv_blocks_total,
        engine.kv_bytes as f64 / 1e9
    )
}

/// Binds the address without listening on it.
async fn reserve(host: &str, port: u16) -> Result<TcpSocket> {
    let mut addresses =
        tokio::net::lookup_host((host, port)).await.with_context(|| format!("--host {host} is not an address"))?;
    let Some(address) = addresses.next() else { bail!("--host {host} has no address") };
    bind(address).map_err(|e| match e.kind() {
        ErrorKind::AddrInUse => {
            anyhow::anyhow!("port {port} on {host} is in use: stop the program that has it, or give another --port")
        }
        ErrorKind::PermissionDenied => anyhow::anyhow!("port {port} needs more rights: give a --port above 1023"),
        ErrorKind::AddrNotAvailable => anyhow::anyhow!("--host {host} is not an address of this machine"),
        _ => anyhow::anyhow!("port {port} on {host} cannot be used: {e}"),
    })
}

fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Lets a restarted server take the port while old connections time out.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}
