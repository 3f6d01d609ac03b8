//! The numbers of a model that loading, scheduling and start-up messages need.

use super::block_shape::BlockShape;

/// The numbers of a model that loading, scheduling and start-up messages need, computed from its configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Context length that the model was trained for, tokens.
    pub max_position_embeddings: usize,
    /// Ids that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Standard deviation of dummy weights.
    pub initializer_range: f32,
    /// True if config.json or the user asks for FP8 weights.
    pub fp8_weights: bool,
    /// True if its own layers draft; see [`Model::draft`](super::Model::draft).
    pub drafts: bool,
    /// Shape of the blocks that its layers draft; `None` if they draft one token after the other.
    pub draft_block: Option<BlockShape>,
    /// Id of the tokens of images; `None` if the model does not read images.
    pub image_token: Option<u32>,
    /// Limit of the default number of tokens in a step on a GPU.
    pub max_default_tokens: usize,
}

/// Bytes that a model takes on a GPU, and approximately on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelBytes {
    /// The weights as loaded.
    pub weights: u64,
    /// Weights computed from loaded ones; see [`Model::finish_weights`](super::Model::finish_weights).
    pub derived: u64,
    /// Workspace per token of a step, without the parts per segment and per row.
    pub workspace_per_token: u64,
    /// K and V of one token over all layers.
    pub kv_per_token: u64,
    /// State of one sequence next to its KV blocks, such as that of recurrent layers. 0 for a model that keeps
    /// everything in KV blocks.
    pub state_slot: u64,
    /// Tokens of a KV block.
    pub block_tokens: usize,
}

impl ModelBytes {
    /// Bytes of a KV block over all layers. A block of a model without full attention has no bytes, but still counts
    /// tokens.
    pub fn block(&self) -> u64 {
        (self.kv_per_token * self.block_tokens as u64).max(1)
    }
}
