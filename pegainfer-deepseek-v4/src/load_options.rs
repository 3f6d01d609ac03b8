//! Options of loading: the checkpoint, and how much of the machine to use.

use crate::bounds::Sharing;
use crate::numerics::Numerics;
use pegainfer_core::schedule::speculation::Speculation;
use std::path::PathBuf;

/// Options of loading: the checkpoint, and how much of the machine to use.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Directory of the checkpoint.
    pub model_path: PathBuf,
    /// Seed of random weights that replace those of the checkpoint; its config.json is read.
    pub dummy_seed: Option<u64>,
    /// Context length; default: the model's.
    pub max_model_len: Option<usize>,
    /// Maximum number of running sequences. Default: up to 64; on GPUs 128 or 256 if these leave [`DEFAULT_KV_BYTES`]
    /// of KV cache.
    pub max_num_seqs: Option<usize>,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Tokens of a step with many decoding sequences and a few prompts.
    pub max_num_mixed_tokens: usize,
    /// Size of the compressed entries in bytes. Default: enough for `max_num_seqs` sequences of full length; on the CPU
    /// at most [`DEFAULT_KV_BYTES`], on GPUs at most the rest within `gpu_memory_utilization` and at least
    /// [`DEFAULT_KV_BYTES`].
    pub kv_cache_bytes: Option<u64>,
    /// Fraction of a GPU's memory that may be in use when the engine is loaded, 0 to 1.
    pub gpu_memory_utilization: f64,
    /// Loads only rank 0 of this number of ranks; its messages to other ranks come back as theirs. For developing and
    /// timing one rank on one GPU; the generated text is meaningless.
    pub loop_back_ranks: Option<usize>,
    /// Compares tokens and state of all ranks bit for bit after each step. For development: slow. No effect with one
    /// rank.
    pub check_ranks: bool,
    /// Work of prompts that ranks share: [`Sharing::OFFICIAL`], and more in tests of small models.
    pub sharing: Sharing,
    /// Replay decode steps, steps that verify drafts, and passes of the layer that drafts as CUDA graphs, on a GPU.
    pub cuda_graph: bool,
    /// Speculative decoding, if enabled.
    pub speculation: Option<Speculation>,
    /// Roundings of the run.
    pub numerics: Numerics,
}

/// Default size of the compressed entries: the maximum on the CPU, the minimum on GPUs.
pub const DEFAULT_KV_BYTES: u64 = 4 << 30;
