//! A model family that has an engine, as one value: what config.json calls it, and what the server does with it.

use crate::args::{EngineArgs, LoadFormat};
use anyhow::{Context, Result};
use pegainfer_core::engine::{EngineConfig, EngineHandle, StepEngine};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::ledger::{Header, Remeasured, Selection, StepLine};
use pegainfer_core::parallel::RankBytes;
use pegainfer_core::record::OpRecord;
use pegainfer_runtime::{GpuFit, LoadOptions, Measured, Model, ModelBytes, Overrides};
use pegainfer_terminal::progress::{Progress, Unit};
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// Seed of `--load-format dummy`: the same weights at each start.
pub(super) const DUMMY_SEED: u64 = 0;
/// Default of `--step-deadline` on a GPU, where the longest steps take half a second.
const GPU_STEP_DEADLINE: Duration = Duration::from_secs(30);
/// Default of `--step-deadline` on the CPU, where a step of a large model takes up to a minute.
const CPU_STEP_DEADLINE: Duration = Duration::from_secs(120);

/// A step of equal rows: their number, tokens that each adds, and tokens of its context in all.
pub type UniformStep = (usize, usize, usize);

/// A model family that has an engine.
pub struct Family {
    /// Its name in messages.
    pub name: &'static str,
    /// What `architectures` of config.json calls it.
    pub architecture: &'static str,
    /// What `model_type` of config.json calls it.
    pub model_type: &'static str,
    /// What a GPU needs for each number of ranks that can share a model (tensor parallelism); `None` for a family that runs on one
    /// device.
    pub rank_bytes: Option<NeedsOfRanks>,
    /// Loads the checkpoint in a directory and starts its engine.
    pub load: fn(OpenDevice, &Path, &EngineArgs) -> Result<LoadedEngine>,
    /// Loads the checkpoint in a directory and measures its steps.
    pub measure: MeasureSteps,
    /// Loads it and measures some steps of a ledger again.
    pub measure_again: MeasureAgain,
    /// Bytes of weights that a decode step of the checkpoint in a directory reads, as the flags change it.
    pub weight_bytes: fn(&Path, &Overrides) -> Result<u64>,
    /// Ids of its vocabulary.
    pub vocab_size: fn(&Path) -> Result<usize>,
    /// The ops of one step on rank 0 of so many, as the flags change the model.
    pub record: fn(&Path, &Overrides, usize, UniformStep) -> Result<Vec<OpRecord>>,
    /// What an engine with these flags makes of a GPU with so many bytes.
    pub gpu_fit: fn(&Path, &EngineArgs, u64) -> Result<GpuFit>,
}

/// Bytes that a GPU needs, for each possible number of ranks in ascending order, of the checkpoint in a directory with these flags.
pub type NeedsOfRanks = fn(&Path, &EngineArgs) -> Result<Vec<RankBytes>>;

/// Where an engine is to run.
pub struct OpenDevice {
    /// A device for each rank, rank 0 first.
    pub execs: Vec<Exec>,
    /// Their name for messages.
    pub name: String,
}

impl OpenDevice {
    /// The device of rank 0.
    pub fn first(self) -> Result<Exec> {
        self.execs.into_iter().next().context("no device is open")
    }
}

/// A running engine and what start-up says about it.
pub struct LoadedEngine {
    /// Where requests go.
    pub handle: EngineHandle,
    /// Name of the model's family.
    pub family: &'static str,
    /// Where it runs, in words.
    pub device: String,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// How long they took to the device.
    pub weights_time: Duration,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
}

impl Family {
    /// The family of a model of the runtime, with CUDA kernels.
    pub const fn of<M: Model>() -> Self {
        Self {
            name: M::NAME,
            architecture: M::ARCHITECTURE,
            model_type: M::MODEL_TYPE,
            rank_bytes: None,
            load: load::<M>,
            measure: measure::<M>,
            measure_again: measure_again::<M>,
            weight_bytes: |dir, overrides| Ok(ModelBytes::of::<M>(&M::load_config_with(dir, overrides)?)?.weights),
            vocab_size: |dir| Ok(M::info(&M::load_config(dir)?).vocab_size),
            record: |dir, overrides, _, (batch, tokens, context)| {
                Ok(pegainfer_runtime::record::<M>(&M::load_config_with(dir, overrides)?, batch, tokens, context)?)
            },
            gpu_fit: |dir, args, bytes| {
                let config = M::load_config_with(dir, &args.overrides())?;
                Ok(GpuFit::new::<M>(&config, &load_options(dir, args), bytes)?)
            },
        }
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
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

/// Loads a model of the runtime and starts its engine.
fn load<M: Model>(device: OpenDevice, dir: &Path, args: &EngineArgs) -> Result<LoadedEngine> {
    let name = device.name.clone();
    let exec = device.first()?;
    let kind = exec.device();
    let options = load_options(dir, args);
    let loaded = with_progress_bar(|progress| pegainfer_runtime::load::<M>(exec, &options, progress))?;
    let handle = spawn(loaded.engine, args, kind)?;
    let kv_bytes = handle.limits().kv_capacity_tokens() as u64 * loaded.bytes.kv_per_token;
    Ok(LoadedEngine {
        handle,
        family: M::NAME,
        device: name,
        weight_bytes: loaded.bytes.weights,
        weights_time: loaded.weights_time,
        kv_bytes,
    })
}

/// What the flags say about loading a model of the runtime.
fn load_options(dir: &Path, args: &EngineArgs) -> LoadOptions {
    LoadOptions {
        model_path: dir.to_path_buf(),
        overrides: args.overrides(),
        dummy_seed: (args.load_format == LoadFormat::Dummy).then_some(DUMMY_SEED),
        max_model_len: args.max_model_len.map(Into::into),
        max_num_seqs: args.max_num_seqs.map(Into::into),
        max_num_batched_tokens: args.max_num_batched_tokens.map(Into::into),
        max_num_mixed_tokens: args.max_num_mixed_tokens.into(),
        cuda_graph: args.cuda_graph,
        speculation: args.speculative_config.clone(),
        kv_cache_bytes: args.kv_cache_memory,
        gpu_memory_utilization: args.gpu_memory_utilization,
        gpu_memory_limit: args.gpu_memory_limit,
        state_cache_bytes: args.state_cache_memory,
        state_cache_interval: args.state_cache_interval.into(),
    }
}

/// Told about each step that was measured.
pub type MeasureProgress<'a> = &'a mut dyn FnMut(&StepLine);

/// Loads a checkpoint onto a device and measures its steps.
pub type MeasureSteps = fn(OpenDevice, &Path, &EngineArgs, (Selection<'_>, MeasureProgress<'_>)) -> Result<Measured>;

/// Loads a checkpoint onto a device and measures some steps of a ledger again.
pub type MeasureAgain =
    fn(OpenDevice, &Path, &EngineArgs, (&[StepLine], MeasureProgress<'_>)) -> Result<(Header, Vec<Remeasured>)>;

/// Loads a model of the runtime and measures its steps.
fn measure<M: Model>(
    device: OpenDevice,
    dir: &Path,
    args: &EngineArgs,
    (selection, progress): (Selection<'_>, MeasureProgress<'_>),
) -> Result<Measured> {
    let name = device.name.clone();
    let exec = device.first()?;
    let options = load_options(dir, args);
    let mut loaded = with_progress_bar(|progress| pegainfer_runtime::load::<M>(exec, &options, progress))?;
    let mut measured = pegainfer_runtime::measure(&mut loaded.engine, options.cuda_graph, selection, progress)?;
    measured.header.device = name;
    Ok(measured)
}

/// Loads a model of the runtime and measures some steps of a ledger again.
fn measure_again<M: Model>(
    device: OpenDevice,
    dir: &Path,
    args: &EngineArgs,
    (steps, progress): (&[StepLine], MeasureProgress<'_>),
) -> Result<(Header, Vec<Remeasured>)> {
    let name = device.name.clone();
    let exec = device.first()?;
    let options = load_options(dir, args);
    let mut loaded = with_progress_bar(|progress| pegainfer_runtime::load::<M>(exec, &options, progress))?;
    let (header, again) = pegainfer_runtime::measure_again(&mut loaded.engine, options.cuda_graph, steps, progress)?;
    Ok((Header { device: name, ..header }, again))
}

/// Starts the thread of a loaded engine that runs on a device of this kind.
pub fn spawn(engine: impl StepEngine, args: &EngineArgs, device: Device) -> Result<EngineHandle> {
    let default_deadline = if device == Device::Cuda { GPU_STEP_DEADLINE } else { CPU_STEP_DEADLINE };
    let step_deadline = args.step_deadline.unwrap_or(default_deadline);
    let config = EngineConfig { step_deadline, max_queued: args.max_queued_requests.get() };
    EngineHandle::spawn(engine, config).context("the engine thread cannot be started")
}

/// Runs `load` and shows how many of the weights are loaded. It is told (bytes of this chunk, bytes of all weights).
pub fn with_progress_bar<R>(load: impl FnOnce(&mut (dyn FnMut(u64, u64) + Send)) -> R) -> R {
    let mut progress = Progress::start("loading weights", Unit::Bytes, 0, 0);
    let loaded = load(&mut |bytes, total| {
        progress.set_total(total);
        progress.add(bytes);
    });
    progress.finish();
    loaded
}
