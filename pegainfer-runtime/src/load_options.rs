//! What to load and how much of the machine to use.

use super::config_file::Overrides;
use pegainfer_core::schedule::speculation::Speculation;
use std::path::PathBuf;

/// Upper bound of the default KV pool on the CPU, bytes.
pub const DEFAULT_KV_BYTES: u64 = 4 << 30;
/// Default of [`LoadOptions::state_cache_bytes`] on the CPU.
pub const DEFAULT_STATE_BYTES: u64 = 1 << 30;
/// On a GPU the default of [`LoadOptions::state_cache_bytes`] is its memory divided by this.
pub const STATE_SHARE: u64 = 20;

/// What to load and how much of the machine to use. A model without state beside the KV cache ignores `state_cache_*`.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Directory of the checkpoint.
    pub model_path: PathBuf,
    /// What the user's flags change of its config.json.
    pub overrides: Overrides,
    /// Seed of dummy weights; `None` reads the checkpoint's.
    pub dummy_seed: Option<u64>,
    /// Context length; `None` takes the model's.
    pub max_model_len: Option<usize>,
    /// Sequences that run at once; `None` takes up to 64 on the CPU and up to 256 on a GPU, as their states fit half of the memory
    /// that weights, activations and snapshots leave.
    pub max_num_seqs: Option<usize>,
    /// Tokens of one step; `None` takes 512 on the CPU, and on a GPU up to 40,960, as a twelfth of its memory holds.
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens of a step in which requests decode while the prompts of a few others are computed.
    pub max_num_mixed_tokens: usize,
    /// Whether a GPU replays decode steps as CUDA graphs.
    pub cuda_graph: bool,
    /// Whether and how tokens are drafted.
    pub speculation: Option<Speculation>,
    /// Bytes of the KV pool; `None` takes what all sequences that run at once could use at full length: on the CPU at most
    /// [`DEFAULT_KV_BYTES`] and half of the memory that is left, on a GPU at most what the rest leaves of `gpu_memory_utilization`.
    pub kv_cache_bytes: Option<u64>,
    /// Fraction of a GPU's memory that may be in use when the engine is loaded, 0 to 1.
    pub gpu_memory_utilization: f64,
    /// Bytes of a GPU's memory, as if it had no more; `None` takes all of it.
    pub gpu_memory_limit: Option<u64>,
    /// Bytes of the state snapshots that a prefix hit resumes from, beside the state of running sequences; less than one
    /// snapshot keeps none, and then there is no prefix cache. `None` takes [`DEFAULT_STATE_BYTES`], or on a GPU a
    /// [`STATE_SHARE`]th of its memory.
    pub state_cache_bytes: Option<u64>,
    /// Tokens between snapshots, a multiple of the KV block size; one more is made where a prompt's last full block ends.
    pub state_cache_interval: usize,
}
