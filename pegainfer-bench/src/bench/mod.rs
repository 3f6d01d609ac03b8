//! `pegainfer bench`: latency and throughput, with the roofline limit of each metric.
//!
//! # Layout
//! - [`args`]: flags. [`workload`]: arrival times and prompts. [`replay`]: arrivals and prompts of a trace.
//!   [`sampling`]: sampling profiles. [`cells`]: lengths and concurrencies of public benchmarks.
//! - [`client`]: the target: this process's engine, or a server through [`http`]. [`target`] starts it.
//! - [`stats`], [`percentiles`]: metrics from the arrival times of tokens. [`roofline`]: their [`limits`],
//!   from the recorded ops of a step and the [`peaks`] of the device.
//! - [`report`]: table, JSON, and a plot drawn by [`svg`]. [`output`]: where they are written.
//! - [`agents`]: multi-turn sessions, through [`chat`]. [`command`]: the choice between these and a workload.
//!
//! Every request of a run has its own random prompt, so only the workloads `prefix` and `replay` hit the prefix cache.

pub mod agents;
pub mod args;
pub mod cells;
pub mod cells_table;
pub mod chat;
pub mod client;
pub mod command;
pub mod http;
pub mod limits;
pub mod output;
pub mod peaks;
pub mod percentiles;
pub mod replay;
pub mod report;
pub mod roofline;
pub mod sampling;
pub mod stats;
pub mod svg;
pub mod target;
pub mod workload;

use crate::in_process::Servers;
use anyhow::{Context, Result, bail};
use args::{CommonArgs, Workload};
use client::{Client, Target};
use command::{BenchArgs, BenchCommand};
use output::{Output, create};
use pegainfer_core::rng;
use pegainfer_models::model_path::{self, ModelDir};
use pegainfer_models::{detect, engine};
use replay::Replay;
use report::{Report, Row};
use roofline::Roofline;
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
    let workload = match &args.command {
        BenchCommand::Workload(workload) => workload,
        BenchCommand::Agents(args) => return agents::run(args, servers),
    };
    let common = workload.common();
    // Report a path that cannot be written before the measurement, not after it.
    let svg = common.svg.as_deref().map(create).transpose()?;
    let output = Output::open(common.json.as_deref())?;
    let report = bench(workload, servers)?;
    if let Some(mut file) = svg {
        file.write_all(report.svg(workload)?.as_bytes()).context("the plot cannot be written")?;
    }
    output.show(&report, &cells_table::table(&report).unwrap_or_else(|| report.table()))
}

/// Measures a workload.
pub fn bench(workload: &Workload, servers: &dyn Servers) -> Result<Report> {
    let common = workload.common();
    let points = workload.points();
    let replay = match workload {
        Workload::Replay(args) => Some(Replay::read(args)?),
        _ => None,
    };
    let cells = match workload {
        Workload::Cells(args) => {
            args.check()?;
            Some(args.summary())
        }
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
    Ok(Report { version, workload, model, target, device, seed, roofline, trace, cells, rows })
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
        return Ok(Target::Http(target::connect(url, (runtime, servers))?));
    }
    let max_concurrency = points.iter().map(|point| match point.arrivals {
        Arrivals::Closed { streams } => streams,
        Arrivals::Burst | Arrivals::Poisson { .. } | Arrivals::Trace { .. } => 1,
    });
    let engine = target::load(dir, &common.engine, max_concurrency.max().unwrap_or(1))?;
    if !workload.needs_http() {
        return Ok(Target::Engine(engine));
    }
    Ok(Target::Http(target::serve(engine, dir, (runtime, servers))?))
}
