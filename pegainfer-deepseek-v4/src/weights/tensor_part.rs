//! The part of a tensor that a rank holds.

use pegainfer_core::weights::{Columns, SourceTensor};
use std::ops::Range;

/// Edge of the blocks of FP8 weights.
const BLOCK: usize = 128;

/// Rows and columns of a tensor to read; `None` means all.
#[derive(Debug, Clone)]
pub(super) struct TensorPart {
    pub rows: Option<Range<usize>>,
    pub columns: Option<Range<usize>>,
}

impl TensorPart {
    pub const ALL: Self = Self { rows: None, columns: None };

    /// Rows and columns of this part of a matrix.
    pub fn shape(&self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        let len = |range: &Option<Range<usize>>, all| range.as_ref().map_or(all, ExactSizeIterator::len);
        [len(&self.rows, rows), len(&self.columns, columns)]
    }

    /// The rows of this part of a tensor of this shape.
    pub fn rows_of(&self, name: String, shape: &[usize]) -> SourceTensor {
        SourceTensor { name, rows: shape[0], part: self.rows.clone().unwrap_or(0..shape[0]) }
    }

    /// The columns of this part of a matrix of this shape; `None` for a vector.
    pub fn columns_of(&self, shape: &[usize]) -> Option<Columns> {
        let part = |stored: &usize| self.columns.clone().unwrap_or(0..*stored);
        shape.get(1).map(|stored| Columns { stored: *stored, part: part(stored) })
    }

    /// The part of the scales that belongs to this part of an FP8 weight.
    pub fn in_blocks(&self) -> Self {
        let blocks = |range: &Range<usize>| range.start / BLOCK..range.end.div_ceil(BLOCK);
        Self { rows: self.rows.as_ref().map(blocks), columns: self.columns.as_ref().map(blocks) }
    }
}
