//! Weights in GGUF files: their blocks become the rows of [`grouped`](super::grouped), value by value the same.

mod block_rows;
mod block_type;
mod blocks;
mod checkpoint;

pub use block_rows::BlockRows;
pub use block_type::BlockType;
