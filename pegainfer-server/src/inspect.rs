//! `pegainfer inspect`: checks a DeepSeek-V4 checkpoint by its headers.

use crate::cli::InspectArgs;
use crate::detect;
use crate::engine::deepseek_v4::FAMILY;
use anyhow::{Result, bail, ensure};

/// Runs the command. A checkpoint that cannot be loaded is an error, after the report.
pub fn run(args: &InspectArgs) -> Result<()> {
    let family = detect::detect(&args.dir)?;
    ensure!(*family == FAMILY, "inspect knows DeepSeek-V4 checkpoints, and this one is {family}");
    let report = pegainfer_deepseek_v4::inspect::inspect(&args.dir)?;
    print!("{report}");
    if report.files > 0 && !report.is_complete() {
        bail!("the weights do not fit config.json; download what is missing again");
    }
    Ok(())
}
