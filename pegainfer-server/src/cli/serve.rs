//! `pegainfer serve`: start, serve, drain.

use crate::allocator;
use crate::app::{App, Options};
use crate::budget::Budget;
use crate::cli::serve_args::ServeArgs;
use crate::cli::served_models::ServedModels;
use crate::cli::{notify, signals};
use crate::http;
use crate::keyed_hash::KeyedHash;
use crate::models::Models;
use crate::record::Recorder;
use anyhow::{Context, Result, anyhow, bail, ensure};
use pegainfer_bench::recording::Prompts;
use pegainfer_core::engine::{EngineEnd, EngineStats};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

/// Interval between checks whether an engine still runs.
const CHECKED: Duration = Duration::from_millis(200);
/// The engine has to be idle for this long before freed memory is returned to the system.
const IDLE: Duration = Duration::from_secs(1);

/// Runs until a signal arrives, or until the last engine has stopped, which is an error. `started` is when the process
/// started.
pub fn run(args: &ServeArgs, started: Instant) -> Result<()> {
    allocator::configure();
    http::raise_open_files();
    let runtime = async_runtime()?;
    runtime.block_on(async { signals::ignore_others() });
    // Reserve the port before loading the model, so that a port in use is reported immediately. Clients cannot connect
    // before `listen`.
    let socket = runtime.block_on(reserve(&args.host, "--port", args.port))?;
    ensure!(args.port == 0 || args.grpc_port != Some(args.port), "--grpc-port must be another port than --port");
    let grpc_socket = args.grpc_port.map(|port| runtime.block_on(reserve(&args.host, "--grpc-port", port)));
    let grpc_socket = grpc_socket.transpose()?;
    let bound = socket.local_addr().context("the server's address is unknown")?.ip().to_canonical();
    let options = args.http.options(args.strict, bound.is_loopback())?;
    check_record_steps(args)?;
    let recorder = recorder(args)?;
    let mut options =
        Options { normalize_prompts: !args.no_prompt_normalization, recorder: recorder.clone(), ..options };
    if let Some((path, _)) = &args.engine.kv_disk {
        // Salts of blocks in the file outlive the process.
        options.hasher = KeyedHash::beside(path).context("--kv-disk")?;
    }
    if !bound.is_loopback() && options.api_keys.is_empty() {
        log::warn!("everybody who can reach {bound} may use this server: give --api-key-file, or --host 127.0.0.1");
    }
    let (tracer, scheme) = (options.tracer.clone(), if options.tls.is_some() { "https" } else { "http" });
    runtime.spawn(signals::reload_on_hangup(options.api_keys.clone(), options.admin_keys.clone(), options.tls.clone()));
    let ServedModels { models, metrics, summary } = ServedModels::load(args, &options, runtime.handle())?;
    let app = App::of(models.clone(), metrics, options);
    let tidy = tidy(models.clone(), app.budget());
    let served: Result<()> = runtime.block_on(async {
        let listener = socket.listen(http::BACKLOG).context("the server cannot listen")?;
        let address = listener.local_addr().context("the server's address is unknown")?;
        let grpc = grpc_socket.map(|socket| socket.listen(http::BACKLOG)).transpose();
        let grpc = grpc.context("the server cannot listen on --grpc-port")?;
        let names = app.names().join(", ");
        allocator::return_freed();
        let ready = started.elapsed().as_secs_f64();
        log::info!("serving {names} on {scheme}://{address}, ready in {ready:.2} s: {summary}");
        if let Some(grpc) = &grpc {
            let address = grpc.local_addr().context("the address of --grpc-port is unknown")?;
            log::info!("serving gRPC on {scheme}://{address}");
        }
        let asked = app.asked_to_stop();
        let stop = async {
            tokio::select! {
                () = signals::stop() => {}
                () = stopped(&models) => {}
                () = asked => {}
            }
            notify::stopping();
        };
        let watchdog = notify::ready(models.clone());
        tokio::select! {
            () = app.serve_ports(listener, grpc, stop) => {}
            () = tidy => {}
            () = watchdog => {}
        }
        match models.failure() {
            Some(why) => Err(anyhow!("the last engine has stopped: {why}")),
            None => Ok(()),
        }
    });
    let ends: Vec<EngineEnd> = models.peek_all().iter().map(|model| model.engine.end()).collect();
    drop(models);
    // Blocking tasks that are still running must not delay the exit.
    runtime.shutdown_background();
    if let Some(tracer) = tracer {
        tracer.flush();
    }
    if let Some(recorder) = recorder {
        recorder.flush();
    }
    // The runtime's tasks may have held the last handles.
    ends.iter().for_each(EngineEnd::wait);
    served
}

/// Resolves when every engine of the only model has stopped. Of several models, the others go on.
async fn stopped(models: &Arc<Models>) {
    while models.failure().is_none() {
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
async fn tidy(models: Arc<Models>, budget: Arc<Budget>) {
    let mut tidied = (models.stats().steps, budget.large_bodies());
    let mut unhealthy = BTreeSet::new();
    loop {
        let before = (models.stats().steps, budget.large_bodies());
        tokio::time::sleep(IDLE).await;
        let EngineStats { steps, running, waiting, .. } = models.stats();
        log_health(&models, &mut unhealthy);
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

/// Logs which engines are healthy now and were not, or the other way round. `unhealthy` has the names of those that were
/// not.
fn log_health(models: &Arc<Models>, unhealthy: &mut BTreeSet<String>) {
    let (loaded, several) = (models.peek_all(), models.ids().len() > 1);
    for model in &loaded {
        let engines = model.engine.engines();
        for (i, cell) in engines.iter().enumerate() {
            let engine = if engines.len() > 1 { format!("engine {i}") } else { "the engine".to_owned() };
            let name = if several { format!("{engine} of {}", model.names[0]) } else { engine };
            if cell.is_healthy() {
                if unhealthy.remove(&name) {
                    log::info!("{name} makes progress again");
                }
            } else if unhealthy.insert(name.clone()) {
                log::error!("{name} makes no progress; /health reports it");
            }
        }
    }
}

/// Binds the address without listening on it. `flag` names the port.
async fn reserve(host: &str, flag: &str, port: u16) -> Result<TcpSocket> {
    let mut addresses =
        tokio::net::lookup_host((host, port)).await.with_context(|| format!("--host {host} is not an address"))?;
    let Some(address) = addresses.next() else { bail!("--host {host} has no address") };
    bind(address).map_err(|e| match e.kind() {
        ErrorKind::AddrInUse => {
            anyhow::anyhow!("port {port} on {host} is in use: stop the program that has it, or give another {flag}")
        }
        ErrorKind::PermissionDenied => anyhow::anyhow!("port {port} needs more rights: give a {flag} above 1023"),
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
