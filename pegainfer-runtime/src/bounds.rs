//! The largest step of an engine and the sizes of its pools, from the options it is loaded with.

use super::block_shape::BlockShape;
use super::fit::Demand;
use super::load_error::LoadError;
use super::load_options::{DEFAULT_KV_BYTES, DEFAULT_STATE_BYTES, LoadOptions, STATE_SHARE};
use super::lora::LoraOptions;
use super::model_info::{ModelBytes, ModelInfo};
use pegainfer_core::engine::options::{check_step, context_len, max_pool_blocks, pool_blocks, step_tokens};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::host_memory;
use pegainfer_core::kv::DeviceMemory;
use pegainfer_core::schedule::speculation::Speculation;
use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_kernels::parallel;

/// Default number of running sequences on the CPU.
const CPU_ROWS: usize = 64;
/// Default maximum of running sequences on a GPU.
const GPU_ROWS: usize = 256;
/// Default minimum size of the KV cache on the CPU, in bytes.
const MIN_KV_BYTES: u64 = 64 << 20;
/// Maximum number of state snapshots: more are not worth keeping track of.
const MAX_SNAPSHOTS: u64 = 4096;

/// Rows of logits computed at once. More rows take more memory (0.6 MB each for Qwen3's vocabulary); fewer rows stream
/// the output matrix more often. A step that is only recorded has the ops of a GPU.
pub(super) fn logits_rows(device: Device) -> usize {
    match device {
        Device::Cpu(_) => 32,
        Device::Cuda | Device::Meta => 256,
    }
}

/// Largest step.
#[derive(Debug, Clone, Copy)]
pub struct StepSize {
    /// Input tokens.
    pub tokens: usize,
    /// Rows.
    pub rows: usize,
    /// Maximum number of samples: one per row, and more if drafts are verified.
    pub samples: usize,
    /// Tokens of context.
    pub context: usize,
}

/// Largest step that an executor is built for, and the sizes of its pools.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Size of the largest step.
    pub size: StepSize,
    /// KV blocks of the pool.
    pub kv_blocks: usize,
    /// Fewer blocks, if that is all that fits next to the slots in this fraction of a GPU's memory. `None` insists on
    /// `kv_blocks`.
    pub gpu_memory_share: Option<(f64, ModelBytes)>,
    /// Bytes of a GPU's memory, as if it had no more.
    pub gpu_memory_limit: Option<u64>,
    /// State slots other than the KV cache: one per row and one per snapshot.
    pub slots: usize,
    /// Tokens between snapshots, a multiple of the KV block size.
    pub snapshot_interval: usize,
    /// Drafts that a row verifies.
    pub drafts: usize,
    /// True if a GPU replays decode steps as CUDA graphs.
    pub graphs: bool,
    /// Drafts by the model are ids below this.
    pub draft_vocab_size: Option<usize>,
    /// Slots for adapters, if enabled.
    pub lora: Option<LoraOptions>,
}

impl Bounds {
    /// Steps of `size` over `kv_blocks` blocks, a slot for each row, launch by launch: for plans, benchmarks and tests.
    pub fn exact(size: StepSize, kv_blocks: usize) -> Self {
        Self {
            size,
            kv_blocks,
            gpu_memory_share: None,
            gpu_memory_limit: None,
            slots: size.rows,
            snapshot_interval: BLOCK_SIZE,
            drafts: 0,
            graphs: false,
            draft_vocab_size: None,
            lora: None,
        }
    }

    /// Bounds of a model with `options` on the devices of its ranks. `bytes`: memory of one rank.
    pub fn new(
        info: &ModelInfo,
        bytes: &ModelBytes,
        options: &LoadOptions<impl Sized>,
        execs: &mut [Exec],
    ) -> Result<Self, LoadError> {
        let gpus = execs.iter_mut().filter(|exec| exec.device() == Device::Cuda);
        let gpus = gpus.map(|exec| gpu_memory(exec, options.gpu_memory_limit)).collect::<Result<Vec<_>, _>>()?;
        // The rank with the least memory decides.
        let gpu = gpus.into_iter().min_by_key(|gpu| gpu.free);
        let exchanged = parallel::exchange_bytes(options.loop_back_ranks.unwrap_or(execs.len()));
        let left = |gpu: DeviceMemory| DeviceMemory { free: gpu.free.saturating_sub(exchanged), ..gpu };
        Self::within(info, bytes, options, gpu.map(left))
    }

    /// Bounds of a model with `options` on a GPU with this memory, or on the CPU.
    pub(super) fn within(
        info: &ModelInfo,
        bytes: &ModelBytes,
        options: &LoadOptions<impl Sized>,
        gpu: Option<DeviceMemory>,
    ) -> Result<Self, LoadError> {
        let context = context_len(options.max_model_len, info.max_position_embeddings).map_err(LoadError::Option)?;
        let memory = gpu.map(|gpu| gpu.total);
        let tokens = step_tokens(options.max_num_batched_tokens, memory, bytes.workspace_per_token);
        let tokens = options.max_num_batched_tokens.unwrap_or(tokens.min(info.max_default_tokens));
        let snapshots = snapshots(bytes, options, memory)?;
        let demand = demand(bytes, options, tokens, snapshots);
        let (rows, cpu_kv) = match gpu {
            Some(gpu) => (gpu_rows(&demand, options, gpu, tokens)?, 0),
            None => cpu_defaults(&demand, options, tokens),
        };
        check_step(rows, tokens).map_err(LoadError::Option)?;
        let useful = (context.div_ceil(bytes.block_tokens) * rows) as u64;
        let (kv_blocks, gpu_memory_share) = match (options.kv_cache_bytes, memory) {
            (Some(kv), _) => (kv / bytes.block(), None),
            (None, Some(_)) => {
                (useful.min(max_pool_blocks(bytes.block_tokens)), Some((options.gpu_memory_utilization, *bytes)))
            }
            (None, None) => (useful.min(cpu_kv / bytes.block()), None),
        };
        Ok(Self {
            size: StepSize {
                tokens,
                rows,
                samples: Speculation::samples(options.speculation.as_ref(), rows, tokens),
                context,
            },
            kv_blocks: pool_blocks(kv_blocks, bytes.block_tokens, bytes.block()).map_err(LoadError::Option)?,
            gpu_memory_share,
            gpu_memory_limit: options.gpu_memory_limit,
            slots: rows + snapshots,
            snapshot_interval: options.state_cache_interval,
            drafts: options.drafts(),
            graphs: options.cuda_graph,
            draft_vocab_size: options.speculation.as_ref().and_then(|speculation| speculation.draft_vocab_size),
            lora: options.lora,
        })
    }

    /// Maximum number of samples whose logits are computed at once on this device.
    pub fn logits_rows(&self, device: Device) -> usize {
        logits_rows(device).min(self.size.samples)
    }

    /// Maximum number of blocks in a pass over blocks: one per row, limited by the tokens and samples of a step.
    pub fn blocks(&self, block: BlockShape, device: Device) -> usize {
        let StepSize { tokens, rows, .. } = self.size;
        rows.min(tokens / block.tokens).min(self.logits_rows(device) / self.drafts.max(1)).max(1)
    }

    /// Number of slots for state snapshots.
    pub fn snapshots(&self) -> usize {
        self.slots - self.size.rows
    }

    /// Number of blocks of the pool: the requested number, or as many as fit the rest of the GPU next to the slots.
    /// Call after everything else is allocated.
    pub(super) fn fitting_blocks(&self, exec: &mut Exec) -> Result<usize, LoadError> {
        if self.gpu_memory_share.is_none() {
            return Ok(self.kv_blocks);
        }
        self.blocks_within(gpu_memory(exec, self.gpu_memory_limit)?)
    }

    /// Number of blocks of the pool on a GPU with this memory, with everything but the pool and the slots allocated.
    pub(super) fn blocks_within(&self, memory: DeviceMemory) -> Result<usize, LoadError> {
        let Some((share, bytes)) = self.gpu_memory_share else { return Ok(self.kv_blocks) };
        let slots = self.slots as u64 * bytes.state_slot;
        let memory = DeviceMemory { free: memory.free.saturating_sub(slots), ..memory };
        memory.blocks(share, bytes.block(), self.kv_blocks).map_err(LoadError::Option)
    }
}

/// Memory of the GPU, limited to `limit` bytes.
fn gpu_memory(exec: &mut Exec, limit: Option<u64>) -> Result<DeviceMemory, LoadError> {
    let gpu = exec.gpu()?.info()?;
    Ok(DeviceMemory { total: gpu.memory as u64, free: gpu.free as u64 }.limited(limit))
}

/// Memory that the model needs on a device. A KV cache of unknown size has at least one block.
fn demand(bytes: &ModelBytes, options: &LoadOptions<impl Sized>, tokens: usize, snapshots: usize) -> Demand {
    Demand {
        weights: bytes.weights + bytes.derived,
        workspace: tokens as u64 * bytes.workspace_per_token,
        snapshots: snapshots as u64 * bytes.state_slot,
        state: bytes.state_slot,
        kv: options.kv_cache_bytes.unwrap_or(bytes.block()),
    }
}

/// Number of running sequences on a GPU.
fn gpu_rows(
    demand: &Demand,
    options: &LoadOptions<impl Sized>,
    gpu: DeviceMemory,
    tokens: usize,
) -> Result<usize, LoadError> {
    // A KV cache of a given size may use memory beyond the utilization limit.
    let share = if options.kv_cache_bytes.is_some() { 1.0 } else { options.gpu_memory_utilization };
    let rows = demand.rows(options.max_num_seqs, GPU_ROWS.min(tokens), gpu.left_of(share));
    rows.map_err(|cause| LoadError::Option(demand.refusal(gpu, share, &cause)))
}

/// Default number of running sequences on the CPU, and default size of its KV cache in bytes. A model that does not fit
/// is not refused, because it runs with swap space, slowly.
fn cpu_defaults(demand: &Demand, options: &LoadOptions<impl Sized>, tokens: usize) -> (usize, u64) {
    let max_rows = CPU_ROWS.min(tokens);
    let Some(available) = host_memory::available() else {
        return (options.max_num_seqs.unwrap_or(max_rows), DEFAULT_KV_BYTES);
    };
    let rows = demand.rows(options.max_num_seqs, max_rows, available).unwrap_or_else(|cause| {
        let (weights, available) = (demand.weights as f64 / 1e9, available as f64 / 1e9);
        log::warn!("the model takes more memory than is available: weights {weights:.1} GB, available {available:.1} GB, {cause}");
        options.max_num_seqs.unwrap_or(1)
    });
    let left = demand.left(available).saturating_sub(rows as u64 * demand.state);
    (rows, (left / 2).clamp(MIN_KV_BYTES, DEFAULT_KV_BYTES))
}

/// Number of state snapshots that fit the options; 0 for a model with all state in KV blocks.
fn snapshots(bytes: &ModelBytes, options: &LoadOptions<impl Sized>, memory: Option<u64>) -> Result<usize, LoadError> {
    if bytes.state_slot == 0 {
        return Ok(0);
    }
    let interval = options.state_cache_interval;
    if interval == 0 || !interval.is_multiple_of(BLOCK_SIZE) {
        return Err(LoadError::Option(format!(
            "--state-cache-interval is {interval}, but snapshots are made at multiples of {BLOCK_SIZE} tokens"
        )));
    }
    let default = memory.map_or(DEFAULT_STATE_BYTES, |memory| memory / STATE_SHARE);
    let memory = options.state_cache_bytes.unwrap_or(default);
    Ok((memory / bytes.state_slot).min(MAX_SNAPSHOTS) as usize)
}
