//! Variants of a call's operands.

use crate::ops::{NO_STATE, SEGMENT_WORDS};
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};
use std::fmt;

/// One of several calls tested for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    /// As recorded.
    Plain,
    /// Every third row is padding for a CUDA graph or already cached: its token has no slot, and in decode ops it
    /// attends to nothing.
    Padded,
    /// Attention of the last layer after a prompt: every third row has no query, and the step wrote keys and values of
    /// more tokens than the queries'.
    SampledRows,
    /// Routing with a shared expert; experts that all tokens share.
    Shared,
    /// The rows take sampling parameters and requested log-probabilities from a list, one after another: an offset into
    /// it.
    Turn(usize),
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => Ok(()),
            Self::Padded => f.write_str(", padded rows"),
            Self::SampledRows => f.write_str(", sampled rows only"),
            Self::Shared => f.write_str(", shared experts"),
            Self::Turn(turn) => write!(f, ", turn {turn}"),
        }
    }
}

/// Index of the block tables among the operands that `attention` reads.
pub(super) const TABLES: usize = 5;

impl Variant {
    /// As recorded, and padded if the call has a third row.
    pub fn with_padding(record: &OpRecord) -> Vec<Self> {
        let rows = record.reads.first().map_or(0, |operand| operand.shape[0]);
        if rows > 2 { vec![Self::Plain, Self::Padded] } else { vec![Self::Plain] }
    }

    /// Record of the call, possibly with fewer queries.
    pub fn record(self, record: &OpRecord) -> OpRecord {
        let mut record = record.clone();
        if self == Self::SampledRows {
            let queries = (0..record.reads[TABLES].shape[0]).filter(|row| !self.skips(*row)).count();
            record.reads[0].shape[0] = queries;
            record.writes[0].shape[0] = queries;
        }
        record
    }

    /// True if the variant skips this row, one of every third.
    pub fn skips(self, row: usize) -> bool {
        matches!(self, Self::Padded | Self::SampledRows) && row % 3 == 2
    }

    /// Removes the slots of padded rows from `slots`, which were filled.
    pub fn drop_slots(self, exec: &mut Exec, slots: &mut Tensor) -> Result<(), OpError> {
        let mut ids = vec![0u32; slots.elements()];
        exec.read(slots, 0, &mut ids)?;
        ids.iter_mut().enumerate().filter(|(row, _)| self.skips(*row)).for_each(|(_, slot)| *slot = NO_SLOT);
        exec.fill_rows(slots, &ids)
    }

    /// Takes the state of padded rows from `segments`, of [`SEGMENT_WORDS`] each.
    pub fn drop_states(self, segments: &mut [u32]) {
        for (_, segment) in segments.chunks_exact_mut(SEGMENT_WORDS).enumerate().filter(|(row, _)| self.skips(*row)) {
            segment[2..].fill(NO_STATE);
        }
    }
}
