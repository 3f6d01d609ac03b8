//! Shape of the blocks that a model drafts.

/// Shape of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// Positions of a block, the maximum number of its drafts.
    pub tokens: usize,
    /// Input of every position but the first.
    pub noise_token: u32,
}
