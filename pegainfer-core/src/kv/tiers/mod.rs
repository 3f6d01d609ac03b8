//! Copies of KV blocks outside the device. Pure bookkeeping, like the rest of [`kv`](super); an executor moves the
//! bytes.
//!
//! Full blocks are copied to slots of host memory soon after they entered the pool's prefix index ([`Tiers::offer`]),
//! and from there to a disk, if there is one. A request whose prompt continues in a tier waits while those blocks are
//! copied back ([`Tiers::start_load`]), if that is faster than computing them again: from the disk to the host, and
//! from there to the device. Every copy has a checksum, made on the way out of the device and compared on the way in; a
//! block that differs is a miss.
//!
//! A model with state outside of KV blocks resumes only where that state was kept. Its kept states have slots of their
//! own on the host and on the disk, and are read and loaded with the blocks before them.

mod chain;
mod checksum;
mod disk;
mod in_flight;
mod index;
mod kept;
mod loading;
mod rates;
mod state_tier;
mod states;
mod stats;
mod telling;
#[allow(clippy::module_inception, reason = "the module is named like the type")]
mod tiers;
mod transfer;

pub use chain::LoadWish;
pub use checksum::Checksum;
pub use in_flight::Loaded;
pub use index::{SlotIndex, TierBlock};
pub use kept::KeptState;
pub use loading::LoadStart;
pub use rates::{Rates, Work};
pub use stats::TierStats;
pub use tiers::Tiers;
pub use transfer::{BlockCopy, Direction, Transfer, TransferDone, TransferId};
