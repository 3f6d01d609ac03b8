//! The command line.

mod values;

use crate::bench::args::BenchArgs;
use crate::http::HttpArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::num::NonZeroUsize;
pub use values::DeviceArg;
pub(crate) use values::parse_bytes;
use values::{parse_bytes_or_none, parse_device, parse_share};

/// Serves language models behind an OpenAI-compatible API.
#[derive(Debug, Parser)]
#[command(name = "pegainfer", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; `serve` when nothing is named.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of `serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (the default)
    Serve(ServeArgs),
    /// Print the completion of one prompt, without a server
    Generate(GenerateArgs),
    /// Measure latency and throughput beside the limits of the device
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
    /// Model and engine.
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
    /// Refuse requests with fields that are in no known schema, instead of naming them in x-ignored-fields
    #[arg(long)]
    pub strict: bool,
    /// Keys, origins, limits and timeouts.
    #[command(flatten)]
    pub http: HttpArgs,
}

/// Flags of `generate`.
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// The text to continue
    pub prompt: String,
    /// Model and engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Tokens to generate at most
    #[arg(long, default_value = "128")]
    pub max_tokens: NonZeroUsize,
    /// 0 always takes the most likely token [default: the checkpoint's]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Keep the most likely tokens up to this probability mass [default: the checkpoint's]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all [default: the checkpoint's]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// The same seed gives the same text [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Pass the prompt through the chat template, as a user's message
    #[arg(long)]
    pub chat: bool,
}

/// Flags of `plan`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Checkpoint directory (config.json is enough), or a Hugging Face id [default: the bundled models/qwen3-tiny]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// One new token a row, or whole prompts
    #[arg(long, value_enum, default_value_t = Phase::Decode)]
    pub phase: Phase,
    /// Rows of the step
    #[arg(long, value_name = "N", default_value = "1")]
    pub batch: NonZeroUsize,
    /// Tokens each row attends to, the new ones included
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
    /// Which GPU, counted from 0
    #[arg(long, default_value_t = 0)]
    pub gpu: usize,
}

/// Flags of `inspect`.
#[cfg(feature = "deepseek-v4")]
#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    /// Directory of the checkpoint; with config.json alone, what the weights will take
    #[arg(value_name = "DIR")]
    pub dir: std::path::PathBuf,
}

/// What a planned step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Phase {
    /// The last token of every row is new.
    Decode,
    /// Every token of every row is new.
    Prefill,
}

/// Flags of everything that loads a model.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Checkpoint directory, or a Hugging Face id such as Qwen/Qwen3-0.6B, which is downloaded [default: the bundled
    /// models/qwen3-tiny]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// Where to run: auto, cpu, cuda, or cuda:N for GPU N, counted from 0
    #[arg(long, default_value = "auto", value_parser = parse_device)]
    pub device: DeviceArg,
    /// Context length in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<NonZeroUsize>,
    /// Requests that run at once [default: 64; 256 on a GPU]
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<NonZeroUsize>,
    /// Tokens of one engine step [default: 512; on a GPU up to 40960, as a twelfth of its memory has room for]
    #[arg(long, value_name = "TOKENS")]
    pub max_num_batched_tokens: Option<NonZeroUsize>,
    /// Tokens of a step in which requests decode while prompts of others are computed: fewer keep tokens coming evenly,
    /// more answer new requests sooner. It does not hold while many prompts wait
    #[arg(long, value_name = "TOKENS", default_value = "512")]
    pub max_num_mixed_tokens: NonZeroUsize,
    /// Size of the KV cache, such as 512M or 4G (powers of 1024) or 4GB (powers of 1000) [default: by model and flags]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub kv_cache_memory: Option<u64>,
    /// Qwen3.5: memory for copies of recurrent state, without which its prefix cache finds nothing; 0 switches that cache
    /// off [default: 1G on the CPU, a twentieth of a GPU's memory]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes_or_none)]
    pub state_cache_memory: Option<u64>,
    /// Qwen3.5: tokens between these copies, a multiple of 16; each prompt's last full block gets one, too
    #[arg(long, value_name = "TOKENS", default_value = "256")]
    pub state_cache_interval: NonZeroUsize,
    /// Share of the GPU's memory that weights, workspace and KV cache may take, with what other programs have of it
    #[arg(long, value_name = "SHARE", default_value = "0.9", value_parser = parse_share)]
    pub gpu_memory_utilization: f64,
    /// Whether a GPU replays decode steps as CUDA graphs; false shows each launch to a debugger or profiler
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set)]
    pub cuda_graph: bool,
    /// CPU threads of the engine [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Where the weights come from: the checkpoint, or seeded random numbers (no safetensors needed)
    #[arg(long, value_enum, default_value_t = LoadFormat::Auto)]
    pub load_format: LoadFormat,
    /// error, warn, info, debug or trace; also per module, as in info,pegainfer_server=debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// Where the weights come from.
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
