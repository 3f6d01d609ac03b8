//! Computes how an engine would use the memory of a GPU, without that GPU, or of this machine's CPU.

use super::bounds::Bounds;
use super::load_error::LoadError;
use super::load_options::{LoadOptions, STATE_SHARE};
use super::model::{Model, possible_ranks, shard_config};
use super::model_info::ModelBytes;
use pegainfer_core::engine::options::memory_for;
use pegainfer_core::exec::Device;
use pegainfer_core::host_memory;
use pegainfer_core::isa::Isa;
use pegainfer_core::kv::DeviceMemory;
use pegainfer_core::parallel::{RankBytes, Shard};
use pegainfer_kernels::parallel::device_bytes;
use std::fmt;

/// Maximum number of tokens of the request for which [`rank_bytes`] reserves KV cache.
const REQUEST_TOKENS: usize = 8192;

/// Use of the memory of a GPU, or of the CPU's, by an engine. Sizes come from the same functions that loading uses; only
/// memory other than weights, activations and logits is an estimate.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuFit {
    /// Memory of the GPU, or memory of this machine that is available.
    pub total: u64,
    /// Fraction of the memory that may be used.
    pub utilization: f64,
    /// Bytes of CUDA's context and of exchanges with other ranks, about.
    pub cuda: u64,
    /// Bytes of the weights.
    pub weights: u64,
    /// Bytes of the activations of the largest step, and of its logits.
    pub workspace: u64,
    /// Tokens of the largest step.
    pub step_tokens: usize,
    /// Maximum number of running sequences.
    pub sequences: usize,
    /// Bytes of their recurrent states.
    pub states: u64,
    /// State snapshots.
    pub snapshots: usize,
    /// Bytes of the snapshots.
    pub snapshot_bytes: u64,
    /// Tokens that the KV cache holds.
    pub kv_tokens: usize,
    /// Bytes of the KV cache.
    pub kv: u64,
    /// Longest context of a request.
    pub context: usize,
}

impl GpuFit {
    /// Memory use of one of `ranks` ranks of `M` with `options` on an otherwise unused GPU with `total` bytes.
    ///
    /// # Errors
    /// The error that loading would return: the model does not fit, or an option is out of range.
    pub fn new<M: Model>(
        config: &M::Config,
        options: &LoadOptions<M::Options>,
        ranks: usize,
        total: u64,
    ) -> Result<Self, LoadError> {
        let info = M::info(config);
        let bytes =
            ModelBytes::with_drafts::<M>(&shard_config::<M>(config, Shard { rank: 0, ranks })?, options.drafts())?;
        let cuda = device_bytes(ranks);
        let free =
            |used: u64| DeviceMemory { total, free: total.saturating_sub(used) }.limited(options.gpu_memory_limit);
        let bounds = Bounds::within(&info, &bytes, options, Some(free(cuda)));
        let bounds = bounds.map_err(|error| with_enough_gpus::<M>(error, config, options, (ranks, free(0).free)))?;
        let workspace = workspace(&bounds, &bytes, info.vocab_size, Device::Cuda);
        let blocks = bounds.blocks_within(free(cuda + bytes.weights + bytes.derived + workspace))?;
        let (total, utilization) = (free(0).total, options.gpu_memory_utilization);
        Ok(Self { cuda, total, utilization, ..Self::of_blocks(&bounds, &bytes, workspace, blocks) })
    }

    /// Memory use of `M` with `options` on this machine's CPU. More than there is takes swap space, which is slow.
    ///
    /// # Errors
    /// An option is out of range.
    pub fn on_cpu<M: Model>(config: &M::Config, options: &LoadOptions<M::Options>) -> Result<Self, LoadError> {
        let info = M::info(config);
        let bytes = ModelBytes::with_drafts::<M>(config, options.drafts())?;
        let bounds = Bounds::within(&info, &bytes, options, None)?;
        let workspace = workspace(&bounds, &bytes, info.vocab_size, Device::Cpu(Isa::Portable));
        let total = host_memory::available().unwrap_or(0);
        Ok(Self { total, ..Self::of_blocks(&bounds, &bytes, workspace, bounds.kv_blocks) })
    }

    /// Memory use with `blocks` KV blocks, on a device of unknown size.
    fn of_blocks(bounds: &Bounds, bytes: &ModelBytes, workspace: u64, blocks: usize) -> Self {
        let (size, kv_tokens) = (bounds.size, blocks * bytes.block_tokens);
        Self {
            cuda: 0,
            total: 0,
            utilization: 1.0,
            weights: bytes.weights + bytes.derived,
            workspace,
            step_tokens: size.tokens,
            sequences: size.rows,
            states: size.rows as u64 * bytes.state_slot,
            snapshots: bounds.snapshots(),
            snapshot_bytes: bounds.snapshots() as u64 * bytes.state_slot,
            kv_tokens,
            kv: blocks as u64 * bytes.block(),
            context: size.context.min(kv_tokens),
        }
    }

    /// Bytes that are in use when the engine is loaded.
    pub fn used(&self) -> u64 {
        self.cuda + self.weights + self.workspace + self.states + self.snapshot_bytes + self.kv
    }
}

/// Bytes of the activations and logits of the largest step.
fn workspace(bounds: &Bounds, bytes: &ModelBytes, vocab_size: usize, device: Device) -> u64 {
    let logits = bounds.logits_rows(device) * vocab_size * size_of::<f32>();
    bounds.size.tokens as u64 * bytes.workspace_per_token + logits as u64
}

/// Memory that a GPU needs for each possible number of ranks: weights, a step, and the state and KV cache of one request,
/// by `options`; see [`fewest_ranks`](pegainfer_core::parallel::fewest_ranks).
pub fn rank_bytes<M: Model>(
    config: &M::Config,
    options: &LoadOptions<M::Options>,
) -> Result<Vec<RankBytes>, LoadError> {
    let info = M::info(config);
    let context = options.max_model_len.unwrap_or(info.max_position_embeddings.min(REQUEST_TOKENS)) as u64;
    let need = |ranks: usize| {
        let bytes =
            ModelBytes::with_drafts::<M>(&shard_config::<M>(config, Shard { rank: 0, ranks })?, options.drafts())?;
        let kv = options.kv_cache_bytes.unwrap_or(context * bytes.kv_per_token);
        let state =
            options.state_cache_bytes.unwrap_or(0) + options.max_num_seqs.unwrap_or(1) as u64 * bytes.state_slot;
        let fixed = bytes.weights + bytes.derived + kv + state + device_bytes(ranks);
        // Snapshots take a part of the memory, whatever it is.
        let keeps_snapshots = bytes.state_slot > 0 && options.state_cache_bytes.is_none();
        let snapshots = if keeps_snapshots { 1.0 / STATE_SHARE as f64 } else { 0.0 };
        let share = options.gpu_memory_utilization - snapshots;
        let (tokens, each) = (options.max_num_batched_tokens, bytes.workspace_per_token);
        Ok(RankBytes { ranks, bytes: memory_for(fixed, tokens, each, info.max_default_tokens, share) })
    };
    possible_ranks::<M>(config).map(need).collect()
}

/// `error`, and the number of GPUs with `free` bytes that hold the model, if `ranks` of them do not.
pub(super) fn with_enough_gpus<M: Model>(
    error: LoadError,
    config: &M::Config,
    options: &LoadOptions<M::Options>,
    (ranks, free): (usize, u64),
) -> LoadError {
    let needs = rank_bytes::<M>(config, options).unwrap_or_default();
    let lacks = needs.iter().any(|need| need.ranks == ranks && need.bytes > free);
    match (error, needs.iter().find(|need| lacks && need.bytes <= free)) {
        (LoadError::Option(why), Some(RankBytes { ranks, .. })) => {
            LoadError::Option(format!("{why}; {ranks} such GPUs hold it (--tensor-parallel-size {ranks})"))
        }
        (error, _) => error,
    }
}

impl fmt::Display for GpuFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line =
            |name: &str, bytes: u64, what: &str| writeln!(f, "{name:<16} {:>8.2} GB  {what}", bytes as f64 / 1e9);
        line("weights", self.weights, "")?;
        line("step", self.workspace, &format!("{} tokens", self.step_tokens))?;
        if self.states > 0 {
            line("states", self.states, &format!("{} sequences", self.sequences))?;
            line("state snapshots", self.snapshot_bytes, &format!("{} in the prefix cache", self.snapshots))?;
        }
        let kv = format!(
            "{} tokens, {} sequences at once, requests of up to {}",
            self.kv_tokens, self.sequences, self.context
        );
        line("KV cache", self.kv, &kv)?;
        if self.cuda > 0 {
            line("CUDA", self.cuda, "context and kernels, about")?;
        }
        let share = if self.utilization < 1.0 { format!(" x {}", self.utilization) } else { String::new() };
        line("in use", self.used(), &format!("of {:.2} GB{share}", self.total as f64 / 1e9))
    }
}
