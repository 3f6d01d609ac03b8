//! Flags of `pegainfer bench`.

use crate::cli::EngineArgs;
use clap::{Args, Subcommand};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Flags of `bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub workload: Workload,
}

/// What to measure.
#[derive(Debug, Clone, Subcommand)]
pub enum Workload {
    /// One request at a time, over prompt and output lengths
    Latency(LatencyArgs),
    /// Many requests at once: a closed loop of streams, or a burst
    Throughput(ThroughputArgs),
    /// Poisson arrivals over HTTP, streamed, from a server inside this process or at --url
    Serve(ArrivalArgs),
    /// Each prompt twice: TTFT without and with the prefix cache
    Prefix(PrefixArgs),
}

/// Flags of `bench latency`. Every prompt length is measured with every output length.
#[derive(Debug, Clone, Args)]
pub struct LatencyArgs {
    /// Common to all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Prompt tokens of each request
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "64,1024")]
    pub prompt_len: Vec<NonZeroUsize>,
    /// Tokens that each request generates
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "64")]
    pub output_len: Vec<NonZeroUsize>,
    /// Requests of one round
    #[arg(long, value_name = "N", default_value = "4")]
    pub requests: NonZeroUsize,
}

/// Flags of `bench throughput`.
#[derive(Debug, Clone, Args)]
pub struct ThroughputArgs {
    /// Common to all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Closed loop: so many requests in flight, the next one begins when one ends [default: 1,8 if there is no --burst]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub streams: Vec<NonZeroUsize>,
    /// So many requests at once, and then no more
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub burst: Vec<NonZeroUsize>,
    /// Prompt tokens of each request
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    pub prompt_len: NonZeroUsize,
    /// Tokens that each request generates
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub output_len: NonZeroUsize,
    /// Requests of each stream in one round of a closed loop
    #[arg(long, value_name = "N", default_value = "2")]
    pub requests: NonZeroUsize,
}

/// Flags of `bench serve`.
#[derive(Debug, Clone, Args)]
pub struct ArrivalArgs {
    /// Common to all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Requests that arrive in a second, on average
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', default_value = "1,4", value_parser = parse_positive)]
    pub qps: Vec<f64>,
    /// Prompt tokens of each request
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    pub prompt_len: NonZeroUsize,
    /// Tokens that each request generates
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub output_len: NonZeroUsize,
    /// Requests of one round [default: what arrives in 15 seconds, at least 40]
    #[arg(long, value_name = "N")]
    pub requests: Option<NonZeroUsize>,
}

/// Flags of `bench prefix`.
#[derive(Debug, Clone, Args)]
pub struct PrefixArgs {
    /// Common to all workloads.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Prompt tokens of each request
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_value = "256,1024")]
    pub prompt_len: Vec<NonZeroUsize>,
    /// Tokens that each request generates
    #[arg(long, value_name = "TOKENS", default_value = "2")]
    pub output_len: NonZeroUsize,
    /// Prompts of one round
    #[arg(long, value_name = "N", default_value = "4")]
    pub requests: NonZeroUsize,
}

/// Flags of every workload.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// Model and engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Measure the server at this address instead; --model-path then names the model it serves (config.json is enough),
    /// and the flags of the engine have no effect
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Every measurement is repeated so many times, and the median of each figure reported
    #[arg(long, value_name = "N", default_value = "3")]
    pub rounds: NonZeroUsize,
    /// Of the random prompts and arrivals
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Also write the figures of every round to a file; - prints them instead of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
    /// Plot the sweep
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Memory bandwidth that the roofline assumes, 1e9 bytes a second [default: a plain read is measured]
    #[arg(long, value_name = "GB/S", value_parser = parse_positive)]
    pub read_gbs: Option<f64>,
    /// bf16 rate that the roofline assumes, 1e12 FLOP a second [default: the datasheet's; on the CPU a product is measured]
    #[arg(long, value_name = "TFLOP/S", value_parser = parse_positive)]
    pub peak_tflops: Option<f64>,
}

impl Workload {
    /// The flags that every workload has.
    pub fn common(&self) -> &CommonArgs {
        match self {
            Self::Latency(args) => &args.common,
            Self::Throughput(args) => &args.common,
            Self::Serve(args) => &args.common,
            Self::Prefix(args) => &args.common,
        }
    }

    /// As on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Latency(_) => "latency",
            Self::Throughput(_) => "throughput",
            Self::Serve(_) => "serve",
            Self::Prefix(_) => "prefix",
        }
    }
}

fn parse_positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if f64::is_finite(number) && number > 0.0 => Ok(number),
        _ => Err(format!("{text:?} is not a number above 0")),
    }
}
