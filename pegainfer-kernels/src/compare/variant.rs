//! Operands of a call that differ from those of its record.

use crate::ops::NO_STATE;
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};
use std::fmt;

/// One of several calls that a record stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    /// As recorded.
    Plain,
    /// Every third row pads a step for a CUDA graph, or is in the cache already: its token has no slot, and it attends to
    /// nothing where it decodes.
    Padded,
    /// Attention of the last layer after a prompt: every third row has no query, and the step wrote keys and values of more
    /// tokens than the queries'.
    SampledRows,
    /// The ways to sample, to report and to adjust, which the rows take in turn: this is how far they are turned.
    Turn(usize),
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => Ok(()),
            Self::Padded => f.write_str(", padded rows"),
            Self::SampledRows => f.write_str(", sampled rows only"),
            Self::Turn(turn) => write!(f, ", turn {turn}"),
        }
    }
}

/// Index of the block tables among what attention reads.
const TABLES: usize = 5;

impl Variant {
    /// Those that a call has.
    pub fn of(record: &OpRecord) -> Vec<Self> {
        let rows = record.reads.first().map_or(0, |operand| operand.shape[0]);
        let one_query = || record.reads.get(TABLES).is_some_and(|tables| tables.shape[0] == rows);
        match record.op {
            "sample" => (0..super::sampling::SAMPLES).map(Self::Turn).collect(),
            "logprobs" => (0..super::sampling::REPORTS).map(Self::Turn).collect(),
            "attention" if one_query() => vec![Self::Plain, Self::SampledRows],
            "decode_attention" | "gated_decode_attention" if rows > 2 => vec![Self::Plain, Self::Padded],
            "qk_norm_rope_write_kv" | "gated_qk_norm_rope_write_kv" | "linear_qkv" if rows > 2 => {
                vec![Self::Plain, Self::Padded]
            }
            "decode_delta" if rows > 2 => vec![Self::Plain, Self::Padded],
            _ => vec![Self::Plain],
        }
    }

    /// The record of the call, whose queries may be fewer.
    pub fn record(self, record: &OpRecord) -> OpRecord {
        let mut record = record.clone();
        if self == Self::SampledRows {
            let queries = (0..record.reads[TABLES].shape[0]).filter(|row| !self.skips(*row)).count();
            record.reads[0].shape[0] = queries;
            record.writes[0].shape[0] = queries;
        }
        record
    }

    /// Whether a row is one of every third that the variant leaves out.
    pub fn skips(self, row: usize) -> bool {
        matches!(self, Self::Padded | Self::SampledRows) && row % 3 == 2
    }

    /// Takes the slots of padded rows from `slots`, which were filled.
    pub fn drop_slots(self, exec: &mut Exec, slots: &mut Tensor) -> Result<(), OpError> {
        let mut ids = vec![0u32; slots.elements()];
        exec.read(slots, 0, &mut ids)?;
        ids.iter_mut().enumerate().filter(|(row, _)| self.skips(*row)).for_each(|(_, slot)| *slot = NO_SLOT);
        exec.fill_rows(slots, &ids)
    }

    /// Takes the state of padded rows from `segments`, of four words each.
    pub fn drop_states(self, segments: &mut [u32]) {
        for (_, segment) in segments.chunks_exact_mut(4).enumerate().filter(|(row, _)| self.skips(*row)) {
            segment[2..].fill(NO_STATE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::record::Operand;
    use pegainfer_core::tensor::DType;

    #[test]
    fn sampled_rows_are_fewer_than_those_of_the_tables() {
        let operand =
            |shape: &[usize]| Operand { id: 0, name: String::new(), shape: shape.to_vec(), dtype: DType::Bf16 };
        let attention = |queries: usize| {
            let reads = [[queries, 64], [9, 64], [9, 64], [8, 1], [7, 1], [7, 2]].map(|shape| operand(&shape)).to_vec();
            OpRecord { op: "attention", kernel: "", reads, writes: vec![operand(&[queries, 64])], bytes: 0, flops: 0 }
        };
        assert_eq!(Variant::of(&attention(20)), [Variant::Plain]);
        assert_eq!(Variant::of(&attention(7)), [Variant::Plain, Variant::SampledRows]);
        let record = Variant::SampledRows.record(&attention(7));
        assert_eq!((record.reads[0].shape[0], record.writes[0].shape[0]), (5, 5));
    }
}
