//! Flags of `pegainfer bench agents`.

use crate::bench::sampling::Fields;
use clap::Args;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::values::parse_seconds;
use serde_json::Value;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of `bench agents`. Lengths are approximate: the text is scaled by a probe of the server's tokenizer.
#[derive(Debug, Clone, Args)]
pub struct AgentsArgs {
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Measure the OpenAI-compatible server at this URL; model and engine flags are then without effect [default: a
    /// server in this process]
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Number of concurrent sessions
    #[arg(long, value_name = "N", default_value = "4")]
    pub sessions: NonZeroUsize,
    /// Length of the system prompt with its tool definitions, in tokens
    #[arg(long, value_name = "TOKENS", default_value = "12000")]
    pub system_tokens: NonZeroUsize,
    /// Length of each task and each tool result, in tokens
    #[arg(long, value_name = "TOKENS", default_value = "1000")]
    pub turn_tokens: NonZeroUsize,
    /// Length of each answer in tokens
    #[arg(long, value_name = "TOKENS", default_value = "200")]
    pub answer_tokens: NonZeroUsize,
    /// Length of the last prompt of a session, in tokens
    #[arg(long, value_name = "TOKENS", default_value = "20000")]
    pub grow_to: NonZeroUsize,
    /// Give each session its own system prompt, instead of one for all
    #[arg(long)]
    pub distinct_systems: bool,
    /// Write tool definitions and results as plain text, for servers without a parser of tool calls
    #[arg(long)]
    pub text_tools: bool,
    /// Number of sub-agents that each session starts halfway and waits for: two turns, the same system prompt
    #[arg(long, value_name = "N", default_value = "0")]
    pub subagents: usize,
    /// Mean time between an answer and the next turn, exponentially distributed [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub think_time: Option<Duration>,
    /// After the sessions, send the last turn of each one again without the prefix cache, and compare the answers
    #[arg(long)]
    pub verify: bool,
    /// Also verify every N-th turn
    #[arg(long, value_name = "N", requires = "verify")]
    pub verify_every: Option<NonZeroUsize>,
    /// Exit with 1 if an answer differs without the prefix cache, or could not be compared
    #[arg(long, requires = "verify")]
    pub verify_strict: bool,
    /// Fields to add to every request, a JSON object, such as {"chat_template_kwargs": {"enable_thinking": false}}
    #[arg(long, value_name = "JSON", value_parser = parse_fields)]
    pub extra_body: Option<Fields>,
    /// Seed of texts and think times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Also write the figures of every turn to a JSON file; - prints the JSON instead of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

fn parse_fields(text: &str) -> Result<Fields, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(fields),
        _ => Err("expected a JSON object".into()),
    }
}
