//! `pegainfer completions`: the completion script of a shell.

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use pegainfer_terminal::stdout::print_exact;

/// Flags of `completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Prints the script for `command`.
pub fn run(args: &CompletionsArgs, mut command: Command) -> Result<()> {
    // The generator panics if its output cannot be written, as in `| head`.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "pegainfer", &mut script);
    print_exact(&String::from_utf8(script).context("the script is not UTF-8")?)
}
