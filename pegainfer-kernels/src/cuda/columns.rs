//! Where a GEMM writes: a matrix, or some of its columns where the parts of a stacked weight write side by side.

use super::abi::Target;
use crate::choice::Output;
use pegainfer_core::tensor::{DType, Tensor};

/// Columns of a matrix that a GEMM writes, from `first` on.
pub(super) struct Columns<'a> {
    pub tensor: &'a mut Tensor,
    pub first: usize,
}

impl Columns<'_> {
    /// Elements from one row to the next.
    pub fn pitch(&self) -> usize {
        self.tensor.rows_cols().1
    }

    /// Of the first of the columns in a row.
    pub fn address(&self, row: usize) -> u64 {
        let elements = row * self.pitch() + self.first;
        self.tensor.device() + (elements * self.tensor.dtype().size()) as u64
    }

    /// As a kernel takes them.
    pub fn target(&mut self) -> Target<'_> {
        Target::Columns(self.tensor, self.first)
    }

    /// What a GEMM writes there.
    pub fn output(&self) -> Output {
        if self.tensor.dtype() == DType::F32 { Output::F32 } else { Output::Bf16 }
    }
}
