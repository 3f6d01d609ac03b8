//! Destination of a GEMM: a matrix, or some of its columns if the parts of a stacked weight write to adjacent columns.

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

    /// Address of the first of the columns in a row.
    pub fn address(&self, row: usize) -> u64 {
        let elements = row * self.pitch() + self.first;
        self.tensor.device() + (elements * self.tensor.dtype().size()) as u64
    }

    /// The destination as a kernel argument.
    pub fn target(&mut self) -> Target<'_> {
        Target::Columns(self.tensor, self.first)
    }

    /// Output type of the GEMM.
    pub fn output(&self) -> Output {
        if self.tensor.dtype() == DType::F32 { Output::F32 } else { Output::Bf16 }
    }
}
