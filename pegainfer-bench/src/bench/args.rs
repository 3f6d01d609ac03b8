//! Flags of the workloads of `pegainfer bench`.

use super::sampling::Sampling;
use clap::{Arg, Args, Subcommand, ValueEnum};
use pegainfer_models::args::EngineArgs;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Default number of requests per client of a closed loop.
pub const PER_CLIENT: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1);

/// Workload to measure.
#[derive(Debug, Clone, Subcommand)]
pub enum Workload {
    /// One request at a time, over a grid of prompt and output lengths
    Latency(LatencyArgs),
    /// Many concurrent requests: a closed loop, or a burst
    Throughput(ThroughputArgs),
    /// Poisson arrivals over HTTP with streamed responses, to a server in this process or at --url
    Serve(ArrivalArgs),
    /// Each prompt twice: TTFT without and with a prefix cache hit
    Prefix(PrefixArgs),
    /// The requests of a trace at its own times, over HTTP with streamed responses, to a server in this process or at
    /// --url
    Replay(ReplayArgs),
    /// The cells of a public benchmark as a closed loop over HTTP, to a server in this process or at --url
    #[command(mut_arg("runs", one_run))]
    Cells(CellsArgs),
}

/// Default number of runs of the cells, which are long.
fn one_run(runs: Arg) -> Arg {
    runs.default_value("1")
}

/// Flags of `bench latency`. Every prompt length is measured with every output length.
#[derive(Debug, Clone, Args)]
pub struct LatencyArgs {
    /// Flags of all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Prompt length of each request in tokens
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "64,1024")]
    pub prompt_len: Vec<NonZeroUsize>,
    /// Output length of each request in tokens
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "64")]
    pub output_len: Vec<NonZeroUsize>,
    /// Requests per run
    #[arg(long, value_name = "N", default_value = "4")]
    pub requests: NonZeroUsize,
}

/// Flags of `bench throughput`.
#[derive(Debug, Clone, Args)]
pub struct ThroughputArgs {
    /// Flags of all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Closed loop: number of concurrent requests; a new one starts when one ends [default: 1,8 if there is no --burst]
    #[arg(long, alias = "streams", value_name = "N,..", value_delimiter = ',')]
    pub concurrency: Vec<NonZeroUsize>,
    /// Burst: number of requests sent at the same time
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub burst: Vec<NonZeroUsize>,
    /// Prompt length of each request in tokens
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    pub prompt_len: NonZeroUsize,
    /// Output length of each request in tokens
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub output_len: NonZeroUsize,
    /// Sampling of the requests; anything but greedy is measured over HTTP
    #[arg(long, value_enum, value_name = "PROFILE,..", value_delimiter = ',', default_value = "greedy")]
    pub sampling: Vec<Sampling>,
    /// Requests per run and concurrent client of a closed loop
    #[arg(long, value_name = "N", default_value_t = PER_CLIENT)]
    pub requests: NonZeroUsize,
}

/// Flags of `bench serve`.
#[derive(Debug, Clone, Args)]
pub struct ArrivalArgs {
    /// Flags of all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Mean arrival rate in requests per second
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', default_value = "1,4", value_parser = parse_positive)]
    pub qps: Vec<f64>,
    /// Prompt length of each request in tokens
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    pub prompt_len: NonZeroUsize,
    /// Output length of each request in tokens
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub output_len: NonZeroUsize,
    /// Requests per run [default: the arrivals of 15 seconds, at least 40 and at most 100000]
    #[arg(long, value_name = "N")]
    pub requests: Option<NonZeroUsize>,
}

/// Flags of `bench prefix`.
#[derive(Debug, Clone, Args)]
pub struct PrefixArgs {
    /// Flags of all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Prompt length of each request in tokens
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "256,1024")]
    pub prompt_len: Vec<NonZeroUsize>,
    /// Output length of each request in tokens
    #[arg(long, value_name = "TOKENS", default_value = "2")]
    pub output_len: NonZeroUsize,
    /// Prompts per run
    #[arg(long, value_name = "N", default_value = "4")]
    pub requests: NonZeroUsize,
}

/// Flags of `bench replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// Flags of all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// A `serve --record` recording, or an Azure, BurstGPT, Mooncake or Qwen-Bailian trace
    pub file: PathBuf,
    /// Divides the times of the trace: 2 sends twice as many requests a second
    #[arg(long, value_name = "FACTOR,..", value_delimiter = ',', default_value = "1", value_parser = parse_positive)]
    pub speed: Vec<f64>,
    /// Send a session's next request after the previous response plus the session's delay, instead of at its own time
    #[arg(long)]
    pub sessions: bool,
    /// Take only the first requests of the file [default: all]
    #[arg(long, value_name = "N")]
    pub requests: Option<NonZeroUsize>,
}

/// A public benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Benchmark {
    /// 8,192 / 1,024 tokens at a concurrency of 1, 16, 64, 256 and 1,024
    Sglang,
    /// 1,000 / 1,000 tokens at 1, 2, 4 to 64, then 64 more at a time
    ArtificialAnalysis,
    /// 1,024 / 1,024, 1,024 / 8,192 and 8,192 / 1,024 tokens at 4, 8, 16, 32 and 64
    #[value(name = "inferencex")]
    InferenceX,
}

/// Flags of `bench cells`.
#[derive(Debug, Clone, Args)]
pub struct CellsArgs {
    /// Flags of all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Benchmark whose cells are measured
    #[arg(value_enum)]
    pub name: Benchmark,
    /// Measure only the cells of these concurrencies [default: all]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub concurrency: Vec<NonZeroUsize>,
    /// Measure only the cells up to this concurrency [default: 64 for artificial-analysis, otherwise all]
    #[arg(long, value_name = "N")]
    pub max_concurrency: Option<NonZeroUsize>,
    /// Requests per run and concurrent client [default: 4 for sglang, otherwise 10; at least 8 in a cell]
    #[arg(long, value_name = "N")]
    pub requests: Option<NonZeroUsize>,
}

/// Flags of every workload.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Measure the server at this URL; --model-path names its model (config.json is enough), and engine flags count
    /// only for the roofline
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Number of measured runs; the median of each metric is reported
    #[arg(long, alias = "rounds", value_name = "N", default_value = "3")]
    pub runs: NonZeroUsize,
    /// Seed of the random prompts and arrival times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Also write the metrics of every run to a JSON file; - prints the JSON instead of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
    /// Write a plot of the sweep to an SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Memory bandwidth for the roofline, in GB/s [default: measured with a plain read]
    #[arg(long, value_name = "GB/S", value_parser = parse_positive)]
    pub read_gbs: Option<f64>,
    /// bf16 rate for the roofline, in TFLOP/s [default: the datasheet's; on the CPU, measured with a GEMM]
    #[arg(long, value_name = "TFLOP/S", value_parser = parse_positive)]
    pub peak_tflops: Option<f64>,
}

impl Workload {
    /// The flags of all workloads.
    pub fn common(&self) -> &CommonArgs {
        match self {
            Self::Latency(args) => &args.common,
            Self::Throughput(args) => &args.common,
            Self::Serve(args) => &args.common,
            Self::Prefix(args) => &args.common,
            Self::Replay(args) => &args.common,
            Self::Cells(args) => &args.common,
        }
    }

    /// The sampling profiles of the sweep.
    pub fn sampling(&self) -> &[Sampling] {
        match self {
            Self::Throughput(args) => &args.sampling,
            _ => &[Sampling::Greedy],
        }
    }

    /// True if it is measured over HTTP.
    pub fn needs_http(&self) -> bool {
        let is_greedy = self.sampling().iter().all(|sampling| *sampling == Sampling::Greedy);
        !is_greedy || matches!(self, Self::Serve(_) | Self::Replay(_) | Self::Cells(_))
    }

    /// Name of the workload on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Latency(_) => "latency",
            Self::Throughput(_) => "throughput",
            Self::Serve(_) => "serve",
            Self::Prefix(_) => "prefix",
            Self::Replay(_) => "replay",
            Self::Cells(_) => "cells",
        }
    }
}

/// Parses a finite number above 0.
pub fn parse_positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if f64::is_finite(number) && number > 0.0 => Ok(number),
        _ => Err(format!("{text:?} is not a number above 0")),
    }
}
