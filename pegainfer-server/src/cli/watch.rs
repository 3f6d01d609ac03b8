//! `serve --ledger`: compares the steps of a server with a ledger.

use crate::trace::steps;
use anyhow::{Context, Result};
use pegainfer_core::ledger::{Header, Ledger, OpShares, Watch};
use pegainfer_kernels::sources;
use pegainfer_models::args::{EngineArgs, QuantizationArg};
use pegainfer_models::engine::family::LoadedEngine;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Compares the steps of `engine`, of the model from `source`, with the ledger in `file` from now on, if that is one of this engine.
/// Traces of slow steps go to `traces`.
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
    if let Some(log) = engine.handle.step_log() {
        log.watch(Watch::new(law, OpShares::new(&ledger.ops)));
        if let Some(dir) = traces {
            let unusable = || format!("--trace-dir {} cannot be used", dir.display());
            steps::write_captures(log, dir).with_context(unusable)?;
        }
    }
    Ok(())
}

/// What the ledger was measured with that this engine has not.
fn difference(header: &Header, engine: &LoadedEngine, source: &str, args: &EngineArgs) -> Option<String> {
    if !sources::is_current(&header.kernels) {
        Some("other kernels than those of this program".to_owned())
    } else if card(&header.device) != card(&engine.device) {
        Some(format!("the device {}", header.device))
    } else {
        other_model(header, source, args, engine.handle.limits().kv_cache_dtype)
    }
}

/// The model or the formats of a ledger, where they are not those of the model from `source` with these flags.
pub fn other_model(header: &Header, source: &str, args: &EngineArgs, kv_cache_dtype: &str) -> Option<String> {
    let quantization = (args.formats.quantization == Some(QuantizationArg::Fp8)).then_some("fp8");
    if directory(&header.model) != directory(source) {
        Some(format!("the model {}", header.model))
    } else if header.quantization.as_deref() != quantization || header.kv_cache_dtype != kv_cache_dtype {
        Some("other formats of weights or KV cache".to_owned())
    } else {
        None
    }
}

/// The card in `cuda:0 (NVIDIA H200)`, the cards in `cuda:2 to cuda:3 (2 x NVIDIA H200)`.
pub fn card(device: &str) -> &str {
    device.split_once(" (").map_or(device, |(_, card)| card)
}

/// The last part of the path or id of a model, by which ledgers of other machines name it.
fn directory(model: &str) -> &str {
    model.trim_end_matches('/').rsplit('/').next().unwrap_or(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_cards_are_the_same_in_other_places() {
        assert_eq!(directory("/models/Qwen3-4B/"), directory("Qwen/Qwen3-4B"));
        assert_ne!(directory("Qwen3-4B"), directory("Qwen3-4B-FP8"));
        assert_eq!(card("cuda:0 (NVIDIA H200)"), card("cuda:3 (NVIDIA H200)"));
        assert_eq!(card("cuda:0 to cuda:1 (2 x NVIDIA H200)"), card("cuda:2 to cuda:3 (2 x NVIDIA H200)"));
        assert_ne!(card("cuda:0 to cuda:1 (2 x NVIDIA H200)"), card("cuda:0 (NVIDIA H200)"));
        assert_ne!(card("cpu (avx2, 1 thread)"), card("cpu (avx2, 2 threads)"));
    }
}
