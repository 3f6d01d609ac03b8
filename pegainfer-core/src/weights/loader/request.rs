//! Requests for parts of stored tensors.

use super::{Columns, SourceTensor};
use crate::weights::stored::Stored;
use std::ops::Range;
use std::sync::Arc;

/// The part of a stored tensor that a rank needs.
#[derive(Debug, Clone)]
pub(in crate::weights) struct Request<'a> {
    /// Name in the checkpoint.
    pub name: Arc<str>,
    /// The whole tensor.
    pub stored: Stored<'a>,
    /// Bytes of a whole row, as they are read.
    pub row: usize,
    pub rows: Range<usize>,
    /// Bytes of each row.
    pub columns: Range<usize>,
}

impl<'a> Request<'a> {
    /// The part of `stored` given by rows and columns; `None` for the columns of a vector.
    pub fn new(stored: Stored<'a>, part: &SourceTensor, columns: Option<&Columns>) -> Self {
        let element = stored.element();
        let (row, columns) = columns.map_or((1, 0..1), |columns| (columns.stored, columns.part.clone()));
        Self {
            name: part.name.as_str().into(),
            stored,
            row: row * element,
            rows: part.part.clone(),
            columns: columns.start * element..columns.end * element,
        }
    }

    /// Bytes of the part.
    pub fn bytes(&self) -> usize {
        self.rows.len() * self.columns.len()
    }
}
