//! `pegainfer eval`: the quality of a model's answers, measured with this process's engine.
//!
//! # Layout
//! - [`perplexity`]: the likelihood of a text. [`gsm8k`]: accuracy on word problems; [`answer`] extracts the numbers.

mod answer;
pub mod gsm8k;
pub mod perplexity;

use crate::in_process::Servers;
use anyhow::Result;
use clap::{Arg, Args, Subcommand};
use gsm8k::Gsm8kArgs;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::stdout::{print, print_exact};
use perplexity::PerplexityArgs;
use serde::Serialize;
use std::fmt::Display;

/// Flags of `eval`.
#[derive(Debug, Clone, Args)]
pub struct EvalArgs {
    /// The measurement.
    #[command(subcommand)]
    pub task: Task,
}

/// The measurement.
#[derive(Debug, Clone, Subcommand)]
pub enum Task {
    /// Perplexity and bits per byte of a text file
    #[command(mut_arg("log_level", quiet))]
    Perplexity(PerplexityArgs),
    #[command(mut_arg("log_level", quiet))]
    /// Accuracy on a file of grade-school word problems in the format of GSM8K
    Gsm8k(Gsm8kArgs),
}

/// Default log level, which shows only the result.
fn quiet(log_level: Arg) -> Arg {
    log_level.default_value("warn")
}

impl Task {
    /// Model and engine flags.
    pub fn engine(&self) -> &EngineArgs {
        match self {
            Self::Perplexity(args) => &args.engine,
            Self::Gsm8k(args) => &args.engine,
        }
    }
}

/// Runs the command.
pub fn run(args: &EvalArgs, servers: &dyn Servers) -> Result<()> {
    match &args.task {
        Task::Perplexity(args) => show(&perplexity::measure(args)?, args.json),
        Task::Gsm8k(args) => show(&gsm8k::measure(args, servers)?, args.json),
    }
}

fn show(result: &(impl Serialize + Display), json: bool) -> Result<()> {
    if json { print_exact(&(serde_json::to_string_pretty(result)? + "\n")) } else { print(&result.to_string()) }
}
