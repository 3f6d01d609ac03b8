//! Flags of all commands that load a model.

use crate::speculative;
use clap::{Args, ValueEnum};
use pegainfer_core::engine::{Fault, FaultKind};
use pegainfer_core::exec::Activations;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_kernels::ops::KvDType;
use pegainfer_runtime::{AtLoad, LoraOptions, Overrides};
use pegainfer_terminal::values::{parse_bytes, parse_bytes_or_none, parse_fraction, parse_gib, parse_seconds};
use serde_json::Value;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of all commands that load a model.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Checkpoint directory or GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B to download [default: qwen3-tiny,
    /// which is inside the executable]
    #[arg(long, value_name = "DIR|ID")]
    pub model_path: Option<String>,
    /// Branch, tag or commit of a Hugging Face id, the same as ID@REVISION [default: main]
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// PEM file with the certificate authorities of a Hugging Face mirror, instead of Mozilla's and SSL_CERT_FILE's
    #[arg(long, value_name = "FILE")]
    pub hub_ca: Option<PathBuf>,
    /// What the model is for; auto: embed if the checkpoint has the pooling of sentence-transformers, else generate
    #[arg(long, value_enum, default_value_t)]
    pub task: TaskArg,
    /// Device to run on: auto, cpu, cuda, cuda:N for GPU N, counted from 0, or cuda:N,M,… for these GPUs in this order
    #[arg(long, default_value = "auto", value_parser = parse_device)]
    pub device: DeviceArg,
    /// Number of GPUs that share the model, consecutive from --device on; on a CPU, ranks for tests [default: the fewest
    /// GPUs whose free memory holds the model; 1 on the CPU]
    #[arg(long, alias = "tp", value_name = "N")]
    pub tensor_parallel_size: Option<NonZeroUsize>,
    /// Number of engines of the model in this process, each on its own GPUs; requests go to the engine that has their
    /// prefix, or the least work (docs/operations/data-parallel.md). On a CPU the engines share the threads
    #[arg(long, alias = "dp", value_name = "N", default_value = "1")]
    pub data_parallel_size: NonZeroUsize,
    /// For tests: engine I of --data-parallel-size loses its device after N steps, or does not end the next one (I:N:stuck)
    #[arg(long, value_name = "I:N[:stuck]", value_parser = parse_lost_engine)]
    pub lose_engine: Option<LostEngine>,
    /// For development: time rank 0 of N alone on one GPU, without the other ranks; the output is meaningless
    #[arg(long, value_name = "N", conflicts_with = "tensor_parallel_size")]
    pub loop_back_ranks: Option<NonZeroUsize>,
    /// For development: compare tokens and results of all ranks after each step, bit for bit; a difference fails the
    /// step's requests. Slow
    #[arg(long)]
    pub check_ranks: bool,
    /// Context length in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<NonZeroUsize>,
    /// Maximum number of sequences that run at the same time [default: 64; on a GPU up to 256, as its memory allows]
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<NonZeroUsize>,
    /// Maximum number of running and queued requests (each choice counts); more are refused with 503
    #[arg(long, value_name = "N", default_value = "1024")]
    pub max_queued_requests: NonZeroUsize,
    /// Token budget of one engine step [default: 512; on a GPU up to 40960, as many as a twelfth of its memory can
    /// hold, 4096 with DeepSeek-V4]
    #[arg(long, value_name = "TOKENS")]
    pub max_num_batched_tokens: Option<NonZeroUsize>,
    /// Token budget of a step that mixes decoding with prefill: smaller keeps the ITL even, larger gives new requests
    /// their first token sooner. It grows with the backlog of prompts
    #[arg(
        long = "mixed-step-token-budget",
        alias = "max-num-mixed-tokens",
        value_name = "TOKENS",
        default_value = "512"
    )]
    pub max_num_mixed_tokens: NonZeroUsize,
    /// Formats of weights and KV cache.
    #[command(flatten)]
    pub formats: FormatArgs,
    /// Size of the KV cache, such as 512M or 4G (powers of 1024) or 4GB (powers of 1000) [default: by model and flags]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub kv_cache_memory: Option<u64>,
    /// Host memory for copies of KV blocks, in GiB or with a unit such as 512M: prompts that the KV cache has evicted
    /// are loaded from there (docs/operations/kv-tiers.md)
    #[arg(long, value_name = "GIB", value_parser = parse_gib)]
    pub kv_offloading_size: Option<u64>,
    /// File for more copies of KV blocks, which the next start finds again, and its size, such as /nvme/kv:200G; needs
    /// --kv-offloading-size
    #[arg(long, value_name = "FILE:GIB", value_parser = parse_kv_disk)]
    pub kv_disk: Option<(PathBuf, u64)>,
    /// Qwen3.5 and DeepSeek-V4: memory for snapshots of state, which their prefix cache needs; 0 switches that cache off
    /// [default: 1G on the CPU, a twentieth of a GPU's memory]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes_or_none)]
    pub state_cache_memory: Option<u64>,
    /// Qwen3.5: tokens between state snapshots, a multiple of 16; the last full block of each prompt also gets one
    #[arg(long, value_name = "TOKENS", default_value = "256")]
    pub state_cache_interval: NonZeroUsize,
    /// Fraction of the GPU's memory for weights, workspace and KV cache, including what other programs use
    #[arg(long, value_name = "FRACTION", default_value = "0.9", value_parser = parse_fraction)]
    pub gpu_memory_utilization: f64,
    /// Use the GPU as if it had only this much memory
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub gpu_memory_limit: Option<u64>,
    /// Replay decode steps as CUDA graphs; false shows each launch to a debugger or profiler
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set)]
    pub cuda_graph: bool,
    /// Speculative decoding, as vLLM's JSON, such as {"method": "ngram", "num_speculative_tokens": 4}; the output is
    /// the same. ngram and suffix draft from the request's own text, mtp by a layer of Qwen3.5 and DeepSeek-V4 (April),
    /// dspark by layers of DeepSeek-V4 (0731)
    #[arg(long, value_name = "JSON", value_parser = speculative::parse)]
    pub speculative_config: Option<Speculation>,
    /// Serve LoRA adapters next to the model; requests name them as `model` (docs/models/lora.md). Qwen3 and
    /// Qwen3.5
    #[arg(long)]
    pub enable_lora: bool,
    /// Maximum number of distinct adapters in one step; the device has memory for each
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub max_loras: u16,
    /// Maximum rank of an adapter; each has memory for it
    #[arg(long, value_name = "RANK", default_value = "16", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub max_lora_rank: u16,
    /// Number of CPU threads of all engines together [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Source of the weights: the checkpoint, or seeded random numbers (no safetensors needed)
    #[arg(long, value_enum, default_value_t = LoadFormat::Auto)]
    pub load_format: LoadFormat,
    /// With --load-format dummy and a model with experts: the router of each layer sends about a third of the tokens to
    /// expert 0, to measure uneven routing
    #[arg(long)]
    pub dummy_router_skew: bool,
    /// Serve a model that reads images without its image encoder, as a model of text
    #[arg(long)]
    pub language_model_only: bool,
    /// Extend the context with YaRN, instead of config.json's rope_scaling: {"rope_type": "yarn", "factor": 4.0,
    /// "original_max_position_embeddings": 32768}. Qwen3 and Qwen3.5
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub rope_scaling: Option<Value>,
    /// /health reports an engine that has work and completes no step for this long [default: 30; 120 on the CPU]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub step_deadline: Option<Duration>,
    /// Log level: error, warn, info, debug or trace; also per module, as in info,pegainfer_server=debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
    /// Format of the log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

impl EngineArgs {
    /// Bytes of host memory for copies of KV blocks: an engine's share.
    pub fn kv_offloading(&self) -> Option<u64> {
        self.kv_offloading_size.map(|bytes| bytes / self.data_parallel_size.get() as u64)
    }

    /// Slots for adapters, if they are enabled.
    pub fn lora(&self) -> Option<LoraOptions> {
        let options = LoraOptions { max_loras: self.max_loras.into(), max_rank: self.max_lora_rank.into() };
        self.enable_lora.then_some(options)
    }

    /// The changes that the flags make to config.json.
    pub fn overrides(&self) -> Overrides {
        Overrides {
            rope_scaling: self.rope_scaling.clone(),
            router_skew: self.dummy_router_skew,
            ..self.formats.overrides()
        }
    }
}

/// Flags for the formats of weights and KV cache.
#[derive(Debug, Clone, Args)]
pub struct FormatArgs {
    /// Format of the KV cache: auto is bf16, fp8 (or fp8_e4m3) takes about half of the memory. Qwen3 and Qwen3.5
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = KvCacheDType::Auto)]
    pub kv_cache_dtype: KvCacheDType,
    /// Round a bf16 checkpoint at load: fp8 is the format of the official FP8 checkpoints, int4 has groups of 128. Qwen3
    /// and Qwen3.5
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantization: Option<QuantizationArg>,
    /// On the CPU, keep activations in bf16 for group-quantised weights such as AWQ and Q4_K, instead of rounding them to
    /// int8 per 32 columns. Many times slower
    #[arg(long)]
    pub exact_activations: bool,
    /// On Hopper, round activations of prompts to FP8 per 128 columns for 4-bit weights in groups of 128, such as AWQ and
    /// GPTQ. A quarter less time to the first token
    #[arg(long, conflicts_with = "exact_activations")]
    pub fp8_prompts: bool,
}

impl FormatArgs {
    /// The changes that the flags make to config.json.
    pub fn overrides(&self) -> Overrides {
        Overrides {
            quantization: self.quantization.map(QuantizationArg::at_load),
            kv_dtype: if self.kv_cache_dtype == KvCacheDType::Fp8 { KvDType::Fp8 } else { KvDType::Bf16 },
            activations: match (self.exact_activations, self.fp8_prompts) {
                (true, _) => Activations::Exact,
                (false, true) => Activations::RoundedPrompts,
                (false, false) => Activations::Rounded,
            },
            ..Overrides::default()
        }
    }
}

/// Element formats of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDType {
    /// The model's own: bf16.
    Auto,
    /// bf16.
    #[value(alias = "bfloat16")]
    Bf16,
    /// e4m3 with a scale per token and KV head.
    #[value(alias = "fp8_e4m3")]
    Fp8,
}

/// Weight formats for rounding at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantizationArg {
    /// e4m3 with a scale per block of 128 x 128.
    Fp8,
    /// Symmetric 4-bit integers with a scale per 128 columns of a row.
    Int4,
}

impl QuantizationArg {
    /// The format in the engine.
    pub fn at_load(self) -> AtLoad {
        match self {
            Self::Fp8 => AtLoad::Fp8,
            Self::Int4 => AtLoad::Int4,
        }
    }
}

/// Source of the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum TaskArg {
    /// What the files of the checkpoint say.
    #[default]
    Auto,
    /// Text.
    Generate,
    /// A vector for a text: /v1/embeddings.
    Embed,
    /// A score for a query and a document: /v1/rerank.
    Rerank,
}

/// Where weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint's safetensors.
    Auto,
    /// Seeded random numbers.
    Dummy,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// `2026-11-21 11:16:07.123  INFO message`
    Text,
    /// One JSON object for each line, with the numbers of a request as fields
    Json,
}

/// An engine that a test stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostEngine {
    /// Its number.
    pub engine: usize,
    /// What happens to it.
    pub fault: Fault,
}

/// Device to run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceArg {
    /// The first GPU if this build and this machine have one, otherwise the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this index, and as many after it as the engines need.
    Cuda(usize),
    /// These NVIDIA GPUs, in this order.
    Gpus(Vec<usize>),
}

/// Parses a JSON object.
fn parse_object(text: &str) -> Result<Value, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    if value.is_object() { Ok(value) } else { Err(format!("{value} is not a JSON object")) }
}

/// Parses `I:N` or `I:N:stuck`.
fn parse_lost_engine(text: &str) -> Result<LostEngine, String> {
    let (numbers, kind) = match text.strip_suffix(":stuck") {
        Some(numbers) => (numbers, FaultKind::Stuck),
        None => (text, FaultKind::Lost),
    };
    let parts = numbers.split_once(':').and_then(|(engine, after)| Some((engine.parse().ok()?, after.parse().ok()?)));
    let (engine, after) =
        parts.ok_or_else(|| format!("{text:?} is not an engine and a number of steps, such as 1:50"))?;
    Ok(LostEngine { engine, fault: Fault { after, kind } })
}

/// Parses `auto`, `cpu`, `cuda`, `cuda:N` or `cuda:N,M`.
fn parse_device(text: &str) -> Result<DeviceArg, String> {
    let wrong = || format!("{text:?} is not a device: expected auto, cpu, cuda, cuda:N or cuda:N,M");
    match text.split_once(':') {
        None if text == "auto" => Ok(DeviceArg::Auto),
        None if text == "cpu" => Ok(DeviceArg::Cpu),
        None if text == "cuda" => Ok(DeviceArg::Cuda(0)),
        Some(("cuda", list)) if list.contains(',') => {
            let gpus: Vec<usize> = list.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
            let twice = gpus.iter().enumerate().find(|(i, gpu)| gpus[..*i].contains(gpu));
            twice.map_or(Ok(()), |(_, gpu)| Err(format!("{text:?} has GPU {gpu} twice")))?;
            Ok(DeviceArg::Gpus(gpus))
        }
        Some(("cuda", ordinal)) => ordinal.parse().map(DeviceArg::Cuda).map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

/// FILE:GIB, where GIB may have a unit.
fn parse_kv_disk(text: &str) -> Result<(PathBuf, u64), String> {
    match text.rsplit_once(':') {
        Some((path, size)) if !path.is_empty() => Ok((PathBuf::from(path), parse_gib(size)?)),
        _ => Err("write a path and a size, such as /nvme/kv:200G".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        for (text, expected) in [
            ("auto", DeviceArg::Auto),
            ("cpu", DeviceArg::Cpu),
            ("cuda", DeviceArg::Cuda(0)),
            ("cuda:0", DeviceArg::Cuda(0)),
            ("cuda:11", DeviceArg::Cuda(11)),
            ("cuda:2,0", DeviceArg::Gpus(vec![2, 0])),
        ] {
            assert_eq!(parse_device(text), Ok(expected), "{text}");
        }
        for bad in ["tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0,", "cuda:0,x", "cpu:0", "1", ""] {
            let error = parse_device(bad).unwrap_err();
            assert!(error.contains("expected auto, cpu, cuda, cuda:N or cuda:N,M"), "{bad}: {error}");
        }
        assert_eq!(parse_device("cuda:1,0,1").unwrap_err(), "\"cuda:1,0,1\" has GPU 1 twice");
    }
}
