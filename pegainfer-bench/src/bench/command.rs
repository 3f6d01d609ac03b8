//! The command `pegainfer bench`.

use super::agents::args::AgentsArgs;
use super::args::Workload;
use clap::{Args, Subcommand};
use pegainfer_models::args::EngineArgs;

/// Flags of `bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What is measured.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What is measured.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// Requests with random prompts, or those of a trace.
    #[command(flatten)]
    Workload(Workload),
    /// Multi-turn sessions of coding agents over HTTP, to a server in this process or at --url: TTFT and recomputed
    /// tokens of each turn
    Agents(AgentsArgs),
}

impl BenchCommand {
    /// Model and engine flags.
    pub fn engine(&self) -> &EngineArgs {
        match self {
            Self::Workload(workload) => &workload.common().engine,
            Self::Agents(args) => &args.engine,
        }
    }
}
