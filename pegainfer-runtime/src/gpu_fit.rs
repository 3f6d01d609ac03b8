//! Computes how an engine would use the memory of a GPU, without that GPU.

use super::bounds::Bounds;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::model::Model;
use super::model_info::ModelBytes;
use super::sampler::logits_rows;
use pegainfer_core::exec::Device;
use pegainfer_core::kv::DeviceMemory;
use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_kernels::parallel::CONTEXT_BYTES;
use std::fmt;

/// Use of a GPU's memory by an engine. Sizes come from the same functions that loading uses; only memory other than
/// weights, activations and logits is an estimate.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuFit {
    /// Memory of the GPU.
    pub total: u64,
    /// Fraction of the memory that may be used.
    pub utilization: f64,
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
    /// Memory use of an engine of `M` with `options` on an otherwise unused GPU with `total` bytes.
    ///
    /// # Errors
    /// The error that loading would return: the model does not fit, or an option is out of range.
    pub fn new<M: Model>(config: &M::Config, options: &LoadOptions, total: u64) -> Result<Self, LoadError> {
        let (info, bytes) = (M::info(config), ModelBytes::of::<M>(config)?);
        let free =
            |used: u64| DeviceMemory { total, free: total.saturating_sub(used) }.limited(options.gpu_memory_limit);
        let bounds = Bounds::within(&info, &bytes, options, Some(free(CONTEXT_BYTES)))?;
        let size = bounds.size;
        let logits = logits_rows(Device::Cuda).min(size.samples) * info.vocab_size * size_of::<f32>();
        let workspace = size.tokens as u64 * bytes.workspace_per_token + logits as u64;
        let blocks = bounds.blocks_within(free(CONTEXT_BYTES + bytes.weights + workspace))?;
        Ok(Self {
            total: free(0).total,
            utilization: options.gpu_memory_utilization,
            weights: bytes.weights,
            workspace,
            step_tokens: size.tokens,
            sequences: size.rows,
            states: size.rows as u64 * bytes.state_slot,
            snapshots: bounds.snapshots(),
            snapshot_bytes: bounds.snapshots() as u64 * bytes.state_slot,
            kv_tokens: blocks * BLOCK_SIZE,
            kv: blocks as u64 * bytes.block(),
            context: size.context.min(blocks * BLOCK_SIZE),
        })
    }

    /// Bytes that are in use when the engine is loaded.
    pub fn used(&self) -> u64 {
        CONTEXT_BYTES + self.weights + self.workspace + self.states + self.snapshot_bytes + self.kv
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
        line("CUDA", CONTEXT_BYTES, "context and kernels, about")?;
        line("in use", self.used(), &format!("of {:.2} GB x {}", self.total as f64 / 1e9, self.utilization))
    }
}
