//! config.json of a DeepSeek-V4 checkpoint. Unsupported fields are refused by name, never ignored.

mod parse;

use pegainfer_runtime::BlockShape;

/// Tokens that a layer attends to in addition to its window of 128 tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Only the window (`compress_ratios` 0).
    Window,
    /// Compressed sparse attention (4): the best entries by an indexer, each made of 8 overlapping tokens.
    Sparse,
    /// Heavily compressed attention (128): every entry, each made of 128 tokens.
    Heavy,
}

impl LayerKind {
    /// Tokens from one compressed entry to the next; `None` without entries.
    pub fn ratio(self) -> Option<usize> {
        match self {
            Self::Window => None,
            Self::Sparse => Some(4),
            Self::Heavy => Some(128),
        }
    }
}

/// YaRN's numbers (`rope_scaling`). This model has no mscale, neither on the angles nor on the scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Low frequencies are divided by this.
    pub factor: f64,
    /// Rotations within the original context above which a frequency stays unchanged.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided.
    pub beta_slow: f64,
    /// Context length before the extension.
    pub original_context: f64,
}

/// Layers of a checkpoint for speculative decoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Drafts {
    /// None.
    None,
    /// Multi-token prediction (April).
    Mtp {
        /// Layers.
        layers: usize,
    },
    /// DSpark (0731).
    DSpark(DSpark),
}

/// The numbers of DSpark's stages; see forward/dspark.rs for their computation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DSpark {
    /// Number of stages, each a window layer.
    pub layers: usize,
    /// Layers of the model whose output streams are inputs of the stages, in input order (`dspark_target_layer_ids`).
    pub targets: Vec<usize>,
    /// Rank of the Markov head, a multiple of 32 (`dspark_markov_rank`).
    pub markov_rank: usize,
    /// Positions of a block (`dspark_block_size`), and the input of all but the first (`dspark_noise_token_id`).
    pub block: BlockShape,
}

/// The numbers of a DeepSeek-V4 model. Every matrix width is a multiple of 128.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Kind of each decoder layer.
    pub layers: Vec<LayerKind>,
    /// Kind and number of the draft layers of the checkpoint.
    pub drafts: Drafts,
    /// True if the draft layers are loaded; otherwise their tensors are only recognised.
    pub loads_drafts: bool,
    /// Query heads; there is one head of keys, which are also the values.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Number of its last dimensions, which are rotated.
    pub rope_dim: usize,
    /// Rank of the query projection.
    pub q_lora_rank: usize,
    /// Groups of heads of the output projection.
    pub o_groups: usize,
    /// Rank of each group's output.
    pub o_lora_rank: usize,
    /// Query heads of the indexer.
    pub index_heads: usize,
    /// Width of one; a power of two.
    pub index_head_dim: usize,
    /// Entries that it chooses.
    pub index_topk: usize,
    /// Number of first layers whose experts depend only on the token id.
    pub hash_layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Routed experts per token, excluding the shared one.
    pub experts_per_token: usize,
    /// Width of an expert.
    pub expert_width: usize,
    /// Factor of the routed experts' weights, which sum to 1 before it.
    pub routed_scaling: f32,
    /// Bound of an expert's gate and up values.
    pub swiglu_limit: f32,
    /// Rounds of the Sinkhorn normalisation.
    pub sinkhorn_iters: usize,
    /// Added in it to every sum.
    pub hc_eps: f32,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies of window layers.
    pub rope_theta: f64,
    /// RoPE base of compressed layers, which also use YaRN.
    pub compress_rope_theta: f64,
    /// YaRN of compressed layers.
    pub yarn: Yarn,
    /// Context length the model was trained for.
    pub max_position_embeddings: usize,
    /// Weights are FP8 and FP4 with E8M0 scales; else all bf16.
    pub quantized: bool,
    /// Standard deviation of dummy weights.
    pub initializer_range: f32,
    /// End-of-text ids of all files of the checkpoint.
    pub eos_token_ids: Vec<u32>,
}

/// Residual streams of the hyper-connections.
pub const STREAMS: usize = 4;
pub use pegainfer_kernels::ops::deepseek_v4::WINDOW;

impl Config {
    /// The numbers of DSpark's stages, if the checkpoint has them and they are loaded.
    pub fn loaded_dspark(&self) -> Option<&DSpark> {
        match &self.drafts {
            Drafts::DSpark(dspark) if self.loads_drafts => Some(dspark),
            _ => None,
        }
    }

    /// Draft layers that are loaded.
    pub fn loaded_draft_layers(&self) -> usize {
        match &self.drafts {
            _ if !self.loads_drafts => 0,
            Drafts::None => 0,
            Drafts::Mtp { layers } => *layers,
            Drafts::DSpark(dspark) => dspark.layers,
        }
    }

    /// Heads of one group of the output projection.
    pub fn heads_per_group(&self) -> usize {
        self.heads / self.o_groups
    }
}
