//! `serve --ledger`: compares the steps of a server with a ledger.

use crate::trace::steps;
use anyhow::{Context, Result};
use pegainfer_bench::ledger_origin::{card, other_model};
use pegainfer_core::ledger::{Header, Ledger, OpShares, Watch};
use pegainfer_kernels::sources;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine::family::LoadedEngine;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Starts to compare the steps of `engine`, with the model from `source`, to the ledger in `file`, if the ledger fits
/// this engine. Traces of slow steps go to `traces`.
pub fn watch(file: &Path, engine: &LoadedEngine, source: &str, args: &EngineArgs, traces: Option<&Path>) -> Result<()> {
    let unreadable = || format!("--ledger {} cannot be read", file.display());
    let ledger = Ledger::read(BufReader::new(File::open(file).with_context(unreadable)?)).with_context(unreadable)?;
    let law = ledger.law().with_context(unreadable)?;
    if let Some(other) = difference(&ledger.header, engine, source, args) {
        log::warn!(
            "--ledger was measured with {other}: steps are not compared with it; measure it again with pegainfer ledger"
        );
        return Ok(());
    }
    let engines = engine.handle.engines();
    for (i, log) in engines.iter().enumerate().filter_map(|(i, engine)| Some((i, engine.step_log()?))) {
        log.watch(Watch::new(law.clone(), OpShares::new(&ledger.ops)));
        if let Some(dir) = traces {
            let unusable = || format!("--trace-dir {} cannot be used", dir.display());
            steps::write_captures(log, (engines.len() > 1).then_some(i), dir).with_context(unusable)?;
        }
    }
    Ok(())
}

/// The first difference between the ledger's conditions and this engine's.
fn difference(header: &Header, engine: &LoadedEngine, source: &str, args: &EngineArgs) -> Option<String> {
    if !sources::is_current(&header.kernels) {
        Some("other kernels than this program's".to_owned())
    } else if card(&header.device) != card(&engine.device) {
        Some(format!("the device {}", header.device))
    } else {
        other_model(header, source, args, engine.handle.limits().kv_cache_dtype)
    }
}
