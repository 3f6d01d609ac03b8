//! The DeepSeek-V4 family.

use super::family::{DUMMY_SEED, Family, LoadedEngine, MeasureProgress, OpenDevice, spawn, with_progress_bar};
use crate::args::{EngineArgs, KvCacheDType, LoadFormat};
use anyhow::{Result, bail, ensure};
use pegainfer_core::exec::Device;
use pegainfer_core::ledger::{Header, Remeasured, Selection, StepLine};
use pegainfer_deepseek_v4::bounds::Sharing;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::{LoadOptions, Loaded, inventory};
use pegainfer_kernels::ops::KvDType;
use pegainfer_runtime::{Measured, Overrides};
use std::path::Path;

/// Default token budget of a step. It is larger on GPUs, where a step of 4,096 tokens takes about three times as long
/// as one of 1,024.
fn default_tokens(device: Device) -> usize {
    if device == Device::Cuda { 4096 } else { 512 }
}

/// DeepSeek-V4-Flash.
pub const FAMILY: Family = Family {
    name: "DeepSeek-V4",
    architecture: "DeepseekV4ForCausalLM",
    model_type: "deepseek_v4",
    rank_bytes: |dir, args| {
        let options = load_options(dir, args, Device::Cuda);
        Ok(pegainfer_deepseek_v4::rank_bytes(&Config::load(dir)?, &options)?)
    },
    fits_one: false,
    load,
    measure,
    measure_again,
    // Without the draft layer.
    weight_bytes: |dir, overrides| {
        check_formats(overrides)?;
        inventory::weight_bytes(&Config::load(dir)?, 1).map_err(anyhow::Error::msg)
    },
    vocab_size: |dir| Ok(Config::load(dir)?.vocab_size),
    record: |dir, overrides, ranks, step| {
        check_formats(overrides)?;
        Ok(pegainfer_deepseek_v4::record(&Config::load(dir)?, Numerics::REFERENCE, ranks, step)?)
    },
    gpu_fit: |_, _, _| {
        bail!("--gpu-memory: for DeepSeek-V4, pegainfer inspect prints the memory that its weights take")
    },
};

/// Loads the checkpoint in `dir` and starts its engine.
fn load(device: OpenDevice, dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let (name, kind) = (device.name.clone(), device.kind());
    let Loaded { engine, weight_bytes, weights_time, kv_bytes, .. } = load_engine(device, dir, args)?;
    let (handle, family) = (spawn(engine, args, kind)?, FAMILY.name);
    Ok(LoadedEngine { handle, family, device: name, weight_bytes, weights_time, kv_bytes })
}

/// Loads the checkpoint in `dir` and measures its steps.
fn measure(
    device: OpenDevice,
    dir: &Path,
    args: &EngineArgs,
    (selection, progress): (Selection<'_>, MeasureProgress<'_>),
) -> Result<Measured> {
    let name = device.name.clone();
    let mut loaded = load_engine(device, dir, args)?;
    let mut measured = pegainfer_runtime::measure(&mut loaded.engine, args.cuda_graph, selection, progress)?;
    measured.header.device = name;
    Ok(measured)
}

/// Loads the checkpoint in `dir` and measures some steps of a ledger again.
fn measure_again(
    device: OpenDevice,
    dir: &Path,
    args: &EngineArgs,
    (steps, progress): (&[StepLine], MeasureProgress<'_>),
) -> Result<(Header, Vec<Remeasured>)> {
    let name = device.name.clone();
    let mut loaded = load_engine(device, dir, args)?;
    let (header, again) = pegainfer_runtime::measure_again(&mut loaded.engine, args.cuda_graph, steps, progress)?;
    Ok((Header { device: name, ..header }, again))
}

/// Loads the checkpoint in `dir`, with the precision of DeepSeek's own code.
fn load_engine(device: OpenDevice, dir: &Path, args: &EngineArgs) -> Result<Loaded> {
    let (kv_cache_dtype, quantization) = (args.formats.kv_cache_dtype, args.formats.quantization);
    check_format_flags(quantization.is_some(), kv_cache_dtype != KvCacheDType::Auto)?;
    ensure!(args.gpu_memory_limit.is_none(), "--gpu-memory-limit: DeepSeek-V4 takes --kv-cache-memory");
    ensure!(args.rope_scaling.is_none(), "--rope-scaling: DeepSeek-V4 takes that of its config.json");
    let kind = device.kind();
    let options = load_options(dir, args, kind);
    let OpenDevice { execs, shows_progress, .. } = device;
    Ok(with_progress_bar(shows_progress, |progress| pegainfer_deepseek_v4::load(execs, &options, progress))?)
}

/// The load options set by the flags.
fn load_options(dir: &Path, args: &EngineArgs, device: Device) -> LoadOptions {
    LoadOptions {
        model_path: dir.to_path_buf(),
        dummy_seed: (args.load_format == LoadFormat::Dummy).then_some(DUMMY_SEED),
        max_model_len: args.max_model_len.map(Into::into),
        max_num_seqs: args.max_num_seqs.map(Into::into),
        max_num_batched_tokens: args.max_num_batched_tokens.map_or(default_tokens(device), Into::into),
        max_num_mixed_tokens: args.max_num_mixed_tokens.into(),
        kv_cache_bytes: args.kv_cache_memory,
        gpu_memory_utilization: args.gpu_memory_utilization,
        cuda_graph: args.cuda_graph,
        loop_back_ranks: args.loop_back_ranks.map(Into::into),
        check_ranks: args.check_ranks,
        sharing: Sharing::OFFICIAL,
        speculation: args.speculative_config.clone(),
        numerics: Numerics::REFERENCE,
    }
}

/// Refuses weight formats other than the checkpoint's in a plan.
fn check_formats(overrides: &Overrides) -> Result<()> {
    check_format_flags(overrides.fp8, overrides.kv_dtype != KvDType::Bf16)
}

fn check_format_flags(quantization: bool, kv_cache_dtype: bool) -> Result<()> {
    ensure!(!quantization, "--quantization: checkpoints of DeepSeek-V4 are in FP8 and FP4 already");
    ensure!(!kv_cache_dtype, "--kv-cache-dtype: DeepSeek-V4 has packed formats of its own; leave the flag out");
    Ok(())
}
