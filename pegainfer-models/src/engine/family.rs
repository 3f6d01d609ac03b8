//! A model family with an engine: its names in config.json, and its functions for the server.

use crate::args::{EngineArgs, LoadFormat};
use anyhow::{Context, Result};
use pegainfer_core::engine::{EngineConfig, EngineHandle, StepEngine};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::ledger::{Header, Remeasured, Selection, StepLine};
use pegainfer_core::parallel::RankBytes;
use pegainfer_core::record::OpRecord;
use pegainfer_core::weights::Checkpoint;
use pegainfer_model_files::ModelFiles;
use pegainfer_runtime::{AdapterLoader, ConfigFile, GpuFit, LoadOptions, Measured, Model, ModelBytes, Overrides};
use pegainfer_terminal::progress::{Progress, Unit};
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// Seed of `--load-format dummy`, for the same weights at each start.
pub(super) const DUMMY_SEED: u64 = 0;
/// Default of `--step-deadline` on a GPU, where the longest steps take half a second.
const GPU_STEP_DEADLINE: Duration = Duration::from_secs(30);
/// Default of `--step-deadline` on the CPU, where a step of a large model takes up to a minute.
const CPU_STEP_DEADLINE: Duration = Duration::from_secs(120);

/// A step of equal rows: number of rows, new tokens per row, and context tokens per row.
pub type UniformStep = (usize, usize, usize);

/// A model family with an engine.
pub struct Family {
    /// Its name in messages.
    pub name: &'static str,
    /// Its names in `architectures` of config.json, each with its `model_type`.
    pub architectures: &'static [(&'static str, &'static str)],
    /// Memory per GPU for each supported number of tensor-parallel ranks.
    pub rank_bytes: NeedsOfRanks,
    /// True if loading onto one GPU says what of the model does not fit, and uses what is there otherwise.
    pub fits_one: bool,
    /// Refuses a text of config.json, with overrides, that the engine does not serve.
    pub check: fn(&str, &Overrides) -> Result<()>,
    /// Loads the checkpoint in a directory and starts its engine.
    pub load: fn(OpenDevice, &Path, &EngineArgs) -> Result<LoadedEngine>,
    /// Loads the checkpoint in a directory and measures its steps.
    pub measure: MeasureSteps,
    /// Loads the checkpoint and measures some steps of a ledger again.
    pub measure_again: MeasureAgain,
    /// Bytes of weights that a decode step of the checkpoint in a directory reads, with overrides.
    pub weight_bytes: fn(&Path, &Overrides) -> Result<u64>,
    /// Size of its vocabulary.
    pub vocab_size: fn(&Path) -> Result<usize>,
    /// The ops of one step on rank 0 of the given number of ranks, with overrides.
    pub record: fn(&Path, &Overrides, usize, UniformStep) -> Result<Vec<OpRecord>>,
    /// Capacity of an engine with these flags on a GPU with the given number of bytes, or on this machine's CPU.
    pub fit: fn(&Path, &EngineArgs, Option<u64>) -> Result<GpuFit>,
}

/// Memory per GPU, for each supported number of ranks in ascending order, for the checkpoint in a directory with these
/// flags.
pub type NeedsOfRanks = fn(&Path, &EngineArgs) -> Result<Vec<RankBytes>>;

/// The devices of an engine.
pub struct OpenDevice {
    /// One device per rank, rank 0 first.
    pub execs: Vec<Exec>,
    /// Their name for messages.
    pub name: String,
    /// True if loading shows its progress.
    pub shows_progress: bool,
}

impl OpenDevice {
    /// Kind of the devices.
    pub fn kind(&self) -> Device {
        self.execs.first().map_or(Device::Meta, Exec::device)
    }
}

/// A running engine and its start-up figures.
pub struct LoadedEngine {
    /// Submits requests.
    pub handle: EngineHandle,
    /// Name of the model's family.
    pub family: &'static str,
    /// Name of the device.
    pub device: String,
    /// Number of tensor-parallel ranks of each engine.
    pub ranks: usize,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Time to load them onto the device.
    pub weights_time: Duration,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
    /// Loads adapters, if they are enabled.
    pub adapters: Option<AdapterLoader>,
}

impl Family {
    /// The family of a runtime model with CUDA kernels.
    pub const fn new<M: Model>() -> Self {
        Self {
            name: M::NAME,
            architectures: M::ARCHITECTURES,
            rank_bytes: |dir, args| {
                let options = load_options::<M>(dir, args);
                Ok(pegainfer_runtime::rank_bytes::<M>(&M::load_config_for(&options)?, &options)?)
            },
            fits_one: true,
            check: |config, overrides| {
                M::config(ConfigFile::parse(config, M::NAME)?.with(overrides.clone()))?;
                Ok(())
            },
            load: load::<M>,
            measure: measure::<M>,
            measure_again: measure_again::<M>,
            weight_bytes: |dir, overrides| Ok(ModelBytes::of::<M>(&M::load_config_with(dir, overrides)?)?.weights),
            vocab_size: |dir| Ok(M::info(&M::load_config(dir)?).vocab_size),
            record: |dir, overrides, ranks, step| {
                let config = M::load_config_with(dir, overrides)?;
                Ok(pegainfer_runtime::record_with::<M>(&config, overrides.activations, ranks, step)?)
            },
            fit: |dir, args, gpu| {
                let options = load_options::<M>(dir, args);
                let config = M::load_config_for(&options)?;
                let ranks = args.tensor_parallel_size.or(args.loop_back_ranks).map_or(1, Into::into);
                Ok(match gpu {
                    Some(bytes) => GpuFit::new::<M>(&config, &options, ranks, bytes)?,
                    None => GpuFit::on_cpu::<M>(&config, &options)?,
                })
            },
        }
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.architectures == other.architectures
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Loads a runtime model and starts its engine.
fn load<M: Model>(device: OpenDevice, dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let (name, shows_progress) = (device.name.clone(), device.shows_progress);
    let kind = device.kind();
    let ranks = args.loop_back_ranks.map_or(device.execs.len(), Into::into);
    let options = load_options::<M>(dir, args);
    let loaded =
        with_progress_bar(shows_progress, |progress| pegainfer_runtime::load::<M>(device.execs, &options, progress))?;
    let handle = spawn(loaded.engine, args, kind)?;
    let kv_bytes = handle.limits().kv_capacity_tokens() as u64 * loaded.kv_per_token;
    Ok(LoadedEngine {
        handle,
        family: M::NAME,
        device: name,
        ranks,
        weight_bytes: loaded.weight_bytes,
        weights_time: loaded.weights_time,
        kv_bytes,
        adapters: loaded.adapters,
    })
}

/// True if the checkpoint in a directory has an image encoder that the flags want and the engine runs. Copies of the text
/// model alone often keep the `vision_config` of the whole model. A checkpoint that cannot be read has none: loading
/// reports its error.
fn reads_images<M: Model>(dir: &Path, args: &EngineArgs) -> bool {
    if args.language_model_only {
        return false;
    }
    let config = ModelFiles::open(dir).and_then(|files| files.read("config.json")).ok().flatten();
    let config: Option<Value> = config.and_then(|text| serde_json::from_str(&text).ok());
    let is_described = config.is_some_and(|config| config["vision_config"].is_object());
    let has_encoder =
        || Checkpoint::open(dir).is_ok_and(|weights| weights.names().any(|name| name.contains("visual.merger.")));
    if !is_described || !(args.load_format == LoadFormat::Dummy || has_encoder()) {
        return false;
    }
    let text_only = args.overrides();
    match M::load_config_with(dir, &Overrides { images: true, ..text_only.clone() }) {
        Err(error) if M::load_config_with(dir, &text_only).is_ok() => {
            log::warn!("the model reads images, but only text is served: {error}");
            false
        }
        _ => true,
    }
}

/// The load options of a runtime model, set by the flags.
fn load_options<M: Model>(dir: &Path, args: &EngineArgs) -> LoadOptions<M::Options> {
    LoadOptions {
        model: M::Options::default(),
        model_path: dir.to_path_buf(),
        overrides: Overrides { images: reads_images::<M>(dir, args), ..args.overrides() },
        dummy_seed: (args.load_format == LoadFormat::Dummy).then_some(DUMMY_SEED),
        max_model_len: args.max_model_len.map(Into::into),
        max_num_seqs: args.max_num_seqs.map(Into::into),
        max_num_batched_tokens: args.max_num_batched_tokens.map(Into::into),
        max_num_mixed_tokens: args.max_num_mixed_tokens.into(),
        cuda_graph: args.cuda_graph,
        lora: args.lora(),
        speculation: args.speculative_config.clone(),
        kv_cache_bytes: args.kv_cache_memory,
        gpu_memory_utilization: args.gpu_memory_utilization,
        gpu_memory_limit: args.gpu_memory_limit,
        loop_back_ranks: args.loop_back_ranks.map(Into::into),
        check_ranks: args.check_ranks,
        kv_offloading_bytes: args.kv_offloading(),
        kv_disk: args.kv_disk.clone(),
        state_cache_bytes: args.state_cache_memory,
        state_cache_interval: args.state_cache_interval.into(),
    }
}

/// Called after each measured step.
pub type MeasureProgress<'a> = &'a mut dyn FnMut(&StepLine);

/// Loads a checkpoint onto a device and measures its steps.
pub type MeasureSteps = fn(OpenDevice, &Path, &EngineArgs, (Selection<'_>, MeasureProgress<'_>)) -> Result<Measured>;

/// Loads a checkpoint onto a device and measures some steps of a ledger again.
pub type MeasureAgain =
    fn(OpenDevice, &Path, &EngineArgs, (&[StepLine], MeasureProgress<'_>)) -> Result<(Header, Vec<Remeasured>)>;

/// Loads a runtime model and measures its steps.
fn measure<M: Model>(
    device: OpenDevice,
    dir: &Path,
    args: &EngineArgs,
    (selection, progress): (Selection<'_>, MeasureProgress<'_>),
) -> Result<Measured> {
    let name = device.name.clone();
    let options = load_options::<M>(dir, args);
    let mut loaded =
        with_progress_bar(true, |progress| pegainfer_runtime::load::<M>(device.execs, &options, progress))?;
    let mut measured = pegainfer_runtime::measure(&mut loaded.engine, options.cuda_graph, selection, progress)?;
    measured.header.device = name;
    Ok(measured)
}

/// Loads a runtime model and measures some steps of a ledger again.
fn measure_again<M: Model>(
    device: OpenDevice,
    dir: &Path,
    args: &EngineArgs,
    (steps, progress): (&[StepLine], MeasureProgress<'_>),
) -> Result<(Header, Vec<Remeasured>)> {
    let name = device.name.clone();
    let options = load_options::<M>(dir, args);
    let mut loaded =
        with_progress_bar(true, |progress| pegainfer_runtime::load::<M>(device.execs, &options, progress))?;
    let (header, again) = pegainfer_runtime::measure_again(&mut loaded.engine, options.cuda_graph, steps, progress)?;
    Ok((Header { device: name, ..header }, again))
}

/// Starts the thread of a loaded engine that runs on a device of this kind.
pub fn spawn(engine: impl StepEngine, args: &EngineArgs, device: Device) -> Result<EngineHandle> {
    let default_deadline = if device == Device::Cuda { GPU_STEP_DEADLINE } else { CPU_STEP_DEADLINE };
    let step_deadline = args.step_deadline.unwrap_or(default_deadline);
    let (max_queued, fault) = (args.max_queued_requests.get(), args.lose_engine.map(|lost| lost.fault));
    let config = EngineConfig { step_deadline, max_queued, fault };
    EngineHandle::spawn(engine, config).context("the engine thread cannot be started")
}

/// Runs `load` and shows its progress if `shown`. `load` reports (bytes of this chunk, bytes of all weights).
pub fn with_progress_bar<R>(shown: bool, load: impl FnOnce(&mut (dyn FnMut(u64, u64) + Send)) -> R) -> R {
    if !shown {
        return load(&mut |_, _| ());
    }
    let mut progress = Progress::start("loading weights", Unit::Bytes, 0, 0);
    let loaded = load(&mut |bytes, total| {
        progress.set_total(total);
        progress.add(bytes);
    });
    progress.finish();
    loaded
}
