//! The patches of images, as attention of a vision tower takes them.

use crate::heads::BLOCK_SIZE;
use pegainfer_core::tensor::Tensor;

/// Consecutive rows that attend to each other: the patches of an image.
#[derive(Debug, Clone, Copy)]
pub struct Segments<'a> {
    /// Segment `i` has the rows `indptr[i]..indptr[i + 1]`, `[segments + 1]` u32.
    pub indptr: &'a Tensor,
    /// Sum of the squares of their lengths: the number of scores of a head.
    pub scores: u64,
}

/// Where the patches of images are.
#[derive(Debug, Clone, Copy)]
pub struct Grid<'a> {
    /// Cosines and sines; see [`rotate_grid`](crate::ops::vision::rotate_grid()).
    pub table: &'a Tensor,
    /// Row and column of each patch, `[n, 2]` u32.
    pub positions: &'a Tensor,
    /// Places of the patches in blocks of 16, of which every segment begins a new one, `[n]` u32.
    pub slots: &'a Tensor,
    /// The patches of each image.
    pub segments: Segments<'a>,
}

impl Grid<'_> {
    /// Blocks of 16 patches that segments of so many rows take.
    pub fn blocks(rows: impl IntoIterator<Item = usize>) -> usize {
        rows.into_iter().map(|rows| rows.div_ceil(BLOCK_SIZE)).sum()
    }
}

/// Values of a head in the kernel by wgmma, if there is one.
pub(crate) fn wide_head(head_dim: usize) -> Option<usize> {
    match head_dim {
        64 => Some(64),
        65..=128 if head_dim.is_multiple_of(8) => Some(128),
        _ => None,
    }
}
