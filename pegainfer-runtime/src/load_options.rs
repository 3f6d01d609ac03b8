//! Options of loading: the checkpoint, and how much of the machine to use.

use super::config_file::Overrides;
use super::lora::LoraOptions;
use pegainfer_core::schedule::speculation::Speculation;
use std::path::PathBuf;

/// Upper bound of the default KV pool on the CPU, bytes.
pub const DEFAULT_KV_BYTES: u64 = 4 << 30;
/// Default of [`LoadOptions::state_cache_bytes`] on the CPU.
pub const DEFAULT_STATE_BYTES: u64 = 1 << 30;
/// Divisor of GPU memory: the default of [`LoadOptions::state_cache_bytes`] on a GPU.
pub const STATE_SHARE: u64 = 20;

/// Options of loading. A model without state other than the KV cache ignores `state_cache_*`.
#[derive(Debug, Clone)]
pub struct LoadOptions<O = ()> {
    /// Directory of the checkpoint.
    pub model_path: PathBuf,
    /// Changes of config.json by the user's flags.
    pub overrides: Overrides,
    /// Options that only this model has.
    pub model: O,
    /// Seed of dummy weights; `None` reads the checkpoint's.
    pub dummy_seed: Option<u64>,
    /// Context length; default: the model's.
    pub max_model_len: Option<usize>,
    /// Maximum number of running sequences. Default: up to 64 on the CPU and up to 256 on a GPU, if their states fit
    /// half of the memory that weights, activations and snapshots leave.
    pub max_num_seqs: Option<usize>,
    /// Maximum number of tokens in a step. Default: 512 on the CPU; on a GPU as many as fit a twelfth of its memory, up
    /// to 40,960.
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens of a step with decoding sequences and a few prompts.
    pub max_num_mixed_tokens: usize,
    /// True if a GPU replays decode steps as CUDA graphs.
    pub cuda_graph: bool,
    /// Slots for adapters, if enabled.
    pub lora: Option<LoraOptions>,
    /// Speculative decoding, if enabled.
    pub speculation: Option<Speculation>,
    /// Size of the KV pool in bytes. Default: enough for all running sequences at full length; on the CPU at most
    /// [`DEFAULT_KV_BYTES`] and half of the free memory, on a GPU at most the rest within `gpu_memory_utilization`.
    pub kv_cache_bytes: Option<u64>,
    /// Fraction of a GPU's memory that may be in use when the engine is loaded, 0 to 1.
    pub gpu_memory_utilization: f64,
    /// Pretend that a GPU has only this many bytes of memory.
    pub gpu_memory_limit: Option<u64>,
    /// Size in bytes of the state snapshots that prefix hits resume from, in addition to the state of running
    /// sequences. Less than one snapshot disables the prefix cache. Default: [`DEFAULT_STATE_BYTES`], or on a GPU a
    /// [`STATE_SHARE`]th of its memory.
    pub state_cache_bytes: Option<u64>,
    /// Host memory for copies of KV blocks, bytes.
    pub kv_offloading_bytes: Option<u64>,
    /// File for more copies of KV blocks, and its size in bytes. Needs `kv_offloading_bytes`.
    pub kv_disk: Option<(PathBuf, u64)>,
    /// Loads only rank 0 of this number of ranks; its messages to other ranks come back as theirs. For developing and
    /// timing one rank on one GPU; the generated text is meaningless.
    pub loop_back_ranks: Option<usize>,
    /// Compares all ranks bit for bit after each step. For development: slow. No effect with one rank.
    pub check_ranks: bool,
    /// Tokens between snapshots, a multiple of the KV block size. One more snapshot is kept at the last full block of a
    /// prompt.
    pub state_cache_interval: usize,
}

impl<O> LoadOptions<O> {
    /// Drafts that a row verifies.
    pub fn drafts(&self) -> usize {
        self.speculation.as_ref().map_or(0, |speculation| speculation.num_tokens)
    }
}
