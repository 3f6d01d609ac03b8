//! Flags of `sim`.

use crate::bench::args::parse_positive;
use crate::shipped::ShippedArgs;
use clap::Args;
use pegainfer_terminal::values::parse_time;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of `sim`.
#[derive(Debug, Clone, Args)]
pub struct SimArgs {
    /// Ledger that `pegainfer ledger` has written; or give --gpu and --model
    #[arg(value_name = "LEDGER")]
    pub ledger: Option<PathBuf>,
    /// A ledger inside the executable instead.
    #[command(flatten)]
    pub shipped: ShippedArgs,
    /// With --gpu and --model: without a ledger, estimate the times of steps from the card's memory bandwidth and
    /// arithmetic; real times are longer. The model is a directory or a Hugging Face id
    #[arg(long, conflicts_with = "ledger")]
    pub roofline: bool,
    /// Closed loop: number of concurrent requests; a new one starts when one ends [default: 1,8 if no other workload is
    /// given]
    #[arg(long, value_name = "N,..", value_delimiter = ',', help_heading = WORKLOAD)]
    pub concurrency: Vec<NonZeroUsize>,
    /// Burst: number of requests sent at the same time
    #[arg(long, value_name = "N,..", value_delimiter = ',', help_heading = WORKLOAD)]
    pub burst: Vec<NonZeroUsize>,
    /// Poisson arrivals over HTTP: mean rate in requests per second
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', value_parser = parse_positive, help_heading = WORKLOAD)]
    pub qps: Vec<f64>,
    /// Requests of a `serve --record` recording, or of an Azure, BurstGPT, Mooncake or Bailian trace, over HTTP
    #[arg(long, value_name = "FILE", help_heading = WORKLOAD)]
    pub trace: Option<PathBuf>,
    /// Send a session's next request after the previous response plus the session's delay, instead of at its own time
    #[arg(long, requires = "trace", help_heading = WORKLOAD)]
    pub sessions: bool,
    /// Divides the times of a trace: 2 sends its requests at twice the rate
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = parse_positive, help_heading = WORKLOAD)]
    pub speed: f64,
    /// Prompt length of each request in tokens
    #[arg(long, value_name = "TOKENS", default_value = "128", help_heading = WORKLOAD)]
    pub prompt_len: NonZeroUsize,
    /// Output length of each request in tokens
    #[arg(long, value_name = "TOKENS", default_value = "64", help_heading = WORKLOAD)]
    pub output_len: NonZeroUsize,
    /// Requests of a run [default: 2 for each concurrent request, the arrivals of 15 seconds (40 to 100000), or the
    /// whole trace]
    #[arg(long, value_name = "N", help_heading = WORKLOAD)]
    pub requests: Option<NonZeroUsize>,
    /// Number of runs with different prompts and arrival times; the median of each metric is printed
    #[arg(long, value_name = "N", default_value = "3", help_heading = WORKLOAD)]
    pub runs: NonZeroUsize,
    /// Seed of prompts and arrival times: those of `bench` with the same seed
    #[arg(long, default_value_t = 1, help_heading = WORKLOAD)]
    pub seed: u64,
    /// Find the highest Poisson rate with TTFT below this, such as 300ms
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = SEARCH)]
    pub slo_ttft: Option<Duration>,
    /// Find the highest Poisson rate with TPOT below this, such as 20ms
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = SEARCH)]
    pub slo_tpot: Option<Duration>,
    /// With --slo-ttft or --slo-tpot: print the number of GPUs for this many users
    #[arg(long, value_name = "N", help_heading = SEARCH)]
    pub users: Option<NonZeroUsize>,
    /// With --users: mean time between two requests of one user
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_time, requires = "users",
        help_heading = SEARCH)]
    pub user_interval: Duration,
    /// Quantile of requests that --slo-ttft and --slo-tpot are for
    #[arg(long, value_name = "PERCENT", default_value = "99", value_parser = ["50", "90", "99"], help_heading = SEARCH)]
    pub quantile: String,
    /// Try other values of --mixed-step-token-budget, --max-num-batched-tokens and --max-num-seqs, and print the
    /// results
    #[arg(long, conflicts_with_all = ["slo_ttft", "slo_tpot"], help_heading = SEARCH)]
    pub tune: bool,
    /// Number of engines, each with the ledger's device and sizes, behind the router of `serve --data-parallel-size`
    #[arg(long, alias = "dp", value_name = "N", default_value = "1", help_heading = ENGINE)]
    pub data_parallel_size: NonZeroUsize,
    /// Send requests to the engines in turn, for comparison with the router
    #[arg(long, requires = "data_parallel_size", help_heading = ENGINE)]
    pub round_robin: bool,
    /// Sequences that run at the same time [default: the ledger's]
    #[arg(long, value_name = "N", help_heading = ENGINE)]
    pub max_num_seqs: Option<NonZeroUsize>,
    /// Token budget of one step [default: the ledger's]
    #[arg(long, value_name = "TOKENS", help_heading = ENGINE)]
    pub max_num_batched_tokens: Option<NonZeroUsize>,
    /// Token budget of a mixed step [default: the ledger's]
    #[arg(long, value_name = "TOKENS", help_heading = ENGINE)]
    pub mixed_step_token_budget: Option<NonZeroUsize>,
    /// KV cache in tokens [default: the ledger's]
    #[arg(long, value_name = "TOKENS", help_heading = ENGINE)]
    pub kv_cache_tokens: Option<NonZeroUsize>,
    /// Keep copies of the KV of this many tokens in host memory, as --kv-offloading-size does
    #[arg(long, value_name = "TOKENS", help_heading = ENGINE)]
    pub kv_offloading_tokens: Option<NonZeroUsize>,
    /// Tokens per second that are copied from host memory, or to it. Qwen3-4B: 320000 on an H200
    #[arg(long, value_name = "RATE", default_value = "300000", value_parser = parse_positive, help_heading = ENGINE)]
    pub kv_offloading_rate: f64,
    /// Also keep copies of the KV of this many tokens in a file, as --kv-disk does
    #[arg(long, value_name = "TOKENS", requires = "kv_offloading_tokens", help_heading = ENGINE)]
    pub kv_disk_tokens: Option<NonZeroUsize>,
    /// Tokens per second that are read from the file. Qwen3-4B: 7000 for each GB/s of the disk
    #[arg(long, value_name = "RATE", default_value = "20000", value_parser = parse_positive, help_heading = ENGINE)]
    pub kv_disk_rate: f64,
    /// Fail if the ledger does not cover a step
    #[arg(long)]
    pub strict: bool,
    /// Also write the metrics to a JSON file; - prints the JSON instead of the tables
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
    /// Write a plot of TTFT, TPOT and output rate by load to an SVG file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tune", "slo_ttft", "slo_tpot"])]
    pub svg: Option<PathBuf>,
    /// Write the steps of the last run as a trace for <https://ui.perfetto.dev>
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
}

const WORKLOAD: &str = "Workload";
const SEARCH: &str = "Search";
const ENGINE: &str = "Engine";
