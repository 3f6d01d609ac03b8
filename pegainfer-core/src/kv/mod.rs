//! Paged KV: which blocks hold which tokens. Pure bookkeeping; the bytes live in a model's `state.rs`.
//!
//! A [`BlockPool`] hands out blocks of a fixed number of tokens and counts their holders. A [`BlockTable`] is one
//! request's list of blocks, and [`BlockIds`] is what a step sees of it. Full blocks are entered in the pool's prefix
//! index, where later requests find them; a block that nobody holds stays there until it is evicted, least recently used
//! first.

mod block_ids;
mod budget;
mod idle;
mod index;
mod pool;
mod table;

pub use block_ids::BlockIds;
pub use budget::DeviceMemory;
pub use pool::BlockPool;
pub use table::{BlockTable, OutOfBlocks};

/// The slot of a token whose key and value stay out of the cache: because they are there already, in a block that other
/// requests may be reading, or because the token only pads a step to the shape of a CUDA graph.
pub const NO_SLOT: u32 = u32::MAX;
