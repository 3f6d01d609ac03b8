//! `pegainfer man`: manual pages.

use anyhow::{Context, Result};
use clap::{Args, Command};
use pegainfer_terminal::stdout::print_exact;
use std::path::PathBuf;

/// Flags of `man`.
#[derive(Debug, Clone, Args)]
pub struct ManArgs {
    /// Directory to write pegainfer.1, pegainfer-serve.1 and the other pages to
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Prints or writes the manual of `command`.
pub fn run(args: &ManArgs, command: Command) -> Result<()> {
    match &args.dir {
        Some(dir) => clap_mangen::generate_to(command, dir)
            .with_context(|| format!("the pages cannot be written to {}", dir.display())),
        None => {
            let mut text = Vec::new();
            clap_mangen::Man::new(command).render(&mut text).context("the manual cannot be rendered")?;
            print_exact(&String::from_utf8(text).context("the manual is not UTF-8")?)
        }
    }
}
