//! Types of blocks in GGUF files, and the formats that they become.

use crate::weights::grouped::{GroupFormat, GroupScales, Offset, ScaleDType, Values};
use pegainfer_model_files::gguf::TensorType;
use std::fmt;

/// A quantised type that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockType {
    kind: TensorType,
    format: GroupFormat,
}

impl BlockType {
    /// The type of a tensor; `None` if it is not quantised or not served.
    pub fn new(kind: TensorType) -> Option<Self> {
        let int = |bits, offset| GroupFormat::int(bits, 32, ScaleDType::F16, offset);
        let format = match kind {
            TensorType::Q8_0 => int(8, Offset::None),
            TensorType::Q4_0 => int(4, Offset::None),
            TensorType::Q4_1 => int(4, Offset::Min),
            TensorType::Q5_0 => int(5, Offset::None),
            TensorType::Q5_1 => int(5, Offset::Min),
            TensorType::Q4_K => GroupFormat { values: Values::Int { bits: 4 }, scales: GroupScales::K4 },
            TensorType::Q5_K => GroupFormat { values: Values::Int { bits: 5 }, scales: GroupScales::K4 },
            TensorType::Q6_K => GroupFormat { values: Values::Int { bits: 6 }, scales: GroupScales::K6 },
            TensorType::IQ4_NL => GroupFormat { values: Values::Iq4, ..int(4, Offset::None) },
            TensorType::IQ4_XS => GroupFormat { values: Values::Iq4, scales: GroupScales::Xs },
            _ => return None,
        };
        Some(Self { kind, format })
    }

    /// The type in the file.
    pub fn kind(self) -> TensorType {
        self.kind
    }

    /// Format of the rows in memory.
    pub fn format(self) -> GroupFormat {
        self.format
    }

    /// Bytes of a row of `k` columns, a multiple of the block's.
    pub fn row_bytes(self, k: usize) -> usize {
        k / self.kind.block_values() * self.kind.block_bytes()
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}
