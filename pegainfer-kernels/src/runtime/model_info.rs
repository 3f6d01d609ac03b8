//! The numbers of a model that loading, scheduling and start-up messages need.

use crate::heads::BLOCK_SIZE;

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
    /// Bytes of the weights as loaded.
    pub weight_bytes: u64,
    /// Whether config.json or the user asks for FP8 weights.
    pub fp8_weights: bool,
    /// Whether its own layers draft, see [`Model::draft`](super::Model::draft).
    pub drafts: bool,
    /// Bytes of the workspace for each token of a step on a GPU.
    pub workspace_bytes_per_token: u64,
    /// Bytes of K and V of one token over all layers.
    pub kv_bytes_per_token: usize,
    /// Bytes of the state of one sequence beside its KV blocks, such as that of recurrent layers. `None` for a model that
    /// keeps everything in KV blocks.
    pub state_slot_bytes: Option<u64>,
}

impl ModelInfo {
    /// Bytes of a KV block over all layers. A block of a model without full attention has no bytes, but still counts
    /// tokens.
    pub fn block_bytes(&self) -> u64 {
        ((self.kv_bytes_per_token * BLOCK_SIZE) as u64).max(1)
    }
}
