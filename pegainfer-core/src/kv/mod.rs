//! Paged KV: which blocks hold which tokens. Pure bookkeeping; the bytes live in a model's `state.rs`.
//!
//! A [`BlockPool`] hands out blocks of a fixed number of tokens and counts their holders. A [`BlockTable`] is the list
//! of blocks of one request, and [`BlockIds`] is the view of it in a step. Full blocks are added to the pool's prefix
//! index, where later requests find them. A block without holders stays there until it is evicted, least recently used
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

/// Slot of a token whose key and value are not written: they are already cached in a block that other requests may be
/// reading, or the token only pads a step to the shape of a CUDA graph.
pub const NO_SLOT: u32 = u32::MAX;
