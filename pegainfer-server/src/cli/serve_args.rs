//! Flags of `serve`.

use super::http_args::HttpArgs;
use super::kv_events::KvEventsArgs;
use super::lora::LoraArgs;
use super::on_demand::OnDemandArgs;
use clap::Args;
use pegainfer_bench::recording::Prompts;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::values::{parse_bytes, parse_name};
use std::path::PathBuf;

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
    /// Flags for LoRA adapters.
    #[command(flatten)]
    pub lora: LoraArgs,
    /// Flags for KV events.
    #[command(flatten)]
    pub kv_events: KvEventsArgs,
    /// Flags for several models.
    #[command(flatten)]
    pub on_demand: OnDemandArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Also serve vLLM's gRPC services on this port of the same host; 0 takes a free one [default: no gRPC]
    #[arg(long, value_name = "PORT")]
    pub grpc_port: Option<u16>,
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
    /// True if a model of this server may have copies of KV blocks outside the device.
    pub fn has_kv_copies(&self) -> bool {
        self.engine.kv_offloading_size.is_some() || self.on_demand.is_used()
    }

    /// The arguments with the model that comes without a flag as `--model-path`.
    pub(super) fn with_model_path(mut self) -> Self {
        self.engine.model_path = self.model.take().or(self.engine.model_path);
        self
    }
}
