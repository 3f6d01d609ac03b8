//! Generation parameters on the command line.

use clap::Args;
use serde::Serialize;
use std::num::NonZeroUsize;

/// Generation parameters, sent as request fields and checked by the API. Defaults come from the checkpoint.
#[derive(Debug, Clone, Default, Args, Serialize)]
pub struct Generation {
    /// Maximum number of tokens of an answer, reasoning included [default: what is left of the context]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<NonZeroUsize>,
    /// Sampling temperature; 0 always takes the most likely token [default: the checkpoint's]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Nucleus sampling: keep the most likely tokens up to this probability mass [default: the checkpoint's]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Keep this many of the most likely tokens; 0 keeps all [default: the checkpoint's]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// The same seed gives the same answers [default: random]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Reasoning before the answer: none, minimal, low, medium or high [default: the model's]
    #[arg(long, value_name = "EFFORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_effort: Option<String>,
}
