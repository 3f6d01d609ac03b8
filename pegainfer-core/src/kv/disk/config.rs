//! Configuration of a KV file.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// How a store transfers bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskBackend {
    /// io_uring where it is allowed, threads elsewhere.
    Auto,
    /// io_uring, or an error.
    Ring,
    /// A pool of threads.
    Threads,
}

/// Contents of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotKind {
    /// A KV block.
    Block,
    /// State outside of KV blocks.
    State,
}

impl SlotKind {
    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::State => "state",
        }
    }
}

/// Configuration of a KV file.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// Path of the file; its directory exists.
    pub path: PathBuf,
    /// Maximum size of the file.
    pub bytes: u64,
    /// Contents of its slots.
    pub kind: SlotKind,
    /// Bytes of a block's payload. Direct I/O needs a multiple of 4,096.
    pub slot_bytes: usize,
    /// Maximum number of tokens of a block; up to 1,007.
    pub slot_tokens: usize,
    /// Hash of all that decides what a payload means: weights, layout, block size.
    pub fingerprint: [u8; 32],
    /// How bytes are transferred.
    pub backend: DiskBackend,
    /// Bypasses the page cache where the file system allows it.
    pub direct: bool,
    /// Time that opening waits for another process that has the file. The kernel closes the files of a killed process a
    /// moment after its death.
    pub lock_wait: Duration,
    /// Time that a failing disk is left alone.
    pub pause: Duration,
    /// Maximum number of reads that are not finished and polled; also that of writes and erases. It bounds the memory
    /// that callers lend.
    pub queue: usize,
    /// Maximum number of transfers under way at a time; half of them may be writes.
    pub depth: usize,
}

impl DiskConfig {
    /// Direct I/O by the best backend.
    pub fn new(path: &Path, bytes: u64, slot_bytes: usize, slot_tokens: usize, fingerprint: [u8; 32]) -> Self {
        Self {
            path: path.to_owned(),
            bytes,
            kind: SlotKind::Block,
            slot_bytes,
            slot_tokens,
            fingerprint,
            backend: DiskBackend::Auto,
            direct: true,
            lock_wait: Duration::from_secs(2),
            pause: Duration::from_secs(30),
            queue: 64,
            depth: 32,
        }
    }
}
