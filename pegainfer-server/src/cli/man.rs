//! `pegainfer man`: manual pages.

use crate::cli::Cli;
use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use std::path::PathBuf;

/// Flags of `man`.
#[derive(Debug, Clone, Args)]
pub struct ManArgs {
    /// Directory to write pegainfer.1, pegainfer-serve.1 and the other pages to
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &ManArgs) -> Result<()> {
    match &args.dir {
        Some(dir) => clap_mangen::generate_to(Cli::command(), dir)
            .with_context(|| format!("the pages cannot be written to {}", dir.display())),
        None => {
            clap_mangen::Man::new(Cli::command()).render(&mut std::io::stdout()).context("the page cannot be written")
        }
    }
}
