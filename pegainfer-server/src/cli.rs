//! The command line.

mod values;

use crate::bench::args::BenchArgs;
use crate::http::HttpArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::num::NonZeroUsize;
pub use values::DeviceArg;
pub(crate) use values::parse_bytes;
use values::{parse_bytes_or_none, parse_device, parse_fraction};

/// Serves language models behind an OpenAI-compatible API.
#[derive(Debug, Parser)]
#[command(name = "pegainfer", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// The command; `serve` if none is given.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of `serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (the default)
    Serve(ServeArgs),
    /// Print the completion of one prompt, without a server
    Generate(GenerateArgs),
    /// Measure latency and throughput and compare them with the limits of the device
    Bench(BenchArgs),
    /// Print the ops of one step with their shapes, bytes and FLOPs, without loading weights
    Plan(PlanArgs),
    /// Check every op on this machine's GPU against the CPU
    Doctor(DoctorArgs),
    /// Compare a DeepSeek-V4 checkpoint's headers with its config.json, and print the memory it takes per GPU
    #[cfg(feature = "deepseek-v4")]
    Inspect(InspectArgs),
}

impl Cli {
    /// The command, with `serve` filled in.
    pub fn into_command(self) -> Command {
        self.command.unwrap_or(Command::Serve(self.serve))
    }
}

/// Flags of `serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Name that clients use for the model; give it again for more names [default: the name of the directory or id]
    #[arg(long, value_name = "NAME")]
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
    /// Flags of the HTTP server.
    #[command(flatten)]
    pub http: HttpArgs,
}

/// Flags of `generate`.
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// The text to continue
    pub prompt: String,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Maximum number of tokens to generate
    #[arg(long, default_value = "128")]
    pub max_tokens: NonZeroUsize,
    /// Sampling temperature; 0 always takes the most likely token [default: the checkpoint's]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most likely tokens up to this probability mass [default: the checkpoint's]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all [default: the checkpoint's]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// The same seed gives the same text [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Render the prompt with the chat template, as a user message
    #[arg(long)]
    pub chat: bool,
}

/// Flags of `plan`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Checkpoint directory (config.json is enough), or a Hugging Face id [default: the bundled models/qwen3-tiny]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// Kind of step: one new token per sequence, or whole prompts
    #[arg(long, value_enum, default_value_t = Phase::Decode)]
    pub phase: Phase,
    /// Number of sequences in the step
    #[arg(long, value_name = "N", default_value = "1")]
    pub batch: NonZeroUsize,
    /// Context length of each sequence in tokens, including the new ones
    #[arg(long, value_name = "TOKENS", default_value = "1024")]
    pub context: NonZeroUsize,
    /// Print every op as JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Flags of `doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Model whose shapes are checked: a directory (config.json is enough) or a Hugging Face id [default: the bundled
    /// model, and a model of Qwen3-4B's shape]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// Index of the GPU, counted from 0
    #[arg(long, default_value_t = 0)]
    pub gpu: usize,
}

/// Flags of `inspect`.
#[cfg(feature = "deepseek-v4")]
#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    /// Directory of the checkpoint; config.json alone is enough to print the memory that the weights will take
    #[arg(value_name = "DIR")]
    pub dir: std::path::PathBuf,
}

/// Kind of the planned step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Phase {
    /// Only the last token of each sequence is new.
    Decode,
    /// All tokens of each sequence are new.
    Prefill,
}

/// Flags of all commands that load a model.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Checkpoint directory, or a Hugging Face id such as Qwen/Qwen3-0.6B, which is downloaded [default: the bundled
    /// models/qwen3-tiny]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// Device to run on: auto, cpu, cuda, or cuda:N for GPU N, counted from 0
    #[arg(long, default_value = "auto", value_parser = parse_device)]
    pub device: DeviceArg,
    /// Context length in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<NonZeroUsize>,
    /// Maximum number of sequences that run at the same time [default: 64; 256 on a GPU]
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<NonZeroUsize>,
    /// Token budget of one engine step [default: 512; on a GPU up to 40960, as many as a twelfth of its memory can hold]
    #[arg(long, value_name = "TOKENS")]
    pub max_num_batched_tokens: Option<NonZeroUsize>,
    /// Token budget of a step that mixes decoding sequences with prefill chunks: a smaller budget keeps the time between
    /// tokens (ITL) even, a larger one gives new requests their first token sooner. It grows with the backlog of prompts
    #[arg(
        long = "mixed-step-token-budget",
        alias = "max-num-mixed-tokens",
        value_name = "TOKENS",
        default_value = "512"
    )]
    pub max_num_mixed_tokens: NonZeroUsize,
    /// Size of the KV cache, such as 512M or 4G (powers of 1024) or 4GB (powers of 1000) [default: by model and flags]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub kv_cache_memory: Option<u64>,
    /// Qwen3.5: memory for snapshots of recurrent state, without which its prefix cache has no hits; 0 switches that cache
    /// off [default: 1G on the CPU, a twentieth of a GPU's memory]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes_or_none)]
    pub state_cache_memory: Option<u64>,
    /// Qwen3.5: tokens between state snapshots, a multiple of 16; the last full block of each prompt gets one, too
    #[arg(long, value_name = "TOKENS", default_value = "256")]
    pub state_cache_interval: NonZeroUsize,
    /// Fraction of the GPU's memory that weights, workspace and KV cache may use, including what other programs use
    #[arg(long, value_name = "FRACTION", default_value = "0.9", value_parser = parse_fraction)]
    pub gpu_memory_utilization: f64,
    /// Whether a GPU replays decode steps as CUDA graphs; with false, a debugger or profiler sees each launch
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set)]
    pub cuda_graph: bool,
    /// Number of CPU threads of the engine [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Source of the weights: the checkpoint, or seeded random numbers (no safetensors needed)
    #[arg(long, value_enum, default_value_t = LoadFormat::Auto)]
    pub load_format: LoadFormat,
    /// Log level: error, warn, info, debug or trace; also per module, as in info,pegainfer_server=debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// Source of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint's safetensors.
    Auto,
    /// Seeded random numbers.
    Dummy,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::args::Workload;
    use clap::CommandFactory;

    fn parse(args: &[&str]) -> Result<Command, clap::Error> {
        Cli::try_parse_from(["pegainfer"].iter().chain(args)).map(Cli::into_command)
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_is_the_default_command() {
        for args in [&["--model-path", "x", "--port", "1"][..], &["serve", "--model-path", "x", "--port", "1"]] {
            let Command::Serve(serve) = parse(args).unwrap() else { panic!("{args:?} is not serve") };
            assert_eq!((serve.engine.model_path.as_deref(), serve.port), (Some("x"), 1));
        }
        assert!(matches!(parse(&[]).unwrap(), Command::Serve(_)));
        let Command::Generate(generate) = parse(&["generate", "hi", "--model-path", "x"]).unwrap() else { panic!() };
        assert_eq!(generate.prompt, "hi");
    }

    #[test]
    fn names_may_be_repeated() {
        let names = ["--served-model-name", "a", "--served-model-name", "b"];
        let Command::Serve(serve) = parse(&names).unwrap() else { panic!() };
        assert_eq!(serve.served_model_name, ["a", "b"]);
    }

    #[test]
    fn old_names_of_flags_are_hidden_aliases() {
        let old = ["--trace-share", "0.5", "--max-num-mixed-tokens", "7"];
        let new = ["--trace-sampling-ratio", "0.5", "--mixed-step-token-budget", "7"];
        for args in [old, new] {
            let Command::Serve(serve) = parse(&args).unwrap() else { panic!() };
            assert_eq!((serve.http.trace_sampling_ratio, serve.engine.max_num_mixed_tokens.get()), (0.5, 7));
        }
        for args in [["--streams", "3", "--rounds", "2"], ["--concurrency", "3", "--runs", "2"]] {
            let Command::Bench(bench) = parse(&[&["bench", "throughput"], &args[..]].concat()).unwrap() else {
                panic!()
            };
            let Workload::Throughput(flags) = bench.workload else { panic!() };
            assert_eq!((flags.concurrency[0].get(), flags.common.runs.get()), (3, 2));
        }
        let mut command = Cli::command();
        command.build();
        for name in ["serve", "bench"] {
            let subcommand = command.find_subcommand_mut(name).unwrap();
            let help = subcommand.render_long_help().to_string();
            assert!(!["trace-share", "max-num-mixed-tokens"].iter().any(|old| help.contains(old)), "{help}");
        }
    }

    #[test]
    fn values_are_checked() {
        assert!(parse(&["--max-num-seqs", "0"]).is_err());
        let Command::Serve(serve) = parse(&["--state-cache-memory", "0", "--device", "cuda:1"]).unwrap() else {
            panic!()
        };
        assert_eq!((serve.engine.state_cache_memory, serve.engine.device), (Some(0), DeviceArg::Cuda(1)));
        let error = parse(&["--device", "tpu"]).unwrap_err().to_string();
        assert!(error.contains("expected auto, cpu, cuda or cuda:N"), "{error}");
        assert!(parse(&["--gpu-memory-utilization", "1.01"]).is_err());
    }
}
