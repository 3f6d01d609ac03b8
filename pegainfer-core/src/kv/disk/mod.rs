//! KV blocks on disk: one preallocated file of fixed slots, which survives a restart. States outside of KV blocks have
//! a file of their own.
//!
//! A [`DiskStore`] executes reads and writes of whole slots on its own threads and hands them back by
//! [`poll`](DiskStore::poll). It knows no scheduler and no device, and decides nothing: which block goes to which slot
//! is the caller's business. The caller lends memory for each job, so a payload is never copied.
//!
//! # What a header promises
//! A slot's header is written after its payload has been, and zeros are written over the old header before. Killing the
//! process at any time therefore leaves whole blocks only: what one system call has written, the next process reads,
//! through the page cache or past it. Nothing is flushed, because a flush would cost more than the lost blocks are
//! worth. A power failure may reorder writes, so that a header claims a payload that never reached the disk; the
//! checksum of the payload, compared after each read by the caller, finds that, as it finds what the medium has
//! damaged.
//!
//! # Bounds
//! Reads and writes have separate queues of fixed length; a full one refuses. Reads come first, and at most half of the
//! transfers under way are writes. A failed job is a [`Done`] with an error; after several in a row, the store asks to
//! be left alone for a while ([`DiskStore::is_failing`]).

mod backend;
mod config;
mod contents;
mod error;
mod files;
mod format;
mod job;
mod memory;
mod opened;
mod queue;
#[cfg(target_os = "linux")]
mod ring;
mod store;
#[cfg(test)]
mod tests;
mod threads;

pub use config::{DiskBackend, DiskConfig, SlotKind};
pub use contents::{Found, Reset};
pub use error::{DiskError, DiskFailure};
pub use format::SlotHeader;
pub use memory::{AlignedMemory, SlotMemory};
pub use opened::Opened;
pub use queue::{Done, Refused, RefusedReason};
pub use store::DiskStore;
