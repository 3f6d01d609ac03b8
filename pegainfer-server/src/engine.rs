//! Loads the engine of a checkpoint's family.

#[cfg(feature = "deepseek-v4")]
mod deepseek_v4;

use crate::cli::{DeviceArg, EngineArgs, LoadFormat};
use crate::detect::{self, Family};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use pegainfer_core::engine::{EngineConfig, EngineHandle};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::isa::Isa;
use pegainfer_core::record::OpRecord;
use pegainfer_kernels::cuda;
use std::path::Path;
use std::time::Duration;

/// Seed of `--load-format dummy`: the same weights at each start.
const DUMMY_SEED: u64 = 0;

/// A running engine and what start-up says about it.
pub struct LoadedEngine {
    /// Where requests go.
    pub handle: EngineHandle,
    /// Family of the model.
    pub family: Family,
    /// Where it runs, in words.
    pub device: String,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// How long they took to the device.
    pub weights_time: Duration,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
}

/// Loads the checkpoint in `dir` and starts its engine.
pub fn load(dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let family = detect::detect(dir)?;
    let (exec, device) = open_device(family, args)?;
    match family {
        Family::Qwen3 => load_qwen3(exec, device, dir, args),
        #[cfg(feature = "qwen35")]
        Family::Qwen35 => load_qwen35(exec, device, dir, args),
        #[cfg(feature = "deepseek-v4")]
        Family::DeepSeekV4 => deepseek_v4::load(exec, device, dir, args),
    }
}

/// Bytes of weights that a decode step reads.
pub fn weight_bytes(dir: &Path) -> Result<u64> {
    match detect::detect(dir)? {
        Family::Qwen3 => Ok(pegainfer_qwen3_4b::config::Config::load(dir)?.weight_bytes()),
        #[cfg(feature = "qwen35")]
        Family::Qwen35 => Ok(pegainfer_qwen35_4b::config::Config::load(dir)?.weight_bytes()),
        #[cfg(feature = "deepseek-v4")]
        Family::DeepSeekV4 => deepseek_v4::weight_bytes(dir),
    }
}

/// Token ids are below this.
pub fn vocab_size(dir: &Path) -> Result<usize> {
    match detect::detect(dir)? {
        Family::Qwen3 => Ok(pegainfer_qwen3_4b::config::Config::load(dir)?.vocab_size),
        #[cfg(feature = "qwen35")]
        Family::Qwen35 => Ok(pegainfer_qwen35_4b::config::Config::load(dir)?.vocab_size),
        #[cfg(feature = "deepseek-v4")]
        Family::DeepSeekV4 => Ok(pegainfer_deepseek_v4::config::Config::load(dir)?.vocab_size),
    }
}

/// The ops of one step of the model in `dir`: `batch` rows of `context` tokens, the last `tokens` of them new.
pub fn record(dir: &Path, batch: usize, tokens: usize, context: usize) -> Result<Vec<OpRecord>> {
    match detect::detect(dir)? {
        Family::Qwen3 => {
            let config = pegainfer_qwen3_4b::config::Config::load(dir)?;
            Ok(pegainfer_qwen3_4b::record(&config, batch, tokens, context)?)
        }
        #[cfg(feature = "qwen35")]
        Family::Qwen35 => {
            let config = pegainfer_qwen35_4b::config::Config::load(dir)?;
            Ok(pegainfer_qwen35_4b::record(&config, batch, tokens, context)?)
        }
        #[cfg(feature = "deepseek-v4")]
        Family::DeepSeekV4 => {
            let config = pegainfer_deepseek_v4::config::Config::load(dir)?;
            Ok(pegainfer_deepseek_v4::record(&config, batch, tokens, context)?)
        }
    }
}

/// The device that the flags ask for, and its name.
pub fn open_device(family: Family, args: &EngineArgs) -> Result<(Exec, String)> {
    let device = if family.has_cuda_kernels() { args.device } else { without_gpu(family, args.device)? };
    match (device, cuda::available()) {
        (DeviceArg::Cuda(_), Err(why)) => bail!("--device cuda: {why}; use --device cpu"),
        (DeviceArg::Cuda(ordinal), Ok(count)) if ordinal >= count => {
            bail!("--device cuda:{ordinal}: GPUs are counted from 0, and this machine has {count}")
        }
        (DeviceArg::Cuda(ordinal), Ok(_)) => return open_gpu(ordinal, args),
        (DeviceArg::Auto, Ok(_)) => return open_gpu(0, args),
        (DeviceArg::Auto, Err(why)) => log::debug!("running on the CPU: {why}"),
        (DeviceArg::Cpu, _) => {}
    }
    let isa = Isa::best();
    let exec = Exec::cpu(isa, args.threads.map(Into::into)).context("the CPU threads cannot be started")?;
    let threads = exec.threads();
    let plural = if threads == 1 { "" } else { "s" };
    Ok((exec, format!("cpu ({}, {threads} thread{plural})", isa.name())))
}

/// The device for a family that runs on the CPU only.
fn without_gpu(family: Family, asked: DeviceArg) -> Result<DeviceArg> {
    match asked {
        DeviceArg::Cuda(_) => bail!("--device cuda: {family} has no CUDA kernels yet; use --device cpu"),
        DeviceArg::Auto if cuda::available().is_ok() => {
            log::info!("running on the CPU: {family} has no CUDA kernels yet");
        }
        DeviceArg::Auto | DeviceArg::Cpu => {}
    }
    Ok(DeviceArg::Cpu)
}

fn open_gpu(ordinal: usize, args: &EngineArgs) -> Result<(Exec, String)> {
    let opened = Exec::cuda(ordinal, args.threads.map(Into::into));
    let mut exec = opened.with_context(|| format!("GPU {ordinal} cannot be used; try --device cpu"))?;
    let name = exec.gpu()?.info()?.name;
    Ok((exec, format!("cuda:{ordinal} ({name})")))
}

/// Sequences that run at once, unless a flag says otherwise.
fn default_rows(exec: &Exec) -> usize {
    if exec.device() == Device::Cuda { 256 } else { 64 }
}

fn load_qwen3(exec: Exec, device: String, dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let rows = default_rows(&exec);
    let options = pegainfer_qwen3_4b::LoadOptions {
        model_path: dir.to_path_buf(),
        dummy_seed: (args.load_format == LoadFormat::Dummy).then_some(DUMMY_SEED),
        max_model_len: args.max_model_len.map(Into::into),
        max_num_seqs: args.max_num_seqs.map_or(rows, Into::into),
        max_num_batched_tokens: args.max_num_batched_tokens.map(Into::into),
        max_num_mixed_tokens: args.max_num_mixed_tokens.into(),
        cuda_graph: args.cuda_graph,
        kv_cache_bytes: args.kv_cache_memory,
        gpu_memory_utilization: args.gpu_memory_utilization,
    };
    let bar = progress_bar();
    let loaded = pegainfer_qwen3_4b::load(exec, &options, &mut |bytes, total| {
        bar.set_length(total);
        bar.inc(bytes);
    });
    bar.finish_and_clear();
    let pegainfer_qwen3_4b::Loaded { engine, config, weights_time } = loaded?;
    let handle = EngineHandle::spawn(engine, EngineConfig::default()).context("the engine thread cannot be started")?;
    let kv_bytes = (handle.limits().kv_capacity_tokens() * config.kv_bytes_per_token()) as u64;
    Ok(LoadedEngine {
        handle,
        family: Family::Qwen3,
        device,
        weight_bytes: config.weight_bytes(),
        weights_time,
        kv_bytes,
    })
}

#[cfg(feature = "qwen35")]
fn load_qwen35(exec: Exec, device: String, dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let rows = default_rows(&exec);
    let options = pegainfer_qwen35_4b::LoadOptions {
        model_path: dir.to_path_buf(),
        dummy_seed: (args.load_format == LoadFormat::Dummy).then_some(DUMMY_SEED),
        max_model_len: args.max_model_len.map(Into::into),
        max_num_seqs: args.max_num_seqs.map_or(rows, Into::into),
        max_num_batched_tokens: args.max_num_batched_tokens.map(Into::into),
        max_num_mixed_tokens: args.max_num_mixed_tokens.into(),
        cuda_graph: args.cuda_graph,
        kv_cache_bytes: args.kv_cache_memory,
        gpu_memory_utilization: args.gpu_memory_utilization,
        state_cache_bytes: args.state_cache_memory,
        state_cache_interval: args.state_cache_interval.into(),
    };
    let bar = progress_bar();
    let loaded = pegainfer_qwen35_4b::load(exec, &options, &mut |bytes, total| {
        bar.set_length(total);
        bar.inc(bytes);
    });
    bar.finish_and_clear();
    let pegainfer_qwen35_4b::Loaded { engine, config, weights_time } = loaded?;
    let handle = EngineHandle::spawn(engine, EngineConfig::default()).context("the engine thread cannot be started")?;
    let kv_bytes = (handle.limits().kv_capacity_tokens() * config.kv_bytes_per_token()) as u64;
    Ok(LoadedEngine {
        handle,
        family: Family::Qwen35,
        device,
        weight_bytes: config.weight_bytes(),
        weights_time,
        kv_bytes,
    })
}

/// Shown on a terminal only.
fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("loading weights [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec}");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
