//! `pegainfer bench`: latency and throughput, with the roofline limit of each metric.
//!
//! # Layout
//! - [`args`]: flags. [`workload`]: arrival times and prompts. [`replay`]: arrivals and prompts of a trace.
//!   [`sampling`]: sampling profiles.
//! - [`client`]: the target: this process's engine, or a server through [`http`].
//! - [`stats`], [`percentiles`]: metrics from the arrival times of tokens. [`roofline`]: their limits, from the
//!   recorded ops of a step and the [`peaks`] of the device.
//! - [`report`]: table, JSON, and a plot drawn by [`svg`].
//!
//! Every request of a run has its own random prompt, so only the workloads `prefix` and `replay` hit the prefix cache.

pub mod args;
pub mod client;
pub mod http;
pub mod peaks;
pub mod percentiles;
pub mod replay;
pub mod report;
pub mod roofline;
pub mod sampling;
pub mod stats;
pub mod svg;
pub mod workload;

use crate::in_process::Servers;
use anyhow::{Context, Result, bail, ensure};
use args::{BenchArgs, CommonArgs, Workload};
use client::{Client, Target};
use http::Api;
use pegainfer_core::rng;
use pegainfer_models::model_path::{self, ModelDir};
use pegainfer_models::{detect, engine};
use pegainfer_terminal::stdout::{print, print_exact};
use replay::Replay;
use report::{Report, Row};
use roofline::Roofline;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use workload::{Arrivals, Point, measure};

/// Maximum time to stop this process's server.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the command.
pub fn run(args: &BenchArgs, servers: &dyn Servers) -> Result<()> {
    let workload = &args.workload;
    let common = workload.common();
    // Report a path that cannot be written before the measurement, not after it.
    let svg = common.svg.as_deref().map(create).transpose()?;
    let to_stdout = common.json.as_deref().is_some_and(|path| path == "-");
    let json = common.json.as_deref().filter(|_| !to_stdout).map(create).transpose()?;
    let report = bench(workload, servers)?;
    if let Some(mut file) = svg {
        file.write_all(report.svg(workload)?.as_bytes()).context("the plot cannot be written")?;
    }
    let text = serde_json::to_string_pretty(&report)? + "\n";
    if let Some(mut file) = json {
        file.write_all(text.as_bytes()).context("the JSON cannot be written")?;
    }
    if to_stdout { print_exact(&text) } else { print(&report.table()) }
}

/// Creates a file of results.
pub(crate) fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("{} cannot be written", path.display()))
}

/// Measures a workload.
pub fn bench(workload: &Workload, servers: &dyn Servers) -> Result<Report> {
    let common = workload.common();
    let points = workload.points();
    let replay = match workload {
        Workload::Replay(args) => Some(Replay::read(args)?),
        _ => None,
    };
    let model_dir = model_dir(common)?;
    let dir = model_dir.dir.as_path();
    let opened = engine::open_device(detect::detect(dir)?, dir, &common.engine)?;
    let device = opened.name.clone();
    let ranks = common.engine.loop_back_ranks.map_or(opened.execs.len(), Into::into);
    let exec = opened.execs.into_iter().next().context("no device is open")?;
    let (read, peak) = (common.read_gbs.map(|n| n * 1e9), common.peak_tflops.map(|n| n * 1e12));
    let mut roofline = Roofline::new((dir, common.engine.overrides(), ranks), exec, &device, read, peak)?;
    let vocab = engine::vocab_size(dir)?;

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no async runtime")?;
    let target = open(workload, &points, dir, (&runtime, servers))?;
    let client = Arc::new(Client::new(target)?);
    roofline.engines = client.engines().unwrap_or(common.engine.data_parallel_size.get());
    let (passes, runs) = (workload.passes(), common.runs.get());
    let mut rows = Vec::new();
    let mut trace = None;
    if let Some(mut replay) = replay {
        replay.fit(client.max_model_len())?;
        for (i, (point, speed)) in replay.points().into_iter().enumerate() {
            let seed = rng::bits(common.seed, i as u64);
            let figures = runtime.block_on(replay.measure(&client, speed, runs, vocab, seed))?;
            rows.push(Row::new(workload, point, 0, figures, &roofline)?);
        }
        trace = Some(replay.into_summary());
    }
    for (profile, &sampling) in workload.sampling().iter().enumerate() {
        for (i, &point) in points.iter().enumerate() {
            let point = Point { requests: point.requests.max(sampling.min_requests()), ..point };
            // Each profile has its own prompts, so none is found in the prefix cache.
            let seed = rng::bits(common.seed, (profile * points.len() + i) as u64);
            let figures = runtime.block_on(measure(&client, (point, sampling), passes, runs, vocab, seed))?;
            for (pass, runs) in figures.into_iter().enumerate() {
                let row = Row::new(workload, point, pass, runs, &roofline)?;
                rows.push(if workload.sampling().len() > 1 { row.sampled(sampling.label(pass)) } else { row });
            }
        }
    }
    // The server's connections must not delay the exit, but the process must not end while its engine still holds the
    // device.
    drop(client);
    runtime.shutdown_timeout(STOP_TIMEOUT);
    let target = match (&common.url, workload) {
        (Some(url), _) => url.clone(),
        (None, workload) if workload.needs_http() => "http inside the process".into(),
        (None, _) => "engine".into(),
    };
    let (version, model) = (env!("CARGO_PKG_VERSION"), model_dir.to_string());
    let (workload, seed) = (workload.name(), common.seed);
    Ok(Report { version, workload, model, target, device, seed, roofline, trace, rows })
}

/// The model's directory. For a model served elsewhere, config.json is enough.
fn model_dir(common: &CommonArgs) -> Result<ModelDir> {
    match (&common.url, &common.engine.model_path) {
        (None, _) => model_path::resolve(&common.engine),
        (Some(_), Some(path)) => model_path::resolve_config(Some(path)),
        (Some(url), None) => {
            bail!(
                "which model does {url} serve? Name it with --model-path, config.json is enough: the prompts need its \
                   vocabulary, the roofline its shape"
            )
        }
    }
}

/// Starts the engine or server to measure, or connects to it.
fn open(
    workload: &Workload,
    points: &[Point],
    dir: &Path,
    (runtime, servers): (&Runtime, &dyn Servers),
) -> Result<Target> {
    let common = workload.common();
    if let Some(url) = &common.url {
        servers.raise_open_files();
        return Ok(Target::Http(runtime.block_on(Api::connect(url))?));
    }
    let max_concurrency = points.iter().map(|point| match point.arrivals {
        Arrivals::Closed { streams } => streams,
        Arrivals::Burst | Arrivals::Poisson { .. } | Arrivals::Trace { .. } => 1,
    });
    let max_concurrency = max_concurrency.max().unwrap_or(1);
    let engine = engine::load(dir, &common.engine)?.handle;
    ensure!(
        max_concurrency <= engine.limits().max_num_seqs * engine.engines().len(),
        "a concurrency of {max_concurrency} needs --max-num-seqs {max_concurrency}: otherwise requests wait for each other"
    );
    if !workload.needs_http() {
        return Ok(Target::Engine(engine));
    }
    servers.raise_open_files();
    let api = runtime.block_on(async { Api::connect(&format!("http://{}", servers.serve(engine, dir)?)).await })?;
    Ok(Target::Http(api))
}
