//! Paged KV: which blocks hold which tokens. Pure bookkeeping; the bytes live in a model's `state.rs`.
//!
//! A [`BlockPool`] hands out blocks of a fixed number of tokens and counts their holders. A [`BlockTable`] is the list
//! of blocks of one request, and [`BlockIds`] is the view of it in a step. Full blocks are added to the pool's prefix
//! index, where later requests find them. A block without holders stays there until it is evicted, least recently used
//! first.
//!
//! What is outside the device calls a block by its [`ContentName`]. [`tiers`] keeps copies in host memory and on a
//! disk, and the pool's log of [`KvChange`]s tells routers what is where.

mod block_ids;
mod block_images;
mod budget;
mod changes;
pub mod disk;
mod idle;
mod image_numbers;
mod index;
mod named;
mod names;
mod pool;
mod prefix_root;
mod table;
pub mod tiers;

pub use block_ids::BlockIds;
pub use block_images::{BlockImage, BlockImages};
pub use budget::DeviceMemory;
pub use changes::{Changes, KvChange, Medium, StoredRun};
pub use names::{ContentName, Naming};
pub use pool::BlockPool;
pub use prefix_root::PrefixRoot;
pub use table::{BlockTable, OutOfBlocks};

/// Slot of a token whose key and value are not written: they are already cached in a block that other requests may be
/// reading, or the token only pads a step to the shape of a CUDA graph.
pub const NO_SLOT: u32 = u32::MAX;
