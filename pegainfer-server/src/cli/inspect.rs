//! `pegainfer inspect`: checks a DeepSeek-V4 checkpoint by its headers.

use anyhow::{Result, bail, ensure};
use clap::Args;
use pegainfer_models::detect;
use pegainfer_models::engine::deepseek_v4::FAMILY;
use pegainfer_terminal::stdout::print;

/// Flags of `inspect`.
#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    /// Directory of the checkpoint; config.json is enough to print the memory of the weights
    #[arg(value_name = "DIR")]
    pub dir: std::path::PathBuf,
}

/// Runs the command. If the checkpoint cannot be loaded, returns an error after the report.
pub fn run(args: &InspectArgs) -> Result<()> {
    let family = detect::detect(&args.dir)?;
    ensure!(
        *family == FAMILY,
        "inspect knows DeepSeek-V4 checkpoints, and this one is {family}: plan --model-path prints its ops, fit its memory"
    );
    let report = pegainfer_deepseek_v4::inspect::inspect(&args.dir)?;
    print(&report.to_string())?;
    if report.files > 0 && !report.is_complete() {
        bail!("the weights do not fit config.json; download the missing files again");
    }
    Ok(())
}
