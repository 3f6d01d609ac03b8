//! Errors of the KV file.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Reason why a KV file cannot be used; each message is one sentence for the user.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The path exists and is a directory, a device or a pipe.
    #[error("the KV file {} is not a regular file", path.display())]
    NotRegular {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file has contents that PegaInfer did not write.
    #[error(
        "{} holds other data than KV, and is left as it is: choose another path, or delete the file if nobody needs it",
        path.display()
    )]
    Foreign {
        /// Path of the file.
        path: PathBuf,
    },
    /// Another store has the file open, of this process or of another one.
    #[error("another server or model uses the KV file {}: give each its own path", path.display())]
    Locked {
        /// Path of the file.
        path: PathBuf,
    },
    /// The operating system refuses an operation on the file.
    #[error("cannot {operation} the KV file {}: {error}", path.display())]
    Io {
        /// What failed: "open", "lock", "read" or the like.
        operation: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Answer of the operating system.
        error: io::Error,
    },
    /// The file does not fit on the disk.
    #[error(
        "the KV file {} needs {:.1} GiB, but its file system has only {:.1} GiB for it: choose a smaller size",
        path.display(), gib(*needed), gib(*free)
    )]
    NoSpace {
        /// Path of the file.
        path: PathBuf,
        /// Bytes of the whole file.
        needed: u64,
        /// Free bytes of the file system, and those that the file has already.
        free: u64,
    },
    /// The configured size is too small for one slot.
    #[error("a KV file of {bytes} bytes is too small: this model needs at least {needed} bytes for one block")]
    TooSmall {
        /// Configured size.
        bytes: u64,
        /// Bytes of a file with one slot.
        needed: u64,
    },
    /// Slots of this size or number of tokens cannot be stored.
    #[error(
        "blocks of {slot_bytes} bytes and {slot_tokens} tokens cannot be stored in a file: \
         at least 1 byte and at most {max_tokens} tokens are possible"
    )]
    BadSlot {
        /// Bytes of a slot.
        slot_bytes: usize,
        /// Tokens of a slot.
        slot_tokens: usize,
        /// Maximum number of tokens.
        max_tokens: usize,
    },
    /// The threads or the ring for asynchronous I/O cannot be started.
    #[error("cannot start asynchronous I/O: {0}")]
    Start(#[source] io::Error),
    /// The operating system gives no random numbers.
    #[error("the operating system gives no random numbers: {0}")]
    Random(String),
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// A failed job. The block is not on disk, or could not be read.
#[derive(Debug, Error)]
#[error("cannot {operation} slot {slot} of the KV file: {error}")]
pub struct DiskFailure {
    /// What failed: "read", "write" or "erase".
    pub operation: &'static str,
    /// Number of the slot.
    pub slot: u32,
    /// Answer of the operating system.
    pub error: io::Error,
}
