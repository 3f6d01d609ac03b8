//! What to load and how much of the machine to use.

use crate::bounds::Sharing;
use crate::numerics::Numerics;
use pegainfer_core::schedule::speculation::Speculation;
use std::path::PathBuf;

/// What to load and how much of the machine to use.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Directory of the checkpoint.
    pub model_path: PathBuf,
    /// Random weights of this seed instead of those of the checkpoint; its config.json is read.
    pub dummy_seed: Option<u64>,
    /// Context length; `None` takes the model's.
    pub max_model_len: Option<usize>,
    /// Sequences that run at once; `None` takes up to 64, and on GPUs 128 or 256 where these leave [`DEFAULT_KV_BYTES`] of KV cache.
    pub max_num_seqs: Option<usize>,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a step in which many requests decode while the prompts of a few others are computed.
    pub max_num_mixed_tokens: usize,
    /// Bytes of compressed entries; `None` takes what `max_num_seqs` sequences of full length could use: on the CPU at most
    /// [`DEFAULT_KV_BYTES`], on GPUs at most what the rest leaves of `gpu_memory_utilization`, but not less than [`DEFAULT_KV_BYTES`].
    pub kv_cache_bytes: Option<u64>,
    /// Fraction of a GPU's memory that may be in use when the engine is loaded, 0 to 1.
    pub gpu_memory_utilization: f64,
    /// Load rank 0 of this number of ranks alone: what it sends to the others comes back as theirs. One rank can be developed and timed on one
    /// GPU so; what it generates means nothing.
    pub loop_back_ranks: Option<usize>,
    /// Compare tokens and state of all ranks after each step, bit for bit. For development: slow. No effect with one rank.
    pub check_ranks: bool,
    /// Work of prompts that ranks share: [`Sharing::OFFICIAL`], and more in tests of small models.
    pub sharing: Sharing,
    /// Replay decode steps, steps that verify drafts, and passes of the layer that drafts as CUDA graphs, on a GPU.
    pub cuda_graph: bool,
    /// Speculative decoding: how tokens are drafted, and how many; `None` for none.
    pub speculation: Option<Speculation>,
    /// Which roundings a run has.
    pub numerics: Numerics,
}

/// Default for compressed entries: on the CPU at most, on GPUs at least.
pub const DEFAULT_KV_BYTES: u64 = 4 << 30;
