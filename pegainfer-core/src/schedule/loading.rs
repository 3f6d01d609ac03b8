//! How far a waiting sequence is with blocks outside the device.

use crate::kv::tiers::TransferId;

/// How far a waiting sequence is with blocks outside the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Loading {
    /// Nobody has looked.
    #[default]
    Unknown,
    /// It waits for a transfer of its own.
    Own(TransferId),
    /// It waits for some blocks that are read from the disk for it, or loaded while others are read, and looks again
    /// afterwards, not at the disk.
    Reading(TransferId),
    /// What it can have from the disk is on the host, or is being read.
    Read,
    /// It waits for another request's transfer of the block that it needs next, and looks again afterwards.
    Other(TransferId),
    /// There is nothing to load, or it was loaded.
    Done,
}

impl Loading {
    /// The transfer that is waited for.
    pub fn transfer(self) -> Option<TransferId> {
        match self {
            Self::Own(id) | Self::Reading(id) | Self::Other(id) => Some(id),
            Self::Unknown | Self::Read | Self::Done => None,
        }
    }

    /// True if this transfer brings blocks for the sequence itself.
    pub fn is_for(self, id: TransferId) -> bool {
        matches!(self, Self::Own(own) | Self::Reading(own) if own == id)
    }

    /// The state when that transfer has ended.
    pub fn ended(self) -> Self {
        match self {
            Self::Reading(_) => Self::Read,
            Self::Other(_) => Self::Unknown,
            Self::Unknown | Self::Read | Self::Own(_) | Self::Done => Self::Done,
        }
    }
}
