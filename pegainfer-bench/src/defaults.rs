//! The engine's flags where a command has only some of them.

use clap::Parser;
use pegainfer_models::args::EngineArgs;

/// The engine's flags, for their defaults.
#[derive(Parser)]
pub struct Defaults {
    /// All of them.
    #[command(flatten)]
    pub engine: EngineArgs,
}
