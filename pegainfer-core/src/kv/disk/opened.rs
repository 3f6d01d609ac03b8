//! Report of opening a KV file.

use super::config::SlotKind;
use super::contents::{Found, Reset};
use std::fmt;
use std::time::Duration;

/// What opening a KV file found.
#[derive(Debug)]
pub struct Opened {
    /// Blocks that an earlier run saved, oldest first; no two have the same name. Payloads are not checked yet.
    pub found: Vec<Found>,
    /// Contents of its slots.
    pub kind: SlotKind,
    /// Number of slots of the file.
    pub slots: u32,
    /// Number of slots that were ignored because their header is damaged.
    pub damaged: u32,
    /// Number of slots that were ignored because the file was truncated.
    pub missing: u32,
    /// Number of slots that were ignored because a newer slot holds the same block.
    pub duplicates: u32,
    /// Why everything in the file was ignored; the file was made new.
    pub reset: Option<Reset>,
    /// Why the page cache is used; `None` with direct I/O.
    pub not_direct: Option<String>,
    /// Why io_uring is not used; `None` if it is used, or was not asked for.
    pub no_ring: Option<String>,
    /// Time that it took.
    pub took: Duration,
}

impl fmt::Display for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} slots hold a {}", self.found.len(), self.slots, self.kind.name())?;
        match &self.reset {
            None => {}
            // It knows the file of the blocks before its states, and that knows the model.
            Some(Reset::OtherModel) if self.kind == SlotKind::State => {
                f.write_str("; earlier contents are ignored: it belonged to another KV file")?;
            }
            Some(reset) => write!(f, "; earlier contents are ignored: {reset}")?,
        }
        for (count, what) in [(self.damaged, "damaged"), (self.missing, "truncated"), (self.duplicates, "duplicate")] {
            if count > 0 {
                write!(f, "; {count} {what} slots are ignored")?;
            }
        }
        if let Some(reason) = &self.not_direct {
            write!(f, "; the page cache is used ({reason})")?;
        }
        if let Some(reason) = &self.no_ring {
            write!(f, "; threads are used instead of io_uring ({reason})")?;
        }
        Ok(())
    }
}
