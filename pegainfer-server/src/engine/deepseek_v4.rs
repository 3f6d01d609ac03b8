//! Loads DeepSeek-V4.

use super::{LoadedEngine, progress_bar};
use crate::cli::{EngineArgs, LoadFormat};
use crate::detect::Family;
use anyhow::{Context, Result, bail};
use pegainfer_core::engine::{EngineConfig, EngineHandle};
use pegainfer_core::exec::Exec;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::{LoadOptions, Loaded, inventory};
use std::path::Path;

/// Requests that run at once, and tokens of a step.
const DEFAULTS: (usize, usize) = (64, 512);

/// Loads the checkpoint in `dir` and starts its engine, with the precision of DeepSeek's own code.
pub fn load(exec: Exec, device: String, dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    if args.load_format == LoadFormat::Dummy {
        bail!("--load-format dummy: DeepSeek-V4 has no dummy weights; give a checkpoint");
    }
    let options = LoadOptions {
        model_path: dir.to_path_buf(),
        max_model_len: args.max_model_len.map(Into::into),
        max_num_seqs: args.max_num_seqs.map_or(DEFAULTS.0, Into::into),
        max_num_batched_tokens: args.max_num_batched_tokens.map_or(DEFAULTS.1, Into::into),
        kv_cache_bytes: args.kv_cache_memory,
        numerics: Numerics::REFERENCE,
    };
    let bar = progress_bar();
    let loaded = pegainfer_deepseek_v4::load(vec![exec], &options, &mut |bytes, total| {
        bar.set_length(total);
        bar.inc(bytes);
    });
    bar.finish_and_clear();
    let Loaded { engine, weight_bytes, weights_time, kv_bytes, .. } = loaded?;
    let handle = EngineHandle::spawn(engine, EngineConfig::default()).context("the engine thread cannot be started")?;
    Ok(LoadedEngine { handle, family: Family::DeepSeekV4, device, weight_bytes, weights_time, kv_bytes })
}

/// Bytes of the weights, draft layers left out.
pub fn weight_bytes(dir: &Path) -> Result<u64> {
    inventory::weight_bytes(&Config::load(dir)?, 1).map_err(anyhow::Error::msg)
}
