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
}

/// Rows of a launch.
#[derive(Debug, Clone, Copy)]
pub struct PackedRows<'a> {
    /// Their numbers, the first `count` of a list of u32: those of rows that the tensors have.
    pub rows: &'a Tensor,
    /// How many.
    pub count: usize,
    /// Memory of the host for the sums, and the first of four words for each row, on an even place.
    pub sums: (&'a HostWords, usize),
}
