//! Atomics, locks and channels of the engine's threads: those of std and tokio.
//!
//! With `--cfg loom` they are those of loom, a model checker. It runs a test under every interleaving of its threads
//! and every value that the memory model allows them to read. The channels are then built from its locks
//! ([`modelled`]); see tests/loom.rs.

#[cfg(loom)]
mod modelled;

#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};

/// Channels to the engine thread and the demultiplexer, whose receivers may block their thread.
pub(crate) mod queue {
    #[cfg(not(loom))]
    pub use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

    #[cfg(loom)]
    pub use super::modelled::{Receiver, Sender, Sender as SyncSender, channel, sync_channel};
}

/// Channels to clients, whose receivers may be async.
pub(crate) mod events {
    #[cfg(not(loom))]
    pub use tokio::sync::mpsc::{Receiver, Sender, channel};

    #[cfg(loom)]
    pub use super::modelled::{AsyncReceiver as Receiver, Sender, async_channel as channel};
}
