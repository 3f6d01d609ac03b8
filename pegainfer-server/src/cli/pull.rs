//! `pegainfer pull`: downloads a model without starting it.

use crate::logging;
use anyhow::Result;
use clap::Args;
use pegainfer_models::args::LogFormat;
use pegainfer_models::model_path;
use pegainfer_terminal::stdout::print_exact;
use std::path::PathBuf;

/// Flags of `pull`.
#[derive(Debug, Clone, Args)]
pub struct PullArgs {
    /// Hugging Face id, such as Qwen/Qwen3-0.6B, ID@REVISION, or ID:Q4_K_M for a GGUF file
    #[arg(value_name = "ID")]
    pub id: String,
    /// Branch, tag or commit, the same as ID@REVISION [default: main]
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// PEM file with the certificate authorities of a Hugging Face mirror, instead of Mozilla's and SSL_CERT_FILE's
    #[arg(long, value_name = "FILE")]
    pub hub_ca: Option<PathBuf>,
}

/// Downloads the model, or the rest of it, and prints the path of its directory or GGUF file.
pub fn run(args: &PullArgs) -> Result<()> {
    logging::init("info", LogFormat::Text)?;
    let path = model_path::pull(&args.id, args.revision.as_deref(), args.hub_ca.as_deref())?;
    print_exact(&format!("{}\n", path.display()))
}
