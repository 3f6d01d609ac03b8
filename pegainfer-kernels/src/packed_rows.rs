//! Rows of several tensors in one place, as [`ops::pack_rows`](crate::ops::pack_rows) takes them.

use pegainfer_core::cuda::HostWords;
use pegainfer_core::tensor::Tensor;

/// Consecutive bytes of packed rows, at most as many as were asked for.
#[derive(Debug)]
pub struct PackSegment {
    /// `[parts, 8]`: address of the part in row 0, bytes from row to row, first byte within the packed rows, bytes.
    pub(crate) parts: Tensor,
    /// First byte within the packed rows.
    pub first: usize,
    /// Number of bytes.
    pub bytes: usize,
    /// Smallest number of rows of the tensors.
    pub(crate) rows: usize,
}

/// Rows of a launch, in words of the host's memory.
#[derive(Debug, Clone, Copy)]
pub struct PackedRows<'a> {
    /// The words.
    pub words: &'a HostWords,
    /// The first of `count` words with the numbers of the rows.
    pub rows: usize,
    /// The first of four words for each row's two sums, on an even place.
    pub sums: usize,
    /// Number of rows.
    pub count: usize,
}
