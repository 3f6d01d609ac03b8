//! Why a trace cannot be used.

use super::detect::known;
use pegainfer_terminal::printable::truncate_for_error;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a trace cannot be used.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("the trace {} cannot be read", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The first line belongs to no known format.
    #[error("{} is not a known trace: its first line is {found:?}; known are{}", path.display(), known())]
    Unknown {
        /// Path of the file.
        path: PathBuf,
        /// Start of its first line.
        found: String,
    },
    /// A line does not follow the file's format.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Why the line is invalid.
        reason: String,
    },
    /// The trace is longer than the maximum.
    #[error(
        "{}: the last request comes {days:.0} days after the first one, and a trace may last {max_days} days; are its \
         times ({time}) of another unit?",
        path.display()
    )]
    TooLong {
        /// Path of the file.
        path: PathBuf,
        /// Days from the first arrival to the last one.
        days: f64,
        /// Maximum number of days.
        max_days: u64,
        /// Column or field of the times, and their unit.
        time: &'static str,
    },
}

impl TraceError {
    /// The error for the file at `path`, whose first line `first` belongs to no known format.
    pub(super) fn unknown(path: &Path, first: &str) -> Self {
        Self::Unknown { path: path.into(), found: truncate_for_error(first) }
    }
}
