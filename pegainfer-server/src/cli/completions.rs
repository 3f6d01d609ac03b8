//! `pegainfer completions`: the completion script of a shell.

use crate::cli::Cli;
use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::io::Write;

/// Flags of `completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Runs the command.
pub fn run(args: &CompletionsArgs) -> Result<()> {
    // The generator panics where its output cannot be written, as behind `| head`.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pegainfer", &mut script);
    std::io::stdout().write_all(&script).context("the script cannot be written")
}
